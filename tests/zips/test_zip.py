"""A checkpoint of one file: a zip that is not compressed, read in place."""

import concurrent.futures as cf
import errno
import io
import itertools
import json
import os
import pickle
import shutil
import stat
import struct
import threading
import time
import zipfile

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from attacks import everything, skeleton, tree as _all_kinds
from support import inside, scripts
from support.helpers import assert_alike, BytesRead, run_program

import eqx_ckpt as ec


def _tree():
    big = np.random.default_rng(0).normal(size=(2100, 1024)).astype(np.float32)
    return {**_all_kinds(), "big": big, "more": [jnp.full(3, i) for i in range(40)]}


def _like():
    return {**skeleton(), "big": _tree()["big"] * 0, "more": _tree()["more"]}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("zip") / "ckpt.zip"
    ec.tree_serialise_leaves(path, _tree(), everything, metadata={"width": 4})
    return path


def test_a_tree_comes_back(file):
    ckpt = ec.open(file)
    assert ckpt.metadata == {"width": 4}
    assert_alike(ec.tree_deserialise_leaves(file, _like(), everything), _tree())
    assert ec.verify(file) == [] == ec.verify(ckpt)
    assert os.listdir(file.parent) == ["ckpt.zip"]
    assert pickle.loads(pickle.dumps(ckpt)).save_id == ckpt.save_id
    saved = _tree()["big"]
    assert np.array_equal(ckpt["big"].store[5].read().result(), saved[5])


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_many_chunks_and_files(tmp_path, compression):
    path = tmp_path / "a.zip"
    tree = {"w": np.arange(2**18, dtype=np.float32).reshape(512, 512)}
    chunks = lambda *_: (100, 512)
    ec.tree_serialise_leaves(path, tree, chunks=chunks, compression=compression)
    assert np.array_equal(ec.open(path)["w"].read(), tree["w"])
    assert np.array_equal(
        ec.open(path)["w"][150:350:7, 3].read(), tree["w"][150:350:7, 3]
    )
    assert ec.verify(path) == []


def test_a_compressed_one_takes_a_few_chunks_of_memory(tmp_path):
    # Else malloc keeps twice as much of what was freed, which is not counted here.
    options = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    assert float(run_program("peak_of_a_zip", tmp_path / "a.zip", **options)) < 24


def test_is_read_in_place(file):
    with BytesRead() as read:
        ec.open(file)["big"][:4].read(verify=False)
    assert read.total < 100_000 < _tree()["big"].nbytes
    with zipfile.ZipFile(file) as archive, open(file, "rb") as f:
        assert archive.testzip() is None
        for info in archive.infolist():
            f.seek(info.header_offset + 26)
            name, extra = struct.unpack("<2H", f.read(4))
            assert (info.header_offset + 30 + name + extra) % 64 == 0
            assert info.compress_type == zipfile.ZIP_STORED


def test_unzipped_it_is_the_same_checkpoint(file, tmp_path):
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "a")
    assert ec.verify(tmp_path / "a") == []
    assert_alike(
        ec.tree_deserialise_leaves(tmp_path / "a", _like(), everything), _tree()
    )


def test_a_directory_that_was_zipped(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a" / "ckpt", {"w": np.ones(3)})
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "a")
    with pytest.raises(ValueError, match="compressed or encrypted: unzip it"):
        ec.open(tmp_path / "packed.zip")
    with zipfile.ZipFile(tmp_path / "stored.zip", "w") as archive:
        for p in (tmp_path / "a").rglob("*"):
            archive.write(p, p.relative_to(tmp_path / "a"))
    assert ec.open(tmp_path / "stored.zip")["w"].read().tolist() == [1, 1, 1]
    assert ec.verify(tmp_path / "stored.zip") == []


