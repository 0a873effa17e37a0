"""Functions of a checkpoint in a save of its lazy leaves: those are kept as they are.

A function needs its leaves, of the same shapes and dtypes. For each of them one of the
leaves that are saved now is found:

1. The leaf of the same name. If the array that had the name is now saved under another
   one, nothing says which of the two is meant, and that is an error.
2. Without that name, the same array, wherever it is now.
3. Without that array, what is computed of it alone, as an average of models is. It has
   to be at the same place of a node that has moved as a whole.

Leaves that are baked into a function have to be as they were, if they are saved.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._kernel._format._leaves import LeafRecord, Leaves
from .._kernel._load import _extra_files, _lazy
from .._kernel._load._source import Source
from .._kernel._save._lazies import LazySource
from .._kernel._save._payload import PlannedFunction, PlannedLeaf
from .._kernel._tree import _folding
from . import _tracing
from ._stored_function import Function


class _NewLeaves(NamedTuple):
    """The leaves that are saved, as seen from one checkpoint.

    - `by_name`: all of them.
    - `unchanged`: by names of that checkpoint, the leaves that are an array of it.
    - `derived`: by such names, the leaves that are computed of one array alone.
    """

    by_name: dict[str, PlannedLeaf]
    unchanged: dict[str, list[PlannedLeaf]]
    derived: dict[str, list[PlannedLeaf]]


class _Candidate(NamedTuple):
    """A function of a checkpoint, and the leaves that are saved as seen from there."""

    function: Function
    new: _NewLeaves

    @property
    def _old(self) -> Leaves:
        return self.function._source.index.leaves

    def _origin(self, leaf_index: int) -> str:
        """The name of the first leaf of the checkpoint that is the array of this
        index."""
        return self._old.names[self._old.aliases.get(leaf_index, leaf_index)]

    def has_some(self) -> bool:
        """Whether some leaves of the function are saved, or what is computed of one of
        them alone."""
        origins = set(map(self._origin, self.function._stored.leaves))
        return not origins.isdisjoint({*self.new.unchanged, *self.new.derived})

    def kept(self) -> PlannedFunction:
        """The function, to be saved with these leaves.

        **Raises:** `ValueError` if they are not what it needs.
        """
        function, stored = self.function, self.function._stored
        records = list(map(self._old.record, stored.leaves))
        found = list(map(self._leaf_of_name, records))
        taken = {leaf.name for leaf in found if leaf is not None}
        names: list[str] = []
        for leaf, record in zip(found, records):
            leaf = leaf or self._moved_leaf(record, taken)
            taken.add(leaf.name)
            names.append(leaf.name)
            if not _fits(leaf, record):
                raise self._lost_error(
                    f"the leaf `{record.name}` as {_folding.show(record.template)}, "
                    f"which is saved as {_folding.show(leaf.template)}"
                )
        self._check_nodes_moved_whole(dict(zip(function.leaves, names)))
        leaf_indices = {name: i for i, name in enumerate(self.new.by_name)}
        leaves = list(map(leaf_indices.__getitem__, names))
        stored = stored._replace(leaves=leaves, baked=self._baked())
        data = _extra_files.read_function(function._source, function.name)
        return PlannedFunction(stored, data)

    def _leaf_of_name(self, record: LeafRecord) -> PlannedLeaf | None:
        """The leaf that is saved under the name of `record`; None if none is.

        **Raises:** `ValueError` if that leaf is another array, and the array of
        `record` is saved under another name: nothing says which of the two is meant. An
        array that had several names may have become several arrays. Then each name
        stands for its own.
        """
        leaf, old = self.new.by_name.get(record.name), self._old
        origin = self._origin(record.leaf_index)
        names = [x.name for x in self.new.unchanged.get(origin, ())]
        if leaf is None or leaf.name in names:
            return leaf
        for name in names:
            leaf_index = old.leaf_indices.get(name)
            if leaf_index is None or self._origin(leaf_index) != origin:
                raise self._lost_error(
                    f"the leaf `{record.name}`, which is another one now, and what it "
                    f"was is saved as `{name}`: one of these is meant"
                )
        return leaf

    def _moved_leaf(self, record: LeafRecord, taken: set[str]) -> PlannedLeaf:
        """The leaf that a leaf of the function has become under another name, if that
        is none of those `taken`.

        **Raises:** `ValueError` if there is none.
        """
        origin = self._origin(record.leaf_index)
        moved = self.new.unchanged.get(origin)
        if moved:
            return self._free(record, moved, taken)[0]
        last = record.name.rpartition(".")[2]
        derived = self.new.derived.get(origin, [])
        alike = [x for x in derived if x.name.rpartition(".")[2] == last]
        free = self._free(record, alike, taken) if alike else []
        if len(free) != 1:
            several = ", and several leaves are computed of it" if free else ""
            what = f"the leaf `{record.name}`, which is not saved{several}"
            raise self._lost_error(what)
        return free[0]

    def _free(
        self, record: LeafRecord, leaves: list[PlannedLeaf], taken: set[str]
    ) -> list[PlannedLeaf]:
        """Those of the leaves that a leaf may have become that are none of those
        `taken`.

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
        """Checks the new names of the leaves of the function. Where one is computed of
        a leaf of another name, all that the function uses of its node has to have moved
        with it.

        **Raises:** `ValueError` where it has not.
        """
        derived = {x.name for some in self.new.derived.values() for x in some}
        for old, name in new_names.items():
            if name == old or name not in derived:
                continue
            before, after = _without_common_end(old, name)
            for other, now in new_names.items():
                parts, depth = other.split("."), len(before)
                is_inside = parts[:depth] == before
                if is_inside and now.split(".") != [*after, *parts[depth:]]:
                    raise self._lost_error(
                        f"the leaf `{old}`, which is not saved; `{name}` is computed "
                        f"of it, and `{now}` is elsewhere"
                    )

    def _baked(self) -> dict[str, str]:
        """The digests of leaves that are a part of the function, by their names now.

        **Raises:** `ValueError` for one that has changed.
        """
        old, out = self._old, {}
        for name, digest in self.function._stored.baked.items():
            leaf_index = old.leaf_indices.get(name)
            if leaf_index is None:
                continue
            moved = self.new.unchanged.get(self._origin(leaf_index), [])
            leaf = self.new.by_name.get(name) or next(iter(moved), None)
            if leaf is None:
                continue
            is_same = any(leaf is x for x in moved) or (
                _fits(leaf, old.record(leaf_index)) and _tracing.digest(leaf) == digest
            )
            if not is_same:
                raise self._lost_error(
                    f"the leaf `{name}` with the value that it had, which is a part of "
                    "the function"
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


def _without_common_end(old: str, new: str) -> tuple[list[str], list[str]]:
    """The parts of two names of a leaf without those at the end that are the same: the
    node that has moved, before and after."""
    before, after = old.split("."), new.split(".")
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return before, after


def keep(function: Function, leaves: Sequence[PlannedLeaf]) -> PlannedFunction:
    """A function of a checkpoint, to be saved with these leaves.

    **Raises:** `ValueError` if they are not what it needs.
    """
    return _Candidate(function, _sort_leaves(leaves, function._source)).kept()


def keep_all(leaves: Sequence[PlannedLeaf]) -> dict[str, PlannedFunction]:
    """The functions of the checkpoints that lazy leaves are of.

    **Raises:** `ValueError` for one that cannot be kept.
    """
    found: dict[str, list[_Candidate]] = {}
    for source in _sources(leaves):
        new = _sort_leaves(leaves, source)
        for name in source.index.functions:
            candidate = _Candidate(Function(source, name), new)
            found.setdefault(name, []).append(candidate)
    return {name: _one_of(candidates) for name, candidates in found.items()}


def _one_of(candidates: Sequence[_Candidate]) -> PlannedFunction:
    """The function that checkpoints have under one name. Those count that have given
    some of its leaves, or all if none has."""
    candidates = [one for one in candidates if one.has_some()] or candidates
    kept = [one.kept() for one in candidates]
    first, first_path = kept[0].stored, candidates[0].function.path
    for (function, _), (stored, _) in zip(candidates, kept):
        if (stored.digest, stored.leaves) != (first.digest, first.leaves):
            raise ValueError(
                f"The lazy leaves are of checkpoints with different functions "
                f"`{function.name}`, or with one of different leaves: "
                f"`{first_path}` and `{function.path}`. Say which is to be "
                'kept, `functions={**ckpt.functions}`, or `functions="drop"`.'
            )
    return kept[0]


def _sources(leaves: Iterable[PlannedLeaf]) -> list[Source]:
    """The checkpoints with functions that lazy leaves are of."""
    lazies = [leaf.value.lazy for leaf in leaves if isinstance(leaf.value, LazySource)]
    found = {source.index.save: source for source in _lazy.sources_of(lazies)}
    return [source for source in found.values() if source.index.functions]


def _sort_leaves(leaves: Sequence[PlannedLeaf], source: Source) -> _NewLeaves:
    """The leaves that are saved, sorted by what they are of one checkpoint: an array of
    it, or computed of one alone."""
    new = _NewLeaves({leaf.name: leaf for leaf in leaves}, {}, {})
    for leaf in leaves:
        if not isinstance(leaf.value, LazySource):
            continue
        name = leaf.value.name_in(source)
        if name is not None:
            new.unchanged.setdefault(name, []).append(leaf)
        parts = leaf.value.parts_in(source)
        if len(parts) == 1:
            new.derived.setdefault(parts.pop(), []).append(leaf)
    return new


def _fits(leaf: PlannedLeaf, record: LeafRecord) -> bool:
    """Whether a leaf is of the same kind, dtype and shape as a saved one."""
    a, b = leaf.template, record.template
    own = a.kind, a.dtype, a.logical_shape, a.impl
    return own == (b.kind, b.dtype, b.logical_shape, b.impl)
