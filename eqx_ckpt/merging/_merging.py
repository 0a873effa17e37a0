"""The methods that are public. `__init__.py` says what one is."""

import functools as ft
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from . import _methods
from ._methods import Method


Number = int | float
# A number for all leaves, or for each its own.
Numbers = Number | Mapping[str, Any] | Sequence[Any]
Normalize = Literal["count", "weights"] | None


def average(weights: Sequence[Numbers] | Mapping[str, Any] | None = None) -> Method:
    """The mean of each element, as in model soups (Wortsman et al.,
    [arXiv:2203.05482](https://arxiv.org/abs/2203.05482)): `Σ wᵢ treeᵢ / Σ wᵢ`.

    **Arguments:**

    - `weights`: one for each tree. By default all are 1.

    **Raises:** `ValueError` for weights that are not finite, or whose sum is 0.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [{"w": jnp.array([1., 2.])}, {"w": jnp.array([3., 6.])}]
        >>> ec.merge(trees, ec.merging.average([3, 1]))["w"].read()
        Array([1.5, 3. ], dtype=float32)

        ```
    """
    checked = 1.0 if weights is None else _each("weights", weights)
    some = checked.values() if isinstance(checked, dict) else [checked]
    if weights is not None and not all(isinstance(x, tuple) for x in some):
        raise ValueError(
            "`weights` of an average must be one for each tree, as `[0.9, 0.1]`, of "
            'which each may be a mapping; or a mapping to such, as `{"*": (0.9, 0.1)}`.'
        )
    if isinstance(checked, tuple):
        plain = [x for x in checked if isinstance(x, float)]
        if len(plain) == len(checked) and not sum(plain):
            raise ValueError(f"The sum of the weights {plain} is 0.")
    return Method("average", _methods.average, options={"weights": checked})


def ema(decay: Numbers) -> Method:
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
    options = {"decay": _one("decay", decay, _from_zero)}
    return Method("ema", _methods.ema, options=options)


