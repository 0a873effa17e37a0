"""Nodes of a tree, opened a type at a time: their children, and all else they have.

`opener_of` says what opens nodes of a type. Nodes of one type are opened together: of a
hundred Modules each field is taken once, by one call.
"""

import collections
import dataclasses
import functools as ft
import itertools as it
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._format import _names, _values
from .._format._record import HOWS, Kind
from . import _codec, _named, _node
from ._node import Node


class Opened(NamedTuple):
    """Nodes of one type that are of one kind.

    - `letters`: of the keys of their children, as in `Template.keys`.
    - `numbers`: which they are, of the nodes that were opened together.
    - `children`, `by_node`: their children, node after node; or, if not `by_node`, all
        first children, all second ones and so on.
    - `data`: for each name of `kind.data` a column with the values.
    """

    kind: Kind
    letters: str
    numbers: list[int]
    children: list[Any]
    by_node: bool
    data: list[list[Any]]


Opener = Callable[[type, Sequence[Any]], list[Opened]]

_registry = jtu.default_registry
open_one_level = _registry.flatten_one_level
# Equinox has this where a Module lacks a field.
MISSING = next(iter(open_one_level(object.__new__(eqx.nn.Dropout))[0]))
_Missing = type(MISSING)


def opener_of(cls: type, example: object) -> Opener | None:
    """What opens nodes of a type; None for leaves."""
    if cls is list or cls is tuple:
        return _open_sequences
    if cls in _DICTS:
        return _open_dicts
    if cls in (type(None), _Missing, DefaultChild):
        return _open_nones
    if jtu.all_leaves([example]):
        return None
    if _named.is_module(cls):
        return _open_modules if _opens_as_known(example) else _open_each
    if is_namedtuple(cls):
        return _open_namedtuples
    return _open_each


# ---- Modules.


class ModuleFields(NamedTuple):
    """The fields of a class of Modules that are children, those that are static, and
    the kind of nodes that have all of them and nothing else."""

    dynamic: tuple[str, ...]
    static: tuple[str, ...]
    kind: Kind


@ft.lru_cache(maxsize=4096)
def module_fields(cls: type) -> ModuleFields:
    both: tuple[list[str], list[str]] = [], []
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        both[bool(field.metadata.get("static", False))].append(field.name)
    how = "index" if eqx.nn.StateIndex in cls.__mro__ else "module"
    dynamic, static = map(tuple, both)
    parts, data = tuple(map(_names.quote, dynamic)), tuple(map(_names.quote, static))
    name = _named.class_name(cls) if how == "module" else ("", "")
    return ModuleFields(dynamic, static, Kind(how, name, parts, data))


class Default(NamedTuple):
    """The value of a static field that a class has, of a Module that has none."""

    value: Any


class DefaultChild:
    """In the place of a child that a Module lacks: a function that its class has."""

    def __init__(self, value: object):
        self.value = value


def _default(cls: type, name: str) -> Any:
    found = getattr(cls, name, MISSING)
    return MISSING if found is MISSING else Default(found)


def _default_child(cls: type, name: str) -> Any:
    found = getattr(cls, name, MISSING)
    return MISSING if _named.name_of(found) is None else DefaultChild(found)


def attributes_of(modules: Sequence[Any]) -> list[dict[str, Any]]:
    """The attributes of Modules. Equinox looks at each one that it gives."""
    return list(map(object.__getattribute__, modules, it.repeat("__dict__")))


def _open_modules(cls: type, nodes: Sequence[Any]) -> list[Opened]:
    own = attributes_of(nodes)
    dynamic, static, kind = module_fields(cls)
    fields = {*dynamic, *static}
    groups = [(kind, [*range(len(nodes))], own)]
    if not all(map(operator.eq, map(dict.keys, own), it.repeat(fields))):
        absent = {name: _default_child(cls, name) for name in dynamic}
        absent |= {name: _default(cls, name) for name in static}
        own = [absent | x for x in own]
        more = [{type(x[key]) for key in x.keys() - fields} for x in own]
        # A wrapper, as of a function, has more than its fields: `__doc__` and such. So
        # has a Module that lacks a field, once Equinox has put it together: all of
        # these are MISSING then.
        hows = [kind.how if x <= {_Missing} else "wrapper" for x in more]
        groups = [
            (kind._replace(how=how), places, [own[i] for i in places])
            for how, places in by_signature(hows).items()
        ]
    out = []
    for kind, places, some in groups:
        children: list[Any] = []
        for name in dynamic:
            children += map(operator.itemgetter(name), some)
        data = [list(map(operator.itemgetter(name), some)) for name in static]
        out.append(Opened(kind, "a" * len(dynamic), places, children, False, data))
    return out


