"""What the library says to those who take it for another one, or guess."""

import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import command

import eqx_ckpt as ec


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("save", "tree_serialise_leaves"),
        ("load", "tree_deserialise_leaves"),
        ("restore", "CheckpointManager"),
        ("tree_serialize_leaves", "tree_serialise_leaves"),
        ("checkpoint", "Checkpoint"),
    ],
)
def test_calls_of_other_libraries(name, here):
    with pytest.raises(AttributeError, match=f"here it is `{here}`") as caught:
        getattr(ec, name)
    # Python adds a hint of its own, of what is in `dir`.
    assert "_save" not in dir(ec) and {"open", "adapters", "Store"} <= {*dir(ec)}
    text = "".join(traceback.format_exception(caught.value))
    assert "Did you mean: '_" not in text
    assert not hasattr(ec, "nothing_like_it_at_all")


def test_strict_loads(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    like = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(TypeError, match='`unexpected="ignore"`, with `missing="keep"`'):
        theirs: dict[str, Any] = {"strict": False}
        ec.tree_deserialise_leaves(tmp_path / "x", like, **theirs)
    with pytest.raises(RuntimeError, match='missing: .*`missing="keep"` takes those'):
        ec.tree_deserialise_leaves(tmp_path / "x", like)
    found = ec.tree_deserialise_leaves(tmp_path / "x", like, missing="keep")
    assert found["b"].shape == (3,)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: np.ones(2) * x,
        lambda x: jnp.ones(2) @ x,
        lambda x: x**2,
        lambda x: -x,
        lambda x: abs(x),
        lambda x: x < 3,
        lambda x: x & 1,
        float,
    ],
)
def test_arithmetic_with_what_is_not_read(tmp_path, compute):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"`a` has not been read.*\.read\(\).*ec\.lazy"):
        compute(ec.open(tmp_path / "x")["a"])


def test_advice_is_not_what_was_given(tmp_path):
    layers = [{"p": 0.1 * i, "w": jnp.ones(2)} for i in range(3)]
    ec.tree_serialise_leaves(tmp_path / "x", {"b": layers})
    stacked = {"b": {"p": 0.0, "w": jnp.zeros((3, 2))}}
    pair = (lambda m: m["b"], lambda c: c.b, ec.adapters.stack())
    with pytest.raises(RuntimeError, match="several that differ") as caught:
        ec.graft(stacked, tmp_path / "x", [pair], scalars="load")
    assert 'scalars="load"' not in str(caught.value)
    found, _ = ec.graft(stacked, tmp_path / "x", [pair], scalars="keep")
    assert found["b"]["w"].shape == (3, 2)


def test_entries_of_a_state_are_told_by_name(tmp_path, capsys):
    model, state = eqx.nn.make_with_state(
        lambda key: {"norm": eqx.nn.BatchNorm(3, "b", mode="ema", dtype=jnp.float32)}
    )(jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "x", {"model": model, "state": state})
    assert command.main(["ls", tmp_path / "x"]) == 0
    shown = [capsys.readouterr().out, repr(ec.open(tmp_path / "x").tree)]
    for text in shown:
        assert "of model.norm." in text, text


def test_completion_shows_what_is_for_users():
    assert {"stack", "take"} <= {*dir(ec.adapters)}
    assert {"average", "Method"} <= {*dir(ec.merging)}
    for module in (ec.adapters, ec.merging):
        assert not {"jax", "np", "Any", "math"} & {*dir(module)}
        for name in dir(module):
            assert getattr(module, name).__doc__, name


def test_training_and_inference(tmp_path):
    """`inference` is a leaf, and loaded as all are: the mode is set afterwards."""
    model = eqx.nn.Dropout(0.5)
    ec.tree_serialise_leaves(tmp_path / "x", model)
    like = eqx.nn.inference_mode(model)
    assert not ec.tree_deserialise_leaves(tmp_path / "x", like).inference
    loaded = eqx.nn.inference_mode(ec.tree_deserialise_leaves(tmp_path / "x", model))
    assert loaded.inference and jax.tree.structure(loaded) == jax.tree.structure(model)


def test_counting_counts_files_only():
    ec.tree_serialise_leaves("memory://counting", {"a": jnp.ones(1000)})
    with ec.counting() as count:
        ec.open("memory://counting")["a"].read()
    assert count() == 0 and "memory://" in (ec.counting.__doc__ or "")
