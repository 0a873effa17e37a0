"""A guess at what a graft meant, as code to paste.

The largest nodes of the model that have a twin in the checkpoint become pairs. If one
rename does better, it takes the place of the pairs that it covers. Leaves that look
like none of the other side become `fresh` and `drop`. Those that look like some are
listed, and in no code: `_lookalikes`.

Leaves of the model go by their numbers in it, and saved leaves by their leaf indices.
"""

import collections
import functools as ft
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._kernel._format import _names, _text
from .._kernel._format._leaves import LeafRecord
from .._kernel._tree import _folding, _orders
from . import _alike, _find_rules, _leaf_kinds, _lookalikes, _rules_code
from ._leaf_kinds import LeafKind
from ._lookalikes import Suggestion
from ._matching import Matching
from ._sides import Model, StoredSide
from ._state_entries import StateEntries


# Pairs that are suggested, and squares that are listed: people would not read more.
_MAX_SUGGESTED, _MAX_ROWS = 8, 8
# Nodes in `fresh` and in `drop`.
_MAX_NODES = 20
# The letters of a rename: an error has twice as many at most, and cuts the rest.
_MAX_LETTERS = 2**13
# What libraries call the statistics of one layer.
_STATISTICS = (
    {"running_mean", "running_var"},
    {"moving_mean", "moving_variance"},
    {"mean", "var"},
)
# Leaves that are looked at for pairs: many nodes may be alike.
_MAX_STEPS = 2**17
# Sequences that are compared with each other.
_MAX_SEQUENCES = 64


def lines(
    matching: Matching, numbers: Sequence[int], leaf_indices: Sequence[int]
) -> list[str]:
    """Pairs for undeclared leaves that fit by names and shapes; `fresh` and `drop` for
    the rest of them."""
    model, stored = matching.model, matching.stored
    arrays = [n for n in range(len(model.names)) if model.is_array(n)]
    entries = StateEntries(matching, numbers, leaf_indices)
    twins = _Twins(model, stored, numbers, leaf_indices, entries)
    pairs, is_cut = twins.pairs(arrays)
    renamed = twins.renamed()
    if renamed is not None and _is_better(renamed, pairs, is_cut):
        pairs = [x for x in pairs if not x.numbers <= renamed.numbers] + [renamed]
        is_cut = False
    paired = {n for pair in pairs for n in pair.numbers}
    new = set(numbers) - paired - entries.numbers
    old = set(leaf_indices).difference(*(pair.leaf_indices for pair in pairs))
    old -= entries.leaf_indices
    out = [f"    {line}" for pair in pairs for line in pair.lines]
    if out:
        out.insert(0, "  Perhaps, to paste into `pairs`:")
    if is_cut and old:
        return [*out, "    # ... and more pairs"] if out else []
    lookalikes = _lookalikes.find(model, stored, new, old)
    new -= lookalikes.numbers
    old -= lookalikes.leaf_indices
    statistics = _statistics(model, stored, old)
    old -= statistics.leaf_indices
    new |= entries.fresh(new)
    old |= entries.dropped(old)
    rest = _fresh_and_drop(model, stored, new, old, arrays)
    if rest:
        rest.insert(0, f"  {'And' if out else 'Perhaps, to paste'} after them:")
    more = *statistics.lines, *lookalikes.lines, *twins.squares(paired)
    return [*out, *rest, *more]


def _statistics(model: Model, stored: StoredSide, old: set[int]) -> Suggestion:
    """Statistics that are in no pair, if the model has layers with such, and is given
    without its State: what lacks them cannot infer."""
    states = eqx.nn.State, eqx.nn.StateIndex
    nodes = jtu.tree_leaves(model.tree, is_leaf=lambda x: isinstance(x, states))
    if {type(x) for x in nodes}.intersection(states) != {eqx.nn.StateIndex}:
        return Suggestion([], set(), set())
    names = {i: _orders.unboxed(stored.saved.names[i]) for i in sorted(old)}
    all_names = {*names.values()}
    found = [
        i
        for i, name in names.items()
        if i in stored.saved.labels or _is_statistic(name, all_names)
    ]
    if not found:
        return Suggestion([], set(), set())
    more = f" and {len(found) - 1} more are" if found[1:] else " is"
    line = (
        f"  `{stored.saved.names[found[0]]}`{more} of the statistics of layers as "
        "`BatchNorm`: graft into `(model, state)`, see docs/batchnorm.md."
    )
    return Suggestion([line], set(), {*found})


