"""Saves and loads on an accelerator: `JAX_PLATFORMS=cuda pytest -m gpu -n 0`.

Each test runs on the CPU too. Its arrays are taken for those of an accelerator there,
and it has the same kinds of memory.
"""

import functools as ft
import math
import random
import resource
import threading

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors.numpy import load_file
from support import inside, trees
from support.helpers import assert_alike, enable_x64, facts

import eqx_ckpt as ec


HERE = pytest.param("cpu", id="cpu"), pytest.param("gpu", marks=pytest.mark.gpu)
KINDS = "device", "pinned_host", "unpinned_host"


@pytest.fixture(params=HERE, autouse=True)
def sent(request, monkeypatch):
    """The kinds of memory to which copies were sent."""
    (platform,) = {device.platform for device in jax.devices()}
    assert platform == request.param, "set `JAX_PLATFORMS`"
    if platform == "cpu":
        inside.replace(monkeypatch, "is on the CPU", lambda sharding: False)
    kinds = []

    def make(send):
        def watched(parts):
            out = send(parts)
            kinds.extend(x.sharding.memory_kind for x in out)
            return out

        return watched

    inside.wrap(monkeypatch, "send to the host", make)
    return kinds


def _blocking(path, tree, **options):
    ec.tree_serialise_leaves(path, tree, **options)


def _asynchronous(path, tree, **options):
    ec.async_tree_serialise_leaves(path, tree, **options).result()


BOTH = pytest.mark.parametrize("save", [_blocking, _asynchronous])


def _mesh(axes=("x",)):
    """All devices, or four."""
    devices = jax.devices()[:4]
    shape = (len(devices),) + (1,) * (len(axes) - 1)
    return jax.sharding.Mesh(np.asarray(devices).reshape(shape), axes)


def _memory(kind):
    device = jax.devices()[0]
    if kind not in {memory.kind for memory in device.addressable_memories()}:
        pytest.skip(f"{device.platform} has no {kind}")
    return SingleDeviceSharding(device, memory_kind=kind)


def _leaves():
    """Each kind of leaf: bits of every sort, in shapes with and without elements."""
    rng = random.Random(0)
    out = {}
    for name in trees.JAX_DTYPES:
        for shape in ((), (0, 2), (8, 33)):
            bits = trees.numbers(rng, trees.dtype_of(name), shape)
            out[f"{name} {shape}"] = jnp.asarray(bits)
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        out[impl] = jr.split(jr.key(3, impl=impl), 8)
        out[f"{impl} alone"] = jr.key(4, impl=impl)
    out |= {f"weak {x}": jnp.full((2, 3), x) for x in (True, 3, 2.5, 1j, np.nan)}
    out |= {f"alone {x}": jnp.asarray(x) for x in (False, 4, -0.0, 2j, np.inf)}
    return out


def _put(tree, sharding):
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)


@BOTH
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_every_kind_of_leaf(tmp_path, save, layout):
    tree = {
        "free": _leaves(),
        "bound": _put(_leaves(), jax.devices()[-1]),
        "host": [np.arange(3), 2.5, 2**70, "text", b"bytes", np.float16(1)],
    }
    save(tmp_path / "a", tree, layout=layout)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)
    assert ec.verify(tmp_path / "a") == []


