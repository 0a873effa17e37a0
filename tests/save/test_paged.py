"""Checkpoints of several files: all that others can, and pages of digests."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import golden, inside
from support.helpers import assert_alike
from support.processes import good, run_team_program

import eqx_ckpt as ec


def tree(value=1.0):
    shared = jnp.arange(300.0) + value
    return {
        "layers": [{"w": jnp.full((40, 5), i + value), "b": i} for i in range(4)],
        "empty": np.zeros((0, 3), np.int8),
        "name": "a name",
        "large": np.arange(3 * 2**18).reshape(3, -1) + int(value),
        "shared": [shared, shared],
    }


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Small files and pages are large here."""
    inside.limit(monkeypatch, min_file_bytes=2**20, joint_digest_bytes=64)


def index_of(path):
    return json.loads((path / "eqx_ckpt.json").read_bytes())


@pytest.mark.parametrize("chunks", [None, 2**16, 16 * 2**20])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_round_trip(tmp_path, chunks, compression):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree(), chunks=chunks, compression=compression)
    index = index_of(path)
    assert len(index["files"]) > 2
    assert len(index["digests"]) == 32 * len(index["files"])
    assert ec.verify(path) == []
    assert_alike(ec.tree_deserialise_leaves(path, tree(2.0)), tree())
    ckpt = ec.open(path)
    assert list(ckpt) == list(dict(ckpt)) and "large" in ckpt and 3 not in ckpt
    assert ckpt["large"][1:, 7].read().tolist() == tree()["large"][1:, 7].tolist()
    assert ckpt["shared.1"].read().tolist() == tree()["shared"][1].tolist()
    assert ckpt.tree.layers[2].b.read() == 2
    with pytest.raises(KeyError, match=r"nearest names are .*`layers.0.w`"):
        ckpt["layers.0.v"]
    with pytest.raises(RuntimeError, match="missing"):
        ec.tree_deserialise_leaves(path, {"other": 1.0})


def test_other_readers_are_told_of_no_more_chunks(tmp_path, monkeypatch, caplog):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree(), orbax=True)
    assert (path / "_METADATA").exists() and (path / "manifest.ocdbt").exists()
    inside.limit(monkeypatch, database_chunks=10)
    inside.forget()
    with caplog.at_level("WARNING", "eqx_ckpt"):
        ec.tree_serialise_leaves(path, tree(2.0), orbax=True)
    assert "none of the files with which other libraries read it" in caplog.text
    assert sorted(x.name for x in path.iterdir()) == ["d", "eqx_ckpt.json"]
    assert index_of(path)["others"] == {}
    assert ec.verify(path) == []
    assert_alike(ec.tree_deserialise_leaves(path, tree()), tree(2.0))


@pytest.mark.parametrize("place", ["{}/a.zip", "memory://files"])
def test_other_places(tmp_path, place):
    path = place.format(tmp_path)
    if path.endswith(".zip"):
        ec.tree_serialise_leaves(path, tree(), compression="zstd")
    else:
        ec.tree_serialise_leaves(path, tree())
    assert ec.verify(path) == []
    assert_alike(ec.tree_deserialise_leaves(path, tree(2.0)), tree())
    ec.tree_serialise_leaves(tmp_path / "again", ec.open(path).tree)
    assert ec.verify(tmp_path / "again") == []
    assert not ec.diff(path, tmp_path / "again", values=True)


def test_files_that_are_used_again(tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    ec.tree_serialise_leaves(first, tree())
    changed = {**tree(), "layers": tree(5.0)["layers"]}
    ec.tree_serialise_leaves(second, changed, reuse=first)
    again = {**tree(7.0), "large": tree()["large"], "shared": tree()["shared"]}
    ec.tree_serialise_leaves(third, again, reuse=second)
    for path, expected in ((first, tree()), (second, changed), (third, again)):
        assert ec.verify(path) == []
        assert_alike(ec.tree_deserialise_leaves(path, tree(2.0)), expected)
    linked = [p.stat().st_nlink for p in third.glob("d/*/[0-9]*")]
    assert max(linked) == 3


def ranges(monkeypatch):
    """What is read of files of digests from here on."""
    seen = []
    see = lambda source, key, start, stop, size: seen.append((start, stop))
    inside.watch(monkeypatch, "read digests", see)
    return seen


def test_only_pages_of_what_is_read_are_read(tmp_path, monkeypatch):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree(), chunks=2**16)
    seen = ranges(monkeypatch)
    ckpt = ec.open(path)
    assert seen == []
    last = ckpt["large"][2:].read()
    assert last.tolist() == tree()["large"][2:].tolist()
    size = (path / f"d/{ckpt.save_id}/digests").stat().st_size
    assert 0 < sum(stop - start for start, stop in seen) < size / 2
    assert len(set(seen)) == len(seen)


def damage(path, change):
    (digests,) = path.glob("d/*/digests")
    data = bytearray(digests.read_bytes())
    change(data)
    digests.write_bytes(data)


def test_a_page_that_is_damaged(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree(), chunks=2**16)

    def flip(data):
        data[-1] ^= 1

    damage(path, flip)
    ckpt = ec.open(path)
    # The first page is good.
    assert ckpt["empty"].read().size == 0 and ckpt["large"][:1].read().size
    for read in (
        lambda: ckpt["shared.0"].read(),
        lambda: ec.tree_deserialise_leaves(path, tree()),
    ):
        with pytest.raises(ec.DamagedError, match="file of digests is damaged"):
            read()
    assert "file of digests is damaged" in str(ec.verify(path)[0])


@pytest.mark.parametrize("change", [lambda data: data.pop(), lambda data: data.clear()])
def test_pages_that_are_missing(tmp_path, change):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree(), chunks=2**16)
    damage(path, change)
    with pytest.raises(ec.DamagedError, match="file of digests is"):
        ec.tree_deserialise_leaves(path, tree())
    assert "file of digests is" in str(ec.verify(path)[0])


def test_a_file_of_digests_that_is_longer(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, tree())
    damage(path, lambda data: data.append(0))
    (problem,) = ec.verify(path)
    assert "digests" in problem.file and "more bytes" in problem.what


@pytest.mark.long
def test_lanes_of_two_processes(tmp_path):
    good(run_team_program(2, "team_of_golden_shards", tmp_path, 700))
    path = tmp_path / "processes"
    begins = index_of(path)["begins"]
    assert {lane for lane, *_ in begins} == {0, 1} and len(begins) > 2
    assert ec.verify(path) == []
    ckpt = ec.open(path)
    for name, x in golden.shards().items():
        assert np.array_equal(np.asarray(ckpt[name].read()), x)
