"""Arrays that real processes read a share of each, and move over their devices."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.processes import good, run_team_program

import eqx_ckpt as ec


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_no_byte_is_read_twice(tmp_path, size):
    """Random bits, to shardings that need every chunk in every process."""
    x = np.random.default_rng(0).integers(0, 256, 2**23, np.uint8)
    x = x.view(np.uint32).reshape(2048, 1024)
    np.save(tmp_path / "x.npy", x)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": x.view(jnp.float32)}, chunks=2**16)
    odd = {
        "odd": np.ones(1536, np.float32),
        "prime": np.arange(257 * 64, dtype=np.float32).reshape(257, 64),
        "one": np.arange(64, dtype=np.float32).reshape(8, 8),
        "long": np.arange(2042, dtype=np.float32).reshape(2, 1021),
    }
    chunks = {"odd": (448,), "prime": (20, 64), "one": (8, 8), "long": (2, 100)}
    ec.tree_serialise_leaves(
        tmp_path / "odd", odd, chunks=lambda name, *_: chunks[name]
    )
    team = good(run_team_program(size, "team_that_reshards", tmp_path))
    each = [list(map(float, re.findall("read=([0-9.]+);", text))) for text in team]
    assert len(each[0]) == 6
    for shares in list(zip(*each, strict=True))[1:]:
        assert 1 <= sum(shares) <= 1.1 and max(shares) < 1.1 / size, each


@pytest.mark.parametrize("size", [2, 4])
def test_what_fails_in_one_process_fails_in_all(tmp_path, size):
    """Nobody waits in a collective for one whose share is damaged."""
    x = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    ec.tree_serialise_leaves(tmp_path / "c", {"v": x + 1, "w": x}, chunks=2**16)
    (file,) = (tmp_path / "c" / "d").glob("*/0")
    whole = file.read_bytes()
    data = bytearray(whole)
    data[-5] ^= 1
    file.write_bytes(data)
    (tmp_path / "whole").write_bytes(whole)
    last = size - 1
    for rank, text in enumerate(
        good(run_team_program(size, "team_whose_reshards_fail", tmp_path))
    ):
        lines = re.findall("^(?:loaded|[A-Za-z]*Error: .*)$", text, re.M)
        for line in lines[:2]:
            assert "w: its bytes are not" in line
            assert rank == last or f"process {last} has failed" in line
        for line in lines[2:4]:
            assert "would move other arrays over the devices than process 0" in line
        assert lines[4:] == ["loaded"], text


def test_lazy_leaves_and_grafts(tmp_path):
    x = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    tree = {"v": jnp.asarray(x), "w": jnp.asarray(x + 1)}
    ec.tree_serialise_leaves(tmp_path / "c", tree, chunks=2**16)
    team = good(run_team_program(2, "team_that_reshards_lazy_leaves", tmp_path))
    each = [list(map(float, re.findall("read=([0-9.]+);", text))) for text in team]
    # Two arrays: each process has read half of both.
    assert [len(shares) for shares in each] == [2, 2]
    assert all(0.9 < share < 1.2 for shares in each for share in shares), each


def test_errors_among_collectives(tmp_path):
    """Of one process: those of others end too, and can go on if all have taken part."""
    x = np.arange(2**18, dtype=np.float32).reshape(512, 512)
    ec.tree_serialise_leaves(tmp_path / "c", {"v": x + 1, "w": x}, chunks=2**16)
    for rank, text in enumerate(
        good(run_team_program(2, "team_with_errors_among_collectives", tmp_path))
    ):
        after, fine, amid = re.findall("^(?:loaded|[A-Za-z]*Error: .*)$", text, re.M)
        for line in (after, amid):
            assert "MemoryError: no room" in line
            assert rank or "process 1 has failed" in line
        assert fine == "loaded"
        assert ("may wait for it for ever: end the program" in amid) is (rank == 0)


def test_the_way_is_chosen(tmp_path):
    """Small arrays are read by all, as programs take time to compile."""
    x = np.arange(2**18, dtype=np.float32).reshape(512, 512)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": x}, chunks=2**16)
    first, _ = good(run_team_program(2, "team_that_chooses_a_way", tmp_path))
    slow, fast, _ = first.split("next\n")
    assert "`w` (reading it takes less time)" in slow
    assert "moving" not in fast
