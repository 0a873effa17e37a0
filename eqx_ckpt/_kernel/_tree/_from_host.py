"""The making of a leaf from its stored array."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np
from jax._src import lib as _jaxlib

from .._format import _template
from .._format._template import Template
from . import _codec, _guards, _leaf, _register, _sharding, _target
from ._target import Target


def result_dtype(template: Template, target: Target) -> np.dtype:
    """The dtype that a leaf gets, which JAX may have narrowed."""
    wanted = _target.wanted_dtype(template, target)
    if target.kind == "jax":
        wanted = jax.dtypes.canonicalize_dtype(wanted)
    return wanted


def regions(target: Target) -> list[tuple[slice, ...]] | None:
    """The parts of a leaf that are read each into memory of its own, for the devices of
    this process; None if it is read as one."""
    sharding = target.sharding
    if sharding is None or target.kind not in ("jax", "key"):
        return None
    is_one = target.kind == "key" or _leaf.is_whole(sharding)
    if is_one and _leaf.is_local(sharding):
        return None
    return _sharding.here(sharding, target.shape)


class Conversion(NamedTuple):
    """A conversion of the numbers of an array, all of it or some at a time. Equal ones
    do the same.

    `saved` and `dtype` are what numbers are and become, and `may_change` says whether
    they may lose digits. `narrowed` is a dtype that was asked for, and that JAX would
    narrow to `dtype`: there is no such array then."""

    saved: np.dtype
    dtype: np.dtype
    may_change: bool
    narrowed: np.dtype | None

    def convert(self, array: np.ndarray) -> np.ndarray:
        """**Raises:** `ValueError` for numbers that do not survive it."""
        if self.narrowed is not None:
            raise ValueError(
                f"JAX would narrow {self.narrowed} to {self.dtype}: set "
                "`jax_enable_x64`, or read it into NumPy, as `np.asarray` does"
            )
        array = array.view(self.saved)
        if self.may_change:
            return _leaf.cast(array, self.dtype)
        out = _leaf.astype(array, self.dtype)
        if array.size:
            # One scalar as another kind of scalar: it has to be the same number.
            value, back = complex(array.item()), complex(out.item())
            for x, y in ((value.real, back.real), (value.imag, back.imag)):
                if x != y and not (math.isnan(x) and math.isnan(y)):
                    raise ValueError(f"{array.item()} is not a {self.dtype} exactly")
        return out


def conversion(template: Template, target: Target) -> Conversion | None:
    """The conversion that `from_host` would do, if there is one."""
    if template.dtype in _leaf.NOT_ARRAYS or target.kind not in _template.ARRAY_KINDS:
        return None
    if _target.is_as_saved(template, target):
        return None
    dtype, wanted = _template.dtype_of(template.dtype), result_dtype(template, target)
    return None if dtype == wanted else _conversion(dtype, wanted, target)


def _conversion(saved: np.dtype, wanted: np.dtype, target: Target) -> Conversion:
    may_change = target.cast or _template.number_type(wanted) == "int"
    is_narrowed = target.kind == "jax" and target.dtype != wanted and not target.cast
    return Conversion(saved, wanted, may_change, target.dtype if is_narrowed else None)


def from_host(
    arrays: Sequence[np.ndarray],
    template: Template,
    target: Target,
    owned: bool,
    converted: bool = False,
) -> Any:
    """The leaf that `target` asks for, of the stored array, or of its `regions`.

    `owned` says that nobody else has their memory: it may become the leaf's;
    `converted` that they come out of the leaf's `conversion`.
    **Raises:** `ValueError` when the value does not survive the conversion.
    """
    if target.registered is not None:
        plain = target._replace(registered=None)
        leaf = from_host(arrays, template, plain, owned, converted)
        return _register.from_leaf(target.registered, leaf)
    if target.kind not in ("jax", "key") or template.dtype == "float0":
        return _one_from_host(arrays[0], template, target, owned, converted)
    with _guards.lifted():
        return as_weak(_on_devices(arrays, template, target, owned, converted), target)


def _on_devices(
    arrays: Sequence[np.ndarray],
    template: Template,
    target: Target,
    owned: bool,
    converted: bool,
) -> jax.Array:
    if target.sharding is None or regions(target) is None:
        return _one_from_host(arrays[0], template, target, owned, converted)
    if target.kind == "key":
        # Each shard alone: a computation with all of the array takes all processes.
        keys = [_to_key(x, target) for x in arrays]
        dtype = _leaf.key_dtype(str(target.impl))
        return _sharding.assemble(target.sharding, target.shape, keys, dtype)
    parts = host_parts(arrays, template, target, owned, converted)
    dtype = result_dtype(template, target)
    return _sharding.assemble(target.sharding, target.shape, parts, dtype)


def host_parts(
    arrays: Sequence[np.ndarray],
    template: Template,
    target: Target,
    owned: bool,
    converted: bool,
) -> list[np.ndarray]:
    """The parts of a leaf on devices, as their numbers will be; of keys, their data."""
    if target.kind == "key":
        return list(arrays)
    host = target._replace(kind="numpy", dtype=result_dtype(template, target))
    return [_one_from_host(x, template, host, owned, converted) for x in arrays]


def as_weak(array: Any, target: Target) -> jax.Array:
    """An array with the weak type that `target` asks for, in the same memory."""
    if not target.weak:
        return array
    # JAX has no public function for this but those of `jax.numpy`, which compile a
    # program for each shape and have the dtypes of Python's numbers alone. Of this one
    # `array` is left to itself.
    sharding, make = array.sharding, type(array)
    is_one = sharding.num_devices == 1 and _leaf.is_local(sharding)
    parts = [array] if is_one else [shard.data for shard in array.addressable_shards]
    aval = array.aval.update(weak_type=True)
    return make(aval, sharding, parts, array.committed, _skip_checks=True)


def _one_from_host(
    array: np.ndarray,
    template: Template,
    target: Target,
    owned: bool,
    converted: bool = False,
) -> Any:
    if target.kind in ("str", "bytes"):
        data = array.tobytes()
        out = data if target.kind == "bytes" else data.decode("utf-8", "surrogatepass")
        return _of_class(out, target.python or type(out))
    if target.kind == "key":
        key = _to_key(array, target)
        return key if target.sharding is None else jax.device_put(key, target.sharding)
    if template.dtype == "float0":
        array = np.zeros(template.shape, jax.dtypes.float0)
        return array[()] if target.kind == "generic" else array
    if template.dtype == "int":
        value = int.from_bytes(array.tobytes(), "little", signed=True)
        array, owned = np.asarray(value, object), True
    elif not converted:
        (array,) = viewed([array], template)
    # Nearly all leaves skip this. Numbers of 64 bits are those that JAX may narrow.
    if not converted and (array.dtype != target.dtype or array.dtype.itemsize > 4):
        wanted = result_dtype(template, target)
        if array.dtype != wanted:
            array = _conversion(array.dtype, wanted, target).convert(array)
            owned = True
    if target.kind == "jax":
        # Unlike `jnp.array` this compiles no program for each shape.
        return jax.device_put(array if owned else array.copy(), target.sharding)
    if target.kind == "numpy":
        assert target.dtype is not None
        return array.astype(target.dtype, copy=not owned)
    if target.kind == "generic":
        return array.astype(target.dtype)[()]
    python = target.python or _leaf.PYTHON[target.kind]
    return _of_class(array.item(), python)


def _of_class(value: Any, python: type) -> Any:
    """A number or a text as one of a class, which may be a subclass such as an enum.

    **Raises:** `ValueError` unless the class makes of it what it is.
    """
    if type(value) is python:
        return value
    try:
        made = python(value)
    except Exception as e:
        raise ValueError(f"`{python.__name__}` cannot be made of it: {e}") from e
    plain = next(base for base in _leaf.PLAIN.values() if issubclass(python, base))
    # The `repr` of a float tells its bits, as `==` does not.
    same = isinstance(made, python) and repr(_BARE[plain](made)) == repr(plain(value))
    if not same:
        raise ValueError(
            f"`{python.__name__}({value!r:.60})` is {made!r:.60}, and not that value. "
            "Give the class to `register_leaf`"
        )
    return made


_BARE: dict[type, Callable[[Any], Any]] = {
    **_codec.BARE,
    bool: bool,
    complex: complex.__complex__,
    bytes: bytes.__bytes__,
}


def viewed(arrays: list[np.ndarray], template: Template) -> list[np.ndarray]:
    """Stored arrays as arrays of the dtype that was saved, where there is one."""
    if template.stored == template.dtype or template.dtype in _leaf.NOT_ARRAYS:
        return arrays
    dtype = _template.dtype_of(template.dtype)
    return [array.view(dtype) for array in arrays]


def _to_key(array: np.ndarray, target: Target) -> jax.Array:
    return as_key(jax.device_put(array.copy()), target)


def as_key(data: jax.Array, target: Target) -> jax.Array:
    return jr.wrap_key_data(data, impl=target.impl)


# ---- Leaves that need nothing but their array.

# Leaves of fewer bytes are small.
SMALL_BYTES = 1 << 16
# None where JAX no longer has it.
_put: Any = getattr(getattr(_jaxlib, "xla_client", None), "batched_device_put", None)


class PlainLeaves:
    """Leaves for which a target asks for no more than arrays, or keys, that are bound
    to no device: they are made of arrays of this `dtype_and_shape`. `waiting` has those
    that are to be made, each with its number."""

    def __init__(self, target: Target, dtype: np.dtype, shape: tuple[int, ...]):
        self._target, self.is_numpy = target, target.kind == "numpy"
        self.dtype_and_shape = dtype, shape
        self.waiting: list[tuple[int, np.ndarray]] = []

    def make(self, out: list[Any]) -> list[jax.Array]:
        """Makes the leaves that wait, which may have the memory of their arrays, and
        lays them `out` by number."""
        arrays = [array for _, array in self.waiting]
        made = [jax.device_put(arrays[0])]
        if len(arrays) > 1:
            made += _put_like(made[0], arrays[1:])
        if self._target.kind == "key":
            made = [as_key(x, self._target) for x in made]
        elif self._target.weak:
            made = [as_weak(x, self._target) for x in made]
        for (number, _), leaf in zip(self.waiting, made):
            out[number] = leaf
        self.waiting.clear()
        return made


def _put_like(first: jax.Array, arrays: Sequence[np.ndarray]) -> Iterable[jax.Array]:
    """Puts arrays on devices that are like the `first`, made by `jax.device_put`.

    That finds out anew where each goes, which takes five times as long as to take it
    there. The function that it ends in is private, and may change.
    """
    aval, sharding, is_bound = first.aval, first.sharding, first.committed
    devices = list(first.devices())
    if len(devices) == 1:
        with contextlib.suppress(TypeError):
            return [_put(aval, sharding, [x], devices, is_bound) for x in arrays]
    return map(jax.device_put, arrays)


def plain_leaves(target: Target) -> PlainLeaves | None:
    """The way to make the leaves of a target, if they are plain."""
    if target.sharding is not None or target.registered is not None:
        return None
    dtype = target.dtype
    if target.kind == "key":
        shape = target.shape + _leaf.key_shape(str(target.impl))
        return PlainLeaves(target, np.dtype(np.uint32), shape)
    if dtype is None or target.kind not in ("jax", "numpy"):
        return None
    if target.kind == "jax" and dtype != jax.dtypes.canonicalize_dtype(dtype):
        return None
    return PlainLeaves(target, dtype, target.shape)
