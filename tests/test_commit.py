import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import textwrap
import time

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import files_of, run_python

import eqx_ckpt as ec
from eqx_ckpt import _store


@pytest.fixture(params=["ocdbt", "zarr"])
def layout(request):
    return request.param


def _tree(value, count=3):
    return {f"x{i}": jnp.full(10, value + i) for i in range(count)}


def _value(path):
    return ec.open(path)["x0"].read()[0]


def test_paths_of_every_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    forms = {
        "relative": tmp_path / "relative",
        "./a b/%41/ü": tmp_path / "a b" / "%41" / "ü",
        "~/model": tmp_path / "home" / "model",
        f"file://{tmp_path}/url": tmp_path / "url",
        f"file://{tmp_path}/with%20space": tmp_path / "with space",
        pathlib.Path("deep/er/path"): tmp_path / "deep" / "er" / "path",
    }
    for number, (path, place) in enumerate(forms.items()):
        ec.tree_serialise_leaves(path, _tree(number))
        assert (place / "eqx_ckpt.json").is_file()
        assert _value(path) == _value(place) == number
        assert ec.open(path).path == str(place)


def test_memory():
    ec.tree_serialise_leaves("memory://commit/a", _tree(1))
    ec.tree_serialise_leaves("memory://commit/a/b", _tree(2))
    assert _value("memory://commit/a") == 1 and _value("memory://commit/a/b") == 2
    old = ec.open("memory://commit/a")
    ec.tree_serialise_leaves("memory://commit/a", _tree(3))
    assert _value("memory://commit/a") == 3
    with pytest.raises(RuntimeError, match="replaced or deleted"):
        old["x0"].read()
    ec.tree_serialise_leaves("memory://commit/z", _tree(4), layout="zarr")
    assert _value("memory://commit/z") == 4
    for layout in ("zarr", "ocdbt"):
        with pytest.raises(ValueError, match="cannot exchange two directories"):
            ec.tree_serialise_leaves("memory://commit/z", _tree(5), layout=layout)
    assert _value("memory://commit/z") == 4


def test_paths_that_are_none(tmp_path):
    # In a process without the type checks of the tests.
    out = run_python(f"""
        import eqx_ckpt as ec
        file = open({str(tmp_path / "f")!r}, "wb")
        for bad in ("", "a\\0b", "nonsense://x", 3, b"x", file):
            for use in (lambda p: ec.tree_serialise_leaves(p, 1.0), ec.open):
                try:
                    use(bad)
                except (ValueError, TypeError) as e:
                    print(type(e).__name__, str(e)[:40])
    """)
    assert out.splitlines() == [
        *["ValueError '' is not a path."] * 2,
        *["ValueError 'a\\x00b' is not a path."] * 2,
        *["ValueError 'nonsense://x' is not a TensorStore URL:"] * 2,
        *["TypeError A path must be a string or an `os.PathLi"] * 6,
    ]


def test_an_empty_directory_is_fine(tmp_path, layout):
    (tmp_path / "a").mkdir()
    ec.tree_serialise_leaves(tmp_path / "a", _tree(1), layout=layout)
    assert _value(tmp_path / "a") == 1


def test_the_path_may_be_a_link(tmp_path, layout):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for value in (1, 2):
        ec.tree_serialise_leaves(tmp_path / "link", _tree(value), layout=layout)
        assert _value(tmp_path / "link") == _value(tmp_path / "real") == value
    assert (tmp_path / "link").is_symlink()


def test_what_is_not_ours_is_refused_and_untouched(tmp_path, layout):
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "notes.txt").write_text("mine")
    (tmp_path / "model.eqx").write_bytes(b"weights")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "eqx_ckpt.json").write_text("{}")
    before = files_of(tmp_path)
    save = lambda name: ec.tree_serialise_leaves(
        tmp_path / name, _tree(1), layout=layout, overwrite=True
    )
    with pytest.raises(FileExistsError, match="not a checkpoint.*`notes.txt`"):
        save("dir")
    with pytest.raises(FileExistsError, match="eqx.tree_deserialise_leaves"):
        save("model.eqx")
    with pytest.raises(FileExistsError, match="is a file"):
        save("file")
    with pytest.raises(ValueError, match="not one of eqx_ckpt"):
        save("broken")
    assert files_of(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["broken", "dir", "file", "model.eqx"]


def test_overwrite(tmp_path, layout):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), layout=layout)
    with pytest.raises(FileExistsError, match="`overwrite=False`"):
        ec.tree_serialise_leaves(path, _tree(2), layout=layout, overwrite=False)
    assert _value(path) == 1


