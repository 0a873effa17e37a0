"""What a graft may have meant, as code to paste."""

import difflib
import keyword
from collections.abc import Collection, Iterable

import jax.tree_util as jtu

from . import _names, _target
from ._pairs import Model, Stored


# Suggestions are for people, who would not read more of them.
_most = 8


def lines(
    model: Model, stored: Stored, numbers: list[int], places: list[int]
) -> list[str]:
    """Pairs for undeclared leaves that fit by names and shapes; `fresh` and `drop` for
    the rest of them."""
    new, old = set(numbers), set(places)
    arrays = [n for n in range(len(model.names)) if model.is_array(n)]
    out = []
    stack = _roots(model.below, new, arrays)
    while stack and len(out) < _most and old:
        prefix = stack.pop(0)
        twin = _twin(model, stored, prefix, new, old)
        if twin is None:
            stack = _children(model.below, prefix) + stack
            continue
        name, places_there = twin
        a, b = _code(model, prefix), _saved_code(stored, name)
        if a is not None:
            out.append(f"    pairs: (lambda m: {a}, lambda c: {b}),")
            new -= set(model.below[prefix])
            old -= places_there
    if stack and old:
        return ["  Perhaps, to paste:", *out, "    ... and more pairs"]
    fresh = [_code(model, x) for x in _roots(model.below, new, arrays)]
    if fresh and None not in fresh:
        out.append(f"    fresh=lambda m: {_listed([x for x in fresh if x])},")
    everything = range(len(stored.index.names))
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
    out: list[str] = []
    found: set[str] = set()
    for name in sorted(below, key=lambda x: (x != "", x.count("."))):
        parts = name.split(".")
        above = {"", *(".".join(parts[:i]) for i in range(1, len(parts)))} - {name}
        if above & found:
            continue
        leaves = [n for n in below[name] if n in counted]
        if leaves and all(n in chosen for n in leaves):
            out.append(name)
            found.add(name)
    return sorted(out, key=lambda x: min(below[x]))


def _children(below: dict[str, list[int]], prefix: str) -> list[str]:
    depth = prefix.count(".") + 1 if prefix else 0
    out = [x for x in below if x and x.count(".") == depth]
    return [x for x in out if _names.is_under(x, prefix) and x != prefix]


def _twin(
    model: Model, stored: Stored, prefix: str, new: set[int], old: set[int]
) -> tuple[str, set[int]] | None:
    """The node of the checkpoint with leaves of the same names and shapes. If there are
    several, that with the fewest others, then the highest, the most alike by name. With
    it, the places of the leaves that a pair of the two would use."""
    wanted = {
        _names.below(model.names[n], prefix): n for n in model.below[prefix] if n in new
    }
    if not wanted:
        return None
    some = next(iter(wanted))
    # Python scalars are in no pair by themselves, but tell a model from its moments.
    mine = {_names.below(model.names[n], prefix) for n in model.below[prefix]}
    best: tuple[tuple, str, set[int]] | None = None
    for place in sorted(old):
        name = stored.index.names[place]
        if some == "":
            candidate = name
        elif name.endswith("." + some):
            candidate = name[: -len(some) - 1]
        elif name == some:
            candidate = ""
        else:
            continue
        for below, n in wanted.items():
            full = ".".join(x for x in (candidate, below) if x)
            other = stored.index.places.get(full)
            if other is None or other not in old:
                break
            shape = stored.index.record(other).template.logical_shape
            if shape != _target.target_of(model.flat.leaves[n]).shape:
                break
        else:
            alike = difflib.SequenceMatcher(None, prefix, candidate).ratio()
            # A leaf has only its shape for it, and needs a name that is like its own.
            if some == "" and alike < 0.5:
                continue
            theirs = {
                _names.below(stored.index.names[p], candidate): p
                for p in stored.below[candidate]
            }
            rank = (-len(mine ^ theirs.keys()), -candidate.count("."), alike)
            if best is None or rank > best[0]:
                both = {p for below, p in theirs.items() if below in mine}
                best = (rank, candidate, both)
    return None if best is None else best[1:]


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


def _saved_code(stored: Stored, prefix: str) -> str:
    record = stored.index.record(stored.below[prefix][0])
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
