import copy
import math
import os
import pickle
import shutil
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import tensorstore as ts
from support import inside
from support.helpers import BytesRead, files_of, long, run_program

import eqx_ckpt as ec


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, width, depth=4, *, key):
        *keys, last = jr.split(key, depth + 1)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 1, key=last)


def _state(key, width=16):
    model = Net(width, key=key)
    opt = optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))
    return {"model": model, "opt": opt}


@pytest.fixture(params=["ocdbt", "zarr"])
def layout(request):
    return request.param


def test_open_tells_what_is_there(tmp_path, getkey, layout):
    state = _state(getkey())
    ec.tree_serialise_leaves(
        tmp_path / "a", state, metadata={"width": 16}, layout=layout
    )
    ckpt = ec.open(tmp_path / "a")
    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    assert ckpt.metadata == {"width": 16}
    assert ckpt.layout == layout
    assert ckpt.path == str(tmp_path / "a")
    assert ckpt.nbytes == sum(x.nbytes for x in arrays)
    assert len(ckpt) == len(ckpt.leaves) == len(arrays)
    assert "model.layers.0.weight" in ckpt
    assert list(ckpt.leaves)[0] == "model.layers.0.weight"
    assert ckpt.writer["jax"] == jax.__version__
    assert ec.open(ckpt) is ckpt
    weight = ckpt["model.layers.0.weight"]
    assert weight.shape == (16, 16) and weight.dtype == jnp.float32
    assert np.array_equal(weight, state["model"].layers[0].weight)


def test_repr_is_a_tree(tmp_path, getkey):
    ec.tree_serialise_leaves(tmp_path / "a", _state(getkey()))
    lines = repr(ec.open(tmp_path / "a")).splitlines()
    assert lines[0].startswith(f"Checkpoint({tmp_path / 'a'}: 31 leaves, ")
    assert lines[1:4] == ["  model", "    layers", "      {0..3}"]
    assert lines[4].split() == ["weight", "f32[16,16]", "1.0", "KiB"]
    assert repr(ec.open(tmp_path / "a").tree.model.head).splitlines()[0] == (
        "Node(model.head)"
    )


