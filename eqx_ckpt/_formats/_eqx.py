"""`.eqx` files of Equinox: `.npy` records in the order of a tree, and no names.

Before them there may be a line of JSON, as in the recipe of Equinox's documentation for
hyperparameters.
"""

import math

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _json, _names, _template, _text
from .._kernel._load._source import Source
from .._kernel._tree import _flatten, _folding, _leaf, _states, _target
from .._kernel._tree._flatten import Flat
from .._zips import _probe
from .._zips._probe import Probe
from .._zips._window import Window
from . import _foreign_index, _numpy
from ._foreign_index import ForeignLeaf
from ._numpy import NpyHeader


_MAGIC = _numpy.MAGIC + b"\x01\x00"
_MAX_LINE = 2**20
_WINDOW = 2**12  # Small leaves share one.
_SHOWN = 12  # So many records are shown of a file without its tree.
_CURE = (
    ". Its leaves go by position, so `like` must have the sizes and the order of the "
    "tree that was saved"
)


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of a `.eqx` file, whose records are those of the leaves of `like`."""
    key = probe.key
    if key is None:
        return None
    line = _line(probe, key)
    if line is None and not probe.has_suffix(".eqx"):
        return None
    if like is None:
        raise ValueError(
            "it is a `.eqx` file, whose leaves have no names: their order is all there "
            "is. Pass `like=`, a tree of the structure that was saved"
            f"{_contents(probe, key, line)}"
        )
    if line is None:
        raise ValueError("it has no records of arrays: it is no `.eqx` file")
    metadata = _json.parse(line, "its first line") if line else None
    flat = _flatten.flatten(like, None)
    window = Window(probe.directory, key, np.empty(_WINDOW, np.uint8))
    found = _leaves(window, len(line) + 1 if line else 0, flat)
    entries = _states.state_entries(flat)
    places = {number: place for place, number in enumerate(found)}
    labels = {places[n]: x.label for n, x in entries.items() if n in places}
    leaves = list(found.values())
    return _foreign_index.source(
        probe, "eqx", [key], leaves, metadata=metadata, labels=labels
    )


def _leaves(window: Window, at: int, flat: Flat) -> dict[int, ForeignLeaf]:
    """The leaves of `like`, by their numbers in it, whose records follow each other
    from `at` on."""
    leaves: dict[int, ForeignLeaf] = {}
    for number, (path, leaf) in enumerate(zip(flat.paths, flat.leaves)):
        if not _leaf.is_own(leaf):
            continue
        name, keys = _names.name_of(path)
        target = _target.target_of(leaf)
        if target.kind == "key":
            raise ValueError(
                f"`like` has a typed PRNG key, `{name}`, which Equinox does not save"
            )
        # `like` says what a record of unnamed bytes is, and no more than that.
        dtype = target.dtype or np.dtype(_template.SCALAR_KINDS[target.kind])
        header = _header(window, at, name, len(leaves))
        known, wanted = _template.dtype_of(dtype.name), target.shape
        if header.dtype != known.str.replace("|", "<") or header.shape != wanted:
            shown = f"{_folding.short_array(dtype.name, wanted)}, `{name}`"
            if header.dtype.startswith(">"):
                raise ValueError(
                    f"the record {len(leaves)} of it, where `like` has {shown}, has "
                    f"the dtype {header.dtype!r}, whose bytes are in the order of "
                    "other machines: load it with Equinox"
                )
            raise _mismatch_error(header, len(leaves), shown)
        t = _foreign_index.template(target.kind, dtype.name, wanted, keys)
        at = header.stop
        leaves[number] = ForeignLeaf(name, t, 0, at, header.strides)
        at += t.nbytes
    if window.read_range(at, at + 1).size:
        raise ValueError(
            f"it has more than the {len(leaves)} records that `like` has leaves: it is "
            f"of another tree{_CURE}"
        )
    return leaves


def _line(probe: Probe, key: str) -> bytes | None:
    """The bytes before the records: b"" or a line of JSON. None: there are none."""
    if probe.head.startswith(_MAGIC):
        return b""
    if probe.head[:1] not in (b"{", b"["):
        return None
    data = _probe.first_bytes(probe.directory, key, _MAX_LINE)
    line, end, rest = data.partition(b"\n")
    return line if end and (rest.startswith(_MAGIC) or not rest) else None


def _contents(probe: Probe, key: str, line: bytes | None) -> str:
    """Describes a file as far as that needs no tree: sentences of a message."""
    if line is None:
        return ""
    text = line.decode("utf-8", "replace")
    first = f". Its first line is `{_text.bounded(text, 500)}`" if line else ""
    window = Window(probe.directory, key, np.empty(_WINDOW, np.uint8))
    at, shown = len(line) + 1 if line else 0, []
    while window.read_range(at, at + 1).size and len(shown) <= _SHOWN:
        try:
            header = _numpy.read_header(window, at, "a record of it")
            size = np.dtype(header.dtype).itemsize
        except (TypeError, ValueError):
            break
        shown.append(_shown(header))
        at = header.stop + size * math.prod(header.shape)
    more = " and more" if len(shown) > _SHOWN else ""
    return f"{first}. Its records are {', '.join(shown[:_SHOWN])}{more}"


def _header(window: Window, at: int, name: str, number: int) -> NpyHeader:
    which = f"the record {number} of it, which should be `{name}`,"
    if not window.read_range(at, at + 1).size:
        raise ValueError(
            f"it has {number} records, and `like` has more leaves, from `{name}` on: "
            f"it is of another tree{_CURE}"
        )
    return _numpy.read_header(window, at, which)


def _mismatch_error(header: NpyHeader, number: int, wanted: str) -> ValueError:
    return ValueError(
        f"the record {number} of it is {_shown(header)}, where `like` has {wanted}: it "
        f"is of another tree, or in another order{_CURE}"
    )


def _shown(header: NpyHeader) -> str:
    try:
        saved = np.dtype(header.dtype)
    except TypeError:
        return header.dtype
    name = saved.name
    if saved.kind == "V":
        name = f"{8 * saved.itemsize} bits" if saved.itemsize else "records"
    return _folding.short_array(name, header.shape)
