"""The numbers of a leaf on the host, bit for bit: all of them, or by regions."""

import collections
import contextlib
import functools as ft
import itertools as it
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._format import _template
from .._format._template import Template
from . import _from_host, _guards, _leaf, _sharding
from ._sharding import Shards


def owned(array: object) -> np.ndarray:
    """The elements of an array, in memory that nobody else writes to.

    That of a jax.Array on CPU may be that of a NumPy array, or of another framework's:
    nothing tells.
    """
    return np.array(as_numpy(array), order="C")


class StagedArray(np.ndarray):
    """A copy that `stage` has made. Its class tells that nobody writes to its memory:
    an array that cannot be written to may have older views that can."""


def stage(leaf: object, template: Template) -> Any:
    """A leaf that stays as it is now, whatever becomes of the caller's.

    On accelerators its copy to the host has been started, and it stays only once that
    has arrived: see `is_staged` and `collect`. A lazy leaf has no memory of the
    caller's: arrays in memory that it is computed of are `owned` since it was made.
    """
    if isinstance(leaf, np.ndarray):
        return owned(leaf).view(StagedArray)
    if isinstance(leaf, Shards):
        return leaf._replace(parts=list(map(_stage_part, leaf.parts)))
    if not isinstance(leaf, jax.Array):
        return leaf
    return stage(_in_parts(leaf, template), template)


def is_frozen(array: np.ndarray) -> bool:
    """Whether an array was staged: it has its own memory, and nobody writes to that."""
    return array.flags.owndata and not array.flags.writeable


@_guards.lifted()
def _stage_part(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return owned(part)
    return owned(part) if _in_host_memory(part) else _send([part])[0]


# JAX's name of memory of the host that a device reaches by itself. A copy into other
# memory goes through a buffer of the driver's, at a fraction of the speed of the bus.
_PINNED = "pinned_host"


@ft.lru_cache(maxsize=1024)
def _pinned(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
    """Pinned memory of a device, which a sharding says; None if it has none."""
    (device,) = sharding.device_set
    if all(memory.kind != _PINNED for memory in device.addressable_memories()):
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)


def _send(parts: list[jax.Array]) -> list[jax.Array]:
    """Copies of arrays of one device, which are on their way to the host."""
    pinned = _pinned(parts[0].sharding)
    if pinned is not None:
        return jax.device_put(parts, pinned)
    # The copies on the host would stay with the caller's leaves as long as those live:
    # these are other jax.Arrays of the same memory.
    make = jax.make_array_from_single_device_arrays
    own: list[jax.Array] = [make(x.shape, x.sharding, [x]) for x in parts]
    for array in own:
        array.copy_to_host_async()
    return own


def _in_host_memory(part: jax.Array) -> bool:
    """Whether an array of an accelerator lies in memory of the host."""
    return part.sharding.memory_kind in (_PINNED, "unpinned_host")


@_guards.lifted()
def _in_parts(leaf: jax.Array, template: Template) -> np.ndarray | Shards:
    """The parts of an array, or of the data of keys: on CPU as NumPy has them, without
    a copy, and as one array if this process has all of it."""
    if template.kind == "key":
        leaf = jr.key_data(leaf)
    on_cpu = _on_cpu(leaf.sharding)
    if on_cpu and _leaf.is_whole(leaf.sharding):
        return np.asarray(leaf)
    shards = _sharding.shards_of(leaf)
    return collect(shards) if on_cpu else shards


def on_device(leaf: object) -> bool:
    """Whether a copy to the host takes a leaf's values over from an accelerator."""
    return isinstance(leaf, jax.Array) and not _on_cpu(leaf.sharding)


def is_staged(value: object) -> bool:
    if not isinstance(value, Shards):
        return True
    return not any(isinstance(part, (jax.Array, _JoinedShard)) for part in value.parts)


class _JoinedShard(NamedTuple):
    """One of some arrays that were joined on their device: what waits for these, and
    its number there."""

    arrived: Callable[[], np.ndarray]
    number: int
    dtype: np.dtype


def send_together(leaves: Sequence[Any], template: Template) -> list[Shards] | None:
    """Small leaves of one template, whose copies to the host have been started: see
    `collect`. None unless all lie on accelerators."""
    if not all(map(on_device, leaves)):
        return None
    alike: collections.defaultdict[Any, list[int]] = collections.defaultdict(list)
    with _guards.lifted():
        arrays = map(jr.key_data, leaves) if template.kind == "key" else leaves
        shards = list(map(_sharding.shards_of, arrays))
        parts = [part for one in shards for part in one.parts]
        for number, part in enumerate(parts):
            kind = part.sharding, part.dtype, part.shape, part.weak_type
            alike[kind].append(number)
        for numbers in alike.values():
            for number, copy in zip(numbers, _send_alike([parts[n] for n in numbers])):
                parts[number] = copy
    copies = iter(parts)
    return [x._replace(parts=list(it.islice(copies, len(x.parts)))) for x in shards]


def _send_alike(parts: list[jax.Array]) -> list[Any]:
    """Copies of small arrays of one shape and device. Many are joined on the device: a
    transfer takes longer than its bytes."""
    first, step, sent = parts[0], _TOGETHER, []
    if _in_host_memory(first):
        return list(map(owned, parts))
    is_many = len(parts) >= step and _is_joined(first)
    if is_many and _is_often(first, len(parts)):
        starts, stack = range(0, len(parts) - step + 1, step), _stack(first.sharding)
        joined = _send([stack(parts[start : start + step]) for start in starts])
        joined = [ft.cache(ft.partial(as_numpy, x)) for x in joined]
        dtype = first.dtype
        sent = [_JoinedShard(x, n, dtype) for x in joined for n in range(step)]
    rest = parts[len(sent) :]
    return sent + _send(rest) if rest else sent


# So many are joined by one call of a compiled function. So many of one shape and dtype,
# over all saves of this process, are worth its compilation.
_TOGETHER, _MANY = 32, 1024
_seen: collections.Counter[tuple[np.dtype, tuple[int, ...]]] = collections.Counter()


def _is_often(part: jax.Array, count: int) -> bool:
    """Whether the function is worth its compilation, for `count` more of a kind."""
    if part.nbytes >= _from_host.SMALL_BYTES:
        return False
    kind = np.dtype(part.dtype), part.shape
    _seen[kind] += count
    # Under `jax.set_mesh` it would put them on all devices of the mesh.
    return _seen[kind] >= _MANY and jax.sharding.get_abstract_mesh().empty


def _is_joined(part: jax.Array) -> bool:
    # XLA ends the process where it is to join arrays of less than a byte a number.
    is_plain = part.dtype.itemsize > 1 or part.dtype.isbuiltin == 1
    is_held = jax.dtypes.canonicalize_dtype(part.dtype) == part.dtype
    return is_plain and is_held and _pinned(part.sharding) is not None


@ft.lru_cache(maxsize=1024)
def _stack(sharding: jax.sharding.Sharding) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda xs: jnp.stack(list(map(_bits, xs))), out_shardings=sharding)


