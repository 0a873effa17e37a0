"""Routes over devices: what processes read, and what the devices then hand on."""

import itertools as it
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from eqx_ckpt._reshard import _moves, _routes


SHAPE = (64, 48, 32)
CHUNKS = [
    *[(8, 48, 32), (64, 6, 32), (64, 48, 4), (32, 24, 32), (8, 6, 4), (16, 48, 16)],
    *[(64, 48, 32), (10, 48, 32), (64, 5, 7)],
]
MESHES = [(2, 2, 2), (2, 4), (4, 2), (8,), (8, 1)]
# The process of each device, in the order of the mesh.
PROCESSES = [
    *[[0] * 8, [0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4, [1, 1, 0, 0] * 2],
    *[[0, 0, 1, 1, 2, 2, 3, 3], [3, 1, 2, 0] * 2, [0, 1, 0, 1, 2, 3, 2, 3]],
    list(range(8)),
]


@st.composite
def cases(draw):
    """A mesh, the processes of its devices, chunks, and a sharding."""
    mesh = draw(st.sampled_from(MESHES))
    owners = [draw(st.integers(-1, 2)) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    axes = [tuple("abc"[a] for a in order if owners[a] == dim) for dim in range(3)]
    processes, chunk = draw(st.sampled_from(PROCESSES)), draw(st.sampled_from(CHUNKS))
    return mesh, processes, chunk, P(*(axis or None for axis in axes))


def _planned(case):
    shape, processes, chunk, spec = case
    names = "abc"[: len(shape)]
    mesh = Mesh(np.asarray(jax.devices()).reshape(shape), tuple(names))
    digits = _routes.digits(shape, tuple(processes))
    assert digits is not None
    target = tuple(
        tuple(digit for a in entry or () for digit in digits.axes[names.index(a)])
        for entry in spec
    )
    sharding = NamedSharding(mesh, spec)
    return _routes.plan(digits, SHAPE, chunk, target), sharding


def _read(sharding, shape, processes, chunk):
    """The elements of all chunks that each process needs, of all processes."""
    count = 0
    indices = sharding.devices_indices_map(shape)
    for process in set(processes):
        chunks = set()
        for device, owner in zip(sharding.mesh.devices.flat, processes):
            if owner == process:
                both = zip(indices[device], shape, SHAPE)
                ends = [[min(i, n) for i in s.indices(m)[:2]] for s, m, n in both]
                axes = [range(a // c, -(-b // c)) for (a, b), c in zip(ends, chunk)]
                if any(a == b for a, b in ends):
                    continue
                chunks.update(it.product(*axes))
        for at in chunks:
            count += math.prod(
                min(n, (i + 1) * c) - i * c for i, n, c in zip(at, SHAPE, chunk)
            )
    return count


# Each example compiles a program or two.
@settings(max_examples=settings().max_examples // 3)
@given(cases(), st.integers(1, 3))
def test_every_bit_arrives_and_no_array_is_whole(case, count):
    route, sharding = _planned(case)
    if route is None:  # 48 has one 3 only.
        return
    _, processes, chunk, _ = case
    move = _moves.along(route, sharding)
    assert route.read == _read(move.first, route.padded, processes, chunk)
    assert route.wanted == _read(sharding, SHAPE, processes, chunk)
    xs = np.random.default_rng(0).integers(0, 2**32, (count, *SHAPE), np.uint32)
    xs = xs.view(np.float32)
    parts = [[x[region] for region in move.regions()] for x in xs]
    bits = move.together([move.bits(some) for some in parts])
    program = _moves.compiled(move, bits.shape, bits.dtype, xs.dtype)
    for x, out in zip(xs, program(bits), strict=True):
        assert out.sharding == sharding
        for shard in out.addressable_shards:
            part = np.ascontiguousarray(x[shard.index])
            assert np.asarray(shard.data).tobytes() == part.tobytes()
    sizes = [route.digits.count(sum(y, ())) for y in (route.first, route.target)]
    # Only small arrays are moved together.
    copies = 2 if count == 1 else 3 * count
    most = copies * bits.nbytes / count / min(sizes) + 4096
    assert program.memory_analysis().temp_size_in_bytes <= most


@given(cases())
def test_nobody_reads_more_than_the_chunks_make_necessary(case):
    route, _ = _planned(case)
    assert route is not None
    assert math.prod(SHAPE) <= route.read <= max(route.wanted, math.prod(SHAPE))
    count = len(set(case[1]))
    whole = _routes._splits(_routes._primes(count), 3)
    if any(
        all(n % (c * parts) == 0 for n, c, parts in zip(SHAPE, case[2], cut))
        for cut in whole
    ):
        assert route.read == math.prod(SHAPE)


@pytest.mark.parametrize(
    "processes", [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0] * 2, [0, 1, 1, 2, 2, 3, 3, 0]]
)
def test_processes_that_lie_irregularly(processes):
    assert _routes.digits((8,), tuple(processes)) is None


def test_lengths_that_no_mesh_divides():
    """Parts end where chunks do, and the last process has fewer of them."""
    digits = _routes.digits((4, 2), tuple(i // 2 for i in range(8)))
    assert digits is not None
    for shape, chunk in [((50257, 768), (1571, 768)), ((7, 3), (7, 1)), ((29,), (1,))]:
        route = _routes.plan(digits, shape, chunk, ((),) * len(shape))
        assert route is not None and route.read == math.prod(shape)
        assert route.wanted == 4 * route.read
        assert math.prod(route.padded) <= 2 * math.prod(shape)


def test_an_array_that_cannot_be_cut():
    digits = _routes.digits((8,), tuple(range(8)))
    assert digits is not None
    assert _routes.plan(digits, (3, 1), (3, 1), ((), ())) is None


def test_a_large_mesh_is_planned_quickly():
    """405 billion parameters on 512 hosts: rows are to become columns."""
    digits = _routes.digits((512, 8), tuple(i // 8 for i in range(4096)))
    assert digits is not None
    hosts, local = digits.axes
    shape = (53248, 16384)
    route = _routes.plan(digits, shape, (104, 2048), (local, hosts))
    assert route is not None and route.read == math.prod(shape)
    assert route.wanted == 64 * route.read
