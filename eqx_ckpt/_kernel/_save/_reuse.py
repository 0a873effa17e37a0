"""Leaves that have not changed since another save: its files get a second name.

A data file goes from one save into another, as a hard link, if each of the leaves in it
is the same in both. So every save is whole by itself: it may be copied, and the others
deleted. Leaves that have not changed, but lie in files with some that have, are written
once more, to files of their own.

A leaf is the same if its digests are. Of a save of this process more is known: a
jax.Array on an accelerator that it has written, and that is still there, cannot have
become another one, and is not looked at. One on CPU may have: it may share the memory
of a NumPy array, or of another framework's, and nothing tells. But it is worth a look,
as its digests take less than its copy.

Where all of a file are the same, they are not copied at all. Then nothing but the file
has their bytes, so it is held open: what is open is not lost, whoever deletes it.
"""

import dataclasses
import functools as ft
import itertools as it
import weakref
from collections.abc import Sequence, Set

import jax

from .._format import _digests, _grid
from .._format._template import Template
from .._load import _extra_files, _open
from .._load._source import Source
from .._runtime import _log
from .._runtime._processes import Processes
from .._storage import _open_files, _root
from .._storage._backend import Backend
from .._storage._descriptor import Descriptor
from .._storage._local import LocalDirectory, SavedFile
from .._tree import _host_copy
from .._tree._host_copy import Payload
from . import _background, _payload, _writing
from ._background import SaveHandle
from ._lazies import LazySource
from ._payload import PlannedLeaf
from ._plan import Plan
from ._tree_spec import TreeSpec
from ._writing import ChunkRun, Destination, LinkedFiles


# More files than this are not linked: what is in the smallest is written anew.
_MAX_LINKED_FILES = 128


class SavedArrays:
    """The arrays that a save writes, by their names; it keeps none of them alive."""

    def __init__(self, leaves: Sequence[PlannedLeaf], spec: TreeSpec):
        self._spec = spec
        values = [leaf.value for leaf in leaves]
        self._are_arrays = list(map(_payload.is_array_type, map(type, values)))
        self._refs = list(map(weakref.ref, it.compress(values, self._are_arrays)))

    @ft.cached_property
    def _arrays(self) -> dict[str, weakref.ref]:
        return dict(zip(it.compress(self._spec.names, self._are_arrays), self._refs))

    def has(self, leaf: PlannedLeaf) -> bool:
        found = self._arrays.get(leaf.name)
        return leaf.alias is None and found is not None and found() is leaf.value


@dataclasses.dataclass(eq=False)
class ReusedSave:
    """The save at a root, from which another one may take files.

    `known`: the indices of leaves that are as the save of the id `save` has written
    them. `likely`: the indices of others, which are the same arrays, but whose memory
    may have been written to. `held`: descriptors of files, by number. Leaves in them
    may not have been copied: then nothing else has their bytes.
    """

    root: Backend
    save: str = ""
    known: Set[int] = frozenset()
    likely: Set[int] = frozenset()
    held: dict[int, Descriptor] = dataclasses.field(default_factory=dict)
    _source: Source | None = None

    def source(self) -> Source:
        """**Raises:** `OSError`, `ValueError`, `RuntimeError` if it cannot be read."""
        if self._source is None:
            source = _open.open_source(self.root)
            if source.database is None:
                raise ValueError("its layout has no files that several saves can have")
            if source.index.save != self.save:
                self.known = self.likely = frozenset()
            self._source = source
        return self._source


def find_reused(plan: Plan, processes: Processes) -> ReusedSave | None:
    """The save that the keyword `reuse` leads to; None: all is written anew."""
    reuse = plan.options.reuse
    if reuse is None or processes.count > 1:
        return None
    handle = reuse if isinstance(reuse, SaveHandle) else None
    root = _root.resolve(reuse) if handle is None else _background.root_of(handle)
    # Object stores have no links, and what is in an archive no file of its own.
    for at in (root, plan.root):
        if _open_files.is_archive(at) or not isinstance(at, LocalDirectory):
            return None
    committed = None if handle is None else _background.committed_by(handle)
    if handle is None or committed is None or not committed.save_id:
        return ReusedSave(root)
    leaves, arrays = plan.leaves, handle._arrays
    same = {i for i, leaf in enumerate(leaves) if arrays.has(leaf)}
    known = {i for i in same if _host_copy.on_device(leaves[i].value)}
    return ReusedSave(root, committed.save_id, known, same - known)


