"""The leaves of a checkpoint by name, and the record of its tree.

Columns rather than an object a leaf: an index of 10,000 leaves parses in milliseconds.
They are checked when they are read, the template and the name of a leaf when it is
touched: both are data from a file, and whoever made the file may mean harm.
"""

import contextlib
import dataclasses
import functools as ft
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import DamagedError
from . import _names, _record, _record_json, _state_labels, _template
from ._record import Attributes, TreeRecord
from ._schema import fields, NUMBER
from ._state_labels import Label
from ._template import Template


Region = tuple[slice, ...]


class LocalShards(NamedTuple):
    """The shards that one process had of an array of this `shape`: regions of one
    shape, each from a `start` on. They are stored as an array of their own: one after
    the other along the first axis."""

    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]

    def regions(self, stored: Sequence[int]) -> Iterator[tuple[int, Region]]:
        """The region of each shard, after the row at which it begins in what is stored:
        an array of the `stored` shape."""
        rows = stored[0] // len(self.starts)
        for number, start in enumerate(self.starts):
            sizes = zip(start, (rows, *stored[1:]))
            yield number * rows, tuple(slice(s, s + n) for s, n in sizes)

    def find(self, stored: Sequence[int], region: Sequence[slice]) -> Region | None:
        """Where a region of the whole array lies in the `stored` shape, if it is in one
        of those that are there. Along last axes that it does not name it has all."""
        for row, held in self.regions(stored):
            both = list(zip(region, held))
            if all(h.start <= r.start and r.stop <= h.stop for r, h in both):
                at = [slice(r.start - h.start, r.stop - h.start) for r, h in both]
                return (slice(at[0].start + row, at[0].stop + row), *at[1:])
        return None


class Unreadable(NamedTuple):
    """Kind of a leaf of another format, in a word, and why it cannot be read.
    `is_array`: its file has it as an array of numbers."""

    what: str
    why: str
    is_array: bool = False


class LeafRecord(NamedTuple):
    """One leaf. `leaf_index` is its number in the columns; `part` says what is there of
    it, if that is not all: the template is that of what is there."""

    name: str
    leaf_index: int
    template: Template
    part: LocalShards | Unreadable | None = None

    @property
    def whole(self) -> Template:
        """The template, with the shape of all of the array."""
        if not isinstance(self.part, LocalShards):
            return self.template
        return self.template._replace(shape=self.part.shape)


class Origin(NamedTuple):
    """What leaves were renamed from: their stored `names`; and, by the name of each
    node now, the names of the stored nodes that stand for it."""

    names: Sequence[str]
    nodes: Mapping[str, list[str]]


