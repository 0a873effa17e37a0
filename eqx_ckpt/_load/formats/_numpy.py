"""`.npy`, one array of NumPy's; and `.npz`, a zip of them."""

from typing import Any

import numpy as np

from ..._format import _template
from ..._format._leaves import Unreadable
from ..._storage._backend import Backend
from .._source import Source
from .._window import Window
from . import _found, _npy, _zip
from ._found import Candidate, Contents, Located
from ._npy import NpyHeader
from ._zip import Zip


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


def read(found: Candidate, like: Any) -> Source | None:
    """The source of a `.npy` file: a tree that is one leaf."""
    key = found.key
    is_array = found.head.startswith(_npy.MAGIC) and not found.has_suffix(".eqx")
    if key is None or not (is_array or found.has_suffix(SUFFIX)):
        return None
    header = _header(found.directory, key, 0, "it")
    ((name, keys),) = _found.names_of_paths([[]])
    leaf = _located(header, name, keys)
    if isinstance(leaf, Unreadable):
        raise ValueError(leaf.why)
    # Other arrays may follow, as `np.save` to one open file writes them.
    end = leaf.offset + leaf.template.nbytes
    if found.directory.read_into(key, end, np.empty(1, np.uint8)):
        raise ValueError("it has more bytes than its array")
    return _found.source(found, Contents("npy", [key], [leaf]))


def read_zip(found: Candidate, archive: Zip) -> Source | None:
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
    files = list(members)
    places = _zip.places(archive, files)
    flat = [name.removesuffix(SUFFIX) for name in files]

    def header(directory: Backend, i: int) -> NpyHeader:
        return _header(directory, key, places[i][0], f"the array {flat[i]!r:.60}")

    headers = _found.each(directory, header, range(len(files)))
    # Names are paths, where nobody has dots in them.
    is_path = any("/" in name for name in flat) and not any("." in n for n in flat)
    named = _found.names_of(flat, "/" if is_path else ".")
    leaves: list[Located] = []
    stored: dict[int, Any] = {}
    for (name, keys), one, (_, stop) in zip(named, headers, places):
        leaf = _located(one, name, keys)
        if isinstance(leaf, Unreadable):
            _found.add(leaves, stored, name, keys, leaf)
            continue
        if leaf.offset + leaf.template.nbytes != stop:
            raise ValueError(f"the array `{name}` is not of the size of its shape")
        leaves.append(leaf)
    return _found.source(found, Contents("npz", [key], leaves, stored=stored))


def _header(directory: Backend, key: str, at: int, which: str) -> NpyHeader:
    window = Window(directory, key, np.empty(_WINDOW, np.uint8))
    try:
        header = _npy.read(window, at)
    except ValueError as e:
        raise ValueError(f"{which} {e}") from e
    if header is None:
        raise ValueError(f"{which} does not begin as an array of NumPy's does")
    return header


def _located(header: NpyHeader, name: str, keys: str) -> Located | Unreadable:
    dtype, _, shape, start = header
    what = f"{dtype.lstrip('<')}[{','.join(map(str, shape))}]"
    if dtype[1:2] not in tuple("biufc"):
        kind = _KINDS.get(dtype[1:2], f"of the dtype {dtype!r}")
        kind = "of records with fields" if dtype == "<V" else kind
        why = f"it is an array {kind}. Load it with NumPy, and {_SAVE}"
        return _found.unreadable(what, why, dtype[1:2] not in tuple("OUS"))
    if dtype[0] == ">":
        why = (
            f"it has the dtype {dtype!r}, whose bytes are in the order of other "
            f"machines. Save `x.astype({'<' + dtype[1:]!r})` with NumPy"
        )
        return _found.unreadable(what, why, True)
    try:
        known = np.dtype(dtype).name
    except TypeError:
        known = dtype
    if known not in _template.STORED:
        why = f"it has the dtype {known!r}, which is not read here"
        return _found.unreadable(what, why, True)
    if len(shape) > _template.MAX_RANK:
        return _found.too_many_axes(f"{known}[...]", len(shape))
    template = _found.template(_found.kind_of(known), known, shape, keys)
    return Located(name, template, 0, start, header.strides)