def hold_unchanged(
    reused: ReusedSave | None, leaves: Sequence[PlannedLeaf], spec: TreeSpec
) -> Set[int]:
    """Opens the files of `reused` in which all is the same, as is seen without a copy.

    **Returns:** the indices of leaves that are in these, and need not be copied.
    """
    if reused is None or not _is_worth(reused.known | reused.likely, leaves, spec):
        return frozenset()
    try:
        source = reused.source()
        comparable = [
            leaf if i in reused.likely else _cheap_to_compare(leaf)
            for i, leaf in enumerate(leaves)
        ]
        compared = _compare(source, comparable, reused.known)
        runs_of, same = compared.files(), compared.same
        sizes = _sizes(leaves, runs_of)
        for number in _largest(sizes):
            key = f"{source.database}/{source.index.files[number]}"
            assert isinstance(source.root, LocalDirectory)
            reused.held[number] = source.root.hold(key, sizes[number])
    except (OSError, ValueError, RuntimeError):
        reused.held.clear()
        return frozenset()
    chunks: dict[int, int] = {}
    for number in reused.held:
        for leaf_index, numbers, *_ in runs_of[number]:
            chunks[leaf_index] = chunks.get(leaf_index, 0) + len(numbers)
    whole = {i for i, n in chunks.items() if n == leaves[i].template.chunk_count}
    # Others that are the same are small: it takes less to copy them, too.
    out = whole & (reused.known | reused.likely & same)
    # What is the same now counts as known. The program may write to its memory later,
    # and leaves that were not copied are only in the files that are held.
    reused.known = reused.known | same
    return out


def _cheap_to_compare(leaf: PlannedLeaf) -> PlannedLeaf:
    """A leaf with its bytes, or without a value if these are not at hand: it then
    counts as changed."""
    if not isinstance(leaf.value, jax.Array):
        leaf = _payload.prepare(leaf)
    is_small = isinstance(leaf.value, _payload.StagedBytes)
    return leaf if is_small else leaf._replace(value=None)


# To write less than a 64th of a save takes less than to link it.
_MIN_SHARE = 64


def _is_worth(same: Set[int], leaves: Sequence[PlannedLeaf], spec: TreeSpec) -> bool:
    """Whether it takes less to link the leaves of these indices than to write them."""
    sizes = [template.nbytes for template in spec.templates]
    kept = sum(sizes[leaves[leaf_index].template_number] for leaf_index in same)
    return bool(same) and kept * _MIN_SHARE >= spec.nbytes


def link_unchanged(reused: ReusedSave, plan: Plan, into: Destination) -> LinkedFiles:
    """Links the files of `reused` that go into a save as they are, and says what is in
    them."""
    leaves, spec = plan.leaves, plan.spec
    try:
        source = reused.source()
        compared = _compare(source, leaves, reused.known)
    except (OSError, ValueError, RuntimeError) as e:
        if reused.held:
            raise
        # What cannot be read is no loss here: all is written, as ever.
        _log.say(
            _log.INFO,
            f"Nothing of `{reused.root}` can be used again, and all is written: {e}",
            path=reused.root.url,
        )
        return _writing.NOTHING
    runs_of, same = compared.files(), frozenset(compared.same)
    if not reused.held and not _is_worth(same, leaves, spec):
        return _writing.NOTHING
    linked = _link(reused, source, _sizes(leaves, runs_of), into)
    known = set(linked)
    kept = [(run, digests) for file, digests, run in compared.kept if file in known]
    digests = [(run.leaf, run.chunks, own) for run, own in kept]
    return LinkedFiles([runs_of[number] for number in linked], digests, same)


def function_files(reused: ReusedSave) -> dict[str, SavedFile]:
    """The files of the functions of another save, by their digests."""
    try:
        source = reused.source()
    except (OSError, ValueError, RuntimeError):
        return {}
    return {
        x.digest: SavedFile(
            source.root, _extra_files.function_key(source, x), x.nbytes, None
        )
        for x in source.index.functions.values()
    }


