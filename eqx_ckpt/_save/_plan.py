"""The plan of a save: what is in the index, checked before a byte is written."""

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .. import _extensions
from .._format import _functions, _index, _json
from .._format._functions import StoredFunction
from .._format._index import Index, SaveFacts
from .._format._leaves import Leaves, Statics
from .._format._structure import Structure
from .._load._checkpoint import Checkpoint
from .._runtime import _processes
from .._tree import _filters, _flatten, _leaf, _recorder, _select, _states, _static
from . import (
    _describe,
    _lazies,
    _options,
    _sidecars,
    _to_ocdbt,
    _to_zarr,
)
from ._layout import Written
from ._lazies import LazySource
from ._options import SaveOptions
from ._payload import PlannedFunctions, PlannedLeaf
from ._tree_spec import TreeSpec


LAYOUTS = {"ocdbt": _to_ocdbt.LAYOUT, "zarr": _to_zarr.LAYOUT}
# Of host memory, beyond the tree.
_MAX_BYTES = 2**30


class Plan(NamedTuple):
    """All of a save but the bytes. `root` is where it goes, or an open file, and
    `holes` are places of the tree where nothing is stored, for other readers."""

    root: Any
    options: SaveOptions
    leaves: list[PlannedLeaf]
    form: TreeSpec
    holes: list[_sidecars.Hole]
    markers: dict[int, str]
    statics: Statics
    structure: Structure | None
    shardings: dict[str, int]
    functions: PlannedFunctions

    @property
    def room(self) -> int:
        """The bytes of host memory that the save may take beyond the tree."""
        most = self.options.max_bytes
        return _MAX_BYTES if most is None else most


def plan(root: Any, pytree: PyTree, options: SaveOptions) -> Plan:
    """Finds all that is wrong with a tree, before a byte is written."""
    _options.check(root, options)
    _json.check_json(options.metadata)
    options = options._replace(
        dtype=_leaf.check_cast(options.dtype), base=_options.base_facts(options.base)
    )
    filter_spec, is_leaf, where = options[:3]
    if isinstance(pytree, Checkpoint):
        raise TypeError("An open checkpoint is no tree. Save its `.tree`.")
    flat = _flatten.flatten(pytree, is_leaf)
    seen = flat.leaves
    if filter_spec is not _leaf.is_storable:
        seen = list(map(_lazies.stand_in, seen))
    chosen = _filters.selected(filter_spec, pytree, seen, is_leaf)
    places, wholes = _select.select(where, flat, chosen, is_leaf)
    numbers = [
        number
        for number, good in enumerate(chosen)
        if good and (places is None or number in places)
    ]
    if not numbers:
        raise ValueError("Nothing to save: `filter_spec` selects no leaf of the tree.")
    leaves, form, shardings = _describe.describe(flat, numbers, options)
    if options.layout == "zarr":
        _to_zarr.check_case(form.names, root)
    entries = _states.state_entries(pytree, flat, "")
    markers = {}
    if entries:
        _states.check_order(entries, flat, numbers)
        markers = {
            place: entry.label
            for place, number in enumerate(numbers)
            if (entry := entries.get(number)) is not None and entry.label is not None
        }
    find_holes = lambda: _sidecars.holes(pytree, flat, numbers, wholes)
    holes = find_holes() if where else flat.once("holes", find_holes, numbers)
    statics = _static.record(pytree, is_leaf, flat, chosen)
    stored = dict(zip(numbers, leaves))
    made = Plan(
        root=root,
        options=options,
        leaves=leaves,
        form=form,
        holes=holes,
        markers=markers,
        statics=statics,
        structure=_recorder.record(pytree, is_leaf, flat, numbers),
        shardings=shardings,
        functions=_functions_of(options, flat, stored),
    )
    check_index(made)
    return made


def check_index(plan: Plan) -> None:
    """**Raises:** `ValueError` for what would have a larger index than is read."""
    form = plan.form
    names, chunks = sum(map(len, form.names)), form.chunk_count
    metadata = len(json.dumps(plan.options.metadata))
    if plan.functions:
        metadata += len(json.dumps(_functions.encode(_stored(plan.functions))))
    if names + metadata + 64 * (len(plan.leaves) + chunks) < _json.MAX_INDEX // 16:
        return  # It is far from that.
    layout = LAYOUTS[plan.options.layout]
    try:
        longest = layout.longest(plan.leaves, form, plan.options.count)
        _index.encode(index_of(plan, "0" * 16, longest)[0])
    except ValueError as e:
        raise ValueError(
            f"Nothing was saved: {e}. Of that are {names} characters of the names of "
            f"{len(plan.leaves)} leaves, {chunks} chunks, and {metadata} characters of "
            "`metadata`. Make less of these, or save the tree as several checkpoints "
            "with `where`."
        ) from None


def _functions_of(
    options: SaveOptions, flat: _flatten.Flat, stored: dict[int, PlannedLeaf]
) -> PlannedFunctions:
    """The functions that are stored with a tree: process 0 does that."""
    if options.functions == "drop" or not _processes.leads():
        return {}
    if options.functions is None:
        if LazySource not in {type(leaf.value) for leaf in stored.values()}:
            return {}  # None comes along with lazy leaves.
    return _extensions.call("plan_functions", options.functions, flat, stored)


def _stored(functions: PlannedFunctions) -> dict[str, StoredFunction]:
    return {name: stored for name, (stored, _) in functions.items()}


def index_of(
    plan: Plan, save: str, written: Written, own: Sequence[tuple[int, str]] = ()
) -> tuple[Index, dict[str, bytes]]:
    """The index of a save, and the files for other readers at its root."""
    layout, form = plan.options.layout, plan.form
    parts = {i: leaf.part for i, leaf in enumerate(plan.leaves) if leaf.part}
    side = dict(written.side)
    if not parts:  # No other reader knows of those.
        side |= _sidecars.files(plan.leaves, form, plan.holes, layout)
    others = {key: _index.digest(value) for key, value in side.items()}
    index = Index(
        save=save,
        layout=layout,
        metadata=plan.options.metadata,
        leaves=Leaves(
            list(form.names),
            list(form.templates),
            list(form.numbers),
            dict(form.aliases),
            plan.markers,
            plan.statics,
            plan.structure,
            parts=parts,
        ),
        files=written.files,
        placement=written.placement,
        digests=written.digests,
        others={**written.others, **others},
        writer=_index.versions(),
        saved=SaveFacts(int(time.time()), plan.options.count, plan.shardings),
        functions=_stored(plan.functions),
        own=list(own),
        base=_options.base_facts(plan.options.base),
    )
    return index, side
