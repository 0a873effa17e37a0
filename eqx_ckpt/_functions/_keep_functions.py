"""Functions of checkpoints, kept in a save of lazy leaves of those checkpoints.

A function is stored without its leaves. To be kept as it is, it needs for each of them
a leaf of the same kind, dtype and shape among those that are saved now. That is the
first of these that there is:

1. The leaf of the same name. It may be another array. If the array that had this name
   is now saved under a new name, either could be meant: an error.
2. Without that name, the same array, wherever it is now: the first leaf with it that no
   other leaf of the function has become.
3. Without that array, what is computed of it and of no other array of the checkpoint,
   as an average of models is. There must be only one. It must be at the same place in
   its node, and the whole node must have moved.

Leaves that are baked into a function have to be as they were, if they are saved: under
the name that they had, or in a node that a leaf of the function has moved to.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._kernel._format import _names
from .._kernel._format._leaves import LeafRecord, Leaves
from .._kernel._load import _extra_files, _lazy
from .._kernel._load._source import Source
from .._kernel._save._lazies import LazySource
from .._kernel._save._payload import PlannedFunction, PlannedLeaf
from .._kernel._tree import _folding
from . import _tracing
from ._stored_function import Function, source_of, stored_of


def plan_kept(function: Function, leaves: Sequence[PlannedLeaf]) -> PlannedFunction:
    """A function of a checkpoint, to be saved with these leaves.

    **Raises:** `ValueError` if they are not what it needs.
    """
    return _Candidate(function, _leaves_seen_from(leaves, source_of(function))).plan()


def plan_all_kept(leaves: Sequence[PlannedLeaf]) -> dict[str, PlannedFunction]:
    """The functions, by name, of all checkpoints that the lazy leaves come from.

    **Raises:** `ValueError` for one that cannot be kept.
    """
    found: dict[str, list[_Candidate]] = {}
    for source in _sources(leaves):
        saved = _leaves_seen_from(leaves, source)
        for name in source.index.functions:
            candidate = _Candidate(Function(source, name), saved)
            found.setdefault(name, []).append(candidate)
    return {name: _choose_candidate(some) for name, some in found.items()}


def _sources(leaves: Sequence[PlannedLeaf]) -> list[Source]:
    """The checkpoints with functions that lazy leaves come from."""
    lazies = [leaf.value.lazy for leaf in leaves if isinstance(leaf.value, LazySource)]
    found = {source.index.save: source for source in _lazy.sources_of(lazies)}
    return [source for source in found.values() if source.index.functions]


def _choose_candidate(candidates: Sequence["_Candidate"]) -> PlannedFunction:
    """The function that checkpoints have under one name. Only those count of
    which an array is saved here, or something computed of one. If none is, all count.

    **Raises:** `ValueError` unless it is the same function of the same leaves in all.
    """
    candidates = [x for x in candidates if x.has_saved_leaves()] or candidates
    planned = [candidate.plan() for candidate in candidates]
    first, first_path = planned[0].stored, candidates[0].function.path
    for (function, _), (stored, _) in zip(candidates, planned):
        if (stored.digest, stored.leaves) != (first.digest, first.leaves):
            raise ValueError(
                f"The lazy leaves are of checkpoints with different functions "
                f"`{function.name}`, or with one of different leaves: "
                f"`{first_path}` and `{function.path}`. Say which is to be "
                'kept, `functions={**ckpt.functions}`, or `functions="drop"`.'
            )
    return planned[0]


class _SavedLeaves(NamedTuple):
    """The leaves that are saved now, as seen from one checkpoint.

    - `by_name`: all of them, in the order of the save.
    - `unchanged`: by the name of an array there, the leaves that are this array.
    - `derived`: by such a name, the leaves that are computed of it, and of no other
      array there.
    """

    by_name: dict[str, PlannedLeaf]
    unchanged: dict[str, list[PlannedLeaf]]
    derived: dict[str, list[PlannedLeaf]]


def _leaves_seen_from(leaves: Sequence[PlannedLeaf], source: Source) -> _SavedLeaves:
    saved = _SavedLeaves({leaf.name: leaf for leaf in leaves}, {}, {})
    for leaf in leaves:
        if not isinstance(leaf.value, LazySource):
            continue
        name = leaf.value.name_in(source)
        if name is not None:
            saved.unchanged.setdefault(name, []).append(leaf)
        elif len(parts := leaf.value.parts_in(source)) == 1:
            saved.derived.setdefault(parts.pop(), []).append(leaf)
    return saved


class _Candidate(NamedTuple):
    """A function of a checkpoint that a save may keep, and the leaves of the save.

    An array that had several names in the checkpoint goes by the first: its origin.
    """

    function: Function
    saved: _SavedLeaves

    def has_saved_leaves(self) -> bool:
        """Whether an array that the function uses is saved, or something that is
        computed of it alone."""
        origins = set(map(self._origin_name, stored_of(self.function).leaves))
        return not origins.isdisjoint({*self.saved.unchanged, *self.saved.derived})

    def plan(self) -> PlannedFunction:
        """What is stored of the function, if it is saved with the leaves of `saved`.

        **Raises:** `ValueError` if they are not what it needs.
        """
        new_names = self._new_names()
        self._check_nodes_moved_whole(new_names)
        leaf_indices = {name: i for i, name in enumerate(self.saved.by_name)}
        leaves = [leaf_indices[name] for name in new_names.values()]
        baked, stored = self._baked_digests(new_names), stored_of(self.function)
        data = _extra_files.read_function(source_of(self.function), self.function.name)
        return PlannedFunction(stored._replace(leaves=leaves, baked=baked), data)

    @property
    def _old_leaves(self) -> Leaves:
        return source_of(self.function).index.leaves

    def _origin_name(self, leaf_index: int) -> str:
        return self._old_leaves.names[
            self._old_leaves.aliases.get(leaf_index, leaf_index)
        ]

    def _new_names(self) -> dict[str, str]:
        """The name now of each leaf of the function, by its name in the checkpoint: in
        the order in which the function takes them."""
        records = list(map(self._old_leaves.record, stored_of(self.function).leaves))
        same_name = list(map(self._leaf_of_name, records))
        # No other leaf of the function may have become one of these.
        taken = {leaf.name for leaf in same_name if leaf is not None}
        out: dict[str, str] = {}
        for record, leaf in zip(records, same_name):
            leaf = leaf or self._moved_leaf(record, taken)
            if not _fits(leaf, record):
                raise self._lost_error(
                    f"the leaf `{record.name}` as {_folding.show(record.template)}, "
                    f"which is saved as {_folding.show(leaf.template)}"
                )
            taken.add(leaf.name)
            out[record.name] = leaf.name
        return out

    def _leaf_of_name(self, record: LeafRecord) -> PlannedLeaf | None:
        """The leaf that is saved under the name of `record`; None if none is.

        **Raises:** `ValueError` if that leaf is another array, and the array of
        `record` is saved under a name that it did not have: nothing says which of the
        two is meant.
        """
        leaf, old = self.saved.by_name.get(record.name), self._old_leaves
        origin = self._origin_name(record.leaf_index)
        names_of_array = [x.name for x in self.saved.unchanged.get(origin, ())]
        if leaf is None or leaf.name in names_of_array:
            return leaf
        for name in names_of_array:
            # Under a name that it had in the checkpoint too, it has not moved. So only
            # another name is an error.
            leaf_index = old.leaf_indices.get(name)
            if leaf_index is None or self._origin_name(leaf_index) != origin:
                raise self._lost_error(
                    f"the leaf `{record.name}`, which is another one now, and what it "
                    f"was is saved as `{name}`: one of these is meant"
                )
        return leaf

    def _moved_leaf(self, record: LeafRecord, taken: set[str]) -> PlannedLeaf:
        """The leaf that a leaf of the function has become under another name, if that
        is none of those `taken`.

        **Raises:** `ValueError` if there is none, or all are taken; and if several are
        computed of its array.
        """
        origin = self._origin_name(record.leaf_index)
        moved = self.saved.unchanged.get(origin)
        if moved:
            return self._free_leaves(record, moved, taken)[0]
        derived = self.saved.derived.get(origin, [])
        alike = [x for x in derived if any(_names.node_pairs(record.name, x.name))]
        free = self._free_leaves(record, alike, taken) if alike else []
        if len(free) != 1:
            several = ", and several leaves are computed of it" if free else ""
            what = f"the leaf `{record.name}`, which is not saved{several}"
            raise self._lost_error(what)
        return free[0]

    def _free_leaves(
        self, record: LeafRecord, leaves: list[PlannedLeaf], taken: set[str]
    ) -> list[PlannedLeaf]:
        """Those of `leaves`, which `record` may have become, that are not `taken`.

        **Raises:** `ValueError` if all are.
        """
        free = [x for x in leaves if x.name not in taken]
        if not free:
            raise self._lost_error(
                f"the leaf `{record.name}` besides `{leaves[0].name}`, which stands "
                "for another of its leaves: save it under two names"
            )
        return free

    def _check_nodes_moved_whole(self, new_names: dict[str, str]) -> None:
        """**Raises:** `ValueError` unless, wherever a leaf became one that is computed
        of it, all that the function uses of its node has moved to the same node."""
        derived = {x.name for some in self.saved.derived.values() for x in some}
        for name, new_name in new_names.items():
            if new_name == name or new_name not in derived:
                continue
            # The two names end alike. The node that moved is above all that is alike.
            *_, (before, after) = _names.node_pairs(name, new_name)
            for other, new_other in new_names.items():
                if not _names.is_under(other, before):
                    continue
                is_there = _names.is_under(new_other, after)
                place = _names.below(other, before)
                if not is_there or _names.below(new_other, after) != place:
                    raise self._lost_error(
                        f"the leaf `{name}`, which is not saved; `{new_name}` is "
                        f"computed of it, and `{new_other}` is elsewhere"
                    )

    def _baked_digests(self, new_names: dict[str, str]) -> dict[str, str]:
        """The digests of leaves that are a part of the function, by their names now.
        Those that are not saved are left out.

        **Raises:** `ValueError` for one that has changed.
        """
        old, out = self._old_leaves, {}
        for name, digest in stored_of(self.function).baked.items():
            leaf_index = old.leaf_indices.get(name)
            if leaf_index is None:
                continue
            same_array = self.saved.unchanged.get(self._origin_name(leaf_index), [])
            names = dict.fromkeys([name, *_names_in_moved_nodes(name, new_names)])
            leaves = [self.saved.by_name[x] for x in names if x in self.saved.by_name]
            for leaf in leaves or same_array[:1]:
                is_same = any(leaf is x for x in same_array) or (
                    _fits(leaf, old.record(leaf_index))
                    and _tracing.digest(leaf) == digest
                )
                if not is_same:
                    raise self._lost_error(
                        f"the leaf `{name}` with the value that it had, which is a "
                        f"part of the function, and `{leaf.name}` has another"
                    )
                out[leaf.name] = digest
        return out

    def _lost_error(self, what: str) -> ValueError:
        return ValueError(
            f"The function `{self.function.name}` of the checkpoint at "
            f"`{self.function.path}` cannot be kept: it needs {what}. Nothing was "
            'saved. Leave functions out with `functions="drop"`, or say which there '
            "are to be, `functions={...}`."
        )


def _names_in_moved_nodes(name: str, new_names: dict[str, str]) -> Iterator[str]:
    """The names that a leaf has now, if the nodes that it is in have moved as leaves of
    `new_names` did, which are in the same nodes."""
    nodes = {
        pair: None
        for old_leaf, new_leaf in new_names.items()
        if old_leaf != new_leaf
        for pair in _names.node_pairs(old_leaf, new_leaf)
    }
    for before, after in nodes:
        if _names.is_under(name, before):
            yield _names.joined(after, _names.below(name, before))


def _fits(leaf: PlannedLeaf, record: LeafRecord) -> bool:
    """Whether a leaf is of the same kind, dtype and shape as a saved one, and a key of
    the same implementation."""
    looks = [
        (x.kind, x.dtype, x.logical_shape, x.impl)
        for x in (leaf.template, record.template)
    ]
    return looks[0] == looks[1]
