"""A guess at what a graft meant, as code to paste."""

import collections
import itertools as it
import keyword
from collections.abc import Collection, Iterable, Sequence

import jax.tree_util as jtu

from .._format import _names, _template
from .._tree import _folding, _leaf, _nearest, _target
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

Shape = tuple[int, ...]
# Code that picks what may stand for a node of the model, with an adapter; and the
# places of the leaves that the pair would use.
Twin = tuple[str, set[int]]


def lines(
    model: Model, stored: StoredSide, numbers: list[int], places: list[int]
) -> list[str]:
    """Pairs for undeclared leaves that fit by names and shapes; `fresh` and `drop` for
    the rest of them."""
    new, old = set(numbers), set(places)
    arrays = [n for n in range(len(model.names)) if model.is_array(n)]
    out = []
    twins = _Twins(model, stored, new, old)
    children = _children(model.below)
    stack = collections.deque(_roots(model.below, new, arrays))
    while stack and len(out) < _most and old and twins.left > 0:
        prefix = stack.popleft()
        twin = twins.of(prefix) or twins.stacked(prefix)
        if twin is None:
            stack.extendleft(reversed(children.get(prefix, [])))
            continue
        a = _code(model, prefix)
        if a is not None:
            out.append(f"    pairs: (lambda m: {a}, lambda c: {twin[0]}),")
            new -= set(model.below[prefix])
            old -= twin[1]
    if stack and old:
        more = [*out, "    ... and more pairs"] if out else []
        return ["  Perhaps, to paste:", *more] if more else []
    some_new, some_old, listed = _alike(model, stored, new, old)
    new -= some_new
    old -= some_old
    roots = _roots(model.below, new, arrays)
    fresh = [_code(model, x) or _entry_code(model, x) for x in roots]
    if fresh and None not in fresh:
        out.append(f"    fresh=lambda m: {_listed([x for x in fresh if x])},")
    everything = range(len(stored.saved.names))
    drop = [_saved_code(stored, x) for x in _roots(stored.below, old, everything)]
    if drop:
        out.append(f"    drop=lambda c: {_listed(drop)},")
    return [*(["  Perhaps, to paste:", *out] if out else []), *listed]


def _listed(codes: list[str]) -> str:
    shown = ", ".join(codes[:20]) + (", ..." if len(codes) > 20 else "")
    return shown if len(codes) == 1 else f"[{shown}]"


def _roots(
    below: dict[str, list[int]], chosen: Collection[int], counted: Iterable[int]
) -> list[str]:
    """The largest nodes all of whose leaves, of those that count, are chosen."""
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


