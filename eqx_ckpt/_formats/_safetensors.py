"""`.safetensors`: one file, or several with an index in JSON, as on Hugging Face.

A file is the length of its header (8 bytes), the header in JSON, and the tensors.
"""

import collections
import itertools as it
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import (
    _grid,
    _json,
    _names,
    _schema,
    _state_labels,
    _template,
)
from .._kernel._format._record import Attributes
from .._kernel._format._state_labels import Label
from .._kernel._load._source import Source
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend
from .._zips._probe import Probe
from . import _foreign_index
from ._foreign_index import are_texts, ForeignLeaf, is_texts, names_of, natural_order
from ._pieces import Piece, PiecedArray


DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
# Of four bits, two in a byte. Nobody has said how those of six bits are packed.
_PACKED = {"F4": "float4_e2m1fn"}
METADATA = "__metadata__"
# In the metadata: which entry of an `eqx.nn.State` a tensor is of, as in an index of
# ours, in JSON. Positions would not say it.
LABELS = "eqx_ckpt.state"
# In the metadata: the attributes that children of nodes without keys are, by the name
# of each node and by the last part of theirs, in JSON. Positions would not say it.
ATTRIBUTES = "eqx_ckpt.attributes"
SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
# In the metadata of a file of `torch.distributed`: where its parts of tensors begin.
_SHARDING = "DCP_SHARDING_INFO"
# Headers are read whole. That of the largest model there is has some MiB.
_MAX_HEADER = _json.MAX_INDEX
_MAX_HEADERS = 4 * _MAX_HEADER
# The name of a file that is one of several, or of one.
_part = re.compile(r"-\d+-of-\d+\.safetensors$")
# The same weights once more, by the names of those who publish them, such as Mistral.
_AGAIN = "consolidated.safetensors"
_shard = re.compile(r"-\d+-of-0*([2-9]|1\d)\d*\.safetensors$")
# The name of what one process of many has written.
_of_process = re.compile(r"shard-([0-9]{1,9})-")
# A file beside the index: never a path.
_file = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")


_READ = DTYPES | _PACKED


class TensorEntry(NamedTuple):
    """The entry of a tensor in a header, with its offset in the file."""

    dtype: str
    shape: list[int]
    offset: int


class Header(NamedTuple):
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] | None
    data: bytes


def open_source(probe: Probe, like: PyTree) -> Source | None:
    """The source of a file, of an index, or of a directory with one of them in it."""
    key = probe.key
    if key is None:
        key = _choose(probe.names)
        if key is None:
            return None
        if key.endswith(_INDEX):
            files = (name for name in probe.names if name.endswith(SUFFIX))
            known = lambda name: name == _AGAIN or _part.search(name)
            return _sharded(probe, key, [x for x in files if not known(x)])
        if _of_process.match(key):
            files = [x for x in probe.names if x.endswith(SUFFIX)]
            return _pieced(probe, sorted(files))
    elif probe.has_suffix(_INDEX):
        return _sharded(probe, key)
    elif not (is_safetensors(probe) or probe.has_suffix(SUFFIX)):
        return None
    headers = _headers(probe, [key], f"`{key}`")
    _check_whole(key, headers[0])
    return _source(probe, [key], headers)


def _choose(names: frozenset[str]) -> str | None:
    """The one file of a directory that says what is in it; or one of many processes."""
    for suffix in (_INDEX, SUFFIX):
        some = sorted(name for name in names if name.endswith(suffix))
        if suffix == SUFFIX and some and all(map(_of_process.match, some)):
            return some[0]
        if some and all(map(_shard.search, some)):
            raise ValueError(
                f"`{some[0]}` is one of several files, and there is no `*{_INDEX}` "
                "that says what is in the others. Its own path opens it alone"
            )
        if len(some) > 1:
            raise _foreign_index.several(some[0], some[1])
        if some:
            return some[0]
    return None


def is_safetensors(probe: Probe) -> bool:
    """Whether a file begins as one of these."""
    head = probe.head
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32


def _header_size(directory: Backend, key: str) -> int:
    size = int.from_bytes(_store.read_bytes(directory, key, 0, 8), "little")
    if size > _MAX_HEADER:
        raise ValueError(
            f"the header of `{key}` would have {size} bytes, and at most {_MAX_HEADER} "
            "are read: it is damaged, or no `.safetensors` file"
        )
    return size


