"""Trees made again of the structure that was recorded, without `__init__`."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import DamagedError
from .._format import _names, _structure
from .._format._leaves import Leaves
from .._format._structure import Structure
from . import _exact, _named, _show, _structure as _recorded
from ._known import Known
from ._named import Name


class Given(NamedTuple):
    """What a caller gives: what names may stand for, and values by name."""

    known: Known
    replace: Mapping[str, Any]


class Makers(NamedTuple):
    """How leaves are made: `leaf(place, cls)` of the stored leaf in this place, of a
    type of its own if `cls` is not None; `like(name, value)` of what is given for a
    node that has stored leaves."""

    leaf: Callable[[int, type | None], Any]
    like: Callable[[str, Any], Any]


class Problems(_show.Problems):
    """All that is missing, by its kind; and the keys of `replace` that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        self.could: list[str] = []

    def add(self, kind: str, name: str, text: str = "") -> None:
        super().add(kind, name or _names.ROOT, text)


class Rebuilt(NamedTuple):
    """A tree, which is of no use if there are problems."""

    tree: Any
    problems: Problems


class Recorded(NamedTuple):
    """What is known of a tree, and how many leaves there are in each row."""

    leaves: Leaves
    structure: Structure
    counts: list[int]


def rebuild(leaves: Leaves, source: str, given: Given, makers: Makers) -> Rebuilt:
    """The node of this name ("": the tree).

    **Raises:** `Malformed` for a structure that is never saved with these leaves.
    """
    assert leaves.structure is not None
    try:
        parts = sum(name.count(".") + 1 for name in leaves.names)
        counts = _structure.check(leaves.structure, len(leaves.names), parts)
    except ValueError as e:
        raise _exact.Malformed(str(e)) from e
    builder = _Builder(Recorded(leaves, leaves.structure, counts), given, makers)
    row, at = builder.locate(source)
    builder.at = at
    out = builder.make(row, source, None)
    return Rebuilt(out, builder.problems)


_DICTS = "dict", "ordered", "default"


class _Field(NamedTuple):
    """Where a value is: its name, and the class of the Module whose field it is."""

    name: str
    owner: type | None


class _Absent:
    """In the place of a class that is not known."""


