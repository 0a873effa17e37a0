"""The leaves of a save as they will be stored.

A training loop saves the same leaves again and again, with other values. What follows
from all else that is known of them, such as their names and templates, is kept.
"""

import collections
import functools as ft
import itertools as it
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._format import _names
from .._format._leaves import Part
from .._format._template import Template
from .._tree import _host_copy, _leaf, _sharding
from .._tree._flatten import Flat
from .._tree._leaf import LeafKinds
from . import _assign, _chunking, _lazies, _local_parts, _payload
from ._lazies import LazySource
from ._options import SaveOptions
from ._payload import PlannedLeaf
from ._tree_spec import TreeSpec


def describe(
    flat: Flat, numbers: Sequence[int], options: SaveOptions
) -> tuple[list[PlannedLeaf], TreeSpec, dict[str, int], dict[int, Part]]:
    """The leaves of these numbers, their spec, how many of them are spread over
    devices, by the text of their sharding, and the parts of those that are not all
    there.

    **Raises:** naming the leaf that cannot be stored.
    """
    values = list(map(flat.leaves.__getitem__, numbers))
    alike = _alike(flat, values)
    key = _key(flat, numbers, values, alike, options)
    kept: list[Any] = [] if key is None else flat.walk.once(key, None, list)
    parts: dict[int, Part] = {}
    if not kept:
        values, form, parts = _described(flat, numbers, values, alike, options)
        kept.append((form, _shardings(values, alike), _bare(form, values, alike)))
    form, shardings, bare = kept[0]
    owners: Sequence[_assign.Owners | None] = [None] * len(values)
    if options.count > 1:
        owners = _owners(form, values, options.count)
    templates = map(form.templates.__getitem__, form.numbers)
    rows = form.names, values, templates, form.numbers, form.origins, owners, bare
    leaves = list(_payload.planned(zip(*rows, strict=True)))
    return leaves, form, dict(shardings), parts


def _bare(form: TreeSpec, values: Sequence[Any], alike: LeafKinds) -> list[bool]:
    """Per-leaf whether its memory is what is stored of it."""
    templates = map(form.templates.__getitem__, form.numbers)
    known: dict[Any, bool] = {}
    out: list[bool] = []
    for value, template, *kind in zip(values, templates, form.numbers, alike[1]):
        # Leaves of one template may lie elsewhere.
        if kind[1] < 0:
            out.append(False)
            continue
        if (key := tuple(kind)) not in known:
            known[key] = _host_copy.is_bare(value, template)
        out.append(known[key])
    return out


def _alike(flat: Flat, values: Sequence[Any]) -> LeafKinds:
    """The kinds of leaves, those of the last tree like it where these are the same."""
    if not flat.is_walk_kept:
        return _leaf.alike(values, [])
    return _leaf.alike(values, flat.walk.once("kinds", None, list))


def _key(
    flat: Flat,
    numbers: Sequence[int],
    values: Sequence[Any],
    alike: LeafKinds,
    options: SaveOptions,
) -> Any:
    """Equal for leaves of one form. It has all that this follows from, and nothing of
    the caller's that lives or changes: no arrays, nodes or functions. None where that
    cannot be."""
    if type(options.chunks) not in (type(None), int) or -1 in alike[1]:
        return None
    if options.processes == "own" and any(map(_local_parts.is_spread, values)):
        return None
    if not flat.is_walk_kept:
        return None
    arrays = values
    types = list(map(type, values))
    shared = {*filter(_is_shared, {*types})}
    if not shared.issuperset(types):
        arrays = list(it.compress(values, map(shared.__contains__, types)))
    first: dict[int, int] = {}
    aliases = ()
    if len({*map(id, arrays)}) < len(arrays):
        aliases = tuple(map(first.setdefault, map(id, arrays), it.count()))
    asked = options.layout, options.chunks, options.compression, options.dtype
    return "described", asked, tuple(numbers), alike, aliases


@ft.cache
def _is_shared(cls: type) -> bool:
    return issubclass(cls, (jax.Array, np.ndarray))


