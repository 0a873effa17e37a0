"""`durable=True`: a model of what a power cut leaves on a disk.

Only what was synced is sure to be there: the bytes of a file once the file was synced,
a name once its directory was, and all that was written before once the file system was.
What was not synced may be there all the same, in any order. So at every call that a
save makes, three disks are checked: one on which nothing else has landed, one on which
this last change of a name has, and one on which all changes of names have.
"""

import contextlib
import functools as ft
import os
import pathlib
import threading

import numpy as np
import pytest
from support import inside
from support.helpers import assert_alike

import eqx_ckpt as ec


class _File:
    def __init__(self, synced=b""):
        self.synced = synced


class _Directory:
    def __init__(self):
        self.names = {}
        self.synced = {}


def _read(path):
    """A directory that has been on the disk for long."""
    node = _Directory()
    for entry in os.scandir(path):
        below = pathlib.Path(entry.path)
        node.names[entry.name] = (
            _read(below) if entry.is_dir() else _File(below.read_bytes())
        )
    node.synced = dict(node.names)
    return node


class _Disk:
    """Follows the calls below a directory, and notes what a power cut would leave."""

    def __init__(self, top, monkeypatch):
        self.top, self.root = top, _read(top)
        self.states = {}
        self.calls = 0
        self.one_at_a_time = threading.RLock()
        for name in "open mkdir rename replace link unlink rmdir fsync".split():
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for name, call in (("exchange", "exchange"), ("syncfs", "sync a file system")):
            inside.wrap(monkeypatch, call, ft.partial(self._wrap, name))

    def _wrap(self, name, call):
        def wrapped(*args, **kwargs):
            with self.one_at_a_time:
                out = call(*args, **kwargs)
                self.calls += 1
                if name == "fsync":
                    self._sync(os.readlink(f"/proc/self/fd/{args[0]}"))
                elif name == "syncfs":
                    self._sync_below(self.root, self.top)
                    self._note(name)
                elif name != "open" or args[1] & os.O_CREAT:
                    paths = args if name in _two else args[:1]
                    ways = [kwargs.get(way) for way in ("src_dir_fd", "dst_dir_fd")]
                    ways = ways if name in _two else [kwargs.get("dir_fd")]
                    places = map(_path, paths, ways)
                    self._changed(name, [self._find(path) for path in places])
            return out

        return wrapped

    def _find(self, path):
        """The directory that a path is in, and its name there."""
        path = os.path.join(os.path.realpath(os.path.dirname(path)), _last(path))
        inside = os.path.relpath(path, self.top).split("/")
        if inside[0] in (".", ".."):
            return None, ""
        node = self.root
        for name in inside[:-1]:
            node = node.names[name]
        return node, inside[-1]

    def _sync(self, path):
        directory, name = self._find(path)
        if directory is None and path != str(self.top):
            return  # What is above has been there for long.
        node = directory.names[name] if directory is not None else self.root
        if isinstance(node, _Directory):
            node.synced = dict(node.names)
        else:
            node.synced = pathlib.Path(path).read_bytes()
        self._note("fsync")

    def _sync_below(self, node, path):
        if isinstance(node, _File):
            node.synced = path.read_bytes()
            return
        node.synced = dict(node.names)
        for name, below in node.names.items():
            self._sync_below(below, path / name)

    def _changed(self, name, places):
        (parent, key), (other, to) = places[0], places[-1]
        if parent is None:
            return  # Elsewhere, as on a near disk.
        if name == "mkdir":
            parent.names[key] = _Directory()
        elif name == "open":
            parent.names.setdefault(key, _File())
        elif name in ("unlink", "rmdir"):
            del parent.names[key]
        elif name == "link":
            other.names[to] = parent.names[key]
        elif name == "exchange":
            parent.names[key], other.names[to] = other.names[to], parent.names[key]
        else:
            other.names[to] = parent.names.pop(key)
        self._note(name)
        # This change alone has landed.
        before = [dict(node.synced) for node, _ in places]
        for node, key in places:
            if key in node.names:
                node.synced[key] = node.names[key]
            else:
                node.synced.pop(key, None)
        self._note(name)
        for (node, _), synced in zip(places, before):
            node.synced = synced

    def _note(self, call):
        for attribute in ("synced", "names"):
            state = frozenset(_files(self.root, attribute, "").items())
            self.states.setdefault(state, f"{self.calls}: {call}")

    def now(self):
        return frozenset(_files(self.root, "synced", "").items())


_two = ("rename", "replace", "link", "exchange")


def _path(path, way):
    """A path in a directory that is open, if one is."""
    return path if way is None else f"{os.readlink(f'/proc/self/fd/{way}')}/{path}"


def _last(path):
    return os.path.basename(os.fspath(path).rstrip("/"))


def _files(node, attribute, prefix):
    if isinstance(node, _File):
        return {prefix: node.synced}
    out = {prefix + "/": b""}
    for name, below in getattr(node, attribute).items():
        out.update(_files(below, attribute, f"{prefix}/{name}"))
    return out


def _write(state, top):
    for name, data in sorted(state):
        path = top / name[1:]
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.write_bytes(data)


def _tree(value):
    return {"w": np.full(6, value), "v": [np.full(3, value)] * 2, "step": value}


def _sync_together(monkeypatch):
    """As if a save had many files, on a file system that is synced as a whole."""
    inside.limit(monkeypatch, singly_synced_files=0)
    inside.sync_as_a_whole(monkeypatch)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr", "zarr, together"])
@pytest.mark.parametrize("old", [None, "ocdbt", "zarr"])
def test_a_power_cut(tmp_path, monkeypatch, layout, old):
    layout, _, together = layout.partition(", ")
    if together:
        _sync_together(monkeypatch)
    calls = _cut_everywhere(tmp_path, monkeypatch, layout, old)
    assert any("syncfs" in call for call in calls) == bool(together)


