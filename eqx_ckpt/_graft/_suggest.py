"""What a graft may have meant, as code to paste."""

import collections
import keyword
from collections.abc import Collection, Iterable

import jax.tree_util as jtu

from .._format import _names
from .._tree import _nearest, _target
from ._sides import Model, Stored


# Suggestions are for people, who would not read more of them.
_most = 8
# Leaves that are looked at for them: many nodes may be alike.
_MAX_STEPS = 2**17


def lines(
    model: Model, stored: Stored, numbers: list[int], places: list[int]
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
        twin = twins.of(prefix)
        if twin is None:
            stack.extendleft(reversed(children.get(prefix, [])))
            continue
        name, places_there = twin
        a, b = _code(model, prefix), _saved_code(stored, name)
        if a is not None:
            out.append(f"    pairs: (lambda m: {a}, lambda c: {b}),")
            new -= set(model.below[prefix])
            old -= places_there
    if stack and old:
        more = [*out, "    ... and more pairs"] if out else []
        return ["  Perhaps, to paste:", *more] if more else []
    roots = _roots(model.below, new, arrays)
    fresh = [_code(model, x) or _entry_code(model, x) for x in roots]
    if fresh and None not in fresh:
        out.append(f"    fresh=lambda m: {_listed([x for x in fresh if x])},")
    everything = range(len(stored.saved.names))
    drop = [_saved_code(stored, x) for x in _roots(stored.below, old, everything)]
    if drop:
        out.append(f"    drop=lambda c: {_listed(drop)},")
    return ["  Perhaps, to paste:", *out] if out else []


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

    def __init__(self, model: Model, stored: Stored, new: set[int], old: set[int]):
        self.left = _MAX_STEPS
        self._model, self._stored = model, stored
        self._new, self._old = new, old
        # The leaves by the last part of their name and their shape, and by shape alone.
        self._places: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        for place in sorted(old):
            name, shape = stored.saved.names[place], self._saved_shape(place)
            self._places.setdefault((_last(name), shape), []).append(place)
            self._places.setdefault((None, shape), []).append(place)
        self._named: dict[tuple[int, ...], _nearest.Names] = {}

    def _saved_shape(self, place: int) -> tuple[int, ...]:
        return self._stored.saved.record(place, known=True).template.logical_shape

    def of(self, prefix: str) -> tuple[str, set[int]] | None:
        """The node with leaves of the same names and shapes. If there are several, that
        with the fewest others, then the highest, the most alike by name. With it, the
        places of the leaves that a pair of the two would use."""
        names, here = self._model.names, self._model.below[prefix]
        wanted = {
            _names.below(names[n], prefix): _target.target_of(
                self._model.flat.leaves[n]
            ).shape
            for n in here
            if n in self._new
        }
        self.left -= len(wanted)
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
        return None if best is None else best[1:]

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
                self._named[shape] = _nearest.Names(saved.names[p] for p in places)
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
            full = ".".join(x for x in (candidate, below) if x)
            place = self._stored.saved.places.get(full)
            if place is None or place not in self._old:
                return False
            if shape != self._saved_shape(place):
                return False
        return True


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


def _saved_code(stored: Stored, prefix: str) -> str:
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
