"""Functions that are stored with a tree, and run without its classes."""

import json
import pathlib
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import golden_functions
from support.helpers import enable_x64, run_program
from support.processes import good, run_team_program

import eqx_ckpt as ec


pytest.importorskip("flatbuffers")

CPU = ["cpu"]


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    drop: eqx.nn.Dropout
    scale: float

    def __call__(self, x, key=None):
        return self.drop(self.scale * self.linear(x), key=key)


def _model(scale=0.5):
    return Scaled(eqx.nn.Linear(3, 2, key=jr.key(0)), eqx.nn.Dropout(0.3), scale)


def _forward(tree, x, key):
    return jax.vmap(tree["model"])(x, jr.split(key, x.shape[0]))


X = jr.normal(jr.key(1), (4, 3))
ARGS = jax.ShapeDtypeStruct((4, 3), jnp.float32), jr.key(0)


@pytest.mark.long
def test_it_runs_where_the_class_cannot_be_imported(tmp_path):
    """And reads no more than it uses."""
    tree = {"model": _model(), "opt": jnp.zeros(100_000), "step": 3}
    function = ec.function(_forward, *ARGS, platforms=CPU)
    ec.tree_serialise_leaves(tmp_path / "c", tree, functions={"forward": function})
    with ec.counting() as bytes_read:
        stored = ec.open(tmp_path / "c").functions["forward"]
        assert stored.leaves == ("model.linear.weight", "model.linear.bias")
        assert stored.read().keys() == {*stored.leaves}
    assert bytes_read() < 100_000
    assert repr(stored) == (
        "Function(forward: (float32[4,3], key:threefry2x32[]) -> float32[4,2], "
        "of 2 leaves)"
    )
    out = run_program("call_a_stored_function", tmp_path / "c")
    expected = eqx.filter_jit(_forward)(tree, X, jr.key(2))
    assert out.strip() == np.asarray(expected).tobytes().hex()


def test_any_batch_and_gradients(tmp_path):
    model = _model()
    model = eqx.nn.inference_mode(model)
    x = jax.ShapeDtypeStruct("b, 3", jnp.float32)
    function = ec.function(lambda m, x: jax.vmap(m)(x), x, vjp_order=1)
    ec.tree_serialise_leaves(tmp_path / "c", model, functions={"f": function})
    f = ec.open(tmp_path / "c").functions["f"]
    assert "cpu" in f.platforms and len(f.platforms) == 4
    assert [str(n) for n in f.args[0].shape] == ["b", "3"]
    assert [str(n) for n in f.result.shape] == ["b", "2"]
    for size in (1, 5):
        np.testing.assert_array_equal(f(X[:size]), jax.vmap(model)(X[:size]))
    np.testing.assert_array_equal(jax.jit(lambda x: f(x))(X), f(X))
    # In `jit` no weight becomes a tracer that outlives it.
    assert not any(isinstance(w, jax.core.Tracer) for w in f._weights.values())
    grads = jax.grad(lambda w: f.exported.call(w, X).sum())(f.read())
    expected = eqx.filter_grad(lambda m: jax.vmap(m)(X).sum())(model)
    np.testing.assert_allclose(grads["linear.weight"], expected.linear.weight, 1e-6)
    with pytest.raises(NotImplementedError, match="`f`.*`jax.vmap`"):
        jax.vmap(f)(jnp.ones((2, 4, 3)))
    for bad in ((), (X, X), (X[0],), (X.astype(jnp.int32),), ({"x": X},)):
        with pytest.raises(TypeError, match=r"`f` takes \(float32\[b,3\],\), and was"):
            f(*bad)


class Counting(eqx.Module):
    norm: eqx.nn.BatchNorm
    table: jax.Array

    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.norm = eqx.nn.BatchNorm(3, axis_name="b")
        self.table = jnp.ones(3)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return x * self.table, state