def _bits(x: jax.Array) -> jax.Array:
    """Numbers that XLA may compute with as others on their way, as integers."""
    if x.dtype.isbuiltin == 1:
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def collect(value: Shards) -> Shards:
    """The parts of a leaf as NumPy has them: waits for copies that are on their way."""
    return value._replace(parts=list(map(as_numpy, value.parts)))


class Payload:
    """A stand-in for the value of a leaf, which gives the bytes that are stored."""

    __slots__ = ()

    def read(self, regions: Iterable[tuple[slice, ...]]) -> Iterator[np.ndarray]:
        """The elements that are stored, for each of some regions in turn."""
        raise NotImplementedError

    def digests(self, chunks: range) -> bytes | None:
        """The digests of some of its blocks, where they are known without a read."""
        raise NotImplementedError


def to_host(leaf: object, template: Template) -> np.ndarray:
    """The elements that are stored for a leaf: row-major and little-endian.

    A view of the leaf's memory where it can be: of every jax.Array on CPU that is not
    cut into shards.
    """
    is_cut = isinstance(leaf, jax.Array) and not (
        _on_cpu(leaf.sharding) and _leaf.is_whole(leaf.sharding)
    )
    if is_cut or isinstance(leaf, (Payload, Shards)):
        return next(
            to_host_by_regions(leaf, template, [_sharding.whole(template.shape)])
        )
    return _in_stored_form(_on_host(leaf, template), template)


def is_zero_copy(leaf: object, template: Template) -> bool:
    """Whether a leaf gives memory in which its elements are as they are stored, as its
    one chunk."""
    if not isinstance(leaf, jax.Array) or template.kind != "jax":
        return False
    if template.chunk != template.shape:
        return False
    if not (_on_cpu(leaf.sharding) and _leaf.is_whole(leaf.sharding)):
        return False
    if not template.dtype == template.stored == leaf.dtype.name != "bool":
        return False
    try:
        return memoryview(leaf).nbytes == template.nbytes
    except BufferError:  # Of JAX's own dtypes.
        return False


def only_part(leaf: object, template: Template) -> np.ndarray | None:
    """The stored elements of a chunk of a leaf, in the memory of the host. None unless
    they are the one part of the leaf that this process has."""
    if isinstance(leaf, Shards):
        part = leaf.parts[0] if len(leaf.parts) == 1 else None
    elif isinstance(leaf, jax.Array) and _has_one_part(leaf.sharding):
        part = as_numpy(leaf.addressable_data(0))
    else:
        return None
    if not isinstance(part, np.ndarray) or part.shape != template.chunk:
        return None
    return _in_stored_form(part, template)


@ft.lru_cache(maxsize=1024)
def _has_one_part(sharding: jax.sharding.Sharding) -> bool:
    return _on_cpu(sharding) and len(sharding.addressable_devices) == 1


