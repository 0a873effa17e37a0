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

from .._kernel._format import _index
from .._kernel._format._leaves import LeafRecord, Leaves
from .._kernel._load import _extra_files, _lazy
from .._kernel._load._source import Source
from .._kernel._save import _payload
from .._kernel._save._lazies import LazySource
from .._kernel._save._payload import PlannedFunction, PlannedLeaf
from .._kernel._tree import _leaf
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
    candidates = [one for one in candidates if _has_some(*one)] or candidates
    kept = [_kept(*one) for one in candidates]
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


def _has_some(function: Function, new: _NewLeaves) -> bool:
    """Whether some leaves of a function are saved, or what is computed of them."""
    old = function._source.index.leaves
    origins = {_origin(old, leaf_index) for leaf_index in function._stored.leaves}
    return not origins.isdisjoint({*new.unchanged, *new.derived})


def _sources(leaves: Iterable[PlannedLeaf]) -> list[Source]:
    """The checkpoints with functions that lazy leaves are of."""
    lazies = [leaf.value.lazy for leaf in leaves if isinstance(leaf.value, LazySource)]
    found = {source.index.save: source for source in _lazy.sources_of(lazies)}
    return [source for source in found.values() if source.index.functions]


def _sort_leaves(leaves: Sequence[PlannedLeaf], source: Source) -> _NewLeaves:
    new = _NewLeaves({leaf.name: leaf for leaf in leaves}, {}, {})
    for leaf in leaves:
        if not isinstance(leaf.value, LazySource):
            continue
        name = leaf.value.name_in(source)
        if name is not None:
            new.unchanged.setdefault(name, []).append(leaf)
        parts = leaf.value.parts_in(source)
        if len(parts) == 1:
            (part,) = parts
            new.derived.setdefault(part, []).append(leaf)
    return new


def _origin(old: Leaves, leaf_index: int) -> str:
    """The name of the first leaf of a checkpoint that is the array of this index."""
    return old.names[old.aliases.get(leaf_index, leaf_index)]


def keep(function: Function, leaves: Sequence[PlannedLeaf]) -> PlannedFunction:
    """A function of a checkpoint, to be saved with these leaves.

    **Raises:** `ValueError` if they are not what it needs.
    """
    return _kept(function, _sort_leaves(leaves, function._source))


def _kept(function: Function, new: _NewLeaves) -> PlannedFunction:
    source, stored = function._source, function._stored
    records = list(map(source.index.leaves.record, stored.leaves))
    found = [_leaf_of_name(function, new, record) for record in records]
    taken = {leaf.name for leaf in found if leaf is not None}
    names: list[str] = []
    for leaf, record in zip(found, records):
        leaf = leaf or _moved_leaf(function, new, record, taken)
        taken.add(leaf.name)
        names.append(leaf.name)
        if not _fits(leaf, record):
            raise _lost_error(
                function,
                f"the leaf `{record.name}` as {_leaf.show(record.template)}, which is "
                f"saved as {_leaf.show(leaf.template)}",
            )
    _check_nodes(function, new, dict(zip(function.leaves, names)))
    leaf_indices = {name: leaf_index for leaf_index, name in enumerate(new.by_name)}
    leaves = list(map(leaf_indices.__getitem__, names))
    stored = stored._replace(leaves=leaves, baked=_baked(function, new))
    return PlannedFunction(stored, _extra_files.read_function(source, function.name))


def _leaf_of_name(
    function: Function, new: _NewLeaves, record: LeafRecord
) -> PlannedLeaf | None:
    """The leaf that is saved under the name of `record`; None if none is.

    **Raises:** `ValueError` if that leaf is another array, and the array of `record` is
    saved under another name: nothing says which of the two is meant. An array that had
    several names may have become several arrays. Then each name stands for its own.
    """
    leaf, old = new.by_name.get(record.name), function._source.index.leaves
    origin = _origin(old, record.leaf_index)
    names = [x.name for x in new.unchanged.get(origin, ())]
    if leaf is None or leaf.name in names:
        return leaf
    for name in names:
        leaf_index = old.leaf_indices.get(name)
        if leaf_index is None or _origin(old, leaf_index) != origin:
            raise _lost_error(
                function,
                f"the leaf `{record.name}`, which is another one now, and what it was "
                f"is saved as `{name}`: one of these is meant",
            )
    return leaf


