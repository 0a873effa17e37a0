"""Leaves: which are stored, what is stored of each, and stand-ins for unread ones."""

import functools as ft
import itertools as it
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core as jax_core
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np

from .._format import _grid, _template
from .._format._template import Template
from .._runtime import _arguments
from . import _held, _register, _sharding


# The kinds of leaves that are numbers of Python, and those that are plain values.
PYTHON = {"bool": bool, "int": int, "float": float, "complex": complex}
PLAIN: dict[str, type] = {**PYTHON, "str": str, "bytes": bytes}


def is_storable(x: object) -> bool:
    """Whether a leaf is stored by default: the `filter_spec` of saves and loads.

    These are the leaves that Equinox stores, JAX and NumPy arrays and scalars and
    Python's bool, int, float and complex; typed PRNG keys; and bytes, as which data
    iterators have their states. On the `like` side it is also true of
    `jax.ShapeDtypeStruct`. It is true of types that were given to [`register_leaf`][].

    It is false of all else. A str is configuration more often than data. It is recorded
    beside the leaves, as are enums, dates, sets and the like: a load with another value
    is an error, as it is for a static field. A `filter_spec` that is true of a str
    stores it. Functions are left out. Where this is the `filter_spec`, other arrays,
    such as a `jax.Ref`, are an error. So are generators of random numbers, and objects
    that hold arrays of JAX, such as a dataclass that JAX does not know.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.is_storable(1.0), ec.is_storable(b"state"), ec.is_storable("batch")
        (True, True, False)

        ```
    """
    if isinstance(x, bytes):
        return not isinstance(x, np.bytes_)
    return is_own(x) or _register.codec_of(type(x)) is not None


def is_own(x: object) -> bool:
    """Whether a leaf is a number or an array, which Equinox stores as well."""
    return is_own_type(type(x)) or isinstance(x, jax.Array)


@ft.cache
def is_own_type(cls: type) -> bool:
    """Whether all leaves of a type are numbers or arrays."""
    if issubclass(cls, (np.str_, np.bytes_)):
        return False
    if issubclass(cls, jax.Array):
        return not issubclass(cls, jax_core.Tracer)  # Which of these are, JAX decides.
    numbers = (np.ndarray, np.generic, bool, int, float, complex)
    return issubclass(cls, (*numbers, jax.ShapeDtypeStruct))


def is_key(x: Any) -> bool:
    return is_key_dtype(x.dtype)


def is_shared(leaf: object) -> bool:
    """Whether a leaf that stands at two places is one array there, not two values."""
    return isinstance(leaf, (jax.Array, np.ndarray))


@ft.cache
def _stored_as(dtype: np.dtype) -> tuple[str, str] | None:
    """The names of the dtype of an array and of the one its bytes are stored as."""
    if dtype == jax.dtypes.float0:
        return "float0", "bool"
    name = dtype.name
    if name in _template.STORED:
        return name, name
    try:
        known = _template.dtype_of(name)
    except ValueError:
        return None
    if known.itemsize != 1 or _template.number_type(known) == "none":
        return None
    return name, "uint8"


def template_of(leaf: object, dtype: np.dtype | None = None) -> Template:
    """The template of a leaf, without its key path and chunks. Copies nothing.

    `dtype` is what floating arrays are cast to. **Raises:** `ValueError` or `TypeError`
    when the leaf cannot be stored, with a sentence that says why.
    """
    if isinstance(leaf, jax.Array):
        return _template_of_jax(leaf, dtype)
    if isinstance(leaf, (np.ndarray, np.generic)) and not isinstance(
        leaf, (np.str_, np.bytes_)
    ):
        check_plain(leaf)
        kind = "numpy" if isinstance(leaf, np.ndarray) else "generic"
        return array_template(kind, leaf.shape, leaf.dtype, dtype, False)
    for kind, cls in PYTHON.items():
        if isinstance(leaf, cls):
            if kind == "int" and not -(2**63) <= leaf < 2**63:
                size = len(int_bytes(leaf))
                return Template("", kind, "int", (size,), "uint8", ())
            name = _template.SCALAR_KINDS[kind]
            return Template("", kind, name, (), name, ())
    if isinstance(leaf, (str, bytes)):
        kind = "str" if isinstance(leaf, str) else "bytes"
        return Template("", kind, kind, (len(encoded(leaf)),), "uint8", ())
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(
            f"it is abstract, a `{type(leaf).__name__}` without a value. Load it first "
            "(`materialise`), or leave it out with `filter_spec` or `where`."
        )
    raise TypeError(
        f"a `{type(leaf).__name__}` cannot be stored. Leave it out with `filter_spec`, "
        f"or make its type one that can be{recipe(leaf)}."
    )


