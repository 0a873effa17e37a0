"""A guess at what a graft meant, as code to paste."""

import collections
import itertools as it
import keyword
import os
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax.tree_util as jtu

from .._kernel._format import _names, _template
from .._kernel._format._leaves import LeafRecord
from .._kernel._tree import _folding, _leaf, _nearest, _target
from . import _alike, _leaf_kinds, _rules
from ._sides import Model, StoredSide, target_of


# Suggestions are for people, who would not read more of them.
_most = 8
# Leaves that are looked at for them: many nodes may be alike.
_MAX_STEPS = 2**17
# Sequences that are compared with each other.
_MOST_ALIKE = 64
# Rows that are listed, and names in each; what is looked at for them; and how many
# pairs of shapes are.
_ROWS, _NAMES, _MOST = 8, 3, 64
_MAX_PAIRS = 2**17


class Twin(NamedTuple):
    """Code that picks what may stand for a node of the model, with an adapter; and the
    indices of the saved leaves in it."""

    code: str
    leaf_indices: set[int]


class Pair(NamedTuple):
    """Pairs to suggest: their lines, and their leaves on both sides."""

    lines: list[str]
    numbers: set[int]
    leaf_indices: set[int]


def lines(
    model: Model,
    stored: StoredSide,
    numbers: Sequence[int],
    leaf_indices: Sequence[int],
) -> list[str]:
    """Pairs for undeclared leaves that fit by names and shapes; `fresh` and `drop` for
    the rest of them."""
    new, old = set(numbers), set(leaf_indices)
    arrays = [n for n in range(len(model.names)) if model.is_array(n)]
    twins = _Twins(model, stored, new, old)
    children = _children(model.below)
    stack = collections.deque(_roots(model.below, new, arrays))
    pairs: list[Pair] = []
    while stack and len(pairs) < _most and old and twins.left > 0:
        prefix = stack.popleft()
        twin = twins.twin(prefix)
        if twin is None:
            stack.extendleft(reversed(children.get(prefix, [])))
            continue
        a = _code(model, prefix)
        if a is not None:
            mine = new.intersection(model.below[prefix])
            code = [f"(lambda m: {a}, lambda c: {twin.code}),"]
            pairs.append(Pair(code, mine, twin.leaf_indices))
            new -= mine
            old -= twin.leaf_indices
    renamed = twins.renamed()
    covered = {n for pair in pairs for n in pair.numbers}
    if renamed is not None and (
        len(pairs) > len(renamed.lines) or stack or not renamed.numbers <= covered
    ):
        pairs = [x for x in pairs if not x.numbers <= renamed.numbers] + [renamed]
        new, old = set(numbers), set(leaf_indices)
        for pair in pairs:
            new -= pair.numbers
            old -= pair.leaf_indices
        stack.clear()
    out = [f"    {line}" for pair in pairs for line in pair.lines]
    if out:
        out.insert(0, "  Perhaps, to paste into `pairs`:")
    if stack and old:
        return [*out, "    ... and more pairs"] if out else []
    alike = _alike_by_shape(model, stored, new, old)
    new -= alike.numbers
    old -= alike.leaf_indices
    listed = [*alike.lines, *twins.squares(set(numbers) - new - alike.numbers)]
    rest = []
    roots = _roots(model.below, new, arrays)
    fresh = [_code(model, x) or _entry_code(model, x) for x in roots]
    if fresh and None not in fresh:
        rest.append(f"    fresh=lambda m: {_listed([x for x in fresh if x])},")
    everything = range(len(stored.saved.names))
    drop = [_saved_code(stored, x) for x in _roots(stored.below, old, everything)]
    if drop:
        rest.append(f"    drop=lambda c: {_listed(drop)},")
    if rest:
        rest.insert(0, f"  {'And' if out else 'Perhaps, to paste'} after them:")
    return [*out, *rest, *listed]