def _is_statistic(name: str, names: Collection[str]) -> bool:
    """Whether this is a mean or a variance of a layer, which has both."""
    node, _, last = name.rpartition(".")
    some = [x for x in _STATISTICS if last in x]
    return any(_names.joined(node, x) in names for both in some for x in both - {last})


def _is_better(renamed: Suggestion, pairs: list[Suggestion], is_cut: bool) -> bool:
    """Whether a rename is shorter than pairs, or has leaves that they lack, or not all
    nodes were looked at for pairs (`is_cut`)."""
    covered = {n for pair in pairs for n in pair.numbers}
    is_shorter = len(pairs) > len(renamed.lines)
    return is_shorter or is_cut or not renamed.numbers <= covered


def _fresh_and_drop(
    model: Model, stored: StoredSide, new: set[int], old: set[int], arrays: list[int]
) -> list[str]:
    """Arguments that leave the new leaves as they are, and the old ones where they
    are."""
    out = []
    roots = _roots(model.below, new, arrays)
    fresh = [model.code(x) or model.entry_code(x) for x in roots]
    if fresh and None not in fresh:
        codes = [x for x in fresh if x]
        out.append(f"    fresh=lambda m: {_listed(codes)},{_more(codes)}")
    everything = range(len(stored.saved.names))
    drop = [stored.code(x) for x in _roots(stored.below, old, everything)]
    if drop:
        out.append(f"    drop=lambda c: {_listed(drop)},{_more(drop)}")
    return out


def _listed(codes: list[str]) -> str:
    return codes[0] if len(codes) == 1 else f"[{', '.join(codes[:_MAX_NODES])}]"


def _more(codes: list[str]) -> str:
    """A comment on nodes that are not listed."""
    more = len(codes) - _MAX_NODES
    return f"  # and {more} more" if more > 0 else ""


def _roots(
    below: dict[str, list[int]], chosen: Collection[int], counted: Iterable[int]
) -> list[str]:
    """The largest nodes all of whose leaves are chosen, among the leaves that count."""
    counted = set(counted)
    covered: dict[str, bool] = {"": False}  # Whether a node is one, or is in one.
    out: list[str] = []
    # From above, so that it is known of the node above.
    for name in sorted(below, key=lambda x: (x != "", x.count("."))):
        above = name.rpartition(".")[0]
        covered[name] = covered.get(above, False) or covered[""]
        if covered[name]:
            continue
        leaves = [n for n in below[name] if n in counted]
        if leaves and all(n in chosen for n in leaves):
            out.append(name)
            covered[name] = True
    return sorted(out, key=lambda x: min(below[x]))


class Twin(NamedTuple):
    """Code that picks what may stand for a node of the model, with an adapter where it
    needs one; and the indices of the saved leaves in it."""

    code: str
    leaf_indices: set[int]


class StackKey(NamedTuple):
    """Leaves that may be stacked, or nodes with such: one of each item of a `sequence`,
    with the name `inner` below the item."""

    sequence: str
    inner: str


class Stack(NamedTuple):
    """Leaves of a `StackKey`: their kind once they are stacked, and their indices."""

    kind: LeafKind
    leaf_indices: list[int]