def test_nothing_at_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        ec.open(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(FileNotFoundError, match="it has no `eqx_ckpt.json`"):
        ec.open(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        ec.tree_deserialise_leaves(tmp_path / "a", jnp.zeros(3))
    assert not (tmp_path / "a").exists()
    (tmp_path / "c.eqx").write_bytes(b"x")
    with pytest.raises(ValueError, match="Pass `like=`"):
        ec.open(tmp_path / "c.eqx")
    (tmp_path / "d").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="is a file, and not a checkpoint"):
        ec.open(tmp_path / "d")


@pytest.mark.parametrize("comes", [None, "ocdbt", "zarr"])
def test_what_is_deleted_or_comes_as_it_is_opened(tmp_path, monkeypatch, comes):
    path = tmp_path / "c"
    ec.tree_serialise_leaves(path, {"a": 1})
    (path / "eqx_ckpt.json").unlink()

    def late(*_):
        shutil.rmtree(path)
        if comes:
            ec.tree_serialise_leaves(path, {"a": 2}, layout=comes)

    inside.watch(monkeypatch, "read as another format", late)
    if comes:
        assert ec.materialise(ec.open(path).tree) == {"a": 2}
    else:
        with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
            ec.open(path)


def test_the_tree_needs_no_classes(tmp_path, getkey):
    state = {**_state(getkey()), "a.b": [{1: jnp.ones(1)}, {"": jnp.zeros(2)}], "n": 3}
    ec.tree_serialise_leaves(tmp_path / "a", state)
    tree = ec.open(tmp_path / "a").tree
    model = state["model"]
    assert np.array_equal(tree.model.layers[1].weight, model.layers[1].weight)
    assert np.array_equal(tree["model"].layers[-1].bias, model.layers[-1].bias)
    assert np.array_equal(tree["a.b"][0][1], jnp.ones(1))
    assert np.array_equal(tree["a.b"][1][""], jnp.zeros(2))
    assert tree.n.read() == 3
    assert len(tree.model.layers) == 4
    assert [x.weight.name for x in tree.model.layers[1:3]] == [
        "model.layers.1.weight",
        "model.layers.2.weight",
    ]
    assert [x.bias.name for x in tree.model.layers][0] == "model.layers.0.bias"
    assert list(tree) == tree.keys() == ["a.b", "model", "n", "opt"]
    assert "model" in tree and "nothing" not in tree
    assert dir(tree.model) == ["head", "layers"]


def test_a_wrong_name_lists_what_exists(tmp_path, getkey):
    ec.tree_serialise_leaves(tmp_path / "a", _state(getkey()))
    ckpt = ec.open(tmp_path / "a")
    with pytest.raises(AttributeError, match="no `layer`. It has `layers`, `head`"):
        ckpt.tree.model.layer
    with pytest.raises(KeyError, match="no 7. It has `0`, `1`, `2`, `3`"):
        ckpt.tree.model.layers[7]
    with pytest.raises(KeyError, match="'x'"):
        ckpt.tree["x"]
    with pytest.raises(TypeError, match="sequence to slice"):
        ckpt.tree[1:]
    with pytest.raises(KeyError, match="nearest names are `model.head.weight`"):
        ckpt["model.head.weigth"]
    with pytest.raises(KeyError, match="That is a node"):
        ckpt["model.head"]
    with pytest.raises(
        AttributeError, match=r"`model`: here it is `ckpt\.tree\.model`"
    ):
        ckpt.model


def test_materialise_gives_plain_containers(tmp_path, getkey):
    tree = {"a": (1, jnp.ones(2), print, 2.5), "b": [{"c": np.arange(3)}, True]}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    out = ec.materialise(ec.open(tmp_path / "a").tree)
    # What is not stored, the function, leaves a gap.
    assert out["a"][0] == 1 and out["a"][2] is None and out["a"][3] == 2.5
    assert isinstance(out["a"], list) and isinstance(out["a"][1], jax.Array)
    assert isinstance(out["b"][0]["c"], np.ndarray) and out["b"][1] is True


def test_what_is_no_tree(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"x": 1})
    ckpt = ec.open(tmp_path / "a")
    for call in (
        lambda: ec.materialise(ckpt),
        lambda: ec.tree_serialise_leaves(tmp_path / "b", ckpt),
    ):
        with pytest.raises(TypeError, match=r"is no tree. Pass `ckpt.tree`"):
            call()
    for path in (tmp_path / "a", str(tmp_path / "a")):
        with pytest.raises(
            TypeError, match=r"/a.* is no tree\. Pass `ec\.open\(path\)"
        ):
            ec.materialise(path)


def test_splice_leaves_lazy_leaves_in_like(tmp_path, getkey, layout):
    state = _state(getkey())
    ec.tree_serialise_leaves(tmp_path / "a", state, layout=layout)
    like = eqx.filter_eval_shape(Net, 16, key=jr.key(0))
    lazy = ec.open(tmp_path / "a").splice(like, source="model")
    assert isinstance(lazy, Net)
    assert all(isinstance(x, ec.LazyArray) for x in jax.tree.leaves(lazy))
    assert eqx.tree_equal(ec.materialise(lazy), state["model"], typematch=True)
    head = eqx.nn.Linear(16, 5, key=getkey())
    swapped = ec.materialise(eqx.tree_at(lambda m: m.head, lazy, head))
    assert swapped.head.weight is head.weight
    assert eqx.tree_equal(swapped.layers, state["model"].layers)