def test_open_files(tmp_path):
    # As in Equinox's own tests.
    tree = _tree()
    with open(tmp_path / "x.eqx", "wb") as f:
        ec.tree_serialise_leaves(f, tree, everything)
    with open(tmp_path / "x.eqx", "rb") as f:
        assert_alike(ec.tree_deserialise_leaves(f, _like(), everything), tree)
    buffer = io.BytesIO()
    ec.tree_serialise_leaves(buffer, {"w": jnp.ones(3)})
    buffer.seek(0)
    assert ec.open(buffer)["w"].read().tolist() == [1, 1, 1]
    with open(tmp_path / "old.eqx", "wb") as f:
        eqx.tree_serialise_leaves(f, [jnp.ones(2), 3])
    with open(tmp_path / "old.eqx", "rb") as f:
        assert ec.tree_deserialise_leaves(f, [jnp.zeros(2), 0])[1] == 3


def test_an_open_file_has_to_be_for_the_checkpoint_alone(tmp_path):
    path = tmp_path / "a.eqx"
    with open(path, "wb") as f:
        f.write(b'{"width": 8}\n')
        with pytest.raises(ValueError, match="at byte 13, .* `metadata=`"):
            ec.tree_serialise_leaves(f, {"w": 1})
    assert path.read_bytes() == b'{"width": 8}\n'
    with open(path, "wb") as f:
        ec.tree_serialise_leaves(f, {"a": 1})
        with pytest.raises(ValueError, match="a file of its own"):
            ec.tree_serialise_leaves(f, {"b": 1})
    for file in (path, tmp_path / "new"):
        with open(file, "ab") as f, pytest.raises(ValueError, match="for appending"):
            ec.tree_serialise_leaves(f, {"b": 1})
    assert list(ec.open(path).leaves) == ["a"]
    with open(path, "w") as f, pytest.raises(TypeError, match='open it with "wb"'):
        ec.tree_serialise_leaves(f, {"b": 1})


@pytest.mark.parametrize("before", [{"a": np.zeros(99999), "w": np.zeros(4)}, None])
def test_what_was_in_an_open_file_is_gone(tmp_path, before):
    """The index of a zip is at its end, where one of before would be found."""
    if before is None:
        old = bytes(99999)
    else:
        old = ec.to_bytes(before)
    buffer = io.BytesIO(old)
    (tmp_path / "a").write_bytes(old)
    with open(tmp_path / "a", "r+b") as f:
        for file in (f, buffer):
            ec.tree_serialise_leaves(file, {"w": np.ones(4)})
    for file in (tmp_path / "a", io.BytesIO(buffer.getvalue())):
        ckpt = ec.open(file)
        assert list(ckpt.leaves) == ["w"] and ckpt["w"].read().tolist() == [1] * 4