def _read_header(directory: Backend, key: str, size: int) -> Header:
    """**Raises:** `ValueError` unless the header accounts for all bytes of the file."""
    directory.check_range(key, 8 + size)
    data = _store.read_bytes(directory, key, 8, 8 + size)
    # The library takes a key of the metadata twice, and fields that it does not know.
    value = _json.parse(data, f"the header of `{key}`", repeated=are_texts)
    if type(value) is not dict:
        raise ValueError(f"the header of `{key}` is not a JSON object")
    metadata = value.pop(METADATA, None)
    if metadata is not None and not is_texts(metadata):
        raise ValueError(f"`{METADATA}` in `{key}` is not an object of strings")
    tensors: dict[str, TensorEntry] = {}
    spans = []
    for name, entry in value.items():
        _check_entry(name, entry)
        start, stop = entry["data_offsets"]
        tensors[name] = TensorEntry(entry["dtype"], entry["shape"], 8 + size + start)
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ValueError(
                f"the bytes of the tensor {name!r} do not begin where those before end"
            )
        end = stop
    stop = 8 + size + end
    directory.check_range(key, stop)
    if directory.read_into(key, stop, np.empty(1, np.uint8)):
        raise ValueError(f"`{key}` has more bytes than its header says")
    return Header(tensors, metadata, data)


def _check_whole(key: str, header: Header) -> None:
    """**Raises:** `ValueError` for a file of which each tensor may be a part of one,
    from an offset on."""
    if _SHARDING in (header.metadata or {}):
        some = f", such as {min(header.tensors)!r:.100}," if header.tensors else ""
        raise ValueError(
            f"`{key}` is what one process of `torch.distributed` has of a checkpoint: "
            f"its tensors{some} may be parts of larger ones (`{_SHARDING}` in its "
            "metadata). Open the directory, with the files of all processes"
        )


def _starts(key: str, header: Header) -> dict[str, tuple[int, ...]]:
    """The first elements of what a file of one process has of its tensors.

    **Raises:** `ValueError` unless it says that of each.
    """
    given = (header.metadata or {}).get(_SHARDING)
    if given is None:
        return {name: (0,) * len(x.shape) for name, x in header.tensors.items()}
    value = _json.parse(given.encode(), f"`{_SHARDING}` in `{key}`")
    out = {}
    for name, tensor in header.tensors.items():
        row = value.get(name) if type(value) is dict else None
        start: Any = row.get("saved_offsets") if type(row) is dict else None
        if not _schema.fits(start, [int]) or len(start) != len(tensor.shape):
            raise ValueError(
                f"`{_SHARDING}` in `{key}` does not say where its {name!r:.100} begins"
            )
        if not _schema.fits(start, [range(_template.MAX_BYTES)]):
            raise ValueError(f"the part of {name!r:.100} in `{key}` begins nowhere")
        out[name] = tuple(start)
    return out


def _pieced(probe: Probe, files: list[str]) -> Source:
    """The source of the files of all processes of `torch.distributed`.

    **Raises:** `ValueError` for a number that is missing between others. Nothing says
    which is the last.
    """
    numbers = {int(found[1]) for x in files if (found := _of_process.match(x))}
    if numbers != set(range(1, 1 + len(numbers))):
        missing = next(i for i in it.count(1) if i not in numbers)
        raise ValueError(
            f"there is no `shard-{missing:05}-...` in it, and there is "
            f"`{files[-1]}`. The files of all processes have to be there"
        )
    headers = _headers(probe, files, "the directory")
    first, *rest = [_without(x.metadata, _SHARDING, _VERSION) for x in headers]
    if any(x != first for x in rest):
        raise ValueError("its files differ in their metadata: open them one by one")
    return _source(probe, files, headers)


class TensorPart(NamedTuple):
    """The part of a tensor that a file has, and its first element."""

    file: int
    start: tuple[int, ...]
    tensor: TensorEntry


