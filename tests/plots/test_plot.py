"""Plots of matplotlib."""

import builtins

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec


@pytest.fixture(autouse=True)
def plt():
    """Imported where it is used: its import takes longer than a test."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    yield plt
    plt.close("all")


@pytest.fixture
def save(tmp_path):
    def call(name, tree):
        ec.tree_serialise_leaves(tmp_path / name, tree)
        return tmp_path / name

    return call


def test_leaves(save, plt):
    tree = {
        "curve": jnp.arange(9.0),
        "picture": jnp.arange(12.0).reshape(3, 4) - 4,
        "positive": jnp.ones((3, 4), jnp.bfloat16),
        "more": jnp.ones((2, 3, 4)),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 4)),
    }
    ckpt = ec.open(save("ckpt", tree))
    figure, axes = plt.subplots(2, 2)
    assert ckpt["curve"].plot(ax=axes[0, 0]) is axes[0, 0]
    assert axes[0, 0].lines[0].get_ydata().tolist() == list(range(9))
    axes = ckpt["picture"].plot(axes[0, 1])
    assert axes.images[0].get_clim() == (-7, 7)
    assert (
        ckpt["positive"].plot(plt.figure().gca()).images[0].get_cmap().name == "viridis"
    )
    axes = ckpt["more"].plot(plt.figure().gca())
    assert sum(patch.get_height() for patch in axes.patches) == 24
    # A view, a computed one, and the current axes.
    current = plt.figure().gca()
    assert ckpt["picture"][0].plot() is current and len(current.lines) == 1
    assert ec.lazy(jnp.add)(ckpt["curve"], ckpt["curve"]).plot().lines[-1] is not None
    with pytest.raises(ValueError, match="`empty` has no numbers"):
        ckpt["empty"].plot()
    with pytest.raises(TypeError, match="`key` is a key"):
        ckpt["key"].plot()


def test_a_large_leaf_is_a_sample(save):
    ckpt = ec.open(save("large", {"x": np.zeros((20, 1024, 1024), np.float32)}))
    with ec.counting() as bytes_read:
        axes = ckpt["x"].plot()
    assert axes.get_title() == "x (a sample)" and bytes_read() < 34 * 2**20


def test_a_difference(save, plt):
    a = save("a", {f"w{i}": jnp.ones(3) for i in range(40)})
    b = save("b", {f"w{i}": jnp.ones(3) + i for i in range(40)})
    axes = ec.diff(a, b, values=True).plot()
    assert len(axes.patches) == 30
    assert axes.get_yticklabels()[0].get_text() == "w39"
    with pytest.raises(ValueError, match="`values=True`"):
        ec.diff(a, b).plot()
    assert ec.diff(a, a).plot(plt.figure().gca()).patches[:] == []


def test_a_run(tmp_path, plt):
    with ec.CheckpointManager(tmp_path / "run", keep=1) as manager:
        assert manager.plot() is plt.gca()
        for step in (1, 2):
            manager.save(step, {"w": jnp.ones(1)}, {"loss": 1 / step, "rate": step})
        manager.wait()
        axes = manager.plot(plt.figure().gca())
    assert [line.get_label() for line in axes.lines] == ["loss", "rate"]
    assert axes.lines[0].get_ydata().tolist() == [1.0, 0.5]


def test_without_matplotlib(save, monkeypatch):
    lazy = ec.open(save("ckpt", {"w": jnp.ones(3)}))["w"]
    load = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"eqx_ckpt\[plot\]"):
        lazy.plot()
