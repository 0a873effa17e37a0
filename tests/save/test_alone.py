"""Saves and loads of one process of many, alone, at a path of its own."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attacks import seal
from support.processes import good, run_team_program

import eqx_ckpt as ec


def test_each_process_saves_and_loads_what_it_has(tmp_path):
    (first, _) = good(run_team_program(2, "team_that_saves_alone", tmp_path))
    assert "`rows` is part of f32[64,48]: 2 regions of f32[16,48], saved by" in first
    # Anyone else sees what is there, and is told why it cannot be loaded.
    ckpt = ec.open(tmp_path / "0")
    assert ckpt["rows"].shape == (64, 48) and ckpt.saved.processes == 1
    assert re.search(r"rows +part of f32\[64,48\]: 2 regions of f32\[16,4", repr(ckpt))
    assert ec.verify(tmp_path / "0") == []
    assert not (tmp_path / "0" / "_METADATA").exists()
    assert ckpt["copies"].read()[1, 0] == 4 * 48
    whole = {"rows": jnp.zeros((64, 48))}
    wrong = "in part, by one process alone(.|\n)*rows  part of"
    with pytest.raises(RuntimeError, match=wrong):
        ec.tree_deserialise_leaves(tmp_path / "0", whole, unexpected="ignore")
    for read in (
        ckpt["rows"].read,
        lambda: ckpt["rows"][0],
        lambda: ckpt["rows"].T,
        lambda: ec.materialise(ckpt.tree),
        lambda: ec.tree_serialise_leaves(tmp_path / "copy", ckpt.tree),
    ):
        with pytest.raises(ValueError, match="is part of .* by one process alone"):
            read()
    assert not (tmp_path / "copy").exists()


def test_one_process_saves_no_parts(tmp_path):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"x": jax.device_put(jnp.arange(16.0), sharding)}
    ec.tree_serialise_leaves(tmp_path / "c", tree, processes="own")
    found = json.loads((tmp_path / "c/eqx_ckpt.json").read_bytes())
    assert found["version"] == 1 and "parts" not in found
    assert ec.open(tmp_path / "c")["x"].read().tolist() == list(range(16))


def test_other_words_than_all_and_own(tmp_path):
    x = {"x": jnp.zeros(2)}
    calls = (
        lambda: ec.tree_serialise_leaves(tmp_path / "c", x, processes="mine"),
        lambda: ec.tree_deserialise_leaves(tmp_path / "c", x, processes="mine"),
        lambda: ec.materialise(x, processes="mine"),
    )
    for call in calls:
        with pytest.raises(ValueError, match='`processes` must be "all", "own" or an'):
            call()
    with pytest.raises(ValueError, match="sends what one process reads to others"):
        ec.tree_deserialise_leaves("c", x, processes="own", reshard="devices")


PART = [[[4, 6], [[0, 0], [2, 3]]]]


@pytest.mark.parametrize(
    "parts, part",
    [
        (PART, [[0, 1]]),
        (PART, [[1, 0]]),
        (PART, [[0, 0], [0, 0]]),
        (PART, [[0]]),
        (PART, None),
        ([[[4, 6], []]], [[0, 0]]),
        ([[[4, 6], [[0, 0], [0, 0]]]], [[0, 0]]),
        ([[[4, 6], [[0, 0], [3, 3]]]], [[0, 0]]),
        ([[[4, 6], [[0, 0], [-1, 3]]]], [[0, 0]]),
        ([[[4, 6], [[0, 0], [2]]]], [[0, 0]]),
        ([[[4], [[0], [2]]]], [[0, 0]]),
        ([[[4, 6], [[0, 0], [0, 2], [0, 3]]]], [[0, 0]]),
        ([[4, 6]], [[0, 0]]),
        ([[[4, 2**70], [[0, 0], [2, 3]]]], [[0, 0]]),
        ([[[4, 6.0], [[0, 0], [2, 3]]]], [[0, 0]]),
    ],
)
def test_impossible_parts_are_refused(tmp_path, parts, part):
    _write_part(tmp_path / "c", PART, [[0, 0]])
    assert ec.open(tmp_path / "c")["x"].shape == (4, 6)
    _write_part(tmp_path / "c", parts, part)
    with pytest.raises(ec.DamagedError):
        ec.open(tmp_path / "c")


def test_a_part_says_of_which_array_it_is(tmp_path):
    _write_part(tmp_path / "c", PART, [[0, 0]])
    assert "part of f32[4,6]: 2 regions" in repr(ec.open(tmp_path / "c"))


def _write_part(path, parts, part):
    """Saves one leaf, and puts the facts of parts into its index."""
    ec.tree_serialise_leaves(path, {"x": jnp.zeros((4, 3))})
    value = json.loads((path / "eqx_ckpt.json").read_bytes())
    del value["digest"]
    text = json.dumps(value | {"parts": parts, "part": part}, separators=(",", ":"))
    (path / "eqx_ckpt.json").write_bytes(seal(text.encode()[:-1]))
