"""Methods that merge trees leaf by leaf: averages, interpolation, and sums of what
fine-tunings have changed.

A method computes in float32, or float64 for leaves of float64, and gives the dtype of
the leaf. Those that have a base take it as the `base` of a merge, and call what a tree
differs from it there its task vector.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ._edit import _methods
from ._edit._methods import Method


def average(weights: Sequence[int | float] | None = None) -> Method:
    """The mean of each element, as in model soups (Wortsman et al.,
    [arXiv:2203.05482](https://arxiv.org/abs/2203.05482)).

    **Arguments:**

    - `weights`: one for each tree; the weighted sum is divided by their sum. By default
        all are 1.

    **Raises:** `ValueError` for weights that are not finite, or whose sum is 0.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [{"w": jnp.array([1., 2.])}, {"w": jnp.array([3., 6.])}]
        >>> ec.merge(trees, ec.merging.average([3, 1]))["w"].read()
        Array([1.5, 3. ], dtype=float32)

        ```
    """
    if weights is None:
        return _methods.Average(None)
    checked = tuple(_number("weights", x) for x in weights)
    if not checked or not sum(checked):
        raise ValueError(f"The sum of the weights {list(checked)} is 0.")
    return _methods.Average(checked)


def ema(decay: int | float) -> Method:
    """The exponential moving average of trees, which are given from the oldest to the
    newest: beginning with the first, `decay * average + (1 - decay) * tree` of each.

    **Raises:** `ValueError` for a decay that is not in [0, 1].

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> steps = [jnp.array([x]) for x in (0., 1., 1.)]
        >>> ec.merge(steps, ec.merging.ema(0.5)).read()
        Array([0.75], dtype=float32)

        ```
    """
    return _methods.Ema(_share("decay", decay, zero=True))


def slerp(t: int | float) -> Method:
    """Spherical interpolation between two trees (Shoemake, 1985): each leaf is turned,
    as one vector, by the part `t` of the angle from the first to the second.

    Where the cosine of the angle is beyond 0.9995 (or -0.9995), or one of the two is
    zero or not finite, it is linear. A leaf is read twice.

    **Raises:** `ValueError` for a `t` that is not in [0, 1].

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [jnp.array([1., 0.]), jnp.array([0., 1.])]
        >>> ec.merge(trees, ec.merging.slerp(0.5)).read()
        Array([0.70710677, 0.70710677], dtype=float32)

        ```
    """
    return _methods.Slerp(_share("t", t, zero=True))


def task_arithmetic(weights: int | float | Sequence[int | float]) -> Method:
    """The base and the weighted sum of the task vectors (Ilharco et al.,
    [arXiv:2212.04089](https://arxiv.org/abs/2212.04089)).

    **Arguments:**

    - `weights`: one for all trees, or one for each. A negative one takes away what a
        fine-tuning has learnt.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [jnp.array([2., 1.]), jnp.array([1., 3.])]
        >>> method = ec.merging.task_arithmetic([1, -1])
        >>> ec.merge(trees, method, base=jnp.ones(2)).read()
        Array([ 2., -1.], dtype=float32)

        ```
    """
    return _methods.TaskArithmetic(_weights(weights))


def ties(weights: int | float | Sequence[int | float], density: int | float) -> Method:
    """TIES: task vectors are trimmed, the sign of each element is elected, and those
    that agree are averaged (Yadav et al.,
    [arXiv:2306.01708](https://arxiv.org/abs/2306.01708)).

    Of each leaf of each task vector the share `density` that is the largest in
    magnitude is kept (elements whose magnitudes agree with the least of these in 12
    bits of the mantissa are too), and the rest is 0. The sign of an element is that of
    the weighted sum. What is added to the base is the mean of the weighted elements
    that are of that sign: with one weight for all that is the scale of the paper. A
    NaN in any of the trees stays one. A leaf is read twice.

    **Arguments:**

    - `weights`: one for all trees, or one for each.
    - `density`: which share is kept, in (0, 1]. The paper has 0.2.

    **Raises:** `ValueError` for a density that is not in (0, 1].

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [jnp.array([3., -1., 0.1]), jnp.array([1., 2., 0.1])]
        >>> ec.merge(trees, ec.merging.ties(1, 0.67), base=jnp.zeros(3)).read()
        Array([2., 2., 0.], dtype=float32)

        ```
    """
    return _methods.Ties(_weights(weights), _share("density", density))


def dare(
    weights: int | float | Sequence[int | float], density: int | float, key: Any
) -> Method:
    """DARE: elements of the task vectors are dropped at random, the rest are divided by
    the share that stays, and their weighted sum is added to the base (Yu et al.,
    [arXiv:2311.03099](https://arxiv.org/abs/2311.03099)).

    Whether an element is dropped depends on the key, the name of the leaf, the number
    of the tree and the place of the element, and on nothing else.

    **Arguments:**

    - `weights`: one for all trees, or one for each.
    - `density`: the share that stays, in (0, 1]: in the paper's words `1 - p`.
    - `key`: a PRNG key of JAX.

    **Raises:** `ValueError` for a density that is not in (0, 1]; `TypeError` for what
    is not one key.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, jax.random as jr
        >>> method = ec.merging.dare(1, 0.5, jr.key(0))
        >>> ec.merge([jnp.ones(4)], method, base=jnp.zeros(4)).read()
        Array([2., 0., 2., 0.], dtype=float32)

        ```
    """
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(f"`key` must be a PRNG key, as `jax.random.key(0)`: {key!r}.")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if is_typed else 1):
        raise TypeError(f"`key` must be one PRNG key, not of shape {key.shape}.")
    data = np.asarray(jr.key_data(key) if is_typed else key).tobytes()
    return _methods.Dare(_weights(weights), _share("density", density), data)


def _number(name: str, x: Any) -> float:
    if not isinstance(x, numbers.Real) or not math.isfinite(x):
        raise ValueError(f"`{name}` must be finite numbers, not {x!r}.")
    return float(x)


def _weights(weights: Any) -> float | tuple[float, ...]:
    if np.ndim(weights) == 0:
        return _number("weights", weights)
    return tuple(_number("weights", x) for x in weights)


def _share(name: str, x: int | float, zero: bool = False) -> float:
    out = _number(name, x)
    if not 0 <= out <= 1 or (out == 0 and not zero):
        raise ValueError(f"`{name}` must be in {'[' if zero else '('}0, 1], not {x!r}.")
    return out
