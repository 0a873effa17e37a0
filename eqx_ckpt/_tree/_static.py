"""Static fields of Modules: how they are recorded, compared, and let pass.

What JSON holds is recorded as it is. All else is encoded, as FORMAT.md says: so that of
a tuple with a function in it the rest can be compared.
"""

import argparse
import collections
import dataclasses
import decimal
import enum
import fractions
import functools as ft
import json
import math
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jaxtyping import PyTree

from .._format import _json, _names
from .._format._leaves import Statics
from . import _flatten, _nearest, _node
from ._filters import IsLeaf
from ._node import Node


Static = str | Sequence[str]


def recorded(module: eqx.Module | Node) -> tuple[dict[str, Any], dict[str, Any]]:
    """The static fields of a Module: those that JSON holds, and the others, encoded."""
    if isinstance(module, Node):
        return _node.recorded(module)
    plain: dict[str, Any] = {}
    encoded: dict[str, Any] = {}
    if isinstance(module, eqx.nn.StateIndex):
        return plain, encoded  # Its marker is how this process finds an entry.
    for field in dataclasses.fields(module):
        if field.metadata.get("static", False) and hasattr(module, field.name):
            value = getattr(module, field.name)
            good, as_json = _json.jsonable(value)
            if good:
                plain[field.name] = as_json
            else:
                encoded[field.name] = encode(value)
    return plain, encoded


def record(tree: PyTree, is_leaf: IsLeaf, structure: Any) -> Statics:
    """The static fields of all Modules of a tree, by name ("": the tree itself)."""
    values: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    of: dict[str, int] = {}
    seen: dict[str, int] = {}
    nodes = _flatten.node_types(structure)
    if any(issubclass(cls, (eqx.Module, Node)) for cls in nodes):
        for path, module in _flatten.modules(tree, is_leaf):
            plain, encoded = recorded(module)
            if plain or encoded:
                key = repr((plain, encoded))
                if key not in seen:
                    seen[key] = len(values)
                    values.append(plain)
                    others.append(encoded)
                of[_flatten.module_name(path, "")] = seen[key]
    return Statics(values, of, others)


# ---- How a value is encoded: JSON, in which an object has one entry, its kind.

# What cannot be compared: functions, arrays of JAX, and objects of classes not known.
_OTHER = _node.OTHER
# Those whose `repr` is all that they are.
_BY_REPR = (
    complex,
    bytes,
    bytearray,
    range,
    slice,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    re.Pattern,
    types.EllipsisType,
)
_MAX_DEPTH, _MAX_NODES, _MAX_LENGTH = 100, 2**18, 2**14


def encode(value: Any) -> Any:
    """A value as JSON that can be compared with that of another by `_is_alike`."""
    count = 0

    def walk(x: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_NODES or depth > _MAX_DEPTH:
            raise ValueError("too large to be recorded")
        below = ft.partial(walk, depth=depth + 1)

        def pairs(items: Any) -> list[list[Any]]:
            return [[below(key), below(item)] for key, item in items]

        if x is None or type(x) is bool:
            return x
        if isinstance(x, enum.Enum):
            return {"enum": [x.name, below(x.value)]}
        if isinstance(x, np.generic) and not isinstance(x, (str, bytes)):
            item = x.item()
            good = isinstance(item, (bool, int, float, complex))
            return {"scalar": [x.dtype.name, below(item) if good else str(x)]}
        # Of a subclass the number or the text that it is.
        if isinstance(x, int):
            x = int.__int__(x)
            return {"repr": hex(x)} if x.bit_length() > _json.MAX_BITS else x
        if isinstance(x, float):
            x = float.__float__(x)
            return x if math.isfinite(x) else {"repr": repr(x)}
        if isinstance(x, str):
            x = str.__str__(x)
            return x if _json.is_unicode(x) else {"repr": ascii(x)}
        if isinstance(x, _BY_REPR):
            return {"repr": repr(x)}
        dtype = _dtype_name(x)
        if dtype is not None:
            return {"dtype": dtype}
        if isinstance(x, np.ndarray) and not x.dtype.hasobject:
            digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(x).tobytes())
            return {"array": [x.dtype.name, list(x.shape), digest]}
        if isinstance(x, (list, tuple, collections.deque, jax.sharding.PartitionSpec)):
            return list(map(below, x))
        if isinstance(x, jax.ShapeDtypeStruct):
            of = "shape", "dtype", "weak_type"
            return {"object": pairs((name, getattr(x, name)) for name in of)}
        if isinstance(x, Mapping):
            return {"dict": pairs(x.items())}
        if isinstance(x, Set):
            return {"set": sorted(map(below, x), key=json.dumps)}
        if isinstance(x, ft.partial):
            return {"partial": [below(x.func), below(x.args), below(x.keywords)]}
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            of = [field.name for field in dataclasses.fields(x) if field.compare]
            return {"object": pairs((n, getattr(x, n)) for n in of if hasattr(x, n))}
        if isinstance(x, (types.SimpleNamespace, argparse.Namespace)):
            return {"object": pairs(vars(x).items())}
        return _OTHER

    try:
        out = walk(value, 0)
        text = json.dumps(out)
    except Exception:  # Of the methods of a class that we do not know.
        return _OTHER
    return out if len(text) <= _MAX_LENGTH else _digest(text)


