"""Templates: what a stored leaf is, and what its bytes are."""

import contextlib
import functools as ft
import math
import re
from typing import NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from . import _blosc, _grid


ARRAY_KINDS = ("jax", "numpy", "generic")
SCALAR_KINDS = {
    "bool": "bool",
    "int": "int64",
    "float": "float64",
    "complex": "complex128",
}
KINDS = (*ARRAY_KINDS, *SCALAR_KINDS, "key", "str", "bytes")
MAX_RANK = 32
MAX_BYTES = 2**60
MAX_CHUNKS = 2**16  # Of one array.
# What a codec makes of one byte at most.
_MAX_RATIO = 2**15
# The codecs that TensorStore's zarr3 driver decodes.
_ZARR_CODECS = (None, *_blosc.CODECS)
# The codecs of chunks: as yet the same. `lacks_codec` tells of one that is not there.
_CODECS = _ZARR_CODECS
# What TensorStore's zarr3 driver holds. Other dtypes are stored as bytes.
STORED = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn "
    "float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 complex64 "
    "complex128".split()
)


# Types of numbers that NumPy has itself, with their bits in the name.
_PLAIN = ("int", "uint", "float", "complex")


@ft.cache
def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a name such as `float32` or `bfloat16`.

    **Raises:** `ValueError` for a name that is no dtype of numbers.
    """
    if name == "float0":
        return np.dtype([("float0", "V")])
    if name == "bool" or name.rstrip("0123456789") in _PLAIN:
        try:
            return np.dtype(name)
        except TypeError:
            pass
    kind = getattr(ml_dtypes, name, None)
    if not isinstance(kind, type) or not issubclass(kind, np.generic):
        raise ValueError(f"{name!r} is not the name of a dtype")
    return np.dtype(kind)


class Template(NamedTuple):
    """The common properties of leaves that differ only in name and place.

    `keys` has a letter for each key of the leaf's path: "a" for an attribute, "s" for a
    place in a sequence, and so on, as FORMAT.md says. `dtype` is what the leaf is
    (`float0`, `uint4`, `key`), `stored` what its bytes are stored as; `shape` and
    `chunk` are those of the stored array.
    """

    keys: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    chunk: tuple[int, ...]
    weak: bool = False
    impl: str | None = None
    codec: str | None = None

    @property
    def itemsize(self) -> int:
        return dtype_of(self.stored).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def chunk_count(self) -> int:
        return math.prod(_grid.grid(self.shape, self.chunk))

    @property
    def full(self) -> int:
        """The bytes of a chunk, with its padding."""
        return math.prod(self.chunk) * self.itemsize

    def block_of(self, chunk: int) -> int:
        """The number of the first digest of a chunk among those of the leaf; of the
        chunk after the last one, how many these are."""
        if self.full <= _grid.BLOCK:
            return chunk
        return _grid.lay(self.shape, self.chunk, self.itemsize).blocks[chunk]

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the leaf: without the words of a key or the bytes of a str."""
        if self.kind in ("key", "str", "bytes") or self.dtype == "int":
            return self.shape[:-1]
        return self.shape


# The name of an implementation of PRNG keys. It is printed.
_impl = re.compile(r"[ -~]{1,200}")