def test_files_that_write_a_part_of_what_they_are_given(tmp_path):
    """As the system does of more than 2 GiB at once."""

    class Short(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def write(self, data):
            data = bytes(data)[:1000]
            self.data += data
            return len(data)

    tree = {"a": np.arange(100_000), "w": jnp.ones(3)}
    file = Short()
    ec.tree_serialise_leaves(file, tree)
    assert not file.closed
    with open(tmp_path / "raw", "wb", buffering=0) as f:
        ec.tree_serialise_leaves(f, tree)
        assert not f.closed
    for got in (io.BytesIO(bytes(file.data)), tmp_path / "raw"):
        assert_alike(ec.tree_deserialise_leaves(got, tree), tree)


@pytest.mark.parametrize("where", ["{}/a.zip", "memory://zips/one.zip"])
def test_of_many_that_may_not_replace_one_saves(tmp_path, where):
    path = where.format(tmp_path)
    begin = threading.Barrier(4)

    def save(value):
        begin.wait()
        try:
            tree = {"w": np.full(1000, value)}
            ec.tree_serialise_leaves(path, tree, overwrite=False)
            return value
        except FileExistsError:
            return None

    for _ in range(5):
        with cf.ThreadPoolExecutor(4) as pool:
            saved = [x for x in pool.map(save, range(4)) if x is not None]
        assert len(saved) == 1
        assert ec.open(path)["w"].read()[0] == saved[0]
        ec.delete(path)


@pytest.mark.parametrize("old", [None, 1])
def test_nothing_tells_whether_it_was_saved(tmp_path, monkeypatch, old):
    """Where the commit fails, and a look at the path too, the error claims nothing."""
    path = tmp_path / "a.zip"
    if old is not None:
        ec.tree_serialise_leaves(path, {"w": old})

    def fail(*args, **kwargs):
        inside.replace(patch, "stamp of a file", fail)
        raise OSError(errno.EIO, "bad")

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(os, "replace", fail)
        ec.tree_serialise_leaves(path, {"w": 2})
    there = f"What is at `{path}`, if anything, is whole"
    assert caught.value.__notes__ == [f"{there}: this save, or what was there before."]


def test_modes_stay(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a.zip", {"w": 1})
    os.chmod(tmp_path / "a.zip", 0o600)
    ec.tree_serialise_leaves(tmp_path / "a.zip", {"w": 2})
    assert (tmp_path / "a.zip").stat().st_mode & 0o777 == 0o600
    for layout in ("ocdbt", "zarr", "zarr", "ocdbt"):
        ec.tree_serialise_leaves(tmp_path / "b", {"w": 1}, layout=layout)
        if layout == "ocdbt":
            os.chmod(tmp_path / "b", 0o2750)
        assert (tmp_path / "b").stat().st_mode & 0o7777 == 0o2750


def test_what_is_no_file_is_left(tmp_path):
    os.mkfifo(tmp_path / "fifo.zip")
    (tmp_path / "empty.zip").mkdir()
    for name in ("fifo.zip", "empty.zip"):
        with pytest.raises(FileExistsError, match="left as it is"):
            ec.tree_serialise_leaves(tmp_path / name, {"w": 1})
    assert stat.S_ISFIFO((tmp_path / "fifo.zip").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["empty.zip", "fifo.zip"]


def test_a_pipe(tmp_path):
    """What cannot be asked where it is, or be cut."""
    read, write = os.pipe()
    with open(write, "wb") as f:
        ec.tree_serialise_leaves(f, {"w": jnp.ones(3)})
    with open(read, "rb") as f:
        assert ec.open(io.BytesIO(f.read()))["w"].read().tolist() == [1, 1, 1]


def test_an_open_file_at_its_end():
    file = io.BytesIO()
    ec.tree_serialise_leaves(file, {"w": np.ones(3)})
    with pytest.raises(ValueError, match=r"at its end, byte \d+.*`file.seek\(0\)`"):
        ec.open(file)
    file.seek(0)
    assert ec.open(file)["w"].read().tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["{}/a.zip", "memory://zips/there.zip"])
def test_exists_and_delete(tmp_path, where):
    path = where.format(tmp_path)
    assert not ec.exists(path)
    ec.tree_serialise_leaves(path, {"w": 1})
    assert ec.exists(path)
    ec.delete(path)
    assert not ec.exists(path)
    with pytest.raises(FileNotFoundError):
        ec.delete(path)


def test_delete_deletes_no_other_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as z:
        z.writestr("a", "b")
    (tmp_path / "notes").write_text("notes")
    with open(tmp_path / "eqx.eqx", "wb") as f:
        eqx.tree_serialise_leaves(f, [1])
    for name in ("photos.zip", "notes", "eqx.eqx"):
        assert not ec.exists(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="nothing was deleted"):
            ec.delete(tmp_path / name)
        assert (tmp_path / name).exists()


def test_in_a_store():
    ec.tree_serialise_leaves("memory://zips/a.zip", _tree(), everything)
    got = ec.tree_deserialise_leaves("memory://zips/a.zip", _like(), everything)
    assert_alike(got, _tree())
    assert ec.verify("memory://zips/a.zip") == []


def test_in_the_background(tmp_path):
    ec.async_tree_serialise_leaves(tmp_path / "a.zip", {"w": jnp.ones(3)}).result()
    assert ec.open(tmp_path / "a.zip")["w"].read().tolist() == [1, 1, 1]


def test_what_is_there(tmp_path):
    path = tmp_path / "a.zip"
    ec.tree_serialise_leaves(path, {"w": 1})
    old = ec.open(path)
    assert old["w"].store.read().result() == 1
    ec.tree_serialise_leaves(path, {"w": 2})
    assert ec.open(path)["w"].read() == 2
    with pytest.raises(RuntimeError, match="was replaced"):
        old["w"].store  # noqa: B018
    for verify in (True, False):
        with pytest.raises(RuntimeError, match="was replaced"):
            old["w"].read(verify=verify)
    with pytest.raises(FileExistsError, match="overwrite=False"):
        ec.tree_serialise_leaves(path, {"w": 3}, overwrite=False)
    with pytest.raises(ValueError, match='has `layout="ocdbt"`'):
        ec.tree_serialise_leaves(path, {"w": 3}, layout="zarr")
    assert ec.open(path)["w"].read() == 2
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr("notes.txt", "mine")
    (tmp_path / "d.zip").mkdir()
    (tmp_path / "d.zip" / "file").write_text("mine")
    ec.export_safetensors(tmp_path / "s.zip", {"w": jnp.ones(2)})
    for name in ("mine.zip", "d.zip", "s.zip"):
        with pytest.raises(FileExistsError, match="left as it is"):
            ec.tree_serialise_leaves(tmp_path / name, {"w": 1})
    with zipfile.ZipFile(tmp_path / "mine.zip") as archive:
        assert archive.read("notes.txt") == b"mine"


def test_killed_at_any_time_the_old_or_the_new_is_there(tmp_path):
    path = tmp_path / "a.zip"
    program = scripts.program("saves_of_a_zip")
    ec.tree_serialise_leaves(path, {"w": np.zeros(2**16)})
    for pause in (0.0, 0.007):
        with scripts.start(program, path) as script:
            assert script.stdout.readline() == "ready\n"
            time.sleep(0.05 + pause)
        assert ec.verify(path) == []
        w = ec.open(path)["w"].read()
        assert (w == w[0]).all()
    ec.tree_serialise_leaves(path, {"w": 1})
    assert os.listdir(tmp_path) == ["a.zip"]


# ---- Files that mean harm, or are damaged.


def test_damage_is_found(file, tmp_path):
    data = bytearray(file.read_bytes())
    big = data.find(_tree()["big"].tobytes()[:4096])
    assert big > 0
    data[big + 100] ^= 1
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    (problem,) = ec.verify(path)
    assert problem.leaf == "big" and "not those that were saved" in problem.what
    with pytest.raises(RuntimeError, match="big: its bytes are not those"):
        ec.open(path)["big"].read()


def test_damage_of_files_for_other_readers_is_found(tmp_path):
    path, bad = tmp_path / "a.zip", tmp_path / "bad.zip"
    ec.tree_serialise_leaves(tmp_path / "a" / "ckpt", _tree(), orbax=True)
    with zipfile.ZipFile(path, "w") as archive:
        for p in (tmp_path / "a" / "ckpt").rglob("*"):
            archive.write(p, p.relative_to(tmp_path / "a"))
        names = {i.filename: i.header_offset for i in archive.infolist()}
    data = path.read_bytes()
    ends = ("/tree", "/manifest.ocdbt", "/_METADATA")
    others = [name for name in names if name.endswith(ends)]
    assert len(others) == 4  # Orbax has a manifest of its own.
    for name in others:
        header = names[name]
        own, extra = struct.unpack_from("<2H", data, header + 26)
        damaged = bytearray(data)
        damaged[header + 30 + own + extra + 5] ^= 1
        bad.write_bytes(damaged)
        (problem,) = ec.verify(bad)
        inside = name.removeprefix("ckpt/")
        assert str(problem) == f"`{inside}`: its bytes are not those that were saved"
        with zipfile.ZipFile(path) as whole, zipfile.ZipFile(bad, "w") as less:
            for other in names.keys() - {name}:
                less.writestr(other, whole.read(other))
        assert list(map(str, ec.verify(bad))) == [f"`{inside}`: it is missing"]


def test_errors_of_the_system_name_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.zip"
    ec.tree_serialise_leaves(path, {"x": np.ones(3)})

    def fails(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", fails)
    for act in (ec.delete, ec.exists, ec.open, ec.verify):
        with pytest.raises(OSError, match=f"Stale file handle.*{path}"):
            act(path)


def test_every_cut_is_refused(file, tmp_path):
    data = file.read_bytes()
    path = tmp_path / "a.zip"
    for count in (0, 1, 10, 30, 100, len(data) // 2, len(data) - 23, len(data) - 1):
        path.write_bytes(data[:count])
        with pytest.raises((ValueError, FileNotFoundError)):
            ec.open(path)


def _forged(file, path, alter):
    """The same zip, with a list of files that says something else."""
    data = file.read_bytes()
    count, size, start = struct.unpack("<H2I", data[-12:-2])
    rows = bytearray(data[start : start + size])
    alter(rows)
    path.write_bytes(data[:start] + bytes(rows) + data[start + size :])


def _entries(rows):
    at = 0
    while at < len(rows):
        name, extra, comment = struct.unpack_from("<3H", rows, at + 28)
        yield at, bytes(rows[at + 46 : at + 46 + name]).decode()
        at += 46 + name + extra + comment


def _set(field, value, ends):
    offset, format = {
        "flags": (8, "<H"),
        "method": (10, "<H"),
        "packed": (20, "<I"),
        "full": (24, "<I"),
        "at": (42, "<I"),
    }[field]

    def alter(rows):
        for at, name in _entries(rows):
            if name.endswith(ends):
                struct.pack_into(format, rows, at + offset, value)

    return alter


@pytest.mark.parametrize(
    "alter",
    [
        _set("method", 8, "/0"),
        _set("flags", 1, "/0"),
        _set("full", 2**31, "/0"),
        _set("at", 2**31, "/0"),
        _set("at", 0, "/digests"),
        _set("at", 5, "eqx_ckpt.json"),
        _set("full", 0xFFFFFFFF, "/0"),
        lambda rows: (_set("full", 5, "/0")(rows), _set("packed", 5, "/0")(rows)),
        lambda rows: rows.__setitem__(slice(0, 4), b"PK\1\3"),
        lambda rows: rows.__setitem__(slice(28, 30), b"\xff\xff"),
    ],
)
def test_lists_of_files_that_lie_are_refused(file, tmp_path, alter):
    _forged(file, tmp_path / "a.zip", alter)
    with pytest.raises((ValueError, RuntimeError)):
        ec.open(tmp_path / "a.zip")


def test_other_zips(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("data.txt", "x" * 100)
    with pytest.raises(ValueError, match="no `eqx_ckpt.json`"):
        ec.open(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a/eqx_ckpt.json", json.dumps({}))
        archive.writestr("b/eqx_ckpt.json", json.dumps({}))
    with pytest.raises(ValueError, match="with 2 `eqx_ckpt.json`"):
        ec.open(tmp_path / "b.zip")


def test_a_zip_that_is_deleted_and_saved_again_is_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "a.zip"
    ec.tree_serialise_leaves(path, {"x": np.ones(3)})
    saved, looks, changes = path.read_bytes(), itertools.count(1), {}
    look = lambda *_: changes.pop(next(looks), lambda: None)()
    inside.watch(monkeypatch, "look what is there", look)
    for gone, again in itertools.combinations(range(1, 8), 2):
        path.write_bytes(saved)
        looks = itertools.count(1)
        changes.update({gone: path.unlink, again: lambda: path.write_bytes(saved)})
        try:
            assert list(ec.open(path)) == ["x"]
        except FileNotFoundError as e:
            assert str(e) == f"There is no checkpoint at `{path}`.", (gone, again)
        changes.clear()


def test_a_directory_that_is_saved_as_it_is_opened_is_no_other_file(
    tmp_path, monkeypatch
):
    tree, looks, changes = {"x": np.ones(3)}, itertools.count(1), {}
    look = lambda *_: changes.pop(next(looks), lambda: None)()
    inside.watch(monkeypatch, "look what is there", look)
    found = set()
    for number in range(1, 5):
        path = tmp_path / str(number)
        looks = itertools.count(1)
        changes[number] = lambda: ec.tree_serialise_leaves(path, tree)
        try:
            found.add(*ec.open(path))
        except FileNotFoundError as e:
            assert str(e).startswith(f"There is no checkpoint at `{path}`"), number
        changes.clear()
    assert found == {"x"}
