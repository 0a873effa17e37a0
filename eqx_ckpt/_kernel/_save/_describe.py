"""The leaves of a save as they will be stored.

A training loop saves the same leaves again and again, with other values. What follows
from all else that is known of them, such as their names and templates, is kept.

A leaf has a kind: all that its template depends on but its place in the tree. It also
has a letter for each of its keys (`letters`), as in `Template.keys`.
"""

import collections
import functools as ft
import itertools as it
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from .._format import _layouts
from .._format._leaves import LocalShards
from .._format._template import Template
from .._load import _lazy
from .._load._lazy import LazyArray
from .._tree import _filters, _host_copy, _leaf, _register, _sharding
from .._tree._filters import FilterSpec, IsLeaf
from .._tree._flatten import Flat
from .._tree._leaf import LeafKinds
from . import _assign, _chunking, _lazies, _local_shards, _payload
from ._lazies import LazySource
from ._options import SaveOptions
from ._payload import PlannedLeaf
from ._tree_spec import TreeSpec


class DescribedLeaves(NamedTuple):
    """The leaves of a save, and their spec. `shardings` counts those that are spread
    over devices, by the text of their sharding; `parts` has for each leaf of which only
    some shards are stored which ones these are."""

    leaves: list[PlannedLeaf]
    spec: TreeSpec
    shardings: dict[str, int]
    parts: dict[int, LocalShards]


class _KeptSpec(NamedTuple):
    """What is kept of the leaves of a tree: their spec, how many of them have each
    sharding, and whether the memory of each leaf is stored as it is."""

    spec: TreeSpec
    shardings: dict[str, int]
    are_zero_copy: list[bool]


class StoredValue(NamedTuple):
    """The value that a leaf is written from, and its template."""

    value: Any
    template: Template


class _DescribedLeaf(NamedTuple):
    """The value that a leaf is written from, and its template without the letters of
    its keys. `part` says which shards of the leaf it is, if not all."""

    value: Any
    template: Template
    part: LocalShards | None


class _Specified(NamedTuple):
    """The spec of a save's leaves, the values that they are written from, and the
    `parts` of `DescribedLeaves`."""

    values: list[Any]
    spec: TreeSpec
    parts: dict[int, LocalShards]


def selected(
    filter_spec: FilterSpec, pytree: PyTree, leaves: Sequence[Any], is_leaf: IsLeaf
) -> list[bool]:
    """`_filters.selected`, which is shown something of its kind for a lazy leaf."""
    if filter_spec is not _leaf.is_storable:
        stand_in = lambda x: _leaf.stand_in(_lazy.body_of(x).target.kind, x)
        leaves = [stand_in(x) if isinstance(x, LazyArray) else x for x in leaves]
    return _filters.selected(filter_spec, pytree, leaves, is_leaf)


def plan_leaves(
    flat: Flat, numbers: Sequence[int], options: SaveOptions
) -> DescribedLeaves:
    """Plans the leaves of these numbers: says what is stored of each. A leaf has a
    number in the tree, and an index (`leaf_index`) among those that are stored.

    **Raises:** naming the leaf that cannot be stored.
    """
    values = list(map(flat.leaves.__getitem__, numbers))
    # A list, in which `find_kinds` keeps what it finds for the next tree like it.
    last = flat.walk.kept_result("kinds", None, list) if flat.is_walk_kept else []
    leaf_kinds = _leaf.find_kinds(values, last)
    key = _key(flat, numbers, values, leaf_kinds, options)
    parts: dict[int, LocalShards] = {}

    def make() -> _KeptSpec:
        # With a key this may not be called at all: then `values` and `parts` stay as
        # they are, which is right, as such leaves are written as they are in the tree.
        nonlocal values, parts
        values, spec, parts = _make_spec(flat, numbers, values, leaf_kinds, options)
        zero_copy = _are_zero_copy(spec, values, leaf_kinds)
        return _KeptSpec(spec, _shardings(values, leaf_kinds), zero_copy)

    found = make() if key is None else flat.walk.kept_result(key, None, make)
    spec, shardings, are_zero_copy = found
    owners: Sequence[_assign.Owners | None] = [None] * len(values)
    if options.count > 1:
        owners = _owners(spec, values, options.count)
    templates = map(spec.templates.__getitem__, spec.template_of)
    columns = spec.names, values, templates, spec.template_of, spec.origins, owners
    leaves = _payload.leaves_of_columns(*columns, are_zero_copy)
    return DescribedLeaves(leaves, spec, dict(shardings), parts)


def _are_zero_copy(
    spec: TreeSpec, values: Sequence[Any], leaf_kinds: LeafKinds
) -> list[bool]:
    """Per-leaf whether its memory is what is stored of it."""
    # Leaves of one template may lie elsewhere.
    both = list(zip(spec.template_of, leaf_kinds.kind_of))
    known = {
        (number, kind): kind != _leaf.NO_KIND
        and _host_copy.is_zero_copy(value, spec.templates[number])
        for (number, kind), value in dict(zip(both, values)).items()
    }
    return list(map(known.__getitem__, both))