def _moved_leaf(
    function: Function, new: _NewLeaves, record: LeafRecord, taken: set[str]
) -> PlannedLeaf:
    """The leaf that a leaf of a function has become under another name, if that is none
    of those `taken`.

    **Raises:** `ValueError` if there is none.
    """
    origin = _origin(function._source.index.leaves, record.leaf_index)
    moved, derived = new.unchanged.get(origin, []), new.derived.get(origin, [])
    last = record.name.rpartition(".")[2]
    some = moved or [x for x in derived if x.name.rpartition(".")[2] == last]
    free = [x for x in some if x.name not in taken]
    if some and not free:
        raise _lost_error(
            function,
            f"the leaf `{record.name}` besides `{some[0].name}`, which stands for "
            "another of its leaves: save it under two names",
        )
    if not free or (not moved and len(free) > 1):
        several = ", and several leaves are computed of it" if free else ""
        raise _lost_error(
            function, f"the leaf `{record.name}`, which is not saved{several}"
        )
    return free[0]


def _check_nodes(function: Function, new: _NewLeaves, became: dict[str, str]) -> None:
    """Checks the names that leaves of a function `became`. Where one is computed of a
    leaf of another name, all that the function uses of its node has to have moved with
    it.

    **Raises:** `ValueError` where it has not.
    """
    derived = {x.name for some in new.derived.values() for x in some}
    for old, name in became.items():
        if name == old or name not in derived:
            continue
        # The node that has moved: both names without the end that they have in common.
        before, after = old.split("."), name.split(".")
        while before and after and before[-1] == after[-1]:
            before, after = before[:-1], after[:-1]
        for other, now in became.items():
            parts, depth = other.split("."), len(before)
            is_inside = parts[:depth] == before
            if is_inside and now.split(".") != [*after, *parts[depth:]]:
                raise _lost_error(
                    function,
                    f"the leaf `{old}`, which is not saved; `{name}` is computed "
                    f"of it, and `{now}` is elsewhere",
                )


def _baked(function: Function, new: _NewLeaves) -> dict[str, str]:
    """The digests of leaves that are a part of a function, by their names now.

    **Raises:** `ValueError` for one that has changed.
    """
    old, out = function._source.index.leaves, {}
    for name, digest in function._stored.baked.items():
        leaf_index = old.leaf_indices.get(name)
        if leaf_index is None:
            continue
        moved = new.unchanged.get(_origin(old, leaf_index), [])
        leaf = new.by_name.get(name) or next(iter(moved), None)
        if leaf is None:
            continue
        is_same = any(leaf is x for x in moved) or (
            _fits(leaf, old.record(leaf_index))
            and _index.digest(_payload.whole(leaf)) == digest
        )
        if not is_same:
            raise _lost_error(
                function,
                f"the leaf `{name}` with the value that it had, which is a part of "
                "the function",
            )
        out[leaf.name] = digest
    return out


def _fits(leaf: PlannedLeaf, record: LeafRecord) -> bool:
    """Whether a leaf is of the same kind, dtype and shape as a saved one."""
    a, b = leaf.template, record.template
    own = a.kind, a.dtype, a.logical_shape, a.impl
    return own == (b.kind, b.dtype, b.logical_shape, b.impl)


def _lost_error(function: Function, what: str) -> ValueError:
    return ValueError(
        f"The function `{function.name}` of the checkpoint at `{function.path}` cannot "
        f"be kept: it needs {what}. Nothing was saved. Leave functions out with "
        '`functions="drop"`, or say which there are to be, `functions={...}`.'
    )
