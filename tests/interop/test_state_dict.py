"""`to_state_dict`, `from_state_dict`, `to_bytes`, `from_bytes`."""

import gc
import io
import warnings
import zipfile
from fractions import Fraction

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import safetensors.numpy
from support import trees
from support.helpers import assert_alike, run_program
from support.stores import StoredFiles

import eqx_ckpt as ec


@jax.tree_util.register_pytree_with_keys_class
class _Two:
    """A node whose children have one name."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.DictKey(1), jax.tree_util.DictKey("1"))
        return tuple(zip(keys, self.children)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def _tree():
    model = eqx.nn.MLP(2, 3, 8, 2, key=jr.key(0))
    opt = optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))
    odd = {2: 2.5, -1: {(1, "x"): np.float64(3)}}
    big = {"n": 2**100, "key": jr.key(7), "raw": jr.PRNGKey(1)}
    extra = {"a.b": 1, "": True, "odd": odd, "big": big}
    host = np.arange(6.0).reshape(2, 3)[:, ::-1]
    return {"model": model, "opt": opt, "extra": extra, "host": host, "_METADATA": 1j}


def test_there_and_back():
    tree = _tree()
    state = ec.to_state_dict(tree)
    assert state["model"]["layers"]["0"]["weight"] is tree["model"].layers[0].weight
    names = jax.tree.leaves(eqx.filter(ec.leaf_names(tree), lambda x: True))
    flat = {}

    def walk(node, name):
        for key, x in node.items():
            below = f"{name}.{key}" if name else key
            walk(x, below) if isinstance(x, dict) else flat.setdefault(below, x)

    walk(state, "")
    stored = [ec.is_storable(x) for x in jax.tree.leaves(tree)]
    assert list(flat) == [n for n, good in zip(names, stored) if good]
    like = ec.skeleton(_tree)
    assert_alike(ec.from_state_dict(state, like), tree)
    # Joined keys are the same names.
    assert_alike(ec.from_state_dict(flat, like), tree)
    out = ec.from_state_dict(state, tree)
    assert_alike(out, tree)
    # NumPy arrays can be written to, and so are copied.
    out["host"][...] = 0
    assert tree["host"].any()


def test_one_leaf():
    assert ec.to_state_dict(3) == {"%root": 3}
    assert ec.from_state_dict({"%root": 3}, 0) == 3


def test_an_open_checkpoint_is_no_tree():
    ec.tree_serialise_leaves("memory://state_dict", {"a": 1})
    with pytest.raises(TypeError, match="is no tree"):
        ec.to_state_dict(ec.open("memory://state_dict"))


def test_what_does_not_fit():
    state = ec.to_state_dict({"a": jnp.ones(2), "b": 1})
    with pytest.raises(RuntimeError, match="(?s)state dict does not fit.*unexpected"):
        ec.from_state_dict(state, {"a": jnp.ones(2)})
    with pytest.raises(RuntimeError, match=r"a  saved f32\[2\], `like` has f32\[3\]"):
        ec.from_state_dict(state, {"a": jnp.ones(3), "b": 1})
    with pytest.raises(RuntimeError, match="missing"):
        ec.from_state_dict(state, {"a": jnp.ones(2), "b": 1, "c": 1})
    with pytest.raises(RuntimeError, match="dtype"):
        ec.from_state_dict(state, {"a": jnp.ones(2, jnp.bfloat16), "b": 1})
    out = ec.from_state_dict(state, {"a": jnp.ones(2, jnp.bfloat16), "b": 1}, cast=True)
    assert out["a"].dtype == jnp.bfloat16
    out = ec.from_state_dict(state, {"b": 0}, unexpected="ignore")
    assert out == {"b": 1}
    out = ec.from_state_dict(state, {"a": jnp.zeros(2), "b": 0}, where=lambda t: t["b"])
    assert out["b"] == 1 and not out["a"].any()
    for bad, error in [
        ({"a": [1, 2]}, "leaf `a`: lists are dicts here"),
        ({"a": None}, "leaf `a`: None is not a leaf. Remove the entry"),
        ({"a.b": 1, "a": {"b": 2}}, "two leaves of the name `a.b`"),
        ({"a/" * 10**4: 1}, "which is no name"),
        ({"a": {1: 2}}, "key 1, and takes strings"),
        ({"a": jax.ShapeDtypeStruct((2,), "float32")}, "abstract"),
    ]:
        with pytest.raises((ValueError, TypeError), match=error):
            ec.from_state_dict(bad, {"a": 1})
    with pytest.raises(ValueError, match="Two leaves have the name `1`"):
        ec.to_state_dict(_Two(1, 2))


def test_lazy_leaves_and_own_types(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "c", {"a": {"b": jnp.ones(2)}})
    state = ec.to_state_dict(ec.open(tmp_path / "c").tree)
    assert isinstance(state["a"]["b"], ec.LazyArray)
    with ec.register_leaf(Fraction, str, Fraction):
        state = ec.to_state_dict({"r": Fraction(1, 2)})
        assert state == {"r": "1/2"}
        assert ec.from_state_dict(state, {"r": Fraction(0)}) == {"r": Fraction(1, 2)}


def test_what_was_made_of_own_types_is_not_made_again():
    """Where the type is a subclass of one that is stored, or is str itself."""

    class Degrees(float):
        pass

    with ec.register_leaf(Degrees, lambda d: Degrees(2 * d), lambda d: Degrees(d / 2)):
        state = ec.to_state_dict({"a": Degrees(3)})
        assert ec.from_state_dict(state, {"a": Degrees(0)}) == {"a": 3.0}
    with ec.register_leaf(str, lambda s: s.upper() + "!", lambda s: s.lower()[:-1]):
        state = ec.to_state_dict({"a": "abc"})
        assert ec.from_state_dict(state, {"a": ""}) == {"a": "abc"}


def test_a_filter_sees_the_kinds_of_lazy_leaves(tmp_path):
    tree = {"numpy": np.ones(2), "jax": jnp.ones(2), "number": 1}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    lazy = ec.open(tmp_path / "a").tree
    for spec in (eqx.is_array, eqx.is_array_like, lambda x: type(x) is np.ndarray):
        found = ec.to_state_dict(lazy, spec)
        assert sorted(found) == sorted(ec.to_state_dict(tree, spec))


def test_errors_speak_of_a_state_dict():
    with pytest.raises(RuntimeError) as e:
        ec.from_state_dict({"a": 1, "c": jnp.ones(2)}, {"b": 1, "c": jnp.ones(3)})
    assert "checkpoint" not in str(e.value) and "not in the state dict" in str(e.value)


def test_sharded():
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jnp.arange(16.0)
    like = jax.ShapeDtypeStruct((16,), "float32", sharding=sharding)
    out = ec.from_state_dict({"x": x}, {"x": like})["x"]
    assert out.sharding == sharding and jnp.array_equal(out, x)


def test_bytes(tmp_path):
    tree = _tree()
    data = ec.to_bytes(tree, metadata={"width": 8})
    assert_alike(ec.from_bytes(data, ec.skeleton(_tree)), tree)
    model = ec.from_bytes(memoryview(data), tree["model"], source=lambda c: c.model)
    assert_alike(model, tree["model"])
    assert ec.open(io.BytesIO(data)).metadata == {"width": 8}
    (tmp_path / "m.zip").write_bytes(data)
    assert ec.verify(tmp_path / "m.zip") == []
    assert zipfile.is_zipfile(io.BytesIO(data))
    assert len(ec.to_bytes(jnp.zeros(2**20))) > len(
        ec.to_bytes(jnp.zeros(2**20), compression="zstd")
    )


def test_bytes_and_exports_take_the_memory_that_they_may(tmp_path):
    # Else malloc keeps twice as much of what was freed, which is not counted here.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    peaks = run_program("peak_of_bytes", tmp_path / "a", **malloc)
    *of_bytes, _, export = map(float, peaks.split())
    # A chunk of 4 MiB is there as it is stored, decoded, and as a part of the view.
    assert max(of_bytes) < 24 and export < 32


def test_bytes_that_are_damaged():
    data = bytearray(ec.to_bytes({"w": jnp.arange(2.0**12)}))
    at = data.index(jnp.arange(2.0**12).tobytes()[:64])
    data[at + 40] ^= 1
    with pytest.raises(RuntimeError, match="w"):
        ec.from_bytes(bytes(data), {"w": jnp.zeros(2**12)})
    for bad in (b"", b"no checkpoint", bytes(data[:-100])):
        with pytest.raises((ValueError, FileNotFoundError)):
            ec.from_bytes(bad, {"w": jnp.zeros(2**12)})


def test_bytes_of_others():
    tree = {"w": np.arange(3, dtype=np.float32)}
    assert_alike(ec.from_bytes(safetensors.numpy.save(tree), tree), tree)
    assert_alike(ec.from_bytes(flax.serialization.to_bytes(tree), tree), tree)


def test_nothing_of_bytes_stays():
    def kept():
        gc.collect()
        return {key.split("/")[0] for key in StoredFiles("memory://eqx_ckpt.files")}

    before = kept()  # Of other tests.
    data = ec.to_bytes({"w": jnp.zeros(4)})
    ec.from_bytes(data, {"w": jnp.zeros(4)})
    with pytest.raises(ValueError):
        ec.from_bytes(data[:-9], {"w": jnp.zeros(4)})
    assert not kept() - before
    lazy = ec.open(io.BytesIO(data))["w"]
    assert len(kept() - before) == 1 and lazy.read().shape == (4,)
    del lazy
    assert not kept() - before


def test_names_of_others():
    """As HDF5 and TensorFlow have them, with a rename to ours."""
    theirs = {"net/dense/kernel:0": np.ones((2, 3)), "net/dense/bias:0": np.zeros(2)}
    like = {"weight": np.zeros((2, 3)), "bias": np.ones(2)}
    rules = [(r"^net%2Fdense%2F", ""), (r"^kernel", "weight"), (r"%3A0$", "")]
    got = ec.from_state_dict(theirs, like, rename=rules)
    assert got["weight"].sum() == 6 and got["bias"].sum() == 0
    with pytest.raises(RuntimeError, match="net%2Fdense%2Fkernel%3A0"):
        ec.from_state_dict(theirs, like)
    with pytest.raises(ValueError, match="adapter"):
        ec.from_state_dict(theirs, like, rename=[("^x$", lambda saved, like: saved)])


def test_tensors_of_pytorch():
    """Of dtypes that NumPy lacks, views, with gradients; those without elements here
    are named. It runs where PyTorch is installed."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    like = eqx.nn.Linear(3, 2, key=jr.key(0))
    got = ec.from_state_dict(net.state_dict(), like)
    assert np.array_equal(got.weight, net.weight.detach().numpy())
    assert np.array_equal(ec.from_state_dict(dict(net.named_parameters()), like).bias,
                          got.bias)  # fmt: skip
    x = torch.arange(6.0).reshape(2, 3)
    values = {
        "view": (x.T[1:, ::1], np.float32),
        "half": (x.to(torch.bfloat16), jnp.bfloat16),
        "small": (x.to(torch.float8_e4m3fn), jnp.float8_e4m3fn),
        "one": (torch.tensor(3.0), np.float32),
        "strided": (x[:1, 1:3][:, ::2], np.float32),
        "empty": (torch.zeros(0, 3), np.float32),
        "flag": (x > 2, np.bool_),
        "long": (torch.arange(3), np.int64),
        "conj": (torch.tensor([1 + 2j]).conj(), np.complex64),
    }
    for name, (tensor, dtype) in values.items():
        plain = tensor.resolve_conj()
        wide = plain.float() if plain.dtype.is_floating_point else plain
        got = ec.from_state_dict({name: tensor}, {name: np.zeros(plain.shape, dtype)})
        assert got[name].dtype == dtype
        assert np.array_equal(got[name].astype(wide.numpy().dtype), wide.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # These may go, says PyTorch.
        quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
        sparse = torch.eye(2).to_sparse()
    for tensor, match in [
        (sparse, r"leaf `w`: it is .* give `x.to_dense\(\)`"),
        (quantised, r"`x.dequantize\(\)`"),
        (torch.zeros(2, device="meta"), "`meta`, which has no elements"),
    ]:
        with pytest.raises(TypeError, match=match):
            ec.from_state_dict({"w": tensor}, {"w": np.zeros(2)})


def test_a_tensor_of_many_processes(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate

    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"`DTensor`.*`x.full_tensor\(\)`"):
            ec.from_state_dict({"w": tensor}, {"w": np.zeros(2)})
        got = ec.from_state_dict({"w": tensor.full_tensor()}, {"w": jnp.zeros(2)})
        assert got["w"].tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_children_without_keys_go_by_the_attributes_that_they_are():
    old, new = (
        trees.without_keys("mean", "_METADATA"),
        trees.without_keys("_METADATA", "mean"),
    )
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="batch")
    tree = old(mean=[1.0, old(mean=2.0, _METADATA=3.0)], _METADATA=(norm, state))
    like = new(mean=[0.0, new(mean=0.0, _METADATA=0.0)], _METADATA=(norm, state))
    for top, into in ((tree, like), ({"a": [tree]}, {"a": [like]})):
        made = ec.to_state_dict(top)
        own = made["a"]["0"] if "a" in made else made
        assert own["mean"] == {"0": 1.0, "1": {"mean": 2.0, "_METADATA": 3.0}}
        assert set(own) == {"mean", "_METADATA"}
        loaded = ec.from_state_dict(made, into)
        loaded = loaded["a"][0] if "a" in made else loaded
        assert loaded.mean[0] == 1 and vars(loaded.mean[1]) == vars(tree.mean[1])
        assert eqx.tree_equal(loaded._METADATA, (norm, state))
    # Positions are those of `like`, and no attribute has another name.
    loaded = ec.from_state_dict({"0": 1.0, "1": 2.0}, new(mean=0.0, _METADATA=0.0))
    assert vars(loaded) == {"_METADATA": 1.0, "mean": 2.0}
    with pytest.raises(ValueError, match="two leaves of the name `1`"):
        ec.from_state_dict({"mean": 1.0, "1": 2.0}, new(mean=0.0, _METADATA=0.0))