def test_splice_of_a_part_keeps_the_rest(tmp_path, getkey):
    model = Net(16, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", model)
    other = Net(16, key=getkey())
    lazy = ec.open(tmp_path / "a").splice(other, where=lambda m: m.layers[2])
    out = ec.materialise(lazy)
    assert eqx.tree_equal(out.layers[2], model.layers[2])
    assert out.layers[1].weight is other.layers[1].weight


def test_from_two_checkpoints(tmp_path, getkey):
    one, two = Net(16, key=getkey()), Net(16, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "1", one)
    ec.tree_serialise_leaves(tmp_path / "2", two)
    like = eqx.filter_eval_shape(Net, 16, key=jr.key(0))
    head = ec.open(tmp_path / "2").tree.head.weight
    lazy = ec.open(tmp_path / "1").splice(like)
    out = ec.materialise(eqx.tree_at(lambda m: m.head.weight, lazy, head))
    assert np.array_equal(out.head.weight, two.head.weight)
    assert np.array_equal(out.head.bias, one.head.bias)


# ---- LazyArray is abstract, and never lies.


@pytest.fixture
def lazies(tmp_path):
    ec.tree_serialise_leaves(
        tmp_path / "lazies", {"a": jnp.full(3, 1.0), "b": jnp.full(3, 2.0)}
    )
    ckpt = ec.open(tmp_path / "lazies")
    return ckpt["a"], ckpt["b"]


class Scale(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x * self.w


def test_lazy_is_abstract(lazies):
    a, _ = lazies
    assert isinstance(a, jax.ShapeDtypeStruct)
    assert jax.eval_shape(lambda x: x[None] * 2, a).shape == (1, 3)
    assert jax.jit(lambda x: x + 1).lower(a).compile()(jnp.ones(3))[0] == 2
    assert "a: f32[3]" in eqx.tree_pformat(Scale(a))
    assert jax.tree.map(lambda x: x, Scale(a)).w is a
    with BytesRead() as read:
        out = eqx.filter_eval_shape(lambda m, x: m(x), Scale(a), jnp.ones(3))
    assert out.shape == (3,) and read.total == 0


def test_lazy_is_read_on_purpose(lazies):
    a, _ = lazies
    assert isinstance(a.read(), jax.Array) and a.read().tolist() == [1, 1, 1]
    assert np.asarray(a).tolist() == jnp.asarray(a).tolist() == [1, 1, 1]
    assert np.asarray(a, np.float64).dtype == np.float64
    assert ec.materialise({"x": a})["x"].tolist() == [1, 1, 1]
    assert a.store.read().result().tolist() == [1, 1, 1]
    assert ts.open(a.url).result().read().result().tolist() == [1, 1, 1]


def test_two_lazies_of_one_shape_are_two(lazies):
    a, b = lazies
    assert a != b and not a == b and a == a and len({a, b}) == 2
    assert not eqx.tree_equal(a, b)
    call = eqx.filter_jit(lambda m, x: m(x))
    for model in (Scale(a), Scale(b)):
        with pytest.raises(TypeError):
            call(model, jnp.ones(3))
    add = eqx.filter_jit(lambda m, x: x + m)
    for lazy in (a, b):
        with pytest.raises(TypeError):
            add(lazy, jnp.zeros(3))


def test_grad_of_a_lazy_model_is_an_error(lazies):
    for grad in (eqx.filter_grad, eqx.filter_value_and_grad):
        with pytest.raises((TypeError, ValueError)):
            grad(lambda m, x: m(x).sum())(Scale(lazies[0]), jnp.ones(3))


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a * 2,
        lambda a: 2 + a,
        lambda a: jnp.ones(3) * a,
        lambda a: np.ones(3) * a,
        lambda a: np.ones((2, 3)) @ a,
        lambda a: a @ jnp.ones(3),
        lambda a: -a,
        lambda a: a > 0,
        lambda a: bool(a[0]),
        lambda a: float(a[0]),
        lambda a: int(a[0]),
        lambda a: jnp.sum(a),
        lambda a: jnp.add(a, 1),
        lambda a: jnp.stack([a, a]),
        lambda a: jnp.reshape(a, (3, 1)),
        lambda a: jnp.split(a, 3),
        lambda a: jax.vmap(lambda x: x + 1)(a),
        lambda a: jax.jit(lambda x: x + 1)(a),
    ],
)
def test_arithmetic_on_a_lazy_is_an_error(lazies, use):
    with pytest.raises((TypeError, ValueError)):
        use(lazies[0])


def test_update_stays_lazy(lazies):
    a, _ = lazies
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    moved = a.update(sharding=sharding)
    assert isinstance(moved, ec.LazyArray) and moved.read().sharding == sharding
    assert a.update(dtype=jnp.bfloat16).read().dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="has shape"):
        a.update(shape=(4,))


def test_copies_and_pickles(tmp_path, lazies):
    a, _ = lazies
    assert copy.copy(a) is a and copy.deepcopy(a) is a
    again = pickle.loads(pickle.dumps(a[1:]))
    assert again.name == "a" and again.read().tolist() == [1, 1]
    ckpt = pickle.loads(pickle.dumps(ec.open(tmp_path / "lazies")))
    assert ckpt["b"].read().tolist() == [2, 2, 2]
    data = pickle.dumps(a)
    ec.tree_serialise_leaves(tmp_path / "lazies", {"a": jnp.zeros(3)})
    with pytest.raises(RuntimeError, match="replaced after it was pickled"):
        pickle.loads(data)


def test_immutable(lazies, tmp_path):
    with pytest.raises(AttributeError):
        ec.open(tmp_path / "lazies").metadata = 1


