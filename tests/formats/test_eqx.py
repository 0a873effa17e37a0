"""`.eqx` files, against Equinox."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import assert_alike

import eqx_ckpt as ec


def _tree(key):
    return {
        "model": eqx.nn.MLP(2, 3, 300, 2, key=key),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "bool": jnp.array([True, False]),
        "numpy": np.arange(6.0).reshape(2, 3),
        "generic": np.float32(2.5),
        "step": 3,
        "rate": 1e-3,
        "is_done": True,
        "z": 1j,
        "name": "a string stays as it is",
        "empty": jnp.zeros((0, 3)),
    }


def _zero(x):
    if isinstance(x, jax.Array):
        return jnp.zeros_like(x)
    if isinstance(x, np.ndarray):
        return np.zeros_like(x)
    return type(x)(0) if eqx.is_array_like(x) else x


@pytest.fixture
def saved(tmp_path, getkey):
    tree = _tree(getkey())
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", tree)
    return tmp_path / "m.eqx", tree


def test_loads_what_equinox_wrote(saved):
    path, tree = saved
    like = jax.tree.map(_zero, tree)
    assert_alike(
        ec.tree_deserialise_leaves(path, like), eqx.tree_deserialise_leaves(path, like)
    )
    skeleton = eqx.filter_eval_shape(lambda: tree["model"])
    like = {**like, "model": skeleton}
    assert eqx.tree_equal(ec.tree_deserialise_leaves(path, like), tree)


def test_open_gives_names(saved):
    path, tree = saved
    ckpt = ec.open(path, like=tree)
    assert ckpt.layout == "eqx" and ckpt.metadata is None
    assert ckpt.tree.model.layers[1].weight.shape == (300, 300)
    row = ckpt["model.layers.1.weight"][7].read()
    assert np.array_equal(row, tree["model"].layers[1].weight[7])
    assert ckpt["step"].read() == 3 and ckpt["z"].read() == 1j
    part = ec.tree_deserialise_leaves(ckpt, tree["model"], source="model")
    assert eqx.tree_equal(part, tree["model"])
    with pytest.raises(ValueError, match="eqx has no digests"):
        ec.verify(ckpt)


def test_hyperparameters_in_a_line_of_json(tmp_path, getkey):
    # https://docs.kidger.site/equinox/examples/serialisation
    hyperparameters = {"in_size": 2, "out_size": 1, "width_size": 8, "depth": 2}
    model = eqx.nn.MLP(**hyperparameters, key=getkey())
    with open(tmp_path / "m.eqx", "wb") as f:
        f.write((json.dumps(hyperparameters) + "\n").encode())
        eqx.tree_serialise_leaves(f, model)
    with pytest.raises(ValueError, match="Pass `like=`"):
        ec.open(tmp_path / "m.eqx")
    like = eqx.filter_eval_shape(eqx.nn.MLP, **hyperparameters, key=getkey())
    ckpt = ec.open(tmp_path / "m.eqx", like=like)
    assert ckpt.metadata == hyperparameters
    assert eqx.tree_equal(ec.tree_deserialise_leaves(ckpt, like), model)


@pytest.mark.parametrize(
    ("alter", "match"),
    [
        (lambda t: t.pop("z"), "more than the"),
        (lambda t: t.update(zz=jnp.ones(1)), "`like` has more leaves, from `zz`"),
        (lambda t: t.update(a=jnp.ones(1)), "in another order"),
        (lambda t: t.update(step=3.0), "is i64.*f64.*`step`"),
        (lambda t: t.update(is_done=1), "is bool.*i64.*`is_done`"),
        (lambda t: t.update(numpy=np.zeros((3, 2))), r"f64\[2,3\].*f64\[3,2\]"),
        (lambda t: t.update(numpy=np.zeros((2, 3), "f4")), r"f64\[2,3\].*f32\[2,3\]"),
        (lambda t: t.update(half=jnp.zeros(5, jnp.float16)), "16 bits"),
        (lambda t: t.update(step=jax.random.key(0)), "typed PRNG key"),
    ],
)
def test_another_tree_is_refused(saved, alter, match):
    path, tree = saved
    alter(tree)
    with pytest.raises(ValueError, match=match):
        ec.open(path, like=tree)


def test_fields_that_changed_places_are_told_where_they_can_be(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", [jnp.ones(2), jnp.ones(3)])
    with pytest.raises(ValueError, match="the record 0 of it"):
        ec.open(tmp_path / "m.eqx", like=[jnp.ones(3), jnp.ones(2)])


def test_arrays_in_the_order_of_fortran(tmp_path):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", {"a": array, "b": jnp.ones(2)})
    ckpt = ec.open(tmp_path / "m.eqx", like={"a": array, "b": jnp.zeros(2)})
    assert np.array_equal(ckpt["a"].read(), array) and (ckpt["b"].read() == 1).all()


def test_what_is_not_read(tmp_path):
    path = tmp_path / "m.eqx"

    def save(array):
        with open(path, "wb") as f:
            np.save(f, array)

    save(np.array([{}], object))
    with pytest.raises(ValueError, match="is object"):
        ec.open(path, like=np.ones(1))
    save(np.zeros(2, [("a", "f4")]))
    with pytest.raises(ValueError, match="is records.*of another tree"):
        ec.open(path, like=np.ones(2))
    save(np.ones(2, ">f4"))
    for like in (np.ones(2, "f4"), np.ones(2, ">f4")):
        with pytest.raises(ValueError, match="'>f4'.*in the order of other machines"):
            ec.open(path, like=like)


def test_hostile_files_are_refused(saved):
    path, tree = saved
    good = path.read_bytes()
    huge = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % 2**50
    record = b"\x93NUMPY\x01\x00" + len(huge + b"\n").to_bytes(2, "little") + huge
    for data, like in [
        (good[:-1], tree),
        (good + b"\0", tree),
        (good[:40], tree),
        (b"", tree),
        (b"x" * 500, tree),
        (good.replace(b"'descr': '<f8'", b"'descr': eval "), tree),
        (record + b"\n", jax.ShapeDtypeStruct((2**50,), jnp.float32)),
        (b"[" * 10**5 + b"\n" + good, tree),
        (b"[" * (2**20 + 1) + b"\n" + good, tree),
    ]:
        path.write_bytes(data)
        with pytest.raises(ValueError):
            ec.open(path, like=like)


def test_states_are_matched_by_their_index(tmp_path, getkey):
    class Net(eqx.Module):
        a: eqx.nn.BatchNorm
        b: eqx.nn.BatchNorm

    make = lambda key: Net(
        eqx.nn.BatchNorm(2, "batch", mode="ema"),
        eqx.nn.BatchNorm(2, "batch", mode="ema"),
    )
    model, state = eqx.nn.make_with_state(make)(getkey())
    state = state.set(model.b.ema_state_index, (jnp.ones(2), jnp.array([5.0, 5.0])))
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", (model, state))
    like = eqx.nn.make_with_state(make)(getkey())
    loaded, got = ec.tree_deserialise_leaves(tmp_path / "m.eqx", like)
    assert got.get(loaded.b.ema_state_index)[1].tolist() == [5, 5]


def test_converts(saved, tmp_path):
    path, tree = saved
    ec.tree_serialise_leaves(tmp_path / "new", ec.tree_deserialise_leaves(path, tree))
    assert eqx.tree_equal(ec.tree_deserialise_leaves(tmp_path / "new", tree), tree)


def test_a_file_without_its_tree_says_what_is_in_it(tmp_path):
    with open(tmp_path / "x.eqx", "wb") as file:
        file.write(b'{"width": 8}\n')
        eqx.tree_serialise_leaves(file, [jnp.ones((2, 3)), jnp.ones(4, jnp.bfloat16)])
    message = 'Its first line is `{"width": 8}`. Its records are f32[2,3], 16 bits[4].'
    with pytest.raises(ValueError, match=re.escape(message)):
        ec.open(tmp_path / "x.eqx")
