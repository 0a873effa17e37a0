"""PyTorch's files: a zip of a pickle, which says what there is, and the storages of the
tensors; or several of them with an index in JSON, as on Hugging Face.

The pickle is interpreted here: see `_pickle`. PyTorch is not needed.
"""

import itertools as it
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._format import _grid, _json, _names, _template
from ..._storage._backend import Backend
from .._source import Source
from . import _found, _magic, _pickle, _zip
from ._found import Candidate, Contents, Located
from ._pickle import Function, Ordered
from ._zip import Zip


_FILE, _INDEX = "pytorch_model.bin", ".bin.index.json"
_PICKLE = "data.pkl"
_MAX_PICKLES = 4 * _json.MAX_INDEX  # Of several files.
_MAX_LEAVES = 2**20
# Of the names of all leaves: so many letters, and so many for each byte of the pickle.
_LETTERS, _LETTERS_OF_ONE = 2**22, 64
# Of items of containers that are in more than one place, and as many for each byte.
_REPEATED = 2**14
# What tensors that share their storages may have more bytes than those.
_MADE, _MADE_OF_ONE = 2**24, 16
_file = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")

_STORAGES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_DTYPES = {name: name for name in _STORAGES.values()} | {
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}


class _Dtype(NamedTuple):
    name: str


class _Class(NamedTuple):
    """A class of storages, of a dtype or of bytes; or of tensors (`dtype` is None)."""

    dtype: str | None


class _Storage(NamedTuple):
    key: str
    nbytes: int
    dtype: str