def check_plain(array: object) -> None:
    """**Raises:** `TypeError` for a subclass of NumPy's array: no file has what it adds
    to its numbers, such as a unit. Memory in a file is that of any array."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("it is a masked array. Store its `.data` and its `.mask`.")
    own = np.ndarray, np.memmap
    # JAX has one of its own, which is private, for what it cannot compute with.
    is_of_jax = type(array).__module__.startswith("jax.")
    if isinstance(array, np.ndarray) and type(array) not in own and not is_of_jax:
        name = type(array).__name__
        raise TypeError(
            f"it is a `{name}`, which is more than its numbers. Store those, "
            "`np.asarray` of it, and beside them what else it has, such as a unit; or "
            f"give `{name}` to `register_leaf`."
        )


# Stands for the number of a kind, where nothing is known of a leaf.
NO_KIND = -1


class LeafKinds(NamedTuple):
    """The kinds of leaves that there are, and the number of that of each leaf,
    `NO_KIND` where nothing is known. Leaves of a kind have one template and one
    sharding."""

    kinds: tuple[Any, ...]
    kind_of: tuple[int, ...]


def find_kinds(leaves: Sequence[Any], kept: list[Any]) -> LeafKinds:
    """The kinds of these leaves, which are few.

    `kept` is a list that is empty at first, and then holds the result of the last call.
    That is returned for leaves of the same types, shapes and shardings, as a training
    loop has them at each save.
    """
    types = list(map(type, leaves))
    distinct = dict.fromkeys(types)
    # For each type, the results of both functions of `_traits` for its leaves.
    traits: dict[type, tuple[list[Any], list[Any]]] = {}
    for cls in distinct:
        own = leaves
        if len(distinct) > 1:
            own = list(it.compress(leaves, map(operator.is_, types, it.repeat(cls))))
        both = _traits(cls, own[0])
        if both is _OF_JAX and any(map(operator.methodcaller("is_deleted"), own)):
            return LeafKinds((), (NO_KIND,) * len(leaves))
        traits[cls] = list(map(both[0], own)), list(map(both[1], own))
    for last_types, last_traits, kinds in kept:
        if types == last_types and traits == last_traits:
            return kinds
    kinds = _kinds_of(types, traits)
    kept[:] = [(types, traits, kinds)]
    return kinds


def _kinds_of(
    types: Sequence[type], traits: dict[type, tuple[list[Any], list[Any]]]
) -> LeafKinds:
    """The kinds of leaves of these types. `traits` has those of the leaves of each."""
    kinds: dict[Any, int] = {}
    numbers: dict[type, Iterator[int]] = {}
    for cls, (first_traits, second_traits) in traits.items():
        # There are many leaves and few kinds: so traits are compared by identity, and
        # only those that are other objects by equality.
        second_traits = _unified(second_traits)
        ids = list(zip(map(id, first_traits), map(id, second_traits)))
        known: dict[tuple[int, int], int] = {}
        for both, at in dict(zip(ids, range(len(ids)))).items():
            kind = cls, first_traits[at], second_traits[at]
            is_known = first_traits[at] is not _UNKNOWN
            known[both] = kinds.setdefault(kind, len(kinds)) if is_known else NO_KIND
        numbers[cls] = map(known.__getitem__, ids)
    in_order = map(next, map(numbers.__getitem__, types))
    return LeafKinds(tuple(kinds), tuple(in_order))


def _unified(values: Sequence[Any]) -> list[Any]:
    """These values, those that are equal as one object: of shardings there may be
    many, and nearly all are equal to the one before."""
    equal: dict[Any, Any] = {}
    first: dict[int, Any] = {}
    last: Any = None
    for i, x in {id(x): x for x in values}.items():
        if x != last:
            last = equal.setdefault(x, x)
        first[i] = last
    return list(map(first.__getitem__, map(id, values)))


_UNKNOWN = object()
# The traits of concrete arrays of JAX.
_OF_JAX = operator.attrgetter("aval"), operator.attrgetter("sharding")


def _traits(
    cls: type, leaf: object
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The two functions of leaves of a type whose results, with the type, tell kinds
    apart. The first one gives `_UNKNOWN` where that cannot be."""
    nothing = operator.attrgetter("__class__")
    if _register.codec_of(cls) is not None:
        return lambda x: _UNKNOWN, nothing
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax_core.Tracer):
        return _OF_JAX
    if issubclass(cls, np.flexible):  # Texts of one dtype may have other bytes.
        return lambda x: _UNKNOWN, nothing
    if cls is np.ndarray or issubclass(cls, np.generic):
        return operator.attrgetter("dtype"), operator.attrgetter("shape")
    if cls in (bool, float, complex):
        return nothing, nothing
    if cls is int:
        return nothing, lambda n: -(2**63) <= n < 2**63 or len(int_bytes(n))
    return lambda x: _UNKNOWN, nothing


