"""Calls beside a writer that replaces the checkpoint as fast as it can: each gives one
answer, of one save."""

import collections
import contextlib
import os
import sys
import time

import numpy as np
import pytest
from support import inside, scripts
from support.helpers import until

import eqx_ckpt as ec


ReplacedError = inside.replaced_error()


def _tree(step):
    """Leaves of a page, of more than a run, and of several chunks: all of one value."""
    return {
        "small": [np.full(9 + step % 5, step) for _ in range(4)],
        "large": np.full((3, 30_000), step),
        "step": step,
    }


def _like():
    return {"large": np.zeros((3, 30_000), int), "step": 0}


def _parts(tree):
    return tree["large"], tree["step"]


def _save(path, step):
    layout = "zarr" if "zarr" in os.fspath(path) else "ocdbt"
    ec.tree_serialise_leaves(
        path,
        _tree(step),
        metadata=step,
        layout=layout,
        durable=False,
        chunks=250_000,
        compression="zstd" if "packed" in os.fspath(path) else None,
    )


@contextlib.contextmanager
def _writer(path):
    """A process that saves to a path for as long as the block runs."""
    _save(path, 0)
    with scripts.server("save.test_races", "write", path, XLA_FLAGS="") as writer:
        assert writer.stdout.readline() == "ready\n"
        yield
        assert writer.is_running(), "the writer has failed"


def _whole(tree):
    """The one step that a tree is of."""
    assert (tree["large"] == tree["step"]).all()
    return tree["step"]


def _load(path):
    _whole(ec.tree_deserialise_leaves(path, _like(), where=_parts))


def _load_unverified(path):
    _whole(ec.tree_deserialise_leaves(path, _like(), verify=False, where=_parts))


def _opened(path):
    ckpt = ec.open(path)
    assert list(ckpt.leaves)[0] == "large" and len(ckpt) == 6
    try:
        assert _whole(ec.materialise(ckpt.tree)) == ckpt.metadata
        assert ec.verify(ckpt) == []
    except ReplacedError:
        return "pinned"


def _exists(path):
    assert ec.exists(path)


def _verify(path):
    assert ec.verify(path) == []


def _graft(path):
    pairs = [(lambda m: m["large"], "large"), (lambda m: m["step"], "step")]
    drop = lambda c: c.small
    _whole(ec.graft(_like(), path, pairs, drop=drop)[0])


def _convert(path):
    target = f"{path}.copy.zip"
    ec.convert(path, target, durable=False)
    _load(target)


def _init(path):
    _whole(ec.load_or_init(_like, path, where=_parts))


def _other(path):
    """Another writer, which may lose, and is then told so."""
    try:
        _save(path, 10**6)
    except RuntimeError as e:
        assert "by another" in str(e)
        return "lost"


_CALLS = [_load, _load_unverified, _opened, _exists, _verify]
_RARE = [_graft, _convert, _init, _other]


_long = pytest.mark.long
_names = ["ocdbt", "zarr", "a.zip", "packed", "packed.zip"]


@pytest.mark.parametrize(
    "name, count",
    [
        ("ocdbt", 1),
        *(pytest.param(name, 400, marks=_long) for name in _names),
    ],
)
def test_beside_a_writer(tmp_path, name, count):
    path = tmp_path / name
    # A plain process: checks of all types, as in the tests, make calls slow, and then
    # they begin again more often than they would.
    reader = ["save.test_races", "read", path, count]
    with _writer(path):
        done = scripts.run_module(*reader, XLA_FLAGS="")
    assert done.returncode == 0, done.stdout + done.stderr
    print(name, done.stdout)
    # The writer was killed, maybe between its commit and the files for other readers.
    assert {problem.file for problem in ec.verify(path)} <= {"manifest.ocdbt"}
    _save(path, 1)
    assert ec.verify(path) == []


def _descriptors(path, most):
    """How many of this process lead to a file, once they are at most so many: threads
    of TensorStore let go of it a moment after they have read."""
    end = time.monotonic() + 60
    while True:
        found = 0
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found += os.readlink(f"/proc/self/fd/{number}") == str(path)
        if found <= most or time.monotonic() > end:
            return found
        time.sleep(0.01)


def test_an_open_file_is_one_descriptor(tmp_path):
    path = tmp_path / "a.zip"
    _save(path, 1)
    for _ in range(3):
        ckpts = [ec.open(path) for _ in range(20)]
        assert _descriptors(path, 20) <= 20
        lazy, store = ckpts[0]["large"], ckpts[0]["large"].store
        del ckpts
        assert _descriptors(path, 1) == 1
        assert (lazy.read() == 1).all()
        del lazy
        assert _descriptors(path, 0) == 0
        assert (store[0].read().result() == 1).all()


def test_a_file_that_is_written_to_in_place(tmp_path):
    path = tmp_path / "a.zip"
    _save(path, 1)
    ckpt = ec.open(path)
    with open(path, "r+b") as f:
        ec.tree_serialise_leaves(f, _tree(2))
    for verify in (True, False):
        with pytest.raises(ReplacedError, match="was replaced"):
            ckpt["large"].read(verify=verify)


def test_what_is_replaced_each_time(tmp_path, monkeypatch):
    """A call begins again a few times, and then says so."""
    inside.limit(monkeypatch, reopen_seconds=0)
    calls = []

    def load(path):
        calls.append(path)
        raise ReplacedError("it was replaced")

    with pytest.raises(ReplacedError, match="was replaced 3 times while"):
        inside.begin_anew(load)("a")
    assert calls == ["a"] * 3
    _save(tmp_path / "a", 1)
    with pytest.raises(ReplacedError, match="it was replaced"):
        inside.begin_anew(load)(ec.open(tmp_path / "a"))
    assert len(calls) == 4


def _read(path, count):
    """All calls, again and again."""
    counts: collections.Counter = collections.Counter()
    faults: collections.Counter = collections.Counter()
    _load(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(count):
        for call in [*_CALLS, *(_RARE if number % 8 == 0 else [])]:
            counts[call.__name__] += 1
            try:
                counts[call(path)] += 1
            except Exception as e:
                faults[f"{call.__name__}: {type(e).__name__} {str(e)[:150]}"] += 1
    print(dict(counts))
    assert not faults, faults.most_common(10)
    # Threads of TensorStore close a file a moment after they have read it.
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 8)


if __name__ == "__main__":
    if sys.argv[1] == "read":
        _read(sys.argv[2], int(sys.argv[3]))
    else:
        print("ready", flush=True)
        for step in range(1, 10**9):
            with contextlib.suppress(RuntimeError):
                _save(sys.argv[2], step)
