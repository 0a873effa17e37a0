"""`.npy`, one array of NumPy's; and `.npz`, a zip of them.

https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import itertools as it
import math
import operator
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _template
from .._kernel._format._leaves import Unreadable
from .._kernel._load._source import Source
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend
from .._zips import _zip
from .._zips._probe import Probe
from .._zips._window import Window
from .._zips._zip import Zip
from . import _foreign_index
from ._foreign_index import ForeignLeaf, names_of, names_of_paths


MAGIC = b"\x93NUMPY"
# NumPy writes this, and pads it with spaces to a multiple of 64 bytes.
_pattern = re.compile(
    rb"\{ *'descr': *"
    rb"(?:'([<>|=]?[A-Za-z][0-9]*(?:\[[0-9A-Za-z]*\])?)'|(\[[^\0-\x1f]*\])), *"
    rb"'fortran_order': *(True|False), *"
    rb"'shape': *\(([0-9L, ]*)\) *(?:, *)?\} *\n?"
)
# Python 2 wrote long integers with an `L`.
_number = re.compile(rb" *([0-9]{1,19})L? *")
_MAX = 2**16  # Nobody describes an array in more bytes.
SUFFIX = ".npy"
_WINDOW = 2**8  # Of a header, which mostly has 128 bytes.
_SAVE = (
    "save `ec.nest(dict(np.load(path)))`, without what is no array of numbers, with "
    "`ec.tree_serialise_leaves`"
)
# Kinds of dtypes of NumPy's that are none of numbers.
_KINDS = {
    "O": "of Python's objects, which NumPy pickles: reading it may run code",
    "U": "of texts",
    "S": "of texts",
    "M": "of dates",
    "m": "of times",
    "V": "of bytes that NumPy knows no dtype of, as it records none of `ml_dtypes`, "
    "such as bfloat16 (`x.view(ml_dtypes.bfloat16)` has it again)",
}


class NpyHeader(NamedTuple):
    """The header of an array, whose data begin at `stop`. `dtype` is in NumPy's
    notation, and begins with "<" unless with ">"; it is "<V" for one of records."""

    dtype: str
    is_fortran: bool
    shape: tuple[int, ...]
    stop: int

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The steps along each axis, in elements; None: in the order of C."""
        # Of very many axes they would take long, and none such is read.
        if not self.is_fortran or not 2 <= len(self.shape) <= _template.MAX_RANK:
            return None
        if not math.prod(self.shape):
            return None
        return tuple(it.accumulate(self.shape[:-1], operator.mul, initial=1))


def read_header(window: Window, at: int, which: str) -> NpyHeader:
    """The header at a place in a file.

    **Raises:** `ValueError` about `which` array, for one that NumPy does not write.
    """
    head = window.read_range(at, at + 12).tobytes()
    if len(head) < 10 or not head.startswith(MAGIC) or head[6] not in (1, 2, 3):
        raise ValueError(f"{which} does not begin as an array of NumPy's does")
    start = at + (10 if head[6] == 1 else 12)
    size = int.from_bytes(head[8 : start - at], "little")
    header = None
    if size <= _MAX:
        header = _pattern.fullmatch(window.read_range(start, start + size).tobytes())
    lengths = [] if header is None else header[4].split(b",")
    if lengths and not lengths[-1].strip():
        lengths.pop()  # After the comma of a tuple; or there are none.
    found = list(map(_number.fullmatch, lengths))
    if header is None or not all(found):
        raise ValueError(f"{which} has a header that NumPy does not write")
    shape = tuple(int(x[1]) for x in found if x)
    text = (header[1] or b"V").decode()
    dtype = text if text[0] == ">" else "<" + text.lstrip("<|=")
    return NpyHeader(dtype, header[3] == b"True", shape, start + size)


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of a `.npy` file: a tree that is one leaf."""
    key = probe.key
    is_array = probe.head.startswith(MAGIC) and not probe.has_suffix(".eqx")
    if key is None or not (is_array or probe.has_suffix(SUFFIX)):
        return None
    header = _header(probe.directory, key, 0, "it")
    ((name, keys),) = names_of_paths([[]])
    leaf = _leaf(header, name, keys)
    # Other arrays may follow, as `np.save` to one open file writes them.
    is_read = leaf.value is None
    if is_read and probe.directory.read_into(key, leaf.stop, np.empty(1, np.uint8)):
        raise ValueError("it has more bytes than its array")
    return _foreign_index.source(probe, "npy", [key], [leaf])


def open_zip(probe: Probe, archive: Zip) -> Source | None:
    """The source of a `.npz` file: a leaf for each array in it."""
    directory, key, members, _ = archive
    if not all(name.endswith(SUFFIX) for name in members):
        return None
    packed = [name for name, member in members.items() if not member.is_plain]
    if packed:
        raise ValueError(
            f"`{packed[0]}` in it is compressed, as `np.savez_compressed` does it, and "
            f"no part of it can be read alone. Write it with `np.savez`, or {_SAVE}"
        )
    places = _zip.places(archive, list(members))
    flat = [name.removesuffix(SUFFIX) for name in members]

    def read(place: tuple[int, int], name: str) -> NpyHeader:
        return _header(directory, key, place[0], f"the array {name!r:.60}")

    headers = _store.each(directory, read, places, flat)
    # Names are paths, where nobody has dots in them.
    is_path = any("/" in name for name in flat) and not any("." in n for n in flat)
    named = names_of(flat, "/" if is_path else ".")
    leaves: list[ForeignLeaf] = []
    for (name, keys), one, (_, stop) in zip(named, headers, places):
        leaf = _leaf(one, name, keys)
        if leaf.value is None and leaf.stop != stop:
            raise ValueError(f"the array `{name}` is not of the size of its shape")
        leaves.append(leaf)
    return _foreign_index.source(probe, "npz", [key], leaves)


def _header(directory: Backend, key: str, at: int, which: str) -> NpyHeader:
    window = Window(directory, key, np.empty(_WINDOW, np.uint8))
    return read_header(window, at, which)


def _leaf(header: NpyHeader, name: str, keys: str) -> ForeignLeaf:
    dtype, _, shape, start = header
    what = f"{dtype.lstrip('<')}[{','.join(map(str, shape))}]"
    try:
        known = np.dtype(dtype).name
    except TypeError:
        known = dtype
    why = ""
    if dtype[1:2] not in tuple("biufc"):
        kind = _KINDS.get(dtype[1:2], f"of the dtype {dtype!r}")
        kind = "of records with fields" if dtype == "<V" else kind
        why = f"it is an array {kind}. Load it with NumPy, and {_SAVE}"
    elif dtype[0] == ">":
        why = (
            f"it has the dtype {dtype!r}, whose bytes are in the order of other "
            f"machines. Save `x.astype({'<' + dtype[1:]!r})` with NumPy"
        )
    elif known not in _template.STORED:
        why = f"it has the dtype {known!r}, which is not read here"
    if why:
        value = Unreadable(what, why, dtype[1:2] not in tuple("OUS"))
        return _foreign_index.leaf_of(name, keys, value)
    what = name, keys, known, shape
    return _foreign_index.array_leaf(*what, offset=start, strides=header.strides)
