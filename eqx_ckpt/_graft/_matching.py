"""The matching of the pairs of a graft: leaves of the model and of the checkpoint, by
name."""

import collections
import functools as ft
import itertools as it
from collections.abc import Sequence
from typing import NamedTuple

from .._kernel._format import _names
from .._kernel._format._state_labels import Label
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import _folding, _pairing, _states, _target
from .._kernel._tree._folding import Problems
from ..adapters import Adapter
from . import _nested, _pairs
from ._nested import Nested
from ._pairs import NestedPair, NodePair, PairStep
from ._sides import leaf_index_of, Model, SideNode, StoredSide


class Job(NamedTuple):
    """Leaves of the model, by number, those of the checkpoint that they are made of,
    and how. Both are in the lists that their nodes are in. `of_rules` are the adapters
    that a rename has for each of the latter."""

    label: str
    numbers: Nested
    saved: Nested
    steps: tuple[PairStep, ...] = ()
    of_rules: Sequence[tuple[Adapter, ...]] = ()

    @property
    def all_numbers(self) -> list[int]:
        return _nested.flat(self.numbers)

    @property
    def all_saved(self) -> list[LazyArray]:
        return _nested.flat(self.saved)

    @property
    def adapters(self) -> list[Adapter]:
        """In the order in which they are applied."""
        out: list[Adapter] = []
        for step in self.steps:
            if isinstance(step, Adapter):
                out.append(step)
            else:
                out += it.chain.from_iterable(self.of_rules)
        return out

    @property
    def how(self) -> str:
        return ", ".join(dict.fromkeys(map(repr, self.adapters)))

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the leaves of the checkpoint."""
        return tuple(x.name for x in self.all_saved)

    @property
    def own(self) -> bool:
        """Whether a function of the user's, which may read, takes part."""
        return any(adapter.own for adapter in self.adapters)


class SameName(NamedTuple):
    """The leaves that have one name below the nodes of a group: None where there is
    none."""

    group: NestedPair
    name: str
    numbers: list[int | None]
    saved: list[LazyArray | None]


class Scalar(NamedTuple):
    """A Python scalar of the model inside of a pair, and the saved one."""

    number: int
    saved: LazyArray


