"""Near steps: on each node's own disk, with copies on those of others."""

import collections
import errno
import json
import re
import shutil
import signal
import threading
import warnings
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from support import inside, near, near_kills, near_worlds, refusing, scripts
from support.helpers import tree_at
from support.processes import good, run_team_program

import eqx_ckpt as ec
from eqx_ckpt._kernel._run import _attempts
from eqx_ckpt._kernel._storage import _root
from eqx_ckpt._near import _disk, _exchange
from eqx_ckpt._near._exchange import Move


def begun(team):
    """The step and the own state that each process began from."""
    for done, out in zip(team, near.lines(team)):
        assert done.status == 0 and out, f"process {done.rank}:\n{done.err}"
    return [tuple(map(int, out[0].split()[1:])) for out in near.lines(team)]


def results(team):
    return [json.loads(out[1]) for out in near.lines(team)]


def parts(path):
    """The files of parts on each disk, and of which processes they are."""
    return {
        disk.name: sorted(file.stem for file in disk.glob("*/*/*/*.zip"))
        for disk in sorted(path.glob("disk*"))
    }


def test_a_run_that_loses_a_disk_goes_on(tmp_path):
    killed = near.run(tmp_path, 2, until=5, kill=True)
    assert all(done.status for done in killed)
    assert not (tmp_path / "run/2").exists()
    assert parts(tmp_path) == {"disk0": ["0", "1"], "disk1": ["0", "1"]}
    shutil.rmtree(tmp_path / "disk1")
    # The other disk has a copy of what was on it.
    again = near.run(tmp_path, 2, until=7)
    assert begun(again) == [(4, 400), (4, 401)]
    assert parts(tmp_path) == {"disk0": ["0", "1"], "disk1": ["0", "1"]}
    assert results(again) == near.never_stopped(2, until=7)


def test_one_process_has_a_near_disk_too(tmp_path):
    def manager(**how):
        how = {"every": 10, "near_every": 2} | how
        return ec.CheckpointManager(tmp_path / "run", near=tmp_path / "disk", **how)

    with manager() as first:
        for step in range(1, 8):
            assert first.save(step, tree_at(step), own={"at": step}) is False
        assert first.latest() == 6 and first.steps() == []
        first._saves._last.kept = None  # As if it was killed.
    tree, own, step = manager().restore(tree_at(0), own={"at": 0})
    assert step == tree["step"] == own["at"] == 6
    assert manager().restore(tree_at(0), own="all")[1:] == ([{"at": 6}], 6)
    # A tree that does not fit is an error.
    with pytest.raises(RuntimeError, match="does not fit `like`"):
        manager().restore({"other": np.zeros(3)})
    with pytest.raises(ValueError, match="saved without|leave `own` out"):
        second = manager()
        second.restore(tree_at(0))
        second.save(8, tree_at(8))
        second.restore(tree_at(0), own={"at": 0})
    # What it began from counts, and what came after; nothing else.
    (file,) = (tmp_path / "disk").glob("*/*/*/0.zip")
    file.write_bytes(file.read_bytes()[:-100])
    with manager() as last:
        with pytest.raises(FileNotFoundError, match="There is no step to restore"):
            last.restore(tree_at(0))
        with pytest.warns(UserWarning, match="is of no use: .*0.zip` cannot be"):
            last.save(20, tree_at(20))
        last.save(22, tree_at(22))
    assert manager().restore(tree_at(0))[1] == 22