class _Tensor(NamedTuple):
    """Elements of a storage, from the one number `offset` on."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    @property
    def itemsize(self) -> int:
        return _template.dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def read(found: Candidate, like: Any) -> Source | None:
    """The source of an index, or of a directory with a file or an index in it."""
    if found.key is not None:
        return _sharded(found, found.key) if found.has_suffix(_INDEX) else None
    if "pytorch_model" + _INDEX in found.names:
        return _sharded(found, "pytorch_model" + _INDEX)
    if _FILE not in found.names:
        return None
    return _source(found, [_FILE], [_read_file(found.directory, _FILE)])


def read_zip(found: Candidate, archive: Zip) -> Source | None:
    """The source of a zip with a pickle in it."""
    contents = _read_archive(archive)
    return None if contents is None else _source(found, [archive.key], [contents])


class _File(NamedTuple):
    """The value of the pickle of a file, its bytes, and where the storages lie."""

    value: Any
    data: bytes
    places: dict[str, tuple[int, int]]


def _read_file(directory: Backend, key: str) -> _File:
    head = np.empty(4, np.uint8)
    size = directory.read_into(key, 0, head)
    contents = None
    if _zip.begins(head[:size].tobytes()):
        contents = _read_archive(_zip.read_list(directory, key))
    if contents is None:
        raise ValueError(
            f"`{key}` is no zip of PyTorch's. It may be {_magic.OLD_TORCH}"
        )
    return contents


def _read_archive(archive: Zip) -> _File | None:
    above = [n for n in archive.members if n.partition("/")[2] == _PICKLE]
    if len(above) != 1:
        return None
    prefix = above[0].removesuffix(_PICKLE)
    if f"{prefix}constants.pkl" in archive.members:
        raise ValueError(
            "it is a program of TorchScript. Save its tensors alone in PyTorch: "
            "`torch.save(torch.jit.load(path).state_dict(), path)`"
        )
    order = _member(archive, f"{prefix}byteorder", b"little")
    if order != b"little":
        raise ValueError(f"its bytes are in the order {order!r:.20}")
    data = _member(archive, above[0])
    stored: dict[str, _Storage] = {}

    def persistent(pid: Any) -> _Storage:
        made = _storage(pid)
        # Others of this key may have other dtypes.
        if stored.setdefault(made.key, made).nbytes != made.nbytes:
            raise ValueError(f"its storage {made.key!r:.40} has two sizes")
        return made

    value = _pickle.load(data, _NAMES, persistent)
    files = [f"{prefix}data/{key}" for key in stored]
    places = dict(zip(stored, _zip.places(archive, files)))
    for key, (start, stop) in places.items():
        if stop - start != stored[key].nbytes:
            raise ValueError(f"its storage {key!r:.40} is not of the size that it says")
    return _File(value, data, places)


def _member(archive: Zip, name: str, default: bytes | None = None) -> bytes:
    """The bytes of a small file in a zip."""
    if default is not None and name not in archive.members:
        return default
    start, stop = _zip.place(archive, name)
    if stop - start > _json.MAX_INDEX:
        raise ValueError(f"`{name}` in it has {stop - start} bytes")
    return _found.read(archive.directory, archive.key, start, stop)


def _sharded(found: Candidate, key: str) -> Source:
    _, index = _found.read_json(found.directory, key)
    of = index.get("weight_map")
    if type(of) is not dict or not set(map(type, of.values())) <= {str}:
        raise ValueError(f"`{key}` has no `weight_map` of names to files")
    files = sorted(set(of.values()))
    bad = [file for file in files if not _file.fullmatch(file)]
    if bad:
        raise ValueError(f"`{key}` names {bad[0]!r}, which is no file beside it")
    contents = []
    for file in files:
        try:
            contents.append(_read_file(found.directory, file))
        except FileNotFoundError as e:
            raise ValueError(f"a file that `{key}` names is missing: {e}") from e
        if sum(len(one.data) for one in contents) > _MAX_PICKLES:
            raise ValueError("the pickles of its files are longer than is read")
    for file, one in zip(files, contents):
        names = {name for name, of_file in of.items() if of_file == file}
        if not isinstance(one.value, dict) or set(one.value) != names:
            raise ValueError(f"`{key}` and `{file}` do not agree on what is in that")
    return _source(found, files, contents)


# ---- From a value to leaves.


def _source(found: Candidate, files: list[str], contents: Sequence[_File]) -> Source:
    paths: list[list[str]] = []
    items: list[tuple[int, Any]] = []
    for number, one in enumerate(contents):
        for path, item in _Walk(len(one.data)).leaves([], one.value):
            paths.append(path)
            items.append((number, item))
    leaves: list[Located] = []
    stored: dict[int, np.ndarray] = {}
    known: dict[Any, _template.Template] = {}
    for (name, keys), (number, item) in zip(_found.names_of_paths(paths), items):
        if not isinstance(item, _Tensor):
            stored[len(leaves)], template = _found.scalar(item, keys)
            leaves.append(Located(name, template, 0, 0))
            continue
        what = item.dtype, item.shape, keys
        if what not in known:
            known[what] = _found.template(_found.kind_of(item.dtype), *what)
        start = contents[number].places[item.storage.key][0]
        at = start + item.offset * item.itemsize
        leaves.append(Located(name, known[what], number, at, item.strides))
    _check_sizes(contents, items)
    head = b"".join(one.data for one in contents)
    return _found.source(
        found, Contents("torch", files, leaves, head, stored=stored, shared=True)
    )


def _check_sizes(contents: Sequence[_File], items: list[tuple[int, Any]]) -> None:
    """**Raises:** `ValueError` where tensors would be much larger than the file, as one
    that repeats an element is."""
    there = sum(b - a for one in contents for a, b in one.places.values())
    tensors = {item for item in items if isinstance(item[1], _Tensor)}
    made = sum(tensor.nbytes for _, tensor in tensors)
    if made > _MADE + _MADE_OF_ONE * there:
        raise ValueError(
            f"its tensors have {made} bytes, and are views of {there} bytes that are "
            "stored: save copies (`x.clone()`) of those that repeat elements"
        )


class _Walk:
    """A walk through the containers of a pickle of so many bytes. Each may be in many
    places, so that what is found is counted."""

    def __init__(self, size: int):
        self._letters = _LETTERS + _LETTERS_OF_ONE * size
        self._repeated = _REPEATED + size
        self._parts = self._leaves = 0
        self._seen: set[int] = set()

    def leaves(self, path: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
        """What is at the ends of containers; None is no leaf."""
        if len(path) > _names.MAX_DEPTH:
            raise ValueError(f"it is nested more than {_names.MAX_DEPTH} deep")
        if type(value) in (dict, Ordered):
            self._enter(value)
            names = [str(key) for key in value]
            if len(set(names)) < len(names):
                raise ValueError("it has a dict with one key as a number and as a text")
            for name, item in zip(names, value.values()):
                parts = name.split(".", _names.MAX_DEPTH)
                yield from self.leaves([*path, *parts], item)
        elif type(value) in (list, tuple):
            self._enter(value)
            for number, item in enumerate(value):
                yield from self.leaves([*path, str(number)], item)
        elif value is not None:
            self._spend(path)
            yield path, _leaf(value)

    def _enter(self, container: Any) -> None:
        if container and id(container) in self._seen:
            self._repeated -= len(container)
        self._seen.add(id(container))
        if self._repeated < 0:
            raise ValueError("its containers are many times in each other")

    def _spend(self, path: list[str]) -> None:
        letters = sum(map(len, path))
        if 3 * letters > _names.MAX_NAME:
            raise ValueError(f"the name {_names.shorten('.'.join(path))} is too long")
        self._letters -= letters
        self._parts += len(path)
        self._leaves += 1
        if self._letters < 0 or self._parts > _found.MAX_COMPONENTS:
            raise ValueError("the names of its leaves are longer than is read")
        if self._leaves > _MAX_LEAVES:
            raise ValueError(f"it has more than {_MAX_LEAVES} leaves")


def _leaf(value: Any) -> Any:
    if isinstance(value, _Dtype):
        return f"torch.{value.name}"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("it has an integer of more than 64 bits")
    if isinstance(value, (_Storage, _Class, Function)):
        raise ValueError("it has a storage or a function as a value, and no tensor")
    return value


# ---- What names in a pickle stand for.


def _bad(what: str) -> ValueError:
    return ValueError(f"its pickle has {what} that PyTorch does not write")


def _storage(pid: Any) -> _Storage:
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise _bad("an id of a storage")
    _, kind, key, _, count = pid
    if type(kind) is not _Class or kind.dtype is None or type(key) is not str:
        raise _bad("an id of a storage")
    nbytes = _natural(count) * _template.dtype_of(kind.dtype).itemsize
    return _Storage(key, nbytes, kind.dtype)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _template.MAX_BYTES:
        raise _bad("a size or an offset")
    return value


def _naturals(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _template.MAX_RANK:
        raise _bad("a shape")
    return tuple(map(_natural, value))


def _tensor_v2(args: tuple) -> _Tensor:
    """`(storage, offset, shape, strides, requires_grad, hooks[, metadata])`."""
    if not 4 <= len(args) <= 7 or type(args[0]) is not _Storage:
        raise _bad("a tensor")
    return _tensor(args[0], args[0].dtype, args[1:4], args[6:])


def _tensor_v3(args: tuple) -> _Tensor:
    """The same with a dtype before the metadata, of a storage of bytes."""
    if not 7 <= len(args) <= 8 or type(args[0]) is not _Storage:
        raise _bad("a tensor")
    if type(args[6]) is not _Dtype:
        raise _bad("a dtype")
    return _tensor(args[0], args[6].name, args[1:4], args[7:])


def _tensor(storage: _Storage, dtype: str, where: tuple, metadata: tuple) -> _Tensor:
    if any(metadata):
        raise ValueError(
            "it has a tensor that is conjugated or negated when it is used: save "
            "`x.resolve_conj().resolve_neg()` in PyTorch"
        )
    offset = _natural(where[0])
    shape, strides = _naturals(where[1]), _naturals(where[2])
    if len(shape) != len(strides):
        raise _bad("a shape")
    size = math.prod(shape)
    stop = (offset + _grid.span(shape, strides)) if size else 0
    if stop * _template.dtype_of(dtype).itemsize > storage.nbytes:
        raise ValueError("it has a tensor that goes over the end of its storage")
    if not size:
        return _Tensor(storage, dtype, 0, shape, None)
    return _Tensor(storage, dtype, offset, shape, _apart(shape, strides))


def _apart(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of an array, if its elements do not follow each other."""
    rows = list(it.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]
    wrong = any(n > 1 and s != row for n, s, row in zip(shape, strides, rows))
    return tuple(strides) if wrong else None


