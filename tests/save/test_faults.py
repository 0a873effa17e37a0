"""What can go wrong around a save: no space, no rights, no descriptors, others at work.

Whatever happens the path holds all of the old checkpoint or all of the new one, and a
save that returns has saved. See `support.faulty`.
"""

import contextlib
import errno
import functools as ft
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from support import inside, scripts
from support.faulty import tree, value_at
from support.helpers import files_of
from support.stores import ids_of_saves

import eqx_ckpt as ec


def _start(*arguments):
    return scripts.start("from support import faulty; faulty.main()", *arguments)


def _finish(script):
    with script:
        return _counted(script.communicate())


def _counted(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _count(*arguments):
    return _finish(_start(*arguments))


def test_a_full_disk(tmp_path):
    mounts = ["unshare", "--mount", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*mounts, "true"]).returncode:
        pytest.skip("a file system cannot be mounted here")
    command = [*mounts, sys.executable, "-m", "support.faulty", "full_disk", tmp_path]
    count = _counted(subprocess.run(command, capture_output=True, text=True))
    for layout in ("ocdbt", "zarr"):
        assert count[f"{layout} OSError"] > 5 and count[f"{layout} NoneType"] > 1


def test_a_limit_on_the_size_of_files(tmp_path):
    count = _count("file_size", tmp_path)
    for layout in ("ocdbt", "zarr"):
        assert count[f"{layout} OSError"] > 5 and count[f"{layout} NoneType"]


def test_too_few_descriptors(tmp_path):
    count = _count("descriptors", tmp_path)
    for layout in ("ocdbt", "zarr"):
        assert count[f"{layout} OSError"] > 1 and count[f"{layout} NoneType"] > 1


def test_a_read_only_directory():
    # Below a directory that others than its owner may enter.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        count = _count("read_only", directory)
        for place, _, _ in os.walk(directory):
            os.chmod(place, 0o755)
    assert count == {"ocdbt": 3, "zarr": 3}


@pytest.mark.parametrize(
    "layouts",
    [
        "ocdbt,zarr",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("ocdbt", "zarr")),
    ],
)
def test_two_writers_and_a_reader(tmp_path, layouts):
    """Of two that write at once, one gets an error; and a reader gets one of the trees,
    or a clear error."""
    path = tmp_path / "7"
    ec.tree_serialise_leaves(path, tree(0))
    assert value_at(path) == 0
    writers = [_start("write_often", path, layouts, first) for first in (1000, 2000)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        print("go", file=writer.stdin, flush=True)
    read, errors = [], []
    start = time.monotonic()
    least = 1 if "," in layouts else 5
    while (passed := time.monotonic() - start) < least or not read:
        assert passed < 60
        try:
            read.append(value_at(path, verify=len(read) % 2 == 0))
        except RuntimeError as e:
            assert "replaced or deleted" in str(e)
            errors.append(e)
    results = [_finish(writer) for writer in writers]
    assert value_at(path) in [result["saved"][-1] for result in results]
    known = {0}.union(*(result["saved"] for result in results))
    assert set(read) <= known and read
    for result in results:
        assert result["saved"]
        for error in result["errors"]:
            assert "replaced by another writer" in error, error
    ec.tree_serialise_leaves(path, tree(3))
    assert os.listdir(tmp_path) == ["7"] and len(os.listdir(path / "d")) == 1


class _Failing:
    """A key-value store of which the n-th call fails, before it is made or after it."""

    def __init__(self, kv, clock):
        self._kv, self._clock = kv, clock

    def __getattr__(self, name):
        call = getattr(self._kv, name)
        if name not in ("read", "write", "list", "delete_range"):
            return call

        def failing(*args, **kwargs):
            self._clock["left"] -= 1
            if self._clock["left"] == 0 and self._clock["before"]:
                raise ValueError("UNAVAILABLE: the store is away")
            out = call(*args, **kwargs)
            if self._clock["left"] == 0:
                out.result()
                raise ValueError("UNAVAILABLE: the answer of the store is lost")
            return out

        return failing


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", ["first", "overwrite", "zarr"])
def test_every_call_of_a_store_fails(monkeypatch, case, before):
    """A store that cannot rename, and of which one call after the other fails."""
    clock = {"left": 0, "before": before}
    layout = "zarr" if case == "zarr" else "ocdbt"
    outcomes = []
    for number in range(1, 100):
        path = f"memory://{case}{before}{number}/7"
        old = None
        if case == "overwrite":
            old = 1
            ec.tree_serialise_leaves(path, tree(1))
        clock["left"] = number
        with monkeypatch.context() as patch:
            inside.wrap(
                patch,
                "keys of a store in memory",
                lambda real: lambda *args: _Failing(real(*args), clock),
            )
            try:
                ec.tree_serialise_leaves(path, tree(2), layout=layout)
                error = None
            except ValueError as e:
                error = e
        try:
            there = value_at(path)
        except FileNotFoundError:
            there = None
        assert there in (old, 2) and (error or there == 2), number
        outcomes.append((there, error is None))
        if error is not None and there == 2:
            # The answer to the commit was lost, or what failed came after it.
            assert re.search("is saved|is whole", error.__notes__[0])
        if layout == "ocdbt":
            ec.tree_serialise_leaves(path, tree(3))
            assert value_at(path) == 3
            assert len(ids_of_saves(path)) == 1
        elif there is None:
            # What failed while it was being undone blocks the path.
            with contextlib.suppress(FileExistsError):
                ec.tree_serialise_leaves(path, tree(3), layout=layout)
                assert value_at(path) == 3
        if clock["left"] > 0:
            break
    assert number > 7
    assert {(old, False), (2, True)} <= set(outcomes)


_COMMITS = {
    "ocdbt": ("replace",),
    "zarr": ("replace", "exchange"),
    "zip": ("replace", "link"),
}


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("old", [None, 1])
@pytest.mark.parametrize("layout", _COMMITS)
def test_an_error_of_the_commit(tmp_path, monkeypatch, layout, old, number, is_done):
    """The system reports an error of the one call that commits, which it has made or
    not: the error says which, by what is at the path."""
    steps = tmp_path / "steps"
    path = steps / ("7.zip" if layout == "zip" else "7")
    how = {} if layout == "zip" else {"layout": layout}
    if old is not None:
        ec.tree_serialise_leaves(path, tree(old), **how)
    before = files_of(steps)
    committed = []

    def failing(name, call):
        def wrapped(source, target, **kwargs):
            if os.fspath(target) not in (str(path), str(path / "eqx_ckpt.json")):
                return call(source, target, **kwargs)
            committed.append(name)
            if is_done:
                call(source, target, **kwargs)
            raise OSError(number, os.strerror(number))

        return wrapped

    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, failing(name, getattr(os, name)))
    inside.wrap(monkeypatch, "exchange", ft.partial(failing, "exchange"))
    with pytest.raises(OSError) as caught:
        ec.tree_serialise_leaves(path, tree(2), **how)
    monkeypatch.undo()
    error = caught.value
    assert len(committed) == 1 and committed[0] in _COMMITS[layout]
    assert error.errno == number and f"`{path}`" in str(error)
    assert ("Make room" if number == errno.ENOSPC else "dmesg") in str(error)
    if is_done:
        assert value_at(path) == 2
        assert "is saved and whole" in error.__notes__[0]
    else:
        assert files_of(steps) == before and steps.exists() == (old is not None)
        assert "Nothing was saved, and the path is as it was" in str(error)
    ec.tree_serialise_leaves(path, tree(3), **how)
    assert value_at(path) == 3 and os.listdir(steps) == [path.name]