class Matching:
    """Leaves of the model, by the pairs that give them leaves of the checkpoint."""

    def __init__(self, model: Model, stored: StoredSide, pairs: list[NodePair]):
        self.model = model
        self.stored = stored
        self.pairs = pairs
        self.problems = Problems()
        self.fresh: dict[int, str] = {}
        self.dropped: dict[int, str] = {}
        self.jobs: list[Job] = []
        self.scalars: list[Scalar] = []
        self.covered: dict[int, str] = {}
        self.used: dict[int, str] = {}
        # Leaves of the model with other names there, below the node of their pair.
        self.moved: dict[int, str] = {}

    def find_jobs(self) -> None:
        """Finds the `jobs`, and the `scalars` that are inside of pairs."""
        for pair in self.pairs:
            matched = False
            for group in pair.groups:
                moves = self._stored_names(group)
                self.moved |= moves
                left = [
                    {
                        moves.get(n, name): n
                        for name, n in node.leaves.items()
                        # A pair that has it by a node below this one wins.
                        if n not in self.fresh and self._depths[n] == _depth(node)
                    }
                    for node in group.lefts
                ]
                right = [
                    {
                        k: x
                        for k, x in node.leaves.items()
                        if leaf_index_of(x) not in self.dropped
                    }
                    for node in group.rights
                ]
                for name in dict.fromkeys(k for leaves in left for k in leaves):
                    numbers = [leaves.get(name) for leaves in left]
                    saved = [leaves.get(name) for leaves in right]
                    if any(x is not None for x in saved):
                        matched = True
                        self._pair_up(pair, SameName(group, name, numbers, saved))
            if not matched:
                self._nothing(pair)
            for rule in pair.unused:
                self.problems.add("rule", rule)

    @ft.cached_property
    def _twins(self) -> list[tuple[SideNode, SideNode]]:
        """The nodes of the model and of the checkpoint that stand for each other."""
        groups = [group for pair in self.pairs for group in pair.groups]
        return [x for group in groups for x in zip(group.lefts, group.rights)]

    @ft.cached_property
    def _depths(self) -> dict[int, int]:
        """The depth of the deepest node that a pair has each leaf of the model by."""
        out: dict[int, int] = {}
        for node in (node for pair in self.pairs for node in pair.lefts):
            for n in node.leaves.values():
                out[n] = max(out.get(n, 0), _depth(node))
        return out

    def is_elsewhere(self, module: str, label: str) -> bool:
        """Whether the leaves below a node of the model are all in pairs, and none of
        them in the one of this label."""
        labels = {self.covered.get(n) for n in self.model.below.get(module, [])}
        return bool(labels) and not labels & {None, label}

    def _pair_up(self, pair: NodePair, same: SameName) -> None:
        model, problems = self.model, self.problems
        group, name, numbers, saved = same
        whole_numbers = [n for n in numbers if n is not None]
        whole_saved = [x for x in saved if x is not None]
        for x in whole_saved:
            self.used.setdefault(leaf_index_of(x), pair.label)
        overlaps = [n for n in whole_numbers if n in self.covered]
        for n in overlaps:
            text = f"in {self.covered[n]} and in {pair.label}"
            problems.add("overlap", model.names[n], text)
        if overlaps:
            return
        self.covered.update(dict.fromkeys(whole_numbers, pair.label))
        if None in numbers or None in saved:
            self._incomplete(same)
            return
        # A scalar that is picked by itself is meant to be loaded.
        scalar = not any(model.is_array(n) for n in whole_numbers)
        if scalar and any(node.leaves.keys() != {""} for node in group.lefts):
            for n in whole_numbers:
                self.scalars += [Scalar(n, x) for x in whole_saved]
            return
        all_numbers = _nested.filled(group.left, iter(whole_numbers))
        all_saved = _nested.filled(group.right, iter(whole_saved))
        of_rules = [node.adapters.get(name, ()) for node in group.rights]
        job = Job(pair.label, all_numbers, all_saved, pair.steps, of_rules)
        self.jobs.append(job)

    def _incomplete(self, same: SameName) -> None:
        group, name, numbers, saved = same
        for side, nodes, leaves in (
            ("model", group.lefts, numbers),
            ("checkpoint", group.rights, saved),
        ):
            for node, leaf in zip(nodes, leaves):
                if leaf is None:
                    full = _names.joined(node.name, name)
                    text = f"not in the {side}"
                    if node.leaves.get(name) is not None:
                        text = "in another pair, in `fresh` or in `drop`"
                    self.problems.add("incomplete", full, text)

    def _stored_names(self, group: NestedPair) -> dict[int, str]:
        """The names, below the node, that leaves are stored under where these are not
        their own: of an eqx.nn.State those of the same StateIndex, and of a node whose
        children have no keys those of the same attribute."""
        node, source = group.lefts[0], group.rights[0].name
        # A fresh one has no saved one, also where a layer of its name was saved.
        own = set(node.leaves.values()) - self.fresh.keys()
        entries = {
            n: entry
            for n, entry in self.model.entries.items()
            if n in own and _names.is_under(entry.state, node.name)
        }
        found = _states.stored_names(
            self.stored.saved,
            entries,
            self.model.names,
            lambda x: _names.joined(source, _names.below(x, node.name) if x else ""),
            lambda labels: {at: self._label_there(x) for at, x in labels.items()},
        )
        numbers = list(node.leaves.values())
        below = [self.model.names[n] for n in numbers]
        names = self.moved_names(below, node, group.rights[0])
        found = {numbers[place]: name for place, name in names.items()} | found
        return {
            n: f"(no such child) {n}" if name is None else _names.below(name, source)
            for n, name in found.items()
        }

    def moved_names(
        self, names: Sequence[str], left: SideNode, right: SideNode
    ) -> dict[int, str | None]:
        """The names there of leaves and nodes of the model below one node, which stands
        for another, by their places among `names`: of those that have other ones, below
        nodes whose children go by their attributes."""
        tree, here = self.stored.saved.labelled, self.model.record
        if tree is None or not here.has_labels[-1]:
            return {}
        # A rename may have changed the names of leaves below the node.
        stored: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for name, lazy in right.leaves.items():
            for a, b in _names.node_pairs(_names.joined(right.name, name), lazy.name):
                stored[a][b] = None
        ends, nodes = (right.name, left.name), lambda there: [*stored.get(there, ())]
        moved = _pairing.moved_nodes(tree, here, *ends, "", nodes)
        return _pairing.moved_names(names, moved)

    def _label_there(self, label: Label) -> Label:
        """The label of an entry with the names that its StateIndex has there: where
        the leaves beside it come from. None of them if that is several places."""
        names = []
        for name in label.names:
            module, _, field = name.rpartition(".")
            there = self._modules_there.get(module)
            if there is not None:
                if len(there) != 1:
                    return Label()
                names.append(_names.joined(*there, field))
                continue
            for left, right in self._twins:
                if _names.is_under(name, left.name):
                    below = _names.below(name, left.name)
                    names.append(_names.joined(right.name, below))
        return Label(frozenset(names)) if names else label

    @ft.cached_property
    def _modules_there(self) -> dict[str, set[str]]:
        """The names in the checkpoint of the nodes whose leaves those below a node of
        the model come from. None of them where the names of the leaves differ too."""
        out: dict[str, set[str]] = collections.defaultdict(set)
        for left, right in self._twins:
            for name in left.leaves.keys() & right.leaves.keys():
                if left.leaves[name] in self.model.entries:
                    continue
                full = _names.joined(left.name, name)
                out[full.rpartition(".")[0]] |= set()
                for a, b in _names.node_pairs(full, right.leaves[name].name):
                    out[a].add(b)
        return dict(out)

    def _nothing(self, pair: NodePair) -> None:
        def some(nodes: list[SideNode]) -> str:
            names = [name or "itself" for node in nodes for name in node.leaves]
            shown = ", ".join(_folding.fold(list(dict.fromkeys(names)))[:4])
            return f"{_pairs.some(nodes)} has {shown or 'no leaves'}"

        left, right = pair.lefts, pair.rights
        text = f"in the model {some(left)}; in the checkpoint {some(right)}"
        leaf_indices = {
            leaf_index_of(x) for node in right for x in node.leaves.values()
        }
        if all(n in self.fresh for node in left for n in node.leaves.values()):
            text += ". All of it is in `fresh` as well"
        elif leaf_indices <= self.dropped.keys():
            text += ". All of it is in `drop` as well"
        elif leaf_indices <= self.used.keys():
            text += ". Another pair has it"
        self.problems.add("nothing", pair.label, text)

    def undeclared(self) -> tuple[list[int], list[int]]:
        """The leaves of both sides that nobody has said anything of."""
        model, saved = self.model, self.stored.saved
        numbers = [
            n
            for n in range(len(model.names))
            if model.is_array(n) and n not in self.covered and n not in self.fresh
        ]
        for n in numbers:
            target = model.target(n)
            self.problems.add("model", model.names[n], _target.show_target(target))
        leaf_indices = [
            leaf_index
            for leaf_index in range(len(saved.names))
            if leaf_index not in self.used and leaf_index not in self.dropped
        ]
        new = {
            leaf_index_of(x)
            for a, b in self._twins
            for name, x in b.leaves.items()
            if a.leaves.get(name) in self.fresh
        }
        for leaf_index in leaf_indices:
            text = _folding.show(saved.record(leaf_index).template)
            if leaf_index in new:
                text += "  (what it stands for is in `fresh`)"
            same = saved.aliases.get(leaf_index)
            if same is not None and same in self.used:
                name = saved.names[same]
                text += f"  (the same array as `{name}`, which is loaded)"
            self.problems.add("checkpoint", saved.names[leaf_index], text)
        return numbers, leaf_indices


def _depth(node: SideNode) -> int:
    return node.name.count(".") + 1 if node.name else 0
