"""The chunk grid: slabs near a size, which tile an array once, with little padding."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _grid


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
grids = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.tuples(*(st.integers(1, n + 2) for n in shape))
    )
)
big_shapes = st.lists(st.integers(1, 3000), max_size=4).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])


@given(big_shapes, itemsizes, st.integers(1, 2**24))
@example((1, 1, 10**9), 4, 2**22)
@example((50257, 768), 4, 2**22)
def test_chunks_are_slabs_near_the_target(shape, itemsize, target):
    chunk = _grid.choose(shape, itemsize, target)
    size = math.prod(chunk) * itemsize
    assert len(chunk) == len(shape)
    assert all(1 <= c <= n for c, n in zip(chunk, shape))
    assert size <= max(target, itemsize)
    if math.prod(shape) * itemsize <= target:
        assert chunk == shape
    elif target >= itemsize:
        assert size > target / 4
    # A slab is one run of the bytes: one at a time, cut, whole.
    cut = [axis for axis, (c, n) in enumerate(zip(chunk, shape)) if c < n]
    if cut:
        assert all(c == 1 for c in chunk[: cut[-1]])
        assert chunk[cut[-1] + 1 :] == shape[cut[-1] + 1 :]


@given(big_shapes, itemsizes, st.integers(1, 2**24))
def test_padding_is_less_than_a_chunk_and_a_third(shape, itemsize, target):
    chunk = _grid.choose(shape, itemsize, target)
    stored = math.prod(_grid.grid(shape, chunk)) * math.prod(chunk)
    assert 3 * stored <= 4 * math.prod(shape)


def test_padding_is_small_where_there_are_many_rows():
    for rows in range(100, 400):
        chunk = _grid.choose((rows, 1000), 4, 32 * 4000)
        (count, _) = _grid.grid((rows, 1000), chunk)
        assert count * chunk[0] - rows < count


@given(shapes, itemsizes)
def test_empty_axes_get_chunks(shape, itemsize):
    chunk = _grid.choose(shape, itemsize, 8)
    assert all(1 <= c <= max(1, n) for c, n in zip(chunk, shape))
    if 0 in shape:
        assert list(_grid.indices(shape, chunk)) == []


@given(grids)
def test_regions_tile_the_array_exactly_once(grid):
    shape, chunk = grid
    count = np.zeros(shape, int)
    indices = list(_grid.indices(shape, chunk))
    for index in indices:
        region = _grid.region(shape, chunk, index)
        assert all(0 < s.stop - s.start <= c for s, c in zip(region, chunk))
        count[region] += 1
    assert (count == 1).all()
    assert indices == sorted(indices)
    assert len(indices) == math.prod(_grid.grid(shape, chunk))


@given(grids, itemsizes, st.sampled_from([1, 3, 16, 40, 1000]))
def test_block_counts(grid, itemsize, block):
    shape, chunk = grid
    expected = 0
    for index in _grid.indices(shape, chunk):
        region = _grid.region(shape, chunk, index)
        nbytes = math.prod(s.stop - s.start for s in region) * itemsize
        expected += -(-nbytes // block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_grid, "BLOCK", block)
        assert _grid.block_counts(shape, chunk, itemsize) == expected


def test_block_counts_of_shapes_that_no_array_has_take_no_time():
    assert _grid.block_counts((2**59,), (2**23,), 1) == 2**37
    assert _grid.block_counts((3,) * 32, (2,) * 32, 1) > 2**28
    assert _grid.block_counts((2**30, 0), (2**30, 2**20), 1) == 0


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("chunks", [1, 100, 1000, lambda *_: (3, 2), lambda *_: (9, 9)])
def test_any_grid_round_trips(tmp_path, layout, chunks):
    x = jnp.arange(77.0).reshape(7, 11)
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, {"x": x, "y": x.T}, layout=layout, chunks=chunks)
    ckpt = ec.open(path)
    assert (ckpt["x"].read() == x).all() and (ckpt["y"].read() == x.T).all()
    assert (ckpt["x"].store.read().result() == np.asarray(x)).all()
    chunk = ckpt["x"].store.chunk_layout.read_chunk.shape
    if callable(chunks):
        # A chunk is never longer than the array.
        assert chunk == tuple(np.minimum(chunks(), (7, 11)))
    else:
        assert chunk == _grid.choose((7, 11), 4, chunks)


@pytest.mark.parametrize(
    "chunks", [0, -1, lambda *_: (1,), lambda *_: (0, 1), lambda *_: (1, 1, 1)]
)
def test_impossible_chunks_are_refused(tmp_path, chunks):
    with pytest.raises(ValueError, match="`chunks`"):
        ec.tree_serialise_leaves(tmp_path / "a", jnp.ones((2, 2)), chunks=chunks)
    assert not (tmp_path / "a").exists()


picked = grids.flatmap(
    lambda g: st.tuples(
        st.just(g),
        st.tuples(
            *(
                st.slices(n).map(lambda s, n=n: range(n)[s]) if n else st.just(range(0))
                for n in g[0]
            )
        ),
    )
)


@given(picked, st.integers(1, 5))
def test_runs_are_regions(given, most):
    (shape, chunk), picks = given
    if not all(picks):
        return
    numbers = list(_grid.touched(shape, chunk, picks))
    runs = list(_grid.runs(numbers, shape, chunk, most))
    assert [n for run in runs for n in run] == numbers
    grid = _grid.lay(shape, chunk, 4)
    for run in runs:
        assert 1 <= len(run) <= most
        together = np.zeros(shape, bool)
        for number in run:
            together[grid.regions[number]] = True
        first, last = grid.regions[run[0]], grid.regions[run[-1]]
        region = tuple(slice(a.start, b.stop) for a, b in zip(first, last))
        assert together[region].all() and together.sum() == together[region].size


def test_lay_agrees_with_the_rest():
    for shape, chunk in [((5, 7), (2, 3)), ((), ()), ((3,), (3,)), ((0, 2), (1, 2))]:
        grid = _grid.lay(shape, chunk, 8)
        assert grid.full == math.prod(chunk) * 8
        assert grid.blocks[-1] == _grid.block_counts(shape, chunk, 8)
    big = (3, 2**20)
    grid = _grid.lay((4, 2**20), big, 8)
    assert grid.blocks == [0, 6, 8] and grid.blocks[-1] == _grid.block_counts(
        (4, 2**20), big, 8
    )