def recipe(leaf: object) -> str:
    """The way to make the type of a leaf one that is stored: the end of a sentence."""
    if isinstance(leaf, getattr(jax, "Ref", ())):
        return ": `ec.register_leaf(jax.Ref, lambda ref: ref[...], jax.new_ref)`"
    if isinstance(leaf, np.random.Generator):
        return ", or put its `bit_generator.state` in its place"
    place = _held.array_in(leaf)
    if place is not None and isinstance(leaf, ft.partial):
        return (
            f": it holds an array, `{place}`, so make it a "
            "`jax.tree_util.Partial`, which is a node"
        )
    if place is not None:
        return (
            f": it holds an array, `{place}`, so make it a node, as "
            "`jax.tree_util.register_dataclass` does, or a container that JAX knows"
        )
    return " with `register_leaf`"


def _template_of_jax(leaf: jax.Array, dtype: np.dtype | None) -> Template:
    if isinstance(leaf, jax_core.Tracer):
        raise ValueError("it is a tracer. Save outside of `jit`, `grad` and `vmap`.")
    if leaf.is_deleted():
        raise ValueError("it has been deleted or donated, and has no value any more.")
    if axes := _sharding.unreduced(leaf.sharding):
        raise ValueError(
            f"it is not reduced over the mesh axes {axes}: its shards are parts of "
            "sums. Reduce it first, with `jax.sharding.reshard`."
        )
    if is_key_dtype(leaf.dtype):
        data = jax.eval_shape(jr.key_data, leaf)
        _check_rank(data.ndim)
        impl = jr.key_impl(leaf)
        if not isinstance(impl, str):
            raise ValueError(f"its PRNG implementation {impl} has no registered name.")
        return Template("", "key", "key", data.shape, "uint32", (), False, impl)
    return array_template("jax", leaf.shape, leaf.dtype, dtype, leaf.weak_type)


@ft.cache
def is_key_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


# Most leaves are like some other one.
@ft.lru_cache(maxsize=4096)
def array_template(
    kind: str, shape: tuple[int, ...], dtype: Any, cast: np.dtype | None, weak: bool
) -> Template:
    _check_rank(len(shape))
    names = _stored_as(dtype)
    if names is None:
        raise TypeError(f"its dtype `{dtype}` cannot be stored. Store numbers.")
    if cast is not None and cast != dtype and _template.is_floating(dtype):
        names, weak = _stored_as(cast), False
        assert names is not None
    return Template("", kind, names[0], shape, names[1], (), weak)


def _check_rank(rank: int) -> None:
    if rank > _template.MAX_RANK:
        raise ValueError(
            f"it has {rank} axes, and TensorStore has at most {_template.MAX_RANK}."
        )


