import ctypes
import errno
import fcntl
import os
import pathlib
import re
import sys
import threading
import types

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from support import inside
from support.helpers import files_of, is_locked, run_program

import eqx_ckpt as ec


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
    out = run_program("wrong_paths")
    assert out.splitlines() == [
        *["ValueError '' is not a path."] * 2,
        *["ValueError 'a\\x00b' is not a path."] * 2,
        *["ValueError 'nonsense://x' is not a URL of a store: "] * 2,
        *["TypeError A path must be a string or an `os.PathLi"] * 4,
        *[
            "The path comes first, and the tree after it: "
            "exchange 'path' and the `dict`."
        ]
        * 3,
    ]


def test_a_path_below_a_directory_that_is_deleted(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (ec.open, ec.exists, ec.delete, ec.CheckpointManager):
        with pytest.raises(FileNotFoundError, match="'run' leads nowhere.*is deleted"):
            call("run")
    ec.tree_serialise_leaves(tmp_path / "a", _tree(1))
    assert _value(tmp_path / "a") == 1


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
    with pytest.raises(FileExistsError, match="ec.tree_deserialise_leaves"):
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


def test_two_writers(tmp_path, layout, monkeypatch):
    """Another save lands while ours is being written: ours is refused, its stands."""
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), layout=layout)
    other = lambda: ec.tree_serialise_leaves(path, _tree(2), layout=layout)
    landed = _at_first_write(path, monkeypatch, before=other)
    with pytest.raises(RuntimeError, match="another writer.*The other one stands"):
        ec.tree_serialise_leaves(path, _tree(3), layout=layout)
    assert landed and _value(path) == 2
    assert os.listdir(tmp_path) == ["a"]
    if layout == "ocdbt":
        assert len(os.listdir(path / "d")) == 1


def _at_first_write(path, monkeypatch, before=None, after=None):
    """Does something before or after the first file that a save writes there."""
    begun, done = [], []

    def once(seen, do):
        def see(change, key):
            if change == "write" and do and not seen:
                seen.append(key)
                do()

        return see

    inside.watch_store(monkeypatch, path, once(begun, before), once(done, after))
    return begun if before else done


@pytest.mark.parametrize("old", [None, 1])
def test_two_writers_in_a_store(old, monkeypatch):
    path = f"memory://writers/{old}"
    if old is not None:
        ec.tree_serialise_leaves(path, _tree(old))
    other = lambda: ec.tree_serialise_leaves(path, _tree(2))
    landed = _at_first_write(path, monkeypatch, before=other)
    with pytest.raises(RuntimeError, match="another writer.*The other one stands"):
        ec.tree_serialise_leaves(path, _tree(3))
    assert landed and _value(path) == 2


@pytest.mark.parametrize("path", ["memory://deleted/meanwhile", None])
def test_what_is_deleted_meanwhile(path, tmp_path, monkeypatch):
    """The error does not speak of another checkpoint where there is none."""
    path = path or tmp_path / "c"
    ec.tree_serialise_leaves(path, _tree(1))
    landed = _at_first_write(path, monkeypatch, after=lambda: ec.delete(path))
    with pytest.raises(RuntimeError, match="was deleted while this save.*save again"):
        ec.tree_serialise_leaves(path, _tree(2))
    assert landed and not ec.exists(path)
    ec.tree_serialise_leaves(path, _tree(3))
    assert _value(path) == 3


def test_two_first_writers_of_fixed_names_in_a_store(monkeypatch):
    """There they would write over each other's files: only one may begin."""
    path = "memory://writers/zarr"

    def others():
        with pytest.raises(FileExistsError, match="is running or was interrupted"):
            ec.tree_serialise_leaves(path, _tree(2), layout="zarr")
        with pytest.raises(FileExistsError, match="is running or was interrupted"):
            ec.tree_serialise_leaves(path, _tree(2))

    refused = _at_first_write(path, monkeypatch, before=others)
    ec.tree_serialise_leaves(path, _tree(3), layout="zarr")
    assert refused and _value(path) == 3


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_writer_that_begins_while_another_cleans_up(tmp_path, where, monkeypatch):
    """It has read the index of the other, so its data is not what that deletes."""
    path = tmp_path / "a" if where == "local" else "memory://begins/a"
    ec.tree_serialise_leaves(path, _tree(1))
    written, may_commit = threading.Event(), threading.Event()
    errors, once = [], threading.Lock()

    def second():
        try:
            ec.tree_serialise_leaves(path, _tree(3))
        except Exception as e:
            errors.append(e)
        finally:
            written.set()

    thread = threading.Thread(target=second, daemon=True)

    def slow(change, key):
        if change == "commit" and threading.current_thread() is thread:
            written.set()
            may_commit.wait()

    committed = []

    def cleaning(*_):
        if committed and once.acquire(blocking=False):
            # The first has committed, and the second begins.
            thread.start()
            written.wait()

    # No lock is what a store, and a network file system, may have.
    monkeypatch.setattr(fcntl, "flock", lambda fd, flags: None)
    note = lambda change, key: committed.append(key) if change == "commit" else None
    inside.watch_store(monkeypatch, path, slow, note)
    cleans = "delete what is left" if where == "local" else "delete files of a store"
    inside.watch(monkeypatch, cleans, cleaning)
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value(path) == 2
    may_commit.set()
    thread.join()
    assert not errors
    assert _value(path) == 3 and ec.materialise(ec.open(path).tree)["x2"][0] == 5