@contextlib.contextmanager
def _never(directory):
    yield lambda: None


@contextlib.contextmanager
def _too_late(directory):
    yield lambda: None
    # The save is published by now.
    fd = os.open(os.path.dirname(directory.path), os.O_RDONLY)
    inside.sync_file_system(fd)
    os.close(fd)


@pytest.mark.parametrize("when", [_never, _too_late])
@pytest.mark.parametrize("old", [None, "zarr"])
def test_a_power_cut_shows_what_is_not_synced(tmp_path, monkeypatch, old, when):
    _sync_together(monkeypatch)
    inside.replace(monkeypatch, "sync together", when)
    with pytest.raises((ec.DamagedError, FileNotFoundError, AssertionError)):
        _cut_everywhere(tmp_path, monkeypatch, "zarr", old)


def _killed_before(path):
    os.makedirs(path / "d" / "0123456789abcdef")


def _script(path):
    os.makedirs(path.parent)


@pytest.mark.parametrize("made", [_killed_before, _script])
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_directories_that_others_have_made(tmp_path, monkeypatch, layout, made):
    """The names that lead to a save are durable too, whoever has made them."""
    _cut_everywhere(tmp_path, monkeypatch, layout, None, made)


@pytest.mark.parametrize("old", [None, 1])
def test_a_power_cut_and_a_file(tmp_path, monkeypatch, old):
    top = tmp_path / "disk"
    path = top / "new" / "deep" / "7.zip"
    top.mkdir()
    if old is not None:
        ec.tree_serialise_leaves(path, _tree(old))
    with monkeypatch.context() as patch:
        disk = _Disk(top, patch)
        os.makedirs(path.parent, exist_ok=True)
        ec.tree_serialise_leaves(path, _tree(2))
    seen = set()
    for number, state in enumerate([*disk.states, disk.now()]):
        got = _step(tmp_path / f"{number}", state, "new/deep/7.zip")
        assert got in (old, 2)
        seen.add(got)
    assert seen == {old, 2} and got == 2


def test_a_run_whose_directory_others_have_made(tmp_path, monkeypatch):
    """An attempt of a run with near steps makes it, and so does a pin."""
    top = tmp_path / "disk"
    top.mkdir()
    root = top / "new" / "run"
    with monkeypatch.context() as patch:
        disk = _Disk(top, patch)
        near = {"near": tmp_path / "near", "near_every": 1}
        with ec.CheckpointManager(root, **near, every=2) as manager:
            for step in range(3):
                manager.save(step, _tree(step))
            manager.wait()
            manager.pin(2)
        names = dict(disk.now())
    assert f"/{root.relative_to(top)}/eqx_ckpt.pins/2" in names
    _write(names.items(), tmp_path / "after")
    after = ec.CheckpointManager(tmp_path / "after" / "new" / "run")
    assert after.steps() == [0, 2]
    assert_alike(ec.materialise(ec.open(after.path(2)).tree), _tree(2))


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_power_cut_after_a_save_that_was_not_durable(tmp_path, monkeypatch, layout):
    """The index of a durable save is there only where all that it names is."""
    top, key = tmp_path / "disk", "/7/eqx_ckpt.json"
    top.mkdir()
    with monkeypatch.context() as patch:
        disk = _Disk(top, patch)
        ec.tree_serialise_leaves(top / "7", _tree(1), layout=layout, durable=False)
        ec.tree_serialise_leaves(top / "7", _tree(2), layout=layout)
    index = dict(disk.now())[key]
    states = [state for state in disk.states if dict(state).get(key) == index]
    for number, state in enumerate([*states, disk.now()]):
        assert _step(tmp_path / f"{number}", state, "7") == 2


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_power_cut_while_one_is_deleted(tmp_path, monkeypatch, layout):
    top = tmp_path / "disk"
    top.mkdir()
    ec.tree_serialise_leaves(top / "7", _tree(1), layout=layout)
    with monkeypatch.context() as patch:
        disk = _Disk(top, patch)
        ec.delete(top / "7")
    for number, (state, when) in enumerate(disk.states.items()):
        assert _step(tmp_path / f"{number}", state, "7") in (1, None), when
    assert "/7/" not in dict(disk.now())


def _cut_everywhere(tmp_path, monkeypatch, layout, old, before=None):
    """Checks what is left after a power cut at each call of a save: returns these."""
    top = tmp_path / "disk"
    path = top / "new" / "deep" / "7"
    top.mkdir()
    if old is not None:
        ec.tree_serialise_leaves(path, _tree(1), layout=old)
    with monkeypatch.context() as patch:
        disk = _Disk(top, patch)
        if before is not None:
            before(path)
        ec.tree_serialise_leaves(path, _tree(2), layout=layout)
    # It has followed all that there is: with every name on the disk, it is all there.
    assert _files(disk.root, "names", "") == _files(_read(top), "names", "")

    seen = set()
    for number, (state, when) in enumerate(disk.states.items()):
        got = _step(tmp_path / f"{number}", state, "new/deep/7")
        assert got in (2, 1 if old else None), when
        seen.add(got)
    assert seen == {2, 1 if old else None}
    assert _step(tmp_path / "end", disk.now(), "new/deep/7") == 2
    return disk.states.values()


def _step(copy, state, key):
    """What there is at a path on a disk: all of it. None: nothing."""
    _write(state, copy)
    try:
        ckpt = ec.open(copy / key)
    except FileNotFoundError:
        return None
    tree = ec.materialise(ckpt.tree)
    assert_alike(tree, _tree(tree["step"]))
    return tree["step"]
