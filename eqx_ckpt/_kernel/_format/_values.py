"""Encoded values: the JSON of static values, and how two of them compare.

An encoded value is JSON. An object in it has one entry, whose key is its kind, as
FORMAT.md lists them. `_tree/_codec.py` encodes values, and `_rebuild/_decode.py` makes
them again.
"""

import collections
import functools as ft
import json
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _names, _template


# In the place of a field that is not set, and for which the class has no value.
ABSENT: dict[str, Any] = {"absent": []}


def split(x: object) -> tuple[str, Any]:
    """The kind of an encoded value ("": plain JSON), and its content."""
    if type(x) is dict and len(x) == 1:
        return next(iter(x.items()))
    return "", x


# ---- Plain values.


def plain(x: object) -> Any:
    """The value, as JSON holds it: tuples as lists.

    **Raises:** `ValueError` for a value that JSON does not hold.
    """
    if type(x) is list:
        return list(map(plain, x))
    kind, own = split(x)
    if kind == "":
        return x
    if kind in ("tuple", "spec"):
        return list(map(plain, own))
    if kind == "namedtuple" and len(own) in (3, 4):
        return list(map(plain, own[2]))
    if kind == "dict" and all(type(key) is str for key, _ in own):
        return {key: plain(item) for key, item in own}
    if kind == "absent" and own:
        return plain(own[0])
    if kind == "sub" and type(own[2]) in (int, float, str):
        return own[2]
    raise ValueError("JSON does not hold the value")


def is_plain(x: object) -> bool:
    try:
        plain(x)
    except _MALFORMED:
        return False
    return True


def plain_fields(text: str) -> dict[str, Any]:
    """The static fields of a `Leaves.fields_text` that JSON holds, by their names."""
    fields = parsed(text).items()
    return {_names.unquote(n): plain(x) for n, x in fields if is_plain(x)}


@ft.lru_cache(maxsize=16)
def parsed(text: str) -> dict[str, Any]:
    """The encoded values of a `Leaves.fields_text`, by their names, quoted. For nodes
    that have one text they are one object."""
    return json.loads(text) if text else {}


_MALFORMED = (
    *(ValueError, TypeError, LookupError, OverflowError, AttributeError),
    *(RecursionError, MemoryError),
)


# ---- Comparing.


class Name(NamedTuple):
    """The module that a function or a class says it is of, and its qualified name."""

    module: str
    qualified: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def shown(self) -> str:
        """The name by which people import it: in a public module that has it and is
        imported here, or else in its own."""
        return f"{_public_module(self, len(sys.modules))}.{self.qualified}"

    def is_alike(self, other: "Name") -> bool:
        """Whether both are of one package, in which functions may have moved. What a
        script has is in `__main__` when it runs, and elsewhere when it is imported."""
        packages = {self.package, other.package} - _SCRIPTS
        return self.qualified == other.qualified and len(packages) < 2


_SCRIPTS = {"__main__", "__mp_main__"}
_private = re.compile(r"(^|\.)_")


@ft.lru_cache(maxsize=4096)
def _public_module(name: Name, imported: int) -> str:
    """The shortest name of a public module that has a function or a class, or else that
    of its own. `imported`: how many modules are, as others may come to have it."""
    if not _private.search(name.module):
        return name.module
    first, found = name.qualified.partition(".")[0], []
    for other, module in [*sys.modules.items()]:
        if _private.search(other) or other.partition(".")[0] != name.package:
            continue
        # To ask a module for an attribute may import others.
        x = getattr(module, "__dict__", {}).get(first)
        if own := getattr(x, "__module__", None):
            if Name(own, getattr(x, "__qualname__", "")) == Name(name.module, first):
                found.append(other)
    return min(found, key=lambda x: (x.count("."), x), default=name.module)


def name_of(value: object) -> Name | None:
    """A name as an index has it; None for anything else."""
    if type(value) is list and len(value) == 2:
        if all(type(x) is str and x for x in value):
            return Name(*value)
    return None


def class_of(x: object) -> Name | None:
    """The class of an encoded object; None for any other value."""
    kind, own = split(x)
    is_object = kind in ("object", "fields", "unknown", "sub", "enum")
    return name_of(own[:2]) if is_object and type(own) is list else None


def compared(x: object) -> Any:
    """An encoded value as it is compared.

    A tuple is as good as a list, a scalar of NumPy as a number, a class that stands for
    a dtype as its name.
    """
    try:
        return _compared(x)
    except _MALFORMED:
        return {"malformed": None}


def _compared(x: object) -> Any:
    if type(x) is list:
        return list(map(_compared, x))
    kind, own = split(x)
    return x if kind == "" else _FORMS[kind](own)