def _opens_as_known(x: object) -> bool:
    """Whether Equinox flattens a Module as it is opened here. Should that ever change,
    Equinox flattens each one."""
    (own,) = attributes_of([x])
    dynamic, static, _ = module_fields(type(x))
    children, aux = open_one_level(x)
    ids = lambda names: [id(own.get(name, MISSING)) for name in names]
    return (
        type(aux) is tuple
        and list(map(id, children)) == ids(dynamic)
        and list(map(id, aux[1:])) == ids(static)
    )


# ---- Containers of Python.


@ft.lru_cache(maxsize=4096)
def _sequence_kind(how: str, count: int) -> Kind:
    return Kind(how, parts=tuple(map(str, range(count))))


def _open_sequences(cls: type, nodes: Sequence[Any]) -> list[Opened]:
    out = []
    for count, places in by_signature(list(map(len, nodes))).items():
        some = nodes if len(places) == len(nodes) else [nodes[i] for i in places]
        children, by_node = _lay(some, count)
        kind = _sequence_kind(cls.__name__, count)
        out.append(Opened(kind, "s" * count, places, children, by_node, []))
    return out


def by_signature(signatures: Sequence[Any]) -> dict[Any, list[int]]:
    """The places at which each signature stands, such as a type: nodes of one signature
    are opened together."""
    out: dict[Any, list[int]] = {}
    for place, signature in enumerate(signatures):
        out.setdefault(signature, []).append(place)
    return out


def _lay(rows: Sequence[Sequence[Any]], width: int) -> tuple[list[Any], bool]:
    """The children of nodes that have as many, and whether node by node."""
    if len(rows) < width or len(rows) == 1:
        return list(it.chain.from_iterable(rows)), True
    return list(it.chain.from_iterable(zip(*rows))), False


_DICTS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.defaultdict: "default",
}


def _open_dicts(cls: type, nodes: Sequence[Any]) -> list[Opened]:
    rows, keys = zip(*map(open_one_level, nodes))
    factories = ()
    if cls is collections.defaultdict:
        factories, keys = zip(*keys)
    signatures = list(map(tuple, keys))
    are_texts = {*map(type, it.chain.from_iterable(keys))} <= {str}
    if not are_texts:  # To `==` 1 and True are one, and have other names.
        text = lambda x: "" if type(x) is int else repr(x)
        signatures = [tuple((x, type(x), text(x)) for x in own) for own in keys]
    how, out = _DICTS[cls], []
    for places in by_signature(signatures).values():
        own = keys[places[0]]
        if are_texts or {*map(type, own)} <= {str}:
            parts, letters, text = _quoted(tuple(own)), "k" * len(own), ""
        else:
            parts, letters, _ = _child_keys(own, _names.key_component)
            text = json.dumps(list(map(_codec.encode, own)))
        kind = Kind(how, parts=parts, data=HOWS[how].data, keys=text)
        children, by_node = _lay([rows[i] for i in places], len(parts))
        data = [[factories[i] for i in places]] if factories else []
        out.append(Opened(kind, letters, places, children, by_node, data))
    return out


@ft.lru_cache(maxsize=16)
def _quoted(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_names.quote, keys))


# Before the part of a name that cannot be one; what is wrong with it follows.
BAD = "\0"


class _ChildKeys(NamedTuple):
    """The keys of children as parts of names and as letters; and whether all are
    positions of children without keys."""

    parts: tuple[str, ...]
    letters: str
    are_bare: bool


def _child_keys(
    keys: Sequence[Any],
    component: Callable[[Any], tuple[str, str]] = _names.component,
) -> _ChildKeys:
    parts, letters = [], ""
    for key in keys:
        try:
            letter, part = component(key)
        except ValueError as e:
            letter, part = "o", BAD + str(e).replace(".", BAD)
        parts.append(part)
        letters += letter
    are_bare = all(
        type(key) is jtu.FlattenedIndexKey and key.key == i
        for i, key in enumerate(keys)
    )
    return _ChildKeys(tuple(parts), letters, are_bare)


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _is_plain_tuple(cls: Any) -> bool:
    """Whether JAX knows a type of named tuples without that anybody registered it, who
    may do so at any time."""
    try:
        one = jtu.tree_structure(tuple.__new__(cls, cls._fields))
    except Exception:
        return False
    return f"namedtuple[{cls.__name__}]" in str(one)


