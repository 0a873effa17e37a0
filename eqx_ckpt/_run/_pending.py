"""A state that a manager is given, and its metrics."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._save._options import Functions


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

    @property
    def is_gone(self) -> bool:
        """Whether some of its arrays have been donated."""
        leaves = jtu.tree_leaves(self.tree)
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)

    def copied(self, is_leaf: Callable[[Any], bool] | None) -> "PendingState":
        """A copy that nobody can change."""
        copied = lambda x: x.copy() if isinstance(x, np.ndarray) else x
        leaves, structure = jtu.tree_flatten(self.tree, is_leaf=is_leaf)
        return self._replace(
            tree=jtu.tree_unflatten(structure, map(copied, leaves)),
            metrics={name: copied(x) for name, x in self.metrics.items()},
            metadata=copy.deepcopy(self.metadata),
            own=jtu.tree_map(copied, self.own),
        )

    def given(self) -> dict[str, Any]:
        """The metadata, checked."""
        if not isinstance(self.metadata, Mapping | None):
            raise TypeError(f"`metadata` must be a dict, not {self.metadata!r:.60}.")
        given = dict(self.metadata or {})
        if taken := sorted(given.keys() & {"step", "metrics"}):
            raise ValueError(
                f"`metadata` has the key `{taken[0]}`, which the manager sets itself."
            )
        return given

    def numbers(self) -> tuple[dict[str, Any], Exception | None]:
        """The metrics as JSON has them; of the last state an error instead of some
        that are none: a state is worth more than its metrics."""
        try:
            return {name: _number(name, x) for name, x in self.metrics.items()}, None
        except Exception as e:
            if not self.is_last:
                raise
            return {}, e


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