def check_template(template: Template) -> tuple[int, int]:
    """The number of chunks, and the bytes of one. **Raises:** `ValueError` for what
    cannot be."""
    keys, kind, dtype, shape, stored, chunk, weak, impl, codec = template
    texts = (keys, kind, dtype, stored)
    if {*map(type, texts)} != {str} or type(weak) is not bool:
        raise ValueError("malformed template")
    if type(impl) is not (str if kind == "key" else type(None)):
        raise ValueError("malformed template")
    if codec not in _CODECS:
        raise ValueError(f"unknown codec {codec!r}")
    if weak and kind != "jax" or impl is not None and not _impl.fullmatch(impl):
        raise ValueError("malformed template")
    if kind not in KINDS:
        raise ValueError(f"unknown kind of leaf {kind!r}")
    for numbers, least in ((shape, 0), (chunk, 1)):
        is_possible = map(range(least, MAX_BYTES).__contains__, numbers)
        if not ({*map(type, numbers)} <= {int} and all(is_possible)):
            raise ValueError(f"impossible shape or chunks {list(numbers)!r}")
    if not len(shape) == len(chunk) <= MAX_RANK:
        raise ValueError(f"impossible rank {len(shape)}")
    if stored not in STORED:
        raise ValueError(f"unknown stored dtype {stored!r}")
    count = math.prod(_grid.grid(shape, chunk))
    full = math.prod(chunk) * dtype_of(stored).itemsize
    if max(count, 1) * full > MAX_BYTES:
        raise ValueError(f"impossible size {list(shape)!r}")
    if count > MAX_CHUNKS:
        raise ValueError(f"more than {MAX_CHUNKS} chunks of {list(chunk)!r}")
    if codec in _blosc.CODECS and full > _blosc.MAX_BYTES:
        raise ValueError(f"chunks {list(chunk)!r} that are too large for Blosc")
    for n, c in zip(shape, chunk):
        if c > max(1, n):
            raise ValueError(f"chunks {list(chunk)!r} of an array {list(shape)!r}")
    if (kind, dtype) in (("str", "str"), ("bytes", "bytes"), ("int", "int")):
        fits = stored == "uint8" and len(shape) == 1
    elif kind == "key":
        fits = dtype == "key" and stored == "uint32" and len(shape) >= 1
    elif kind in SCALAR_KINDS:
        fits = dtype == stored == SCALAR_KINDS[kind] and shape == ()
    elif kind not in ARRAY_KINDS or (kind == "generic" and shape != ()):
        fits = False
    elif dtype == "float0":
        fits = stored == "bool"
    elif dtype in STORED:
        fits = stored == dtype
    else:
        fits = stored == "uint8" and dtype_of(dtype).itemsize == 1
    if not fits:
        raise ValueError(f"{kind} of {dtype!r} cannot be stored as {stored!r}")
    return count, full


def lacks_codec(template: Template) -> str:
    """Says that TensorStore cannot decode an array; "" if it can."""
    is_known = template.codec in _ZARR_CODECS
    return "" if is_known else f"it has no codec {template.codec!r}"


N = TypeVar("N", int, np.ndarray)


def least_encoded(size: N) -> N:
    """The fewest bytes that a codec can make of so many."""
    return -(-size // _MAX_RATIO)


def most_encoded(full: N) -> N:
    """The most bytes that a codec makes of so many."""
    return full + full // 128 + 2**17


# By the kinds of NumPy; a time span is an integer there.
_TYPES = dict(b="bool", i="int", u="int", m="int", f="float", c="complex")


def number_type(dtype: np.dtype) -> str:
    """The Python type of the elements: "bool", "int", "float", "complex", or "none"."""
    # The dtype of typed PRNG keys has no kind.
    if (kind := getattr(dtype, "kind", "")) in _TYPES:
        return _TYPES[kind]
    # NumPy has no kind for the dtypes of `ml_dtypes`.
    for name, info in (("int", ml_dtypes.iinfo), ("float", ml_dtypes.finfo)):
        with contextlib.suppress(ValueError, TypeError):
            info(dtype)
            return name
    return "none"


def bits(dtype: np.dtype) -> int:
    """The bits of a number: of some dtypes less than the byte that it lies in."""
    kind = number_type(dtype)
    if dtype.itemsize > 1 or kind not in ("int", "float"):
        return 8 * dtype.itemsize
    return (ml_dtypes.iinfo if kind == "int" else ml_dtypes.finfo)(dtype).bits


def is_floating(dtype: np.dtype) -> bool:
    return number_type(dtype) == "float"