def _open_namedtuples(cls: Any, nodes: Sequence[Any]) -> list[Opened]:
    if not _is_plain_tuple(cls):
        return _open_each(cls, nodes)
    parts = tuple(map(_names.quote, cls._fields))
    kind = Kind("namedtuple", _named.class_name(cls), parts)
    children, by_node = _lay(nodes, len(parts))
    every = [*range(len(nodes))]
    return [Opened(kind, "a" * len(parts), every, children, by_node, [])]


def _open_nones(cls: type, nodes: Sequence[Any]) -> list[Opened]:
    kind, data = Kind("absent" if cls is _Missing else "none"), []
    if cls is DefaultChild:
        kind, data = Kind("absent", data=("",)), [[x.value for x in nodes]]
    return [Opened(kind, "", [*range(len(nodes))], [], False, data)]


# ---- Nodes that a registered function flattens, one by one.


def _open_each(cls: type, nodes: Sequence[Any]) -> list[Opened]:
    one_by_one = {
        Node: _open_node,
        eqx.nn.State: _open_state,
        jtu.Partial: _open_partial,
    }
    opened = list(map(one_by_one.get(cls, _open_custom), nodes))
    out = []
    kinds = [(one.kind, one.letters) for one in opened]
    for (kind, letters), places in by_signature(kinds).items():
        some = [opened[i] for i in places]
        children, by_node = _lay([one.children for one in some], len(kind.parts))
        data = list(map(list, zip(*(one.data for one in some))))
        out.append(Opened(kind, letters, places, children, by_node, data))
    return out


class _OpenedOne(NamedTuple):
    """One opened node: its kind, the letters of its keys, its children and its data."""

    kind: Kind
    letters: str
    children: list[Any]
    data: list[Any]


def _open_custom(x: object) -> _OpenedOne:
    """A node of any other class. Static values of a dataclass are its other fields, and
    those of another class what it gives JAX beside the children."""
    cls = type(x)
    pairs, aux = _registry.flatten_one_level_with_keys(x)
    given, children = [key for key, _ in pairs], [child for _, child in pairs]
    keys = _child_keys(given)
    if aux is x:
        kind = Kind("static", _named.class_name(cls), data=HOWS["static"].data)
        return _OpenedOne(kind, keys.letters, children, [aux])
    held = attributes(x)
    labels = _labels(x, held, children) if keys.are_bare and children else ()
    # The attribute that each child is.
    of = labels or [k.name if type(k) is jtu.GetAttrKey else None for k in given]
    if _are_fields(x, of, children):
        how, data = "custom" if labels else "dataclass", _other_fields(x, of)
    else:
        how, data = "custom", _custom_data(aux, given, _others(held, of, children))
    names = tuple(map(_names.quote, data))
    kind = Kind(how, _named.class_name(cls), keys.parts, names, labels)
    return _OpenedOne(kind, keys.letters, children, list(data.values()))


def _open_partial(x: object) -> _OpenedOne:
    pairs, function = _registry.flatten_one_level_with_keys(x)
    keys = _child_keys([key for key, _ in pairs])
    kind = Kind("partial", parts=keys.parts, data=HOWS["partial"].data)
    return _OpenedOne(kind, keys.letters, [child for _, child in pairs], [function])


def _open_state(x: object) -> _OpenedOne:
    children, markers = open_one_level(x)
    parts = tuple(map(str, range(len(children))))
    kind = Kind("state", parts=parts, data=HOWS["state"].data)
    return _OpenedOne(kind, "f" * len(parts), list(children), [tuple(markers)])


def _are_fields(x: Any, of: Sequence[str | None], children: Sequence[Any]) -> bool:
    """Whether the children of a node are fields of a dataclass, of these names."""
    if not dataclasses.is_dataclass(type(x)):
        return False
    names = [field.name for field in dataclasses.fields(x)]
    return all(
        name in names and getattr(x, str(name), MISSING) is child
        for name, child in zip(of, children)
    )


def _other_fields(x: Any, of: Sequence[str | None]) -> dict[str, Any]:
    """The fields of a dataclass that are no children."""
    names = (field.name for field in dataclasses.fields(x))
    return {name: getattr(x, name, MISSING) for name in names if name not in of}


def _others(
    held: dict[str, Any], of: Sequence[str | None], children: Sequence[Any]
) -> dict[str, Any]:
    """The attributes of a node that are no children. Children without a name are known
    by what they are."""
    nameless = {id(child) for name, child in zip(of, children) if name is None}
    return {n: y for n, y in held.items() if n not in of and id(y) not in nameless}


