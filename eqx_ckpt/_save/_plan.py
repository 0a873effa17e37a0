"""The plan of a save: what is in the index, checked before a byte is written."""

import collections
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .._format import _functions, _index, _json, _names
from .._format._index import Index, Placement, Saved, SavedState
from .._format._leaves import Leaves, Part, Statics
from .._format._structure import Structure
from .._format._template import Template
from .._load._checkpoint import Checkpoint
from .._tree import (
    _filters,
    _flatten,
    _leaf,
    _select,
    _sharding,
    _static,
    _structure,
    _target,
)
from . import (
    _alone,
    _assign,
    _chunking,
    _exporting,
    _lazies,
    _options,
    _sidecars,
    _to_ocdbt,
    _to_zarr,
)
from ._layout import Written
from ._lazies import Unread
from ._options import SaveOptions, Selected
from ._payload import PlannedFunction, PlannedLeaf


LAYOUTS = {"ocdbt": _to_ocdbt.LAYOUT, "zarr": _to_zarr.LAYOUT}
# Of host memory, beyond the tree.
_MAX_BYTES = 2**30


class Plan(NamedTuple):
    """All of a save but the bytes. `root` is where it goes, or an open file, and
    `holes` are places of the tree where nothing is stored, for other readers."""

    root: Any
    options: SaveOptions
    leaves: list[PlannedLeaf]
    templates: list[Template]
    holes: list[_sidecars.Hole]
    markers: dict[int, str]
    statics: Statics
    structure: Structure | None
    shardings: dict[str, int]
    functions: dict[str, PlannedFunction]

    @property
    def nbytes(self) -> int:
        """The bytes of the leaves, each counted once."""
        own = collections.Counter(x.number for x in self.leaves if x.alias is None)
        return sum(self.templates[i].nbytes * count for i, count in own.items())

    @property
    def room(self) -> int:
        """The bytes of host memory that the save may take beyond the tree."""
        most = self.options.max_bytes
        return _MAX_BYTES if most is None else most


def plan(root: Any, selected: Selected, options: SaveOptions) -> Plan:
    """Finds all that is wrong with a tree, before a byte is written."""
    _options.check(root, options)
    _json.check_metadata(options.metadata)
    options = options._replace(dtype=_leaf.check_cast(options.dtype))
    pytree, filter_spec, is_leaf, where = selected
    if isinstance(pytree, Checkpoint):
        raise TypeError("An open checkpoint is no tree. Save its `.tree`.")
    flat = _flatten.flatten(pytree, is_leaf)
    seen = flat.leaves
    if filter_spec is not _leaf.is_storable:
        seen = list(map(_lazies.stand_in, seen))
    chosen = _filters.selected(filter_spec, pytree, seen, is_leaf)
    selection = _select.select(where, flat, chosen, is_leaf)
    numbers = [
        number
        for number, good in enumerate(chosen)
        if good and (selection.places is None or number in selection.places)
    ]
    if not numbers:
        raise ValueError("Nothing to save: `filter_spec` selects no leaf of the tree.")
    leaves, templates = _describe(flat, numbers, options)
    if options.layout == "zarr":
        _to_zarr.check_case([leaf.name for leaf in leaves], root)
    entries = _flatten.state_entries(pytree, flat.paths, "")
    _flatten.check_order(entries, flat, numbers)
    markers = {
        place: entry.label
        for place, number in enumerate(numbers)
        if (entry := entries.get(number)) is not None and entry.label is not None
    }
    holes = _sidecars.holes(pytree, is_leaf, flat, numbers, selection.wholes)
    statics = _static.record(pytree, is_leaf, flat.structure)
    stored = dict(zip(numbers, leaves))
    made = Plan(
        root=root,
        options=options,
        leaves=leaves,
        templates=templates,
        holes=holes,
        markers=markers,
        statics=statics,
        structure=_structure.record(pytree, is_leaf, flat, numbers),
        shardings=_shardings(leaves),
        functions=_exporting.plan(options.functions, flat, stored),
    )
    check_index(made)
    return made