class _Builder:
    """Makes nodes in the order of their leaves, of which the next is in place `at`."""

    def __init__(self, recorded: Recorded, given: Given, makers: Makers):
        self.at = 0
        self.problems = Problems()
        self._leaves, self._structure, self._counts = recorded
        self._known, self._replace = given
        self._makers = makers
        self._markers: dict[str, Any] = {}
        self._found: dict[Name, list[Any]] = {}
        # Of rows whose children have names: those, quoted, and the keys of a dict.
        self._parts: dict[int, list[str]] = {}
        self._keys: dict[int, list[Any]] = {}

    def locate(self, source: str) -> tuple[int, int]:
        """The row of the node of a name, and the place of the first leaf in it."""
        row, at, name = len(self._structure.nodes) - 1, 0, ""
        while name != source:
            for child, component, first in self._children(row, name, at):
                below = _joined(name, component)
                if _names.is_under(source, below):
                    row, at, name = child, first, below
                    break
            else:
                raise _exact.Malformed(f"there is no node {source!r} in it")
        return row, at

    def _children(self, row: int, name: str, at: int) -> Iterator[tuple[int, str, int]]:
        """Of each child of a node its row, the last part of its name, and the place of
        its first leaf, if it has some."""
        kind, children, *rest = self._structure.nodes[row]
        parts = self._parts.get(row)
        if parts is None and kind in ("namedtuple", "module", "dataclass"):
            parts = list(map(_names.quote, self._structure.types[rest[0]][2]))
        elif parts is None and kind in _DICTS and rest[0] is not None:
            parts = list(map(_component, self._keys_of(row)))
        if parts is not None:
            self._parts[row] = parts
        start = len(name) + 1 if name else 0
        for position, child in enumerate(_structure.unpacked(children)):
            if parts is not None:
                part = parts[position]
            elif kind in _DICTS:
                if at >= len(self._leaves.names):
                    raise _exact.Malformed("its leaves have other names")
                part = self._leaves.names[at][start:].partition(".")[0]
            else:
                part = str(position)
            yield child, part, at
            at += self._counts[child]

    def _keys_of(self, row: int) -> list[Any]:
        """Those of a dict whose row has them."""
        if row not in self._keys:
            encoded = self._structure.nodes[row][2]
            found = _exact.decode(encoded, _Resolver(self, _Field("", None)))
            self._keys[row] = found
        return self._keys[row]

    def make(self, row: int, name: str, owner: type | None) -> Any:
        """The node or leaf of a row."""
        kind, children, *rest = self._structure.nodes[row]
        if kind not in ("leaf", "leaf of") and self._is_given(name):
            return self._given(row, name)
        return getattr(self, "_" + kind.replace(" ", "_"))(row, _Field(name, owner))

    def _is_given(self, name: str) -> bool:
        """Whether `replace` has a value of this name. That of the tree is `%root`."""
        key = name or _names.ROOT
        if key in self._replace:
            self.problems.used.add(key)
        return key in self._replace

    def _given(self, row: int, name: str) -> Any:
        places = range(self.at, self.at + self._counts[row])
        self.at = places.stop
        value = self._replace[name or _names.ROOT]
        return self._makers.like(name, value) if places else value

    def _skip(self, row: int) -> None:
        """Of a node that cannot be made: what is below it is in its replacement."""
        self.at += self._counts[row]

    def _rows(self, row: int, name: str, owner: type | None = None) -> list[Any]:
        return [
            self.make(child, _joined(name, part), owner)
            for child, part, _ in self._children(row, name, self.at)
        ]

    def _leaf(self, row: int, field: _Field, cls: type | None = None) -> Any:
        place = self.at
        self.at += 1
        if self._leaves.names[place] != (field.name or _names.ROOT):
            raise _exact.Malformed("its leaves have other names")
        return self._makers.leaf(place, cls)

    def _leaf_of(self, row: int, field: _Field) -> Any:
        cls = self._class(self._structure.nodes[row][2], field, object)
        return self._leaf(row, field, cls)

    def _value(self, row: int, field: _Field) -> Any:
        return self._exact(self._structure.nodes[row][2], field)

    def _exact(self, encoded: Any, field: _Field) -> Any:
        if self._is_given(field.name):
            return self._replace[field.name or _names.ROOT]
        self.problems.could.append(field.name)
        return _exact.decode(encoded, _Resolver(self, field))

    def _none(self, row: int, field: _Field) -> None:
        return None

    def _tuple(self, row: int, field: _Field) -> tuple:
        return tuple(self._rows(row, field.name))

    def _list(self, row: int, field: _Field) -> list:
        return self._rows(row, field.name)

    def _dict(self, row: int, field: _Field) -> dict[Any, Any]:
        encoded = self._structure.nodes[row][2]
        at, values = self.at, self._rows(row, field.name)
        if encoded is None:
            keys = list(self._stored_keys(row, field.name, at))
        else:
            keys = self._keys_of(row)
        try:
            _names.check_hashes(keys)
            out = dict(zip(keys, values, strict=True))
        except TypeError as e:
            raise _exact.Malformed("a list is a key") from e
        except DamagedError as e:
            raise _exact.Malformed(str(e)) from e
        if len(out) != len(values):
            raise _exact.Malformed("two keys are one")
        return out

    def _stored_keys(self, row: int, name: str, at: int) -> Iterator[str | int]:
        depth = name.count(".") + 1 if name else 0
        for _, part, first in self._children(row, name, at):
            number = self._leaves.template[first]
            kinds = self._leaves.templates[number].keys
            if type(kinds) is not str or kinds[depth : depth + 1] not in ("k", "i"):
                raise _exact.Malformed("its keys are of another kind")
            try:
                yield _names.key_of(kinds[depth], part, not name)
            except ValueError as e:
                raise _exact.Malformed(str(e)) from e

    def _ordered(self, row: int, field: _Field) -> Any:
        return collections.OrderedDict(self._dict(row, field))

    def _default(self, row: int, field: _Field) -> Any:
        factory = _joined(field.name, "default_factory")
        made = self._exact(self._structure.nodes[row][3], _Field(factory, None))
        items = self._dict(row, field)
        return collections.defaultdict(made if callable(made) else None, items)

    def _partial(self, row: int, field: _Field) -> Any:
        func = _Field(_joined(field.name, "func"), None)
        made = self._exact(self._structure.nodes[row][2], func)
        args, keywords = self._rows(row, field.name)
        if type(args) is not tuple or not _is_keywords(keywords):
            raise _exact.Malformed("a Partial has arguments and keywords")
        return jtu.Partial(made, *args, **keywords) if callable(made) else None

    def _state(self, row: int, field: _Field) -> Any:
        markers = list(map(self._marker, self._structure.nodes[row][2]))
        children = self._rows(row, field.name)
        if len({*markers}) != len(children):
            raise _exact.Malformed("two entries of a State are one")
        return eqx.nn.State.tree_unflatten(markers, children)

    def _index(self, row: int, field: _Field) -> Any:
        marker = self._marker(self._structure.nodes[row][2])
        children = list(self._children(row, field.name, self.at))
        init = _recorded.no_init()
        if children:
            init = self.make(children[0][0], _joined(field.name, "init"), None)
        return _exact.made(eqx.nn.StateIndex, {"marker": marker, "init": init})

    def _marker(self, text: str) -> Any:
        return text[1:] if text[0] == "=" else self._markers.setdefault(text, object())

    def _namedtuple(self, row: int, field: _Field) -> Any:
        kind = self._structure.types[self._structure.nodes[row][2]]
        cls = self._class(kind[:2], field, tuple)
        if cls is None:
            self._rows(row, field.name)
            return None
        if not _exact.is_namedtuple(cls) or list(cls._fields) != kind[2]:
            return self._differs(row, field, cls, list(getattr(cls, "_fields", [])))
        return tuple.__new__(cls, self._rows(row, field.name))

    def _module(self, row: int, field: _Field) -> Any:
        return self._object(row, field, eqx.Module)

    def _dataclass(self, row: int, field: _Field) -> Any:
        return self._object(row, field, object)

    def _object(self, row: int, field: _Field, base: type) -> Any:
        _, _, number, encoded = self._structure.nodes[row]
        module, qualified, dynamic, static, unset = self._structure.types[number]
        cls = self._class([module, qualified], field, base)
        if cls is None:
            # All that is lacking is to be in one error.
            self._rows(row, field.name, _Absent)
            for name, x in zip(static, encoded, strict=True):
                at = _joined(field.name, _names.quote(name))
                self._exact(x, _Field(at, _Absent))
            return None
        here = _fields_of(cls, base is eqx.Module)
        if here is None or not _is_fit(here, dynamic, static, unset):
            return self._differs(row, field, cls, list(here or ()))
        values = dict(zip(dynamic, self._rows(row, field.name, cls), strict=True))
        for name, x in zip(static, encoded, strict=True):
            at = _Field(_joined(field.name, _names.quote(name)), cls)
            values[name] = self._exact(x, at)
        for name in here.keys() - {*dynamic, *static, *unset}:
            new = _joined(field.name, _names.quote(name))
            text = f"a field that `{cls.__qualname__}` did not have when it was saved"
            values[name] = self._exact({"unknown": text}, _Field(new, cls))
        return _exact.made(cls, {name: values[name] for name in here if name in values})

    def _differs(self, row: int, field: _Field, cls: type, here: list[str]) -> None:
        kind = self._structure.types[self._structure.nodes[row][2]]
        saved = ", ".join([*kind[2], *kind[3]])
        text = f"a `{cls.__qualname__}` of the fields {saved}; it has {', '.join(here)}"
        self.problems.add("value", field.name, text)
        self._skip(row)

    def _other(self, row: int, field: _Field) -> None:
        text = self._structure.nodes[row][3]
        self.problems.add("node", field.name, f"a `{text}`")
        self._skip(row)

    def _class(self, name: list[Any], field: _Field, base: type) -> Any:
        parsed = _named.parse(name)
        if parsed is None:
            self.problems.add("node", field.name, f"a `{name[-1]}`")
            return None
        cls = self.find(parsed, field.name)
        if cls is not None and not (isinstance(cls, type) and issubclass(cls, base)):
            text = f"a `{parsed.shown}`, which is no class of that kind"
            self.problems.add("value", field.name, text)
            return None
        return cls

    def find(self, name: Name, field: str) -> Any:
        if name not in self._found:
            self._found[name] = self._known.find(name)
        found = self._found[name]
        if len(found) == 1:
            return found[0]
        if not found:
            self.problems.add("lacks", name.shown, field)
        else:
            some = ", ".join(sorted(_shown(x) for x in found))
            self.problems.add("several", name.shown, some)
        return None


