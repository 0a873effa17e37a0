"""The header of an array in `.npy`, as NumPy writes it.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import itertools as it
import math
import operator
import re
from typing import NamedTuple

from .._window import Window


MAGIC = b"\x93NUMPY"
# NumPy writes this, and pads it with spaces to a multiple of 64 bytes.
_pattern = re.compile(
    rb"\{ *'descr': *(?:'([<>|=]?[A-Za-z][0-9]*(?:\[[0-9A-Za-z]*\])?)'|(\[[ -~]*\])), *"
    rb"'fortran_order': *(True|False), *"
    rb"'shape': *\(([0-9, ]*)\) *(?:, *)?\} *\n?"
)
_number = re.compile(rb" *[0-9]{1,19} *")
_MAX = 2**16  # Nobody describes an array in more bytes.


class NpyHeader(NamedTuple):
    """What is before the data of an array, which begin at `stop`. `dtype` is in NumPy's
    notation, without what says that the order of bytes does not matter; "<V" for one of
    records."""

    dtype: str
    is_fortran: bool
    shape: tuple[int, ...]
    stop: int

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The steps along each axis, in elements; None: in the order of C."""
        if not self.is_fortran or len(self.shape) < 2 or not math.prod(self.shape):
            return None
        return tuple(it.accumulate(self.shape[:-1], operator.mul, initial=1))


def read(window: Window, at: int) -> NpyHeader | None:
    """The header at a place in a file; None if nothing begins there as one does.

    **Raises:** `ValueError` for one that NumPy does not write.
    """
    head = window.read(at, at + 12).tobytes()
    if len(head) < 10 or not head.startswith(MAGIC) or head[6] not in (1, 2, 3):
        return None
    start = at + (10 if head[6] == 1 else 12)
    size = int.from_bytes(head[8 : start - at], "little")
    header = None
    if size <= _MAX:
        header = _pattern.fullmatch(window.read(start, start + size).tobytes())
    lengths = [] if header is None else header[4].split(b",")
    if lengths and not lengths[-1].strip():
        lengths.pop()  # After the comma of a tuple; or there are none.
    if header is None or not all(map(_number.fullmatch, lengths)):
        raise ValueError("has a header that NumPy does not write")
    shape = tuple(map(int, lengths))
    dtype = (header[1] or b"<V").decode().replace("|", "<")
    return NpyHeader(dtype, header[3] == b"True", shape, start + size)