@pytest.mark.long
def test_states_are_nests_by_name(tmp_path):
    model, state = eqx.nn.make_with_state(Counting)()

    def step(tree, x, state):
        run = jax.vmap(tree[0], axis_name="b", in_axes=(0, None), out_axes=(0, None))
        y, state = run(x, state)
        return {"y": y, "grads": eqx.filter(tree[0], eqx.is_array)}, state

    function = ec.function(step, X, state, platforms=CPU)
    ec.tree_serialise_leaves(
        tmp_path / "c", (model, state), functions={"step": function}
    )
    f = ec.open(tmp_path / "c").functions["step"]
    run = eqx.filter_jit(step)
    expected, after = run((model, state), X, state)
    out, nest = f(X, state)
    np.testing.assert_array_equal(out["y"], expected["y"])
    assert out["grads"]["table"].tolist() == [1, 1, 1]
    for a, b in zip(jax.tree.leaves(nest), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    # What it gives, it takes.
    again, _ = f(X, nest)
    expected, _ = run((model, state), X, after)
    np.testing.assert_array_equal(again["y"], expected["y"])


def test_stored_dtypes(tmp_path):
    """Weights that are cast as they are saved are cast back inside; keys are keys."""
    tree = {"w": jnp.linspace(0, 1, 3), "key": jr.key(7)}

    def f(t, x):
        return t["w"] * x + jr.normal(t["key"], (3,)), t["key"]

    functions = {"f": ec.function(f, jnp.ones(3), platforms=CPU)}
    ec.tree_serialise_leaves(
        tmp_path / "c", tree, dtype=jnp.bfloat16, functions=functions
    )
    stored = ec.open(tmp_path / "c").functions["f"]
    assert stored.read()["w"].dtype == jnp.bfloat16
    rounded = {**tree, "w": tree["w"].astype(jnp.bfloat16).astype(jnp.float32)}
    y, key = stored(2 * np.ones(3))
    np.testing.assert_array_equal(y, jax.jit(f)(rounded, 2 * jnp.ones(3))[0])
    assert jnp.array_equal(jr.key_data(key), jr.key_data(jr.key(7)))


def test_a_training_loop_exports_once(tmp_path, monkeypatch):
    exports = []
    export = jax.export.export

    def counted(*args, **kwargs):
        exports.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(jax.export, "export", counted)
    function = ec.function(_forward, *ARGS, platforms=CPU)

    def save(tree):
        del exports[:]
        ec.tree_serialise_leaves(tmp_path / "c", tree, functions={"f": function})
        return len(exports)

    model = _model()
    assert save({"model": model, "step": 1}) == 1
    # The step is not looked at; the scale is a part of the function.
    assert save({"model": model, "step": 2}) == 0
    stored = ec.open(tmp_path / "c").functions["f"]._stored
    assert {*stored.baked} == {"model.drop.p", "model.drop.inference", "model.scale"}
    zeros = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, model)
    assert save({"model": zeros, "step": 2}) == 0
    assert save({"model": _model(scale=0.25), "step": 2}) == 1
    assert save({"model": model, "step": 2, "more": jnp.ones(3)}) == 1
    assert save({"model": model, "step": 2}) == 0
    ec.open(tmp_path / "c").functions["f"](X, jr.key(0))


def test_a_number_that_is_used_is_a_part_of_it(tmp_path):
    function = ec.function(lambda t, x: t["scale"] * t["w"] * x, X, platforms=CPU)
    for scale in (2, 3):
        tree = {"w": jnp.ones(3), "scale": scale, "step": scale}
        ec.tree_serialise_leaves(tmp_path / "c", tree, functions={"f": function})
        f = ec.open(tmp_path / "c").functions["f"]
        assert f._stored.baked.keys() == {"scale"}
        np.testing.assert_array_equal(f(X), scale * X)


class Static(eqx.Module):
    w: jax.Array
    factor: Any = eqx.field(static=True)

    def __call__(self, x):
        factor = self.factor[0] if isinstance(self.factor, list) else self.factor
        return self.w * x / factor