def _key(
    flat: Flat,
    numbers: Sequence[int],
    values: Sequence[Any],
    leaf_kinds: LeafKinds,
    options: SaveOptions,
) -> Any:
    """A key under which the spec of these leaves is kept. Leaves with equal keys have
    equal specs. It holds no arrays, nodes or functions of the caller. None if such a
    key cannot be made."""
    if type(options.chunks) not in (type(None), int):
        return None
    if _leaf.NO_KIND in leaf_kinds.kind_of:
        return None
    if options.processes == "own" and any(map(_local_shards.is_spread, values)):
        return None
    if not flat.is_walk_kept:
        return None
    aliases = _aliases(values)
    asked = options.layout, options.chunks, options.compression, options.dtype
    return "described", asked, tuple(numbers), leaf_kinds, tuple(aliases.items())


def _aliases(values: Sequence[Any]) -> dict[int, int]:
    """For each leaf that is the same array as an earlier one, the index of that."""
    types = list(map(type, values))
    shared = {cls: _is_shared(cls) for cls in {*types}}
    # Of Python's numbers many are one object.
    leaf_indices = list(it.compress(it.count(), map(shared.__getitem__, types)))
    some = map(values.__getitem__, leaf_indices)
    keys = [x.key if type(x) is LazySource else id(x) for x in some]
    if len({*keys}) == len(keys):
        return {}
    first: dict[Any, int] = {}
    origins = map(first.setdefault, keys, leaf_indices)
    return {i: x for i, x in zip(leaf_indices, origins) if x != i}


@ft.cache
def _is_shared(cls: type) -> bool:
    return issubclass(cls, (jax.Array, np.ndarray, LazySource))


def _make_spec(
    flat: Flat,
    numbers: Sequence[int],
    given: Sequence[Any],
    leaf_kinds: LeafKinds,
    options: SaveOptions,
) -> _Specified:
    """Makes the spec of the leaves of these numbers, whose values are `given`: checks
    their names, makes a template for the first leaf of each kind, and numbers those
    that differ. Last, a template gets the letters of keys, in which leaves of one kind
    may differ."""
    number_of = flat.by_name(numbers)
    names = list(number_of)
    kinds, loose = _stored_kinds(given, leaf_kinds, options)
    firsts = dict(zip(reversed(kinds), reversed(range(len(kinds)))))
    stored = {
        kind: _describe_leaf(names[leaf_index], given[leaf_index], options)
        for kind, leaf_index in sorted(firsts.items(), key=operator.itemgetter(1))
    }
    # Aliases are found by identity. A part is a new object, so in `by_identity` such a
    # leaf stays as it was given.
    values, by_identity, parts = [*given], [*given], dict[int, LocalShards]()
    for leaf_index in loose:
        value, _, part = stored[kinds[leaf_index]]
        if leaf_index != firsts[kinds[leaf_index]]:
            # It is lazy: no other loose leaves share a kind.
            value = value.like(given[leaf_index])
        values[leaf_index] = value
        if part is None:
            by_identity[leaf_index] = value
        else:
            parts[leaf_index] = part
    own = [stored[kind].template for kind in kinds]
    aliases = _aliases(by_identity)
    for leaf_index, origin in aliases.items():
        own[leaf_index] = own[leaf_index]._replace(chunk=own[origin].chunk)
    letters = list(map(flat.walk.letters.__getitem__, numbers))
    templates, template_of = _number_templates(own, letters)
    if not flat.walk.are_names_apart:
        _check_nodes(letters, number_of, flat)
    spec = TreeSpec(tuple(names), template_of, templates, tuple(aliases.items()))
    return _Specified(values, spec, parts)


def _stored_kinds(
    given: Sequence[Any], leaf_kinds: LeafKinds, options: SaveOptions
) -> tuple[list[Any], list[int]]:
    """The kind of each leaf: leaves of one kind have one template. And the indices of
    the `loose` leaves, for which `leaf_kinds` has none, or which may have chunks or
    parts of their own. The kind of a lazy one is how it is stored, if that is known;
    any other is alone in its kind."""
    # Of some leaves only some shards may be stored.
    has_parts = options.processes == "own" and any(map(_local_shards.is_spread, given))
    is_each_alone = callable(options.chunks) or has_parts
    # Where leaves may have chunks or parts of their own, no two are of one kind.
    none = [_leaf.NO_KIND] * len(given)
    kinds: list[Any] = none if is_each_alone else list(leaf_kinds.kind_of)
    loose = [i for i, kind in enumerate(kinds) if kind == _leaf.NO_KIND]
    are_loose_alone = is_each_alone or options.dtype is not None
    for leaf_index in loose:
        likeness = None if are_loose_alone else _lazies.likeness(given[leaf_index])
        # A tuple with its own index is a kind that no other leaf has.
        kinds[leaf_index] = likeness or (leaf_index,)
    return kinds, loose