# ---- Views.


def test_views_equal_numpy(tmp_path, layout):
    x = np.arange(2000 * 30 * 4, dtype=np.float32).reshape(2000, 30, 4)
    small = np.arange(24).reshape(2, 3, 4)
    ec.tree_serialise_leaves(
        tmp_path / "a", {"x": x, "s": small}, layout=layout, chunks=100_000
    )
    ckpt = ec.open(tmp_path / "a")
    keys = [
        np.s_[5],
        np.s_[-1, ..., 2],
        np.s_[10:20],
        np.s_[1990:, 3:5],
        np.s_[::-7, None, 1],
        np.s_[:, 2],
        np.s_[3:1],
        np.s_[..., ::2],
        np.s_[17:1700:333, ::-1, -1],
        np.array([3, 1999, 3, -2000, 700]),
        np.s_[[1, 900], ::2, [[3]][0][0]],
        np.arange(2000) % 7 == 3,
    ]
    for key in keys:
        for verify in (True, False):
            view = ckpt["x"][key]
            assert view.shape == x[key].shape
            assert np.array_equal(view.read(verify=verify), x[key])
            assert np.array_equal(view.T.read(verify=verify), x[key].T)
        assert np.array_equal(ckpt["x"][key].T.store.read().result(), x[key].T)
    assert np.array_equal(ckpt["s"][1, ::-1].T, small[1, ::-1].T)
    assert np.array_equal(ckpt["x"][5][3:, 1][::2], x[5][3:, 1][::2])
    assert [r.read().tolist() for r in ckpt["s"][1]] == small[1].tolist()
    with pytest.raises(IndexError):
        ckpt["s"][2]
    with pytest.raises(IndexError):
        ckpt["s"][0, 0, 0, 0]
    with pytest.raises(TypeError, match="one index array at a time"):
        ckpt["s"][[0, 1], [0, 1]]


def test_astype_is_lazy_and_checked(tmp_path):
    tree = {"f": jnp.linspace(0, 1, 7), "i": jnp.array([1, 300]), "n": 3}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    ckpt = ec.open(tmp_path / "a")
    half = ckpt["f"].astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert np.array_equal(half.read(), tree["f"].astype(jnp.bfloat16))
    assert np.array_equal(half[2:].T.read(), tree["f"].astype(jnp.bfloat16)[2:])
    assert half.store.dtype.numpy_dtype == jnp.bfloat16
    assert ckpt["i"].astype(jnp.int16).read().tolist() == [1, 300]
    with pytest.raises(RuntimeError, match="i: 300 does not fit into uint8"):
        ckpt["i"].astype(jnp.uint8).read()
    with pytest.raises(TypeError, match="not cast to int32"):
        ckpt["f"].astype(jnp.int32)
    with pytest.raises(TypeError, match="not an array"):
        ckpt["n"].astype(jnp.float32)


INTS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


def test_numpy_gets_no_other_numbers(tmp_path):
    """Of each dtype that is asked for: those that were saved, or an error."""
    ends = {d: (np.iinfo(d).min, np.iinfo(d).max) for d in INTS}
    saved = {d: [*ends[d], 7] for d in INTS} | {"small": [1, 100], "huge": 2**70}
    tree = {d: np.array(saved[d], d) for d in INTS}
    tree |= {"small": np.array(saved["small"]), "huge": saved["huge"]}
    ec.tree_serialise_leaves(tmp_path, tree)
    ckpt, held = ec.open(tmp_path), 0
    for name in tree:
        values = np.array(saved[name], object)
        for dtype, (low, high) in ends.items():
            if low <= values.min() and values.max() <= high:
                out = np.asarray(ckpt[name], dtype=dtype)
                assert out.dtype == dtype and out.tolist() == values.tolist()
                held += 1
            else:
                with pytest.raises(RuntimeError, match=f"`{name}` do not survive"):
                    np.asarray(ckpt[name], dtype=dtype)
    assert held == 26 + len(INTS)  # Of pairs, and of the small one.


