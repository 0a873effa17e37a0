"""Where the parts of a sharded array lie: regions of it, and devices that have them."""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from .._format._leaves import Region


_Ends = tuple[tuple[int, int], ...]


def _ends(index: Sequence[slice], shape: Sequence[int]) -> _Ends:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape))


def _region(ends: _Ends) -> Region:
    return tuple(slice(start, stop) for start, stop in ends)


def whole(shape: Sequence[int]) -> Region:
    return tuple(slice(0, n) for n in shape)


@ft.lru_cache(maxsize=4096)
def here(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[Region]:
    """The distinct regions that this process has of an array of this shape."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    ends = dict.fromkeys(_ends(index or (), shape) for index in indices)
    return list(map(_region, ends))


@ft.lru_cache(maxsize=1024)
def processes(sharding: jax.sharding.Sharding) -> frozenset[int]:
    """The processes whose devices have parts of an array."""
    return frozenset(device.process_index for device in sharding.device_set)


# Distinct regions of an array, each with the processes that have it, in order.
Holders = tuple[tuple[Region, tuple[int, ...]], ...]


@ft.lru_cache(maxsize=4096)
def holders(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    rest: tuple[int, ...] = (),
) -> Holders:
    """The processes that have each region of an array of this shape, with all of the
    axes that it has besides. Arrays that are alike have the same object."""
    if rest:
        some = holders(sharding, shape)
        return tuple((region + whole(rest), own) for region, own in some)
    found: dict[_Ends, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ends = _ends(index or (), shape)
        found.setdefault(ends, set()).add(device.process_index)
    return joined(found, shape)


def joined(found: dict[_Ends, set[int]], shape: tuple[int, ...]) -> Holders:
    """The regions, those of each process taken together where they are one region."""
    own: dict[int, list[_Ends]] = {}
    for ends, processes in found.items():
        for process in processes:
            own.setdefault(process, []).append(ends)
    boxes: dict[_Ends, set[int]] = {}
    for process, regions in own.items():
        axes = [list(zip(*axis)) for axis in zip(*regions)]
        box = tuple((min(starts), max(stops)) for starts, stops in axes)
        boxes.setdefault(box, set()).add(process)
        if _volume(box) != sum(map(_volume, regions)):
            boxes = found
            break
    if sum(map(_volume, boxes)) != math.prod(shape):
        boxes = found
    return tuple((_region(ends), tuple(sorted(ps))) for ends, ps in boxes.items())


def _volume(ends: _Ends) -> int:
    return math.prod(stop - start for start, stop in ends)


@ft.lru_cache(maxsize=4096)
def shard_shape(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], least: int
) -> tuple[int, ...] | None:
    """The shape of the shards of an array that is cut into several, else None.

    Shards of fewer than `least` elements do not count by themselves, but only all that
    a process has.
    """
    if sharding.num_devices == 1 or sharding.is_fully_replicated or 0 in shape:
        return None
    shard = tuple(sharding.shard_shape(shape))
    if math.prod(shard) < least:
        regions = [region for region, _ in holders(sharding, shape)]
        sizes = {tuple(s.stop - s.start for s in region) for region in regions}
        if len(sizes) == 1:
            shard = sizes.pop()
    return None if shard == shape else shard


class Shards(NamedTuple):
    """An array in parts, which together are all of it, or what this process has of it.
    They are on the host (NumPy) or on devices."""

    regions: list[Region]
    parts: list[Any]


def shards_of(array: jax.Array) -> Shards:
    """The distinct shards that this process has: of replicas, the first."""
    if array.sharding.num_devices == 1 and array.is_fully_addressable:
        return Shards([whole(array.shape)], [array])
    found: dict[_Ends, Any] = {}
    for shard in array.addressable_shards:
        found.setdefault(_ends(shard.index, array.shape), shard.data)
    return Shards([_region(ends) for ends in found], list(found.values()))


def pieces(
    regions: Sequence[Region], wanted: Region
) -> list[tuple[int, Region, Region]]:
    """The pieces that make up a wanted region: the number of the part that each is of,
    its region in that part, and its region in the wanted one.

    **Raises:** `ValueError` if the regions, which do not overlap, do not hold it all.
    """
    out = []
    count = 0
    for number, region in enumerate(regions):
        both = [
            (max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(region, wanted)
        ]
        if any(start >= stop for start, stop in both):
            continue
        fro = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, region))
        to = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, wanted))
        out.append((number, fro, to))
        count += math.prod(b - a for a, b in both)
    if count != math.prod(s.stop - s.start for s in wanted):
        raise ValueError(f"this process does not have all of the region {wanted}")
    return out


def assemble(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    parts: Sequence[Any],
    dtype: Any,
) -> jax.Array:
    """An array of the regions that this process has of it, in the order of `here`:
    none, if the devices are those of other processes."""
    if not parts:
        return jax.make_array_from_single_device_arrays(
            shape, sharding, [], dtype=dtype
        )
    ends = [_ends(region, shape) for region in here(sharding, shape)]
    part_of = dict(zip(ends, parts, strict=True))
    get = lambda index: part_of[_ends(index, shape)]
    return jax.make_array_from_callback(shape, sharding, get, dtype)


def check_here(sharding: Any) -> None:
    """**Raises:** `TypeError` for devices of other processes only, if this version of
    JAX has no arrays without a shard."""
    if sharding is None or sharding.addressable_devices:
        return
    if not getattr(jax.config, "jax_enable_empty_arrays", True):
        raise TypeError(
            "Its sharding has no device of this process. JAX "
            f"{jax.__version__} has such arrays only after "
            '`jax.config.update("jax_enable_empty_arrays", True)`: call that first.'
        )


def unreduced(sharding: object) -> list[str]:
    """The mesh axes over which the shards are parts of sums, and not of the array."""
    spec = getattr(sharding, "spec", None)
    return sorted(map(str, getattr(spec, "unreduced", ())))


def of_leaf(
    sharding: object, name: str, leaf: jax.ShapeDtypeStruct
) -> jax.sharding.Sharding | None:
    """The sharding of one leaf: what is given for many, or what a function gives for
    its name and for the leaf.

    **Raises:** `TypeError` for what is no sharding; `ValueError` for one that does not
    fit the leaf.
    """
    found: Any = sharding(name, leaf) if callable(sharding) else sharding
    if found is None:
        return None
    if not isinstance(found, jax.sharding.Sharding):
        raise TypeError(
            f"The leaf `{name}` gets a `{type(found).__name__}` as its sharding: that "
            "is a `NamedSharding` or such."
        )
    if why := misfit(found, leaf.shape):
        raise ValueError(f"The sharding of the leaf `{name}` does not fit it: {why}")
    return found


def misfit(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Why a sharding cannot cut a shape, and what to do; "" if it can."""
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as e:
        why = "it has more axes" if isinstance(e, IndexError) else e
        return (
            f"{why}. Shard only axes that the devices divide evenly: "
            "`PartitionSpec()` shards none, and replicates the leaf."
        )
    return ""


@ft.lru_cache(maxsize=4096)
def text(sharding: jax.sharding.Sharding) -> str:
    """A sharding as it is shown: its specification and its mesh. "" on one device."""
    if sharding.num_devices == 1:
        return ""
    if isinstance(sharding, NamedSharding):
        axes = ", ".join(f"{name}={n}" for name, n in sharding.mesh.shape.items())
        return f"P({', '.join(map(repr, sharding.spec))}) on {axes}"
    return f"{type(sharding).__name__} on {sharding.num_devices} devices"
