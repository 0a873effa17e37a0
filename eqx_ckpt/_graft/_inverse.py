"""`inverse`: what undoes the adapters of a pair, for the way back."""

from collections.abc import Callable
from typing import Any

from .._kernel._load import _checkpoint, _nodes
from .._kernel._load._checkpoint import Checkpoint
from .._rename import _rename
from .._rename._rename import Rename
from ..adapters import Adapter
from . import _nested, _pairs
from ._nested import Nested
from ._pairs import PairStep
from ._sides import StoredSide


def inverse(adapters: object, source: object = None) -> list[Any]:
    """The adapters that undo those of a pair of [`graft`][]. They are for the pair the
    other way round, which takes what was grafted back to what it came from.

    **Arguments:**

    - `adapters`: what the pair has after its two sides: an adapter, a [`rename`][], or
        a list of them.
    - `source`: only for a rename: where the names that it changes are. Give what the
        second side of the pair gives, a node or a list of nodes, such as
        `ec.open(path).tree.layers`; or a checkpoint, or its path, for all of it.

    **Returns:** a list, to put after the two sides of the pair that goes back.

    `stack` and `unstack` undo each other, and so do `concatenate` and `split`.
    `transpose` and `rename`, with the adapters of its rules, are turned round; the rows
    that `rows` has added are left out. To the bit, all is as it was. Nothing undoes
    `cast`, `interpolate`, `take`, an `unstack` of some, or a function of yours.

    **Raises:** `ValueError` for what cannot be undone, and for a rename that gives one
    name to two leaves; `TypeError` for a rename without its `source`.

    !!! example

        ```python
        >>> import jax.numpy as jnp, eqx_ckpt as ec
        >>> layers = [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}]
        >>> ec.tree_serialise_leaves("memory://theirs", layers)
        >>> there = [ec.rename([("^w$", "weight")]), ec.adapters.stack()]
        >>> pair = (lambda m: m, lambda c: c, there)
        >>> ours, _ = ec.graft({"weight": jnp.zeros((2, 3))}, "memory://theirs", [pair])
        >>> ec.tree_serialise_leaves("memory://ours", ours)
        >>> back = ec.inverse(there, ec.open("memory://theirs").tree)
        >>> back[0]
        unstack(axis=0)
        >>> pair = (lambda m: m, lambda c: c, back)
        >>> again, _ = ec.graft(layers, "memory://ours", [pair])
        >>> again[0]
        {'w': Array([1., 1., 1.], dtype=float32)}

        ```
    """
    steps = _pairs.steps_of([adapters], "inverse")
    return [
        _back(step, steps, source) if isinstance(step, Rename) else _undone(step)
        for step in reversed(steps)
    ]


def _undone(adapter: Adapter) -> Adapter:
    if adapter.undo is None:
        raise ValueError(
            f"`{adapter}` cannot be undone: what was saved does not follow from what "
            "it gives. Leave it out, and say in the pair back what is to be there."
        )
    return adapter.undo()


def _back(how: Rename, steps: tuple[PairStep, ...], source: object) -> Rename:
    """From the names that a rename gives to those of the source, and the adapters of
    its rules undone. Other names stay: another pair may have them."""
    lists = sum(isinstance(x, Adapter) and x.many == "saved" for x in steps)
    nodes = _nested.flat(_pairs.deepened(_nodes_of(source), lists))
    moves: list[tuple[str, str]] = []
    adapters: dict[str, tuple[Callable[..., Any], ...]] = {}
    for old in (old for node in nodes for old in node.leaves):
        new, given = _rename.apply(how, old, set(), "inverse")
        moves.append((old, new))
        undone = (_undone(_pairs.adapter_of(x)) for x in reversed(given))
        adapters[new] = tuple(undone)
    names = _rename.inverted(moves)
    table = {new: some for new, some in adapters.items() if some}
    return Rename(lambda name: names.get(name, name), table)


def _nodes_of(source: Any) -> Nested:
    first = source
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    origin = _nodes.stored_place(first)
    if origin is not None:
        return StoredSide(Checkpoint(origin[0])).collect(source, "source")
    if source is None or isinstance(source, (list, tuple)):
        raise TypeError(
            "`inverse` of a rename needs the `source` of its names: the checkpoint, or "
            "the node of it that the pair's second side gives."
        )
    return StoredSide(_checkpoint.open(source)).node("")
