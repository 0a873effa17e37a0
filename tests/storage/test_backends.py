"""One suite for every kind of store: what `Backend` promises, with real servers.

What only one of the two families can do is asked of a `LocalDirectory` or of an
`ObjectStore`.
"""

import errno
import itertools
import os
import pathlib
import pickle
from typing import NamedTuple

import numpy as np
import pytest
from support import servers

from eqx_ckpt._kernel._errors import BeyondError, MissingError
from eqx_ckpt._kernel._storage import _backend, _root, _store as _stores
from eqx_ckpt._kernel._storage._backend import Backend
from eqx_ckpt._kernel._storage._local import LocalDirectory, SavedFile
from eqx_ckpt._kernel._storage._objects import ObjectStore


_numbers = itertools.count()
_WRITABLE = ["local", "memory", *servers.BUCKETS]
_FILE = b"0123456789"


class Store(NamedTuple):
    """`write` is given a backend that writes where `read` reads: itself if it can."""

    kind: str
    read: Backend
    write: Backend


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A directory, and the port of a web server that shows it."""
    directory = tmp_path_factory.mktemp("served")
    with servers.static(directory) as port:
        yield directory, port


def _store(kind, request):
    number = next(_numbers)
    if kind in servers.BUCKETS:
        request.getfixturevalue(kind)
        root = _root.resolve(f"{servers.BUCKETS[kind]}/backends{number}/x")
        return Store(kind, root, root)
    if kind == "memory":
        root = _root.resolve(f"memory://backends{number}/x")
        return Store(kind, root, root)
    if kind == "http":
        directory, port = request.getfixturevalue("served")
        below = directory / str(number)
        below.mkdir()
        read = _root.resolve(f"http://127.0.0.1:{port}/{number}")
        return Store(kind, read, _root.resolve(below))
    root = _root.resolve(request.getfixturevalue("tmp_path") / "x")
    pathlib.Path(root.url).mkdir()
    return Store(kind, root, root)


@pytest.fixture(params=[*_WRITABLE, "http", "open"])
def store(request):
    """Each kind, with a file `a/file` in it; of `open` that is open."""
    made = _store(request.param, request)
    made.write.make_directories(["a", "b"])
    made.write.write("a/file", [_FILE])
    if request.param == "open":
        read = made.read.pinned("a/file")
        # Whatever comes to its name is not read.
        path = pathlib.Path(made.write.url, "a", "file")
        path.rename(path.with_name("old"))
        path.write_bytes(b"something else")
        made = made._replace(read=read)
    yield made


@pytest.fixture(params=_WRITABLE)
def writable(request):
    made = _store(request.param, request).write
    assert isinstance(made, Backend)
    return made


def _into(count):
    return np.zeros(count, np.uint8)


# ---- Reads.


def test_reads(store):
    root = store.read
    assert root.has("a/file") and root.stamp("a/file") == root.stamp("a/file") != ""
    assert root.read("a/file").data == _FILE
    assert root.read("a/file", 4).data == _FILE[:4]
    assert root.read("a/file", limit=10).data == _FILE
    assert root.size("a/file") in (10, None)
    assert (root.read("a/file").time is None) == root.is_remote
    usage = root.usage(["a/file"])
    assert usage is None if root.is_remote else usage.files == 1
    assert root.check_range("a/file", 10) in (10, None)
    if store.kind != "gs":  # The emulator knows no ranges from the end.
        assert root.wait(root.start_read("a/file", -3, None)).value == _FILE[-3:]
    assert root.wait(root.start_read("a/file", 2, 5)).value == _FILE[2:5]
    into = _into(4)
    assert root.read_into("a/file", 3, into) == 4 and into.tobytes() == _FILE[3:7]
    assert root.below("a").read("file").data in (_FILE, b"something else")
    directory, key = root.below("a").below("file").split()
    assert key == "file" and directory.has("file")
    assert pickle.loads(pickle.dumps(root.unpinned())) == root.unpinned()


@pytest.mark.parametrize("none", ["a/none", "a/" + "x" * 300], ids=["none", "long"])
def test_a_file_that_is_not_there(store, none):
    root = store.read
    assert not root.has(none) and root.stamp(none) == ""
    assert root.read(none) is None and root.read(none, limit=3) is None
    assert root.size(none) is None
    if root.is_remote:  # There a directory is none.
        assert root.read("a") is None and not root.has("a")
    for read in (
        lambda: root.check_range(none, 1),
        lambda: root.read_into(none, 0, _into(1)),
    ):
        with pytest.raises(Exception) as caught:
            read()
        assert _backend.is_missing(caught.value)


def test_a_range_that_ends_beyond_the_file(store):
    root = store.read
    for stop in (11, 2**40):
        with pytest.raises(Exception) as caught:
            root.check_range("a/file", stop)
        assert _backend.is_missing(caught.value)
    into = _into(8)
    assert root.read_into("a/file", 6, into) == 4 and into[:4].tobytes() == _FILE[6:]
    assert root.read_into("a/file", 10, into) == 0
    assert root.read_into("a/file", 100, into) == 0
    with pytest.raises(ValueError, match="longer than 9 bytes"):
        root.read("a/file", limit=9)
    with pytest.raises(Exception) as caught:
        root.wait(root.start_read("a/file", 8, 20))
    assert _backend.is_missing(root.explain(caught.value))


def test_a_range_that_begins_beyond_the_file(store):
    root = store.read
    if store.kind not in (*servers.BUCKETS, "http"):
        return  # Only a server is asked once more, unless it says so.
    for start, stop in ((10, 11), (100, 120), (100, None)):
        with pytest.raises(BeyondError):
            root.wait(root.start_read("a/file", start, stop))
    with pytest.raises(MissingError) as caught:
        root.wait(root.start_read("a/file", 9, 12))
    assert not isinstance(caught.value, BeyondError)


def test_an_empty_file(store):
    if store.kind == "gs":
        pytest.skip("The emulator takes no empty files.")
    store.write.write("b/empty", [])
    root = store.read
    assert root.read("b/empty").data == b"" and root.has("b/empty")
    assert root.stamp("b/empty")
    assert root.check_range("b/empty", 0) in (0, None)


def test_a_stamp_is_of_one_version(store):
    if store.kind == "open":
        path = pathlib.Path(store.write.url, "a", "old")
        os.utime(path, (0, 0))  # Or both are of one tick of a coarse clock.
        was = store.read.stamp("a/file")
        path.write_bytes(b"written to")
        assert store.read.stamp("a/file") != was
        return
    was = store.read.stamp("a/file")
    store.write.delete("a/file")
    assert store.read.stamp("a/file") == ""
    store.write.write("a/file", [b"other"])
    assert store.read.stamp("a/file") not in ("", was)


def test_lists(store):
    root = store.read
    if not root.can_list():
        assert root.list_top() is None and root.list_all() is None
        return
    tops = root.list_top()
    assert tops["a"] is True
    assert "a/file" in root.list_all()
    assert root.is_directory("a") and not root.is_directory("none")
    assert root.list_all("a/f") == ["a/file"] and root.list_all("none") == []
    assert root.below("none").list_top() is None
    sizes = root.survey(100)
    assert sizes is None or set(sizes) == set(root.list_all())


@pytest.mark.parametrize("kind", servers.BUCKETS)
def test_a_request_that_is_refused(request, kind):
    root = _store(kind, request).write
    root.write("file", [_FILE])
    with request.getfixturevalue(kind).used() as proxy:
        proxy.fault = lambda *_: 403
        for refused in (
            lambda: root.read("file"),
            lambda: root.check_range("file", 3),
            lambda: root.write("file", [_FILE]),
        ):
            with pytest.raises(PermissionError, match="refuses access"):
                refused()
        with pytest.raises(OSError):
            root.list_top()
    assert root.read("file").data == _FILE


@pytest.mark.parametrize("kind", servers.BUCKETS)
def test_an_answer_that_is_lost(request, kind):
    """The write is tried again, and refused: what was there is ours already."""
    root = _store(kind, request).write
    lost = []

    def lose(method, path):
        if method in ("PUT", "POST") and not lost:
            lost.append(path)
            return "lose"

    with request.getfixturevalue(kind).used() as proxy:
        proxy.fault = lose
        assert root.replace("index", b"ours", None)
    assert lost and root.read("index").data == b"ours"


# ---- What must not be read.


def test_a_link_and_what_is_no_file(tmp_path):
    (tmp_path / "x" / "there").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(_FILE)
    os.symlink("../secret", tmp_path / "x" / "link")
    os.symlink("../x", tmp_path / "x" / "around")
    os.mkfifo(tmp_path / "x" / "fifo")
    root = _root.resolve(tmp_path / "x")
    for key, what in {
        "link": "is a symbolic link",
        "around/link": "is a symbolic link",
        "fifo": "is not a file",
        "there": "is not a file",
    }.items():
        for read in (
            lambda: root.read(key),
            lambda: root.size(key),
            lambda: root.check_range(key, 1),
            lambda: root.read_into(key, 0, _into(1)),
            lambda: root.wait(root.start_read(key, -1, None)),
            lambda: root.wait(root.start_read(key, 0, 1)),
        ):
            with pytest.raises(ValueError, match=what):
                read()
        assert root.stamp(key) == ""
    with pytest.raises(ValueError):
        root.survey(100)
    assert root.list_top()["link"] is False and root.is_link("link")
    trusting = _root.resolve(tmp_path / "x", follow=True)
    assert trusting.read("link").data == _FILE
    with pytest.raises(ValueError, match="is not a file"):
        trusting.read("fifo")
    # Nothing is deleted through a link.
    root.delete("link")
    root.delete("around")
    assert (tmp_path / "secret").exists() and not root.is_link("link")
    with pytest.raises(ValueError, match="more than 1 files"):
        _root.resolve(tmp_path).survey(1)


def test_what_stands_at_a_place(tmp_path):
    (tmp_path / "file").write_bytes(_FILE)
    os.mkfifo(tmp_path / "fifo")
    os.symlink("nowhere", tmp_path / "dangling")
    found = {
        name: _root.resolve(tmp_path / name).entry()
        for name in ("", "file", "fifo", "dangling", "none", "file/below")
    }
    assert found == {
        "": "directory",
        "file": "file",
        "fifo": "other",
        "dangling": "nothing",
        "none": "nothing",
        "file/below": "nothing",
    }
    with pytest.raises(NotADirectoryError, match="`.*file` is a file"):
        _root.resolve(tmp_path / "file" / "below").check_writable()
    assert _stores.is_file(_root.resolve(tmp_path / "file"))
    assert not _stores.is_file(_root.resolve(tmp_path))


def test_a_directory_that_cannot_be_looked_at_is_no_file(tmp_path, monkeypatch):
    root = _root.resolve(tmp_path / "new")
    look, refused = os.stat, []

    def refuse(path, **options):
        if str(path) == str(tmp_path) and not refused:
            refused.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        root.check_writable()
    assert refused


def test_a_web_server_takes_nothing(request):
    root = _store("http", request).read
    with pytest.raises(ValueError, match="nothing is saved over HTTP"):
        root.check_writable()
    with pytest.raises(Exception):
        root.write("file", [_FILE])


def test_a_file_that_is_replaced_as_it_is_read_is_read_whole(tmp_path, monkeypatch):
    root = _root.resolve(tmp_path)
    for name, data in (("a", b"old"), ("new", b"a longer one")):
        (tmp_path / name).write_bytes(data)
    look = LocalDirectory._look

    def replaced(*args):
        found = look(*args)
        os.replace(tmp_path / "new", tmp_path / "a")
        return found

    monkeypatch.setattr(LocalDirectory, "_look", replaced)
    assert root.read("a").data == b"a longer one"


# ---- Writes.


def test_writes(writable):
    root = writable
    root.check_writable()
    root.make_directories(["a/b", "c"])
    root.write("a/b/1", [b"ab", memoryview(b"cd")], True)
    root.write("a/2", [b"2"])
    root.sync_directories(["a/b", "a", ""])
    root.copy("a/b/1", "c/1", True)
    assert root.read("c/1").data == b"abcd"
    assert root.move("a", "moved", "b/1")
    assert root.read("a/b/1") is None and root.read("moved/b/1").data == b"abcd"
    root.write("moved-too", [b"m"])
    root.delete("moved")
    assert root.list_top().keys() >= {"c", "moved-too"}
    assert "moved" not in root.list_top() and not root.is_directory("moved")
    root.drop_directory("c")
    assert root.has("c/1")
    root.delete("none")
    root.below("c").delete("")
    assert not root.has("c/1") and root.has("moved-too")


def _staged(root):
    """As `replace`, of what is staged first where there are renames."""

    def replace(key, data, found):
        staged = f"own/{data.decode()}"
        if isinstance(root, LocalDirectory) and not root.has(staged):
            root.write(staged, [data], True)
        return root.replace(key, data, found, staged)

    return replace


@pytest.mark.parametrize("key", ["index", "inner/index"])
def test_a_commit(writable, key):
    root = writable
    root.make_directories(["own"])
    with root.lock(wait=True) as held:
        assert held == isinstance(root, LocalDirectory)
        replace = _staged(root)
        assert replace(key, b"1", None)
        found, first = root.read(key), root.stamp(key)
        assert found.data == b"1"
        # Another has been faster.
        assert not replace(key, b"2", None)
        assert root.read(key).data == b"1"
        assert replace(key, b"2", found)
        assert not replace(key, b"3", found)
        assert root.read(key).data == b"2"
        # So is a deletion refused.
        assert not root.delete_as(key, first)
        assert root.read(key).data == b"2"
        assert root.delete_as(key, root.stamp(key)) and root.read(key) is None
        assert root.delete_as(key, first) and root.delete_as(key, "")
        assert not replace(key, b"4", found)
        assert root.read(key) is None


def test_a_new_file_takes_the_place_of_none(tmp_path):
    root = _root.resolve(tmp_path)
    root.write("file", [_FILE])
    with pytest.raises(FileExistsError):
        root.write("file", [b"other"])
    assert root.read("file").data == _FILE


# ---- What some can do.


def test_who_can_do_what(store):
    is_local = store.kind in ("local", "open")
    assert isinstance(store.read, LocalDirectory) == is_local
    assert isinstance(store.read, ObjectStore) != is_local
    assert store.read.is_remote != is_local
    assert (store.read.entry() is None) == store.read.is_remote


def test_locks(tmp_path):
    root = _root.resolve(tmp_path / "a" / "b")
    with root.make_locked():
        assert root.is_locked()
        with root.lock() as held:
            assert not held
    assert not root.is_locked() and not root.below("none").is_locked()
    with root.lock() as held:
        assert held
    with pytest.raises(FileNotFoundError):
        with root.below("none").lock():
            pass


def test_links(tmp_path, monkeypatch):
    hold, opened = LocalDirectory.hold, []
    monkeypatch.setattr(
        LocalDirectory, "hold", lambda *args: opened.append(hold(*args)) or opened[-1]
    )
    one, two = (_root.resolve(tmp_path / name) for name in ("one", "two"))
    for root in (one, two):
        root.make_directories([""])
    one.write("file", [_FILE])
    assert two.link_from(SavedFile(one, "file", 10), "linked", True)
    assert os.path.samefile(tmp_path / "one" / "file", tmp_path / "two" / "linked")
    assert not two.link_from(SavedFile(one, "file", 9), "shorter", False)
    assert not two.link_from(SavedFile(one, "none", 9), "missing", False)
    assert not two.link_from(SavedFile(one, "file", 10), "linked", False)
    memory = _root.resolve("memory://links")
    assert not two.link_from(SavedFile(memory, "file", 10), "far", False)
    with pytest.raises(ValueError):
        one.hold("file", 9)
    # Each is closed, whoever still has it.
    assert len(opened) == 2 and not any(hasattr(x, "fileno") for x in opened)
    # What is held is copied where it has lost its name to another file.
    held = one.hold("file", 10)
    assert two.link_from(SavedFile(one, "file", 10, held), "held", True)
    assert os.path.samefile(tmp_path / "one" / "file", tmp_path / "two" / "held")
    one.delete("file")
    one.write("file", [b"something else"])
    assert two.link_from(SavedFile(one, "file", 10, held), "copied", True)
    assert two.read("copied").data == _FILE


def test_renames(tmp_path):
    old, new = (_root.resolve(tmp_path / "in" / name) for name in ("old", "new"))
    assert [p.path for p in old.missing()] == [str(tmp_path / "in")]
    for root, data in ((old, b"old"), (new, b"new")):
        root.make_directories([""])
        root.write("file", [data])
    assert new.parent().below("old").read("file").data == b"old" and new.name == "new"
    os.chmod(old.path, 0o711)
    new.exchange(old)
    assert old.read("file").data == b"new" and new.read("file").data == b"old"
    assert os.stat(old.path).st_mode & 0o777 == 0o711
    with pytest.raises(OSError):
        new.rename(old)
    new.below("file").rename(old.parent().below("file"))
    new.drop_directory()
    assert new.entry() == "nothing"
    with pytest.raises(FileNotFoundError):
        new.exchange(old)
    old.write("staged", [b"one file"], True)
    target = _root.resolve(tmp_path / "target")
    old.below("staged").rename(target, overwrite=False)
    assert (tmp_path / "target").read_bytes() == b"one file"
    old.write("again", [b"2"])
    with pytest.raises(FileExistsError):
        old.below("again").rename(target, overwrite=False)
    old.below("again").rename(target)
    assert (tmp_path / "target").read_bytes() == b"2"


def test_usage_beside_one_that_deletes(tmp_path, monkeypatch):
    """A file that goes between the listing and the look takes no other with it."""
    for number in range(6):
        (tmp_path / f"x{number}").write_bytes(b"0123456789")
    (tmp_path / "below").mkdir()
    (tmp_path / "below/y").write_bytes(b"0")
    scandir = os.scandir

    def delete_first(path):
        entries = list(scandir(path))
        if path == str(tmp_path):
            next(pathlib.Path(e.path) for e in entries if e.is_file()).unlink()
            entries.sort(key=lambda entry: os.path.exists(entry.path))
        return iter(entries)

    monkeypatch.setattr(os, "scandir", delete_first)
    usage = LocalDirectory(str(tmp_path), str(tmp_path)).usage()
    assert (usage.files, usage.nbytes) == (6, 51)
