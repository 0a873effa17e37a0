"""Functions of a checkpoint in a save of its lazy leaves: those are kept as they are.

A function needs its leaves, of the same shapes and dtypes. They are found as the lazy
leaves that they are, whatever their names are now, or else by name: what is computed of
them, as an average of models, may stand for them. The leaves that are baked into it
have to be as they were, if they are there at all.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._format import _index
from .._format._leaves import Record
from .._load import _source
from .._load._functions import Function
from .._load._source import Source
from .._tree import _leaf
from . import _payload
from ._lazies import Unread
from ._payload import PlannedFunction, PlannedLeaf


class _New(NamedTuple):
    """The leaves of a save: by name; by their names in a checkpoint whose lazy leaves
    they are; and by the names there of what they are computed of."""

    named: dict[str, PlannedLeaf]
    moved: dict[str, PlannedLeaf]
    made: dict[str, PlannedLeaf]

    def find(self, record: Record, origin: str) -> PlannedLeaf | None:
        for leaves, name in (
            (self.moved, origin),
            (self.named, record.name),
            (self.made, record.name),
        ):
            if name in leaves:
                return leaves[name]
        return None


def all_of(leaves: Sequence[PlannedLeaf]) -> dict[str, PlannedFunction]:
    """The functions of the checkpoints that lazy leaves are of.

    **Raises:** `ValueError` for one that cannot be kept.
    """
    functions: dict[str, Function] = {}
    for source in _sources(leaves):
        for name in source.index.functions:
            function = Function(source, name)
            other = functions.setdefault(name, function)
            if other.digest != function.digest:
                raise ValueError(
                    f"The lazy leaves are of checkpoints with different functions "
                    f"`{name}`: `{other.path}` and `{function.path}`. Say which is to "
                    'be kept, `functions={**ckpt.functions}`, or `functions="drop"`.'
                )
    return {name: carried(function, leaves) for name, function in functions.items()}


def _sources(leaves: Iterable[PlannedLeaf]) -> list[Source]:
    lazies = [leaf.value.lazy for leaf in leaves if isinstance(leaf.value, Unread)]
    found = {source.index.save: source for x in lazies for source in x._sources}
    return [source for source in found.values() if source.index.functions]


def carried(function: Function, leaves: Sequence[PlannedLeaf]) -> PlannedFunction:
    """A function of a checkpoint, beside other leaves.

    **Raises:** `ValueError` if it is not one of these.
    """
    source, stored = function._source, function._stored
    new = _new(leaves, source)
    old = source.index.leaves
    own = []
    for place in stored.leaves:
        record = old.record(place)
        leaf = new.find(record, old.names[old.aliases.get(place, place)])
        if leaf is None:
            raise _lost(function, f"the leaf `{record.name}`, which is not saved")
        if not _fits(leaf, record):
            raise _lost(
                function,
                f"the leaf `{record.name}` as {_leaf.show(record.template)}, which is "
                f"saved as {_leaf.show(leaf.template)}",
            )
        own.append(leaf.name)
    baked = {}
    for name, digest in stored.baked.items():
        leaf = new.moved.get(name, new.named.get(name))
        if leaf is None:
            continue
        if name not in new.moved and _index.digest(_payload.whole(leaf)) != digest:
            raise _lost(
                function,
                f"the leaf `{name}` with the value that it had, which is a part of "
                "the function",
            )
        baked[leaf.name] = digest
    stored = stored._replace(names=list(function.names), baked=baked)
    return PlannedFunction(_source.read_function(source, function.name), own, stored)


def _new(leaves: Sequence[PlannedLeaf], source: Source) -> _New:
    new = _New({leaf.name: leaf for leaf in leaves}, {}, {})
    for leaf in leaves:
        if not isinstance(leaf.value, Unread):
            continue
        name = leaf.value.name_in(source)
        if name is not None:
            new.moved.setdefault(name, leaf)
        for name in leaf.value.parts_in(source):
            new.made.setdefault(name, leaf)
    return new


def _fits(leaf: PlannedLeaf, record: Record) -> bool:
    a, b = leaf.template, record.template
    same = (a.kind, a.dtype, a.logical_shape, a.impl)
    return same == (b.kind, b.dtype, b.logical_shape, b.impl)


def _lost(function: Function, what: str) -> ValueError:
    return ValueError(
        f"The function `{function.name}` of the checkpoint at `{function.path}` cannot "
        f"be kept: it needs {what}. Nothing was saved. Leave functions out with "
        '`functions="drop"`, or give those to keep, `functions={...}`.'
    )