def check_index(plan: Plan) -> None:
    """**Raises:** `ValueError` for what would have a larger index than is read."""
    names = sum(len(leaf.name) for leaf in plan.leaves)
    counts = collections.Counter(leaf.number for leaf in plan.leaves)
    chunks = sum(plan.templates[i].chunk_count * n for i, n in counts.items())
    metadata = len(json.dumps(plan.options.metadata))
    stored = {name: made.stored for name, made in plan.functions.items()}
    metadata += len(json.dumps(_functions.encode(stored)))
    if names + metadata + 64 * (len(plan.leaves) + chunks) < _json.MAX_INDEX // 16:
        return  # It is far from that.
    longest = LAYOUTS[plan.options.layout].longest(plan.leaves, plan.options.count)
    try:
        _index.encode(index_of(plan, "0" * 16, longest)[0])
    except ValueError as e:
        raise ValueError(
            f"Nothing was saved: {e}. Of that are {names} characters of the names of "
            f"{len(plan.leaves)} leaves, {chunks} chunks, and {metadata} characters of "
            "`metadata`. Make less of these, or save the tree as several checkpoints "
            "with `where`."
        ) from None


def index_of(
    plan: Plan, save: str, written: Written, own: Sequence[SavedState] = ()
) -> tuple[Index, dict[str, bytes]]:
    """The index of a save, and the files for other readers at its root."""
    layout = plan.options.layout
    parts = {i: leaf.part for i, leaf in enumerate(plan.leaves) if leaf.part}
    side = dict(written.side)
    if not parts:  # No other reader knows of those.
        side |= _sidecars.files(plan.leaves, plan.holes, layout)
    others = {key: _index.digest(value) for key, value in side.items()}
    index = Index(
        save=save,
        layout=layout,
        metadata=plan.options.metadata,
        leaves=Leaves(
            [leaf.name for leaf in plan.leaves],
            plan.templates,
            [leaf.number for leaf in plan.leaves],
            {i: x.alias for i, x in enumerate(plan.leaves) if x.alias is not None},
            plan.markers,
            plan.statics,
            plan.structure,
            parts=parts,
        ),
        placement=Placement(
            written.files, written.file, written.offset, written.splits, written.sizes
        ),
        digests=written.digests,
        others={**written.others, **others},
        writer=_index.versions(),
        saved=Saved(int(time.time()), plan.options.count, plan.shardings),
        functions=_exporting.placed(plan.functions, plan.leaves),
        own=list(own),
    )
    return index, side


def _shardings(leaves: Sequence[PlannedLeaf]) -> dict[str, int]:
    """How many leaves are spread over devices, by the text of their sharding."""
    arrays = (x.value for x in leaves if isinstance(x.value, jax.Array))
    counts = collections.Counter([x.sharding for x in arrays])
    found: dict[str, int] = {}
    for sharding, count in counts.items():
        text = _sharding.text(sharding)
        if text:
            found[text] = found.get(text, 0) + count
    return found


# What was made of a template and keys; it is kept with them, as they go by its id.
_Made = dict[Any, tuple[Template, Template]]


