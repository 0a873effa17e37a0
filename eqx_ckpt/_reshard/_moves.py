"""Arrays that move over devices, along their routes, as unsigned integers. What the
*digits* of a route are is said in `_routes`.

XLA's collectives do not keep the bits of small floats that are NaN, and end the process
for some numbers of less than a byte.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._kernel._format import _template
from .._kernel._tree import _from_host, _sharding
from .._kernel._tree._sharding import Region
from . import _routes
from ._routes import Layout, Route


class ArrayMove(NamedTuple):
    """The route of an array to its sharding, and the mesh of that with an axis for each
    digit of the route."""

    route: Route
    sharding: NamedSharding
    mesh: Mesh

    @property
    def first(self) -> NamedSharding:
        """The sharding that it is read with."""
        return _sharding_of(self.mesh, self.route.first)

    def regions(self) -> list[Region]:
        """The parts that this process reads; some of what is padded are empty."""
        shape, padded = self.route.shape, self.route.padded
        return [
            tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(region, shape))
            for region in _sharding.here(self.first, padded)
        ]

    def begin(self, parts: Sequence[np.ndarray]) -> "list[np.ndarray] | jax.Array":
        """An array that is read in these parts, to be moved; of a small one its bits,
        which are to go together with others."""
        size = math.prod(self.route.padded) * parts[0].dtype.itemsize
        bits = self.bits(parts)
        return bits if size < _from_host.SMALL_BYTES else self.together([bits])

    def bits(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bits of an array that is read in these parts; of complex numbers both
        halves of each, along a last axis."""
        padded = self.first.shard_shape(self.route.padded)
        dtype = parts[0].dtype
        halves = (2,) if dtype.kind == "c" else ()
        carrier = np.dtype(f"uint{8 * dtype.itemsize // (2 if halves else 1)}")
        return [
            np.ascontiguousarray(x).view(carrier).reshape(*padded, *halves)
            for x in (_padded(part, padded) for part in parts)
        ]

    def together(self, arrays: Sequence[Sequence[np.ndarray]]) -> jax.Array:
        """Arrays whose bits are in such parts, along a new first axis."""
        parts = [x[0][None] if len(x) == 1 else np.stack(x) for x in zip(*arrays)]
        padded = self.route.padded
        shape = (len(arrays), *padded, *parts[0].shape[1 + len(padded) :])
        first = _sharding_of(self.mesh, ((), *self.route.first))
        return _sharding.assemble(first, shape, parts, parts[0].dtype)


@ft.lru_cache(maxsize=4096)
def move(
    sharding: NamedSharding, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> ArrayMove | None:
    """The move of an array of such chunks to a sharding; None if there is no way."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    processes = tuple(device.process_index for device in mesh.devices.flat)
    digits = _routes.digits(mesh.devices.shape, processes)
    if digits is None:
        return None
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    target = tuple(
        tuple(
            digit
            for name in (entry if isinstance(entry, tuple) else (entry,))
            if name is not None
            for digit in digits.axes[mesh.axis_names.index(name)]
        )
        for entry in entries
    )
    route = _routes.plan(digits, shape, chunk, target)
    return None if route is None else along(route, sharding)


def along(route: Route, sharding: NamedSharding) -> ArrayMove:
    """The move along a route on the devices of a sharding, in their order."""
    mesh, sizes = sharding.mesh, route.digits.sizes
    assert isinstance(mesh, Mesh)
    names = _names(tuple(range(len(sizes))))
    return ArrayMove(route, sharding, Mesh(mesh.devices.reshape(sizes), names))


def is_default_memory(sharding: NamedSharding) -> bool:
    """Whether arrays of a sharding are where those of its devices are by default."""
    assert isinstance(sharding.mesh, Mesh)
    device = sharding.mesh.devices.flat[0]
    return sharding.memory_kind in (None, device.default_memory().kind)


def _names(axes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"digit{digit}" for digit in axes)


@ft.lru_cache(maxsize=4096)
def _sharding_of(mesh: Mesh, layout: Layout) -> NamedSharding:
    return NamedSharding(mesh, _spec(layout))


def _spec(layout: Layout) -> PartitionSpec:
    return PartitionSpec(*(_names(axes) or None for axes in layout))


# ---- Bits.


def _padded(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if part.shape == shape:
        return part
    out = np.zeros(shape, part.dtype)
    out[tuple(map(slice, part.shape))] = part
    return out


@ft.lru_cache(maxsize=1024)
def compiled(
    move: ArrayMove, shape: tuple[int, ...], carrier: np.dtype, dtype: np.dtype
) -> Any:
    """The program that moves arrays which are `together`, as bits of this shape and of
    the dtype `carrier`. It gives arrays of `dtype`, sharded as was asked for."""
    route, count = move.route, shape[0]

    def run(bits: jax.Array) -> tuple[jax.Array, ...]:
        if route.first != route.second:
            used, pairs = _routes.handed_on(route)
            bits = jax.lax.ppermute(bits, _names(used), pairs)
        for axes, fro, to in route.exchanges:
            bits = jax.lax.all_to_all(bits, _names(axes), to + 1, fro + 1, tiled=True)
        for axes, dim in route.gathers:
            bits = jax.lax.all_gather(bits, _names(axes), axis=dim + 1, tiled=True)
        # What is padded is whole by now.
        whole = tuple(map(slice, route.shape))
        return tuple(_from_bits(one[whole], dtype) for one in bits)

    first = _sharding_of(move.mesh, ((), *route.first))
    mapped = jax.shard_map(
        run,
        mesh=move.mesh,
        in_specs=first.spec,
        out_specs=(_spec(route.target),) * count,
        check_vma=False,
    )
    bits = jax.ShapeDtypeStruct(shape, carrier, sharding=first)
    return jax.jit(mapped, out_shardings=(move.sharding,) * count).lower(bits).compile()


def _from_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    if bits.dtype == dtype:
        return bits
    if dtype == np.bool_:
        return bits != 0
    if dtype.kind == "c":
        halves = jax.lax.bitcast_convert_type(bits, f"float{4 * dtype.itemsize}")
        return jax.lax.complex(halves[..., 0], halves[..., 1])
    if _template.bits(dtype) == 4:
        bits = bits.astype(jnp.uint4)
    return jax.lax.bitcast_convert_type(bits, dtype)
