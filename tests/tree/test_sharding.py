"""Arrays on several devices of one process: eight forced ones on the CPU."""

import functools as ft
import re
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)
from support.helpers import BytesRead, long, run_program

import eqx_ckpt as ec


def mesh_of(*shape: int, names: str = "xyz", axes: AxisType = AxisType.Auto) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(names[: len(shape)]), axis_types=(axes,) * len(shape))


def shardings() -> dict[str, jax.sharding.Sharding | None]:
    return {
        "none": None,
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "rows": NamedSharding(mesh_of(8), P("x")),
        "columns": NamedSharding(mesh_of(8), P(None, "x")),
        "blocks": NamedSharding(mesh_of(2, 4), P("x", "y")),
        "both": NamedSharding(mesh_of(4, 2), P(("x", "y"))),
        "rows, replicated": NamedSharding(mesh_of(2, 4), P("x")),
        "all replicated": NamedSharding(mesh_of(2, 4), P()),
        "explicit": NamedSharding(mesh_of(8, axes=AxisType.Explicit), P("x", None)),
        "smaller": NamedSharding(mesh_of(2), P(None, "x")),
    } | {
        # Of the CPU it is the default memory, or there is none of that kind.
        "pinned": NamedSharding(mesh_of(8), P("x"), memory_kind=memory.kind)
        for memory in jax.devices()[0].addressable_memories()
        if memory.kind == "pinned_host"
    }


def spread(x, sharding):
    return jnp.asarray(x) if sharding is None else jax.device_put(x, sharding)


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    return {
        "large": rng.standard_normal((1024, 512), np.float32),
        "small": np.arange(64, dtype=np.float32).reshape(8, 8),
        "half": rng.standard_normal((128, 1024)).astype(jnp.bfloat16),
        "empty": np.zeros((8, 0), np.float32),
        "without rows": np.zeros((0, 64), np.int8),
    }


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])
@pytest.mark.parametrize("saved", shardings())
def test_any_sharding_loads_onto_any_other(tmp_path, values, saved, layout):
    sharding = shardings()[saved]
    tree = {name: spread(x, sharding) for name, x in values.items()}
    ec.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    assert ec.verify(tmp_path / "c") == []
    for other in shardings().values():
        like = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other)
            for name, x in values.items()
        }
        out = ec.tree_deserialise_leaves(tmp_path / "c", like)
        for name, x in values.items():
            assert np.array_equal(np.asarray(out[name]), x)
            if other is not None:
                assert out[name].sharding == other
                assert out[name].sharding.memory_kind == other.memory_kind
            assert out[name].committed == (other is not None)
            # Each device has its part, not only the array as a whole.
            for shard in out[name].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), x[shard.index])


@pytest.mark.parametrize("verify", [True, False])
def test_resharding_reads_each_byte_once(tmp_path, verify):
    x = np.arange(2**22, dtype=np.float32).reshape(2048, 2048)
    rows = NamedSharding(mesh_of(8), P("x"))
    columns = NamedSharding(mesh_of(8), P(None, "x"))
    ec.tree_serialise_leaves(tmp_path / "c", jax.device_put(x, rows))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns)
    with BytesRead() as read:
        out = ec.tree_deserialise_leaves(tmp_path / "c", like, verify=verify)
    assert np.array_equal(np.asarray(out), x)
    assert x.nbytes <= read.total <= 1.05 * x.nbytes
    # A process that has one of these devices reads no more than its part of the chunks.
    lazy = ec.open(tmp_path / "c").tree
    with BytesRead() as read:
        lazy[:, :256].read(verify=verify)
    assert x.nbytes / 8 <= read.total <= 1.3 * x.nbytes / 8


def test_replicas_are_read_once(tmp_path):
    x = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    ec.tree_serialise_leaves(tmp_path / "c", x)
    sharding = NamedSharding(mesh_of(2, 4), P("x"))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with BytesRead() as read:
        out = ec.tree_deserialise_leaves(tmp_path / "c", like)
    assert np.array_equal(np.asarray(out), x) and read.total <= 1.05 * x.nbytes