def _describe(
    flat: _flatten.Flat,
    numbers: Sequence[int],
    options: SaveOptions,
) -> tuple[list[PlannedLeaf], list[Template]]:
    """The leaves as they will be stored, and their templates.

    **Raises:** naming the leaf that cannot be.
    """
    leaves: list[PlannedLeaf] = []
    paths: dict[str, tuple] = {}
    shared: dict[Any, int] = {}
    templates: dict[Template, int] = {}
    made: _Made = {}
    # The templates of arrays, most of which are like some other one.
    known: dict[Any, tuple[Template, int]] = {}
    processes = options.count
    loads = [0] * processes
    for place in numbers:
        path, given = flat.paths[place], flat.leaves[place]
        name, keys = _names.name_of(path)
        if name in paths:
            raise _names.twins(name, paths[name], path)
        paths[name] = path
        alike = None if callable(options.chunks) else _leaf.alike(given)
        if options.processes == "own" and _target.is_spread(given):
            alike = None
        found = None if alike is None else known.get((alike, keys))
        if found is None:
            value, template, part = _as_stored((name, keys), given, options, made)
            number = None
        else:
            value, (template, number), part = given, found, None
        alias = None
        if _leaf.is_shared(value) or isinstance(value, Unread) or part is not None:
            key = value.key if isinstance(value, Unread) else id(value)
            key = key if part is None else id(given)
            alias = shared.setdefault(key, len(leaves))
            if alias == len(leaves):
                alias = None
            else:
                chunk = leaves[alias].template.chunk
                if template.chunk != chunk:
                    template, number = template._replace(chunk=chunk), None
        if number is None:
            number = templates.setdefault(template, len(templates))
            if alike is not None and value is given:
                known[alike, keys] = template, number
        owners = None
        if processes > 1 and alias is None:
            owners = _owners(name, value, template, loads)
        leaves.append(PlannedLeaf(name, value, template, number, alias, owners, part))
    _check_nodes([(leaf.name, leaf.template.keys) for leaf in leaves], paths)
    return leaves, list(templates)


def _as_stored(
    path: tuple[str, str], value: Any, options: SaveOptions, made: _Made
) -> tuple[Any, Template, Part | None]:
    """What a leaf of a name and kinds of keys is written from, its template, and which
    part of the leaf that is, if not all."""
    name, keys = path
    try:
        value, template = _lazies.as_stored(value, options.dtype)
    except (ValueError, TypeError) as e:
        raise type(e)(f"The leaf `{name}` cannot be saved: {e}") from None
    shard, part = _leaf.shard_shape(value, template), None
    own = _alone.part_of(value, template) if options.processes == "own" else None
    if own is not None:
        value, template, part, shard = own
    grain = value.grain if isinstance(value, Unread) else ()
    done = made.get((id(template), keys, shard, grain))
    if done is None or callable(options.chunks):
        full = template._replace(keys=keys)
        chunk = full.chunk
        if not chunk and options.layout == "ocdbt":
            chunk = grain
        if not chunk or options.chunks is not None:
            chunk = _chunking.chunk_shape(name, full, options, shard)
        full = full._replace(chunk=chunk)
        codec = _chunking.codec_of(name, full, options)
        done = template, full._replace(codec=codec)
        made[id(template), keys, shard, grain] = done
    return value, done[1], part


def _check_nodes(leaves: Sequence[tuple[str, str]], paths: dict[str, tuple]) -> None:
    """**Raises:** for a leaf that has the name of a node, and for two nodes of one
    name: the checkpoint's own tree has one place for both."""
    nodes: dict[str, tuple[str, tuple]] = {}
    for leaf, kinds in leaves:
        name, dot, _ = leaf.rpartition(".")
        while dot:
            kinds = kinds[:-1]
            known, other = nodes.setdefault(name, (kinds, paths[leaf]))
            if name in paths or known != kinds:
                raise ValueError(
                    f"Two parts of the tree have the name `{name}`: those on the key "
                    f"paths {paths.get(name, other)} and {paths[leaf]}. Rename one of "
                    "the keys, or leave one of the parts out with `filter_spec`."
                )
            if other is not paths[leaf]:
                break  # Nodes around it are known too.
            name, dot, _ = name.rpartition(".")


def _owners(
    name: str, value: Any, template: Template, loads: list[int]
) -> _assign.Owners | None:
    holders = _leaf.holders(value, template)
    if holders is None:
        return None
    try:
        return _assign.owners(
            holders, template.shape, template.chunk, template.full, loads
        )
    except ValueError as e:
        raise ValueError(
            f"The leaf `{name}` cannot be saved by many processes: {e}. Pass `chunks` "
            "that divide the shards, or none."
        ) from None
