"""`ec.verify` and its bar. What it finds is in test_corruption.py: here is the rest."""

import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from support import inside
from support.command import main
from support.helpers import files_of, run_program
from support.stores import StoredFiles

import eqx_ckpt as ec


@pytest.fixture(params=["ocdbt", "zarr"])
def layout(request):
    return request.param


def _tree():
    return {"w": jnp.arange(40.0).reshape(10, 4), "b": np.ones(3), "n": 3}


def _flip(file, at):
    with open(file, "r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def test_all_is_well(tmp_path, layout):
    trees = {
        "plain": _tree(),
        "empty": {"e": jnp.zeros((0, 3))},
        "root": np.float64(3),
        "aliases": [x := np.ones(3), x, {"a": x}],
    }
    for name, tree in trees.items():
        for chunks in (None, 8, lambda name, shape, dtype: [3, 3, 3][: len(shape)]):
            path = tmp_path / name
            ec.tree_serialise_leaves(path, tree, layout=layout, chunks=chunks)
            before = files_of(tmp_path)
            assert ec.verify(path) == ec.verify(ec.open(path)) == []
            assert files_of(tmp_path) == before


def test_a_problem_says_where(tmp_path, layout):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(), layout=layout, chunks=64, orbax=True)
    index = json.loads((path / "eqx_ckpt.json").read_bytes())
    if layout == "zarr":
        file, at = "w/c/2/0", 20
    else:
        ((_, _, _, at),) = inside.runs_of(path, "w")
        file, at = f"d/{index['save']}/0", at + 2 * 64 + 20
    _flip(path / file, at)
    (problem,) = ec.verify(path)
    assert problem.leaf == "w" and problem.chunk == (2, 0) and problem.file == file
    text = "`w`, chunk [2, 0]: its bytes are not those that were saved"
    assert str(problem) == f"{text} (in `{file}`)"
    (path / "_METADATA").unlink()
    assert str(ec.verify(path)[0]) == "`_METADATA`: it is missing"


def test_large_chunks_are_read_in_steps(tmp_path, layout):
    # Chunks of several blocks and many steps, and with padding along each axis.
    x = np.random.default_rng(0).integers(1, 256, (3, 300, 7001), np.uint8)
    chunk = {"flat": None, "deep": (2, 200, 5000), "rows": (3, 200, 7001)}
    tree = {"deep": x, "flat": x.ravel(), "rows": x[:, ::-1].copy()}
    path = tmp_path / "a"
    ec.tree_serialise_leaves(
        path, tree, layout=layout, chunks=lambda name, shape, _: chunk[name] or shape
    )
    for max_bytes in (2**20, 2**24, 2**28):
        assert ec.verify(path, max_bytes=max_bytes) == []
    index = json.loads((path / "eqx_ckpt.json").read_bytes())
    for name, chunk, beyond, what in [
        ("flat", (0,), 6_300_000, "bytes"),
        ("flat", (0,), 10, "bytes"),
        # Of 100 rows and 2001 columns, the rest is padding.
        ("deep", (0, 1, 1), 1_000_000 + 99 * 5000 + 2000, "bytes"),
        ("deep", (0, 1, 1), 1_000_000 + 99 * 5000 + 2001, "padding"),
        ("deep", (0, 1, 1), 999_999, "padding"),
        ("deep", (1, 0, 0), 1_000_000, "padding"),
        ("deep", (1, 0, 0), 999_999, "bytes"),
    ]:
        if layout == "zarr":
            file, at = path / name / "c" / "/".join(map(str, chunk)), 0
        else:
            ((_, _, _, at),) = inside.runs_of(path, name)
            file = path / "d" / index["save"] / "0"
            at += {(0,): 0, (0, 1, 1): 3, (1, 0, 0): 4}[chunk] * 2_000_000
        _flip(file, at + beyond)
        for max_bytes in (2**20, 2**28):
            (problem,) = ec.verify(path, max_bytes=max_bytes)
            assert problem[:2] == (name, chunk) and what in problem.what
        _flip(file, at + beyond)


def test_memory(layout):
    path = f"memory://verify/{layout}"
    ec.tree_serialise_leaves(path, _tree(), layout=layout)
    assert ec.verify(path) == []
    files = StoredFiles(path)
    if layout == "zarr":
        key, names = "w/c/0/0", ["w"]
    else:
        key, names = f"d/{ec.open(path).save_id}/0", ["b", "n", "w"]
    good = files[key]

    def found(data):
        if data is None:
            del files[key]
        else:
            files[key] = data
        return [(p.leaf, p.what) for p in ec.verify(path)]

    missing = "it is missing"
    assert found(None) == [(name, missing) for name in names]
    assert found(good[:-1]) == [("w", f"{missing}: the file ends before it does")]
    assert [leaf for leaf, _ in found(good[:-1] + b"?")] == ["w"]
    (more,) = found(good + b"?")
    assert more[1] == "it has more bytes than it had"
    assert found(good) == []


def test_what_other_readers_would_take_for_this_save(tmp_path, layout):
    path = tmp_path / "a"
    text = lambda x: True
    given = {"layout": layout, "orbax": True}
    ec.tree_serialise_leaves(path, {"s": "text", "w": 1.0}, text, **given)
    old = files_of(path)
    ec.tree_serialise_leaves(path, {"b": 1.0}, **given)
    assert ec.verify(path) == []
    # As a copy would have them that was made while a save took place.
    for name in ("_METADATA", "_strings.json"):
        (path / name).write_bytes(old[name])
    changed, left = ec.verify(path)
    assert changed.file == "_METADATA" and "not those that were saved" in changed.what
    assert left.file == "_strings.json" and "another save" in left.what
    ec.tree_serialise_leaves(path, {"b": 1.0}, **given)
    assert ec.verify(path) == []