def check_cast(dtype: Any) -> np.dtype | None:
    """The `dtype` keyword of a save as a NumPy dtype."""
    if dtype is None:
        return None
    try:
        out = np.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(
            "`dtype` must be a floating dtype, such as `jnp.bfloat16`, not "
            f"{_arguments.shown(dtype)}."
        ) from None
    if not _template.is_floating(out) or _stored_as(out) is None:
        raise ValueError(f"`dtype` must be a floating dtype, not `{out}`.")
    return out


def encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def int_bytes(n: Any) -> bytes:
    return n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)


def shard_shape(leaf: object, template: Template) -> tuple[int, ...] | None:
    """The shape of the shards of the stored array, if it is to be stored in those."""
    if not isinstance(leaf, jax.Array) or is_whole(leaf.sharding):
        return None
    shape = template.logical_shape
    least = _grid.LEAST // template.itemsize
    shard = _sharding.shard_shape(leaf.sharding, shape, least)
    return None if shard is None else shard + template.shape[len(shape) :]


def holders(leaf: object, template: Template) -> _sharding.Holders | None:
    """The processes that have each region of the stored array of a leaf; None if it is
    each process's own."""
    if not isinstance(leaf, jax.Array) or is_local(leaf.sharding):
        return None
    shape = template.logical_shape
    return _sharding.holders(leaf.sharding, shape, template.shape[len(shape) :])


@ft.lru_cache(maxsize=1024)
def is_local(sharding: jax.sharding.Sharding) -> bool:
    return sharding.is_fully_addressable


@ft.lru_cache(maxsize=1024)
def is_whole(sharding: jax.sharding.Sharding) -> bool:
    """Whether this process has all of an array on each of its devices there."""
    # Nearly all leaves have few shardings, and this takes longer than the rest.
    return sharding.is_fully_replicated and bool(sharding.addressable_devices)


# These have no array of their own dtype, but one of what is stored.
NOT_ARRAYS = frozenset(("key", "str", "bytes", "int", "float0"))


class UnheldError(ValueError):
    """Numbers of an array that a dtype does not hold: how many of how many, one of
    them, and the dtype."""

    facts: tuple[int, int, Any, np.dtype]


def _unheld(count: int, total: int, example: object, dtype: np.dtype) -> UnheldError:
    more = "" if total == 1 else f" ({count} of {total} numbers do not)"
    error = UnheldError(f"{example} does not fit into {dtype}{more}")
    error.facts = count, total, example, dtype
    return error


