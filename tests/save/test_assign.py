"""Who writes which chunks: every chunk once, by a process that has all of it."""

import itertools as it
import math

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.helpers import examples

from eqx_ckpt._kernel._format import _grid, _placement
from eqx_ckpt._kernel._format._template import Template
from eqx_ckpt._kernel._save import _assign, _to_ocdbt, _tree_spec
from eqx_ckpt._kernel._save._payload import PlannedLeaf
from eqx_ckpt._kernel._tree import _sharding


_MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2)]
_AXES = "xyz"


@st.composite
def _sharded(draw):
    mesh = draw(st.sampled_from(_MESHES))
    rank = draw(st.integers(1, 3))
    axes = list(_AXES[: len(mesh)])
    spec = []
    for _ in range(rank):
        count = draw(st.integers(0, len(axes)))
        spec.append(tuple(axes.pop(0) for _ in range(count)) or None)
    sizes = dict(zip(_AXES, mesh))
    shape = []
    for entry in spec:
        cut = math.prod(sizes[axis] for axis in entry or ())
        shape.append(cut * draw(st.integers(0, 12)))
    return mesh, P(*spec), tuple(shape), draw(st.sampled_from([1, 2, 4, 8]))


@given(_sharded(), st.integers(1, 4000), st.integers(1, 200))
@examples(200)
def test_every_chunk_is_written_once(sharded, target, least):
    sizes, spec, shape, per_process = sharded
    devices = np.asarray(jax.devices()[:8]).reshape(sizes)
    sharding = NamedSharding(Mesh(devices, tuple(_AXES[: len(sizes)])), spec)
    # The devices of this one process, as if there were several.
    found: dict = {}
    has: dict[int, np.ndarray] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ends = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        process = device.id // per_process
        found.setdefault(ends, set()).add(process)
        has.setdefault(process, np.zeros(shape, bool))[index] = True
    holders = _sharding.joined(found, shape)
    assert sum(math.prod(s.stop - s.start for s in r) for r, _ in holders) == math.prod(
        shape
    )
    shard = tuple(sharding.shard_shape(shape))
    if math.prod(shard) < least:
        shapes = {tuple(s.stop - s.start for s in region) for region, _ in holders}
        shard = shapes.pop() if len(shapes) == 1 else shard
    if shard == shape or 0 in shape:
        chunk = _grid.choose(shape, 4, target)
    else:
        chunk = _grid.choose_sharded(shape, shard, 4, target)
    processes = 8 // per_process
    loads = [0] * processes
    if shard == shape and len(holders) > 1:
        return
    owners = _assign.owners(holders, shape, chunk, 1, loads)
    regions = _grid.lay(shape, chunk, 4).regions
    assert [n for run, _ in owners for n in run] == list(range(len(regions)))
    for run, process in owners:
        for number in run:
            assert has[process][regions[number]].all()
    assert sum(loads) == len(regions)
    leaf = _assign.DealtLeaf(len(regions), 100, owners)
    deal = _assign.deal([leaf, leaf], processes)
    dealt = [(place, n) for _, file in deal for place, run in file for n in run]
    assert sorted(dealt) == list(it.product(range(2), range(len(regions))))
    for process, file in deal:
        for place, run in file:
            assert all(process == p for r, p in owners for n in run if n in r)


def test_replicas_share_the_work():
    whole = ((slice(0, 8), slice(0, 8)),)
    loads = [0] * 4
    owners = _assign.owners(((whole[0], (0, 1, 2, 3)),), (8, 8), (1, 8), 32, loads)
    assert owners == [(range(2 * p, 2 * p + 2), p) for p in range(4)]
    assert loads == [64] * 4
    # Those that cannot be shared go to whoever has least to write.
    loads = [5, 0, 7]
    for _ in range(3):
        _assign.owners(((whole[0], (0, 1, 2)),), (8, 8), (8, 8), 4, loads)
    assert loads == [9, 8, 7]


def test_leaves_that_are_alike_share_their_owners():
    """In a large model on many hosts there are millions of runs."""
    split = tuple(((slice(4 * p, 4 * p + 4),), (p,)) for p in range(4))
    whole = (((slice(0, 16),), (0, 1, 2, 3)),)
    known: _assign.Known = {}
    alone, loads = [0] * 4, [0] * 4
    found = []
    for holders, chunk in [*[(split, 2)] * 2, (split, 4), *[(whole, 16)] * 2]:
        args = holders, (16,), (chunk,), chunk
        found.append(_assign.owners(*args, loads, known))
        assert found[-1] == _assign.owners(*args, alone) and loads == alone
    assert found[0] is found[1] and found[1] != found[2]
    # Who has least to write is another one each time.
    assert found[3] != found[4]


def test_chunks_that_no_process_has_all_of():
    halves = [((slice(0, 4),), (0,)), ((slice(4, 8),), (1,))]
    with pytest.raises(ValueError, match="lie in shards of several processes"):
        _assign.owners(tuple(halves), (8,), (3,), 12, [0, 0])
    with pytest.raises(ValueError, match="no process holds all"):
        _assign.owners(tuple(halves[:1]), (8,), (4,), 16, [0, 0])


def test_too_many_runs_are_refused_when_they_are_planned(monkeypatch):
    template = Template("k", "jax", "uint8", (9,), "uint8", (1,))
    owners = [(range(n, n + 1), n % 2) for n in range(9)]
    leaves = [PlannedLeaf(name, None, template, 0, None, owners) for name in "abc"]
    form = _tree_spec.TreeSpec(("a", "b", "c"), (0, 0, 0), (template,), ())
    most = _to_ocdbt.upper_bound(leaves, form, 2, False).placed.placement
    # The leaves have one pattern.
    assert most.patterns[:9].tolist() == [[1, n % 2] for n in range(9)]
    assert (most.patterns[9:] == [2**16, 258]).all()
    monkeypatch.setattr(_placement, "MAX_RUNS", 26)
    with pytest.raises(ValueError, match="it has 27 runs of chunks"):
        _to_ocdbt.upper_bound(leaves, form, 2, False)