def test_jax_gets_no_other_numbers(tmp_path):
    """JAX asks for 32 bits where x64 is not enabled."""
    lost = {"i": np.array([2**40, 1]), "f": np.array([0.5, 1e300]), "many": -(2**40)}
    good = {"j": np.array([2**31 - 1]), "g": np.array([0.5, -np.inf]), "one": 1}
    ec.tree_serialise_leaves(tmp_path, lost | good)
    ckpt = ec.open(tmp_path)
    for name, x in good.items():
        assert jnp.asarray(ckpt[name]).tolist() == np.asarray(x).tolist()
    for name in lost:
        with pytest.raises(RuntimeError, match=f"`{name}` do not survive"):
            jnp.asarray(ckpt[name])
        with pytest.raises(RuntimeError, match=f"`{name}` do not survive"):
            jnp.array(ckpt[name])


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_a_cast_of_a_cast_rounds_twice(tmp_path, kind):
    x = np.random.default_rng(0).random((300, 70), np.float32)
    ec.tree_serialise_leaves(tmp_path / "a", {"f": kind(x), "i": kind([1, 300])})
    ckpt = ec.open(tmp_path / "a")
    half = ckpt["f"].astype(jnp.bfloat16)
    like = {"f": jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)}
    spliced = ckpt.splice(like, cast=True, unexpected="ignore")["f"]
    rounded = x.astype(jnp.bfloat16.dtype).astype(np.float32)
    for lazy in half, half.T.T, pickle.loads(pickle.dumps(half)), spliced:
        twice = lazy.astype(np.float32)
        assert (twice.shape, twice.dtype, twice.name) == (x.shape, x.dtype, "f")
        assert type(twice.read()) is type(lazy.read())
        np.testing.assert_array_equal(twice.read(), rounded)
        np.testing.assert_array_equal(twice[5:, ::3].T.read(), rounded[5:, ::3].T)
        np.testing.assert_array_equal(lazy.update(dtype=np.float32).read(), rounded)
    # Three roundings of what lies between two numbers of each.
    thrice = half.astype(np.float16).astype(jnp.float8_e5m2)
    expected = rounded.astype(np.float16).astype(jnp.float8_e5m2.dtype)
    np.testing.assert_array_equal(np.asarray(thrice), expected)
    with pytest.raises(RuntimeError, match="i: 300 does not fit into int8"):
        ckpt["i"].astype(np.int8).astype(np.int32).read()
    # A cast that is exact is none: this is the stored array still.
    wide = ckpt["f"].astype(np.float64).astype(np.float16)
    assert wide.store.dtype.numpy_dtype == np.float16


def test_a_cast_of_a_leaf_of_like_casts_nothing_else(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", np.linspace(0, 1, 7))
    like = ec.open(tmp_path / "a").tree.astype(np.float16)
    with pytest.raises(RuntimeError, match="cast=True"):
        ec.tree_deserialise_leaves(tmp_path / "a", like)
    assert ec.tree_deserialise_leaves(tmp_path / "a", like, cast=True).dtype == "f2"


# ---- Laziness, proved by TensorStore's counters.


def test_bytes_read(tmp_path, getkey):
    state = _state(getkey(), width=256)
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, state)
    like = eqx.filter_eval_shape(Net, 256, key=jr.key(0))
    ckpt = ec.open(path)
    index = (path / "eqx_ckpt.json").stat().st_size
    # The nodes and digests that lead to the data.
    extra = 40_000
    with BytesRead() as read:
        ec.open(path)
    assert read.total == index
    with BytesRead() as everything:
        ec.materialise(ckpt.tree)
    assert ckpt.nbytes <= everything.total <= ckpt.nbytes + extra
    params = sum(x.nbytes for x in jax.tree.leaves(state["model"]))
    with BytesRead() as read:
        lazy = ckpt.splice(like, source="model")
    assert read.total == 0
    with BytesRead() as read:
        ec.materialise(lazy)
    assert params <= read.total <= params + extra
    with BytesRead() as read:
        ec.tree_deserialise_leaves(
            ckpt, like, source="model", where=lambda m: m.layers[1]
        )
    layer = state["model"].layers[1]
    assert layer.weight.nbytes <= read.total <= layer.weight.nbytes + 1024 + extra
    with BytesRead() as read:
        ec.tree_deserialise_leaves(
            ckpt, like, source="model", filter_spec=lambda x: x.ndim == 1
        )
    assert read.total < 10_000