@BOTH
def test_shards_and_replicas(tmp_path, save):
    mesh, count = _mesh(), len(jax.devices()[:4])
    leaves = _leaves()
    is_cut = {k: x for k, x in leaves.items() if x.ndim and x.shape[0] % count == 0}
    tree = {
        "cut": _put(is_cut, NamedSharding(mesh, P("x"))),
        "copies": _put(leaves, NamedSharding(mesh, P())),
        "columns": _put(
            jnp.arange(1024.0).reshape(16, 64), NamedSharding(mesh, P(None, "x"))
        ),
    }
    save(tmp_path / "a", tree)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)
    # The bits are those of the arrays, wherever they go.
    one = ec.tree_deserialise_leaves(tmp_path / "a", leaves, source="copies")
    assert_alike(one, leaves)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_memory(tmp_path, save, kind, sent):
    sharding = _memory(kind)
    tree = {
        "large": jax.device_put(jnp.arange(2.0**18).reshape(512, -1), sharding),
        "small": [jax.device_put(jnp.arange(i), sharding) for i in range(5)],
        "key": jax.device_put(jr.key(1), sharding),
    }
    sent.clear()
    save(tmp_path / "a", tree, chunks=2**18)
    # What lies on the host is not sent there.
    assert set(sent) == ({"pinned_host"} if kind == "device" else set()), sent
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", tree)
    assert_alike(loaded, tree)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(loaded)}
    assert kinds == {kind}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_lies_on_the_host_stays_as_it_was(tmp_path, kind):
    """Whatever becomes of the leaf after `staged()`."""
    sharding = _memory(kind)
    tree = {"x": jax.device_put(jnp.arange(2.0**16), sharding)}
    expected = np.arange(2.0**16, dtype=np.float32)
    handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree)
    handle.staged()
    tree["x"].delete()
    handle.result()
    assert (ec.open(tmp_path / "a")["x"].read() == expected).all()


def test_copies_go_through_pinned_memory(tmp_path, sent):
    _memory("device")  # Older releases of JAX have only memory of the host on CPU.
    tree = {"large": jnp.zeros(2**20), "small": [jnp.zeros(3)] * 3, "key": jr.key(1)}
    for save in (_blocking, _asynchronous):
        sent.clear()
        save(tmp_path / save.__name__, tree)
        assert sent and set(sent) == {"pinned_host"}


@BOTH
def test_blocks_of_large_arrays(tmp_path, save):
    """Of which no more than a few are on their way."""
    x = jr.normal(jr.key(0), (1000, 1031))
    mesh = _mesh()
    tree = {"x": x, "t": x.T, "cut": jax.device_put(x, NamedSharding(mesh, P("x")))}
    save(tmp_path / "a", tree, chunks=2**16, max_bytes=2**20)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)
    rows = ec.open(tmp_path / "a")["x"][17:930:13].read()
    assert (rows == np.asarray(x)[17:930:13]).all()


def test_donation_once_staged(tmp_path):
    step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    tree = {"x": [jnp.full(2**18, i, jnp.float32) for i in range(8)]}
    for turn in range(4):
        handle = ec.async_tree_serialise_leaves(tmp_path / "a", tree)
        handle.staged()
        tree = step(tree)
        handle.result()
        saved = ec.tree_deserialise_leaves(tmp_path / "a", tree)["x"]
        assert [x[-1].item() for x in saved] == [i + turn for i in range(8)]


@BOTH
def test_deleted_leaves_are_errors(tmp_path, save):
    tree = {"a": jnp.zeros(3), "b": jnp.zeros(2**18)}
    save(tmp_path / "a", tree)
    for name in tree:
        gone = {k: jnp.copy(x) for k, x in tree.items()}
        gone[name].delete()
        with pytest.raises(ValueError, match=f"`?{name}`?.*deleted|deleted.*{name}"):
            save(tmp_path / "a", gone)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)


@BOTH
def test_under_a_transfer_guard(tmp_path, save):
    tree = {"leaves": _leaves(), "large": jnp.zeros((2**10, 2**9))}
    with jax.transfer_guard("disallow"):
        save(tmp_path / "a", tree, chunks=2**18)
        loaded = ec.tree_deserialise_leaves(tmp_path / "a", tree)
    assert_alike(loaded, tree)


@BOTH
def test_many_small_leaves(tmp_path, save):
    rng = np.random.default_rng(0)
    tree = [jnp.asarray(rng.normal(size=257).astype(np.float32)) for _ in range(2000)]
    tree += [jnp.asarray(i) for i in range(500)] + list(jr.split(jr.key(0), 200))
    save(tmp_path / "a", tree)
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)