def _described(
    flat: Flat,
    numbers: Sequence[int],
    given: Sequence[Any],
    alike: LeafKinds,
    options: SaveOptions,
) -> tuple[list[Any], TreeSpec, dict[int, Part]]:
    """The values that leaves are written from, their spec, and the part of a leaf, if
    not all."""
    values: list[Any] = []
    number_of: dict[str, int] = {}
    flat.walk.check_names(numbers)
    shared: dict[Any, int] = {}
    # Where templates are equal, so are their numbers.
    templates: dict[Template, int] = {}
    own: list[Template] = []
    aliases: dict[int, int] = {}
    parts: dict[int, Part] = {}
    # Of some leaves only parts may be stored.
    has_parts = options.processes == "own" and any(map(_local_parts.is_spread, given))
    is_kept = not (callable(options.chunks) or has_parts)
    # The templates of leaves of a kind and kinds of keys.
    known: dict[tuple[int, str], Template] = {}
    names, letters = flat.walk.names, flat.walk.letters
    for place, (number, leaf, kind) in enumerate(zip(numbers, given, alike[1])):
        name, keys = names[number], letters[number]
        if name in number_of:
            paths = flat.paths
            raise _names.twins(name, paths[number_of[name]], paths[number])
        number_of[name] = number
        value, template = leaf, known.get((kind, keys))
        if template is None:
            value, template, part = _as_stored(name, keys, leaf, options)
            if kind >= 0 and is_kept:
                known[kind, keys] = template
            if part is not None:
                parts[place] = part
        if _leaf.is_shared(value) or isinstance(value, LazySource) or place in parts:
            key = value.key if isinstance(value, LazySource) else id(value)
            key = id(leaf) if place in parts else key
            origin = shared.setdefault(key, place)
            if origin != place:
                aliases[place] = origin
                template = template._replace(chunk=own[origin].chunk)
        values.append(value)
        own.append(template)
    of = tuple([templates.setdefault(t, len(templates)) for t in own])
    if not flat.walk.are_names_apart:
        _check_nodes([t.keys for t in own], number_of, flat)
    some = tuple(aliases.items())
    return values, TreeSpec(tuple(number_of), of, tuple(templates), some), parts


def _as_stored(
    name: str, keys: str, value: Any, options: SaveOptions
) -> tuple[Any, Template, Part | None]:
    """The value that a leaf of a name and kinds of keys is written from, its template,
    and the part of the leaf that it is, if not all."""
    own = None
    try:
        value, template = _lazies.as_stored(value, options.dtype)
        if options.processes == "own":
            own = _local_parts.part_of(value, template)
    except (ValueError, TypeError) as e:
        raise type(e)(f"The leaf `{name}` cannot be saved: {e}") from None
    whole = value, template, None, _leaf.shard_shape(value, template)
    value, template, part, shard = own or whole
    chunk = template.chunk
    if not chunk and isinstance(value, LazySource) and options.layout == "ocdbt":
        chunk = value.grain
    template = template._replace(keys=keys, chunk=chunk)
    if not chunk or options.chunks is not None:
        chunk = _chunking.chunk_shape(name, template, options, shard)
        template = template._replace(chunk=chunk)
    codec = _chunking.codec_of(name, template, options)
    return value, template._replace(codec=codec), part


def _check_nodes(letters: Sequence[str], numbers: dict[str, int], flat: Flat) -> None:
    """**Raises:** for a leaf that has the name of a node, and for two nodes of one
    name: the checkpoint's own tree has one place for both."""
    nodes: dict[str, tuple[str, int]] = {}
    for leaf, kinds in zip(numbers, letters):
        name, dot, _ = leaf.rpartition(".")
        while dot:
            kinds = kinds[:-1]
            known, other = nodes.setdefault(name, (kinds, numbers[leaf]))
            if name in numbers or known != kinds:
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
    form: TreeSpec, values: Sequence[Any], processes: int
) -> list[_assign.Owners | None]:
    """Processes that write the chunks of each leaf."""
    loads, known = [0] * processes, {}
    out: list[_assign.Owners | None] = []
    templates = map(form.templates.__getitem__, form.numbers)
    for name, value, t, alias in zip(form.names, values, templates, form.origins):
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


def _shardings(values: Sequence[Any], alike: LeafKinds) -> dict[str, int]:
    """Numbers of leaves that are spread over devices, by the text of their sharding."""
    kinds, numbers = alike
    rest = [x for x, number in zip(values, numbers) if number < 0]
    arrays = [x.sharding for x in rest if isinstance(x, jax.Array)]
    counts = collections.Counter(arrays)
    for number, count in collections.Counter(numbers).items():
        if number >= 0 and isinstance(kinds[number][-1], jax.sharding.Sharding):
            counts[kinds[number][-1]] += count
    found: dict[str, int] = collections.Counter()
    for sharding, count in counts.items():
        if text := _sharding.text(sharding):
            found[text] += count
    return found
