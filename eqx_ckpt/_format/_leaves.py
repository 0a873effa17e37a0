"""The tree of a checkpoint: its leaves by name, and its static fields.

Columns rather than an object a leaf: an index of 10,000 leaves parses in milliseconds.
They are checked when they are read, the template and the name of a leaf when it is
touched: both are data from a file, and whoever made the file may mean harm.
"""

import dataclasses
import functools as ft
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import _names, _structure, _template
from ._structure import Structure
from ._template import Template


class Record(NamedTuple):
    """One leaf. `place` is its number in the columns."""

    name: str
    place: int
    template: Template


class Statics(NamedTuple):
    """The static fields of Modules: `values[of[name]]` for the Module at `name`. Those
    that JSON does not hold are in the same row of `encoded`, if they were recorded."""

    values: list[dict[str, Any]]
    of: dict[str, int]
    encoded: list[dict[str, Any]] | None = None

    def fields(self, name: str) -> list[str]:
        """The names of those of one Module."""
        row = self.of[name]
        encoded = {} if self.encoded is None else self.encoded[row]
        return [*self.values[row], *encoded]


class Origin(NamedTuple):
    """Of leaves that were renamed: the names that they are stored under, and for the
    name of a node those of the stored Modules that stand for it."""

    names: list[str]
    modules: dict[str, list[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a tree: `names[i]` has the template `templates[template[i]]`.

    A leaf of `aliases` is the same array as the earlier one that it leads to. `markers`
    has the labels of the entries of States. `structure` has the nodes of the tree, if
    they were recorded. With an `origin` the names, and those in labels, are not the
    ones that are stored.
    """

    names: list[str]
    templates: list[Template]
    template: list[int]
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)
    markers: dict[int, str] = dataclasses.field(default_factory=dict)
    statics: Statics = Statics([], {})
    structure: Structure | None = None
    origin: Origin | None = None

    def renamed(
        self, names: list[str], markers: dict[int, str], modules: dict[str, list[str]]
    ) -> "Leaves":
        """The same leaves under other names. A record has the name that is stored."""
        origin = Origin(self.names, modules)
        return dataclasses.replace(self, names=names, markers=markers, origin=origin)

    def modules(self, name: str) -> list[str]:
        """The stored Modules with static fields that stand for the node of a name."""
        if self.origin is not None:
            return self.origin.modules.get(name, [])
        return [name] if name in self.statics.of else []

    @ft.cached_property
    def places(self) -> Mapping[str, int]:
        places = dict(zip(self.names, range(len(self.names))))
        if len(places) != len(self.names):
            raise ValueError("the index has two leaves of one name")
        return places

    @ft.cached_property
    def _checked(self) -> set[int]:
        return set()

    def record(self, place: int, known: bool = False) -> Record:
        """The leaf in this place of the columns, checked. `known`: but for its name,
        which is one that we have made of a key path.

        **Raises:** `ValueError` when what the index says of it cannot be.
        """
        names = self.names if self.origin is None else self.origin.names
        name, number = names[place], self.template[place]
        template = self.templates[number]
        try:
            if number not in self._checked:
                _template.check_template(template)
                self._checked.add(number)
            if not known:
                _names.keys_of(name, template.keys)
        except ValueError as e:
            raise ValueError(
                f"The index of the checkpoint has a leaf, {_names.shorten(name)}, that "
                f"is never saved: {e}."
            ) from e
        return Record(name, place, template)

    def records(self) -> Iterator[Record]:
        return map(self.record, range(len(self.names)))

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves; arrays that are shared count once."""
        return sum(
            self.record(place).template.nbytes
            for place in range(len(self.names))
            if place not in self.aliases
        )


def field(
    value: dict[str, Any], name: str, kind: type, item: type | None = None
) -> Any:
    """A field of an index that is of a type, and so are its items.

    **Raises:** `ValueError` if it is not.
    """
    got: Any = value.get(name)
    if type(got) is not kind:
        raise ValueError(f"the index has no {name!r} of the right type")
    if item is not None:
        items: Any = got.values() if kind is dict else got
        if not set(map(type, items)) <= {item}:
            raise ValueError(f"the index has something else than {item} in {name!r}")
    return got


def pairs(
    value: dict[str, Any], name: str, count: int, item: type
) -> Iterator[tuple[int, Any]]:
    """A field of an index that is a list of pairs: the place of one of `count` leaves,
    and an item of a type.

    **Raises:** `ValueError` if it is not.
    """
    for row in field(value, name, list, list):
        if not (
            len(row) == 2
            and type(row[0]) is int
            and 0 <= row[0] < count
            and type(row[1]) is item
        ):
            raise ValueError("the index has a malformed row")
        yield row[0], row[1]


def parse(value: dict[str, Any]) -> Leaves:
    """The leaves that the JSON of an index has.

    **Raises:** `ValueError` for columns of other types, or that do not fit together.
    """
    names = field(value, "names", list, str)
    templates = list(map(_template_of, field(value, "templates", list, list)))
    template = field(value, "template", list, int)
    if template and not 0 <= min(template) <= max(template) < len(templates):
        raise ValueError("the index names a template that it does not have")
    if len(template) != len(names):
        raise ValueError("the columns of the index differ in length")
    aliases: dict[int, int] = {}
    for alias, origin in pairs(value, "aliases", len(names), int):
        if (
            not 0 <= origin < alias
            or alias in aliases
            or origin in aliases
            or templates[template[alias]][1:] != templates[template[origin]][1:]
        ):
            raise ValueError("the index has an impossible alias")
        aliases[alias] = origin
    markers = dict(pairs(value, "markers", len(names), str))
    if any(label[:1] not in ("=", "@") for label in markers.values()):
        raise ValueError("the index has a malformed marker")
    structure = None
    if "structure" in value:
        structure = _structure.parse(value["structure"])
    statics = _statics(value)
    return Leaves(names, templates, template, aliases, markers, statics, structure)


def _template_of(row: list[Any]) -> Template:
    if len(row) != len(Template._fields):
        raise ValueError("the index has a malformed template")
    made = Template(*row)
    if type(made.shape) is not list or type(made.chunk) is not list:
        raise ValueError("the index has a malformed template")
    return made._replace(shape=tuple(made.shape), chunk=tuple(made.chunk))


def _statics(value: dict[str, Any]) -> Statics:
    values, of = field(value, "statics", list, dict), field(value, "static", dict, int)
    encoded = field(value, "encoded", list, dict) if "encoded" in value else None
    if not all(0 <= n < len(values) for n in of.values()) or (
        encoded is not None and len(encoded) != len(values)
    ):
        raise ValueError("the index names static fields that it does not have")
    return Statics(values, of, encoded)
