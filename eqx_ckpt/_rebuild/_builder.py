"""Trees made again of the structure that was recorded, without `__init__`."""

import collections
import dataclasses
import functools as ft
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._kernel._errors import DamagedError
from .._kernel._format import _names, _values
from .._kernel._format._values import Name
from .._kernel._load import _checkpoint, _lazy
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import (
    _codec,
    _folding,
    _leaf,
    _named,
    _opening,
    _register,
    _sharding,
    _target,
)
from .._kernel._tree._folding import Problems
from . import _decode


Sharding = (
    jax.sharding.Sharding
    | Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding | None]
)


# The methods of kinds that are made alike; that of another kind has its name.
_WAYS = {"module": "_object", "dataclass": "_object", "wrapper": "_other"}
_WAYS |= {"custom": "_other", "node": "_other", "absent": "_none"}
# In the place of a class that is not known.
_NO_CLASS = type(None)


class Builder:
    """Makes nodes in the order of their leaves. The leaves are lazy, so that all are
    read at once.

    - `problems`: all that is missing, by its kind.
    - `used`: the keys of `replace` that stand for something in the tree.
    - `could`: other names that `replace` may have, for hints.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        allowed: Callable[[Name], list[Any]],
        replace: Mapping[str, Any],
        sharding: Sharding | None,
    ):
        self._source = _checkpoint.source_of(ckpt)
        self._leaves = self._source.index.leaves
        assert self._leaves.tree is not None
        self._tree = self._leaves.tree
        self._at = 0  # The index of the next leaf.
        self.problems = Problems()
        self.used: set[str] = set()
        self.could: list[str] = []
        # How many leaves there are in each row.
        self._counts = self._tree.leaf_counts
        self._ckpt, self._sharding = ckpt, sharding
        self._allowed, self._replace = allowed, replace
        self._lazies: dict[Any, LazyArray] = {}
        self._markers: dict[int, Any] = {}

    def add(self, kind: str, name: str, text: str = "") -> None:
        """Adds a problem. `name` is that of a node or leaf; of the kinds "lacks" and
        "several" it is that of a class or function."""
        self.problems.add(kind, name or _names.ROOT, text)

    def build(self, above: str) -> Any:
        """The node of this name ("": the tree). It is of no use if there are problems.

        **Raises:** `Malformed` for a structure that is never saved with these leaves.
        """
        row, self._at = self._locate(above)
        return self._build(row, above, None)

    def _locate(self, above: str) -> tuple[int, int]:
        """The row of the node of a name, and the index of the first leaf in it."""
        row, at, name = len(self._tree.rows) - 1, 0, ""
        while name != above:
            for child, component, first in self._children(row, name, at):
                below = _names.child(name, component)
                if _names.is_under(above, below):
                    row, at, name = child, first, below
                    break
            else:
                raise _decode.Malformed(f"there is no node {above!r} in it")
        return row, at

    def _children(self, row: int, name: str, at: int) -> Iterator[tuple[int, str, int]]:
        """The row of each child of a node, the last part of its name, and the index of
        its first leaf, if it has some."""
        parts, names = self._tree.kind(row).parts, self._leaves.names
        are_unknown = self._tree.has_unknown_parts(row)
        start = len(name) + 1 if name else 0
        for position, child in enumerate(self._tree.rows[row].children):
            if are_unknown:  # Each child has leaves, whose names have its part.
                part = names[at][start:].partition(".")[0]
            else:
                part = parts[position]
            yield child, part, at
            at += self._counts[child]

    def _build(self, row: int, name: str, owner: type | None) -> Any:
        """The node or leaf of a row."""
        how = self._tree.kind(row).how
        if how != "leaf" and self._use_replacement(name):
            return self._replacement(row, name)
        if how in ("value", "left"):
            (value,) = self._values(row)
            return self._exact(value, name, owner)
        # The method of a kind is called as it, such as `_namedtuple`.
        return getattr(self, _WAYS.get(how, f"_{how}"))(row, name)

    def _values(self, row: int) -> list[Any]:
        """The encoded static values of a row."""
        return [self._tree.values[x] for x in self._tree.rows[row].values]

    def _use_replacement(self, name: str) -> bool:
        """Returns whether `replace` has a value of this name, and notes that it is
        used. The name of the tree is `%root`."""
        key = name or _names.ROOT
        if key in self._replace:
            self.used.add(key)
        return key in self._replace

    def _replacement(self, row: int, name: str) -> Any:
        """The value that `replace` has for a node, with the leaves of the node loaded
        into it."""
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
        out = []  # Without a list comprehension, which is a frame more on the stack.
        for child, part, _ in self._children(row, name, self._at):
            out.append(self._build(child, _names.child(name, part), owner))
        return out

    def _leaf(self, row: int, name: str) -> Any:
        wanted = self._tree.kind(row).cls
        cls = self._class(wanted, name, object) if wanted[1] else None
        leaf_index = self._at
        self._at += 1
        if self._leaves.names[leaf_index] != (name or _names.ROOT):
            raise _decode.Malformed("its leaves have other names")
        record = self._leaves.record(leaf_index)
        target = _target.own_target(record.template)
        if cls is not None:
            codec = _register.codec_of(cls)
            if codec is None and not issubclass(cls, _leaf.PLAIN.get(target.kind, ())):
                text = f"a `{cls.__qualname__}`, whose type is not registered"
                self.add("value", record.name, text)
                return None
            python = None if codec is not None else cls
            target = target._replace(registered=codec, python=python)
        if self._sharding is not None and target.kind in ("jax", "key"):
            abstract = _leaf.abstract(record.template)
            sharding = _sharding.of_leaf(self._sharding, record.name, abstract)
            target = target._replace(sharding=sharding)
        # What is one array in the checkpoint is one in the tree.
        key = self._leaves.aliases.get(leaf_index, leaf_index), target
        if key not in self._lazies:
            self._lazies[key] = _lazy.lazy_of(self._source, record, target)
        return self._lazies[key]

    def _exact(self, encoded: object, name: str, owner: type | None = None) -> Any:
        """The value of this name, which `owner` may have a default for."""
        if self._use_replacement(name):
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
        kind, at = self._tree.kind(row), self._at
        values = self._rows(row, name)
        if kind.keys:
            field = _Field(name, None, self)
            keys = [_decode.decode(key, field) for key in json.loads(kind.keys)]
        elif self._tree.has_unknown_parts(row):
            keys = list(self._stored_keys(row, name, at))
        else:
            keys = list(map(_names.unquote, kind.parts))
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
            number = self._leaves.template_of[first]
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
        made = self._exact(self._values(row)[0], factory)
        items = self._dict(row, name)
        return collections.defaultdict(made if callable(made) else None, items)

    def _partial(self, row: int, name: str) -> Any:
        made = self._exact(self._values(row)[0], _names.child(name, "func"))
        args, keywords = self._rows(row, name)
        if type(args) is not tuple or not _is_keywords(keywords):
            raise _decode.Malformed("a Partial has arguments and keywords")
        return jtu.Partial(made, *args, **keywords) if callable(made) else None

    def _state(self, row: int, name: str) -> Any:
        markers = list(map(self._marker, self._values(row)[0]["markers"]))
        children = self._rows(row, name)
        if len({*markers}) != len(children):
            raise _decode.Malformed("two entries of a State are one")
        return eqx.nn.State.tree_unflatten(markers, children)

    def _index(self, row: int, name: str) -> Any:
        (marker,) = self._values(row)[0]["markers"]
        # Equinox takes the initial state out, and puts an object in its place.
        init = self._tree.kind(self._tree.rows[row].children[0])
        is_out = init.how == "value" or init.how == "absent" or init.how == "left"
        made = no_init() if is_out else self._rows(row, name)[0]
        return _decode.made(
            eqx.nn.StateIndex, {"marker": self._marker(marker), "init": made}
        )

    def _marker(self, marker: str | int) -> Any:
        if type(marker) is int:
            return self._markers.setdefault(marker, object())
        return str(marker)[1:]

    def _static(self, row: int, name: str) -> Any:
        return self._exact(self._values(row)[0], name)

    def _namedtuple(self, row: int, name: str) -> Any:
        kind = self._tree.kind(row)
        cls = self._class(kind.cls, name, tuple)
        if cls is None:
            self._rows(row, name)
            return None
        fields = list(map(_names.unquote, kind.parts))
        if not _opening.is_namedtuple(cls) or list(cls._fields) != fields:
            self._skip(row)
            return self._differs(row, name, cls, list(getattr(cls, "_fields", [])))
        return tuple.__new__(cls, self._rows(row, name))

    def _object(self, row: int, name: str) -> Any:
        kind, children = self._tree.kind(row), self._tree.rows[row].children
        is_module = kind.how == "module"
        cls = self._class(kind.cls, name, eqx.Module if is_module else object)
        static = dict(zip(map(_names.unquote, kind.data), self._values(row)))
        own = cls or _NO_CLASS  # All that is lacking is to be in one error.
        values = dict(zip(map(_names.unquote, kind.parts), self._rows(row, name, own)))
        for field, child in zip(list(values), children):
            if self._tree.kind(child).how == "absent":
                del values[field]
        unset = {n for n, x in static.items() if _values.split(x)[0] == "absent"}
        unset |= {*map(_names.unquote, kind.parts)} - values.keys()
        encoded = {n: x for n, x in static.items() if n not in unset}
        here = {} if cls is None else _fields_of(cls, is_module)
        if cls is not None:
            if here is None or not _is_fit(here, list(values), list(encoded)):
                return self._differs(row, name, cls, list(here or ()))
            text = f"a field that `{cls.__qualname__}` did not have when it was saved"
            new = here.keys() - {*values, *encoded, *unset}
            encoded |= dict.fromkeys(new, {"unknown": ["", text]})
        for part, x in encoded.items():
            at = _names.child(name, _names.quote(part))
            values[part] = self._exact(x, at, own)
        if cls is None:
            return None
        return _decode.made(cls, {n: values[n] for n in here or () if n in values})

    def _differs(self, row: int, name: str, cls: type, here: list[str]) -> None:
        kind = self._tree.kind(row)
        saved = list(map(_names.unquote, (*kind.parts, *kind.data)))
        called, there = f"a `{cls.__qualname__}`", ", ".join(here)
        text = f"{called} of the fields {', '.join(saved)}; it has {there}"
        if lacks := [field for field in saved if field not in here]:
            text += f" (or give `{cls.__qualname__}` {_folding.some(lacks)} too)"
        self.add("value", name, text)

    def _other(self, row: int, name: str) -> None:
        cls = self._tree.kind(row).cls
        shown = ".".join(filter(None, cls)) or "node of a checkpoint"
        self.add("node", name, f"a `{shown}`")
        self._skip(row)

    def _class(self, wanted: Sequence[str], name: str, base: type) -> Any:
        parsed = _values.name_of(list(wanted))
        if parsed is None:
            self.add("node", name, f"a `{wanted[-1]}`")
            return None
        cls = self.find_object(parsed, name)
        if cls is not None and not (isinstance(cls, type) and issubclass(cls, base)):
            text = f"a `{parsed.shown}`, which is no class of that kind"
            self.add("value", name, text)
            return None
        return cls

    def find_object(self, name: Name, place: str) -> Any:
        """The allowed object that a name stands for; None, and a problem, if it is not
        one alone. `place`: the name of the node or value that needs it."""
        found = self._allowed(name)
        if len(found) == 1:
            return found[0]
        if not found:
            self.add("lacks", name.shown, place)
        else:
            some = ", ".join(sorted(_shown(x) for x in found))
            self.add("several", name.shown, some)
        return None


def _shown(x: object) -> str:
    name = _named.own_name(x)
    return "" if name is None else f"`{name.shown}`"


class _Field(NamedTuple):
    """Where a value is: its name, and the class of the Module whose field it is. It
    finds what the JSON of the value does not have."""

    name: str
    owner: type | None
    builder: Builder

    def find_object(self, name: Name) -> Any:
        return self.builder.find_object(name, self.name)

    def unknown(self, text: str) -> None:
        self.builder.add("value", self.name, text)

    def default(self, parameter: str) -> Any:
        if self.owner is _NO_CLASS:
            return None  # It will be there when the class is.
        some = {} if self.owner is None else _codec.defaults(self.owner)
        if parameter not in some:
            self.unknown(f"the default of `{parameter}`, which there is none of")
        return some.get(parameter)


@ft.cache
def no_init() -> Any:
    """The value in a StateIndex whose initial state Equinox has taken out."""
    index = eqx.nn.StateIndex(0)
    return eqx.nn.delete_init_state(index).init


def _is_keywords(x: object) -> bool:
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