class _Twins:
    """Leaves of the checkpoint that may stand for nodes of the model: those that stand
    for theirs by names, or that do once they are stacked."""

    def __init__(
        self,
        model: Model,
        stored: StoredSide,
        numbers: Iterable[int],
        leaf_indices: Iterable[int],
        entries: StateEntries,
    ):
        self._model, self._stored, self._entries = model, stored, entries
        # The leaves that are in no pair yet.
        self._new, self._old = new, old = set(numbers), set(leaf_indices)
        self._steps_left = _MAX_STEPS
        # Those, and saved ones, whose names say what they are.
        self._numbers = {model.names[n]: n for n in sorted(new - entries.numbers)}
        records = list(map(stored.saved.record, sorted(old - entries.leaf_indices)))
        saved = {record.name: _leaf_kinds.kind(record.whole) for record in records}
        wanted = {x: model.kind(n) for x, n in self._numbers.items()}
        self._alike = _alike.pair_leaves(saved, wanted)
        # The saved leaf that each is as it is, without an adapter.
        adapted = {*self._alike.adapters, *self._alike.squares}
        self._origins = {y: x for x, y in self._alike.names.items()}
        self._same = {y: x for y, x in self._origins.items() if y not in adapted}
        # Saved nodes by what they are called.
        self._called: dict[str, list[str]] = {}
        for node in stored.below:
            self._called.setdefault(_last(node), []).append(node)
        self._stacks = _stacks(records)
        # Of all leaves: what is in a pair tells how many items there are.
        self._saved_squares = _squares(stored.saved.names)
        self._squares = _squares(model.names)
        self._keys_of_kind: dict[LeafKind, list[StackKey]] = {}
        for key, stack in self._stacks.items():
            self._keys_of_kind.setdefault(stack.kind, []).append(key)

    def pairs(self, arrays: Sequence[int]) -> tuple[list[Suggestion], bool]:
        """Pairs of nodes of the model, the largest that have twins, with these; and
        whether there may be more, as not all nodes were looked at."""
        model, children = self._model, _children(self._model.below)
        left = collections.deque(_roots(model.below, self._new, arrays))
        pairs: list[Suggestion] = []
        while left and self._old and self._steps_left > 0:
            if len(pairs) == _MAX_SUGGESTED:
                break
            prefix = left.popleft()
            twin = self._named(prefix) or self._state(prefix)
            if twin is None and self._entries.numbers.isdisjoint(model.below[prefix]):
                twin = self._stacked(prefix) or self._unstacked(prefix)
            if twin is None:
                left.extendleft(reversed(children.get(prefix, [])))
                continue
            code = model.code(prefix)
            if code is not None:
                numbers = self._new.intersection(model.below[prefix])
                pair = [f"(lambda m: {code}, lambda c: {twin.code}),"]
                pairs.append(Suggestion(pair, numbers, twin.leaf_indices))
                self._new -= numbers
                self._old -= twin.leaf_indices
        return pairs, bool(left)

    def _spend(self, count: int) -> bool:
        """Takes so many of the steps that are left, and says whether any are."""
        self._steps_left -= count
        return self._steps_left > 0

    def _named(self, prefix: str) -> Twin | None:
        """The node that has all leaves below one of the model's, by the same names."""
        names, below = self._model.names, self._model.below[prefix]
        ends = [_names.below(names[n], prefix) for n in below]
        mine = [(names[n], x) for n, x in zip(below, ends) if names[n] in self._numbers]
        nodes = {self._node(name, end) for name, end in mine}
        node = nodes.pop() if len(nodes) == 1 else None
        if node is None:
            return None
        # Also scalars of these names, which are never paired alone.
        leaf_indices = self._stored.saved.leaf_indices
        full = [_names.joined(node, x) for x in ends]
        own = {leaf_indices[x] for x in full if x in leaf_indices}
        return Twin(self._stored.code(node), own)

    def _state(self, prefix: str) -> Twin | None:
        """The saved State that stands for one of the model."""
        state = self._entries.states.get(prefix)
        if state is None:
            return None
        return Twin(self._stored.code(state), {*self._stored.below.get(state, ())})

    def _node(self, name: str, end: str) -> str | None:
        """The saved node below which `end` is what stands for a leaf of the model."""
        origin = self._same.get(name)
        if origin is None:
            return None
        node = origin.removesuffix(end).removesuffix(".")
        return node if _names.joined(node, end) == origin else None

    def _stacked(self, prefix: str) -> Twin | None:
        """The items of a sequence whose leaves, stacked, have these names and shapes;
        none if several have that nothing tells apart."""
        model = self._model
        wanted = {
            _names.below(model.names[n], prefix): model.kind(n)
            for n in model.below[prefix]
            if n in self._new
        }
        if not wanted or not self._spend(len(wanted)):
            return None
        found = self._stacked_nodes(prefix, wanted)
        name = _only(list(found)[:_MAX_SEQUENCES], _last(prefix))
        if name is None:
            return None
        sequence, node = found[name]
        # Also scalars of these names, which are never paired alone.
        ends = [_names.below(model.names[n], prefix) for n in model.below[prefix]]
        used = (StackKey(sequence, _names.joined(node, x)) for x in ends)
        some = [self._stacks[key].leaf_indices for key in used if key in self._stacks]
        leaf_indices = set().union(*some)
        items = self._items_code(sequence, node)
        return Twin(f"{items}, ec.adapters.stack()", leaf_indices)

    def _stacked_nodes(
        self, prefix: str, wanted: dict[str, LeafKind]
    ) -> dict[str, StackKey]:
        """The nodes, one of each item of a sequence, that have all of these leaves once
        they are stacked, by their names with `*` for the item."""
        # The first leaf says which nodes may be this one.
        below, kind = next(iter(wanted.items()))
        found: dict[str, StackKey] = {}
        for sequence, inner in self._keys_of_kind.get(kind, []):
            if not self._spend(len(wanted)):
                break
            is_end = f".{inner}".endswith(f".{below}") if below else True
            both = _names.joined(prefix, below), _names.joined(sequence, "*", inner)
            # One leaf tells little: as many norms as they are wide are a square.
            may_be = _alike.may_be_same(*both, is_certain=len(wanted) == 1)
            if not is_end or not may_be:
                continue
            node = inner.removesuffix(below).rstrip(".")
            keys = [StackKey(sequence, _names.joined(node, x)) for x in wanted]
            if all(map(self._is_stack, keys, wanted.values())):
                if not self._saved_squares.isdisjoint(keys):
                    return {}
                found[_names.joined(sequence, "*", node)] = StackKey(sequence, node)
        return found

    def _is_stack(self, key: StackKey, kind: LeafKind) -> bool:
        """Whether leaves that are in no pair yet, stacked, are of this kind."""
        stack = self._stacks.get(key)
        if stack is None or stack.kind != kind:
            return False
        return self._old.issuperset(stack.leaf_indices)

    def _items_code(self, sequence: str, node: str) -> str:
        """`c.layers`, or `[x.norm for x in c.layers]` for a node of each item."""
        items = self._stored.code(sequence)
        if not node:
            return items
        part = self._stored.code(_names.joined(sequence, "0", node))
        return f"[x{part.removeprefix(f'{items}[0]')} for x in {items}]"

    def _unstacked(self, prefix: str) -> Twin | None:
        """The node whose leaves are those of all items of this sequence, stacked: one
        that is called as it is; none if several are."""
        model, names = self._model, self._model.names
        # By their names below an item, the kinds that leaves have in each.
        wanted: dict[str, list[LeafKind]] = {}
        ends: set[str] = set()
        for n in model.below[prefix]:
            item, _, inner = _names.below(names[n], prefix).partition(".")
            ends.add(inner)
            if n in self._new and prefix and _names.number_of(item) is not None:
                wanted.setdefault(inner, []).append(model.kind(n))
        if not wanted or any(StackKey(prefix, x) in self._squares for x in wanted):
            return None
        found: dict[str, set[int]] = {}
        for node in self._called.get(_last(prefix), []):
            if not self._spend(len(wanted)):
                break
            some = wanted.items()
            stacks = [self._stack_of(_names.joined(node, x), y) for x, y in some]
            leaf_indices = {i for i in stacks if i is not None}
            if len(leaf_indices) == len(wanted):
                found[node] = leaf_indices
        node = _only(list(found), _last(prefix))
        if node is None:
            return None
        code = f"{self._stored.code(node)}, ec.adapters.unstack()"
        # Also scalars of these names, which are never paired alone.
        saved = self._stored.saved.leaf_indices
        full = [_names.joined(node, x) for x in ends]
        return Twin(code, found[node].union(saved[x] for x in full if x in saved))

    def _stack_of(self, name: str, kinds: list[LeafKind]) -> int | None:
        """The saved leaf of this name, if it is in no pair yet, and of the kind of
        leaves of these kinds once they are stacked."""
        saved = self._stored.saved
        leaf_index = saved.leaf_indices.get(name)
        if leaf_index is None or leaf_index not in self._old:
            return None
        stacked = {_stacked_kind(x, len(kinds)) for x in kinds}
        return leaf_index if stacked == {self._stored.kind(leaf_index)} else None

    def renamed(self) -> Suggestion | None:
        """One pair of all leaves that stand for each other by names, with the rules of
        a rename. None if an error would not show all of it."""
        found, model, stored = self._alike.names, self._model, self._stored
        if not found:
            return None
        old, new = _names.common_node(found), _names.common_node(self._origins)
        moves = {_names.below(x, old): _names.below(y, new) for x, y in found.items()}
        some = self._entries.leaf_indices.intersection(stored.below[old])
        entries = [_names.below(stored.saved.names[i], old) for i in sorted(some)]
        moves |= dict(zip(entries, entries))
        saved = [_names.below(stored.saved.names[i], old) for i in stored.below[old]]
        wanted = [_names.below(model.names[n], new) for n in model.below[new]]
        rules = _find_rules.find_rules(moves, saved, wanted)
        code = model.code(new)
        if code is None or not rules:
            return None
        adapters = {_names.below(x, new): y for x, y in self._alike.adapters.items()}
        # The last line ends the call of `rename`; here that is the end of a pair too.
        first, *rows, _ = _rules_code.code_lines(rules, adapters, moves.values())
        first = f"(lambda m: {code}, lambda c: {stored.code(old)}, {first}"
        lines = [first, *rows, "])),"]
        if _text.some(lines, _MAX_LETTERS) != lines:
            return None
        numbers = {self._numbers[x] for x in self._origins}
        if some:
            numbers |= self._entries.numbers.intersection(model.below[new])
        # Also scalars of these names, which are never paired alone.
        new_names = [ft.reduce(lambda x, rule: rule.apply(x), rules, x) for x in saved]
        ours = {*wanted}
        used = {i for i, x in zip(stored.below[old], new_names) if x in ours}
        leaf_indices = used.union(stored.saved.leaf_indices[x] for x in found)
        return Suggestion(lines, numbers, leaf_indices)

    def squares(self, used: set[int]) -> list[str]:
        """Lines about square leaves in pairs, which may be transposed."""
        some = [x for x in self._alike.squares if self._numbers[x] in used]
        if not some:
            return []
        head = "  Squares in these pairs, which nobody knows to be transposed or not:"
        return [head, *(f"    {x}" for x in _folding.fold(some)[:_MAX_ROWS])]