def _whole(name: str, parts: Sequence[TensorPart]) -> tuple[int, ...]:
    """The shape of a tensor, of its parts.

    **Raises:** `ValueError` unless they are of one dtype and rank, and each of its
    elements is in one of them.
    """
    starts = [part.start for part in parts]
    shapes = [tuple(part.tensor.shape) for part in parts]
    if len(parts) == 1 and not any(starts[0]):
        return shapes[0]
    if len({(x.tensor.dtype, len(x.start)) for x in parts}) > 1:
        raise ValueError(f"the parts of {name!r:.100} are not of one dtype and rank")
    stops = [tuple(map(sum, zip(*x))) for x in zip(starts, shapes)]
    shape = tuple(map(max, zip(*stops)))
    have, wants = sum(map(math.prod, shapes)), math.prod(shape)
    # The elements between two borders of parts are in the same ones.
    borders = [sorted({*a, *b} | {0}) for a, b in zip(zip(*starts), zip(*stops))]
    places = [{x: i for i, x in enumerate(axis)} for axis in borders]
    cells = [max(0, len(axis) - 1) for axis in borders]
    if math.prod(cells) > _CELLS:
        raise ValueError(f"{name!r:.100} is cut into more parts than are read")
    seen = np.zeros(cells, bool)
    for start, stop in zip(starts, stops):
        region = tuple(
            slice(place[a], place[b]) for place, a, b in zip(places, start, stop)
        )
        if seen[region].any():
            raise ValueError(
                f"two parts of {name!r:.100} overlap, at {list(start)}: the files are "
                "not those of one save"
            )
        seen[region] = True
    if have != wants:
        raise ValueError(
            f"parts of {name!r:.100} are missing: the files have {have} of its {wants} "
            "elements. The files of all processes have to be there"
        )
    return shape


# Of the parts of one tensor.
_CELLS = 2**22
# The bytes that are read of a tensor in pieces at a time.
_PART_BYTES = 4 * 2**20
_VERSION = "DCP_VERSION"


def _without(metadata: dict[str, str] | None, *keys: str) -> dict[str, str] | None:
    return metadata and {k: x for k, x in metadata.items() if k not in keys}


def _common(metadata: Sequence[dict[str, str] | None]) -> dict[str, str] | None:
    """The metadata that all files have in common.

    **Raises:** `ValueError` if they differ in what we have put there.
    """
    first, *rest = [x or {} for x in metadata] or [{}]
    for key in (LABELS, ATTRIBUTES):
        if any(x.get(key) != first.get(key) for x in rest):
            raise ValueError(
                f"its files differ in `{key}` of their metadata: open them one by one"
            )
    if len(metadata) == 1:
        return metadata[0]
    shared = {k: v for k, v in first.items() if all(x.get(k) == v for x in rest)}
    return shared or None


def _check_entry(name: str, entry: object) -> None:
    """**Raises:** `ValueError` for an entry that no tensor has."""
    if not _json.is_unicode(name):
        raise ValueError(f"the tensor {name!r} has a name that is not Unicode text")
    fields = {"dtype", "shape", "data_offsets"}
    if type(entry) is not dict or not fields <= entry.keys():
        raise ValueError(f"the tensor {name!r} is malformed")
    more = {field: x for field, x in entry.items() if field not in fields}
    try:
        good = not more or _json.is_unicode(json.dumps(more, ensure_ascii=False))
    except RecursionError:
        good = False
    if not good:
        raise ValueError(f"the tensor {name!r} has a field that cannot be read")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    number = range(_template.MAX_BYTES)
    is_right = _schema.fits([dtype, shape, span], (str, [number], (number, number)))
    # Products of many, or of long ones, would take their time.
    if not is_right or len(shape) > 2 * _template.MAX_RANK:
        raise ValueError(
            f"the tensor {name!r} is malformed: an impossible shape or place"
        )
    size = (span[1] - span[0]) * (1 + (dtype in _PACKED))
    wants = size
    if dtype in _READ:
        wants = math.prod(shape) * _template.dtype_of(_READ[dtype]).itemsize
    if size < 0 or size != wants:
        raise ValueError(f"the tensor {name!r} is not of the size of its shape")