class _Twins:
    """Leaves of the checkpoint that may stand for nodes of the model: those that stand
    for theirs by names, or that do once they are stacked."""

    def __init__(self, model: Model, stored: StoredSide, new: set[int], old: set[int]):
        self.left = _MAX_STEPS
        self._model, self._stored = model, stored
        self._new, self._old = new, old
        self._numbers = {model.names[n]: n for n in sorted(new)}
        records = list(map(stored.saved.record, sorted(old)))
        saved = {record.name: _leaf_kinds.kind(record.whole) for record in records}
        wanted = {
            x: _leaf_kinds.kind(target_of(model, n)) for x, n in self._numbers.items()
        }
        self._alike = _alike.alike(saved, wanted)
        self._origins = {y: x for x, y in self._alike.names.items()}
        groups: dict[tuple[str, str], dict[int, LeafRecord]] = {}
        for record in records:
            parts = record.name.split(".")
            for i, kind in enumerate(record.template.keys):
                if kind in "sf":
                    key = ".".join(parts[:i]), ".".join(parts[i + 1 :])
                    groups.setdefault(key, {})[int(parts[i])] = record
        # By the name of a sequence, and the name of leaves below each of its items: the
        # shape of the stack, and their indices. And those names by the shape.
        self._stacks: dict[tuple[str, str], tuple[tuple[int, ...], list[int]]] = {}
        self._of_shape: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for key, items in groups.items():
            shapes = {record.template.logical_shape for record in items.values()}
            if len(shapes) == 1 and set(items) == set(range(len(items))):
                shape = (len(items), *shapes.pop())
                self._stacks[key] = (
                    shape,
                    [record.leaf_index for record in items.values()],
                )
                self._of_shape.setdefault(shape, []).append(key)

    def twin(self, prefix: str) -> Twin | None:
        return self._named(prefix) or self._stacked(prefix)

    def _named(self, prefix: str) -> Twin | None:
        """The node that has all leaves below one of the model's, by the same names."""
        names, below = self._model.names, self._model.below[prefix]
        ends = [_names.below(names[n], prefix) for n in below]
        mine = [(names[n], x) for n, x in zip(below, ends) if names[n] in self._numbers]
        nodes = {self._node(name, end) for name, end in mine}
        node = nodes.pop() if len(nodes) == 1 else None
        if node is None:
            return None
        # Scalars are in no pair by themselves, and in this one.
        leaf_indices = self._stored.saved.leaf_indices
        full = [_names.joined(node, x) for x in ends]
        own = {leaf_indices[x] for x in full if x in leaf_indices}
        return Twin(_saved_code(self._stored, node), own)

    def _node(self, name: str, end: str) -> str | None:
        origin = self._origins.get(name, "")
        if not origin or name in {*self._alike.adapters, *self._alike.squares}:
            return None
        node = origin.removesuffix(end).removesuffix(".")
        return node if _names.joined(node, end) == origin else None

    def squares(self, used: set[int]) -> list[str]:
        """Lines about square leaves in pairs, which may be transposed."""
        some = [x for x in self._alike.squares if self._numbers[x] in used]
        if not some:
            return []
        head = "  Squares in these pairs, which nobody knows to be transposed or not:"
        return [head, *(f"    {x}" for x in _folding.fold(some)[:_ROWS])]

    def renamed(self) -> Pair | None:
        """One pair of all of them, with the rules of a rename."""
        found, model, stored = self._alike.names, self._model, self._stored
        if not found:
            return None
        a, b = (_common_node(x) for x in (found, self._origins))
        names = {_names.below(x, a): _names.below(y, b) for x, y in found.items()}
        here, there = (
            [_names.below(names[n], node) for n in below[node]]
            for names, below, node in (
                (model.names, model.below, b),
                (stored.saved.names, stored.below, a),
            )
        )
        rules = _rules.rules(names, there, here)
        code = _code(model, b)
        if code is None or not rules:
            return None
        adapters = {_names.below(x, b): y for x, y in self._alike.adapters.items()}
        first, *rows, _ = _rules.lines(rules, adapters)
        first = f"(lambda m: {code}, lambda c: {_saved_code(stored, a)}, {first}"
        numbers = {self._numbers[x] for x in self._origins}
        leaf_indices = {stored.saved.leaf_indices[x] for x in found}
        return Pair([first, *rows, "])),"], numbers, leaf_indices)

    def _stacked(self, prefix: str) -> Twin | None:
        """The items of a sequence whose leaves, stacked, have these names and shapes;
        none if several have that nothing tells apart."""
        names, leaves = self._model.names, self._model.flat.leaves
        numbers = [n for n in self._model.below[prefix] if n in self._new]
        self.left -= len(numbers)
        wanted = {
            _names.below(names[n], prefix): _target.target_of(leaves[n]).shape
            for n in numbers
        }
        found: dict[str, tuple[str, str]] = {}
        for below, shape in list(wanted.items())[:1]:
            for above, rest in self._of_shape.get(shape, []):
                self.left -= len(wanted)
                ends = f".{rest}".endswith(f".{below}") if below else True
                full = [_names.joined(prefix, below), _names.joined(above, "*", rest)]
                if self.left <= 0 or not ends or not _alike.may_be(*full):
                    continue
                inner = rest.removesuffix(below).rstrip(".") if below else rest
                keys = {(above, _names.joined(inner, x)): y for x, y in wanted.items()}
                if all(self._is_stack(key, y) for key, y in keys.items()):
                    found[_names.joined(above, "*", inner)] = above, inner
        name = _only(list(found)[:_MOST_ALIKE], _last(prefix))
        if name is None:
            return None
        above, inner = found[name]
        items = _saved_code(self._stored, above)
        if inner:
            first = _saved_code(self._stored, _names.joined(above, "0"))
            part = _saved_code(self._stored, _names.joined(above, "0", inner))
            items = f"[x{part[len(first) :]} for x in {items}]"
        used = (self._stacks[above, _names.joined(inner, x)] for x in wanted)
        leaf_indices = set().union(*(x for _, x in used))
        return Twin(f"{items}, ec.adapters.stack()", leaf_indices)

    def _is_stack(self, key: tuple[str, str], shape: tuple[int, ...]) -> bool:
        """Whether leaves that are in no pair yet, stacked, have this shape."""
        there, leaf_indices = self._stacks.get(key, (None, []))
        return there == shape and self._old.issuperset(leaf_indices)


