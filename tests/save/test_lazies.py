"""Lazy leaves are saved as any other: read as they are written, and verified."""

import operator
import os
import pickle
import threading
import time
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support.helpers import enable_x64, long, run_program

import eqx_ckpt as ec


class Model(eqx.Module):
    w: jax.Array
    b: np.ndarray
    heads: int = eqx.field(static=True)


def model(rows=3000):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(rows, 500)), jnp.float32)
    return Model(w, np.arange(5.0), 8)


def state():
    return {"model": model(), "opt": [jnp.ones(3), jnp.zeros(4)], "step": 3}


@pytest.fixture
def tree(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", state(), metadata={"lr": 0.1})
    return ec.open(tmp_path / "a").tree


VIEWS = {
    "rows": (lambda w: w[5:2000:7], lambda w: w[5:2000:7]),
    "an element": (lambda w: w[3, 4], lambda w: w[3, 4]),
    "nothing": (lambda w: w[:0], lambda w: w[:0]),
    "turned": (lambda w: w.T, lambda w: w.T),
    "a new axis": (lambda w: w[None, 2:9, ::-1], lambda w: w[None, 2:9, ::-1]),
    "cast": (lambda w: w.astype(jnp.bfloat16), lambda w: w.astype(jnp.bfloat16)),
    "cast twice": (
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: jax.lax.reduce_precision(w, 8, 7),
    ),
    "half": (ec.lazy(lambda w: w / 2, elementwise=True), lambda w: w / 2),
    "of half": (
        lambda w: ec.lazy(lambda w: w / 2, elementwise=True)(w)[7:2500:9].T,
        lambda w: (w / 2)[7:2500:9].T,
    ),
    "whole": (ec.lazy(lambda w: w - w.max()), lambda w: w - w.max()),
    "two": (
        lambda w: ec.lazy(operator.add, elementwise=True)(w, w[::-1]),
        lambda w: w + w[::-1],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("to", ["to", *long("to.zip", "zarr")])
def test_views_and_functions(tree, tmp_path, name, to):
    lazily, now = VIEWS[name]
    layout = "zarr" if to == "zarr" else "ocdbt"
    ec.tree_serialise_leaves(
        tmp_path / to, {"x": lazily(tree.model.w)}, layout=layout, max_bytes=2**22
    )
    expected = jax.jit(now)(state()["model"].w)
    got = ec.tree_deserialise_leaves(tmp_path / to, {"x": expected})["x"]
    np.testing.assert_array_equal(got, expected)
    assert ec.verify(tmp_path / to) == []


ONCE = {
    "cast": lambda a, b: a.astype(jnp.bfloat16),
    "cast twice": lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32),
    "turned": lambda a, b: a.T,
    "half": lambda a, b: ec.lazy(lambda w: w / 2, elementwise=True)(a),
    "cast by JAX": lambda a, b: ec.lazy(
        lambda w: w.astype(jnp.bfloat16), elementwise=True
    )(a),
    "mean": lambda a, b: ec.merge([a, b], ec.merging.average()),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """No number of rows of 4 MiB divides these, and those of other dtypes not alike."""
    path = tmp_path_factory.mktemp("large")
    a = np.random.default_rng(0).random((4600, 1024), np.float32)
    for name, layout in ("ocdbt", "ocdbt"), ("zarr", "zarr"):
        ec.tree_serialise_leaves(path / name, [a, a + 1], layout=layout, durable=False)
    return path


@pytest.mark.parametrize("name", ONCE)
def test_each_byte_is_read_once(large, tmp_path, name):
    a, b = ec.open(large / "ocdbt").tree
    made = ONCE[name](a, b)
    with ec.counting() as bytes_read:
        ec.tree_serialise_leaves(tmp_path / "b", [made], max_bytes=2**25)
    nbytes = 4 * a.size * (2 if name == "mean" else 1)
    assert nbytes <= bytes_read() < nbytes + 2**14
    (saved,) = ec.open(tmp_path / "b").tree
    got, expected = np.asarray(saved[900:2100, 7]), np.asarray(made[900:2100, 7])
    np.testing.assert_array_equal(got, expected)
    # A whole chunk has to be read for some blocks of it.
    other = ONCE[name](*ec.open(large / "zarr").tree)
    with ec.counting() as bytes_read:
        ec.tree_serialise_leaves(tmp_path / "b", [other], max_bytes=2**25)
    assert bytes_read() < 1.6 * nbytes
    assert not ec.diff([made], ec.open(tmp_path / "b").tree)


def test_what_has_no_blocks_is_computed_once(large, tmp_path):
    calls = []

    def count(w):
        calls.append(1)
        return w

    def fn(a, b):
        return jax.pure_callback(count, a, a) - b.mean()

    a, b = ec.open(large / "ocdbt").tree
    with ec.counting() as bytes_read:
        ec.tree_serialise_leaves(tmp_path / "b", [ec.lazy(fn)(a, b)], chunks=2**18)
    assert len(calls) == 1 and bytes_read() < 8 * a.size + 2**14
    expected = np.asarray(a[::999]) - np.asarray(b).mean()
    np.testing.assert_allclose(ec.open(tmp_path / "b").tree[0][::999], expected, 1e-5)


def test_a_cast_leaf_is_saved_with_another_cast(tmp_path):
    x = np.random.default_rng(0).random((3, 40_000), np.float32)
    ec.tree_serialise_leaves(tmp_path / "a", list(x))
    tree = [y.astype(jnp.bfloat16) for y in ec.open(tmp_path / "a").tree]
    ec.tree_serialise_leaves(tmp_path / "b", tree, dtype=jnp.float32)
    saved = np.array(ec.materialise(ec.open(tmp_path / "b").tree))
    assert saved.dtype == np.float32
    np.testing.assert_array_equal(saved, x.astype(jnp.bfloat16.dtype))


def test_a_pruned_tree_keeps_what_it_is(tree, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "b", tree.model)
    out = ec.tree_deserialise_leaves(tmp_path / "b", model())
    assert type(out.b) is np.ndarray and eqx.tree_equal(out, model())
    other = Model(model().w, model().b, 4)
    with pytest.raises(RuntimeError, match="heads was 8|`heads`"):
        ec.tree_deserialise_leaves(tmp_path / "b", other)


def test_a_filter_sees_what_was_saved(tree, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "b", tree, eqx.is_array)
    assert set(ec.open(tmp_path / "b")) == {"model.w", "model.b", "opt.0", "opt.1"}
    ec.tree_serialise_leaves(tmp_path / "c", tree, lambda x: isinstance(x, int))
    assert set(ec.open(tmp_path / "c")) == {"step"}


def test_one_array_at_two_places_stays_one(tree, tmp_path):
    half = ec.lazy(lambda w: w / 2, elementwise=True)
    w = tree.model.w
    both = {"a": w, "b": tree.model.w, "c": half(w), "d": half(tree.model.w), "e": w.T}
    ec.tree_serialise_leaves(tmp_path / "b", both)
    ckpt = ec.open(tmp_path / "b")
    assert ckpt.nbytes == 3 * w.size * 4
    with_others = {"a": w, "b": w[:-1], "c": half(w)[:-1], "d": w.astype(jnp.float16)}
    ec.tree_serialise_leaves(tmp_path / "c", with_others)
    for name, lazy in with_others.items():
        np.testing.assert_array_equal(ec.open(tmp_path / "c")[name].read(), lazy.read())


def test_only_the_same_is_one_array(tree, tmp_path):
    """To `==` these numbers are one, and to a cache so are settings and closures."""
    w = tree.opt[0]
    integers = ec.lazy(lambda w, s: w.astype(jnp.int32) * s)
    lazies = {f"by {s!r}": integers(w, s) for s in (1, 1.0, True, 0.0)}
    zeros = ec.lazy(lambda w, s: 1 / (w * s))
    lazies |= {f"over {s!r}": zeros(w, s) for s in (0.0, -0.0)}
    number = [2.0]
    closed = ec.lazy(lambda w: w * number[0])
    for number[0] in (2.0, 3.0):
        lazies[f"closed {number[0]}"] = closed(w)
    with enable_x64(True):
        lazies["wide"] = integers(w, 1.0)
    ec.tree_serialise_leaves(tmp_path / "b", lazies)
    ckpt = ec.open(tmp_path / "b").tree
    for name, lazy in lazies.items():
        with enable_x64(name == "wide"):
            got, expected = np.asarray(ckpt[name]), np.asarray(lazy)
        assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes()
    assert ckpt["by 1"].dtype == jnp.int32 and ckpt["by 1.0"].dtype == jnp.float32
    assert ckpt["wide"].dtype == jnp.float64
    assert np.asarray(ckpt["over 0.0"])[0] == -np.asarray(ckpt["over -0.0"])[0]


def test_a_callable_that_has_no_hash(tree, tmp_path):
    linear = eqx.nn.Linear(3, 2, key=jr.key(0))
    lazy = ec.lazy(linear)(tree.opt[0])
    both = {"a": lazy, "b": ec.lazy(linear)(tree.opt[0])}
    ec.tree_serialise_leaves(tmp_path / "b", both)
    for name in both:
        got = ec.open(tmp_path / "b")[name].read()
        np.testing.assert_array_equal(got, jax.jit(lambda x: linear(x))(jnp.ones(3)))


def test_what_is_in_memory_is_copied(tree, tmp_path):
    """Of arguments and of closures, at the call."""
    n, m = np.ones(3, np.float32), np.ones(3, np.float32)
    lazy = ec.lazy(lambda a, b: jax.jit(lambda x: x * m)(a + b))(tree.opt[0], n)
    merged = ec.merge([[n], [n]], ec.merging.average())[0]
    n[:] = m[:] = 5
    for x in (lazy, merged):
        ec.tree_serialise_leaves(tmp_path / "b", [x, n])
        expected = [2, 2, 2] if x is lazy else [1, 1, 1]
        assert np.asarray(ec.open(tmp_path / "b")["0"]).tolist() == expected


def _inodes(path):
    return {x.stat().st_ino for x in path.glob("d/*/[0-9]*")}


def test_an_edit_in_place_reads_and_writes_no_data(tree, tmp_path):
    path, before = tmp_path / "a", _inodes(tmp_path / "a")
    with ec.counting() as bytes_read:
        ec.tree_serialise_leaves(path, tree, metadata={"note": "best"}, reuse=path)
    assert bytes_read() < 20_000
    assert _inodes(path) == before
    assert ec.open(path).metadata == {"note": "best"} and ec.verify(path) == []
    with pytest.raises(RuntimeError, match="Open it again"):
        tree.model.w.read()
    # A subtree is dropped, another one renamed.
    now = ec.open(path).tree
    ec.tree_serialise_leaves(path, {"net": now.model}, reuse=path)
    out = ec.tree_deserialise_leaves(path, {"net": model()})
    assert eqx.tree_equal(out["net"], model())


def _edited(path, tree, **options):
    """Saves at the path that the tree is from: the bytes that were read and written,
    and how many of the data files are the same."""
    before = {x.stat().st_ino for x in path.glob("d/*/[0-9]*")}
    with ec.counting() as bytes_read:
        ec.tree_serialise_leaves(path, tree, reuse=path, **options)
    files = [x.stat() for x in path.glob("d/*/[0-9]*")]
    written = sum(x.st_size for x in files if x.st_ino not in before)
    assert ec.verify(path) == []
    return bytes_read(), written, sum(x.st_ino in before for x in files)


def test_an_edit_in_place_reads_and_writes_what_changes(tmp_path):
    path, layer = tmp_path / "a", 2**25
    rng = np.random.default_rng(0)
    names = "abcd"
    layers = {x: rng.integers(0, 9, layer // 4, np.int32) for x in names}
    ec.tree_serialise_leaves(path, {"net": layers, "opt": layers["a"] + 1})
    tree = lambda: ec.open(path).tree
    # Three files, of two layers each, and one for `opt`.
    read, written, kept = _edited(path, tree(), metadata={"note": "best"})
    assert (read < 2**15, written, kept) == (True, 0, 3)
    # Another name, and keys of another kind.
    read, written, kept = _edited(path, {"m": [tree().net], "opt": tree().opt})
    assert (read < 2**15, written, kept) == (True, 0, 3)
    # What lies in one file with a leaf that changes is written once more.
    now = eqx.tree_at(lambda t: t.m[0].b, tree(), np.zeros(3))
    read, written, kept = _edited(path, now)
    assert read < layer + 2**15 and written == layer + 24 and kept == 2
    # A subtree is dropped.
    read, written, kept = _edited(path, tree().m)
    assert (read < 2**15, written, kept) == (True, 0, 3)
    out = ec.tree_deserialise_leaves(path, [layers | {"b": np.zeros(3)}])[0]
    assert all(np.array_equal(out[x], layers[x]) for x in names if x != "b")
    # Lazy leaves of one save have the files of it; so do those of a handle's.
    with ec.counting() as bytes_read:
        handle = ec.async_tree_serialise_leaves(path, {"net": tree()[0]}, reuse=path)
        handle.result()
    assert bytes_read() < 2**15


def test_reuse_takes_nothing_for_what_it_was(tmp_path):
    """Leaves that change places, and names that another leaf has now."""
    path = tmp_path / "a"
    arrays = {x: np.full(2**18, i, np.int32) for i, x in enumerate("abc")}
    ec.tree_serialise_leaves(path, arrays)
    t = ec.open(path).tree
    swapped = {"a": t.b, "b": t.a, "c": np.full(2**18, 7, np.int32), "d": t.c, "e": t.c}
    ec.tree_serialise_leaves(path, swapped, reuse=path)
    got = {x: int(lazy[0].read()) for x, lazy in ec.open(path).items()}
    assert got == {"a": 1, "b": 0, "c": 7, "d": 2, "e": 2} and ec.verify(path) == []
    t = ec.open(path).tree
    ec.tree_serialise_leaves(path, {"a": t.e[::-1], "b": t.d, "c": t.a}, reuse=path)
    got = {x: int(lazy[0].read()) for x, lazy in ec.open(path).items()}
    assert got == {"a": 2, "b": 2, "c": 1} and ec.verify(path) == []


def _held(event, lazy):
    """A lazy array that is only read once `event` is set."""

    def wait(w):
        assert event.wait(60)
        return w

    return ec.lazy(lambda w: jax.pure_callback(wait, w, w))(lazy)


def test_a_manager_deletes_no_step_that_is_read(tree, tmp_path):
    manager = ec.CheckpointManager(tmp_path / "run", every=1, keep=1, durable=True)
    save = lambda step, tree: (manager.save(step, tree), manager.wait())
    save(1, state())
    # A save in another thread goes on while step 1 would be deleted.
    event, first = threading.Event(), ec.open(manager.path(1)).tree
    pruned = {"model": first.model, "wait": _held(event, tree.opt[0])}
    args = tmp_path / "pruned", pruned
    thread = threading.Thread(target=ec.tree_serialise_leaves, args=args)
    thread.start()
    while not (tmp_path / "pruned").exists():
        time.sleep(0.01)
    save(2, state())
    assert manager.steps() == [1, 2]
    with pytest.raises(ValueError, match="reads lazy leaves of step 1"):
        manager.delete(1)
    event.set()
    thread.join()
    assert not ec.diff(first.model, ec.open(tmp_path / "pruned").tree.model)
    # One that waits for the save of the manager itself.
    second = ec.open(manager.path(2)).tree
    event, last = threading.Event(), threading.Event()
    manager.save(3, {"x": _held(event, tree.opt[0])})
    pruned = {"model": second.model, "wait": _held(last, tree.opt[0])}
    handle = ec.async_tree_serialise_leaves(tmp_path / "pruned", pruned)
    event.set()
    manager.wait()
    assert manager.steps() == [2, 3]
    last.set()
    handle.result()
    save(4, ec.open(manager.path(3)).tree)
    assert manager.steps() == [4]
    np.testing.assert_array_equal(ec.open(manager.path(4))["x"].read(), jnp.ones(3))


def test_damage_is_found_and_nothing_is_saved(tree, tmp_path):
    (file,) = (tmp_path / "a" / "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ec.tree_serialise_leaves(tmp_path / "b", {"w": 1})
    for target in ("b", "b.zip", "a"):
        with pytest.raises(ec.DamagedError, match=r"model\.w"):
            ec.tree_serialise_leaves(tmp_path / target, tree)
    assert ec.tree_deserialise_leaves(tmp_path / "b", {"w": 0}) == {"w": 1}
    assert not (tmp_path / "b.zip").exists()
    handle = ec.async_tree_serialise_leaves(tmp_path / "b", tree)
    with pytest.raises(ec.DamagedError, match=r"model\.w"):
        handle.result()
    # Digests travel with bytes that are linked: what is damaged stays so.
    ec.tree_serialise_leaves(tmp_path / "a", tree, metadata={}, reuse=tmp_path / "a")
    assert [x.leaf for x in ec.verify(tmp_path / "a")] == ["model.w"]


def test_a_source_that_was_replaced(tree, tmp_path):
    half = ec.lazy(lambda w: w / 2, elementwise=True)(tree.model.w)
    ec.tree_serialise_leaves(tmp_path / "a", {"other": 1})
    for lazy in (tree, {"x": half}, {"x": half[3:]}):
        with pytest.raises(RuntimeError, match="replaced or deleted"):
            ec.tree_serialise_leaves(tmp_path / "b", lazy)
    assert not (tmp_path / "b").exists()


def test_to_itself(tree, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", tree, dtype=jnp.bfloat16)
    out = ec.tree_deserialise_leaves(tmp_path / "a", state(), cast=True)
    np.testing.assert_array_equal(
        out["model"].w, model().w.astype(jnp.bfloat16).astype(jnp.float32)
    )
    ec.tree_serialise_leaves(tmp_path / "x.zip", state())
    ec.tree_serialise_leaves(tmp_path / "x.zip", ec.open(tmp_path / "x.zip").tree.opt)
    assert set(ec.open(tmp_path / "x.zip")) == {"0", "1"}


def test_other_formats(tmp_path):
    ec.export_safetensors(tmp_path / "m.safetensors", {"w": model().w})
    lazy = ec.open(tmp_path / "m.safetensors").tree
    ec.tree_serialise_leaves(tmp_path / "b", {"net": lazy, "key": jr.key(1)})
    assert ec.verify(tmp_path / "b") == []
    np.testing.assert_array_equal(ec.open(tmp_path / "b")["net.w"].read(), model().w)
    ec.export_safetensors(tmp_path / "n.safetensors", lazy)
    data = (tmp_path / "n.safetensors").read_bytes()
    assert data == (tmp_path / "m.safetensors").read_bytes()


def test_lazies_pickle(tree, tmp_path):
    half = ec.lazy(operator.neg, elementwise=True)(tree.model.w)[2:5]
    again = pickle.loads(pickle.dumps(half))
    np.testing.assert_array_equal(again.read(), half.read())


@pytest.mark.long
def test_memory_is_bounded(tmp_path):
    """The average of three checkpoints of 256 MiB, in less memory than one has."""
    out = run_program("peak_of_a_mean", tmp_path)
    assert float(out) < 250
    os.sync()


def test_lazy_leaves_are_read_within_max_bytes(tmp_path):
    tree = {"w": np.zeros((48, 2**17), np.float32)}
    ec.tree_serialise_leaves(tmp_path / "a", tree, durable=False)
    tracemalloc.start()
    lazy = ec.open(tmp_path / "a").tree
    options = {"max_bytes": 2**23, "durable": False}
    ec.export_safetensors(tmp_path / "a.safetensors", lazy, **options)
    ec.tree_serialise_leaves(tmp_path / "b.zip", lazy, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23 + 2**21