def _first(most: int) -> Callable[[tuple], Any]:
    """A function that adds nothing which is kept to a tensor."""

    def call(args: tuple) -> _Tensor:
        if not 1 <= len(args) <= most or type(args[0]) is not _Tensor:
            raise _bad("a parameter")
        return args[0]

    return call


def _from_type(args: tuple) -> _Tensor:
    """`(function, class, arguments, attributes)`."""
    if len(args) != 4 or type(args[0]) is not Function or type(args[2]) is not tuple:
        raise _bad("a tensor")
    if args[1] != _Class(None) or args[0].name not in _REBUILD:
        raise _bad("a tensor")
    return args[0].call(args[2])


def _ordered(args: tuple) -> Ordered:
    """An `OrderedDict` of nothing, or of pairs."""
    made = Ordered()
    for pair in args[0] if args and type(args[0]) is list else ():
        if (
            type(pair) not in (tuple, list)
            or len(pair) != 2
            or type(pair[0]) is not str
        ):
            raise _bad("a dict")
        made[pair[0]] = pair[1]
    return made


def _items(kind: type) -> Callable[[tuple], Any]:
    """A function that makes a container of one."""

    def call(args: tuple) -> Any:
        if len(args) != 1 or type(args[0]) not in (list, tuple):
            raise _bad("a container")
        return kind(args[0])

    return call