@pytest.mark.parametrize("bad", [OSError(errno.EIO, "odd"), ArithmeticError("odd")])
@pytest.mark.parametrize("old", [None, 1])
@pytest.mark.parametrize("layout", _COMMITS)
def test_an_error_of_what_follows_the_commit(tmp_path, monkeypatch, layout, old, bad):
    path = tmp_path / ("7.zip" if layout == "zip" else "7")
    how = {} if layout == "zip" else {"layout": layout}
    if old is not None:
        ec.tree_serialise_leaves(path, tree(old), **how)
    fsync = os.fsync

    def failing(fd):
        with contextlib.suppress(FileNotFoundError):
            if value_at(path) == 2:
                raise type(bad)(*bad.args)
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(type(bad), match="odd") as caught:
            ec.tree_serialise_leaves(path, tree(2), **how)
    error = caught.value
    if isinstance(error, OSError):
        assert f"`{path}`" in str(error) and "dmesg" in str(error)
    # Whoever follows the causes comes to an end.
    assert error.__cause__ is None and "is saved and whole" in error.__notes__[0]
    assert value_at(path) == 2


def test_a_lock_that_is_not_let_go_of(tmp_path, monkeypatch, caplog):
    """A save that waits for the lock of a process says whose, and does not for ever."""
    path = tmp_path / "7"
    ec.tree_serialise_leaves(path, tree(1))
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX)"
    code += "; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        inside.limit(monkeypatch, lock_log_seconds=0.01)
        inside.limit(monkeypatch, lock_seconds=2)
        who = rf"process {holder.pid} \(.*, T \(stopped\)\) holds the lock of `{path}`"
        with caplog.at_level("WARNING", "eqx_ckpt"):
            with pytest.raises(TimeoutError, match=f"{who}, which.*Nothing was saved"):
                ec.tree_serialise_leaves(path, tree(2))
        assert re.search(f"{who}: waiting for it since", caplog.messages[0])
        holder.kill()
    assert value_at(path) == 1
    ec.tree_serialise_leaves(path, tree(2))
    assert value_at(path) == 2 and len(os.listdir(path / "d")) == 1


_METRICS = lambda manager: manager.add_metrics(1, {"loss": 1.0})


@pytest.mark.parametrize(
    "name, act",
    [
        ("scandir", lambda manager: manager.steps()),
        ("open", _METRICS),
        ("fsync", _METRICS),
        ("unlink", lambda manager: manager.unpin(1)),
    ],
)
def test_errors_of_the_system_name_a_path(tmp_path, monkeypatch, name, act):
    """The system names what it was given: a descriptor, a name in one, or nothing."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1})
        manager.pin(1)
    call = getattr(os, name)

    def fails(at, flags=os.O_EXCL, *rest, **options):
        if name == "open" and not flags & os.O_EXCL:
            return call(at, flags, *rest, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO), *([at] * (name != "fsync")))

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match=re.escape(f"Input/output error: '{tmp_path}")):
        act(manager)
