"""A process that works on a run is killed at each thing that it asks of the system, or
of a store. Of each call that was over all is there, and of the next one all or nothing:
in the history, among the steps, and for whoever goes on."""

import pathlib
import random
import re
import shutil
import warnings

import pytest
from support import run_kills
from support.helpers import files_of, long
from support.killing import CAN_TRACE
from support.pauses import stores
from support.run_kills import JOBS, KEEP, look, Seen

import eqx_ckpt as ec


@pytest.fixture(scope="module", params=[False, True], ids=["directory", "store"])
def server(request, tmp_path_factory):
    if not (request.param or CAN_TRACE):
        pytest.skip("it traces calls of Linux")
    with stores(request.param), run_kills.Server(request.param) as server:
        server.pattern = tmp_path_factory.mktemp("pattern")
        run_kills.make(server.pattern / "run")
        server.seen = look(server.pattern / "run")
        yield server


class _Campaign:
    def __init__(self, server, directory, job):
        self.server, self.job = server, job
        self.here = directory / "here"
        # What is seen once so many calls are over.
        numbers = range(1, len(JOBS[job]) + 1)
        self._play(copies=True)
        self.seen = [look(self.here / f"run{n}") for n in numbers]
        self.seen.insert(0, server.seen)
        self.points, _ = self._play()

    def _play(self, at=None, copies=False):
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.server.pattern, self.here)
        points, told = self.server.play(self.job, self.here, at, copies)
        # TensorStore's own, which no object store has: see `test_kill`.
        for stale in self.here.rglob("*.__lock"):
            stale.unlink()
        return points, told

    def kill(self, at):
        _, told = self._play(at)
        last = len(JOBS[self.job])
        try:
            seen = look(self.here / "run")
            self._check(seen, self.seen[told], self.seen[min(told + 1, last)])
            self._go_on(seen)
        except AssertionError as e:
            e.add_note(f"{self.job}, killed at {at} of {self.points}, told {told}")
            raise
        return told

    def _check(self, seen, before, after):
        for name in Seen._fields:
            is_, was, will = (getattr(x, name) for x in (seen, before, after))
            if name == "latest":
                assert is_ in (was, will)
            else:
                assert was & will <= is_ <= was | will, name

    def _go_on(self, seen):
        """Others go on, and in the end there is what there has to be, and no more."""
        root = self.here / "run"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager = ec.CheckpointManager(root, keep=KEEP, reuse=False)
            _, at = manager.restore(run_kills.tree(0, 0))
            new = range(at + 1, at + 1 + KEEP)
            for step in new:
                run_kills.save(manager, step, 99, force=True)
        now = look(root)
        assert now.latest == (new[-1], 99)
        assert now.steps == {*new} | (seen.pinned & seen.steps)
        told = {number for _, number, _ in now.history}
        assert told == {number for _, number, _ in seen.history} | {*new}
        assert {row for row in seen.history if row[1] not in new} <= now.history
        if not self.server.as_store:
            # What is newer may still be being saved, for all that a manager knows.
            left = [pathlib.Path(x).relative_to(root).parts for x in ec.clean(root)]
            # A killed manager leaves files that it wrote, and a torn row of history.
            mine = re.compile("new-[0-9a-f]{16}")
            others = [x for x in left if not mine.fullmatch(x[1])]
            steps = [x[0] for x in others if x[0] != "eqx_ckpt.history"]
            assert all(int(step) > new[-1] for step in steps), left
            names = {path.name for path in root.iterdir() if path.name.isdecimal()}
            assert names == {*map(str, now.steps)}
            assert not [*root.glob("eqx_ckpt.*/new-*")]
            assert not any(map(run_kills.is_torn, root.glob("eqx_ckpt.history/*")))
        assert len(list(root.glob("eqx_ckpt.run/[0-9]*"))) <= 3
        for step in now.pinned:
            manager.unpin(step)
        ec.clean(root, idle=True)
        ec.delete(root)
        assert files_of(root) == {}


_some = [*JOBS][::3]


@pytest.mark.parametrize(
    "job", [*_some, *long(*(job for job in JOBS if job not in _some))]
)
def test_killed(server, tmp_path, job):
    if job == "near" and server.as_store:
        pytest.skip("a near disk is a directory")
    campaign = _Campaign(server, tmp_path, job)
    rng = random.Random(job)
    for at in rng.sample(range(1, campaign.points + 1), 2):
        campaign.kill(at)


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_killed_everywhere(server, tmp_path, job):
    if job == "near" and server.as_store:
        pytest.skip("a near disk is a directory")
    campaign = _Campaign(server, tmp_path, job)
    told = {campaign.kill(at) for at in range(1, campaign.points + 1)}
    # To make a manager asks nothing of a store.
    is_asked = lambda call: not (call == "start" and server.as_store)
    asked = {n for n, (call, _) in enumerate(JOBS[job]) if is_asked(call)}
    assert told >= asked
    print(job, campaign.points, "kills")