def slerp(t: Numbers) -> Method:
    """Spherical interpolation between two trees (Shoemake, 1985): each leaf is turned,
    as one vector, by the part `t` of the angle `θ` from the first to the second:
    `(sin((1 - t) θ) tree₀ + sin(t θ) tree₁) / sin θ`.

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
    look, options = _methods.look_at_angle, {"t": _one("t", t, _from_zero)}
    return Method("slerp", _methods.by_state, look, options, least=2, most=2)


def model_stock() -> Method:
    """Model Stock (Jang et al., [arXiv:2403.19522](https://arxiv.org/abs/2403.19522)):
    from the base towards the mean of `n` trees, the further the more their task vectors
    agree: `t mean + (1 - t) base` with `t = n cos θ / (1 + (n - 1) cos θ)`.

    `cos θ` is the mean of the cosines of the angles between all pairs of task vectors
    of a leaf. Where there is no such `t`, the base stays. A leaf is read twice.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [jnp.array([1., 0.]), jnp.array([1., 1.])]
        >>> ec.merge(trees, ec.merging.model_stock(), base=jnp.zeros(2)).read()
        Array([0.82842714, 0.41421357], dtype=float32)

        ```
    """
    look = _methods.look_at_stock
    return Method("model_stock", _methods.by_state, look, base=True, least=2)


def task_arithmetic(
    weights: Numbers, *, normalize: Normalize = None, lambda_: Numbers = 1
) -> Method:
    """The base and the weighted sum of the task vectors (Ilharco et al.,
    [arXiv:2212.04089](https://arxiv.org/abs/2212.04089)): `base + λ Σ wᵢ τᵢ`.

    **Arguments:**

    - `weights`: one for all trees, or one for each. A negative one takes away what a
        fine-tuning has learnt.
    - `normalize`: what the sum is divided by: `"count"`, the number of trees, or
        `"weights"`, the sum of their weights. By default, as in the paper, nothing.
    - `lambda_`: what it is multiplied by after that.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [jnp.array([2., 1.]), jnp.array([1., 3.])]
        >>> method = ec.merging.task_arithmetic([1, -1])
        >>> ec.merge(trees, method, base=jnp.ones(2)).read()
        Array([ 2., -1.], dtype=float32)

        ```
    """
    options = _task(weights, normalize, lambda_)
    return Method(
        "task_arithmetic", _methods.task_arithmetic, options=options, base=True
    )


def ties(
    weights: Numbers,
    density: Numbers,
    *,
    normalize: Normalize = "count",
    lambda_: Numbers = 1,
) -> Method:
    """TIES: task vectors are trimmed, the sign of each element is elected, and those
    that agree are averaged (Yadav et al.,
    [arXiv:2306.01708](https://arxiv.org/abs/2306.01708)): `base + λ Σ wᵢ τᵢ / n` over
    the `n` trees for which `sign(wᵢ τᵢ) = sign(Σ wᵢ τᵢ)`, after each `τᵢ` is trimmed.

    In each leaf of each task vector, the share `density` of the elements that is the
    largest in magnitude is kept. Elements equal to the least of these stay too. The
    rest is 0. In leaves of more than 4 MiB magnitudes are equal that agree in 12 bits
    of the mantissa. A weight of 1 for all is the paper's. A NaN in any of the trees
    stays one. A leaf is read twice.

    **Arguments:**

    - `weights`: one for all trees, or one for each.
    - `density`: which share is kept, in (0, 1]. The paper has 0.2.
    - `normalize`: what the sum is divided by: `"count"`, which is the paper's, the
        number of trees that agree; `"weights"`, which is mergekit's, the sum of their
        weights, so that equal weights cancel out; or None, nothing.
    - `lambda_`: what it is multiplied by after that.

    **Raises:** `ValueError` for a density that is not in (0, 1].

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> trees = [jnp.array([3., -1., 0.1]), jnp.array([1., 2., 0.1])]
        >>> ec.merge(trees, ec.merging.ties(1, 0.67), base=jnp.zeros(3)).read()
        Array([2., 2., 0.], dtype=float32)

        ```
    """
    options = _task(weights, normalize, lambda_)
    options |= {"density": _numbers("density", density, _share), "gamma": 0.0}
    look = _methods.look_at_magnitudes
    return Method("ties", _methods.ties, look, options, base=True)


def breadcrumbs(
    weights: Numbers,
    density: Numbers,
    gamma: Numbers = 0.01,
    *,
    normalize: Normalize = None,
    lambda_: Numbers = 1,
) -> Method:
    """Model Breadcrumbs: of each task vector the largest magnitudes, which are taken
    for outliers, and the smallest are 0. The weighted sum of the rest is added to the
    base (Davari and Belilovsky,
    [arXiv:2312.06795](https://arxiv.org/abs/2312.06795)): `base + λ Σ wᵢ mᵢ τᵢ`.

    Magnitudes are told apart as in [`ties`][eqx_ckpt.merging.ties], and a leaf is read
    twice.

    **Arguments:**

    - `weights`: one for all trees, or one for each.
    - `density`: which share of a leaf is kept, in (0, 1]; in the paper's words `γ - β`.
    - `gamma`: which share, of the largest, is dropped, in [0, 1]; in the paper's words
        `1 - γ`.
    - `normalize`, `lambda_`: as of
        [`task_arithmetic`][eqx_ckpt.merging.task_arithmetic].

    **Raises:** `ValueError` for a share that is not in its range.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> method = ec.merging.breadcrumbs(1, density=0.5, gamma=0.25)
        >>> ec.merge([jnp.array([9., 2., 0.1, 1.])], method, base=jnp.zeros(4)).read()
        Array([0., 2., 0., 1.], dtype=float32)

        ```
    """
    options = _task(weights, normalize, lambda_)
    options["density"] = _numbers("density", density, _share)
    options["gamma"] = _numbers("gamma", gamma, _from_zero)
    look = _methods.look_at_magnitudes
    return Method("breadcrumbs", _methods.breadcrumbs, look, options, base=True)


def dare(
    weights: Numbers,
    density: Numbers,
    key: object,
    *,
    rescale: bool = True,
    normalize: Normalize = None,
    lambda_: Numbers = 1,
) -> Method:
    """DARE: elements of the task vectors are dropped at random, and the rest are
    divided by the share that stays. Their weighted sum is added to the base (Yu et al.,
    [arXiv:2311.03099](https://arxiv.org/abs/2311.03099)):
    `base + λ Σ wᵢ mᵢ τᵢ / density`.

    The key, the name of the leaf, the number of the tree and the place of an element
    say whether it is dropped, and nothing else does.

    **Arguments:**

    - `weights`: one for all trees, or one for each.
    - `density`: the share that stays, in (0, 1]: in the paper's words `1 - p`.
    - `key`: a PRNG key of JAX.
    - `rescale`: whether the rest are divided by the share, which is the paper's.
        mergekit gives them the sum of magnitudes that all had instead.
    - `normalize`, `lambda_`: as of
        [`task_arithmetic`][eqx_ckpt.merging.task_arithmetic].

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
    options = _task(weights, normalize, lambda_) | _random(density, key, rescale)
    return Method("dare", _methods.dare, options=options, base=True)


def dare_ties(
    weights: Numbers,
    density: Numbers,
    key: object,
    *,
    rescale: bool = True,
    normalize: Normalize = "count",
    lambda_: Numbers = 1,
) -> Method:
    """TIES, in which elements are dropped at random as in DARE, instead of those that
    are small (Yu et al., [arXiv:2311.03099](https://arxiv.org/abs/2311.03099)).

    **Arguments:**

    - `weights`, `density`, `key`, `rescale`: as of [`dare`][eqx_ckpt.merging.dare].
    - `normalize`, `lambda_`: as of [`ties`][eqx_ckpt.merging.ties]. mergekit's
        `dare_ties` divides by nothing: `normalize=None`.

    **Raises:** as [`dare`][eqx_ckpt.merging.dare].

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, jax.random as jr
        >>> method = ec.merging.dare_ties(1, 1, jr.key(0))
        >>> trees = [jnp.array([3., -1.]), jnp.array([1., 2.])]
        >>> ec.merge(trees, method, base=jnp.zeros(2)).read()
        Array([2., 2.], dtype=float32)

        ```
    """
    options = _task(weights, normalize, lambda_) | _random(density, key, rescale)
    return Method("dare_ties", _methods.dare_ties, options=options, base=True)


def della(
    weights: Numbers,
    density: Numbers,
    epsilon: Numbers,
    key: object,
    *,
    rescale: bool = True,
    normalize: Normalize = "count",
    lambda_: Numbers = 1,
) -> Method:
    """DELLA: as [`dare_ties`][eqx_ckpt.merging.dare_ties], but what is larger is
    likelier to stay (Deep et al., [arXiv:2406.11617](https://arxiv.org/abs/2406.11617)).
    The element with the rank `r` of the `n` magnitudes in a row stays with the chance
    `density + epsilon (r / (n - 1) - 1/2)`. It is divided by that chance.

    A row has all but the first axis; a leaf of one axis is one row. What of a row is
    beyond 4 MiB is ranked by itself.

    **Arguments:**

    - `weights`, `key`, `rescale`: as of [`dare`][eqx_ckpt.merging.dare].
    - `density`: the mean of the chances, in (0, 1].
    - `epsilon`: how far the least and the greatest chance are apart, in [0, 1]: that is
        the paper's. mergekit's `epsilon` is half of it.
    - `normalize`, `lambda_`: as of [`ties`][eqx_ckpt.merging.ties].

    **Raises:** as [`dare`][eqx_ckpt.merging.dare]; `ValueError` if a chance would not
    be in (0, 1].

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, jax.random as jr
        >>> method = ec.merging.della(1, 0.5, 0.9, jr.key(0), rescale=False)
        >>> ec.merge([jnp.arange(1., 7)], method, base=jnp.zeros(6)).read()
        Array([0., 0., 3., 0., 5., 6.], dtype=float32)

        ```
    """
    options = _task(weights, normalize, lambda_) | _random(density, key, rescale)
    options["epsilon"] = _numbers("epsilon", epsilon, _from_zero)
    shares = jax.tree.leaves(options["density"])
    half = max(jax.tree.leaves(options["epsilon"])) / 2
    if min(shares) <= half or max(shares) + half > 1:
        raise ValueError(
            f"`density` and `epsilon` give chances from {min(shares) - half:g} to "
            f"{max(shares) + half:g}, which must be in (0, 1]."
        )
    return Method("della", _methods.dare_ties, options=options, base=True)


# ---- Options.


def _task(weights: object, normalize: object, lambda_: object) -> dict[str, Any]:
    """The options of all that add task vectors."""
    if normalize not in ("count", "weights", None):
        raise ValueError(
            f'`normalize` must be "count", "weights" or None, not {normalize!r}.'
        )
    return {
        "weights": _each("weights", weights),
        "normalize": normalize,
        "lambda_": _one("lambda_", lambda_),
    }


def _random(density: object, key: object, rescale: bool) -> dict[str, Any]:
    """The options of all that drop elements at random."""
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(f"`key` must be a PRNG key, as `jax.random.key(0)`: {key!r}.")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if is_typed else 1):
        raise TypeError(f"`key` must be one PRNG key, not of shape {key.shape}.")
    data = np.asarray(jr.key_data(key) if is_typed else key).tobytes()
    share = _numbers("density", density, _share)
    return {"density": share, "epsilon": 0.0, "key": data, "rescale": bool(rescale)}


def _number(name: str, x: object) -> float:
    if not isinstance(x, numbers.Real) or not math.isfinite(x):
        raise ValueError(f"`{name}` must be finite numbers, not {x!r}.")
    return float(x)


def _share(name: str, x: object, has_zero: bool = False) -> float:
    out = _number(name, x)
    if not 0 <= out <= 1 or (out == 0 and not has_zero):
        least = "[0" if has_zero else "(0"
        raise ValueError(f"`{name}` must be in {least}, 1], not {x!r}.")
    return out


_from_zero = ft.partial(_share, has_zero=True)


def _numbers(
    name: str, x: object, check: Callable[[str, object], float] = _number
) -> Any:
    """An option of `Method`, of which each number is checked."""
    if isinstance(x, Mapping):
        return {str(key): _numbers(name, value, check) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_numbers(name, value, check) for value in x)
    if isinstance(x, list):
        if not x:
            raise ValueError(f"`{name}` has an empty list.")
        return [check(name, value) for value in x]
    return check(name, x)


def _one(name: str, x: object, check: Callable[[str, object], float] = _number) -> Any:
    """`_numbers` of an option that is one number of a leaf, whatever the tree."""
    for value in x.values() if isinstance(x, Mapping) else [x]:
        if isinstance(value, tuple):
            raise ValueError(f"`{name}` is one number for all trees, not {value!r}.")
    return _numbers(name, x, check)


def _each(name: str, x: Any) -> Any:
    """`_numbers` of an option of which any sequence has one for each tree."""
    is_one = isinstance(x, (numbers.Real, Mapping, str))
    return _numbers(name, x if is_one else tuple(x))