class _Twins:
    """The nodes of the checkpoint that may stand for nodes of the model."""

    def __init__(self, model: Model, stored: StoredSide, new: set[int], old: set[int]):
        self.left = _MAX_STEPS
        self._model, self._stored = model, stored
        self._new, self._old = new, old
        # The leaves by the last part of their name and their shape, and by shape alone.
        self._places: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        for place in sorted(old):
            name, shape = stored.saved.names[place], self._saved_shape(place)
            self._places.setdefault((_last(name), shape), []).append(place)
            self._places.setdefault((None, shape), []).append(place)
        self._named: dict[tuple[int, ...], _nearest.NameIndex] = {}
        self._find_stacks()

    def _find_stacks(self) -> None:
        """Finds leaves that could be stacked, by the name of a sequence and their name
        below each of its items: the shape of the stack, the places, and the names by
        that shape."""
        saved = self._stored.saved
        groups: dict[tuple[str, str], dict[int, int]] = {}
        for place in sorted(self._old):
            record = saved.record(place)
            parts = record.name.split(".")
            for i, kind in enumerate(record.template.keys):
                if kind in "sf":
                    key = ".".join(parts[:i]), ".".join(parts[i + 1 :])
                    groups.setdefault(key, {})[int(parts[i])] = place
        self._stack_shapes: dict[tuple[str, str], Shape] = {}
        self._stack_places: dict[tuple[str, str], list[int]] = {}
        self._stacks_of_shape: dict[Shape, list[tuple[str, str]]] = {}
        for key, places in groups.items():
            shapes = set(map(self._saved_shape, places.values()))
            if len(shapes) == 1 and set(places) == set(range(len(places))):
                shape = (len(places), *shapes.pop())
                self._stack_shapes[key] = shape
                self._stack_places[key] = list(places.values())
                self._stacks_of_shape.setdefault(shape, []).append(key)

    def _saved_shape(self, place: int) -> tuple[int, ...]:
        return self._stored.saved.record(place, known=True).template.logical_shape

    def _wanted(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the leaves below a node of the model."""
        names, leaves = self._model.names, self._model.flat.leaves
        numbers = [n for n in self._model.below[prefix] if n in self._new]
        self.left -= len(numbers)
        return {
            _names.below(names[n], prefix): _target.target_of(leaves[n]).shape
            for n in numbers
        }

    def of(self, prefix: str) -> Twin | None:
        """The node with leaves of the same names and shapes. If there are several, that
        with the fewest others, then the highest, the most alike by name."""
        names, here = self._model.names, self._model.below[prefix]
        wanted = self._wanted(prefix)
        # Scalars are in no pair by themselves, but tell a model from its moments.
        mine = {_names.below(names[n], prefix) for n in here}
        best: tuple[tuple, str, set[int]] | None = None
        for candidate in self._candidates(prefix, wanted):
            if self.left <= 0:
                break
            if not self._fits(candidate, wanted):
                continue
            below = self._stored.below[candidate]
            self.left -= len(below)
            theirs = {
                _names.below(self._stored.saved.names[p], candidate): p for p in below
            }
            alike = _nearest.ratio(prefix, candidate)
            rank = (-len(mine ^ theirs.keys()), -candidate.count("."), alike)
            if best is None or rank > best[0]:
                both = {p for below, p in theirs.items() if below in mine}
                best = (rank, candidate, both)
        if best is None:
            return None
        return _saved_code(self._stored, best[1]), best[2]

    def stacked(self, prefix: str) -> Twin | None:
        """The items of a sequence whose leaves, stacked, have these names and shapes;
        none if several have that nothing tells apart."""
        wanted = self._wanted(prefix)
        found: dict[str, tuple[str, str]] = {}
        for below, shape in list(wanted.items())[:1]:
            for above, rest in self._stacks_of_shape.get(shape, []):
                self.left -= len(wanted)
                ends = f".{rest}".endswith(f".{below}") if below else True
                if self.left <= 0 or not ends:
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
        used = (self._stack_places[above, _names.joined(inner, x)] for x in wanted)
        return f"{items}, ec.adapters.stack()", set().union(*used)

    def _is_stack(self, key: tuple[str, str], shape: tuple[int, ...]) -> bool:
        """Whether leaves that are in no pair yet, stacked, have this shape."""
        is_of_shape = self._stack_shapes.get(key) == shape
        return is_of_shape and self._old.issuperset(self._stack_places[key])

    def _candidates(
        self, prefix: str, wanted: dict[str, tuple[int, ...]]
    ) -> Iterable[str]:
        saved = self._stored.saved
        if not wanted:
            return []
        if "" in wanted:
            # A leaf has only its shape for it, and needs a name that is like its own.
            shape = wanted[""]
            if shape not in self._named:
                places = self._places.get((None, shape), [])
                self._named[shape] = _nearest.NameIndex(saved.names[p] for p in places)
            return self._named[shape].nearest(prefix, most=8)
        # Those that have the rarest of the leaves.
        keys = {below: (_last(below), shape) for below, shape in wanted.items()}
        rarest = min(wanted, key=lambda x: len(self._places.get(keys[x], ())))
        names = [saved.names[p] for p in self._places.get(keys[rarest], [])]
        ends = "." + rarest
        return [x[: -len(ends)] for x in names if x.endswith(ends)] + [
            "" for x in names if x == rarest
        ]

    def _fits(self, candidate: str, wanted: dict[str, tuple[int, ...]]) -> bool:
        for below, shape in wanted.items():
            self.left -= 1
            full = _names.joined(candidate, below)
            place = self._stored.saved.places.get(full)
            if place is None or place not in self._old:
                return False
            if shape != self._saved_shape(place):
                return False
        return True


def _only(names: list[str], last: str) -> str | None:
    """The one of these names, but for copies of one, as moments are; or the one of them
    that ends like that in the model."""
    tails = {x: "." + (x.partition(".")[2] or x) for x in names}
    some = [x for x in names if not any(x != y and x.endswith(tails[y]) for y in names)]
    some = some if len(some) == 1 else [x for x in some if _last(x) == last]
    return some[0] if len(some) == 1 else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _code(model: Model, prefix: str) -> str | None:
    """`m.layers[0]`, or None where no expression leads to the node."""
    path = model.flat.paths[model.below[prefix][0]]
    out = "m"
    for key in path[: prefix.count(".") + 1 if prefix else 0]:
        if isinstance(key, jtu.GetAttrKey):
            out += f".{key.name}"
        elif isinstance(key, jtu.SequenceKey):
            out += f"[{key.idx}]"
        elif isinstance(key, jtu.DictKey):
            out += f"[{key.key!r}]"
        else:
            return None
    return out


def _entry_code(model: Model, prefix: str) -> str | None:
    """`m.state.get(m.norm.ema_state_index)`, of an entry of a State."""
    entry = model.entries.get(model.below[prefix][0])
    if entry is None or prefix.rpartition(".")[::2] != (
        entry.state,
        f"{entry.position}",
    ):
        return None
    for name in model.index_names.get(str(entry.label), [])[:1]:
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


def _alike(
    model: Model, stored: StoredSide, new: set[int], old: set[int]
) -> tuple[set[int], set[int], list[str]]:
    """Leaves of both sides that could stand for each other: of the same shape, or of
    one that an adapter makes of the other; and the lines that list them."""
    copies = _copies(stored, old)
    theirs: dict[tuple[Shape, str], list[int]] = {}
    for place in sorted(old - copies):
        t = stored.saved.record(place, known=True).template
        if t.logical_shape and t.kind not in ("key", "str", "bytes"):
            key = t.logical_shape, _template.number_type(_template.dtype_of(t.dtype))
            theirs.setdefault(key, []).append(place)
    ours: dict[tuple[Shape, str], list[int]] = {}
    for number in sorted(new):
        target = target_of(model, number)
        if target.shape and target.dtype is not None:
            key = target.shape, _template.number_type(target.dtype)
            ours.setdefault(key, []).append(number)
    some_new: set[int] = set()
    some_old: set[int] = set()
    rows = []
    both = it.islice(it.product(ours.items(), theirs.items()), _MAX_PAIRS)
    for ((shape, kind), numbers), ((other, saved_kind), places) in both:
        how = None
        if kind == saved_kind:
            how = _how(other, len(places), shape, len(numbers))
        if how is not None:
            some_new.update(numbers)
            some_old.update(places)
            rows += [(n, places, how) for n in numbers]
    return some_new, some_old, _lines(model, stored, rows)


def _copies(stored: StoredSide, old: set[int]) -> set[int]:
    """Leaves that are called as one that is in use, but for the beginning: what an
    optimiser keeps of it, or an average."""
    names = stored.saved.names
    shape = lambda x: stored.saved.record(x, known=True).template.logical_shape
    used = {(name, shape(x)) for x, name in enumerate(names) if x not in old}
    tops = {name.partition(".")[0] for name, _ in used}
    if (
        len(tops) == 1
    ):  # All of it is in one node, and its copy may be called otherwise.
        used |= {(name.partition(".")[2], x) for name, x in used}
    out = set()
    for place in old:
        parts = names[place].split(".")
        tails = (".".join(parts[i:]) for i in range(1, len(parts)))
        if any((tail, shape(place)) in used for tail in tails):
            out.add(place)
    return out


def _how(
    saved: Sequence[int], count: int, wanted: Sequence[int], here: int
) -> list[str] | None:
    """The adapters that make a leaf of the one shape of those of the other, of which
    there are so many; None if nothing does."""
    if saved == wanted:
        return []
    if len(saved) > 1 and saved == wanted[::-1]:
        return ["transpose()"]
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


def _is_square(shape: Shape) -> bool:
    return len(shape) == 2 and shape[0] == shape[1]


def _lines(
    model: Model, stored: StoredSide, rows: Iterable[tuple[int, list[int], list[str]]]
) -> list[str]:
    texts = []
    for number, places, how in rows:
        name = model.names[number]
        saved = _folding.fold(stored.saved.names[p] for p in places[:_MOST])
        near = sorted(saved, key=lambda x: -_nearest.ratio(name, x))[:_NAMES]
        more = ", ..." if len(saved) > _NAMES else ""
        shown = ", ".join(f"`{x}`" for x in near) + more
        template = stored.saved.record(places[0], known=True).template
        target = _target.show_target(target_of(model, number))
        by = f" by `{', '.join(how)}`" if how else ""
        if _is_square(target_of(model, number).shape):
            by += ", transposed or not"
        texts.append((name, f"{target}, of {_leaf.show(template)}{by}: {shown}"))
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