def _common_node(names: Iterable[str]) -> str:
    """The node that all leaves are in."""
    return ".".join(os.path.commonprefix([x.split(".")[:-1] for x in names]))


def _listed(codes: list[str]) -> str:
    shown = ", ".join(codes[:20]) + (", ..." if len(codes) > 20 else "")
    return shown if len(codes) == 1 else f"[{shown}]"


def _roots(
    below: dict[str, list[int]], chosen: Collection[int], counted: Iterable[int]
) -> list[str]:
    """The largest nodes all of whose leaves are chosen, among the leaves that count."""
    counted = set(counted)
    found: dict[str, bool] = {}  # Of each node, whether it is in one of them.
    out: list[str] = []
    for name in sorted(below, key=lambda x: (x != "", x.count("."))):
        above = name.rpartition(".")[0]
        found[name] = name != "" and (found.get(above, False) or found[""])
        if not found[name]:
            leaves = [n for n in below[name] if n in counted]
            if leaves and all(n in chosen for n in leaves):
                out.append(name)
                found[name] = True
    return sorted(out, key=lambda x: min(below[x]))


def _children(below: dict[str, list[int]]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name in below:
        if name:
            out.setdefault(name.rpartition(".")[0], []).append(name)
    return out


def _only(names: list[str], last: str) -> str | None:
    """The one of these names, but for copies of one, as moments are; or the one of them
    that ends like that in the model."""
    tails = {x: "." + (x.partition(".")[2] or x) for x in names}
    some = [x for x in names if not any(x != y and x.endswith(tails[y]) for y in names)]
    some = some if len(some) == 1 else [x for x in some if _last(x) == last]
    return some[0] if len(some) == 1 else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


# Those of which `keystr` makes what Python takes.
_KEYS = jtu.GetAttrKey, jtu.SequenceKey, jtu.DictKey


def _code(model: Model, prefix: str) -> str | None:
    """`m.layers[0]`, or None where no expression leads to the node."""
    path = model.flat.paths[model.below[prefix][0]]
    path = path[: prefix.count(".") + 1 if prefix else 0]
    is_code = all(isinstance(key, _KEYS) for key in path)
    return f"m{jtu.keystr(path)}" if is_code else None


def _entry_code(model: Model, prefix: str) -> str | None:
    """`m.state.get(m.norm.ema_state_index)`, of an entry of a State."""
    entry = model.entries.get(model.below[prefix][0])
    if entry is None or prefix != _names.joined(entry.state, str(entry.position)):
        return None
    for name in sorted(entry.label.names)[:1]:
        module, _, field = name.rpartition(".")
        state = _code(model, entry.state)
        owner = _code(model, module) if module in model.below else None
        return f"{state}.get({owner}.{field})" if state and owner else None
    return None


def _saved_code(stored: StoredSide, prefix: str) -> str:
    record = stored.saved.record(stored.below[prefix][0])
    keys = _names.keys_of(record.name, record.template.keys)
    out = "c"
    for kind, key in keys[: prefix.count(".") + 1 if prefix else 0]:
        name = str(key)
        if kind in "sfi":
            out += f"[{key}]"
        elif name.isidentifier() and not keyword.iskeyword(name) and name != "keys":
            out += f".{name}"
        else:
            out += f"[{name!r}]"
    return out


# ---- Leaves of both sides that are in no pair, and could stand for each other. To take
# them for new ones and old ones would be to throw away weights that fit.


def _alike_by_shape(
    model: Model, stored: StoredSide, new: set[int], old: set[int]
) -> Pair:
    """Leaves of both sides that could stand for each other: of the same shape, or of
    one that an adapter makes of the other."""
    copies = _copies(stored, old)
    theirs: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for leaf_index in sorted(old - copies):
        t = stored.saved.record(leaf_index, known=True).template
        if t.logical_shape and t.kind not in ("key", "str", "bytes"):
            key = t.logical_shape, _template.number_type(_template.dtype_of(t.dtype))
            theirs.setdefault(key, []).append(leaf_index)
    ours: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for number in sorted(new):
        target = target_of(model, number)
        if target.shape and target.dtype is not None:
            key = target.shape, _template.number_type(target.dtype)
            ours.setdefault(key, []).append(number)
    some_new: set[int] = set()
    some_old: set[int] = set()
    rows = []
    kinds = {model.names[n]: _leaf_kinds.kind(target_of(model, n)) for n in sorted(new)}
    everything = map(stored.saved.record, range(len(stored.saved.names)))
    saved = {x.name: _leaf_kinds.kind(x.whole) for x in everything}
    for name, origin in _alike.tied(saved, kinds).items():
        leaf_index = stored.saved.leaf_indices[origin]
        if leaf_index not in old:
            (number,) = (n for n in new if model.names[n] == name)
            is_same = saved[origin].shape == kinds[name].shape
            how = [] if is_same else ["transpose()"]
            some_new.add(number)
            rows.append((number, [leaf_index], how))
    both = it.islice(it.product(ours.items(), theirs.items()), _MAX_PAIRS)
    for ((shape, kind), numbers), ((other, saved_kind), leaf_indices) in both:
        how = None
        if kind == saved_kind:
            how = _how(other, len(leaf_indices), shape, len(numbers))
        if how is not None:
            some_new.update(numbers)
            some_old.update(leaf_indices)
            rows += [(n, leaf_indices, how) for n in numbers]
    return Pair(_lines(model, stored, rows), some_new, some_old)


def _copies(stored: StoredSide, old: set[int]) -> set[int]:
    """Leaves with the name of one that is in use, after a beginning of their own. It
    says that they are the state of an optimiser, or an average."""
    names = stored.saved.names
    shape = lambda x: stored.saved.record(x, known=True).template.logical_shape
    used = {(name, shape(x)) for x, name in enumerate(names) if x not in old}
    tops = {name.partition(".")[0] for name, _ in used}
    # All of it may be in one node, whose copy is called otherwise.
    if len(tops) == 1:
        used |= {(name.partition(".")[2], x) for name, x in used}
    out = set()
    for leaf_index in old:
        parts = names[leaf_index].split(".")
        tails = (
            ".".join(parts[i:])
            for i in range(1, len(parts))
            if _alike.is_copy(".".join(parts[:i]))
        )
        if any((tail, shape(leaf_index)) in used for tail in tails):
            out.add(leaf_index)
    return out


def _how(
    saved: Sequence[int], count: int, wanted: Sequence[int], here: int
) -> list[str] | None:
    """The adapters that make a leaf of the one shape of those of the other, of which
    there are so many; None if nothing does."""
    if saved == wanted:
        return []
    if sorted(x for x in saved if x != 1) == sorted(x for x in wanted if x != 1):
        return [_leaf_kinds.turn(tuple(saved), tuple(wanted))]
    if len(wanted) - len(saved) == 1 and 1 < wanted[0] <= count:
        rest = _how(saved, count // wanted[0], wanted[1:], 0)
        return None if rest is None else [*rest, "stack()"]
    if len(saved) - len(wanted) == 1 and 1 < saved[0] <= here:
        rest = _how(saved[1:], 0, wanted, here // saved[0])
        return None if rest is None else ["unstack()", *rest]
    differ = [i for i, (a, b) in enumerate(zip(saved, wanted)) if a != b]
    if len(saved) == len(wanted) and len(differ) == 1 and 0 not in (*saved, *wanted):
        (axis,) = differ
        small, large = sorted((saved[axis], wanted[axis]))
        name, many = ("split", here) if saved[axis] == large else ("concatenate", count)
        if large % small == 0 and large // small <= many:
            return [f"{name}({axis or ''})"]
    return None


def _lines(
    model: Model, stored: StoredSide, rows: Iterable[tuple[int, list[int], list[str]]]
) -> list[str]:
    texts = []
    for number, leaf_indices, how in rows:
        name = model.names[number]
        saved = _folding.fold(stored.saved.names[p] for p in leaf_indices[:_MOST])
        near = sorted(saved, key=lambda x: -_nearest.ratio(name, x))[:_NAMES]
        more = ", ..." if len(saved) > _NAMES else ""
        shown = ", ".join(f"`{x}`" for x in near) + more
        template = stored.saved.record(leaf_indices[0], known=True).template
        target = target_of(model, number)
        by = f" by `{', '.join(how)}`" if how else ""
        if len(target.shape) == 2 and len({*target.shape}) == 1:
            by += ", transposed or not"
        what = f"{_target.show_target(target)}, of {_leaf.show(template)}"
        texts.append((name, f"{what}{by}: {shown}"))
        if len(texts) == _MOST:
            break
    lines = [f"    {name}  {text}" for name, text in _folding.fold_rows(texts)]
    if not lines:
        return []
    return [
        "  In no code to paste, as these would fit. Write pairs of those that are the "
        "same weights, and put the others into `fresh` and `drop`:",
        *lines[:_ROWS],
        *(["    ... and more"] if len(lines) > _ROWS else []),
    ]
