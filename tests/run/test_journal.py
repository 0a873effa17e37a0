"""The journal of a run is a cache: whatever becomes of it, answers are those of a look
at each step."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import tempfile
import time
import zlib

import numpy as np
import pytest
from attacks import seal
from hypothesis import given, settings, strategies as st
from support import inside
from support.command import main
from support.stores import StoredFiles

import eqx_ckpt as ec


KEY = "eqx_ckpt.journal"
BEST = dict(best=("loss", "min"))


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Each save writes the journal."""
    inside.limit(monkeypatch, unlisted_steps=1, unlisted_step_share=10**9)
    inside.limit(monkeypatch, stamp_seconds=0)


def save(root, step, loss):
    """Saves a step as a process without a manager, or an older release, does; a while
    ago."""
    at = root / str(step) / "default"
    metadata = {"step": step, "metrics": {"loss": loss}}
    ec.tree_serialise_leaves(at, {"x": np.zeros(1)}, metadata=metadata, durable=False)
    back = time.time_ns() - 10**11 + random.randrange(10**9)
    os.utime(at / "eqx_ckpt.json", ns=(back, back))


def write_journal(root):
    inside.write_journal(root, 99)


def steps_in_journal(root):
    """The steps that the journal says something of."""
    data = StoredFiles(root).get(KEY)
    return (
        None
        if data is None
        else [row[0] for row in json.loads(zlib.decompress(data))["rows"]]
    )


def scan(root):
    """What there is, by a look at each step and at nothing else."""
    found = {}
    for name in filter(str.isdigit, os.listdir(root)):
        at = root / name / "default"
        if (at / "eqx_ckpt.json").is_file():
            found[int(name)] = ec.open(at).metadata["metrics"]["loss"]
    ranked = [(-loss, step) for step, loss in found.items()]
    return sorted(found), max(found, default=None), max(ranked)[1] if ranked else None


def answers(root):
    manager = ec.CheckpointManager(root, **BEST)
    return manager.steps(), manager.latest(), manager.best()


def resealed(rows):
    """A journal with other rows, which is undamaged."""
    head = b'{"format":"eqx_ckpt journal","version":1,"rows":'
    return zlib.compress(seal(head + json.dumps(rows).encode()))


def damage(root, how, rng, old):
    """Makes another journal of what is there."""
    path = root / KEY
    if how == "put back":
        data = old
    elif not path.exists():
        return
    else:
        data = path.read_bytes()
    rows = []
    with contextlib.suppress(ValueError, zlib.error):  # It is damaged as it is.
        rows = json.loads(zlib.decompress(data))["rows"]
    if how == "cut":
        data = data[: rng.randrange(len(data) + 1)]
    elif how == "flip" and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    elif how == "twice":
        data += data
    elif how == "shuffled":
        rng.shuffle(rows)
        data = resealed(rows + rows[:2])
    elif how == "of other steps":
        numbers = [row[0] for row in rows]
        rng.shuffle(numbers)
        data = resealed([[step, *row[1:]] for step, row in zip(numbers, rows)])
    elif how == "malformed":
        for row in rows:
            row[rng.randrange(len(row))] = rng.choice([None, -1, [], "x", True])
        data = resealed(rows)
    path.unlink(missing_ok=True)
    if how == "directory":
        path.mkdir()
        (path / "file").write_text("not ours")
    elif how != "deleted":
        path.write_bytes(data)


HOWS = "deleted cut flip twice shuffled malformed directory".split() + [
    "of other steps",
    "put back",
]
STEPS = st.integers(0, 12)
ACTS = st.one_of(
    st.tuples(st.just("save"), STEPS, st.integers(0, 5)),
    st.tuples(st.just("delete"), STEPS),
    st.tuples(st.just("half"), STEPS),
    st.tuples(st.just("journal")),
    st.tuples(st.just("damage"), st.sampled_from(HOWS), st.integers(0, 2**32)),
)