@pytest.mark.parametrize("orbax", [False, True])
def test_a_save_commits_in_one_step(tmp_path, monkeypatch, orbax):
    """The one rename, under the lock of writers. Nothing follows it but deletion."""
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), orbax=orbax)
    changes = []

    def watched(change, key):
        changes.append((change, key))
        if change in ("swap", "commit"):
            assert is_locked(path)

    inside.watch_store(monkeypatch, path, watched)
    inside.watch(monkeypatch, "exchange", lambda *_: changes.append(("exchange", "")))
    ec.tree_serialise_leaves(path, _tree(2), orbax=orbax)
    # The index is put in place by a rename, which is its commit.
    steps = [x for x in changes if x != ("swap", "eqx_ckpt.json")]
    assert steps[-1][0] == ("exchange" if orbax else "commit")
    assert "swap" not in [change for change, _ in steps]
    assert _value(path) == 2


def test_files_for_orbax_go_with_the_save_that_had_them(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), orbax=True)
    assert (path / "_METADATA").is_file() and (path / "manifest.ocdbt").is_file()
    ec.tree_serialise_leaves(path, _tree(2))
    assert {x.name for x in path.iterdir()} == {"eqx_ckpt.json", "d"}
    assert _value(path) == 2 and not ec.verify(path)


def test_what_comes_into_a_checkpoint_that_is_replaced(tmp_path, monkeypatch):
    """A nested checkpoint that lands just before two directories change places."""
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), layout="zarr")
    late = lambda *_: ec.tree_serialise_leaves(path / "nested", _tree(7))
    inside.watch(monkeypatch, "exchange", late)
    ec.tree_serialise_leaves(path, _tree(2), layout="zarr")
    assert _value(path) == 2 and _value(path / "nested") == 7
    monkeypatch.undo()
    # Known in time, it is refused.
    with pytest.raises(FileExistsError, match="has `nested` in it"):
        ec.tree_serialise_leaves(path, _tree(3), layout="zarr")
    assert _value(path) == 2 and os.listdir(tmp_path) == ["a"]


def test_three_writers_by_exchange(tmp_path, monkeypatch):
    """One that is refused never has the checkpoint of another in its hands."""
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1), layout="zarr")
    exchanged = []
    other = lambda: ec.tree_serialise_leaves(path, _tree(2), layout="zarr")
    _at_first_write(path, monkeypatch, before=other)
    inside.watch(monkeypatch, "exchange", lambda _, b: exchanged.append(_value(b)))
    with pytest.raises(RuntimeError, match="another writer"):
        ec.tree_serialise_leaves(path, _tree(3), layout="zarr")
    assert exchanged == [1] and _value(path) == 2