def _sizes(
    leaves: Sequence[PlannedLeaf], files: dict[int, list[ChunkRun]]
) -> dict[int, int]:
    """Lengths of files that hold these runs, and no more."""
    stop = lambda run: run.stop(leaves[run.leaf].template.full)
    # A run without chunks has a place, and may have it after the end.
    stops = {n: [stop(run) for run in runs if run.chunks] for n, runs in files.items()}
    return {number: max(own, default=0) for number, own in stops.items()}


def _largest(sizes: dict[int, int]) -> list[int]:
    return sorted(sizes, key=sizes.__getitem__, reverse=True)[:_MAX_LINKED_FILES]


def _compare(
    source: Source, leaves: Sequence[PlannedLeaf], known: Set[int]
) -> "_Comparison":
    """Compares leaves with those in `source`; the `known` ones are taken as equal."""
    comparison = _Comparison(source, leaves, known)
    kinds = {leaf.template_number: leaf.template for leaf in leaves}
    numbers = {number for number, t in kinds.items() if _is_one(t)}
    # Leaves of one chunk, which many are, go through no more than they need.
    ones: list[tuple[int, int]] = []
    for saved_index, leaf_index in _found(source, leaves, known):
        if leaf_index is None:
            comparison.drop(saved_index)
        elif leaves[leaf_index].template_number in numbers and (
            leaf_index in known or not isinstance(leaves[leaf_index].value, LazySource)
        ):
            ones.append((saved_index, leaf_index))
        else:
            comparison.compare_runs(saved_index, leaf_index)
    comparison.compare_ones(ones)
    return comparison