def test_what_is_exported_again(tmp_path):
    """A tree that differs in anything that a function may look at, even if `==` does
    not tell, or in what has been changed in place."""

    def check(function, tree, *args):
        ec.tree_serialise_leaves(tmp_path / "c", tree, functions={"f": function})
        got = ec.open(tmp_path / "c").functions["f"](*args)
        # What is traced anew knows of nothing that was before.
        expected = jax.jit(lambda *x: function.fn(tree, *x))(*args)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)

    x = jnp.arange(1, 4)
    function = ec.function(lambda m, x: m(x), x, platforms=CPU)
    changed = [2.0]
    for factor in (1, 1.0, True, 0.0, -0.0, changed):
        check(function, Static(jnp.ones(3, jnp.int32), factor), x)
    changed[0] = 4.0
    check(function, Static(jnp.ones(3, jnp.int32), changed), x)
    # A number that is not used, but for its type, or its being one object.
    kinds = ec.function(
        lambda t, x: t["w"] * x * (2 if type(t["n"]) is float else 1), x, platforms=CPU
    )
    flags = ec.function(
        lambda t, x: t["w"] * x * (2 if t["n"] is True else 1), x, platforms=CPU
    )
    for n in (1, 1.0, False, True):
        check(kinds, {"w": jnp.ones(3), "n": n}, x)
        check(flags, {"w": jnp.ones(3), "n": n}, x)
    # What it closes over.
    scale = [1.0]
    closed = ec.function(lambda t, x: t["w"] * x * scale[0], x, platforms=CPU)
    for scale[0] in (1.0, 1, 3.0):
        check(closed, {"w": jnp.ones(3, jnp.int32)}, x)


TABLE = jnp.arange(900.0).reshape(300, 3)


def _calls_back(tree, x):
    jax.debug.print("{}", x)
    return x * tree["w"]


BAD = {
    "closes over an array.*f32.300,3., `TABLE`.*test_functions.py": (
        lambda t, x: t["w"] * x @ jnp.ones((3, 1)) + (x @ TABLE.T).sum(),
        {},
    ),
    "the leaf `t`, f32.300,3., which is no jax.Array.*test_functions.py": (
        lambda t, x: t["w"] * x + jnp.sin(t["t"]).sum(),
        {},
    ),
    "calls back into Python: `debug_.*EQX_ON_ERROR=off": (_calls_back, {}),
    "the leaf `w`, which is not saved": (
        lambda t, x: t["w"] * x,
        {"where": lambda t: t["t"]},
    ),
    "The result is a `function`": (lambda t, x: lambda: x, {}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_stored(tmp_path, message):
    fn, options = BAD[message]
    tree = {"w": jnp.ones(3), "t": np.ones((300, 3), np.float32)}
    function = ec.function(fn, jnp.ones((2, 3)), platforms=CPU)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        ec.tree_serialise_leaves(
            tmp_path / "c", tree, functions={"f": function}, **options
        )
    assert "`functions['f']`" in "".join(caught.value.__notes__)
    assert not (tmp_path / "c").exists()


def test_arguments():
    f = lambda t, x: x
    for shape, text in {
        "b, 3": "b,3",
        ("b", 3): "b,3",
        "batch,": "batch",
        ("batch", "2*batch"): "batch,2*batch",
    }.items():
        (x,) = ec.function(f, jax.ShapeDtypeStruct(shape, jnp.float32)).args
        assert ",".join(map(str, x.shape)) == text
    with pytest.raises(ValueError, match='write "batch," or "b, a, t, c, h"'):
        ec.function(f, jax.ShapeDtypeStruct("batch", jnp.float32))
    two = [jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), "f4") for _ in "ab"]
    with pytest.raises(ValueError, match="in several scopes"):
        ec.function(f, *two)
    with pytest.raises(TypeError, match="was given 3 as an argument"):
        ec.function(f, 3)
    with pytest.raises(TypeError, match="with the key 1. Use strings"):
        ec.function(f, {1: jnp.ones(3)})
    with pytest.raises(TypeError, match="`platforms` is a list"):
        ec.function(f, platforms="cpu")
    with pytest.raises(ValueError, match="`vjp_order` must be"):
        ec.function(f, vjp_order=-1)
    with pytest.raises(KeyError, match="no function 'x'. It has none"):
        ec.tree_serialise_leaves("memory://none", jnp.ones(3))
        ec.open("memory://none").functions["x"]


