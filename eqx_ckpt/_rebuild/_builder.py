"""Trees made again of the structure that was recorded, without `__init__`."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._errors import DamagedError
from .._format import _names
from .._load import _lazy
from .._load._checkpoint import Checkpoint
from .._load._lazy import LazyArray
from .._tree import _leaf, _named, _register, _seen, _sharding, _target
from .._tree._folding import Problems
from .._tree._named import Name
from . import _decode, _recorder, _structure, _value_codec


Sharding = (
    jax.sharding.Sharding
    | Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding | None]
)


_DICTS = "dict", "ordered", "default"


# The methods of kinds that are made alike; that of another kind has its name.
_WAYS = {"leaf of": "_leaf_of", "module": "_object", "dataclass": "_object"}
# In the place of a class that is not known.
_NO_CLASS = type(None)


class Builder:
    """Makes nodes in the order of their leaves, of which the next is in place `at`. The
    leaves are lazy, so that all are read at once.

    `problems` has all that is missing, by its kind; `used` the keys of `replace` that
    were, and `could` the names that it may have too.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        allowed: Callable[[Name], list[Any]],
        replace: Mapping[str, Any],
        sharding: Sharding | None,
    ):
        leaves = ckpt._source.index.leaves
        assert leaves.structure is not None
        self._at = 0
        self.problems = Problems()
        self.used: set[str] = set()
        self.could: list[str] = []
        self._leaves, self._structure = leaves, leaves.structure
        try:
            parts = sum(name.count(".") + 1 for name in leaves.names)
            # How many leaves there are in each row.
            self._counts = _structure.check(self._structure, len(leaves.names), parts)
        except ValueError as e:
            raise _decode.Malformed(str(e)) from e
        self._ckpt, self._sharding = ckpt, sharding
        self._allowed, self._replace = allowed, replace
        self._lazies: dict[Any, LazyArray] = {}
        self._markers: dict[str, Any] = {}
        # Of rows whose children have names: those, quoted, and the keys of a dict.
        self._parts: dict[int, list[str]] = {}
        self._keys: dict[int, list[Any]] = {}

    def add(self, kind: str, name: str, text: str = "") -> None:
        """Adds a problem."""
        self.problems.add(kind, name or _names.ROOT, text)

    def build(self, source: str) -> Any:
        """The node of this name ("": the tree). It is of no use if there are problems.

        **Raises:** `Malformed` for a structure that is never saved with these leaves.
        """
        row, self._at = self._locate(source)
        return self._make(row, source, None)

    def _locate(self, source: str) -> tuple[int, int]:
        """The row of the node of a name, and the place of the first leaf in it."""
        row, at, name = len(self._structure.nodes) - 1, 0, ""
        while name != source:
            for child, component, first in self._children(row, name, at):
                below = _names.child(name, component)
                if _names.is_under(source, below):
                    row, at, name = child, first, below
                    break
            else:
                raise _decode.Malformed(f"there is no node {source!r} in it")
        return row, at

    def _children(self, row: int, name: str, at: int) -> Iterator[tuple[int, str, int]]:
        """The row of each child of a node, the last part of its name, and the place of
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
                    raise _decode.Malformed("its leaves have other names")
                part = self._leaves.names[at][start:].partition(".")[0]
            else:
                part = str(position)
            yield child, part, at
            at += self._counts[child]

    def _keys_of(self, row: int) -> list[Any]:
        """The keys of a dict whose row has them."""
        if row not in self._keys:
            encoded = self._structure.nodes[row][2]
            self._keys[row] = _decode.decode(encoded, _Field("", None, self))
        return self._keys[row]

    def _make(self, row: int, name: str, owner: type | None) -> Any:
        """The node or leaf of a row."""
        kind, children, *rest = self._structure.nodes[row]
        if kind not in ("leaf", "leaf of") and self._is_given(name):
            return self._given(row, name)
        if kind == "value":
            return self._exact(rest[0], name, owner)
        return getattr(self, _WAYS.get(kind, f"_{kind}"))(row, name)

    def _is_given(self, name: str) -> bool:
        """Whether `replace` has a value of this name. That of the tree is `%root`."""
        key = name or _names.ROOT
        if key in self._replace:
            self.used.add(key)
        return key in self._replace

    def _given(self, row: int, name: str) -> Any:
        places = range(self._at, self._at + self._counts[row])
        self._at = places.stop
        value = self._replace[name or _names.ROOT]
        if not places:
            return value
        return self._ckpt.splice(value, source=name, static="ignore")

    def _skip(self, row: int) -> None:
        """Passes a node that cannot be made: its replacement has all below it."""
        self._at += self._counts[row]

    def _rows(self, row: int, name: str, owner: type | None = None) -> list[Any]:
        return [
            self._make(child, _names.child(name, part), owner)
            for child, part, _ in self._children(row, name, self._at)
        ]

    def _leaf(self, row: int, name: str, cls: type | None = None) -> Any:
        place = self._at
        self._at += 1
        if self._leaves.names[place] != (name or _names.ROOT):
            raise _decode.Malformed("its leaves have other names")
        record = self._leaves.record(place)
        target = _target.own_target(record.template)
        if cls is not None:
            codec = _register.codec_of(cls)
            if codec is None and not issubclass(cls, _leaf.PLAIN.get(target.kind, ())):
                text = f"a `{cls.__qualname__}`, whose type is not registered"
                self.add("value", record.name, text)
                return None
            python = None if codec is not None else cls
            target = target._replace(codec=codec, python=python)
        if self._sharding is not None and target.kind in ("jax", "key"):
            abstract = _leaf.abstract(record.template)
            sharding = _sharding.of_leaf(self._sharding, record.name, abstract)
            target = target._replace(sharding=sharding)
        # What is one array in the checkpoint is one in the tree.
        key = self._leaves.aliases.get(place, place), target
        if key not in self._lazies:
            self._lazies[key] = _lazy.lazy_of(self._ckpt._source, record, target)
        return self._lazies[key]

    def _leaf_of(self, row: int, name: str) -> Any:
        cls = self._class(self._structure.nodes[row][2], name, object)
        return self._leaf(row, name, cls)

    def _exact(self, encoded: Any, name: str, owner: type | None = None) -> Any:
        """The value of this name, which `owner` may have a default for."""
        if self._is_given(name):
            return self._replace[name or _names.ROOT]
        self.could.append(name)
        return _decode.decode(encoded, _Field(name, owner, self))

    def _none(self, row: int, name: str) -> None:
        return None

    def _tuple(self, row: int, name: str) -> tuple:
        return tuple(self._rows(row, name))

    def _list(self, row: int, name: str) -> list:
        return self._rows(row, name)

    def _dict(self, row: int, name: str) -> dict[Any, Any]:
        encoded = self._structure.nodes[row][2]
        at, values = self._at, self._rows(row, name)
        if encoded is None:
            keys = list(self._stored_keys(row, name, at))
        else:
            keys = self._keys_of(row)
        try:
            _names.check_hashes(keys)
            out = dict(zip(keys, values, strict=True))
        except TypeError as e:
            raise _decode.Malformed("a list is a key") from e
        except DamagedError as e:
            raise _decode.Malformed(str(e)) from e
        if len(out) != len(values):
            raise _decode.Malformed("two keys are one")
        return out

    def _stored_keys(self, row: int, name: str, at: int) -> Iterator[str | int]:
        depth = name.count(".") + 1 if name else 0
        for _, part, first in self._children(row, name, at):
            number = self._leaves.template[first]
            kinds = self._leaves.templates[number].keys
            if type(kinds) is not str or kinds[depth : depth + 1] not in ("k", "i"):
                raise _decode.Malformed("its keys are of another kind")
            try:
                yield _names.key_of(kinds[depth], part, not name)
            except ValueError as e:
                raise _decode.Malformed(str(e)) from e

    def _ordered(self, row: int, name: str) -> Any:
        return collections.OrderedDict(self._dict(row, name))

    def _default(self, row: int, name: str) -> Any:
        factory = _names.child(name, "default_factory")
        made = self._exact(self._structure.nodes[row][3], factory)
        items = self._dict(row, name)
        return collections.defaultdict(made if callable(made) else None, items)

    def _partial(self, row: int, name: str) -> Any:
        made = self._exact(self._structure.nodes[row][2], _names.child(name, "func"))
        args, keywords = self._rows(row, name)
        if type(args) is not tuple or not _is_keywords(keywords):
            raise _decode.Malformed("a Partial has arguments and keywords")
        return jtu.Partial(made, *args, **keywords) if callable(made) else None

    def _state(self, row: int, name: str) -> Any:
        markers = list(map(self._marker, self._structure.nodes[row][2]))
        children = self._rows(row, name)
        if len({*markers}) != len(children):
            raise _decode.Malformed("two entries of a State are one")
        return eqx.nn.State.tree_unflatten(markers, children)

    def _index(self, row: int, name: str) -> Any:
        marker = self._marker(self._structure.nodes[row][2])
        children = list(self._children(row, name, self._at))
        init = _recorder.no_init()
        if children:
            init = self._make(children[0][0], _names.child(name, "init"), None)
        return _decode.made(eqx.nn.StateIndex, {"marker": marker, "init": init})

    def _marker(self, text: str) -> Any:
        return text[1:] if text[0] == "=" else self._markers.setdefault(text, object())

    def _namedtuple(self, row: int, name: str) -> Any:
        kind = self._structure.types[self._structure.nodes[row][2]]
        cls = self._class(kind[:2], name, tuple)
        if cls is None:
            self._rows(row, name)
            return None
        if not _seen.is_namedtuple(cls) or list(cls._fields) != kind[2]:
            return self._differs(row, name, cls, list(getattr(cls, "_fields", [])))
        return tuple.__new__(cls, self._rows(row, name))

    def _object(self, row: int, name: str) -> Any:
        kind, _, number, encoded = self._structure.nodes[row]
        module, qualified, dynamic, static, unset = self._structure.types[number]
        base = eqx.Module if kind == "module" else object
        cls = self._class([module, qualified], name, base)
        if cls is None:
            # All that is lacking is to be in one error.
            self._rows(row, name, _NO_CLASS)
            for part, x in zip(static, encoded, strict=True):
                self._exact(x, _names.child(name, _names.quote(part)), _NO_CLASS)
            return None
        here = _fields_of(cls, kind == "module")
        if here is None or not _is_fit(here, dynamic, static):
            return self._differs(row, name, cls, list(here or ()))
        values = dict(zip(dynamic, self._rows(row, name, cls), strict=True))
        text = f"a field that `{cls.__qualname__}` did not have when it was saved"
        new = here.keys() - {*dynamic, *static, *unset}
        encoded = {
            **dict(zip(static, encoded, strict=True)),
            **dict.fromkeys(new, {"unknown": text}),
        }
        for part, x in encoded.items():
            at = _names.child(name, _names.quote(part))
            values[part] = self._exact(x, at, cls)
        own = {part: values[part] for part in here if part in values}
        return _decode.made(cls, own)

    def _differs(self, row: int, name: str, cls: type, here: list[str]) -> None:
        kind = self._structure.types[self._structure.nodes[row][2]]
        saved = ", ".join([*kind[2], *kind[3]])
        text = f"a `{cls.__qualname__}` of the fields {saved}; it has {', '.join(here)}"
        self.add("value", name, text)
        self._skip(row)

    def _other(self, row: int, name: str) -> None:
        text = self._structure.nodes[row][3]
        self.add("node", name, f"a `{text}`")
        self._skip(row)

    def _class(self, wanted: list[Any], name: str, base: type) -> Any:
        parsed = _named.parse(wanted)
        if parsed is None:
            self.add("node", name, f"a `{wanted[-1]}`")
            return None
        cls = self.find(parsed, name)
        if cls is not None and not (isinstance(cls, type) and issubclass(cls, base)):
            text = f"a `{parsed.shown}`, which is no class of that kind"
            self.add("value", name, text)
            return None
        return cls

    def find(self, name: Name, field: str) -> Any:
        found = self._allowed(name)
        if len(found) == 1:
            return found[0]
        if not found:
            self.add("lacks", name.shown, field)
        else:
            some = ", ".join(sorted(_shown(x) for x in found))
            self.add("several", name.shown, some)
        return None


def _shown(x: Any) -> str:
    name = _named.own(x)
    return "" if name is None else f"`{name.shown}`"


class _Field(NamedTuple):
    """Where a value is: its name, and the class of the Module whose field it is. It
    finds what the JSON of the value does not have."""

    name: str
    owner: type | None
    builder: Builder

    def find(self, name: Name) -> Any:
        return self.builder.find(name, self.name)

    def unknown(self, text: str) -> None:
        self.builder.add("value", self.name, text)

    def default(self, parameter: str) -> Any:
        if self.owner is _NO_CLASS:
            return None  # It will be there when the class is.
        some = {} if self.owner is None else _value_codec.defaults(self.owner)
        if parameter not in some:
            self.unknown(f"the default of `{parameter}`, which there is none of")
        return some.get(parameter)


def _component(key: Any) -> str:
    try:
        return _names.component(jtu.DictKey(key))[1]
    except ValueError as e:
        raise _decode.Malformed(str(e)) from e


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
    here: dict[str, bool | None], dynamic: list[str], static: list[str]
) -> bool:
    """Whether a class has all fields that were saved, and as they were."""
    return all(
        name in here and here[name] in (None, is_static)
        for names, is_static in ((dynamic, False), (static, True))
        for name in names
    )
