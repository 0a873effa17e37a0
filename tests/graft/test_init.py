"""`load_or_init` and `unloaded`: trees of which only a part is in a checkpoint."""

import functools as ft
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from support.helpers import assert_alike, BytesRead, run_program

import eqx_ckpt as ec


class Net(eqx.Module):
    body: jax.Array
    head: jax.Array
    scale: float
    table: np.ndarray

    def __init__(self, out=3, *, key):
        a, b = jr.split(key)
        self.body = jr.normal(a, (40, 30))
        self.head = jr.cauchy(b, (out, 30))
        self.scale = 2.0
        self.table = np.arange(3, dtype=np.int32)


@pytest.fixture
def path(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"model": Net(key=jr.key(0))})
    return tmp_path / "x"


KEY = {"key": jr.key(1)}


def test_a_part_is_loaded_and_the_rest_initialised(path):
    saved = Net(key=jr.key(0))
    with BytesRead() as read:
        out = ec.load_or_init(
            Net,
            path,
            (5,),
            {"key": jr.key(1)},
            source="model",
            where=lambda m: m.body,
        )
    assert read.total < saved.body.nbytes + 3000
    fresh = eqx.filter_jit(Net)(5, key=jr.key(1))
    assert_alike(out.head, fresh.head)
    assert_alike(out.body, saved.body)
    assert_alike(out.table, saved.table)
    everything = ec.load_or_init(Net, path, (), KEY, source="model")
    assert_alike(everything, saved)


def test_what_is_loaded_is_not_initialised(path, monkeypatch):
    """The compiled program has the initialiser of the head, a tangent, and not that of
    the body, an inverse error function."""
    compiled = []
    jit = jax.jit

    def spy(fn, **kwargs):
        jitted = jit(fn, **kwargs)

        def call(*args):
            compiled.append(jitted.lower(*args).compile())
            return jitted(*args)

        return call

    def program(where):
        compiled.clear()
        with monkeypatch.context() as patch:
            patch.setattr(jax, "jit", spy)
            ec.load_or_init(Net, path, (), KEY, source="model", where=where)
        return compiled

    (only_head,) = program(lambda m: [m.body, m.table])
    text = only_head.as_text()
    # Elsewhere it has the names of whatever Python functions were on the stack.
    operations = " ".join(re.findall(r'op_name="([^"]*)"', text))
    assert "tan" in operations and "erf" not in operations and "[40,30]" not in text
    memory = only_head.memory_analysis()
    assert memory.output_size_in_bytes < 500
    (only_body,) = program(lambda m: [m.head, m.table])
    text = only_body.as_text()
    assert "[40,30]" in text and "[3,30]" not in text
    assert program(None) == []


def test_missing_leaves_are_an_error_or_initialised(tmp_path):
    saved = Net(key=jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "x", saved, where=lambda m: m.body)
    with pytest.raises(RuntimeError, match=r"    head  f32\[3,30\]"):
        ec.load_or_init(Net, tmp_path / "x", (), KEY)
    out = ec.load_or_init(Net, tmp_path / "x", (), KEY, missing="init")
    fresh = eqx.filter_jit(Net)(key=jr.key(1))
    assert_alike((out.body, out.head), (saved.body, fresh.head))
    with pytest.raises(RuntimeError, match="has changed shape"):
        wider = lambda key: eqx.tree_at(lambda m: m.body, Net(key=key), jnp.ones(3))
        ec.load_or_init(wider, tmp_path / "x", (jr.key(1),), missing="init")
    with pytest.raises(ValueError, match='`missing="keep"` is for'):
        ec.load_or_init(Net, tmp_path / "x", kwargs=KEY, missing="keep")