def told(errors: Sequence[ValueError], total: int) -> str:
    """One message about a leaf of `total` numbers, from the errors of its parts."""
    if not errors:
        return ""
    parts = [e for e in errors if isinstance(e, UnheldError)]
    if len(parts) < len(errors):
        return str(errors[0])
    counts, _, examples, dtypes = zip(*(e.facts for e in parts))
    return str(_unheld(sum(counts), total, examples[0], dtypes[0]))


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats as other floats, and ints as other ints.

    **Raises:** `UnheldError` for ints that the dtype does not have, and for finite
    numbers that would become infinite or NaN.
    """
    is_checked = array.size and not _holds_all(dtype, array.dtype)
    is_int = _template.number_type(dtype) == "int"
    if is_checked and is_int:
        _check_lossless(_outside(array, dtype), array, dtype)
    out = astype(array, dtype)
    if is_checked and not is_int:
        _check_lossless(_overflowing(array, out), array, dtype)
    return out


def _check_lossless(lost: Any, array: np.ndarray, dtype: np.dtype) -> None:
    count = int(np.count_nonzero(lost))
    if count:
        example = array.reshape(-1)[np.argmax(lost)]
        raise _unheld(count, array.size, example, dtype)


def _outside(array: np.ndarray, dtype: np.dtype) -> Any:
    """Which ints a dtype does not have."""
    low, high = _range(dtype)
    if low <= int(array.min()) and int(array.max()) <= high:
        return False
    whole = array.astype(object)
    return (whole < low) | (whole > high)


def _overflowing(array: np.ndarray, out: np.ndarray) -> Any:
    """Which finite numbers have become something else that is far from them."""
    if out.dtype.kind == "c":
        real = _overflowing(np.real(array), np.real(out))
        return real | _overflowing(np.imag(array), np.imag(out))
    low, high = _range(out.dtype)
    with np.errstate(invalid="ignore"):
        # Nearly always this is all that is looked at. It is false of NaN.
        if low <= float(array.min()) and float(array.max()) <= high:
            return False
        if _has_nan(out.dtype):
            return np.isfinite(array) & ~np.isfinite(out)
        # There the largest number stands for all that are larger.
        step = float(ml_dtypes.finfo(out.dtype).eps) * 2.0 ** math.floor(
            math.log2(high)
        )
        return ~(np.abs(array.astype(np.float64)) <= high + step / 2)


@ft.cache
def _holds_all(dtype: np.dtype, other: np.dtype) -> bool:
    """Whether a dtype has all finite numbers of another one, or nearly the same."""
    if other.kind == "O" or _template.number_type(dtype) not in (
        "int",
        "float",
        "complex",
    ):
        return other.kind != "O"
    (low, high), (least, most) = _range(dtype), _range(other)
    return low <= least and most <= high and (_has_nan(dtype) or dtype == other)


@ft.cache
def _range(dtype: np.dtype) -> tuple[Any, Any]:
    """The least and the largest number of a dtype, or of the parts of complex ones."""
    dtype = dtype.newbyteorder("=")
    if _template.number_type(dtype) == "int":
        whole = ml_dtypes.iinfo(dtype)
        return int(whole.min), int(whole.max)
    if dtype.kind == "c":
        dtype = np.finfo(dtype).dtype
    info = ml_dtypes.finfo(dtype)
    return float(info.min), float(info.max)


@ft.cache
def _has_nan(dtype: np.dtype) -> bool:
    if _template.number_type(dtype) == "int":
        return True
    return bool(np.isnan(astype(np.full(1, np.nan, np.float32), dtype)).any())


def astype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts like JAX: too large a number becomes infinite, without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        if array.dtype.itemsize == dtype.itemsize == 1:
            # Not all pairs of small dtypes have a cast; these hold all of their values.
            array = array.astype("f4" if _template.is_floating(dtype) else "i2")
        return array.astype(dtype)


@ft.cache
def key_dtype(impl: str) -> Any:
    """The extended dtype of typed PRNG keys of an implementation.

    **Raises:** `ValueError` for one that this process does not have.
    """
    try:
        return jax.eval_shape(lambda: jr.key(0, impl=impl)).dtype
    except ValueError as e:
        raise ValueError(
            f"JAX does not know the PRNG implementation {impl!r} in this process. "
            "Define it before the key is used."
        ) from e


@ft.cache
def key_shape(impl: str) -> tuple[int, ...]:
    """The shape of the data of one key of a PRNG implementation."""
    key = jax.ShapeDtypeStruct((), key_dtype(impl))
    return jax.eval_shape(jr.key_data, key).shape


def abstract(template: Template) -> jax.ShapeDtypeStruct:
    """A stored leaf as `jax.eval_shape` would have it."""
    dtype, shape = abstract_dtype(template), template.logical_shape
    if template.kind in ("str", "bytes"):
        shape = template.shape
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=template.weak)


def stand_in(kind: str, abstract: jax.ShapeDtypeStruct) -> Any:
    """A leaf of the same kind, shape and dtype as one that is not read, for filters."""
    if kind in PLAIN:
        return PLAIN[kind]()
    if kind in ("numpy", "generic"):
        zero = np.zeros((), abstract.dtype)
        return np.broadcast_to(zero, abstract.shape) if kind == "numpy" else zero[()]
    return abstract


def abstract_dtype(template: Template) -> Any:
    if template.kind == "key":
        assert template.impl is not None
        return key_dtype(template.impl)
    if template.kind in ("str", "bytes"):
        return np.dtype(np.uint8)
    return np.dtype(np.int64) if template.dtype == "int" else saved_dtype(template)


def saved_dtype(template: Template) -> np.dtype:
    if template.dtype == "int":
        return np.dtype(np.object_)
    return _template.dtype_of(template.dtype)
