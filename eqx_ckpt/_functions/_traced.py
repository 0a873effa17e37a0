"""A function of arrays that JAX has traced, to be computed on the host: by blocks, if
it is elementwise.

It is traced for whole arrays, and blocks are evaluated as it was traced. So
`w / w.shape[0]` divides each block by the length of the whole array.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from .._kernel._tree import _host_copy, _leaf


# Older releases of JAX have `enable_x64` elsewhere.
_home: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
_enable_x64 = _home.enable_x64

# Primitives of JAX whose result at a place depends on the operands at that place only.
_ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy "
    "copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "igamma igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt "
    "lt_to max min mul ne neg nextafter not or polygamma population_count pow real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor zeta".split()
)
# Primitives of JAX, of all releases that we take, which run a jaxpr once, as it is.
_CALLS = frozenset(
    "call closed_call composite custom_jvp_call custom_vjp_call jit pjit remat2".split()
)


# What changes how the same function is traced and lowered.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)


def settings() -> tuple[Any, ...]:
    """The settings of JAX that a function is traced under, and the mesh."""
    own = (getattr(jax.config, name, None) for name in _SETTINGS)
    return *own, jax.sharding.get_abstract_mesh()


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function of arrays as JAX has traced it, under some `settings`. See
    [`trace`][]."""

    fn: Callable[..., Any]
    jaxpr: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    weak: bool
    settings: tuple[Any, ...]
    elementwise: bool

    @property
    def x64(self) -> bool:
        return bool(self.settings[0])

    def __call__(self, arrays: Sequence[np.ndarray], *where: object) -> np.ndarray:
        """The result for whole arrays, or for the same block of each if it is
        elementwise: the `make` of a `Formula`, for which all blocks are alike. Scalars
        are always whole."""
        cpu = jax.local_devices(backend="cpu")[0]
        with _enable_x64(self.x64), jax.default_device(cpu):
            if self.elementwise:
                shape = next((x.shape for x in arrays if x.shape), ())
                out = self._by_block(*arrays, shape=shape if self.shape else ())
            else:
                out = self._whole(*arrays)
            return np.asarray(out)

    @ft.cached_property
    def _whole(self) -> Callable[..., Any]:
        fun = jex_core.jaxpr_as_fun(self.jaxpr)
        return jax.jit(lambda *arrays: fun(*arrays)[0])

    @ft.cached_property
    def _by_block(self) -> Callable[..., Any]:
        def run(*arrays: Any, shape: tuple[int, ...]) -> Any:
            (out,) = _evaluate(self.jaxpr, arrays, shape)
            return jnp.broadcast_to(out, shape)

        return jax.jit(run, static_argnames="shape")

    def __reduce__(self) -> Any:
        avals = [(x.shape, x.dtype, x.weak_type) for x in self.jaxpr.in_avals]
        return _trace_again, (self.fn, avals, self.elementwise, self.x64)


def trace(
    fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], elementwise: bool
) -> Traced:
    """Traces `fn` for arrays of these shapes and dtypes. What is made of scalars alone
    is computed whole.

    **Raises:** `TypeError` unless it gives one array; `ValueError` if it is to be
    elementwise, and is not.
    """
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*avals)
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise TypeError(f"it returns {_described(out)}, and not one array")
    if _leaf.is_key(out):
        raise TypeError(
            "it returns PRNG keys, and lazy arrays are of numbers. `cast=True` loads "
            "the data of keys as keys"
        )
    if elementwise:
        problem = next(_problems(jaxpr, out.shape), None)
        if problem is not None:
            raise ValueError(f"it is not elementwise: it {problem}")
    (aval,) = jaxpr.out_avals
    weak = bool(getattr(aval, "weak_type", False))
    elementwise = elementwise and any(x.shape for x in avals)
    dtype, jaxpr = np.dtype(out.dtype), _with_own(jaxpr)
    return Traced(fn, jaxpr, out.shape, dtype, weak, settings(), elementwise)


def _with_own(jaxpr: Any) -> Any:
    """A jaxpr with constants of its own. Those from NumPy are memory of whoever made
    the function, and would be read only when the function runs."""
    if type(jaxpr) in (tuple, list):
        return type(jaxpr)(map(_with_own, jaxpr))
    if not isinstance(jaxpr, (jex_core.ClosedJaxpr, jex_core.Jaxpr)):
        return jaxpr
    # From JAX 0.12 on the two are one class.
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    consts = [_own(x) for x in getattr(jaxpr, "consts", ())]
    if inner is not jaxpr:
        return jex_core.ClosedJaxpr(_with_own(inner), consts)
    eqns = []
    for eqn in inner.eqns:
        params = {name: _with_own(value) for name, value in eqn.params.items()}
        eqns.append(eqn.replace(params=params))
    return inner.replace(eqns=eqns, **({"consts": consts} if consts else {}))


def _own(const: object) -> Any:
    if isinstance(const, jax.Array) and (
        _leaf.is_key(const) or _host_copy.on_device(const)
    ):
        return const
    return jnp.asarray(_host_copy.owned(const))


def _trace_again(
    fn: Callable[..., Any], avals: list[tuple], elementwise: bool, x64: bool
) -> Traced:
    with _enable_x64(x64):
        structs = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
        return trace(fn, structs, elementwise)


def _described(out: object) -> str:
    leaves = jax.tree.leaves(out)
    return f"a tree of {len(leaves)} leaves" if leaves else repr(out)


def _inner(eqn: Any) -> Any:
    """The jaxpr that an equation calls, as `jit` does; None if it calls none: a `scan`
    has one too, and runs it many times."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]


def _problems(jaxpr: Any, shape: tuple[int, ...]) -> Iterator[str]:
    """Why a jaxpr does not compute each element of arrays of `shape` by itself."""
    jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    given = [*(x for eqn in jaxpr.eqns for x in eqn.invars), *jaxpr.outvars]
    literals = [x.val for x in given if isinstance(x, jex_core.Literal)]
    for const in [*consts, *literals]:
        if np.shape(const) != ():
            yield f"uses an array of shape {np.shape(const)} that is not an argument"
    for var in jaxpr.invars:
        if var.aval.shape not in ((), shape):
            yield f"is given {var.aval.str_short()} for a result of shape {shape}"
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = _inner(eqn)
        if inner is not None:
            yield from _problems(inner, shape)
        elif name == "broadcast_in_dim":
            if eqn.invars[0].aval.shape != () and eqn.invars[0].aval.shape != shape:
                yield f"broadcasts {eqn.invars[0].aval.str_short()}"
        elif name not in _ELEMENTWISE:
            yield f"has `{name}` in it"
        for var in eqn.outvars:
            if var.aval.shape not in ((), shape):
                yield f"makes {var.aval.str_short()} for a result of shape {shape}"


def _evaluate(jaxpr: Any, args: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """Evaluates an elementwise jaxpr of whole arrays on blocks of this shape."""
    jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def value(var: object) -> Any:
        return var.val if isinstance(var, jex_core.Literal) else known[var]

    for eqn in jaxpr.eqns:
        given = list(map(value, eqn.invars))
        inner = _inner(eqn)
        if inner is not None:
            out = _evaluate(inner, given, shape)
        elif eqn.primitive.name == "broadcast_in_dim":
            is_scalar = eqn.params["shape"] == ()
            out = [given[0] if is_scalar else jnp.broadcast_to(given[0], shape)]
        else:
            out = eqn.primitive.bind(*given, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        known.update(zip(eqn.outvars, out))
    return list(map(value, jaxpr.outvars))