def test_a_save_does_not_gather():
    """The peak of memory of a save of a sharded tree is that of a few chunks."""
    out = run_program(
        "peak_of_a_sharded_save", XLA_FLAGS="--xla_force_host_platform_device_count=8"
    )
    # 512 MiB of arrays.
    assert float(out) < 100


def test_asynchronous_saves_survive_donation(tmp_path, values):
    for name in ("rows", "columns", "rows, replicated"):
        sharding = shardings()[name]
        x = jax.device_put(values["large"], sharding)
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        handle = ec.async_tree_serialise_leaves(tmp_path / "c", x)
        handle.staged()
        x = step(x)
        handle.result()
        loaded = ec.tree_deserialise_leaves(tmp_path / "c", values["large"])
        assert np.array_equal(loaded, values["large"])


def test_keys_weak_types_casts_and_empty_arrays(tmp_path):
    sharding = NamedSharding(mesh_of(8), P("x"))
    whole = NamedSharding(mesh_of(8), P())
    tree = {
        "keys": jax.device_put(jr.split(jr.key(1), 16), sharding),
        "weak": jax.jit(lambda: 2.5, out_shardings=whole)(),
        "cast": jax.device_put(jnp.arange(2**20, dtype=jnp.float32), sharding),
        "empty": jax.device_put(jnp.zeros((0, 8)), NamedSharding(mesh_of(8), P())),
    }
    assert tree["weak"].weak_type
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    out = ec.tree_deserialise_leaves(tmp_path / "c", tree)
    assert eqx.tree_equal(out, tree)
    for name, x in tree.items():
        assert out[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
    assert out["weak"].weak_type
    half = jax.ShapeDtypeStruct((2**20,), jnp.bfloat16, sharding=sharding)
    cast = ec.tree_deserialise_leaves(tmp_path / "c", half, source="cast", cast=True)
    assert jnp.array_equal(cast, tree["cast"].astype(jnp.bfloat16))
    assert cast.sharding == sharding


def test_lazy_views_take_shardings(tmp_path, values):
    sharding = NamedSharding(mesh_of(8), P("x"))
    ec.tree_serialise_leaves(tmp_path / "c", values["large"])
    lazy = ec.open(tmp_path / "c").tree[:, 8:16].T.update(sharding=sharding)
    out = ec.materialise(lazy.astype(jnp.float32).update(sharding=sharding))
    assert isinstance(out, np.ndarray)  # NumPy was saved.
    like = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    lazy = ec.open(tmp_path / "c").splice(like)[:, 8:16].T.update(sharding=sharding)
    out = lazy.read()
    assert out.sharding == sharding
    assert np.array_equal(np.asarray(out), values["large"][:, 8:16].T)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs JAX 0.7")
def test_a_skeleton_under_set_mesh(tmp_path):
    mesh = mesh_of(8, axes=AxisType.Explicit)
    x = jnp.arange(64.0).reshape(8, 8)
    ec.tree_serialise_leaves(tmp_path / "c", x)
    with jax.set_mesh(mesh):
        like = jax.eval_shape(lambda: jax.sharding.reshard(jnp.zeros((8, 8)), P("x")))
        out = ec.tree_deserialise_leaves(tmp_path / "c", like)
    assert out.sharding == NamedSharding(mesh, P("x", None))
    assert np.array_equal(np.asarray(out), np.asarray(x))
    with pytest.raises(TypeError, match="(?s)`%root`.*abstract mesh.*set_mesh"):
        ec.tree_deserialise_leaves(tmp_path / "c", like)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs JAX 0.7")
def test_no_number_of_leaves_puts_them_on_a_mesh(tmp_path):
    """What JAX says of the first that are alike is taken to be true of all."""
    tree = {f"{i:04}": np.full(3, i, np.float32) for i in range(1100)}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    like = dict.fromkeys(tree, jax.ShapeDtypeStruct((3,), jnp.float32))
    with jax.set_mesh(mesh_of(8, axes=AxisType.Explicit)):
        out = ec.tree_deserialise_leaves(tmp_path / "c", like)
    assert not any(x.committed for x in out.values())
    assert np.array_equal(out["1099"], tree["1099"])


def test_partition_rules(tmp_path):
    model = eqx.nn.MLP(8, 8, 64, 2, key=jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "c", model)
    mesh = mesh_of(8)
    rules = [(r"layers\.\d+\.weight", P("x")), ("bias$", P())]

    def skeleton(rules):
        return ec.skeleton(
            eqx.nn.MLP,
            *(8, 8, 64, 2),
            key=jr.key(0),
            sharding=ec.partition_rules(mesh, rules),
        )

    out = ec.tree_deserialise_leaves(tmp_path / "c", skeleton(rules))
    assert eqx.tree_equal(out, model)
    assert out.layers[1].weight.sharding == NamedSharding(mesh, P("x"))
    assert out.layers[1].bias.sharding == NamedSharding(mesh, P())
    with pytest.raises(
        ValueError, match=r"(?s)`layers.0.bias`, f32\[64\].*`\(\"\.\*\""
    ):
        skeleton(rules[:1])
    bad = [("weight", P(None, "x")), ("bias", P("x")), (".*", P())]
    like = skeleton(bad)
    assert like.layers[0].weight.sharding.spec == P(None, "x")
    for sharding, why in {
        ec.partition_rules(mesh, bad): "(Sharding )?NamedSharding",
        NamedSharding(mesh, P(None, None, "x")): "it has more axes",
    }.items():
        match = f"`layers.0.weight` does not fit it: {why}"
        with pytest.raises(ValueError, match=match) as e:
            ec.skeleton(eqx.nn.MLP, 7, 8, 64, 2, key=jr.key(0), sharding=sharding)
        assert str(e.value).endswith(_CURE)


_CURE = (
    ". Shard only axes that the devices divide evenly: `PartitionSpec()` shards none, "
    "and replicates the leaf."
)


def test_a_sharding_that_does_not_fit_is_an_error_before_anything_is_read(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", {"w": jnp.zeros((1501, 40))})
    sharding = NamedSharding(mesh_of(8), P("x"))
    like = {"w": jax.ShapeDtypeStruct((1501, 40), jnp.float32, sharding=sharding)}
    with BytesRead() as read, pytest.raises(TypeError, match="(?s)`w`.*divi") as e:
        ec.tree_deserialise_leaves(tmp_path / "c", like)
    assert str(e.value).endswith(_CURE)
    assert read.total < 2000  # The index.


def test_chunks_of_ones_own(tmp_path, values):
    """Also such that lie in several shards."""
    sharding = NamedSharding(mesh_of(8), P("x", None))
    tree = {name: spread(x, sharding) for name, x in values.items()}
    for chunks in (100_000, lambda name, shape, dtype: (300, 7)):
        ec.tree_serialise_leaves(tmp_path / "c", tree, chunks=chunks)
        assert ec.verify(tmp_path / "c") == []
        out = ec.tree_deserialise_leaves(tmp_path / "c", tree)
        for name, x in values.items():
            assert np.array_equal(np.asarray(out[name]), x)


def test_damage_to_a_shard_names_the_leaf(tmp_path, values):
    sharding = NamedSharding(mesh_of(8), P("x"))
    x = jax.device_put(values["large"], sharding)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": x})
    (file,) = (tmp_path / "c" / "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RuntimeError, match=re.escape("w: its bytes are not those")):
        ec.tree_deserialise_leaves(tmp_path / "c", {"w": x})


def test_how_it_was_saved(tmp_path):
    before = int(time.time())
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    tree = {
        "rows": [put(jnp.ones((4, 4)), "x"), put(jnp.ones((8, 4)), "x")],
        "both": put(jnp.ones((4, 4)), ("x", "y"), None),
        "one": jnp.ones(3),
        "host": np.ones(3),
    }
    save = ft.partial(ec.async_tree_serialise_leaves, overwrite=True)
    for name in ("a", "a.zip"):
        save(tmp_path / name, tree).result()
        saved = ec.open(tmp_path / name).saved
        assert saved.processes == 1 and before <= saved.time <= time.time()
        assert saved.shardings == {
            "P('x') on x=2, y=2": 2,
            "P(('x', 'y'), None) on x=2, y=2": 1,
        }