def _default(args: tuple) -> dict[Any, Any]:
    """A `defaultdict` of nothing, whose default is never called."""
    if len(args) > 1 or args and type(args[0]) is not Function:
        raise _bad("a dict")
    return {}


def _never(args: tuple) -> Any:
    raise _bad("a call")


def _complex(args: tuple) -> complex:
    if len(args) != 2 or set(map(type, args)) != {float}:
        raise _bad("a complex number")
    return complex(*args)


def _encode(args: tuple) -> bytes:
    """Bytes, which old protocols have as texts."""
    if len(args) != 2 or type(args[0]) is not str or args[1] != "latin1":
        raise _bad("a run of bytes")
    try:
        return args[0].encode("latin1")
    except UnicodeError:
        raise _bad("a run of bytes") from None


def _device(args: tuple) -> str:
    if not args or type(args[0]) is not str:
        raise _bad("a device")
    return args[0]


def _other(kind: str) -> Callable[[tuple], Any]:
    def call(args: tuple) -> Any:
        raise ValueError(
            f"it has a tensor that is {kind}, which is not read here: make it a plain "
            "one in PyTorch (`x.dequantize()`, `x.to_dense()`, `x.to('cpu')`)"
        )

    return call


_REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_functions: Mapping[str, Callable[[tuple], Any]] = {
    "torch._utils _rebuild_tensor": _tensor_v2,
    "torch._utils _rebuild_tensor_v2": _tensor_v2,
    "torch._utils _rebuild_tensor_v3": _tensor_v3,
    "torch._utils _rebuild_parameter": _first(3),
    "torch._utils _rebuild_parameter_with_state": _first(4),
    "torch._utils _rebuild_qtensor": _other("quantised"),
    "torch._utils _rebuild_sparse_tensor": _other("sparse"),
    "torch.serialization _get_layout": _other("sparse"),
    "torch._utils _rebuild_meta_tensor_no_storage": _other("of no device"),
    "torch._utils _rebuild_nested_tensor": _other("nested"),
    "torch._tensor _rebuild_from_type_v2": _from_type,
    "torch Size": _items(tuple),
    "torch device": _device,
    "collections OrderedDict": _ordered,
    "collections defaultdict": _default,
    "_codecs encode": _encode,
    **{
        f"{module} {name}": call
        for module in ("builtins", "__builtin__")
        for name, call in {
            "set": _items(list),
            "frozenset": _items(list),
            "complex": _complex,
            "list": _items(list),
            "dict": _never,
            "int": _never,
            "float": _never,
        }.items()
    },
}
# All that a pickle can name.
_NAMES: dict[str, Any] = {
    **{name: Function(name.split()[1], call) for name, call in _functions.items()},
    **{f"torch {name}": _Dtype(dtype) for name, dtype in _DTYPES.items()},
    **{f"torch {x}Storage": _Class(dtype) for x, dtype in _STORAGES.items()},
    "torch UntypedStorage": _Class("uint8"),
    "torch.storage UntypedStorage": _Class("uint8"),
    "torch Tensor": _Class(None),
    "torch.nn.parameter Parameter": _Class(None),
    "torch.nn.parameter Buffer": _Class(None),
}