def test_no_keyword_of_the_function_is_taken_for_one_of_the_call(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    init = lambda where, static, cast: {"a": jnp.zeros(2), "b": where + static + cast}
    kwargs = dict.fromkeys(("where", "static", "cast"), jnp.ones(()))
    out = ec.load_or_init(init, tmp_path / "x", (), kwargs, missing="init")
    assert out["a"].tolist() == [1, 1] and float(out["b"]) == 3
    with pytest.raises(TypeError, match=r"`args` must be a tuple, and `kwargs` a"):
        ec.load_or_init(init, tmp_path / "x", "key")


def test_the_error_for_an_abstract_leaf_says_what_works(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    init = lambda: {"a": jnp.zeros(2), "b": jnp.full(3, 7.0)}
    like = eqx.filter_eval_shape(init)
    with pytest.raises(RuntimeError, match="load_or_init"):
        ec.tree_deserialise_leaves(tmp_path / "x", like, missing="keep")
    out = ec.load_or_init(init, tmp_path / "x", missing="init")
    assert out["a"].tolist() == [1, 1] and out["b"].tolist() == [7, 7, 7]


def test_keys_weak_types_and_states(tmp_path):
    def init(key):
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")
        return {
            "norm": norm,
            "state": state,
            "key": key,
            "weak": jnp.asarray(3.0) + 1,
            "loaded": jnp.zeros(3),
        }

    ec.tree_serialise_leaves(tmp_path / "x", {"loaded": jnp.ones(3)})
    out = ec.load_or_init(
        init, tmp_path / "x", (jr.key(3),), where=lambda t: t["loaded"]
    )
    assert_alike(out, {**init(jr.key(3)), "loaded": jnp.ones(3)})


def test_shardings(path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    out = ec.load_or_init(
        Net,
        path,
        (8,),
        {"key": jr.key(1)},
        source="model",
        where=lambda m: m.body,
        sharding=rows,
    )
    assert out.body.sharding == rows and out.head.sharding == rows
    assert_alike(np.asarray(out.body), np.asarray(Net(key=jr.key(0)).body))


def test_one_model_is_the_peak():
    """64 MB loaded and 64 MB initialised, with little beside them."""
    out = run_program("peak_of_load_or_init")
    # In arrays: two are the tree. Making all of it first would take at least three.
    assert float(out) < 2.8


def test_unloaded(path):
    skeleton = eqx.filter_eval_shape(Net, key=jr.key(0))
    assert ec.unloaded(skeleton) == ["body", "head", "table"]
    lazy = ec.open(path).splice(skeleton, source="model", where=lambda m: m.body)
    assert ec.unloaded(lazy) == ["body", "head", "table"]
    assert ec.unloaded(ec.materialise(lazy)) == ["head", "table"]
    loaded = ec.tree_deserialise_leaves(path, skeleton, source="model")
    assert ec.unloaded(loaded) == [] and ec.unloaded([None, 1, "a"]) == []
    for wrong in (path, str(path), ec.open(path)):
        with pytest.raises(TypeError, match="is no tree"):
            ec.unloaded(wrong)


def test_a_part_saved_and_loaded_into_the_whole(tmp_path):
    """Only the head at each step; the base is what it was."""
    model = Net(key=jr.key(0))
    head = lambda m: m.head
    ec.tree_serialise_leaves(tmp_path / "head", model, where=head)
    assert list(ec.open(tmp_path / "head").leaves) == ["head"]
    matrix = lambda x: eqx.is_array(x) and x.shape == (3, 30)
    ec.tree_serialise_leaves(tmp_path / "head", model, filter_spec=matrix)
    other = Net(key=jr.key(1))
    out = ec.tree_deserialise_leaves(tmp_path / "head", other, missing="keep")
    assert_alike(out, eqx.tree_at(head, other, model.head))
    pairs = [(head, lambda c: c.head)]
    grafted, report = ec.graft(
        other, tmp_path / "head", pairs, fresh=lambda m: [m.body, m.table]
    )
    assert_alike(grafted, out)
    assert report.names("fresh") == ["body", "table"]
    assert jtu.tree_structure(grafted) == jtu.tree_structure(other)


class _Holder:
    def __init__(self, x):
        self.x = x

    def method(self, y):
        return self.x + y


class _Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def _closure(x):
    return lambda y: x + y


def _default(x):
    return lambda y, x=x: x + y


def _keyword_default(x):
    return lambda y, *, x=x: x + y


# Where an array may be that JAX does not see.
_HIDERS = {
    "closure": _closure,
    "closure of a closure": lambda x: _closure(_closure({"a": [x]})),
    "default": _default,
    "keyword default": _keyword_default,
    "partial": lambda x: ft.partial(jnp.add, x),
    "keyword of a partial": lambda x: ft.partial(jnp.add, y=x),
    "method": lambda x: _Holder(x).method,
    "its own method": lambda x: x.dot,
    "object": _Holder,
    "slots": _Slots,
    "jit": lambda x: jax.jit(_closure(x)),
    "vmap": lambda x: jax.vmap(_closure(x)),
    "custom_jvp": lambda x: jax.custom_jvp(_closure(x)),
    "Partial of a closure": lambda x: jtu.Partial(_closure(x)),
    "filter_jit": lambda x: eqx.filter_jit(_closure(x)),
    "Lambda": lambda x: eqx.nn.Lambda(_closure(x)),
}


class _Hides(eqx.Module):
    w: jax.Array
    leaf: object
    static: object = eqx.field(static=True)


@pytest.mark.parametrize("way", _HIDERS)
def test_arrays_that_jax_does_not_see(way):
    """A traced function leaves them without a value, and the first use would say so."""
    hide = _HIDERS[way]

    def init(place):
        x = jnp.ones(3)
        leaf, static = ({"f": hide(x)}, None) if place == "leaf" else (None, hide(x))
        return _Hides(jnp.ones(2), leaf, static)

    ec.tree_serialise_leaves("memory://hides", {"w": jnp.ones(2)})
    for place, name in (("leaf", "leaf.f"), ("static", "static")):
        make = ft.partial(init, place)
        model = eqx.filter_eval_shape(make)
        whole = (lambda m: m.w, "w")
        for call in (
            lambda: ec.skeleton(make),
            lambda: ec.load_or_init(make, "memory://hides"),
            lambda: ec.graft(model, "memory://hides", [whole], init=make),
        ):
            with pytest.raises(ValueError, match=rf"`{name}[.\w]*` is a .* f32\[3\] "):
                call()