def _custom_data(
    aux: Any, keys: Sequence[Any], attributes: dict[str, Any]
) -> dict[str, Any]:
    """The static values of a node, by names: those of its attributes where all are
    some of these, in whatever order the node gives them."""
    if _repeats(aux, keys):
        return {}
    items = [aux]
    if type(aux) in (dict, tuple, list):
        items = list(aux.values() if type(aux) is dict else aux)
    ids = {id(y) for y in items}
    named = {name: y for name, y in attributes.items() if id(y) in ids}
    if ids <= {*map(id, named.values())}:
        return dict(sorted(named.items()))
    return {"aux": aux}


def _repeats(aux: Any, keys: Sequence[Any]) -> bool:
    """Whether all that a node says beside its children is the keys of these."""
    if type(aux) not in (tuple, list) or len(aux) != len(keys):
        return False
    fields = [
        getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
        for key in keys
    ]
    same = lambda a, b: a is b or type(a) is type(b) and bool(a == b)
    try:
        return all(same(a, b) or same(a, c) for a, b, c in zip(aux, keys, fields))
    except Exception:  # Of a class that we do not know.
        return False


def attributes(x: object) -> dict[str, Any]:
    """The attributes of an object, without its properties."""
    try:
        own = dict(object.__getattribute__(x, "__dict__"))
    except AttributeError:
        own = {}
    for base in type(x).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                own[name] = vars(base)[name].__get__(x)
            except Exception:
                continue
    return own


def _labels(
    x: object, held: dict[str, Any], children: Sequence[Any]
) -> tuple[str | None, ...]:
    """The one attribute that each child of a node is; None where that is none."""
    labels = _find_each(held, children)
    ids = [*map(id, held.values())]
    shared = any(ids.count(id(x)) > 1 for x in children)
    if None in labels and (shared or len({*map(id, children)}) < len(children)):
        # Some are one object: only others in their places tell them apart.
        probes = [object() for _ in children]
        structure = jtu.tree_structure(x, is_leaf=lambda y: y is not x)
        try:
            other = attributes(jtu.tree_unflatten(structure, probes))
        except Exception:  # Of a class that looks at what it is given.
            other = {}
        labels = _find_each(other, probes) if other else labels
    known = [label for label in labels if label is not None]
    return labels if known and len({*known}) == len(known) else ()


def _find_each(
    attributes: dict[str, Any], children: Sequence[Any]
) -> tuple[str | None, ...]:
    names: dict[int, list[str]] = {}
    for name, value in attributes.items():
        names.setdefault(id(value), []).append(name)
    some = [names.get(id(child), []) for child in children]
    return tuple(x[0] if len(x) == 1 else None for x in some)


class Encoded(NamedTuple):
    """A value that is encoded as it is."""

    value: Any


def _state_index(label: str) -> eqx.nn.StateIndex:
    """The StateIndex of an entry of a State that has this label where it is stored."""
    # Its `__init__` gives it a marker of its own, and asks for an initial value.
    out = object.__new__(eqx.nn.StateIndex)
    object.__setattr__(out, "marker", Encoded(label))
    object.__setattr__(out, "init", None)
    return out


def _open_node(x: Node) -> _OpenedOne:
    """A node of a checkpoint's own tree, which says its fields and labels itself."""
    body = _node.body_of(x)
    body.check_below()
    spec = body.spec
    letters = "".join(letter for letter, _ in spec.keys)
    parts = tuple(_node.components(spec))
    if spec.labels:
        kind = Kind("state", parts=parts, data=HOWS["state"].data)
        labels = tuple(map(Encoded, spec.labels))
        return _OpenedOne(kind, letters, body.children, [labels])
    fields = dict(_values.parsed(spec.fields))
    if spec.is_sequence and spec.size > 1 + int(spec.keys[-1].key):
        fields.setdefault(str(spec.size - 1), _values.ABSENT)
    data = list(map(Encoded, fields.values()))
    indices = {part: label for part, label in spec.indices if part not in parts}
    children = [*body.children, *map(_state_index, indices.values())]
    attributes = spec.attributes and (*spec.attributes, *[None] * len(indices))
    parts, letters = (*parts, *indices), letters + "a" * len(indices)
    kind = Kind("node", parts=parts, data=tuple(fields), attributes=attributes)
    return _OpenedOne(kind, letters, children, data)
