"""The meaning of the names in PyTorch's pickles: dtypes, storages, and functions of
this module that make tensors and containers. There is nothing else that one can call.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._kernel._format import _schema, _template
from .._kernel._format._leaves import Unreadable
from . import _pickle, _pieces
from ._pickle import Global


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
# The bytes of these have to be found in old files, where other storages follow them.
_QUANTISED = {
    "QInt8": "int8",
    "QUInt8": "uint8",
    "QInt32": "int32",
    "QUInt4x2": "uint8",
    "QUInt2x4": "uint8",
}
_DTYPES = [
    *_STORAGES.values(),
    *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


class Storage(NamedTuple):
    """A file of the zip, or a part of an old file; the dtype that its class has; and
    why no tensor of it can be read, if that is so."""

    key: str
    nbytes: int
    dtype: str
    unreadable: Unreadable | None


class Tensor(NamedTuple):
    """Elements of a storage, from the one number `offset` on."""

    storage: Storage
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


def _bad(what: str) -> ValueError:
    return ValueError(f"its pickle has {what} that PyTorch does not write")


def storage(pid: object) -> Any:
    """`("storage", class, key, device, elements[, view])`, the last of which old files
    have; or `("module", class, ...)`, in old files, of the class of a module."""
    if type(pid) is tuple and pid[:1] == ("module",) and len(pid) == 4:
        return pid[1]
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise _bad("an id of a storage")
    _, kind, key, _, count, *view = pid
    if type(kind) is Unreadable:
        return kind
    is_class = type(kind) is Global and kind.kind in ("storage", "quantised")
    dtype = kind.name if is_class else None
    if dtype is None or type(key) is not str:
        raise _bad("an id of a storage")
    why = _no_tensor("quantised") if kind.kind == "quantised" else None
    if any(x is not None for x in view):
        why = _VIEW
    nbytes = _natural(count) * _template.dtype_of(dtype).itemsize
    return Storage(key, nbytes, dtype, why)


_VIEW = Unreadable(
    "tensor",
    "it is in a part of a storage, as PyTorch before version 0.4 has written it: load "
    "it there, and save it again",
    True,
)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < _template.MAX_BYTES:
        raise _bad("a size or an offset")
    return value


def _naturals(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 2 * _template.MAX_RANK:
        raise _bad("a shape")
    return tuple(map(_natural, value))


def _tensor_v2(args: tuple) -> Tensor | Unreadable:
    """`(storage, offset, shape, strides, requires_grad, hooks[, metadata])`."""
    if not 4 <= len(args) <= 7 or type(args[0]) is not Storage:
        raise _bad("a tensor")
    return _tensor(args, args[0].dtype, args[6:])


def _tensor_v3(args: tuple) -> Tensor | Unreadable:
    """As of `_tensor_v2`, but with a dtype before the metadata, and of bytes."""
    if not 7 <= len(args) <= 8 or type(args[0]) is not Storage:
        raise _bad("a tensor")
    dtype = args[6].name if type(args[6]) is Global else None
    if dtype is None or args[6].kind != "dtype":
        raise _bad("a dtype")
    return _tensor(args, dtype, args[7:])


def _tensor(args: tuple, dtype: str, metadata: tuple) -> Tensor | Unreadable:
    storage, *where = args[:4]
    if storage.unreadable is not None:
        return storage.unreadable
    if any(metadata):
        return Unreadable(
            f"{dtype} tensor",
            "it is a tensor that is conjugated or negated when it is used: save "
            "`x.resolve_conj().resolve_neg()` in PyTorch",
            True,
        )
    offset = _natural(where[0])
    shape, strides = _naturals(where[1]), _naturals(where[2])
    if len(shape) != len(strides):
        raise _bad("a shape")
    size = math.prod(shape)
    stop = (offset + _pieces.span(shape, strides)) if size else 0
    if stop * _template.dtype_of(dtype).itemsize > storage.nbytes:
        raise ValueError("it has a tensor that goes over the end of its storage")
    if not size:
        return Tensor(storage, dtype, 0, shape, None)
    return Tensor(storage, dtype, offset, shape, _apart(shape, strides))


def _apart(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of an array, if its elements do not follow each other."""
    rows = zip(shape, strides, _pieces.strides_of(shape))
    wrong = any(n > 1 and s != row for n, s, row in rows)
    return tuple(strides) if wrong else None


def _first(most: int) -> Callable[[tuple], Any]:
    """A function that adds nothing which is kept to a tensor."""

    def call(args: tuple) -> Tensor:
        if not 1 <= len(args) <= most or type(args[0]) is not Tensor:
            raise _bad("a parameter")
        return args[0]

    return call


def _moved(args: tuple) -> Tensor | Unreadable:
    """`(tensor, dtype, device, requires_grad)`."""
    tensor = _first(4)(args)
    if len(args) < 2 or args[1] != Global("dtype", tensor.dtype):
        return _other("of another dtype than its copy on the CPU")(args)
    return tensor


def _from_type(args: tuple) -> Tensor:
    """`(function, class, arguments, attributes)`."""
    if len(args) != 4 or type(args[0]) is not Global or type(args[2]) is not tuple:
        raise _bad("a tensor")
    function = args[0]
    if args[1] != _TENSOR or function.name not in _REBUILD or function.call is None:
        raise _bad("a tensor")
    return function.call(args[2])


def _ordered(args: tuple) -> OrderedDict:
    """An `OrderedDict` of nothing, or of pairs."""
    pairs = args[0] if args and type(args[0]) is list else []
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise _bad("a dict")
    made = OrderedDict()
    _pickle.put(made, [key for key, _ in pairs], [value for _, value in pairs])
    return made


