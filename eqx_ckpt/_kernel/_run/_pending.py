"""States that a manager was given and has not saved yet."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._save._options import Functions
from .._tree import _register


class PendingState(NamedTuple):
    """The arguments of a call of `save`.

    `is_last`: the run ends with it, so that it is saved whether it is due or not, and
    without its metrics if they are none.
    """

    step: int
    tree: PyTree
    metrics: Mapping[str, Any]
    metadata: Any
    force: bool
    functions: Functions = None
    own: PyTree = None
    is_last: bool = False

    def check_metadata(self) -> None:
        """**Raises:** `TypeError` or `ValueError` for metadata that a manager does not
        save."""
        if not isinstance(self.metadata, Mapping | None):
            raise TypeError(f"`metadata` must be a dict, not {self.metadata!r:.60}.")
        given = self.metadata or {}
        if taken := sorted({"step", "metrics"}.intersection(given)):
            raise ValueError(
                f"`metadata` has the key `{taken[0]}`, which the manager sets itself."
            )

    def metrics_as_json(self) -> tuple[dict[str, Any], Exception | None]:
        """The metrics as JSON. For the last state of a run, an error with them is
        returned, not raised, so that the state is saved without its metrics."""
        try:
            return as_json(self.metrics), None
        except Exception as e:
            if not self.is_last:
                raise
            return {}, e


class KeptState(NamedTuple):
    """A state that waits for the end of the run: `tree` is put together if it is saved
    then, which is rare.

    `values` have a value of a registered type for each leaf that was made of one, and
    `own_leaves` the leaves that were made of those in `own`, with their values.
    """

    leaves: list[Any]
    structure: Any
    state: PendingState
    values: dict[int, Any] = {}
    own_leaves: list[tuple[Any, Any]] = []

    @classmethod
    def of(
        cls, state: PendingState, is_leaf: Callable[[Any], bool] | None
    ) -> "KeptState":
        leaves, structure = jtu.tree_flatten(state.tree, is_leaf=is_leaf)
        return cls(leaves, structure, state._replace(tree=None))

    def looks(self) -> tuple[Any, ...]:
        """Equal for states of which all are saved, or none: the structures of the tree
        and of `own`, and the kinds of their leaves."""
        own, own_structure = jtu.tree_flatten(self.state.own)
        return self.structure, own_structure, _kinds(self.leaves), _kinds(own)

    def copied(self, before: Sequence[Any]) -> "KeptState":
        """A copy that the caller cannot change. It reuses the memory of the copy
        `before` for arrays of the same shape and dtype: new memory is slow to write."""
        copied = lambda x: x.copy() if isinstance(x, np.ndarray) else x
        own = jtu.tree_leaves(self.state.own)
        state = self.state._replace(
            metrics={name: copied(x) for name, x in self.state.metrics.items()},
            metadata=copy.deepcopy(self.state.metadata),
            own=jtu.tree_map(copied, self.state.own),
        )
        made, own_made = _made_leaves(self.leaves), _made_leaves(own)
        leaves = self.leaves.copy()
        for i, leaf in made.items():
            leaves[i] = leaf
        return self._replace(
            leaves=_copies(leaves, before),
            state=state,
            values={i: self.leaves[i] for i in made},
            own_leaves=[(own[i], copied(leaf)) for i, leaf in own_made.items()],
        )

    @property
    def is_gone(self) -> bool:
        """Whether some of its arrays have been donated."""
        arrays = {x for x in {*map(type, self.leaves)} if issubclass(x, jax.Array)}
        return any(x.is_deleted() for x in self.leaves if type(x) in arrays)

    @contextlib.contextmanager
    def as_last(self) -> Iterator[PendingState]:
        """The state, as the last one of the run. In the block, values of registered
        types are what they were when given."""
        leaves = [self.values.get(i, x) for i, x in enumerate(self.leaves)]
        tree = jtu.tree_unflatten(self.structure, leaves)
        made = {id(value): self.leaves[i] for i, value in self.values.items()}
        own = {id(value): leaf for value, leaf in self.own_leaves}
        with _register.taken({**made, **own}):
            yield self.state._replace(tree=tree, is_last=True)


def _kinds(leaves: Sequence[Any]) -> tuple[set[type], set[np.dtype]]:
    """The types of leaves, and the dtypes of NumPy's arrays among them."""
    types = {*map(type, leaves)}
    has_arrays = any(issubclass(cls, np.ndarray) for cls in types)
    arrays = [x for x in leaves if isinstance(x, np.ndarray)] if has_arrays else []
    return types, {x.dtype for x in arrays}


def _made_leaves(leaves: Sequence[Any]) -> dict[int, Any]:
    """The leaves that are made of values of registered types, by their numbers."""
    types = list(map(type, leaves))
    odd = {cls for cls in {*types} if _register.codec_of(cls) is not None}
    out: dict[int, Any] = {}
    for i in [i for i, cls in enumerate(types) if cls in odd] if odd else ():
        # What cannot be made may not be selected; if it is, the save says so.
        with contextlib.suppress(ValueError):
            out[i] = _register.to_leaf(leaves[i])
    return out


def _copies(leaves: list[Any], before: Sequence[Any]) -> list[Any]:
    """Leaves, with copies of NumPy arrays: one of each, whichever leaves it is."""
    copies: dict[int, Any] = {}
    taken: set[int] = set()
    out = list(leaves)
    for i, x in enumerate(leaves):
        if not isinstance(x, np.ndarray):
            continue
        if id(x) not in copies:
            old: Any = before[i] if i < len(before) else None
            if id(old) not in taken and _is_like(old, x):
                np.copyto(old, x)
            else:
                old = x.copy()
            copies[id(x)] = old
            taken.add(id(old))
        out[i] = copies[id(x)]
    return out


def _is_like(old: object, x: np.ndarray) -> bool:
    """Whether a copy of an array may go into the memory of another one."""
    if type(old) is not np.ndarray or type(x) is not np.ndarray or x.dtype.hasobject:
        return False
    alike = old.dtype == x.dtype and old.shape == x.shape
    return alike and old.strides == x.strides


def as_json(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON has them. **Raises:** `TypeError` for what is no number."""
    return {name: _number(name, x) for name, x in metrics.items()}


def _number(name: str, x: Any) -> int | float | str:
    try:
        if getattr(x, "size", None) == 1:
            x = x.item()
        number = x if type(x) is int else float(x)
        return number if math.isfinite(number) else str(number)
    except (TypeError, ValueError, OverflowError) as e:
        raise TypeError(
            f"The metric `{name}` is not a number, nor an array of one: {e}"
        ) from e