@pytest.mark.parametrize(
    "save, where", [(_blocking, "one"), (_asynchronous, "copies"), (_blocking, "cut")]
)
def test_small_leaves_are_joined(tmp_path, save, where, sent, monkeypatch):
    """On their device, once there are many of a shape."""
    _memory("device")
    inside.limit(monkeypatch, arrays_made_one_by_one=1)
    rng, is_cpu = random.Random(0), jax.default_backend() == "cpu"
    # XLA cannot join the last ones.
    joined = ["bfloat16"] if is_cpu else "bool int8 bfloat16 complex64".split()
    apart = ["int4"] if is_cpu else trees.JAX_DTYPES[1:3]
    tree = {
        name: [trees.numbers(rng, trees.dtype_of(name), (4, 5)) for _ in range(35)]
        for name in joined + apart
    }
    tree = jax.tree.map(jnp.asarray, tree)
    mesh = _mesh()
    cut = NamedSharding(mesh, P("x"))
    places = {"one": jax.devices()[-1], "copies": NamedSharding(mesh, P()), "cut": cut}
    tree = _put(tree, places[where])
    tree["weak"] = [jnp.full((), float(i)) for i in range(35)]
    tree["keys"] = list(jr.split(jr.key(0), 70))
    sent.clear()
    save(tmp_path / "a", tree)
    count = mesh.size if where == "cut" else 1
    assert len(sent) == count * (4 * len(joined) + 35 * len(apart)) + 4 + 8
    assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)


def test_one_program_joins_all_leaves_of_a_shape(tmp_path, monkeypatch, caplog):
    inside.limit(monkeypatch, arrays_made_one_by_one=1)
    _memory("device")
    states = [[jnp.full((2, 7), i + n) for i in range(n)] for n in (70, 33, 99)]
    found = []
    with jax.log_compiles(True), caplog.at_level("WARNING", "jax"):
        for number, tree in enumerate(states):
            caplog.clear()
            (_blocking, _asynchronous)[number % 2](tmp_path / str(number), tree)
            found.append(sum("Compiling" in x for x in caplog.messages))
    assert found == [1, 0, 0]


@BOTH
def test_small_leaves_of_several_memories(tmp_path, save, monkeypatch):
    inside.limit(monkeypatch, arrays_made_one_by_one=1)
    memories = [
        SingleDeviceSharding(device, memory_kind=memory.kind)
        for device in jax.devices()[:4]
        for memory in device.addressable_memories()
    ]
    tree = [_put(jnp.full(5, i), memories[i % len(memories)]) for i in range(200)]
    tree += [_put(jnp.full(5, float(i)), memories[0]) for i in range(40)]
    # JAX would narrow these.
    with enable_x64(True):
        tree += [jnp.full(5, i + 0.1, jnp.float64) for i in range(40)]
    save(tmp_path / "a", tree)
    with enable_x64(True):
        assert_alike(ec.tree_deserialise_leaves(tmp_path / "a", tree), tree)


@BOTH
def test_casts_and_codecs(tmp_path, save):
    tree = {"x": jr.normal(jr.key(0), (300, 400)), "y": jnp.arange(5.0)}
    save(tmp_path / "a", tree, dtype=jnp.bfloat16, compression="lz4")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)
    out = ec.tree_deserialise_leaves(tmp_path / "a", like)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    assert_alike(out, expected)


@pytest.mark.parametrize("path", ["a.zip", "memory://accelerators/a"])
def test_files_and_stores(tmp_path, path):
    tree = _leaves() | {"large": jnp.arange(2.0**18)}
    path = path if "://" in path else tmp_path / path
    ec.tree_serialise_leaves(path, tree)
    assert_alike(ec.tree_deserialise_leaves(path, tree), tree)


