"""A saving process is killed at every file-system call that it makes, and at random
times. The short form tries some of these points; the long one, 1,000 for each case:
`python -m pytest -m long tests/test_kill.py`."""

import os
import random
import re
import shutil
import time

import pytest
from helpers import assert_alike, files_of
from killing import CAN_TRACE, make, save, Server

import eqx_ckpt as ec


# What is at the path before, and what is saved there.
_cases = {"first": (None, "a"), "overwrite": ("a", "b"), "other": ("a", "c")}
_layouts = ["ocdbt", "zarr"]


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def _what_is_at(path):
    """Which of the trees is at a path: all of it, bit for bit. None: no checkpoint."""
    try:
        ckpt = ec.open(path)
    except FileNotFoundError:
        return None
    tree = ec.materialise(ckpt.tree)
    name = chr(tree["step"] if "step" in tree else tree["other"]["step"])
    assert_alike(tree, make(name))
    return name


def _kinds(path):
    """The names of the files of a checkpoint, all save ids being one."""
    return {re.sub("[0-9a-f]{16}", "<save>", name) for name in files_of(path)}


class _Campaign:
    """Kills saves of one case, each in a directory of its own, and checks what is left.

    `saved` counts the kills after which the new checkpoint was there, `kept` those
    after which what was there before was.
    """

    def __init__(self, server, directory, case, layout):
        self.server, self.directory, self.layout = server, directory, layout
        self.old, self.new = _cases[case]
        self.saved = self.kept = 0
        self.names = {}
        for name in ("a", "b", "c", "d"):
            server.save(directory / "whole" / name, name, layout, trace=False)
            self.names[name] = _kinds(directory / "whole" / name)

    def stops(self):
        steps = self.directory / "alone"
        self._prepare(steps)
        return self.server.save(steps / "7", self.new, self.layout)

    def _prepare(self, steps):
        steps.mkdir()
        if self.old is not None:
            shutil.copytree(self.directory / "whole" / self.old, steps / "7")

    def kill(self, number, **when):
        steps = self.directory / "steps"
        path = steps / "7"
        self._prepare(steps)
        self.server.save(path, self.new, self.layout, **when)
        there = _what_is_at(path)
        assert there in (self.old, self.new), there
        self.saved += there == self.new
        self.kept += there == self.old
        for name in set(os.listdir(steps)) - {"7"}:
            with pytest.raises(FileNotFoundError, match="interrupted"):
                ec.open(steps / name)
        if number % 2:
            found = ec.clean(steps, remove=False)
            assert ec.clean(steps) == found and ec.clean(steps) == []
            assert _what_is_at(path) == there
            assert os.listdir(steps) == ["7"] if there else not files_of(steps)
            assert len(list(steps.glob("7/d/*"))) <= 1
        else:
            save(path, "d", self.layout)
            assert _what_is_at(path) == "d"
            assert os.listdir(steps) == ["7"]
            assert _kinds(path) == self.names["d"]
        shutil.rmtree(steps)


@pytest.mark.parametrize("layout", _layouts)
@pytest.mark.parametrize("case", _cases)
def test_killed(server, tmp_path, case, layout):
    """After SIGKILL the path is whole, old or new. Other leftovers are no checkpoints,
    and are deleted by the next save to the path, and by `clean`."""
    campaign = _Campaign(server, tmp_path, case, layout)
    rng = random.Random(0)
    if CAN_TRACE:
        # Both sides of the commit, and some others.
        count = len(campaign.stops())
        for number in range(6):
            campaign.kill(number, at=rng.randint(1, count))
        assert campaign.kept and campaign.saved or count
    for number in range(4):
        campaign.kill(number, seconds=rng.uniform(0, 0.05))


@pytest.mark.long
@pytest.mark.parametrize("layout", _layouts)
@pytest.mark.parametrize("case", _cases)
def test_killed_everywhere(server, tmp_path, case, layout, capsys):
    campaign = _Campaign(server, tmp_path, case, layout)
    start = time.perf_counter()
    count = len(campaign.stops()) if CAN_TRACE else 0
    for number in range(count):
        campaign.kill(number // 2 + number, at=number + 1)
    assert not count or campaign.kept and campaign.saved
    rng = random.Random(0)
    longest = 0.2
    for number in range(1000 - count):
        saved = campaign.saved
        campaign.kill(number, seconds=rng.uniform(0, longest))
        # Aim at the time that a save takes, whatever that is on this machine.
        longest *= 0.98 if campaign.saved > saved else 1.02
    with capsys.disabled():
        print(
            f"\n{layout}, {case}: {count} calls and {1000 - count} random times; "
            f"{campaign.kept} kept, {campaign.saved} saved; "
            f"{time.perf_counter() - start:.0f} s"
        )
