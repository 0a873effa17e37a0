"""Bytes that move between the processes of a run: by a collective of their devices, as
there is no server that a process could ask.

All processes make the same calls, in the same order, from the thread that computes. So
an error in reading or writing the bytes is kept until all processes have taken part. If
a process fails in between all the same, the others see that, and do not wait for ever.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._kernel._runtime._processes import Processes
from .._kernel._tree import _guards


# The most and the least bytes that a device sends in one step. Between the two only
# powers of two are used, as a program is compiled for each size.
_MOST, _LEAST = 2**25, 2**16


class Move(NamedTuple):
    """The bytes of a part go from one process to another."""

    part: int
    source: int
    to: int
    nbytes: int


class ExchangeErrors(NamedTuple):
    """The errors of reading the part that this process sends, and of writing the one
    that it gets."""

    read: Exception | None
    write: Exception | None


@_guards.lifted()
def exchange(
    moves: Sequence[Move],
    read: Callable[[int, np.ndarray], None],
    write: Callable[[np.ndarray], None],
    processes: Processes,
) -> ExchangeErrors:
    """Makes moves together. No two may have the same source, or go to the same process.

    It calls `read(start, into)` for the blocks that this process sends, in their order,
    and `write` with the blocks that it gets, until one of these fails.

    **Raises:** `PeerError` if another process fails meanwhile.
    """
    here = jax.process_index()
    longest = max((move.nbytes for move in moves), default=0)
    size = min(_MOST, max(_LEAST, 1 << (longest - 1).bit_length())) if longest else 1
    to_send = next((move.nbytes for move in moves if move.source == here), 0)
    to_get = next((move.nbytes for move in moves if move.to == here), 0)
    permute = _permute(tuple((move.source, move.to) for move in moves), size)
    unread = unwritten = None
    for start in range(0, longest, size):
        own = np.zeros(size, np.uint8)
        if start < to_send and unread is None:
            unread = _error_of(read, start, own[: to_send - start])
        moved = permute(own)
        processes.wait_until(moved.is_ready)
        got = np.asarray(moved.addressable_data(0))
        if start < to_get and unwritten is None:
            unwritten = _error_of(write, got[: to_get - start])
    return ExchangeErrors(unread, unwritten)


def _error_of(call: Callable[..., None], *args: Any) -> Exception | None:
    try:
        call(*args)
    except Exception as e:
        return e
    return None


@ft.lru_cache(maxsize=16)
def _permute(
    pairs: tuple[tuple[int, int], ...], size: int
) -> Callable[[np.ndarray], Any]:
    """A function that all processes call: it moves bytes from sources to targets."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = [first[process] for process in sorted(first)]
    mesh = Mesh(np.asarray(devices), ("process",))
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    move = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.ppermute(x, "process", pairs),
            mesh=mesh,
            in_specs=sharding.spec,
            out_specs=sharding.spec,
        )
    )
    shape = (len(devices) * size,)

    def permute(own: np.ndarray) -> Any:
        part = jax.device_put(own, first[jax.process_index()])
        return move(jax.make_array_from_single_device_arrays(shape, sharding, [part]))

    return permute


def in_turns(moves: Sequence[Move]) -> list[list[Move]]:
    """Moves in lists that can be made together."""
    out: list[list[Move]] = []
    for move in moves:
        for some in out:
            if all(x.source != move.source and x.to != move.to for x in some):
                some.append(move)
                break
        else:
            out.append([move])
    return out


def shifts(hosts: Sequence[str], copies: int) -> list[int]:
    """By how many places the copies that processes send are shifted: so that few of
    them go to a process of the same host."""
    count = len(hosts)

    def same(shift: int) -> int:
        return sum(hosts[i] == hosts[(i + shift) % count] for i in range(count))

    return sorted(range(1, count), key=lambda shift: (same(shift), shift))[:copies]