def test_an_export(tmp_path):
    tree = {"w": jr.normal(jr.key(0), (600, 700)), "b": jnp.arange(7, dtype=jnp.int32)}
    ec.export_safetensors(tmp_path / "a.safetensors", tree, max_bytes=2**19)
    found = load_file(tmp_path / "a.safetensors")
    assert all((found[name] == np.asarray(x)).all() for name, x in tree.items())


def test_a_run_whose_state_is_donated(tmp_path):
    step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    state = {"params": [jnp.zeros((64, 64))] * 3, "count": jnp.int32(0)}
    state = jax.tree.map(jnp.copy, state)
    with ec.CheckpointManager(tmp_path, every=3, keep=2) as manager:
        for number in range(1, 12):
            state = step(state)
            manager.save(number, state)
    assert manager.steps() == [9, 11]
    loaded, number = manager.restore(state)
    assert number == 11 and loaded["count"] == 11
    assert all((x == 11).all() for x in loaded["params"])


def test_shared_arrays_of_a_run_are_not_sent_again(tmp_path, sent):
    base = [jr.normal(jr.key(i), (256, 256)) for i in range(4)]
    with ec.CheckpointManager(tmp_path) as manager:
        for number in (1, 2, 3):
            sent.clear()
            manager.save(number, {"base": base, "lora": jnp.full(100, float(number))})
            manager.wait()
    assert len(sent) <= 1  # That of `lora`.
    like = {"base": base, "lora": jnp.full(100, 3.0)}
    assert_alike(manager.restore(like)[0], like)


def test_lazy_leaves_come_to_the_device(tmp_path):
    x = jnp.arange(2.0**18).reshape(512, -1)
    ec.tree_serialise_leaves(tmp_path / "a", {"x": x})
    lazy = ec.open(tmp_path / "a")["x"]
    out = ec.materialise({"rows": lazy[3:9], "all": lazy})
    assert facts(out["all"])[:-2] == facts(x)[:-2]
    assert (out["rows"] == x[3:9]).all()
    assert out["all"].devices() == x.devices()


@pytest.mark.parametrize("sent", HERE[1:], indirect=True)
def test_host_memory_of_a_blocking_save(tmp_path):
    """512 MiB go through `max_bytes` and pinned blocks of a few times as much."""
    tree = {"x": jnp.zeros(2**27)}
    ec.tree_serialise_leaves(tmp_path / "warm", {"x": jnp.zeros(2**20)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ec.tree_serialise_leaves(tmp_path / "a", tree, max_bytes=2**25)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 5 * 2**25


@pytest.mark.parametrize("size", [2**16, 2**20])
@pytest.mark.parametrize("where", ["one", "parts"])
def test_a_load_reads_while_it_sends(tmp_path, size, where, monkeypatch):
    """The last read of a file ends only once an array is on its way to the device."""
    place = None if where == "one" else NamedSharding(_mesh(), P("x"))
    tree = {str(i): jnp.full(size, i, jnp.float32) for i in range(2**22 // size)}
    tree = _put(tree, place)
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    reads, count, begun = [], math.inf, threading.Event()

    def counted(read):
        def call(*args):
            reads.append(args)
            assert len(reads) < count or begun.wait(20), "all was read before"
            return read(*args)

        return call

    def told(send):
        def call(*args, **kwargs):
            begun.set()
            return send(*args, **kwargs)

        return call

    inside.wrap(monkeypatch, "read from a file", counted)
    inside.wrap(monkeypatch, "read parts of a file", counted)
    load = ft.partial(ec.tree_deserialise_leaves, tmp_path / "a", tree, max_bytes=2**21)
    load()
    reads.clear()
    load()  # What it keeps of the first one it does not read again.
    count = len(reads)
    reads.clear()
    for name in ("device_put", "make_array_from_callback"):
        monkeypatch.setattr(jax, name, told(getattr(jax, name)))
    assert_alike(load(), tree)
    assert len(reads) == count > 2