def _call(
    what: str, make: Callable[..., Any], *signatures: tuple[_schema.Kind, ...]
) -> Callable[[tuple], Any]:
    """A function of arguments of one of some signatures."""

    def call(args: tuple) -> Any:
        if not any(_schema.fits(list(args), kinds) for kinds in signatures):
            raise _bad(what)
        return make(*args)

    return call


def _encode(text: str, encoding: str) -> bytes:
    """Bytes, which old protocols have as texts."""
    try:
        if encoding in ("latin1", "latin-1"):
            return text.encode("latin1")
    except UnicodeError:
        pass
    raise _bad("a run of bytes")


def _no_tensor(kind: str) -> Unreadable:
    return Unreadable(
        f"{kind} tensor",
        f"it is a tensor that is {kind}, which is not read here: make it a plain one "
        "in PyTorch (`x.dequantize()`, `x.to_dense()`, `x.to('cpu')`)",
        True,
    )


def _other(kind: str) -> Callable[[tuple], Any]:
    return lambda args: _no_tensor(kind)


_list = _call("a container", list, (list,), (tuple,))
# Its default is never called.
_default = _call("a dict", lambda *_: {}, (), (Global,), (Unreadable,))
_counter = _call("a counter", lambda *x: x[0] if x else {}, (), (dict,), (OrderedDict,))
_bytes = _call("a run of bytes", _encode, (str, str))
_bytearray = _call(
    "a run of bytes",
    lambda *x: _encode(*x) if len(x) == 2 else bytes(*x),
    (),
    (bytes,),
    (str, str),
)
_never = _call("a call", OrderedDict)


def _of_known(call: Callable[[tuple], Any]) -> Callable[[tuple], Any]:
    """A function whose result is as unreadable as its arguments. The default of a
    `defaultdict` is never called."""

    def made(args: tuple) -> Any:
        unknown = [x for x in args if type(x) is Unreadable]
        return unknown[0] if unknown else call(args)

    return call if call is _default else made


# What to do in PyTorch about objects of some modules. A tensor is one to a model too.
_CURES = {
    "torch.distributed.tensor.": ("save `x.full_tensor()` in PyTorch", True),
    "torch.distributed._tensor.": ("save `x.full_tensor()` in PyTorch", True),
    "torchao.": ("save `x.dequantize()` in PyTorch", True),
    "numpy.": (
        "save `torch.from_numpy(x)` for an array of NumPy, and `x.item()` for a number",
        False,
    ),
}
_SAVE_ALONE = (
    "Save the tensors alone in PyTorch, as in `torch.save(model.state_dict(), path)`"
)


def find(module: str, name: str) -> Any:
    """What a name stands for: an object of one that is not known cannot be read."""
    return NAMES.get(f"{module} {name}") or _unknown(f"{module}.{name}"[:100])


def _unknown(name: str) -> Unreadable:
    some = (cure for start, cure in _CURES.items() if name.startswith(start))
    cure, is_array = next(some, (_SAVE_ALONE, False))
    why = (
        f"it is an object of `{name}`, which is no tensor, container or plain value, "
        f"and is never built here. {cure[0].upper()}{cure[1:]}"
    )
    return Unreadable(name, why, is_array)


_TENSOR = Global("tensor", None)
_REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_functions: Mapping[str, Callable[[tuple], Any]] = {
    "torch._utils _rebuild_tensor": _tensor_v2,
    "torch._utils _rebuild_tensor_v2": _tensor_v2,
    "torch._utils _rebuild_tensor_v3": _tensor_v3,
    "torch._utils _rebuild_parameter": _first(3),
    "torch._utils _rebuild_parameter_with_state": _first(4),
    "torch._utils _rebuild_qtensor": _other("quantised"),
    "torch._utils _rebuild_sparse_tensor": _other("sparse"),
    "torch.serialization _get_layout": _call("a layout", str, (str,)),
    "torch._utils _rebuild_meta_tensor_no_storage": _other("of no device"),
    "torch._utils _rebuild_nested_tensor": _other("nested"),
    "torch._utils _rebuild_wrapper_subclass": _other("of a class of its own"),
    "torch._utils _rebuild_device_tensor_from_cpu_tensor": _moved,
    "torch._tensor _rebuild_from_type_v2": _from_type,
    "torch Size": _call("a container", tuple, (list,), (tuple,)),
    "torch device": _call("a device", lambda x, *_: x, (str,), (str, Any)),
    "collections OrderedDict": _ordered,
    "collections defaultdict": _default,
    "collections Counter": _counter,
    "_codecs encode": _bytes,
    **{
        f"{module} {name}": call
        for module in ("builtins", "__builtin__")
        for name, call in {
            "set": _list,
            "frozenset": _list,
            "complex": _call("a complex number", complex, (float, float)),
            "bytearray": _bytearray,
            "bytes": _call("a run of bytes", bytes, ()),
            "list": _list,
            "dict": _never,
            "int": _never,
            "float": _never,
        }.items()
    },
}
# All that a pickle can name.
NAMES: dict[str, Any] = {
    **{
        name: Global("function", name.split()[1], _of_known(call))
        for name, call in _functions.items()
    },
    **{f"torch {dtype}": Global("dtype", dtype) for dtype in _DTYPES},
    **{f"torch {x}Storage": Global("storage", y) for x, y in _STORAGES.items()},
    **{f"torch {x}Storage": Global("quantised", y) for x, y in _QUANTISED.items()},
    "torch UntypedStorage": Global("storage", "uint8"),
    "torch.storage UntypedStorage": Global("storage", "uint8"),
    "torch Tensor": _TENSOR,
    "torch.nn.parameter Parameter": _TENSOR,
    "torch.nn.parameter Buffer": _TENSOR,
}