def _shown(x: Any) -> str:
    name = _named.own(x)
    return "" if name is None else f"`{name.shown}`"


class _Resolver(_exact.Resolver):
    def __init__(self, builder: _Builder, field: _Field):
        self._builder, self._field = builder, field

    def find(self, name: Name, what: str) -> Any:
        return self._builder.find(name, self._field.name)

    def unknown(self, text: str) -> Any:
        self._builder.problems.add("value", self._field.name, text)

    def default(self, parameter: str) -> Any:
        owner = self._field.owner
        if owner is _Absent:
            return None  # It will be there when the class is.
        default = None if owner is None else _exact.defaults(owner).get(parameter)
        if default is None:
            self.unknown(f"the default of `{parameter}`, which there is none of")
        return default


def _joined(name: str, part: str) -> str:
    return _names.join(name, [part])


def _component(key: Any) -> str:
    try:
        return _names.component(jtu.DictKey(key))[1]
    except ValueError as e:
        raise _exact.Malformed(str(e)) from e


def _is_keywords(x: Any) -> bool:
    return type(x) is dict and all(type(key) is str for key in x)


def _fields_of(cls: type, is_module: bool) -> dict[str, bool | None] | None:
    """The names of fields and whether they are static, as far as that is known."""
    if not dataclasses.is_dataclass(cls):
        return None
    return {
        field.name: field.metadata.get("static", False) if is_module else None
        for field in dataclasses.fields(cls)
    }


def _is_fit(
    here: dict[str, bool | None], dynamic: list[str], static: list[str], unset: Any
) -> bool:
    """Whether a class has all fields that were saved, and as they were."""
    return all(
        name in here and here[name] in (None, is_static)
        for names, is_static in ((dynamic, False), (static, True))
        for name in names
    )