def _pairs(own: Any) -> dict[str, Any]:
    return {"dict": [[_compared(key), _compared(item)] for key, item in own]}


def _object(own: list[Any]) -> dict[str, Any]:
    skipped = own[3] if len(own) > 3 else ()
    return {"object": [[n, _compared(x)] for n, x in own[2] if n not in skipped]}


def _sub(module: str, name: str, value: Any) -> Any:
    out = _compared(value)
    is_ordered = (module, name) == ("collections", "OrderedDict")
    return {"ordered": out["dict"]} if is_ordered else out


def _namedtuple(values: list[Any], fields: list[str] | None = None) -> Any:
    """Its values by fields, as these may have changed places. The values alone, if it
    was saved without the names of its fields."""
    if fields is None:
        return _listed(values)
    pairs = zip(fields, _listed(values), strict=True)
    return {"namedtuple": list(map(list, pairs))}


def _set(own: list[Any]) -> dict[str, Any]:
    return {"set": sorted(map(_compared, own), key=json.dumps)}


def _scalar(own: list[Any]) -> dict[str, Any]:
    name, data = own
    value = np.frombuffer(bytes.fromhex(data), _template.dtype_of(name), 1)[0]
    item = value.item()
    if type(item) is complex:
        return {"scalar": [name, {"repr": repr(item)}]}
    good = type(item) in (bool, int, float)
    if type(item) is float:
        return {"scalar": [name, _float(item)]}
    return {"scalar": [name, item if good else str(value)]}


def _float(x: float) -> Any:
    return x if x - x == 0 else {"repr": struct.pack("<d", x).hex()}


def _same(kind: str) -> Callable[[Any], Any]:
    return lambda own: {kind: own}


def _listed(own: list[Any]) -> list[Any]:
    return list(map(_compared, own))


FLOATS = {"nan": "000000000000f87f", "inf": "000000000000f07f"}
FLOATS["-inf"] = "000000000000f0ff"

_FORMS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("tuple", "spec"), _listed),
    **dict.fromkeys(("set", "frozenset"), _set),
    **dict.fromkeys(("object", "fields"), _object),
    **dict.fromkeys(("numpy", "jax", "dtype"), _same("dtype")),
    **dict.fromkeys(("name", "made"), _same("name")),
    **{kind: _same(kind) for kind in ("any", "unknown", "array", "digest", "module")},
    "dict": _pairs,
    "namedtuple": lambda own: _namedtuple(*own[2:]),
    "sub": lambda own: _sub(*own),
    "enum": lambda own: {"enum": [own[2], _compared(own[3])]},
    "float": lambda own: {"repr": FLOATS.get(own, own)},
    "int": lambda own: {"repr": own},
    "str": lambda own: {"repr": own},
    "bytes": lambda own: {"repr": "bytes " + own},
    "complex": lambda own: {"repr": repr(complex(*map(float.fromhex, own)))},
    "range": lambda own: {"range": _listed(own)},
    "slice": lambda own: {"slice": _listed(own)},
    "ellipsis": lambda own: {"repr": "..."},
    "shared": lambda own: {"any": "Shared"},
    "repr": lambda own: {"dtype": own[1]} if own[0] == "dtype" else {"repr": own[1]},
    "builtin": lambda own: (
        {"dtype": own} if own in _NUMBERS else {"name": ["builtins", own]}
    ),
    "scalar": _scalar,
    "partial": lambda own: {
        "partial": [_compared(own[0]), _listed(own[1]), _pairs(own[2])]
    },
    "method": lambda own: {"method": [{"name": own[0]}, _compared(own[1])]},
    "default": lambda own: _compared(own[1]),
    "absent": lambda own: _compared(own[0]) if own else ABSENT,
    "markers": lambda own: {"any": "markers"},
}
_NUMBERS = ("bool", "int", "float", "complex")


def is_alike(a: object, b: object) -> bool:
    """Whether two values, as `compared` gives them, are the same."""
    (one, x), (two, y) = split(a), split(b)
    if one != two:
        bare = _bare(one, x), _bare(two, y)
        return bare != (a, b) and is_alike(*bare)
    if one == "any":
        return True
    if one in ("name", "unknown"):
        names = name_of(x), name_of(y)
        if names[0] is None or names[1] is None:
            return x == y
        return names[0].is_alike(names[1])
    if one in ("dict", "object", "namedtuple"):
        there, here = _by_keys(x), _by_keys(y)
        if there and there.keys() == here.keys():
            return all(is_alike(there[key], here[key]) for key in there)
    if type(x) is list and type(y) is list:
        return len(x) == len(y) and all(map(is_alike, x, y))
    if type(x) is not type(y):
        return False
    # To `==` 0.0 and -0.0 are one.
    return repr(x) == repr(y) if type(x) is float else x == y