@dataclasses.dataclass(eq=False)
class _Comparison:
    """Compares leaves of a plan with saved ones. It collects the files that hold a
    `changed` run, and the leaves that are the `same`. Of the runs that are `kept` it
    has the file and the digests."""

    source: Source
    leaves: Sequence[PlannedLeaf]
    known: Set[int]
    changed: set[int] = dataclasses.field(default_factory=set)
    same: set[int] = dataclasses.field(default_factory=set)
    kept: list[tuple[int, bytes, ChunkRun]] = dataclasses.field(default_factory=list)

    def drop(self, saved_index: int) -> None:
        """The save has no leaf like this one."""
        index = self.source.index
        record = index.leaves.record(saved_index, is_name_checked=True)
        self.changed.update(file for _, _, file, _ in index.extents.segments(record))

    def compare_runs(self, saved_index: int, leaf_index: int) -> None:
        """Compares a leaf with a saved one, run by run."""
        extents = self.source.index.extents
        record = self.source.index.leaves.record(saved_index, is_name_checked=True)
        leaf, is_known = self.leaves[leaf_index], leaf_index in self.known
        is_same = True
        for start, stop, file, offset in extents.segments(record):
            run = range(start, stop)
            saved_digests = self.source.digests_of(record, run)
            if not is_known and not _is_same(leaf, run, saved_digests):
                self.changed.add(file)
                is_same = False
                continue
            ends = None
            if record.template.codec is not None:
                ends = [extents.nbytes(record, start, n + 1) for n in run]
            kept = ChunkRun(leaf_index, run, offset, ends)
            self.kept.append((file, saved_digests, kept))
        if is_same:
            self.same.add(leaf_index)

    def compare_ones(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Compares leaves of one chunk: pairs of a saved index and a leaf index."""
        known, one, extents = self.known, range(1), self.source.index.extents
        saved = [saved_index for saved_index, _ in pairs]
        saved_digests = self.source.digests.each(extents.first_digests(saved))
        digests = _digests_of_ones(self.leaves, {i for _, i in pairs} - known)
        rows = zip(pairs, extents.starts(saved), saved_digests)
        for (_, leaf_index), (file, offset), saved_digest in rows:
            if leaf_index in known or digests.get(leaf_index) == saved_digest:
                run = ChunkRun(leaf_index, one, offset, None)
                self.kept.append((file, saved_digest, run))
                self.same.add(leaf_index)
            else:
                self.changed.add(file)

    def files(self) -> dict[int, list[ChunkRun]]:
        """The files in which nothing has changed, with the runs in each."""
        files: dict[int, list[ChunkRun]] = {}
        # Runs of a file are told in their order there.
        for file, _, run in sorted(self.kept, key=lambda row: row[2].offset):
            if file not in self.changed:
                files.setdefault(file, []).append(run)
        return files


def _is_one(t: Template) -> bool:
    """Whether a leaf is one chunk with one digest, stored as it is."""
    return t.codec is None and t.chunk == t.shape and t.nbytes <= _grid.BLOCK


def _found(
    source: Source, leaves: Sequence[PlannedLeaf], known: Set[int]
) -> list[tuple[int, int | None]]:
    """The leaves of a save, and for each the index of the one that may be the same."""
    saved, leaf_indices = source.index.leaves, _leaf_indices(source, leaves, known)
    saved.check_templates()
    alike: dict[tuple[int, int], bool] = {}
    out: list[tuple[int, int | None]] = []
    for at, (name, number) in enumerate(zip(saved.names, saved.template_of)):
        if at in saved.aliases:
            continue
        # A name that is none of ours is nothing that we use.
        leaf_index = leaf_indices.get(name)
        if leaf_index is not None:
            key = leaves[leaf_index].template_number, int(number)
            if key not in alike:
                own, t = leaves[leaf_index].template, saved.templates[number]
                # It may have moved to keys of other kinds.
                alike[key] = own._replace(keys=t.keys) == t
            leaf_index = leaf_index if alike[key] else None
        out.append((at, leaf_index))
    return out


def _digests_of_ones(
    leaves: Sequence[PlannedLeaf], leaf_indices: Set[int]
) -> dict[int, bytes]:
    """The digests of some leaves of one chunk, but for those without a value."""
    out: dict[int, bytes] = {}
    rest = {i for i in leaf_indices if leaves[i].value is not None}
    for some in _payload.small_by_template(leaves, rest):
        rows = _payload.small_bytes([leaves[leaf_index] for leaf_index in some])
        out.update(zip(some, map(_digests.block_digest, rows)))
    for leaf_index in rest - out.keys():
        out[leaf_index] = _digests.block_digest(_payload.whole(leaves[leaf_index]))
    return out


def _leaf_indices(
    source: Source, leaves: Sequence[PlannedLeaf], known: Set[int]
) -> dict[str, int]:
    """The indices of leaves, each by the one name in `source` that it may be the same
    as: that of a lazy leaf there, or else its own. A leaf that is `known` keeps its own
    name from a lazy one, as it may not have been copied."""
    own: dict[str, int] = {}
    lazy: dict[str, int] = {}
    for i, leaf in enumerate(leaves):
        if leaf.alias is None:
            is_lazy = isinstance(leaf.value, LazySource)
            name = leaf.value.name_in(source) if is_lazy else None
            if name is None:
                own[leaf.name] = i
            else:
                lazy[name] = i
    return own | lazy | {name: i for name, i in own.items() if i in known}


def _is_same(leaf: PlannedLeaf, run: range, rows: bytes) -> bool:
    """Whether a run of chunks has these digests. It ends at the first that differs."""
    value, t = leaf.value, leaf.template
    if value is None:
        return False
    if isinstance(value, Payload):
        known = value.digests(run)
        if known is not None:
            return known == rows
    if t.chunk == t.shape:
        parts = iter([_host_copy.to_host(value, t)])
    else:
        regions = _grid.lay(t.shape, t.chunk, t.itemsize).regions
        parts = _host_copy.to_host_by_regions(value, t, regions[run.start : run.stop])
    for part in parts:
        for digest in _digests.block_digests(_digests.as_bytes(part)):
            if digest != rows[: _digests.SIZE]:
                return False
            rows = rows[_digests.SIZE :]
    return not rows


def _link(
    reused: ReusedSave, source: Source, sizes: dict[int, int], into: Destination
) -> list[int]:
    """Gives files of these sizes second names, from 0 on. Returns which have one."""
    assert isinstance(into.work, LocalDirectory)
    linked: list[int] = []
    most = [n for n in _largest(sizes) if n not in reused.held][
        : _MAX_LINKED_FILES - len(reused.held)
    ]
    for number in sorted([*reused.held, *most]):
        key = f"{source.database}/{source.index.files[number]}"
        origin = SavedFile(source.root, key, sizes[number], reused.held.get(number))
        name = f"{into.data_key}/{len(linked)}"
        if into.work.link_from(origin, name, into.sync):
            linked.append(number)
    # They are closed with the last of their users.
    reused.held.clear()
    return linked
