"""`.safetensors`: one file, or several with an index in JSON, as on Hugging Face.

A file is the length of its header (8 bytes), the header in JSON, and the tensors.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._format import _json, _template
from .._format._leaves import Unreadable
from .._load._probe import Probe
from .._load._source import Source
from .._storage import _store
from .._storage._backend import Backend
from . import _foreign_index
from ._foreign_index import (
    are_texts,
    ForeignLeaf,
    is_texts,
    kind_of,
    names_of,
    too_many_axes,
    unreadable,
)


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
METADATA = "__metadata__"
# In the metadata: which entry of an `eqx.nn.State` a tensor is of, as in an index of
# ours, in JSON. Positions would not say it.
LABELS = "eqx_ckpt.state"
SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
# In the metadata of a file of `torch.distributed`: where its parts of tensors begin.
_SHARDING = "DCP_SHARDING_INFO"
# Headers are read whole. That of the largest model there is has some MiB.
_MAX_HEADER = _json.MAX_INDEX
_MAX_HEADERS = 4 * _MAX_HEADER
# A file beside the index: never a path.
# The name of a file that is one of several.
_shard = re.compile(r"-\d+-of-0*([2-9]|1\d)\d*\.safetensors$")
# The name of what one process of many has written.
_of_process = re.compile(r"shard-\d+-")
_file = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")


class Header(NamedTuple):
    tensors: dict[str, tuple[str, list[int], int]]  # dtype, shape, offset in the file
    metadata: dict[str, str] | None
    data: bytes


def read(probe: Probe, like: Any) -> Source | None:
    """The source of a file, of an index, or of a directory with one of them in it."""
    directory, key = probe.directory, probe.key
    if key is None:
        key = _choose(probe.names)
        if key is None:
            return None
        if key.endswith(_INDEX):
            return _sharded(probe, key)
    elif probe.has_suffix(_INDEX):
        return _sharded(probe, key)
    elif not (is_safetensors(probe) or probe.has_suffix(SUFFIX)):
        return None
    header = read_header(directory, key, _header_size(directory, key))
    _check_whole(key, header)
    return _source(probe, [key], [header], header.metadata)


def _choose(names: frozenset[str]) -> str | None:
    """The one file of a directory that says what is in it."""
    for suffix in (_INDEX, SUFFIX):
        some = sorted(name for name in names if name.endswith(suffix))
        if f"model{suffix}" in some:
            return f"model{suffix}"
        if suffix == SUFFIX and some and _of_process.match(some[0]):
            raise _in_parts(some[0])
        if len(some) > 1:
            raise ValueError(
                f"there are {len(some)} files in it that end in `{suffix}`, such as "
                f"`{some[0]}`: give the path of one of them"
            )
        if some and _shard.search(some[0]):
            raise ValueError(
                f"`{some[0]}` is one of several files, and there is no `*{_INDEX}` "
                "that says what is in the others. Its own path opens it alone"
            )
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


def read_header(directory: Backend, key: str, size: int) -> Header:
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
    tensors: dict[str, tuple[str, list[int], int]] = {}
    spans = []
    for name, entry in value.items():
        dtype, shape, (start, stop) = _entry(name, entry)
        tensors[name] = dtype, shape, 8 + size + start
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
        raise _in_parts(
            key, f" (`{_SHARDING}` in its metadata)", sorted(header.tensors)
        )


def _in_parts(key: str, where: str = "", names: Sequence[str] = ()) -> ValueError:
    some = f", such as {names[0]!r:.100}," if names else ""
    return ValueError(
        f"`{key}` is what one process of `torch.distributed` has of a checkpoint: its "
        f"tensors{some} may be parts of larger ones{where}, and such files are not put "
        "together here. Do it in PyTorch, with `consolidate_safetensors_files` or "
        "`HuggingFaceStorageWriter(..., enable_consolidation=True)`, and open what "
        "that writes"
    )


def _entry(name: str, entry: Any) -> tuple[str, list[int], tuple[int, int]]:
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
    for numbers in (shape, span):
        is_right = type(numbers) is list and set(map(type, numbers)) <= {int}
        # Products of many, or of long ones, would take their time.
        is_right = is_right and len(numbers) <= 2 * _template.MAX_RANK
        if not is_right or not all(0 <= n < _template.MAX_BYTES for n in numbers):
            raise ValueError(f"the tensor {name!r} has an impossible shape or place")
    if type(dtype) is not str:
        raise ValueError(f"the tensor {name!r} is malformed")
    if len(span) != 2 or span[1] < span[0]:
        raise ValueError(f"the tensor {name!r} is not of the size of its shape")
    if dtype in DTYPES:
        itemsize = _template.dtype_of(DTYPES[dtype]).itemsize
        if span[1] - span[0] != math.prod(shape) * itemsize:
            raise ValueError(f"the tensor {name!r} is not of the size of its shape")
    return dtype, shape, (span[0], span[1])


def _sharded(probe: Probe, key: str) -> Source:
    of, files = _foreign_index.weight_map(probe, key, _file)
    try:
        sizes = _store.each(probe.directory, _header_size, files)
    except FileNotFoundError as e:
        raise ValueError(f"a file that `{key}` names is missing: {e}") from e
    if sum(sizes) > _MAX_HEADERS:
        raise ValueError(
            f"the headers of the files that `{key}` names would have {sum(sizes)} "
            f"bytes, and at most {_MAX_HEADERS} are read"
        )
    read = lambda directory, i: read_header(directory, files[i], sizes[i])
    headers: list[Header] = _store.each(probe.directory, read, range(len(files)))
    for file, header in zip(files, headers):
        _check_whole(file, header)
    held = {name: f for f, h in zip(files, headers) for name in h.tensors}
    if held != of or len(held) != sum(len(h.tensors) for h in headers):
        name = next(iter(held.items() ^ of.items()), ("?",))[0]
        raise ValueError(
            f"`{key}` and the files beside it do not agree on where {name!r} is"
        )
    metadata = headers[0].metadata if headers else None
    if any(header.metadata != metadata for header in headers):
        raise ValueError("its files differ in their metadata: open them one by one")
    return _source(probe, files, headers, metadata)


_digits = re.compile(r"([0-9]+)")


def _natural(name: str) -> list[str]:
    """A key that sorts `layers.9` before `layers.10`."""
    return [x.zfill(20) if x.isdigit() else x for x in _digits.split(name)]


def _source(
    probe: Probe,
    files: list[str],
    headers: list[Header],
    metadata: dict[str, str] | None,
) -> Source:
    tensors = [
        (name, number, tensor)
        for number, header in enumerate(headers)
        for name, tensor in header.tensors.items()
    ]
    tensors.sort(key=lambda row: _natural(row[0]))
    named = names_of(name for name, _, _ in tensors)
    leaves: list[ForeignLeaf] = []
    for (name, keys), (_, number, (text, shape, offset)) in zip(named, tensors):
        dtype = DTYPES.get(text)
        if dtype is None or len(shape) > _template.MAX_RANK:
            leaves.append(_foreign_index.leaf_of(name, keys, _unread(text, shape)))
            continue
        t = _foreign_index.template(kind_of(dtype), dtype, tuple(shape), keys)
        leaves.append(ForeignLeaf(name, t, number, offset))
    head = b"".join(header.data for header in headers)
    labels = _labels(metadata)
    markers = {
        i: labels[name] for i, (name, _, _) in enumerate(tensors) if name in labels
    }
    if metadata is not None and LABELS in metadata:
        metadata = {key: metadata[key] for key in metadata if key != LABELS} or None
    what = "safetensors", files, leaves, head, metadata, markers
    return _foreign_index.source(probe, *what)


def _unread(dtype: str, shape: list[int]) -> Unreadable:
    if dtype in DTYPES:
        return too_many_axes(f"{dtype}[...]", len(shape))
    what = f"{dtype}[{','.join(map(str, shape))}]"
    return unreadable(
        what, f"it has the dtype {dtype!r:.60}, which is not read here", True
    )


def _labels(metadata: dict[str, str] | None) -> dict[str, str]:
    if metadata is None or LABELS not in metadata:
        return {}
    value = _json.parse(metadata[LABELS].encode(), f"`{LABELS}` in its metadata")
    if not is_texts(value) or any(x[:1] not in ("=", "@") for x in value.values()):
        raise ValueError(f"`{LABELS}` in its metadata is not as `eqx_ckpt` writes it")
    return value
