"""`ec.counting`: what a block of code reads."""

import jax.numpy as jnp
import pytest

import eqx_ckpt as ec


def test_what_is_read_and_nothing_else(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(1000), "b": jnp.ones(3)})
    with ec.counting() as opening:
        ckpt = ec.open(tmp_path / "x")
    assert opening() == (tmp_path / "x" / "eqx_ckpt.json").stat().st_size
    with ec.counting() as bytes_read:
        assert bytes_read() == 0
        ckpt["a"].read(verify=False)
        assert bytes_read() == 4000
    assert bytes_read() == 4000
    # What comes after the block is not in it.
    ckpt["b"].read()
    assert bytes_read() == 4000


def test_blocks_nest_and_end_at_an_error(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(1000)})
    ckpt = ec.open(tmp_path / "x")
    with ec.counting() as outer:
        with pytest.raises(KeyError), ec.counting() as inner:
            ckpt["a"].read(verify=False)
            raise KeyError
        ckpt["a"].read(verify=False)
    assert inner() == 4000 and outer() == 8000


def test_a_file_of_one_zip_counts(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x.zip", {"a": jnp.ones(1000)})
    with ec.counting() as bytes_read:
        ec.open(tmp_path / "x.zip")["a"].read()
    assert 4000 <= bytes_read() < (tmp_path / "x.zip").stat().st_size + 100_000