def check_any_history(history):
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for step in (3, 9, 10):
            save(root, step, step % 4)
        old = b""
        write_journal(root)
        for act, *of in history:
            path = root / KEY
            if act == "save":
                save(root, *of)
            elif act == "delete":
                shutil.rmtree(root / str(*of), ignore_errors=True)
            elif act == "half":
                (root / str(*of) / "default" / "eqx_ckpt.json").unlink(missing_ok=True)
            elif act == "journal":
                if path.is_file():
                    old = path.read_bytes()
                write_journal(root)
            elif not path.is_dir():
                damage(root, of[0], random.Random(of[1]), old)
            assert answers(root) == scan(root)
        if (root / KEY).is_dir():
            assert os.listdir(root / KEY) == ["file"]


HISTORIES = st.lists(ACTS, min_size=1, max_size=8)


@given(HISTORIES)
@settings(max_examples=8, deadline=None)
def test_answers_are_those_of_a_scan_whatever_becomes_of_the_journal(history):
    check_any_history(history)


@pytest.mark.long
@given(HISTORIES)
@settings(max_examples=400, deadline=None)
def test_any_history(history):
    check_any_history(history)


@pytest.fixture
def reads(monkeypatch):
    """The indices that are read."""
    found = []
    see = lambda *args: found.append(args)
    inside.watch(monkeypatch, "read the head of an index", see)
    return found


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_only_what_the_journal_does_not_say_is_read(kind, tmp_path, reads, capsys):
    def rows():
        assert main(["steps", str(root), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["steps"]

    root = tmp_path if kind == "local" else f"memory://{tmp_path}"
    with ec.CheckpointManager(root, **BEST) as manager:
        for step in range(4):
            manager.save(step, {"x": np.zeros(1)}, {"loss": step})
    if kind == "local":
        for index in root.glob("*/default/eqx_ckpt.json"):
            os.utime(index, (1e9, 1e9))
        (root / KEY).unlink(missing_ok=True)
    write_journal(root)
    reads.clear()
    assert ec.CheckpointManager(root, **BEST).best() == 0 and reads == []
    losses = [x["metrics"]["loss"] for x in rows()]
    assert losses == [0, 1, 2, 3] and reads == []
    assert all(x["leaves"] == 1 and x["nbytes"] == 8 for x in rows())
    ec.tree_serialise_leaves(ec.CheckpointManager(root).path(1), {"x": np.zeros(3)})
    ec.delete(ec.CheckpointManager(root).path(2))
    whole = [x for x in rows() if x["state"] == "complete"]
    assert [x["step"] for x in whole] == [0, 1, 3] and len(reads) == 1
    assert [x["nbytes"] for x in whole] == [8, 24, 8]


def test_an_index_that_is_just_written_is_not_in_the_journal(tmp_path, monkeypatch):
    # Another one, written at the same tick of a coarse clock, might have its stamp.
    inside.limit(monkeypatch, stamp_seconds=50)
    ec.tree_serialise_leaves(tmp_path / "1" / "default", {"x": np.zeros(1)})
    inside.write_journal(tmp_path, 1)
    assert not steps_in_journal(tmp_path)
    save(tmp_path, 2, 0)
    inside.write_journal(tmp_path, 1)
    assert steps_in_journal(tmp_path) == [2]


@given(st.lists(ACTS.filter(lambda act: act[0] in ("save", "delete", "half"))))
@settings(max_examples=6, deadline=None)
def test_what_a_manager_deletes_is_right_whatever_others_do(history):
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        options = dict(keep=2, best=("loss", "min"), durable=True, reuse=False)
        manager = ec.CheckpointManager(root, **options)
        for new, (act, *of) in enumerate(history[:5], start=20):
            if act == "save":
                save(root, *of)
            elif act == "delete":
                shutil.rmtree(root / str(*of), ignore_errors=True)
            else:
                (root / str(*of) / "default" / "eqx_ckpt.json").unlink(missing_ok=True)
            before, _, _ = scan(root)
            manager.save(new, {"x": np.zeros(1)}, {"loss": new % 7})
            manager.wait()
            after, _, best = scan(root)
            assert {*before, new}.issuperset(after)
            assert set(after) == {*sorted({*before, new})[-2:], best}