def _digest(text: str) -> dict[str, str]:
    return {"digest": xxhash.xxh3_128_hexdigest(text.encode())}


def _dtype_name(x: Any) -> str | None:
    """The name of a dtype, or of a class that stands for one."""
    if isinstance(x, type):
        if x in (bool, int, float, complex):
            return x.__name__
        if issubclass(x, np.generic):
            return np.dtype(x).name
        x = getattr(x, "dtype", None)  # As `jnp.float32` has it.
    if isinstance(x, np.dtype):
        return str(x) if x.names else x.name
    try:
        return str(x) if jnp.issubdtype(x, jax.dtypes.extended) else None
    except TypeError:
        return None


# ---- Comparing two encoded values.

_KINDS = frozenset(
    "other enum scalar repr dtype array dict set partial object digest".split()
)


def _split(x: Any) -> tuple[str, Any]:
    """The kind of an encoded value ("": plain JSON), and what is encoded."""
    if type(x) is not dict:
        return "", x
    kind, value = next(iter(x.items()), ("", None))
    return (kind, value) if kind in _KINDS else ("unknown", None)


def _bare(kind: str, value: Any) -> Any:
    """What an enum, a scalar of NumPy or a dtype is beside a plain value."""
    if kind in ("enum", "scalar") and type(value) is list and value:
        return value[-1]
    return value if kind in ("", "dtype") else {kind: value}


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two encoded values are the same, as far as they can be compared."""
    (one, x), (two, y) = _split(a), _split(b)
    if "unknown" in (one, two) or one == two == "other":
        return True
    if one != two:
        bare = _bare(one, x), _bare(two, y)
        return bare != (a, b) and _is_alike(*bare)
    if type(x) is list and type(y) is list:
        return len(x) == len(y) and all(map(_is_alike, x, y))
    return type(x) is type(y) and x == y


def _is_same_json(a: Any, b: Any) -> bool:
    if isinstance(a, (list, dict)):
        return type(a) is type(b) and repr(a) == repr(b)
    return type(a) is type(b) and a == b


# In the place of what only one side has.
_NOTHING = object()


def _members(x: Any) -> dict[str, Any] | None:
    """The fields of an object and the values of a dict, by the parts of their names."""
    kind, value = _split(x)
    if kind not in ("dict", "object") or type(value) is not list:
        return None
    out = {}
    for pair in value:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
            return None
        out[_names.quote(pair[0])] = pair[1]
    return out


class Change(NamedTuple):
    """A static field that has changed, or a part of one that is an object or a dict."""

    name: str
    saved: str
    here: str
    may_differ: bool


def changes(
    statics: Statics,
    module: eqx.Module | Node,
    saved_name: str,
    passes: Callable[[str], bool],
    name: str | None = None,
) -> Iterator[Change]:
    """What has changed of the Module that was saved as `saved_name`, and is called
    `name` here. `passes` says of a name of either side whether it may differ."""
    row = statics.of[saved_name]
    plain = statics.values[row]
    encoded = {} if statics.encoded is None else statics.encoded[row]
    plain_here, encoded_here = recorded(module)
    for field in (*plain_here, *encoded_here):
        are_json = field in plain and field in plain_here
        if are_json:
            if _is_same_json(plain[field], plain_here[field]):
                continue
        elif statics.encoded is None or not (field in plain or field in encoded):
            continue  # A checkpoint with nothing encoded is compared as it always was.
        saved = encode(plain[field]) if field in plain else encoded[field]
        here = encode(plain_here[field]) if field in plain_here else encoded_here[field]
        if are_json or not _is_alike(saved, here):
            stored = f"{saved_name}.{field}" if saved_name else field
            shown = stored
            if name is not None:
                shown = f"{name}.{field}" if name else field
            yield from _changes(stored, shown, saved, here, passes)


def _changes(
    stored: str,
    shown: str,
    saved: Any,
    here: Any,
    passes: Callable[[str], bool],
    may_differ: bool = False,
) -> Iterator[Change]:
    may_differ = may_differ or passes(stored) or passes(shown)
    old, new = _members(saved), _members(here)
    some = []
    if old is not None and new is not None:
        both = [
            (part, old.get(part, _NOTHING), new.get(part, _NOTHING))
            for part in dict.fromkeys([*old, *new])
        ]
        some = [x for x in both if _NOTHING in x[1:] or not _is_alike(*x[1:])]
    if not some:
        yield Change(shown, show(saved), show(here), may_differ)
    for part, a, b in some:
        below = f"{stored}.{part}", f"{shown}.{part}"
        yield from _changes(*below, a, b, passes, may_differ)


def show(x: Any, most: int = 200) -> str:
    """An encoded value for people."""
    text = _shown(x, 0)
    return text if len(text) <= most else text[:most] + "..."


def _shown(x: Any, depth: int) -> str:
    if x is _NOTHING:
        return "nothing"
    if depth > _MAX_DEPTH:
        return "..."
    below = ft.partial(_shown, depth=depth + 1)
    kind, value = _split(x)
    members = _members(x)
    if members is not None:
        items = ", ".join(f"{key!r}: {below(item)}" for key, item in members.items())
        return f"{{{items}}}"
    if type(value) is list:
        if kind == "enum" and len(value) == 2:
            return f"{value[0]} ({below(value[1])})"
        if kind == "scalar" and len(value) == 2:
            return f"{value[0]} {below(value[1])}"
        if kind == "array" and len(value) == 3:
            return f"an array, {value[0]} {below(value[1])}, digest {value[2]!s:.8}"
        return f"[{', '.join(map(below, value))}]"
    if kind in ("repr", "dtype"):
        return str(value)
    if kind:
        return "another value" if kind == "digest" else "an object"
    return repr(value)


# ---- What may differ.


def check(static: Any) -> None:
    """**Raises:** `ValueError` or `TypeError` for what `static=` does not take."""
    wanted = '`static` must be "error", "ignore" or a list of names of static fields'
    if isinstance(static, str):
        if static not in ("error", "ignore"):
            raise ValueError(
                f"{wanted}, not {static!r}. If it names a field, put it into a list: "
                f"`static=[{static!r}]`."
            )
    elif not all(isinstance(x, str) and x for x in static):
        raise TypeError(f'{wanted} that may differ, such as ["*.vocab_size"].')


def how_to_pass(names: Sequence[str]) -> str:
    """How to let changed fields pass, as code."""
    last = names[0].rpartition(".")[2] if names else ""
    return f'`static="ignore"` lets them pass, `static=["*.{last}"]` those of that name'


def passing(
    static: Static, statics: Statics, what: str, more: Iterable[str] = ()
) -> Callable[[str], bool]:
    """Whether the static field of a name may differ. `more`: names of fields besides
    those that are stored.

    **Raises:** `ValueError` for a pattern that is the name of none. It says `what` the
    fields are in.
    """
    check(static)
    if isinstance(static, str):
        return lambda name: static == "ignore"
    patterns = list(static)
    unused = set(patterns)
    names: list[str] = []
    if unused:
        names = [*all_names(statics), *more]
    for name in names:
        unused -= {x for x in unused if matches(x, name)}
        if not unused:
            break
    for pattern in patterns:
        if pattern in unused:
            near = _nearest.Names(names).nearest(pattern, 3)
            some = ", ".join(f"`{x}`" for x in near or names[:3])
            head = "The nearest there are" if near else "It has"
            raise ValueError(
                f"`static` has {pattern!r}, which names no static field of the {what}. "
                f"{head} {some or 'none'}."
            )
    return lambda name: any(matches(x, name) for x in patterns)


def all_names(statics: Statics, source: str = "") -> Iterator[str]:
    """The names of static fields, and of parts of those, below `source`."""
    for module, row in statics.of.items():
        module = ".".join(x for x in (source, module) if x)
        encoded = {} if statics.encoded is None else statics.encoded[row]
        plain = {name: encode(x) for name, x in statics.values[row].items()}
        todo = [(name, x) for name, x in (plain | encoded).items()]
        prefix = module + "." if module else ""
        while todo:
            name, x = todo.pop()
            yield prefix + name
            todo += [(f"{name}.{k}", y) for k, y in (_members(x) or {}).items()]


def matches(pattern: str, name: str) -> bool:
    """Whether a name is as a pattern says, in which `*` stands for any text. A leading
    `*.` may stand for nothing: what it is before is at the root then."""
    if pattern.startswith("*.") and matches(pattern[2:], name):
        return True
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for text in middle:
        found = name.find(text, at, end)
        if found < 0:
            return False
        at = found + len(text)
    return at <= end
