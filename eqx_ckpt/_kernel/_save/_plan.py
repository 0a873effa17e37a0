"""The plan of a save: what is in the index, checked before a byte is written."""

import dataclasses
import itertools as it
import json
import operator
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, NamedTuple

import equinox as eqx
from jaxtyping import PyTree

from .. import _rooms
from .._format import _files, _index, _json, _layouts, _record_json
from .._format._index import BaseFacts, Index, OwnState, SaveFacts, StoredFunction
from .._format._leaves import Leaves, LocalShards
from .._format._record import TreeRecord
from .._load import _checkpoint
from .._runtime import _log, _machine, _processes
from .._storage import _store
from .._storage._backend import Backend
from .._tree import _flatten, _leaf, _select, _states
from .._tree._flatten import Flat
from .._tree._node import Node
from . import (
    _describe,
    _lazies,
    _options,
    _to_ocdbt,
    _to_zarr,
    _tree_spec,
)
from ._options import SaveOptions
from ._payload import PlannedFunction, PlannedLeaf
from ._tree_spec import TreeSpec
from ._writing import DataFiles, LayoutWriter, Written


WRITERS: dict[str, LayoutWriter] = {"ocdbt": _to_ocdbt, "zarr": _to_zarr}
# Of host memory, beyond the tree; and this share of what the process may have.
_MAX_BYTES, _SHARE = 2**30, 4


@dataclasses.dataclass(frozen=True, eq=False)
class TreeFacts:
    """Facts about a tree beside its leaves: its record, and the names of the nodes that
    are stored whole, which the files for Orbax say."""

    record: TreeRecord
    wholes: tuple[str, ...]


class Plan(NamedTuple):
    """All of a save but the bytes. `root` is where it goes, or an open file, and
    `max_bytes` the host memory that it may take beyond the tree. `leaves`, `spec`,
    `shardings` and `parts` are those of `DescribedLeaves` in `_describe.py`."""

    root: Any
    options: SaveOptions
    max_bytes: int
    leaves: list[PlannedLeaf]
    spec: TreeSpec
    shardings: dict[str, int]
    parts: dict[int, LocalShards]
    facts: TreeFacts
    functions: dict[str, PlannedFunction]
    has_lazies: bool = False