def test_a_slice_reads_its_rows(tmp_path, layout):
    x = np.random.default_rng(0).standard_normal((4000, 1000), dtype=np.float32)
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, {"x": x}, layout=layout, chunks=2**20)
    ckpt = ec.open(path)
    with BytesRead() as everything:
        ckpt["x"].read()
    assert everything.total >= x.nbytes
    with BytesRead() as read:
        out = ckpt["x"][1000:1050].read()
    assert np.array_equal(out, x[1000:1050])
    # Whole chunks are read, so that they can be verified.
    assert read.total <= 2.1 * 2**20
    with BytesRead() as read:
        out = ckpt["x"][1000:1050].read(verify=False)
    assert np.array_equal(out, x[1000:1050])
    assert read.total <= 1.1 * out.nbytes + 5000
    with BytesRead() as read:
        ckpt["x"][1000:1050].T.astype(jnp.float16)
    assert read.total == 0


def test_open_initialises_no_backend(tmp_path, getkey):
    state = {**_state(getkey()), "key": getkey(), "n": 3, "s": np.zeros(3)}
    ec.tree_serialise_leaves(tmp_path / "a", state)
    run_program("open_without_backend", tmp_path / "a")


def test_reading_writes_nothing(tmp_path, getkey, layout):
    state = _state(getkey())
    ec.tree_serialise_leaves(tmp_path / "a", state, layout=layout)
    before = files_of(tmp_path)
    ckpt = ec.open(tmp_path / "a")
    ec.materialise(ckpt.splice(state))
    repr(ckpt)
    assert files_of(tmp_path) == before


# ---- Pinned to a save.


def test_a_replaced_checkpoint_raises(tmp_path, layout):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, {"x": jnp.zeros(3)}, layout=layout)
    old, asked = ec.open(path), ec.open(path)
    assert asked["x"].store.read().result().tolist() == [0, 0, 0]
    ec.tree_serialise_leaves(path, {"x": jnp.ones(3)}, layout=layout)
    for verify in (True, False):
        with pytest.raises(RuntimeError, match="replaced or deleted after it was"):
            old["x"].read(verify=verify)
    for ckpt in (old, asked):
        with pytest.raises((RuntimeError, ValueError)):
            ckpt["x"].store.read().result()
    assert ec.open(path)["x"].read().tolist() == [1, 1, 1]


def test_threads(tmp_path, getkey):
    state = _state(getkey())
    ec.tree_serialise_leaves(tmp_path / "a", state)
    ckpt = ec.open(tmp_path / "a")
    failed = []

    def read(name):
        try:
            for _ in range(20):
                ckpt[name].read(), ckpt.tree.model.layers[0].weight.read()
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=read, args=(n,)) for n in list(ckpt.leaves)[:8]]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed


@pytest.mark.parametrize("size", [3, *long(10**6)])
@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr", "memory")])
def test_a_forked_child_is_told_to_spawn(tmp_path, layout, size):
    path = "memory://forked" if layout == "memory" else str(tmp_path / "a")
    out = run_program("calls_of_forks", size, layout, path)
    assert out.split() == ["True", "RuntimeError"] * 10


def test_a_big_skeleton_costs_little(tmp_path):
    """A skeleton of 70 billion parameters with lazy leaves: no data is ever made."""
    out = run_program("open_a_big_model", tmp_path)
    parameters, seconds, mebibytes = map(float, out.split())
    assert parameters > 70e9
    assert seconds <= 3 and mebibytes < 50, out


def test_what_is_below_a_file_or_no_file_at_all(tmp_path):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "file" / "x", tmp_path / "fifo", "/dev/null"):
        with pytest.raises(FileNotFoundError, match="no checkpoint|not a checkpoint"):
            ec.open(path)
        assert not ec.exists(path)


def test_a_sequence_with_gaps(tmp_path):
    """Each element keeps its place, in slices and loops too."""
    tree = {"layers": [jnp.full(2, float(i)) for i in range(6)]}
    keep = lambda t: [t["layers"][i] for i in (1, 2, 4)]
    ec.tree_serialise_leaves(tmp_path / "c", tree, where=keep)
    layers = ec.open(tmp_path / "c").tree.layers
    value = lambda x: None if x is None else float(x.read()[0])
    want = [None, 1, 2, None, 4, None]
    assert len(layers) == 6 and list(map(value, layers)) == want
    assert list(map(value, reversed(layers))) == want[::-1]
    for key in (slice(2, 4), slice(-1, None), slice(None, None, -2), slice(9)):
        assert list(map(value, layers[key])) == want[key]
    with pytest.raises(KeyError):
        layers[-1]  # It was not stored, and the one before it is another.
    some = ec.materialise(layers[1:4])
    assert [None if x is None else float(x[0]) for x in some] == [1, 2, None]
    pair = (lambda m: m, lambda c: c.layers[2:4])
    rest = lambda c: [c.layers[:2], c.layers[4]]
    out, _ = ec.graft(jnp.zeros(2), tmp_path / "c", [pair], drop=rest)
    assert out.tolist() == [2, 2]