def test_damage_moves_to_the_step_before(tmp_path):
    how = {"every": 5, "near": tmp_path / "disk", "near_every": 2}
    with ec.CheckpointManager(tmp_path / "run", **how) as manager:
        for step in range(1, 7):
            manager.save(step, tree_at(step))
        manager._saves._last.kept = None
    (file,) = (tmp_path / "disk").glob("*/*/*/0.zip")
    data = bytearray(file.read_bytes())
    at = data.index(np.full(100, 6.0, np.float32).tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    manager = ec.CheckpointManager(tmp_path / "run", **how)
    match = re.compile("Restored step 5 .*near step 6: part 0 on the disk", re.DOTALL)
    with pytest.warns(UserWarning, match=match):
        tree, step = manager.restore(tree_at(0))
    assert step == tree["step"] == 5


def test_another_count_of_processes_goes_on(tmp_path):
    """Of two processes whose disks are lost but for one, one goes on, and then three,
    of which two have new disks."""
    near.run(tmp_path, 2, until=5, kill=True)
    shutil.rmtree(tmp_path / "disk1")
    how = {"near": tmp_path / "disk0", "near_every": 2, "every": 100}
    w, m = near.trained(near.fresh(), range(1, 5), 0)
    like: dict[str, Any] = {"w": w.astype(np.float32), "m": m.astype(np.float32)}
    like = {name: np.zeros_like(x) for name, x in like.items()} | {"n": np.int32(0)}
    one = ec.CheckpointManager(tmp_path / "run", **how)
    assert one.latest() == 4
    with pytest.raises(ValueError, match="own states of 2 processes, and .* has 1"):
        one.restore(like, own={"cursor": 0, "noise": 0})
    tree, own, step = one.restore(like, own="all")
    assert step == tree["n"] == 4
    assert np.array_equal(tree["w"], w) and np.array_equal(tree["m"], m)
    assert own == [{"cursor": 400 + i, "noise": 0} for i in range(2)]
    # What does not fit is an error of the caller, and no reason for an older step.
    with pytest.raises(RuntimeError, match="w  saved f32"):
        one.restore(like | {"w": np.zeros((24, 9), np.float32)})
    again = near.run(tmp_path, 3, until=7, all_own=True, kill=True)
    assert [out[0] for out in near.lines(again)] == ["from 4 2"] * 3
    last = near.run(tmp_path, 2, until=9, all_own=True)
    assert begun(last) == [(6, 3)] * 2
    assert results(last) == near.never_stopped(2, until=9)


def test_a_near_step_without_some_parts_is_told_and_deletes_nothing(tmp_path):
    near.run(tmp_path, 2, until=5, kill=True)
    for file in tmp_path.glob("disk0/*/*/*/1.zip"):
        file.unlink()
    how = {"near": tmp_path / "disk0", "near_every": 1, "every": 100}
    why = "near step 4: 2 processes have saved it; near disks have only the parts of 0"
    one = ec.CheckpointManager(tmp_path / "run", **how)
    with pytest.warns(UserWarning, match=f"(?s)The latest step of .* is None.*{why}"):
        assert one.latest() is None
    with pytest.raises(FileNotFoundError, match=why):
        one.restore(tree_at(0))
    with pytest.warns(UserWarning, match=f"(?s)Step 1 is the first .*{why}"):
        one.save(1, tree_at(1))
    one.wait()
    for step in (2, 3, 4):
        here = parts(tmp_path)["disk0"]
        one.save(step, tree_at(step))
        one.wait()
        assert here == ["0", "0"]
    # One that is whole and as new.
    assert parts(tmp_path)["disk0"] == ["0"] and one.latest() == 4


def test_near_steps_of_an_older_attempt_are_told(tmp_path):
    how = {"near": tmp_path / "disk", "near_every": 1, "every": 100}
    first = ec.CheckpointManager(tmp_path / "run", **how)
    for step in (1, 2, 3, 4):
        first.save(step, tree_at(step))
    first.wait()
    one = ec.CheckpointManager(tmp_path / "run", **how)
    with pytest.warns(UserWarning, match="near step 4: it can be restored"):
        one.save(1, tree_at(1))
    one.wait()
    other = ec.CheckpointManager(tmp_path / "run", **how)
    void = "near step 4: it is of attempt 1 .* attempt 2 did not go on"
    with pytest.warns(UserWarning, match=void):
        assert other.latest() == 1
    assert parts(tmp_path)["disk"] == ["0", "0"]


def test_going_back_is_one_attempt_at_the_root_and_near(tmp_path):
    def manager():
        how = {"near": tmp_path / "disk", "near_every": 2, "every": 10}
        return ec.CheckpointManager(tmp_path / "run", **how)

    def go_on(own, steps):
        for step in steps:
            own.save(step, tree_at(step), force=step % 10 == 0)
        own.wait()

    go_on(manager(), range(1, 36))
    own = manager()
    own.restore(tree_at(0), step=10)
    with pytest.warns(UserWarning, match="Step 12 begins .* step 10. .*from 20 to 30"):
        go_on(own, range(11, 16))
    # It has near steps only, and they are the newest.
    with pytest.warns(
        UserWarning, match="is 14, as newer .*\n  near step 34: it is of"
    ):
        assert manager().latest() == 14
    own = manager()
    with pytest.warns(UserWarning, match="from 20 to 30, are of an earlier attempt"):
        assert own.restore(tree_at(0))[1] == 14
    go_on(own, range(15, 24))
    # A look in between makes no near step void.
    assert own.restore(tree_at(0), step=10)[1] == 10
    go_on(own, range(24, 26))
    shutil.rmtree(tmp_path / "run/20")
    with pytest.warns(UserWarning, match="step 30 is of an earlier attempt"):
        assert manager().restore(tree_at(0))[1] == 24
    assert manager().steps() == [10, 30]


def test_a_near_disk_that_is_not_the_one_of_before(tmp_path):
    def manager(near):
        how = {"near": tmp_path / near, "near_every": 2, "every": 5}
        return ec.CheckpointManager(tmp_path / "run", **how)

    first = manager("disk")
    for step in range(1, 8):
        first.save(step, tree_at(step))
    first.wait()
    text = "nothing of this run is on the near disk of process 0, .*dsik`: it is new"
    with pytest.warns(UserWarning, match=text):
        assert manager("dsik").latest() == 5
    with pytest.warns(UserWarning, match=text):
        assert manager("dsik").restore(tree_at(0))[1] == 5


def test_a_near_disk_that_is_gone_while_a_run_goes_on(tmp_path):
    disk = tmp_path / "disk"
    how = {"every": 100, "near": disk, "near_every": 1}
    with ec.CheckpointManager(tmp_path / "run", **how) as manager:
        for step in range(1, 4):
            manager.save(step, tree_at(step))
        manager.wait()
        disk.rename(tmp_path / "elsewhere")
        says = f"Step 4 is saved in another directory `{disk}` than step 3, "
        with pytest.warns(UserWarning, match=says):
            manager.save(4, tree_at(4))
            manager.wait()
        manager.save(5, tree_at(5))
    assert parts(tmp_path) == {"disk": ["0"]}


def test_a_step_that_is_due_at_both_is_saved_to_both(tmp_path, monkeypatch):
    """So a root that is slow costs no more than steps since the near one."""
    how = {"near": tmp_path / "disk", "near_every": 2, "every": 4}
    manager = ec.CheckpointManager(tmp_path / "run", **how)
    for step in range(1, 5):
        assert manager.save(step, tree_at(step)) is (step == 4)
    manager.wait()
    assert manager.steps() == [4] and manager.latest() == 4
    shutil.rmtree(tmp_path / "run/4")
    assert manager.restore(tree_at(0))[1] == 4
    # What goes wrong with one does not keep the other from being saved.
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").touch()
    with pytest.raises(NotADirectoryError, match="Choose another path"):
        manager.save(8, tree_at(8))
    manager.wait()
    assert manager.steps() == [8]


def test_a_warning_names_newer_steps_only(tmp_path):
    how = {"near": tmp_path / "disk", "near_every": 2, "every": 5}
    with ec.CheckpointManager(tmp_path / "run", **how) as manager:
        for step in range(1, 7):
            manager.save(step, tree_at(step))
        manager._saves._last.kept = None
    # An older step, the newest at the root, is not whole.
    (tmp_path / "run/5/default/eqx_ckpt.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = ec.CheckpointManager(tmp_path / "run", **how)
        assert other.restore(tree_at(0))[1] == 6


def test_a_near_disk_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    how = {"near": tmp_path / "file", "near_every": 1, "every": 10}
    manager = ec.CheckpointManager(tmp_path / "run", **how)
    with pytest.raises(NotADirectoryError, match="Choose another path") as e:
        manager.save(1, tree_at(1))
    assert "Step 1 is not saved to near disks." in e.value.__notes__[0]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_part_that_fails_after_an_error_is_told_with_it(
    tmp_path, monkeypatch, request, is_interrupted
):
    """And not at the exit of the process, as an error that nobody has asked for."""
    # In the background of a shell it may be ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    has_returned, has_raised = threading.Event(), threading.Event()

    def write(plan, *args):
        if "disk" not in str(plan.root):
            has_raised.set()  # The end of the `with` saves to the root.
        assert has_returned.wait(60)
        if is_interrupted and not has_raised.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert has_raised.wait(60)
        raise OSError("no room")

    inside.replace(monkeypatch, "write a save", write)
    how = {"near": tmp_path / "disk", "near_every": 2, "every": 10}
    kind = KeyboardInterrupt if is_interrupted else ZeroDivisionError
    with pytest.raises(kind) as e, ec.CheckpointManager(tmp_path / "run", **how) as m:
        m.save(2, tree_at(2))
        has_returned.set()
        m.wait() if is_interrupted else 1 / 0
    assert e.value.__notes__[-1] == "Step 2 is not saved to near disks: no room"


@pytest.mark.parametrize("how", ["again", "ends"])
@pytest.mark.parametrize("which", [0, 1])
def test_ctrl_c_in_one_process_loses_no_near_step(tmp_path, which, how):
    """Nor does the other process wait for long: it would give up after a minute."""
    name = "team_whose_near_step_is_interrupted"
    done = good(run_team_program(2, name, tmp_path, which, how, timeout=50))
    assert "interrupted" in done[which] and "interrupted" not in done[1 - which]
    if how == "again":
        assert all(out.endswith("[4.0, 4.0] 4\n") for out in done)
    else:
        assert f"process {which} has failed: KeyboardInterrupt" in done[1 - which]


def test_a_copy_for_which_there_is_no_memory(tmp_path):
    """It is an error in both processes, which go on to the next step. In a restore it
    says nothing of the part that is copied, and no older step is restored."""
    name = "team_without_memory_for_a_copy"
    first, second = good(run_team_program(2, name, tmp_path))
    assert "process 1 has failed: MemoryError: no room" in first
    assert "MemoryError no room\n2\n" in second
    assert f"OSError [Errno {errno.EMFILE}] no place\n" in first
    assert second.endswith(f"OSError [Errno {errno.ENOSPC}] no place\n2\n")
    assert first.split()[-1] == "2"


def test_a_process_that_is_full_restores_no_older_step(tmp_path):
    if not refusing.is_possible():
        pytest.skip("the kernel cannot be asked to refuse reads here")
    done = scripts.run_module("support.near_reading", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 20


def test_the_root_may_be_a_store(tmp_path):
    root, how = "memory://near", {"every": 5, "near": tmp_path, "near_every": 1}
    for start in (1, 4):
        manager = ec.CheckpointManager(root, **how)
        if start > 1:
            assert manager.restore(tree_at(0))[1] == start - 1
        for step in range(start, start + 3):
            manager.save(step, tree_at(step))
        manager.wait()
    assert manager.latest() == 6 and manager.steps() == [5]


@pytest.mark.parametrize(
    "how, why",
    [
        ({"near": "x"}, "With `near`, `near_every` must be an integer >= 1"),
        (
            {"near": "x", "near_every": 0},
            "`near_every` must be None or an integer >= 1",
        ),
        (
            {"near": "x", "near_every": 1, "copies": -1},
            "`copies` must be None or an integer >= 0",
        ),
        ({"near": "x", "near_every": 1, "copies": 2}, "`copies` is 2, and there are 0"),
        ({"near_every": 1}, "`near_every` is for near disks: say where, with `near`"),
        ({"near": "s3://b", "near_every": 1}, "`near` must be a directory of this no"),
    ],
)
def test_arguments_that_cannot_be(tmp_path, how, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        ec.CheckpointManager(tmp_path / "run", **how)


def test_moves_and_shifts():
    moves = [Move(7, 0, 1, 5), Move(7, 1, 2, 5), Move(7, 0, 2, 5), Move(7, 3, 1, 5)]
    a, b, c, d = moves
    assert _exchange.in_turns([a, b, c, d]) == [[a, b], [c, d]]
    assert _exchange.shifts(["x"] * 4, 2) == [1, 2]
    assert _exchange.shifts(["x", "x", "y", "y"], 1) == [2]
    assert _exchange.shifts(["x", "x", "y", "y"], 2) == [2, 1]
    assert _exchange.shifts(["x"], 1) == []


def test_attempts(tmp_path):
    root = _root.resolve(tmp_path / "run")
    assert _attempts.last(root) is None
    first = _attempts.begin(root, "")
    save = "0123456789abcdef"
    second = _attempts.begin(root, save)
    assert _attempts.last(root) == second == (first.run, 2, save, None, [])
    # One that was killed as it began.
    (tmp_path / "run/eqx_ckpt.run/3").touch()
    assert _attempts.last(root) == second
    third = _attempts.begin(root, "", 5, [(6, save), (7, "")])
    assert third == _attempts.last(root) == (first.run, 4, "", 5, [(6, save), (7, "")])
    assert ec.CheckpointManager(tmp_path / "run").steps() == []


def _play(path, seeds, monkeypatch):
    monkeypatch.setattr(_disk._checkpoint, "open", near_worlds.fake_open)
    seen = collections.Counter()
    for seed in seeds:
        world = near_worlds.World(path / str(seed), seed)
        try:
            world.play()
        except Exception as e:
            e.add_note(f"seed {seed}")
            raise
        shutil.rmtree(path / str(seed))
        seen.update(world.seen)
    assert min(seen[name] for name in ("saved", "restored", "passed")) > len(seeds) / 9
    return seen


def test_near_steps_count_and_stay(tmp_path, monkeypatch):
    """Runs of several attempts, on disks that are permuted, wiped and damaged."""
    _play(tmp_path, range(60), monkeypatch)


@pytest.mark.long
def test_near_steps_count_and_stay_in_many_runs(tmp_path, monkeypatch):
    print(_play(tmp_path, range(60, 12_060), monkeypatch))


def _kill(path, seeds, attempts):
    seen = collections.Counter()
    for seed in seeds:
        campaign = near_kills.Campaign(path / str(seed), seed)
        try:
            campaign.play(attempts)
        except Exception as e:
            e.add_note(f"seed {seed}, attempt {campaign.attempt}")
            raise
        shutil.rmtree(path / str(seed))
        seen.update(campaign.seen)
    return seen


def test_processes_are_killed_anywhere(tmp_path):
    _kill(tmp_path, [0], 3)


@pytest.mark.long
def test_processes_are_killed_anywhere_many_times(tmp_path):
    print(_kill(tmp_path, range(1, 33), 10))


# ---- Four processes: the scenarios that take longer.


def _flip(file):
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 8, len(data), len(data) // 8):
        data[at] ^= 255
    file.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("copies, lost", [(1, [1]), (2, [1, 2]), (2, [0, 3]), (0, [])])
def test_lost_disks(tmp_path, copies, lost):
    near.run(tmp_path, 4, until=7, kill=True, copies=copies)
    for disk in lost:
        shutil.rmtree(tmp_path / f"disk{disk}")
    again = near.run(tmp_path, 4, until=9, copies=copies)
    assert begun(again) == [(6, 600 + i) for i in range(4)]
    assert results(again) == near.never_stopped(4, until=9)


@pytest.mark.long
def test_more_disks_are_lost_than_have_copies(tmp_path):
    near.run(tmp_path, 4, until=7, kill=True, every=5)
    for disk in (1, 2):
        shutil.rmtree(tmp_path / f"disk{disk}")
    again = near.run(tmp_path, 4, until=9, every=5)
    assert begun(again) == [(5, 500 + i) for i in range(4)]
    assert results(again) == near.never_stopped(4, until=9)


@pytest.mark.long
def test_another_order_of_processes(tmp_path):
    near.run(tmp_path, 4, until=7, kill=True)
    shutil.rmtree(tmp_path / "disk2")
    again = near.run(tmp_path, 4, until=9, order=[2, 0, 3, 1])
    assert begun(again) == [(6, 600 + i) for i in range(4)]
    assert results(again) == near.never_stopped(4, until=9)


@pytest.mark.long
def test_damage_in_parts_and_copies(tmp_path):
    near.run(tmp_path, 4, until=7, kill=True, every=5)
    (part,) = (tmp_path / "disk1").glob("*/*/*/1.zip")
    _flip(part)
    again = near.run(tmp_path, 4, until=7, every=5, kill=True)
    assert near.lines(again)[1][0] == "from 6 601"
    # The part of process 1 that it has then, and its copy on the disk of process 2.
    for file in tmp_path.glob("disk*/*/*/*/1.zip"):
        _flip(file)
    last = near.run(tmp_path, 4, until=9, every=5)
    assert begun(last) == [(5, 500 + i) for i in range(4)]
    assert results(last) == near.never_stopped(4, until=9)


@pytest.mark.long
def test_a_step_that_is_half_written(tmp_path):
    # One of them is killed as it is about to write its part of step 6.
    near.run(tmp_path, 4, until=7, dies_after=5, timeout=15)
    again = near.run(tmp_path, 4, until=9)
    assert begun(again) == [(4, 400 + i) for i in range(4)]
    assert results(again) == near.never_stopped(4, until=9)


@pytest.mark.long
def test_two_attempts_at_one_step(tmp_path):
    """Disks that were away have step 6 of the first attempt, with other numbers."""
    near.run(tmp_path, 4, until=7, kill=True, noise=7)
    away = {}
    for disk in (0, 1):
        away[disk] = tmp_path / f"away{disk}"
        (tmp_path / f"disk{disk}").rename(away[disk])
    for disk in (2, 3):
        away[disk] = tmp_path / f"away{disk}"
        shutil.copytree(tmp_path / f"disk{disk}", away[disk])
    second = near.run(tmp_path, 4, until=7, kill=True)
    assert near.lines(second)[0][0] == "from 0 0"
    # All of the first attempt is back, beside that of the second.
    for disk, old in away.items():
        shutil.copytree(old, tmp_path / f"disk{disk}", dirs_exist_ok=True)
    third = near.run(tmp_path, 4, until=9)
    assert begun(third) == [(6, 600 + i) for i in range(4)]
    assert results(third) == near.never_stopped(4, until=9)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["rows", "columns"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("counts", [(4, 3), (3, 4), (4, 2, 8), (4, 4)])
def test_other_counts_and_shardings(tmp_path, counts, copies, spec):
    """With a disk that is lost, and, where there are two copies, a part that is damaged
    where it is read first."""
    if spec == "columns" and 3 in counts:
        pytest.skip("three processes cannot share eight columns")
    how = {"all_own": True, "spec": spec}
    near.run(tmp_path, counts[0], until=7, kill=True, copies=copies)
    step = 6
    for before, count in zip(counts, counts[1:]):
        shutil.rmtree(tmp_path / "disk1")
        if count == 2:
            # Those two of the four that have all parts.
            (tmp_path / "disk2").rename(tmp_path / "disk1")
        if copies == 2 and before > 2:
            _flip(next((tmp_path / "disk0").glob("*/*/*/0.zip")))
        most = min(copies, count - 1)
        again = near.run(tmp_path, count, step + 3, kill=True, copies=most, **how)
        begins = [out[0] for out in near.lines(again)]
        assert begins == [f"from {step} {before}"] * count
        step += 2
    last = near.run(tmp_path, counts[-1], until=step + 1, all_own=True)
    assert begun(last) == [(step, counts[-1])] * counts[-1]
    assert results(last) == near.never_stopped(counts[-1], until=step + 1)


@pytest.mark.parametrize("what", ["a checkpoint", "steps of Orbax", "a name"])
def test_nothing_is_written_for_a_run_that_cannot_be(tmp_path, what):
    """Neither to the root nor to the near disk."""
    root, tree, says = tmp_path / "run", tree_at(2), "Choose another directory"
    if what == "a checkpoint":
        ec.tree_serialise_leaves(root, tree_at(1))
    elif what == "steps of Orbax":
        root, says = tmp_path / "orbax", "steps of Orbax that a manager does not read"
        two = {"one": ocp.args.StandardSave(tree), "two": ocp.args.StandardSave(tree)}
        with ocp.CheckpointManager(root) as theirs:
            theirs.save(1, args=ocp.args.Composite(**two))
    else:
        root, says = tmp_path / "run.safetensors", "a file that a save does not write"
    before = sorted(tmp_path.rglob("*"))
    how: dict[str, Any] = {"near": tmp_path / "disk", "near_every": 2, "every": 100}
    manager = ec.CheckpointManager(root, **how)
    with pytest.raises(ValueError, match=says):
        manager.save(2, tree)
    assert sorted(tmp_path.rglob("*")) == before
    manager._saves._last.kept = None