def plan(root: Any, pytree: PyTree, options: SaveOptions) -> Plan:
    """Plans a save: checks its options, selects leaves of the tree, describes them as
    they are stored, and bounds the index. It finds all that is wrong with the tree,
    but values: numbers that `dtype` cannot hold, and damaged lazy leaves."""
    _options.check(root, options)
    _json.check_json(options.metadata)
    if options.dtype is not None:
        options = options._replace(dtype=_leaf.check_cast(options.dtype))
    if options.base is not None:
        options = options._replace(base=_options.base_facts(options.base))
    is_leaf = options.is_leaf
    _checkpoint.check_tree(pytree)
    flat = _flatten.flatten(pytree, is_leaf)
    # A leaf is stored if `filter_spec` is true of it, and `where` gives a node that it
    # is in.
    chosen = _describe.selected(options.filter_spec, pytree, flat.leaves, is_leaf)
    picked = _select.select(options.where, flat, chosen, is_leaf)
    numbers = list(it.compress(range(len(chosen)), chosen))
    if picked.leaves is not None:
        numbers = [number for number in numbers if number in picked.leaves]
    if not numbers:
        raise ValueError("Nothing to save: `filter_spec` selects no leaf of the tree.")
    described = _describe.plan_leaves(flat, numbers, options)
    layout, templates = options.layout, described.spec.templates
    if options.orbax and (why := _layouts.unopened_by_others(layout, templates)):
        raise ValueError(
            "Nothing was saved: `orbax` is for what TensorStore can open, by which "
            f"Orbax reads, and {why}. Leave it out, or save to another path for Orbax."
        )
    entry = _layouts.LAYOUTS[layout].entry
    if entry is not None:
        _check_entries(described.spec.names, entry, root)
    facts = _facts(flat, numbers, picked.whole_paths)
    values = map(operator.attrgetter("value"), described.leaves)
    has_lazies = _lazies.LazySource in {*map(type, values)}
    functions: dict[str, PlannedFunction] = {}
    # Functions that were not given come along with lazy leaves only. Of processes that
    # save together, process 0 stores them.
    given, is_wanted = options.functions, options.functions is not None or has_lazies
    leads = options.processes == "own" or _processes.leads()
    if is_wanted and given != "drop" and leads:
        stored = dict(zip(numbers, described.leaves))
        functions = _rooms.plan_functions(given, flat, stored)
    max_bytes = options.max_bytes
    if max_bytes is None:
        max_bytes = min(_MAX_BYTES, _machine.memory() // _SHARE)
    planned = Plan(
        root=root,
        options=options,
        max_bytes=max_bytes,
        facts=facts,
        functions=functions,
        has_lazies=has_lazies,
        **described._asdict(),
    )
    check_index(planned)
    return planned


def _check_entries(
    names: Sequence[str], entry: Callable[[str], str], root: Backend
) -> None:
    """**Raises:** `ValueError` if the directories of two leaves would be one on this
    file system, or one cannot be."""
    own = *_files.SIDE, _files.INDEX, _files.SIGNATURE
    seen = {name.casefold(): name for name in own}
    for name in names:
        if name.endswith(".__lock"):
            raise ValueError(
                f"The leaf `{name}` would have a directory that ends in `.__lock`, "
                'which TensorStore keeps for itself. Use `layout="ocdbt"`.'
            )
        other = seen.setdefault(entry(name).casefold(), name)
        if other != name and _store.folds_case(root):
            raise ValueError(
                f"The names `{other}` and `{name}` differ only by case, and the file "
                f'system of `{root}` takes them for one. Use `layout="ocdbt"`.'
            )


def _facts(
    flat: Flat, numbers: Sequence[int], whole_paths: Sequence[tuple]
) -> TreeFacts:
    """Facts about a tree. `whole_paths`: those of a `Selection`, of all that `where`
    gives."""
    stored = {*numbers}
    _states.check_order(flat, stored)
    record = flat.record(list(map(stored.__contains__, range(len(flat.leaves)))))

    def make() -> TreeFacts:
        try:
            _record_json.check(record)
        except ValueError as e:
            raise ValueError(
                f"Nothing was saved: {e}. Save it as several checkpoints with `where`."
            ) from None
        _check_state(flat, record)
        names = (_flatten.node_name(path, "") for path in whole_paths)
        return TreeFacts(record, tuple(names))

    return flat.walk.kept_result(
        ("facts", id(record), tuple(whole_paths)), record, make
    )


def _check_state(flat: Flat, record: TreeRecord) -> None:
    """Warns of layers whose values are in a State, in a tree that has none."""
    if flat.walk.types.isdisjoint((eqx.nn.State, Node)):
        is_index = [kind.how == "index" for kind in record.kinds]  # Of a State.
        rows = [row for row in record.rows if is_index[row.kind]]
        # The child of each is its first value, until `make_with_state` takes that out.
        if any(record.leaf_counts[row.children[0]] == 0 for row in rows):
            _log.warn(
                "The tree that is saved has layers whose values are in an "
                "`eqx.nn.State`, such as the averages of a BatchNorm, and no State: "
                "they are not saved. Save both in one tree, as in `(model, state)`.",
            )


def check_index(plan: Plan) -> None:
    """**Raises:** `ValueError` for what would have a larger index than is read."""
    spec = plan.spec
    names, chunks = sum(map(len, spec.names)), spec.chunk_count
    metadata = len(json.dumps(plan.options.metadata))
    if plan.functions:
        metadata += len(json.dumps(_index.encode_functions(_function_entries(plan))))
    if names + metadata + 64 * (len(plan.leaves) + chunks) < _json.MAX_INDEX // 16:
        return  # It is far from that.
    writer = WRITERS[plan.options.layout]
    try:
        is_linked = plan.options.reuse is not None
        bound = writer.upper_bound(plan.leaves, spec, plan.options.count, is_linked)
        side: dict[str, bytes] = dict.fromkeys(_files.OTHERS, b"")
        _index.encode(index_of(plan, "0" * 16, bound, side))
    except ValueError as e:
        ties = f" ({len(spec.aliases)} tied to another)" if spec.aliases else ""
        raise ValueError(
            f"Nothing was saved: {e}. Of that are {names} characters of the names of "
            f"{len(plan.leaves)} leaves{ties}, {chunks} chunks, and {metadata} "
            "characters of `metadata`. Make less of these, or save the tree as several "
            "checkpoints with `where`."
        ) from None


def _function_entries(plan: Plan) -> dict[str, StoredFunction]:
    return {name: function.stored for name, function in plan.functions.items()}


def side_files(plan: Plan, save: str, written: Written) -> dict[str, bytes]:
    """The files for other readers at the root of a save."""
    if plan.parts:  # No other reader knows of those.
        return {}
    if not plan.options.orbax:
        return written.side
    return written.side | _rooms.orbax_files(plan, save, written.manifest)


class _Table(NamedTuple):
    """The leaves of an index, and its columns as JSON."""

    leaves: Leaves
    columns: bytes


def _make_table(
    spec: TreeSpec,
    facts: TreeFacts,
    parts: tuple[tuple[int, LocalShards], ...],
    placed: DataFiles,
) -> _Table:
    leaves = Leaves(
        names=list(spec.names),
        templates=list(spec.templates),
        template_of=list(spec.template_of),
        aliases=dict(spec.aliases),
        parts=dict(parts),
        recorded=facts.record,
    )
    columns = _index.encode_columns(leaves, placed.files, placed.placement)
    return _Table(leaves, columns)


_kept_table = _tree_spec.remembered(_make_table)


def index_of(
    plan: Plan,
    save: str,
    written: Written,
    side: Mapping[str, bytes] = types.MappingProxyType({}),
    own: Sequence[OwnState] = (),
) -> Index:
    """The index of a save, which has these files for other readers at its root."""
    options, spec, facts = plan.options, plan.spec, plan.facts
    side_digests = dict(zip(side, map(_index.digest, side.values())))
    make_table = _kept_table if written.has_planned_places else _make_table
    table = make_table(spec, facts, tuple(plan.parts.items()), written.placed)
    return Index(
        save=save,
        layout=options.layout,
        metadata=options.metadata,
        leaves=table.leaves,
        files=written.placed.files,
        placement=written.placed.placement,
        digests=written.digests,
        others=written.others | side_digests,
        writer=_index.versions(),
        saved=SaveFacts(int(time.time()), options.count, plan.shardings),
        functions=_function_entries(plan),
        own=list(own),
        base=cast(BaseFacts | None, options.base),
        columns=table.columns,
    )
