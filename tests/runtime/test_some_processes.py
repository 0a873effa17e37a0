"""Arrays on devices of only some of the processes of a run."""

import jax
import numpy as np
from support.processes import good, run_team_program

import eqx_ckpt as ec


X = np.arange(2**16, dtype=np.float32).reshape(256, 256)


def test_two_of_four(tmp_path):
    """They are saved by those that have them, and each loads what it needs."""
    assert (
        good(run_team_program(4, "team_of_which_two_have_arrays", tmp_path))
        == ["done\n"] * 4
    )
    assert ec.verify(tmp_path / "c") == []
    got = ec.materialise(ec.open(tmp_path / "c").tree)
    assert np.array_equal(got["all"], X) and np.array_equal(got["some"], X + 1)
    assert got["count"] == 3 and got["weak"] == 2.5
    words = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
    assert np.array_equal(jax.random.key_data(got["keys"]), words)
    assert ec.open(tmp_path / "own0")["some"].shape == X.shape
    assert ec.verify(tmp_path / "own0") == ec.verify(tmp_path / "own3") == []


def test_one_of_two(tmp_path):
    """It loads with the other, and alone; the save of both is one error."""
    tree = {"all": X, "some": X + 1}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    first, second = good(run_team_program(2, "team_of_which_one_has_arrays", tmp_path))
    for text in (first, second):
        assert "the leaf `some` differs between process 0 and process 1" in text
        assert "devices of one process" in text
        assert "ts sharding has no device of this process" in text
    assert "The leaf `a` cannot be saved: this process has no part of it" in first
    assert "cannot be saved" not in second