class TemplateSizes(NamedTuple):
    """For each template, the number of a leaf's chunks, and the bytes of a chunk."""

    chunk_counts: list[int]
    chunk_bytes: list[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a tree: `names[i]` has the template `templates[template_of[i]]`.
    The number `i` is its leaf index.

    A leaf of `aliases` is the same array as the earlier one that it leads to. `parts`
    has the leaves that are not all there: those of which one process has saved its
    shards, and those of another format that cannot be read. `recorded` is the record of
    the tree, or its JSON; other formats have none. `given_labels` are the `labels`,
    where these do not follow from the record. `attributes` are those of children
    without keys, where there is no record. Leaves that were renamed have an `origin`.
    """

    names: Sequence[str]
    templates: list[Template]
    template_of: list[int]
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)
    parts: Mapping[int, LocalShards | Unreadable] = dataclasses.field(
        default_factory=dict
    )
    recorded: TreeRecord | dict[str, Any] | None = None
    given_labels: Mapping[int, Label] | None = None
    attributes: Attributes = dataclasses.field(default_factory=dict)
    origin: Origin | None = None

    @ft.cached_property
    def tree(self) -> TreeRecord | None:
        """The record of the tree. **Raises:** `DamagedError`."""
        found = self._tree_or_fault
        if isinstance(found, str):
            raise DamagedError(
                f"The index of the checkpoint has a tree that is never saved: {found}."
            )
        return found

    @ft.cached_property
    def _tree_or_fault(self) -> TreeRecord | None | str:
        if self.recorded is None or isinstance(self.recorded, TreeRecord):
            return self.recorded
        names = self.names if self.origin is None else self.origin.names
        try:
            return _record_json.parse(self.recorded, len(names))
        except ValueError as e:
            return str(e)

    @ft.cached_property
    def labelled(self) -> TreeRecord | None:
        """The record of the tree, or one of nothing but the `attributes`."""
        if self.tree is not None or not self.attributes:
            return self.tree
        names = self.names if self.origin is None else self.origin.names
        return _record.of_attributes(names, self.attributes)

    def is_recorded_as(self, other: TreeRecord) -> bool:
        """Whether the record of the tree is this one, as far as its JSON tells, so that
        it need not be parsed. Leaves that were renamed have no record of their own."""
        own, encoded = self.recorded, other.encoded
        if type(own) is not dict or self.origin is not None:
            return False
        # To `==` 1 and True are one.
        texts = (json.dumps(x["values"]) for x in (own, encoded))
        return own == encoded and next(texts) == next(texts)

    @ft.cached_property
    def labels(self) -> Mapping[int, Label]:
        """By the index of a leaf, the label of the entry of an eqx.nn.State that it is
        in."""
        if self.given_labels is not None:
            return self.given_labels
        states = {} if self.tree is None else self.tree.states()
        nearest = _names.within(states)
        out: dict[int, Label] = {}
        for leaf_index, name in enumerate(self.names if states else ()):
            state = nearest(name)
            if state is not None:
                part = _names.below(name, state).partition(".")[0]
                number = _names.number_of(part)
                if number is not None and number in states[state]:
                    out[leaf_index] = states[state][number]
        return out

    def renamed(
        self,
        names: list[str],
        labels: Mapping[int, Label],
        nodes: Mapping[str, list[str]],
    ) -> "Leaves":
        """These leaves under other names. A record has the name that is stored."""
        origin = Origin(self.names, nodes)
        return dataclasses.replace(
            self, names=names, given_labels=labels, origin=origin
        )

    def stored_nodes(self, name: str) -> list[str]:
        """The stored nodes with static values that stand for the node of a name."""
        return [name] if self.origin is None else self.origin.nodes.get(name, [])

    @ft.cached_property
    def node_names(self) -> dict[str, int]:
        """The names of nodes that have static values, and their rows of the record."""
        return {} if self.tree is None else dict(self.tree.nodes_with_values())

    @ft.cached_property
    def _texts(self) -> dict[int, str]:
        return {}

    def fields_text(self, name: str) -> str:
        """The JSON of the encoded static values of a node, by their names below it;
        "" if it has none."""
        row = self.node_names.get(name)
        if row is None or self.tree is None:
            return ""
        if row not in self._texts:
            values = self.tree.compared_values(row).items()
            fields = {part: self.tree.values[x] for part, x in values}
            self._texts[row] = json.dumps(fields, sort_keys=True)
        return self._texts[row]

    @ft.cached_property
    def state_indices(self) -> Mapping[str, list[tuple[str, str]]]:
        """By the name of each node with StateIndices, the last parts of their names,
        each with the label of its entry as text."""
        out: dict[str, list[tuple[str, str]]] = {}
        labels = dict.fromkeys(self.labels.values())
        # Where only the marker is known, it is looked for among the names of nodes.
        nameless = [label for label in labels if not label.names]
        nodes = _names.by_prefix(self.names) if nameless else {}
        by_marker = _state_labels.names_by_markers(nameless, nodes)
        for label in labels:
            text = _state_labels.label_text(label)
            for name in sorted(label.names) or by_marker.get(label, ()):
                node, _, part = name.rpartition(".")
                if text is not None:
                    out.setdefault(node, []).append((part, text))
        return out

    @ft.cached_property
    def leaf_indices(self) -> Mapping[str, int]:
        """The index of each name. **Raises:** `ValueError` for two of one name."""
        out = dict(zip(self.names, range(len(self.names))))
        if len(out) != len(self.names):
            raise ValueError("the index has two leaves of one name")
        return out

    @ft.cached_property
    def template_sizes(self) -> TemplateSizes:
        """The sizes of the templates. An impossible one has 0, and is refused when it
        is touched."""
        counts, sizes = [], []
        for template in self.templates:
            count = size = 0
            with contextlib.suppress(ValueError):
                count, size = _template.check_template(template)
            counts.append(count)
            sizes.append(size)
        return TemplateSizes(counts, sizes)

    def check_templates(self) -> None:
        """**Raises:** `ValueError` unless all templates can be."""
        for template, size in zip(self.templates, self.template_sizes.chunk_bytes):
            if not size:
                _template.check_template(template)

    def record(self, leaf_index: int, is_name_checked: bool = False) -> LeafRecord:
        """The leaf of this index in the columns, checked. `is_name_checked`: its name
        is known to be good, as it is equal to one that we have made of a key path.

        **Raises:** `DamagedError` when what the index says of it cannot be.
        """
        names = self.names if self.origin is None else self.origin.names
        name, number = names[leaf_index], self.template_of[leaf_index]
        template = self.templates[number]
        try:
            if not self.template_sizes.chunk_bytes[number]:
                _template.check_template(template)
            if not is_name_checked:
                _names.keys_of(name, template.keys)
        except ValueError as e:
            raise DamagedError(
                f"The index of the checkpoint has a leaf, {_names.shorten(name)}, that "
                f"is never saved: {e}."
            ) from e
        return LeafRecord(name, leaf_index, template, self.parts.get(leaf_index))

    def records(self) -> Iterator[LeafRecord]:
        return map(self.record, range(len(self.names)))

    def counts(self) -> list[int]:
        """The number of leaves of each template; a shared array counts once.

        **Raises:** `DamagedError` for a template that cannot be."""
        numbers = np.asarray(self.template_of, np.intp)
        own = np.delete(numbers, list(self.aliases)) if self.aliases else numbers
        counts = np.bincount(own, minlength=len(self.templates)).tolist()
        for number, (count, size) in enumerate(
            zip(counts, self.template_sizes.chunk_bytes)
        ):
            if count and not size:  # This raises the error of its first leaf.
                self.record(int((numbers == number).argmax()))
        return counts

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves; arrays that are shared count once."""
        counted = zip(self.counts(), self.templates)
        return sum(count * t.nbytes for count, t in counted if count)


def by_leaf_index(pairs: list[Any], name: str) -> dict[int, Any]:
    """A field of an index: pairs of the index of a leaf, and what it has.

    **Raises:** `ValueError` if one leaf is there twice.
    """
    if len(out := dict(pairs)) < len(pairs):
        raise ValueError(f"the index has a leaf twice in {name!r}")
    return out


# Of a template, the fields that are looked at before a leaf of it is.
_TEMPLATE = Any, Any, Any, [Any], Any, [Any], Any, Any, Any
_FIELDS = {"templates": [_TEMPLATE]}


def parse(value: dict[str, Any]) -> Leaves:
    """The leaves that the JSON of an index has.

    **Raises:** `ValueError` for columns of other types, or that do not fit together.
    """
    (rows,) = fields(value, _FIELDS)
    templates = [
        Template(*row)._replace(shape=tuple(row[3]), chunk=tuple(row[5]))
        for row in rows
    ]
    kinds = {"names": [str], "template": [range(len(templates))]}
    names, template_of = fields(value, kinds)
    if len(template_of) != len(names):
        raise ValueError("the columns of the index differ in length")
    (pairs,) = fields(value, {"aliases": [(range(len(names)), NUMBER)]})
    aliases = by_leaf_index(pairs, "aliases")
    parts = _local_shards(value, templates, template_of) if "parts" in value else {}
    for alias, origin in aliases.items():
        own, first = (templates[template_of[i]] for i in (alias, origin))
        if (
            origin >= alias
            or origin in aliases
            or own._replace(keys="") != first._replace(keys="")
            or parts.get(alias) != parts.get(origin)
        ):
            raise ValueError("the index has an impossible alias")
    return Leaves(names, templates, template_of, aliases, parts, value.get("tree"))


def encode_local_shards(
    parts: Mapping[int, LocalShards | Unreadable],
) -> dict[str, Any]:
    """The fields of an index that say of which leaves only some shards are stored."""
    rows = {part: number for number, part in enumerate(dict.fromkeys(parts.values()))}
    of = [[leaf_index, rows[part]] for leaf_index, part in sorted(parts.items())]
    return {"parts": list(rows), "part": of}


def _local_shards(
    value: dict[str, Any], templates: list[Template], template_of: list[int]
) -> dict[int, LocalShards]:
    (parts,) = fields(value, {"parts": [([NUMBER], [[NUMBER]])]})
    rows = [
        LocalShards(tuple(shape), tuple(map(tuple, starts))) for shape, starts in parts
    ]
    (pairs,) = fields(value, {"part": [(range(len(template_of)), range(len(rows)))]})
    of = by_leaf_index(pairs, "part")
    stored: list[set[int]] = [set() for _ in rows]
    for leaf_index, number in of.items():
        stored[number].add(template_of[leaf_index])
    for part, numbers in zip(rows, stored):
        _check_local_shards(part, [templates[number] for number in numbers])
    return {leaf_index: rows[number] for leaf_index, number in of.items()}


def _check_local_shards(part: LocalShards, stored: Sequence[Template]) -> None:
    """**Raises:** `ValueError` unless the regions are in the array, and make up each of
    the `stored` arrays."""
    shape, starts = part
    rank, count = len(shape), len(starts)
    is_good = rank > 0 and all(len(start) == rank for start in starts)
    is_good = is_good and 0 < len({*starts}) == count
    # Along each axis: a region that ends in the array there does so everywhere.
    last = list(map(max, zip(*starts))) if is_good else []
    for t in stored:
        is_good = is_good and t.kind in ("jax", "key") and len(t.shape) == rank
        if is_good:
            rows, rest = divmod(t.shape[0], count)
            ends = zip(last, (rows, *t.shape[1:]), shape)
            is_good = not rest and all(start + n <= end for start, n, end in ends)
    if not is_good:
        raise ValueError("the index has an impossible part")