def test_what_is_no_part_of_the_save_is_ignored(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree())
    (path / "notes.txt").write_text("mine")
    (path / "d" / ("0" * 16)).mkdir()
    (path / "d" / ("0" * 16) / "0").write_bytes(b"of a writer that was killed")
    assert ec.verify(path) == []


def test_the_index(tmp_path, layout):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(), layout=layout)
    ckpt = ec.open(path)
    _flip(path / "eqx_ckpt.json", 100)
    (problem,) = ec.verify(path)
    assert problem[:3] == (None, None, "eqx_ckpt.json")
    assert "its digest is not that of its bytes" in str(problem)
    assert ec.verify(ckpt) == [problem]
    (path / "eqx_ckpt.json").unlink()
    with pytest.raises(FileNotFoundError, match="it has no `eqx_ckpt.json`"):
        ec.verify(path)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        ec.verify(tmp_path / "b")


def test_digests_that_are_fewer_than_the_index_needs(tmp_path):
    # As a writer with a bug would leave them: of all that is there the digests agree.
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(), layout="zarr")
    digests = path / "eqx_ckpt.digests"
    old, new = digests.read_bytes(), digests.read_bytes()[:-16]
    digests.write_bytes(new)
    digest = lambda data: xxhash.xxh3_128_hexdigest(data).encode()
    index = path / "eqx_ckpt.json"
    body = index.read_bytes()[:-45].replace(digest(old), digest(new))
    index.write_bytes(body + b',"digest":"' + digest(body) + b'"}')
    (problem,) = ec.verify(path)
    assert problem.file == "eqx_ckpt.digests" and "damaged" in problem.what


def test_a_checkpoint_that_was_replaced(tmp_path, layout):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(), layout=layout)
    ckpt = ec.open(path)
    ec.tree_serialise_leaves(path, _tree(), layout=layout)
    with pytest.raises(RuntimeError, match="replaced or deleted"):
        ec.verify(ckpt)
    assert ec.verify(path) == []


def test_no_backend_and_no_tqdm(tmp_path):
    for layout in ("ocdbt", "zarr"):
        ec.tree_serialise_leaves(tmp_path / layout, _tree(), layout=layout)
    run_program("verify_without_backend", tmp_path)


def test_memory_is_bounded(tmp_path, layout):
    # One leaf of one chunk, many times as large as the budget.
    tree = {"one": np.ones((60, 2**20), np.uint8), "some": np.ones(2**24, np.uint8)}
    chunks = lambda name, shape, dtype: (64, 2**20) if name == "one" else (2**20,)
    ec.tree_serialise_leaves(
        tmp_path / "a", tree, layout=layout, chunks=chunks, durable=False
    )
    out = run_program("peak_of_verify", tmp_path / "a")
    little, much = map(float, out.split())
    # The control: with more, more is used.
    assert little < 4.5 < 8 < much < 256
    with pytest.raises(ValueError, match="at least 1 MiB"):
        ec.verify(tmp_path / "a", max_bytes=1000)


def test_progress(tmp_path, layout, capsys, monkeypatch):
    ec.tree_serialise_leaves(tmp_path / "a", _tree(), layout=layout)
    assert ec.verify(tmp_path / "a", progress=True) == []
    last = capsys.readouterr().err.strip().split("\r")[-1]
    assert re.fullmatch(r"verify: 100%\|.*\| 192/192 \[.*B/s, 3/3 leaves\]", last)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"pip install 'eqx_ckpt\[progress\]'"):
        ec.verify(tmp_path / "a", progress=True)
    assert ec.verify(tmp_path / "a") == []


def test_command_line(tmp_path, capsys):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(), orbax=True)

    def run(*arguments):
        return (main(["verify", *map(str, arguments)]), *capsys.readouterr())

    assert run(path) == (0, "", "")
    code, out, bar = run(path, "--progress")
    assert (code, out) == (0, "") and "3/3 leaves" in bar
    (path / "_sharding").write_bytes(b"")
    (path / "_METADATA").unlink()
    code, out, _ = run(path)
    assert code == 1 and out.splitlines() == [
        "`_METADATA`: it is missing",
        "`_sharding`: its bytes are not those that were saved",
    ]
    code, out, error = run(tmp_path / "b")
    assert (code, out) == (2, "") and "There is no checkpoint at" in error
    command = [sys.executable, "-m", "eqx_ckpt", "verify", str(path)]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 1


def test_links_and_pipes(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(), layout="zarr")
    (path / "w" / "c" / "0" / "0").unlink()
    os.mkfifo(path / "w" / "c" / "0" / "0")
    (path / "b" / "c" / "0").unlink()
    (path / "b" / "c" / "0").mkdir()
    assert {(p.leaf, p.what[:17]) for p in ec.verify(path)} == {
        ("b", "it cannot be read"),
        ("w", "it cannot be read"),
    }


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_an_empty_array_is_the_last(tmp_path, layout):
    tree = {"a": jnp.ones(3), "b": jnp.zeros((0, 3))}
    ec.tree_serialise_leaves(tmp_path, tree, layout=layout)
    assert ec.verify(tmp_path) == []