def _stacks(records: Iterable[LeafRecord]) -> dict[StackKey, Stack]:
    """The leaves that may be stacked: all items have one, and all are of one kind."""
    groups: dict[StackKey, dict[int, LeafRecord]] = {}
    for record in records:
        # A place in a sequence, or in a node without keys.
        are_items = [letter in "sf" for letter in record.template.keys]
        for key, number in _items(record.name, are_items):
            groups.setdefault(key, {})[number] = record
    out: dict[StackKey, Stack] = {}
    for key, items in groups.items():
        kinds = {_leaf_kinds.kind(record.whole) for record in items.values()}
        if len(kinds) == 1 and set(items) == set(range(len(items))):
            leaf_indices = [record.leaf_index for record in items.values()]
            out[key] = Stack(_stacked_kind(kinds.pop(), len(items)), leaf_indices)
    return out


def _items(name: str, are_items: Sequence[bool]) -> Iterator[tuple[StackKey, int]]:
    """Where a leaf is in items of sequences, and the numbers of these. `are_items`:
    for each part of its name, whether it is such a number."""
    parts = name.split(".")
    for i, is_item in enumerate(are_items):
        if is_item:
            key = StackKey(".".join(parts[:i]), ".".join(parts[i + 1 :]))
            yield key, int(parts[i])