@pytest.mark.parametrize("old", ["ocdbt", "zarr"])
def test_overwriting_frees_the_space(tmp_path, layout, old):
    path = tmp_path / "a"
    big = {"w": np.zeros(1_000_000), **_tree(0, 40)}
    ec.tree_serialise_leaves(path, big, layout=old)
    for value in range(5):
        ec.tree_serialise_leaves(path, _tree(value), layout=layout)
        assert _value(path) == value and len(ec.open(path)) == 3
    alone = tmp_path / "b"
    ec.tree_serialise_leaves(alone, _tree(4), layout=layout)
    count = lambda p: {f.partition("/")[0] for f in files_of(p)}
    assert count(path) == count(alone)
    assert len(files_of(path)) == len(files_of(alone))
    assert sum(map(len, files_of(path).values())) < 50_000
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_files_of_others_inside_survive(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    (path / "notes.txt").write_text("mine")
    ec.tree_serialise_leaves(path / "nested", _tree(7))
    ec.tree_serialise_leaves(path, _tree(2))
    assert (path / "notes.txt").read_text() == "mine"
    assert _value(path) == 2 and _value(path / "nested") == 7
    # A layout that replaces the whole directory refuses instead.
    with pytest.raises(FileExistsError, match="has `nested` in it"):
        ec.tree_serialise_leaves(path, _tree(3), layout="zarr")
    assert _value(path) == 2 and _value(path / "nested") == 7


def test_a_failed_save_leaves_what_was(tmp_path, layout):
    path = tmp_path / "a"
    chunks = lambda name, shape, dtype: (1,) if name == "x0" else "bad"
    for there in (False, True):
        with pytest.raises(Exception):
            ec.tree_serialise_leaves(path, _tree(2), chunks=chunks, layout=layout)
        assert path.exists() == there
        if not there:
            ec.tree_serialise_leaves(path, _tree(1), layout=layout)
            before = files_of(tmp_path)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("old", [None, "ocdbt", "zarr"])
def test_a_full_disk_leaves_what_was(tmp_path, layout, old):
    """A limit on the size of files, which fails writes as a full disk does."""
    path = tmp_path / "a"
    if old is not None:
        ec.tree_serialise_leaves(path, _tree(1), layout=old)
    before = files_of(tmp_path)
    out = run_python(f"""
        import resource, signal, numpy as np, eqx_ckpt as ec
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        try:
            tree = {{"a": np.ones(10), "b": np.ones(10**6)}}
            ec.tree_serialise_leaves({str(path)!r}, tree, layout={layout!r})
        except OSError as e:
            print("OSError")
    """)
    assert out.split() == ["OSError"]
    assert files_of(tmp_path) == before
    assert path.exists() == (old is not None)


def test_two_writers(tmp_path, layout, monkeypatch):
    """Another save lands while ours is being written: ours is refused, its stands."""
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), layout=layout)
    write = _store.write_file
    landed = []

    def interrupted(root, key, buffers, sync=False):
        if not landed:
            landed.append(True)
            ec.tree_serialise_leaves(path, _tree(2), layout=layout)
        write(root, key, buffers, sync)

    monkeypatch.setattr(_store, "write_file", interrupted)
    with pytest.raises(RuntimeError, match="another writer.*The other one stands"):
        ec.tree_serialise_leaves(path, _tree(3), layout=layout)
    assert landed and _value(path) == 2
    assert os.listdir(tmp_path) == ["a"]
    if layout == "ocdbt":
        assert len(os.listdir(path / "d")) == 1