def test_a_killed_first_save_is_no_checkpoint(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    (path / "eqx_ckpt.json").unlink()
    with pytest.raises(FileNotFoundError, match="may have been interrupted"):
        ec.open(path)
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value(path) == 2 and len(os.listdir(path / "d")) == 1


def test_durable_syncs_files_and_directories(tmp_path, layout, monkeypatch):
    """In which order: see `test_power.py`."""
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


@pytest.mark.parametrize("old", [None, 1])
def test_a_save_of_many_files_fails_if_one_cannot_be_synced(tmp_path, monkeypatch, old):
    def fail(fd):
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "a"
    if old is not None:
        ec.tree_serialise_leaves(path, _tree(old), layout="zarr")
    inside.sync_as_a_whole(monkeypatch)
    inside.replace(monkeypatch, "sync a file system", fail)
    many = [np.full(2, i) for i in range(130)]
    with pytest.raises(OSError, match="Input/output error, while .* may be failing"):
        ec.tree_serialise_leaves(path, many, layout="zarr")
    assert os.listdir(tmp_path) == (["a"] if old else [])
    assert old is None or _value(path) == old
    # One of few files syncs them one by one.
    ec.tree_serialise_leaves(path, _tree(2), layout="zarr")
    assert _value(path) == 2


@pytest.mark.parametrize(
    "release, reports",
    [("5.7.19", False), ("5.8.0-63-generic", True), ("6.1", True), ("4.4", False)],
)
def test_old_systems_do_not_say_what_was_lost(monkeypatch, release, reports):
    system = types.SimpleNamespace(release=release)
    monkeypatch.setattr(os, "uname", lambda: system)
    can = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "syncfs")
    assert inside.can_report_syncs() == (reports and can)


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


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("inside", ["d/inner", "w/inner"])
def test_a_checkpoint_in_a_directory_of_another(tmp_path, layout, inside):
    """Nothing that deletes the outer one takes it along."""
    outer = tmp_path / "a"
    ec.tree_serialise_leaves(outer, {"w": np.arange(3.0)}, layout=layout)
    ec.tree_serialise_leaves(outer / inside, {"x": 1})
    with pytest.raises(ValueError, match=r"has `[dw].*` in it.*Nothing was deleted"):
        ec.delete(outer)
    with pytest.raises(FileExistsError, match="has `[dw].*` in it"):
        ec.tree_serialise_leaves(outer, {"w": np.zeros(3)}, layout="zarr")
    assert ec.open(outer / inside)["x"].read() == 1
    assert ec.open(outer)["w"].read().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "path",
    [
        "FILE://host/run",
        pathlib.Path("file:///run"),
        "file:/run",
        "file://other/run",
        "{}/a.__lock",
        "{}/a.__lock/b",
        "{}/\udcff",
    ],
    ids=repr,
)
def test_paths_that_mean_something_else_or_cannot_be_read(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    if isinstance(path, str):
        path = path.format(tmp_path)
    for call in (
        lambda: ec.tree_serialise_leaves(path, {"w": 1}),
        lambda: ec.open(path),
    ):
        with pytest.raises(ValueError):
            call()
    assert os.listdir(tmp_path) == []


def test_paths_with_two_slashes_and_localhost(tmp_path):
    for path in (f"/{tmp_path}/a", f"file://localhost{tmp_path}/a", f"//{tmp_path}/a"):
        ec.tree_serialise_leaves(path, {"w": np.ones(3)})
        assert ec.open(path)["w"].read().tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == ["a"]


def test_a_directory_that_another_has_put_in_place(tmp_path, monkeypatch):
    """Its name is made durable, although one of that name was."""
    above = tmp_path / "above"
    ec.tree_serialise_leaves(above / "a", {"x": 1})
    above.rename(tmp_path / "away")
    above.mkdir()
    synced = []
    inside.watch(monkeypatch, "sync a directory", synced.append)
    ec.tree_serialise_leaves(above / "a", {"x": 1})
    assert str(tmp_path) in synced
    synced.clear()
    ec.tree_serialise_leaves(above / "b", {"x": 1})
    assert str(above) in synced and str(tmp_path) not in synced


@pytest.mark.parametrize("gone", [[], ["zarr.json"]])
def test_leaves_are_told_from_leftovers_by_what_is_in_them(tmp_path, gone):
    # What is left of a checkpoint, whose leaf `w.eqx_ckpt-...` has chunks in `c`.
    ec.tree_serialise_leaves(
        tmp_path / "p",
        {"w": {f"eqx_ckpt-{'0' * 16}": np.ones(3)}, "s": {f"eqx_ckpt-{'1' * 16}": 1.0}},
        layout="zarr",
    )
    for file in ("eqx_ckpt.json", "eqx_ckpt.digests", "zarr.json"):
        (tmp_path / "p" / file).unlink()
    leaves = [*(tmp_path / "p").iterdir()]
    for leaf in leaves:
        for name in gone:
            (leaf / name).unlink()
    # What is left of a save with a leaf `c`, before and after it had its other files.
    ec.tree_serialise_leaves(tmp_path / "c", {"c": np.ones(3)}, layout="zarr")
    for file in ("eqx_ckpt.json", "eqx_ckpt.digests", *gone):
        (tmp_path / "c" / file).unlink()
    (tmp_path / "c").rename(tmp_path / "p" / f"w.eqx_ckpt-{'2' * 16}")
    (tmp_path / "p" / f"s.eqx_ckpt-{'3' * 16}" / "c").mkdir(parents=True)
    kept = [*map(files_of, leaves)]
    for name in "ws":
        ec.tree_serialise_leaves(tmp_path / "p" / name, {"a": 1})
    assert sorted(os.listdir(tmp_path / "p")) == sorted(
        ["s", "w", *(leaf.name for leaf in leaves)]
    )
    assert [*map(files_of, leaves)] == kept
