"""`diff`: in what two checkpoints or trees differ."""

import collections
import itertools as it
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _names, _text
from .._kernel._format._template import Template
from .._kernel._load import _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._load_options import LoadOptions
from .._kernel._runtime import _arguments, _gc
from .._kernel._tree import _folding, _identity, _pairing, _states
from .._kernel._tree._compare import Comparison
from .._kernel._tree._pairing import MovedNode
from . import _elements, _numbers
from ._difference import Change, Diff
from ._elements import Leaf, Side


@_arguments.checked(values=_arguments.FLAG)
@_open.retried_if_replaced(0, "a")
@_open.retried_if_replaced(1, "b")
@_gc.paused()
def diff(
    a: PyTree | str | os.PathLike[str] | Checkpoint,
    b: PyTree | str | os.PathLike[str] | Checkpoint,
    *,
    values: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Diff:
    """In what two checkpoints or trees differ, by the names of their leaves.

    Leaves are compared by kind, shape, dtype and weak type, and by the bits of their
    values. The kind is jax, NumPy, a scalar of Python or the implementation of a PRNG
    key. One NaN is not another, and 0.0 is not -0.0. Of two stored arrays of
    one shape, dtype and chunk shape the digests decide, and nothing of them is read (so
    that damage is not seen either: see [`verify`][]). Others are read some at a time,
    and verified.

    Compared too are the static fields of Modules, as far as a load compares them, and
    the metadata of two checkpoints. What is not stored by default, such as a function,
    is not compared; str and bytes are where both have such a leaf. Entries of an
    eqx.nn.State are matched by the StateIndex that they belong to, where both say it.
    That two leaves are one array is not compared.

    **Arguments:**

    - `a`, `b`: each a path, an open [`Checkpoint`][], a node of its tree, or any tree,
        of lazy leaves and of values.
    - `values`: whether to find the largest absolute and the relative L2 difference of
        each leaf whose numbers have changed. For that those are read, and leaves whose
        dtype has changed too. A NaN in one of the two makes them NaN; NaNs in the same
        place of both count as 0, and so do infinities of one sign.
    - `verify`: whether to check the digests of what is read.
    - `max_bytes`: how much memory to use for what is read, 256 MiB by default, but at
        least a chunk of each.
    - `progress`: whether to show a progress bar. This needs `eqx_ckpt[progress]`.

    **Returns:** a [`Diff`][], which is false if there is no difference.

    **Raises:** `ValueError` or `TypeError` that names a leaf without a value;
    [`DamagedError`][] for what is read and damaged.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://1", {"w": [jnp.ones(2)] * 9, "step": 1})
        >>> ec.tree_serialise_leaves("memory://2", {"w": [jnp.zeros(2)] * 9, "step": 1})
        >>> ec.diff("memory://1", "memory://2", values=True)
        Diff of `memory://1` and `memory://2`: 9 changed, 1 the same
          changed:
            w.{0..8}  f32[2]: value  (largest 1, relative 1)
        >>> bool(ec.diff("memory://1", "memory://1"))
        False

        ```
    """
    one, two = _elements.look(a), _elements.look(b)
    before, after = paired(one, two)
    rows = [(leaf, after[name]) for name, leaf in before.items() if name in after]
    reading = LoadOptions(verify=verify, max_bytes=max_bytes, progress=progress)
    found = changes(rows, values, reading)
    changed = {
        leaf.name: change
        for (leaf, _), change in zip(rows, found)
        if change is not None
    }
    # A tree in memory has no metadata.
    both = zip(one.metadata, two.metadata)
    return Diff(
        one.shown,
        two.shown,
        {name: show(x.template) for name, x in after.items() if name not in before},
        {name: show(x.template) for name, x in before.items() if name not in after},
        changed,
        static(one, two, lambda name: False),
        {k: x for pair in both for k, x in _json_changes("", *pair)},
        len(rows) - len(changed),
    )


def paired(one: Side, two: Side) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """The leaves of both, where those of one name stand for each other."""
    names = moved(one, two)
    out: list[dict[str, Leaf]] = []
    for side, other in ((one, two), (two, one)):
        texts = {
            name: leaf
            for name, leaf in side.texts.items()
            if name in other.leaves or name in other.texts
        }
        out.append({**side.leaves, **texts})
    return out[0], {names.get(name, name): leaf for name, leaf in out[1].items()}


def moved(one: Side, two: Side) -> dict[str, str]:
    """The names in `one` of leaves of `two` whose names are positions. The labels of
    entries of States tell, or the attributes that children without keys are."""
    nodes: list[MovedNode] = []
    for node in _pairing.moved_nodes(one.record, two.record, "", "", ""):
        row = one.record.row_at(node.there)
        nodes.append(_placed(node, () if row is None else one.record.kind(row).parts))
    for state, labels in two.states.items():
        old = one.states.get(state, {})
        places = _states.match_entries(state, labels, old, {}) if old else {}
        parts = {str(x): None if to is None else str(to) for x, to in places.items()}
        nodes.append(_placed(MovedNode(state, state, parts), map(str, old)))
    names = [*two.leaves, *two.texts]
    found = _pairing.moved_names(names, nodes)
    return {names[i]: name for i, name in found.items() if name is not None}


def _placed(node: MovedNode, taken: Iterable[str]) -> MovedNode:
    """The node with a position that no other child has, also of those `taken` there,
    for each child that is not there."""
    known = map(_names.number_of, (*taken, *node.parts))
    free = it.count(1 + max((x for x in known if x is not None), default=0))
    to = {x: str(next(free)) if to is None else to for x, to in node.parts.items()}
    return node._replace(parts=to)


def static(
    one: Side, two: Side, passes: Callable[[str], bool]
) -> dict[str, tuple[str, str]]:
    """The static values that differ, of nodes that both have, without those that
    `passes` lets differ. Where there are very many, how many each node has."""
    out: dict[str, tuple[str, str]] = {}
    counts: collections.Counter[str] = collections.Counter()
    both = Comparison(one.record, two.record)
    for x in both.differences([("", "")], passes):
        if x.may_differ:
            continue
        if len(out) < _MOST:
            out[x.name] = x.saved, x.here
        else:
            counts[_names.joined(x.name.rpartition(".")[0], "*")] += 1
    more = {name: (f"{n} static fields", "others") for name, n in counts.items()}
    return out | more


# So many static fields that have changed are told one by one.
_MOST = 2**12


# ---- Metadata.


_NOTHING = object()


def _json_changes(
    name: str, a: object, b: object
) -> Iterator[tuple[str, tuple[str, str]]]:
    if type(a) is dict and type(b) is dict:
        for key in dict.fromkeys([*a, *b]):
            below = _names.joined(name, _names.quote(key))
            yield from _json_changes(below, a.get(key, _NOTHING), b.get(key, _NOTHING))
    elif not _identity.is_same(a, b):
        yield name or "metadata", (_shown(a), _shown(b))


def _shown(x: object) -> str:
    return "nothing" if x is _NOTHING else _text.cut(json.dumps(x), 60)


# ---- Leaves.


def show(t: Template) -> str:
    return _folding.show(t) + ("(weak)" if t.weak else "")


def changes(
    rows: list[tuple[Leaf, Leaf]], values: bool, reading: LoadOptions
) -> list[Change | None]:
    """Per-pair changes of leaves, if there are any."""
    # Two arrays are compared once, whatever the names that they have.
    pairs: dict[Any, _LeafPair] = {}
    found = []
    for row in rows:
        key = tuple((leaf.identity, leaf.template) for leaf in row)
        if key not in pairs:
            pairs[key] = _LeafPair(*row, values)
        found.append(pairs[key])
    todo = [pair for pair in pairs.values() if pair.is_wanted]
    sides = [(pair.a, pair.b) for pair in todo]
    is_wanted = lambda number: todo[number].is_wanted
    parts = _elements.stream("diff", sides, reading, is_wanted)
    for number, (x, y) in parts:
        todo[number].add(x, y)
    return [pair.change() for pair in found]


class _LeafPair:
    """Two leaves of one name, and what is known of how they differ."""

    def __init__(self, a: Leaf, b: Leaf, values: bool):
        self.a, self.b = a, b
        t, u = a.template, b.template
        self._what = differing(t, u)
        self._is_comparable = _is_comparable(t, u)
        # None: not known as yet.
        self._is_same = is_same(a, b) if self._is_comparable else False
        self._distance = None
        if values and self._is_same is not True and t.shape == u.shape:
            if _numbers.is_number(t) and _numbers.is_number(u):
                self._distance = _numbers.Distance(t, u)

    @property
    def is_wanted(self) -> bool:
        """Whether more of the elements has to be looked at."""
        return self._is_same is None or self._distance is not None

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        if self._is_same is None and not _numbers.is_same(x, y, self.a.template):
            self._is_same = False
        if self._distance is not None:
            self._distance.add(x, y)

    def change(self) -> Change | None:
        has_other_value = self._is_comparable and self._is_same is False
        what = (*self._what, *(("value",) if has_other_value else ()))
        if not what:
            return None
        change = Change(what, show(self.a.template), show(self.b.template))
        if self._distance is None or self._is_same is None:
            return change
        distance = self._distance
        return change._replace(largest=distance.largest, relative=distance.relative)


def differing(t: Template, u: Template) -> tuple[str, ...]:
    """Differences of two leaves but for their values."""
    found = {
        "kind": (t.kind, t.impl) != (u.kind, u.impl),
        "shape": t.logical_shape != u.logical_shape,
        # A number of Python is of one type, whatever its size.
        "dtype": (t.dtype, t.weak) != (u.dtype, u.weak) and not _are_integers(t, u),
    }
    return tuple(what for what, is_other in found.items() if is_other)


def _are_integers(t: Template, u: Template) -> bool:
    return t.kind == u.kind == "int"


def _is_comparable(t: Template, u: Template) -> bool:
    """Whether the values of two leaves can be compared by their bits."""
    same = t.logical_shape == u.logical_shape and (t.dtype, t.impl) == (u.dtype, u.impl)
    return same or _are_integers(t, u)


def is_same(a: Leaf, b: Leaf) -> bool | None:
    """Whether two leaves that are comparable have one value; None if that is not known
    before they are read."""
    t, u = a.template, b.template
    if a.identity == b.identity:
        return True
    if (t.dtype, t.shape) != (u.dtype, u.shape):
        return False
    first, second = map(_elements.digests_of, (a, b))
    if first is None or second is None or t.chunk != u.chunk:
        return None
    if first() == second():
        return True
    # Of what is less than a byte some bits do not count.
    return False if _numbers.mask_of(t) is None else None