def _path(tmp_path, name="c") -> pathlib.Path:
    tree = {"w": jnp.ones(3)}
    function = ec.function(lambda t, x: t["w"] * x, jnp.ones(3), platforms=CPU)
    ec.tree_serialise_leaves(tmp_path / name, tree, functions={"f": function})
    return tmp_path / name


def test_damage_is_an_error_and_leaves_are_not_affected(tmp_path):
    path = _path(tmp_path)
    (file,) = path.glob("d/*/function-0")
    good = file.read_bytes()
    for bad in (good[:-1], good[:50] + b"x" + good[51:], b""):
        file.write_bytes(bad)
        with pytest.raises(ec.DamagedError, match="its function `f` is damaged"):
            ec.open(path).functions["f"](jnp.ones(3))
    file.unlink()
    with pytest.raises(ec.DamagedError, match="its function `f` is missing"):
        ec.open(path).functions["f"](jnp.ones(3))
    assert ec.open(path)["w"].read().tolist() == [1, 1, 1]


@pytest.mark.parametrize("version", golden_functions.UNTIL)
def test_what_older_versions_of_jax_have_written(version):
    if jax.__version_info__[:2] < tuple(map(int, version.split(".")))[:2]:
        pytest.skip("This JAX is older.")
    ckpt = ec.open(golden_functions.path(version))
    assert ec.verify(ckpt) == []
    forward, loss = ckpt.functions["forward"], ckpt.functions["loss"]
    assert forward._stored.versions == {"jax": version}
    if jax.__version_info__[:2] >= golden_functions.UNTIL[version]:
        why = f"cannot be read by JAX .*, as JAX {version} has.*6 months"
        with pytest.raises(ValueError, match=f"(?s){why}"):
            forward(jnp.ones((2, 4)))
        return
    tree, x = golden_functions.tree(), jnp.arange(8.0).reshape(2, 4)
    expected = golden_functions.forward(tree, x)
    np.testing.assert_allclose(forward(x), expected, rtol=1e-6)
    grads = jax.grad(lambda w: forward.exported.call(w, x).sum())(forward.read())
    assert grads["w"].shape == (4, 3)
    out, expected = loss(x, jr.key(1)), golden_functions.loss(tree, x, jr.key(1))
    np.testing.assert_allclose(out["loss"], expected["loss"], rtol=1e-6)
    assert jnp.array_equal(jr.key_data(out["keys"][0]), jr.key_data(tree["key"]))


def test_older_readers_see_the_same_index_but_for_one_field(tmp_path):
    path = _path(tmp_path)
    index = json.loads((path / "eqx_ckpt.json").read_text())
    assert index["version"] == 1
    (row,) = index["functions"].values()
    assert row["leaves"] == [0] and row["args"] == {"tuple": [["float32", [3]]]}


def test_two_processes(tmp_path):
    """Process 0 exports and writes; an error of it is one of both. If each saves alone,
    each does."""
    told = "[28. 28.]\n" * 2 + "[3. 3.]\nTrue\n"
    assert good(run_team_program(2, "team_that_saves_functions", tmp_path)) == [
        told,
        told,
    ]
    assert not ec.exists(tmp_path / "c")


def test_a_function_of_64_bits_where_they_are_not_enabled(tmp_path):
    with enable_x64(True):
        x = jax.ShapeDtypeStruct((3,), jnp.float64)
        double = ec.function(lambda tree, x: 2 * x, x, platforms=CPU)
        ec.tree_serialise_leaves(tmp_path / "a", {"n": 1}, functions={"f": double})
    function = ec.open(tmp_path / "a").functions["f"]
    said = r"takes float64\[3\], and is given float32\[3\]\. Enable x64"
    with pytest.raises(TypeError, match=said):
        function(np.ones(3))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="older JAX enters no mesh so")
def test_a_function_that_is_saved_within_a_mesh(tmp_path):
    run_program("function_within_a_mesh", str(tmp_path / "a"))
    function = ec.open(tmp_path / "a").functions["f"]
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="stored for 2 devices.*`jax.set_mesh`"):
        function(x)
    # What was exported within the mesh is not taken for this one.
    assert ec.open(tmp_path / "a-outside").functions["f"](x).tolist() == [[8] * 16] * 2