def _by_keys(pairs: Any) -> dict[str, Any]:
    """Parts by the JSON of their keys; none, if two have the same."""
    try:
        out = {json.dumps(key): item for key, item in pairs}
        return out if len(out) == len(pairs) else {}
    except _MALFORMED:
        return {}


def _bare(kind: str, value: object) -> Any:
    """The plain value of an enum, a named tuple, a scalar of NumPy, a dtype or an
    `OrderedDict`."""
    if kind == "ordered":
        return {"dict": value}
    if kind == "namedtuple" and type(value) is list:
        return [pair[-1] for pair in value if type(pair) is list and pair]
    if kind in ("enum", "scalar") and type(value) is list and value:
        return value[-1]
    return value if kind in ("", "dtype") else {kind: value}


# A part whose name below the value is longer has no parts with names of their own.
_MAX_NAMED = 1000
# In the place of a part that only one side has.
NOTHING: Any = {"nothing": None}


def parts(x: object) -> dict[str, Any] | None:
    """The fields of an object or a named tuple and the values of a dict, as `compared`
    gives them, by the parts of their names."""
    kind, value = split(x)
    if kind not in ("dict", "ordered", "object", "namedtuple"):
        return None
    out = {}
    for key, item in value:
        if type(key) is not str:
            return None
        out[_names.quote(key)] = item
    return out


def _parts_at(name: str, x: object) -> dict[str, Any] | None:
    """The parts of a part of a value, which has this name below the value."""
    return parts(x) if len(name) <= _MAX_NAMED else None


def spread(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Values by their names, with the parts of each in its place that some of `names`
    are below: also the items of a list."""
    above: set[str] = set()
    for name in names:
        while name and (name := name.rpartition(".")[0]) not in above:
            above.add(name)
    out, todo = {}, [*values.items()]
    for name, form in todo:
        own = parts(form) if name in above else None
        if name in above and type(form) is list:
            own = {str(i): x for i, x in enumerate(form)}
        if own is None:
            out[name] = form
        else:
            todo += [(_names.joined(name, part), x) for part, x in own.items()]
    return out


def part_names(x: object) -> Iterator[str]:
    """The dotted names below a value of all parts that `changes` may give."""
    todo = collections.deque([("", x)])
    while todo:
        name, form = todo.popleft()
        for part, inner in (_parts_at(name, form) or {}).items():
            whole = _names.joined(name, part)
            yield whole
            todo.append((whole, inner))


def changes(a: object, b: object) -> list[tuple[str, Any, Any]]:
    """The innermost parts in which two values differ, as `compared` gives them: the
    dotted name of each below the value, and the part on either side."""
    todo, out = [("", a, b)], []
    for name, x, y in todo:
        old, new = _parts_at(name, x), _parts_at(name, y)
        some = []
        if old is not None and new is not None:
            for part in dict.fromkeys([*old, *new]):
                both = old.get(part, NOTHING), new.get(part, NOTHING)
                if not is_alike(*both):
                    some.append((_names.joined(name, part), *both))
        todo += some
        if not some:
            out.append((name, x, y))
    return out


# ---- For people.

_MAX_DEPTH = 100


def show(x: object, most: int = 200) -> str:
    """A value, as `compared` gives it, for people."""
    text = _shown(x, 0)
    return text if len(text) <= most else text[:most] + "..."


def _shown(x: object, depth: int) -> str:
    if depth > _MAX_DEPTH:
        return "..."
    below = ft.partial(_shown, depth=depth + 1)
    kind, value = split(x)
    members = parts(x)
    if members is not None:
        items = ", ".join(f"{key!r}: {below(item)}" for key, item in members.items())
        return f"{{{items}}}"
    if kind in ("name", "unknown") and (name := name_of(value)) is not None:
        return name.shown if kind == "name" else f"a `{name.shown}`"
    if type(value) is list:
        if kind == "enum" and len(value) == 2:
            return f"{value[0]} ({below(value[1])})"
        if kind == "scalar" and len(value) == 2:
            return f"{value[0]} {below(value[1])}"
        if kind == "array" and len(value) == 3:
            digest = f", digest {value[2]!s:.8}" if value[2] else ""
            return f"an array, {value[0]} {below(value[1])}{digest}"
        if kind in ("range", "slice"):
            return f"{kind}({', '.join(map(below, value))})"
        return f"[{', '.join(map(below, value))}]"
    if kind == "repr":
        return RARE.get(str(value), str(value))
    if kind in ("dtype", "module"):
        return str(value)
    if kind:
        return "nothing" if kind in ("nothing", "absent") else "another value"
    return repr(value)


RARE = {bits: text for text, bits in FLOATS.items()}