def _squares(names: Iterable[str]) -> set[StackKey]:
    """Leaves of items in as many sequences as these have items: either may be stacked,
    the items or the sequences."""
    items: collections.Counter[StackKey] = collections.Counter()
    for name in names:
        are_numbers = [_names.number_of(x) is not None for x in name.split(".")]
        items.update(key for key, _ in _items(name, are_numbers))
    names_left = {x: (_names.joined(*x), count) for x, count in items.items()}
    counts = collections.Counter(names_left.values())
    return {x for x, left in names_left.items() if counts[left] > 1 and left[1] > 1}


def _stacked_kind(kind: LeafKind, count: int) -> LeafKind:
    return kind._replace(shape=(count, *kind.shape))


def _children(below: dict[str, list[int]]) -> dict[str, list[str]]:
    """By the name of each node, those of the nodes right below it."""
    out: dict[str, list[str]] = {}
    for name in below:
        if name:
            out.setdefault(name.rpartition(".")[0], []).append(name)
    return out


def _only(names: list[str], last: str) -> str | None:
    """The one of these names that is left without copies of others, as moments are; of
    several, the one that ends with `last`. None if that does not leave one."""
    # A copy ends with all of another name but its first part.
    tails = {x: "." + (x.partition(".")[2] or x) for x in names}
    is_copy = lambda x: any(x != y and x.endswith(tails[y]) for y in names)
    left = [x for x in names if not is_copy(x)]
    if len(left) > 1:
        left = [x for x in left if _last(x) == last]
    return left[0] if len(left) == 1 else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]