def test_a_killed_first_save_is_no_checkpoint(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    (path / "eqx_ckpt.json").unlink()
    with pytest.raises(FileNotFoundError, match="may have been interrupted"):
        ec.open(path)
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value(path) == 2 and len(os.listdir(path / "d")) == 1


_writer = """
    import sys, numpy as np, eqx_ckpt as ec
    path, layout, other = sys.argv[1:]
    tree = lambda v: {"x": np.full(200_000, v), "y": [np.full(7, v)] * 2, "z": v}
    different = lambda v: {"q": np.full(300_000, v), "z": v}
    print("ready", flush=True)
    v = 0
    while True:
        v += 1
        make = different if other == "other" and v % 2 else tree
        ec.tree_serialise_leaves(path, make(v), layout=layout)
        print(v, flush=True)
"""


@pytest.mark.parametrize("case", ["first", "overwrite", "other"])
def test_killed_at_a_random_time(tmp_path, layout, case):
    """After SIGKILL the path is whole, old or new, and the next save cleans up."""
    rng = random.Random(0)
    for attempt in range(4):
        path = tmp_path / f"{attempt}"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_writer), path, layout, case],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if case != "first":
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.05 if case == "first" else 0.3))
        process.send_signal(signal.SIGKILL)
        saved = [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        try:
            tree = ec.materialise(ec.open(path).tree)
        except FileNotFoundError:
            assert case == "first" and not saved
        else:
            value = tree["z"]
            assert not saved or value in (saved[-1], saved[-1] + 1)
            big = tree["x"] if "x" in tree else tree["q"]
            assert (big == value).all()
            assert "q" in tree or (tree["y"][1] == value).all()
        ec.tree_serialise_leaves(path, _tree(5), layout=layout)
        assert _value(path) == 5
    left = sorted(os.listdir(tmp_path))
    assert left == ["0", "1", "2", "3"], left


def test_durable_syncs_files_then_the_index(tmp_path, layout, monkeypatch):
    """Every file and directory is synced before the index is in its place."""
    synced = []
    fsync = os.fsync

    def record(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "new" / "a"
    ec.tree_serialise_leaves(path, _tree(1), layout=layout, durable=False)
    assert not synced
    ec.tree_serialise_leaves(path, _tree(2), layout=layout)
    # A save beside the path is renamed after the syncs.
    beside = r".eqx_ckpt-[0-9a-f]{16}"
    names = [re.sub(beside, "", name) for name in synced]
    for name in files_of(path):
        if name in ("_METADATA", "_sharding", "manifest.ocdbt"):
            continue  # Written aside and renamed.
        if name == "eqx_ckpt.json" and layout == "ocdbt":
            continue  # As these: see below.
        assert str(path / name) in names, name
        assert str((path / name).parent) in names, name
    assert str(path.parent) in names
    if layout == "ocdbt":
        aside = [i for i, name in enumerate(names) if name.endswith("json.new")]
        assert len(aside) == 1 and str(path) in names[aside[0] :]
        own = str(path / "d" / ec.open(path).save_id)
        assert own in names[: aside[0]] and f"{own}/0" in names[: aside[0]]


def test_what_a_killed_writer_left_of_its_index_does_not_get_into_ours(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    dead = path / "d" / ("0" * 16)
    dead.mkdir()
    # Longer than what is to be written, under the names that writers use.
    for directory in (path, dead, path / "d" / ec.open(path).save_id):
        for name in ("eqx_ckpt.json.__lock", "eqx_ckpt.json.new", "_METADATA.new"):
            (directory / name).write_bytes(b"x" * 100_000)
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value(path) == 2 and len(os.listdir(path / "d")) == 1


def test_equinox_tree_in_both_layouts(tmp_path, getkey, layout):
    model = eqx.nn.MLP(8, 4, 64, 3, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", model, layout=layout, durable=False)
    like = eqx.filter_eval_shape(eqx.nn.MLP, 8, 4, 64, 3, key=getkey())
    loaded = ec.tree_deserialise_leaves(tmp_path / "a", like)
    assert eqx.tree_equal(loaded, model, typematch=True)