def _sharded(probe: Probe, key: str, beside: Collection[str] = ()) -> Source:
    def read_headers(files: list[str]) -> list[Header]:
        if own := next(filter(_of_process.match, files), None):
            raise ValueError(
                f"`{key}` names `{own}`, which is what one process of "
                "`torch.distributed` has of a checkpoint: its tensors may be parts of "
                "larger ones. Open the directory without that index, with the files of "
                "all processes"
            )
        return _headers(probe, files, f"the files that `{key}` names")

    names = lambda header: header.tensors
    found = _foreign_index.weight_map(probe, key, _file, read_headers, names, beside)
    for file, header in found.items():
        # An index leads to whole tensors alone.
        if any(map(any, _starts(file, header).values())):
            _check_whole(file, header)
    return _source(probe, list(found), list(found.values()))


def _headers(probe: Probe, files: list[str], what: str) -> list[Header]:
    directory = probe.directory
    sizes = _store.each(directory, lambda key: _header_size(directory, key), files)
    if sum(sizes) > _MAX_HEADERS:
        raise ValueError(
            f"the headers of {what} would have {sum(sizes)} bytes, and at most "
            f"{_MAX_HEADERS} are read"
        )
    read = lambda key, size: _read_header(directory, key, size)
    return _store.each(directory, read, files, sizes)


def _source(probe: Probe, files: list[str], headers: list[Header]) -> Source:
    """The source of some files, which may have parts of tensors."""
    of: dict[str, list[TensorPart]] = collections.defaultdict(list)
    for number, (file, header) in enumerate(zip(files, headers)):
        for name, start in _starts(file, header).items():
            of[name].append(TensorPart(number, start, header.tensors[name]))
    tensors = sorted(of, key=natural_order)
    leaves: list[ForeignLeaf] = []
    for (name, keys), their in zip(names_of(tensors), tensors):
        parts, shape = of[their], _whole(their, of[their])
        first, text = parts[0], parts[0].tensor.dtype
        what = name, keys, _READ.get(text, ""), shape, text
        file, offset = first.file, first.tensor.offset
        leaf = _foreign_index.array_leaf(*what, file=file, offset=offset)
        if leaf.value is None and (len(parts) > 1 or text in _PACKED):
            pieces = [
                Piece(files[file], tensor.offset, start, tuple(tensor.shape))
                for file, start, tensor in parts
                if math.prod(tensor.shape)
            ]
            chunk = _grid.choose(shape, leaf.template.itemsize, _PART_BYTES)
            t = leaf.template._replace(chunk=chunk)
            value = PiecedArray(t, pieces, text in _PACKED)
            leaf = leaf._replace(template=t, value=value)
        leaves.append(leaf)
    metadata = _common([_without(x.metadata, _SHARDING, _VERSION) for x in headers])
    head = b"".join(header.data for header in headers)
    labels = _labels(metadata)
    own = {i: labels[name] for i, name in enumerate(tensors) if name in labels}
    attributes = _attributes(metadata, [leaf.name for leaf in leaves])
    if metadata is not None and {LABELS, ATTRIBUTES} & metadata.keys():
        metadata = _without(metadata, LABELS, ATTRIBUTES) or None
    what = "safetensors", files, leaves, head, metadata, own, attributes
    return _foreign_index.source(probe, *what)


def _labels(metadata: dict[str, str] | None) -> dict[str, Label]:
    if metadata is None or LABELS not in metadata:
        return {}
    value = _json.parse(metadata[LABELS].encode(), f"`{LABELS}` in its metadata")
    if not is_texts(value) or any(x[:1] not in ("=", "@") for x in value.values()):
        raise ValueError(f"`{LABELS}` in its metadata is not as `eqx_ckpt` writes it")
    return {name: _state_labels.label_of(text) for name, text in value.items()}


def _attributes(metadata: dict[str, str] | None, names: Sequence[str]) -> Attributes:
    """The attributes of children without keys, by the names of nodes of ours."""
    if metadata is None or ATTRIBUTES not in metadata:
        return {}
    text = metadata[ATTRIBUTES]
    value = _json.parse(text.encode(), f"`{ATTRIBUTES}` in its metadata")
    good = _schema.fits(value, {...: {...: _schema.optional(str)}})
    if not good or not _json.is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError(
            f"`{ATTRIBUTES}` in its metadata is not as `eqx_ckpt` writes it"
        )
    flat = {node: _foreign_index.flat_name(node) for node in _names.by_prefix(names)}
    return {node: value[name] for node, name in flat.items() if name in value}
