import json

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from support.command import main

import eqx_ckpt as ec


@pytest.fixture
def run(capsys):
    """Runs a command in this process: its status, and what it has printed."""

    def call(*arguments):
        capsys.readouterr()
        return (main([*map(str, arguments)]), *capsys.readouterr())

    return call


@pytest.fixture
def asked(run):
    """Runs a command with `--json`."""

    def call(*arguments, status=0):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (status, ""), err
        return json.loads(out)

    return call


def _tree(step=3):
    model = eqx.nn.MLP(2, 2, 64, 3, key=jax.random.key(0))
    return {"model": model, "key": jax.random.key(1), "step": step, "lr": 0.5}


@pytest.fixture
def ckpt(tmp_path):
    path = tmp_path / "ckpt"
    ec.tree_serialise_leaves(path, _tree(), metadata={"width": 64, "data": {"a": 1}})
    return path


@pytest.fixture
def steps(tmp_path):
    """A run of four steps, of which the second is pinned."""
    root = tmp_path / "run"
    with ec.CheckpointManager(root) as manager:
        for step in (10, 20, 30, 40):
            metrics = {"loss": 1 / step, "bad": jnp.nan}
            manager.save(step, {"w": jnp.arange(step), "frozen": jnp.ones(9)}, metrics)
        manager.wait()
        manager.pin(20)
    return root