def _number_templates(
    own: Sequence[Template], letters: Sequence[str]
) -> tuple[tuple[Template, ...], tuple[int, ...]]:
    """The templates of leaves with these letters of keys, each once; and for each leaf
    the number of its own."""
    rows = list(zip(map(id, own), letters))
    # Where templates are equal, so are their numbers.
    templates: dict[Template, int] = {}
    number = {
        row: templates.setdefault(t._replace(keys=row[1]), len(templates))
        for row, t in dict(zip(rows, own)).items()
    }
    return tuple(templates), tuple(map(number.__getitem__, rows))


def stored_value(value: object, dtype: np.dtype | None) -> StoredValue:
    """The value that a leaf is written from. Floating arrays are cast to `dtype`."""
    if isinstance(value, LazyArray):
        unread = _lazies.lazy_source(value, dtype)
        return StoredValue(unread, unread.template)
    value = _register.to_leaf(value)
    return StoredValue(value, _leaf.template_of(value, dtype))


def _describe_leaf(name: str, value: object, options: SaveOptions) -> _DescribedLeaf:
    """A leaf of a name as it is stored."""
    local = None
    try:
        value, template = stored_value(value, options.dtype)
        if options.processes == "own":
            local = _local_shards.local_shards(value, template)
    except (ValueError, TypeError) as e:
        raise type(e)(f"The leaf `{name}` cannot be saved: {e}") from None
    if local is None:
        part, shard = None, _leaf.shard_shape(value, template)
    else:
        value, template, part, shard = local
    chunk = template.chunk
    if not chunk and isinstance(value, LazySource):
        # Elsewhere each chunk takes a file.
        chunk = value.grain if options.layout in _layouts.PACKED else ()
    template = template._replace(chunk=chunk)
    if not chunk or options.chunks is not None:
        chunk = _chunking.chunk_shape(name, template, options, shard)
        template = template._replace(chunk=chunk)
    codec = _chunking.codec_of(name, template, options)
    return _DescribedLeaf(value, template._replace(codec=codec), part)


def _check_nodes(letters: Sequence[str], numbers: dict[str, int], flat: Flat) -> None:
    """**Raises:** for a leaf that has the name of a node, and for two nodes of one
    name: the checkpoint's own tree has one place for both."""
    nodes: dict[str, tuple[str, int]] = {}
    for leaf, own in zip(numbers, letters):
        name, dot, _ = leaf.rpartition(".")
        while dot:
            own = own[:-1]
            known, other = nodes.setdefault(name, (own, numbers[leaf]))
            if name in numbers or known != own:
                one, two = numbers.get(name, other), numbers[leaf]
                raise ValueError(
                    f"Two parts of the tree have the name `{name}`: those on the key "
                    f"paths {flat.paths[one]} and {flat.paths[two]}. Rename one of "
                    "the keys, or leave one of the parts out with `filter_spec`."
                )
            if other != numbers[leaf]:
                break  # Nodes around it are known too.
            name, dot, _ = name.rpartition(".")


def _owners(
    spec: TreeSpec, values: Sequence[Any], processes: int
) -> list[_assign.Owners | None]:
    """Processes that write the chunks of each leaf."""
    loads, known = [0] * processes, {}
    out: list[_assign.Owners | None] = []
    templates = map(spec.templates.__getitem__, spec.template_of)
    for name, value, t, alias in zip(spec.names, values, templates, spec.origins):
        holders = None if alias is not None else _leaf.holders(value, t)
        if holders is None:
            out.append(None)
            continue
        try:
            out.append(_assign.owners(holders, t.shape, t.chunk, t.full, loads, known))
        except ValueError as e:
            raise ValueError(
                f"The leaf `{name}` cannot be saved by many processes: {e}. Pass "
                "`chunks` that divide the shards, or none."
            ) from None
    return out


def _shardings(values: Sequence[Any], leaf_kinds: LeafKinds) -> dict[str, int]:
    """How many leaves are spread over devices, by the text of their sharding."""
    kinds, kind_of = leaf_kinds
    texts = dict(enumerate(_sharding_text(kind[-1]) for kind in kinds))
    if _leaf.NO_KIND not in kind_of and not any(texts.values()):
        return {}
    own = [
        texts[kind] if kind >= 0 else _sharding_text(getattr(x, "sharding", None))
        for x, kind in zip(values, kind_of)
    ]
    return dict(collections.Counter(filter(None, own)))


def _sharding_text(sharding: object) -> str:
    return _sharding.text(sharding) if isinstance(sharding, Sharding) else ""