def rows(leaves: Sequence[Any], template: Template) -> np.ndarray | None:
    """The bytes that are stored for leaves of one template, copied: a row for each.
    None unless they are Python's numbers or arrays in the memory of the host, each in
    one part."""
    if template.dtype in _leaf.NOT_ARRAYS or len({*map(type, leaves)}) != 1:
        return None
    if type(leaves[0]) in _leaf.PYTHON.values():
        stored = _in_stored_form(np.asarray(leaves), template)
        return stored.view(np.uint8).reshape(len(leaves), -1)
    if isinstance(leaves[0], jax.Array):
        shardings = {leaf.sharding for leaf in leaves}
        if not all(_on_cpu(x) and _leaf.is_whole(x) for x in shardings):
            return None
    elif type(leaves[0]) not in (np.ndarray, StagedArray):
        return None
    dtypes = {*map(operator.attrgetter("dtype"), leaves)}
    if len(dtypes) > 1:
        return None  # They may have no dtype in common.
    stored = _in_stored_form(_together(leaves, dtypes.pop()), template)
    return stored.view(np.uint8).reshape(len(leaves), -1)


@_guards.lifted()
def _together(arrays: Sequence[Any], dtype: np.dtype) -> np.ndarray:
    """A copy of the elements of arrays in the memory of the host, in one axis."""
    if isinstance(arrays[0], jax.Array):
        # Without an object of NumPy for each array this takes half the time.
        with contextlib.suppress(TypeError):  # Buffers have none of JAX's own dtypes.
            return np.frombuffer(b"".join(arrays), dtype)
    return np.concatenate(list(map(np.asarray, arrays)), axis=None)


# Copies from a device that are under way while the one before them is written.
PREFETCH = 4


def to_host_by_regions(
    leaf: object, template: Template, regions: Iterable[tuple[slice, ...]]
) -> Iterator[np.ndarray]:
    """The arrays of `to_host` for some regions in turn: no more than a few are copied
    at a time."""
    if isinstance(leaf, Payload):
        yield from map(np.ascontiguousarray, leaf.read(regions))
        return
    if isinstance(leaf, jax.Array):
        leaf = _in_parts(leaf, template)
    if not isinstance(leaf, Shards):
        array = _on_host(leaf, template)
        for region in regions:
            yield _in_stored_form(array[region], template)
        return
    dtype = leaf.parts[0].dtype
    ahead = 0 if isinstance(leaf.parts[0], np.ndarray) else PREFETCH
    waiting: collections.deque[tuple[tuple[slice, ...], list]] = collections.deque()
    for region in regions:
        begun = [
            (to, _begin(leaf.parts[part], fro))
            for part, fro, to in _sharding.pieces(leaf.regions, region)
        ]
        waiting.append((region, begun))
        if len(waiting) > ahead:
            yield _in_stored_form(_join(*waiting.popleft(), dtype), template)
    while waiting:
        yield _in_stored_form(_join(*waiting.popleft(), dtype), template)


def _begin(part: Any, region: tuple[slice, ...]) -> Any:
    """A region of a part; the copy to the host is started if it is on a device."""
    if isinstance(part, np.ndarray):
        return part[region]
    with _guards.lifted():
        if _in_host_memory(part):
            return np.asarray(part)[region]
        starts = [s.start for s in region]
        # One compiled program for all regions of a size.
        sizes = [s.stop - s.start for s in region]
        if tuple(sizes) != part.shape:
            part = jax.lax.dynamic_slice(part, starts, sizes)
        return _send([part])[0]


def _join(
    region: tuple[slice, ...], begun: list[tuple[tuple[slice, ...], Any]], dtype: Any
) -> np.ndarray:
    if len(begun) == 1:
        return as_numpy(begun[0][1])
    out = np.empty([s.stop - s.start for s in region], dtype)
    for to, part in begun:
        out[to] = as_numpy(part)
    return out


def as_numpy(array: object) -> np.ndarray:
    if isinstance(array, _JoinedShard):
        return array.arrived()[array.number, ...].view(array.dtype)
    if not isinstance(array, jax.Array):
        return np.asarray(array)  # A matrix keeps its axes when it is flattened.
    with _guards.lifted():
        return np.asarray(jr.key_data(array) if _leaf.is_key(array) else array)


@ft.lru_cache(maxsize=1024)
def _on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _on_host(leaf: Any, template: Template) -> np.ndarray:
    """The numbers of a leaf as it has them: in any order and of any dtype."""
    if template.dtype == "float0":
        return np.zeros(template.shape, np.bool_)
    if template.kind in ("str", "bytes"):
        return np.frombuffer(_leaf.encoded(leaf), np.uint8)
    if template.dtype == "int":
        return np.frombuffer(_leaf.int_bytes(leaf), np.uint8)
    return as_numpy(leaf)


def _in_stored_form(array: np.ndarray, template: Template) -> np.ndarray:
    name = template.stored if template.dtype in _leaf.NOT_ARRAYS else template.dtype
    dtype = _template.dtype_of(name)
    if array.dtype != dtype:
        # Either the cast that was asked for, or big-endian numbers.
        array = _leaf.cast(array, dtype)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        array = array.view(np.uint8) != 0  # Readers refuse other bytes than 0 and 1.
    return array if name == template.stored else array.view(np.uint8)