def test_a_spliced_tree_as_like(tmp_path):
    """Lazy leaves in it come back as what they would be read as."""
    tree = {"n": 3, "rate": 0.5, "host": np.arange(3.0), "w": jnp.ones(2)}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    lazy = ec.open(tmp_path / "c").splice(tree)
    out = ec.tree_deserialise_leaves(tmp_path / "c", lazy)
    assert {k: type(out[k]) for k in tree} == {k: type(tree[k]) for k in tree}
    assert eqx.tree_equal(out, tree)
    with pytest.raises(TypeError, match="`ckpt.tree`"):
        ec.materialise(ec.open(tmp_path / "c"))
    w = ec.open(tmp_path / "c")["w"]
    with pytest.raises(TypeError, match="has not been read"):
        1.0 in w  # noqa: B015


@pytest.mark.parametrize("shape", [(16,), (64,), (64, 16), (3, 5)])
def test_very_many_alike_between_large_ones(tmp_path, shape):
    """They are made some at a time, of pieces of memory that other leaves share; what
    is larger has its own. Each gets its own values, and no memory of another."""
    size = math.prod(shape)
    tree = {
        f"{i:04}": jnp.arange(i, i + (size if i % 100 else 40_000), dtype=jnp.float32)
        for i in range(1600)
    }
    tree = {n: x.reshape(shape) if x.size == size else x for n, x in tree.items()}
    ec.tree_serialise_leaves(tmp_path / "1", tree)
    for where in (None, lambda x: [x[n] for n in sorted(x) if int(n) % 3]):
        loaded = ec.tree_deserialise_leaves(
            tmp_path / "1", eqx.filter_eval_shape(lambda: tree), where=where
        )
        some = {n: x for n, x in loaded.items() if isinstance(x, jax.Array)}
        assert len(some) > len(tree) // 2
        eqx.tree_equal(some, {n: tree[n] for n in some}) or pytest.fail("other values")
        starts = {x.unsafe_buffer_pointer() for x in some.values()}
        assert len(starts) == len(some)


@pytest.fixture
def made(monkeypatch):
    """How many arrays are made jax arrays together, each time, and the bytes that they
    keep: all that they are parts of."""
    calls = []

    def look(alike, _):
        kept = {}
        for _, array in alike.waiting:
            while isinstance(array.base, np.ndarray):
                array = array.base
            kept[id(array)] = array.nbytes
        calls.append((len(alike.waiting), sum(kept.values())))

    inside.watch(monkeypatch, "make arrays together", look)
    return calls


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_alike_is_made_together_however_it_is_asked_for(
    tmp_path, made, is_known, monkeypatch
):
    """Also with a JAX that has another function below `device_put`, or none."""
    if not is_known:
        inside.replace(monkeypatch, "put arrays as JAX does", None)
    tree = {f"{i:02}": jnp.full(5, i, jnp.float32) for i in range(64)}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    like = {n: jax.ShapeDtypeStruct((5,), jnp.bfloat16) for n in tree}
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, cast=True)
    assert eqx.tree_equal(out, {n: x.astype(jnp.bfloat16) for n, x in tree.items()})
    assert not any(x.committed for x in out.values())
    lazies = {n: x[:3] for n, x in ec.open(tmp_path / "c").leaves.items()}
    assert eqx.tree_equal(ec.materialise(lazies), {n: x[:3] for n, x in tree.items()})
    assert [n for n, _ in made] == [64] * 2


def test_what_waits_keeps_little_memory_of_what_came_with_it(tmp_path, made):
    """Small leaves are read together, and one that waits keeps the memory of others."""
    tree = {}
    for i in range(40):
        tree |= {f"{i:02}.{j}": np.full(15_000, i, np.float32) for j in range(4)}
        tree[f"{i:02}.x"] = jnp.full(4, i, jnp.float32)
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    out = ec.tree_deserialise_leaves(tmp_path / "c", tree, max_bytes=2**20)
    assert eqx.tree_equal(out, tree)
    assert sum(n for n, _ in made) == 40
    assert max(kept for _, kept in made) < 2**20
