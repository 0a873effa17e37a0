"""A saving process is killed at every file-system call that it makes, and at random
times. The short form tries some of these points; the long one, 1,000 for each case:
`python -m pytest -m long tests/save/test_kill.py`."""

import collections
import json
import os
import random
import re
import shutil
import time

import pytest
from support.helpers import files_of
from support.killing import (
    CAN_TRACE,
    CASES,
    make,
    save,
    Server,
    what_is_at,
    without_rename,
)

import eqx_ckpt as ec


_layouts = ["ocdbt", "zarr"]
_FUNCTIONS = {"with functions": ("A", "B"), "functions come": ("a", "B")}


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def _kinds(path):
    """The names of the files of a checkpoint, all save ids being one."""
    return {re.sub("[0-9a-f]{16}", "<save>", name) for name in files_of(path)}


class _Campaign:
    """Kills saves of one case, each in a directory of its own, and checks what is left.

    `saved` counts the kills after which the new checkpoint was there, `kept` those
    after which what was there before was.
    """

    rename = True

    def __init__(self, server, directory, case, layout):
        self.server, self.directory, self.layout = server, directory, layout
        cases = {**CASES, **_FUNCTIONS, "for Orbax": ("a", "+")}
        self.old, self.new = cases[case]
        self.saved = self.kept = 0
        for name in {"d", self.old or "d"}:
            self._save(directory / "whole" / name, name, trace=False)
        self.kinds = _kinds(directory / "whole" / "d")

    def _save(self, path, name, **how):
        return self.server.save(path, name, self.layout, rename=self.rename, **how)

    def stops(self):
        steps = self.directory / "alone"
        self._prepare(steps)
        return self._save(steps / "7", self.new)

    def _prepare(self, steps):
        steps.mkdir()
        if self.old is not None:
            shutil.copytree(self.directory / "whole" / self.old, steps / "7")

    def kill(self, number, **when):
        steps = self.directory / "steps"
        self._prepare(steps)
        self._save(steps / "7", self.new, **when)
        there = self.check(steps, number)
        assert there in (self.old, self.new), there
        self.saved += there == self.new
        self.kept += there == self.old
        shutil.rmtree(steps)

    def check(self, steps, number):
        path = steps / "7"
        there = what_is_at(path)
        for name in set(os.listdir(steps)) - {"7"}:
            with pytest.raises(FileNotFoundError, match="interrupted"):
                ec.open(steps / name)
        if number % 2:
            found = ec.clean(steps, remove=False)
            assert ec.clean(steps) == found and ec.clean(steps) == []
            assert what_is_at(path) == there
            # The files for other readers are of it too.
            assert there is None or ec.verify(path) == []
            assert os.listdir(steps) == ["7"] if there else not files_of(steps)
            assert len(list(steps.glob("7/d/*"))) <= 1
        else:
            save(path, "d", self.layout)
            assert what_is_at(path) == "d"
            assert os.listdir(steps) == ["7"]
            assert _kinds(path) == self.kinds
        return there


class _WithFunctions(_Campaign):
    """The same with a function, which is exported once."""

    def __init__(self, server, directory, case, layout):
        pytest.importorskip("flatbuffers")
        self.source, tree = directory / "functions", make("A")
        f = ec.function(lambda tree, x: tree["w"] * x, tree["w"], platforms=["cpu"])
        ec.tree_serialise_leaves(self.source, tree, functions={"f": f})
        super().__init__(server, directory, case, layout)

    def _save(self, path, name, **how):
        functions = self.source if name.isupper() else None
        return super()._save(path, name, functions=functions, **how)


class _WithoutRename(_Campaign):
    """The same on a store that cannot rename."""

    rename = False

    def check(self, steps, number):
        path = steps / "7"
        with without_rename():
            there = what_is_at(path)
        # TensorStore writes each file as `<name>.__lock`, and takes such a file of a
        # killed writer as it is, longer than what it writes. No object store does so,
        # and in local directories we write ourselves.
        for stale in steps.rglob("*.__lock"):
            stale.unlink()
        if self.layout == "zarr" and there is None and files_of(steps):
            # Its names are those of all saves, so the next one might be beside another
            # that lives.
            with pytest.raises(FileExistsError, match="is running or was interrupted"):
                save(path, "d", self.layout, rename=False)
        elif self.layout == "ocdbt" or there is None:
            save(path, "d", self.layout, rename=False)
            with without_rename():
                assert what_is_at(path) == "d"
            assert _kinds(path) == self.kinds
        return there


class _ForOrbax(_Campaign):
    """The same while the files for Orbax are added to a checkpoint."""

    def check(self, steps, number):
        files = json.loads((steps / "7/eqx_ckpt.json").read_text())["others"]
        names = {*os.listdir(steps / "7")}
        if "_METADATA" in names:  # Orbax restores it.
            manifest = {"manifest.ocdbt"} if self.layout == "ocdbt" else set()
            assert names >= {"_sharding"} | manifest
        assert super().check(steps, number) == self.old
        if "_METADATA" not in files:
            return self.old
        assert not number % 2 or (steps / "7/_METADATA").exists()
        return self.new


_with_rename = [(_Campaign, case, layout) for layout in _layouts for case in CASES]
# What has fixed names cannot be replaced there.
_without = [(_WithoutRename, case, "ocdbt") for case in CASES]
_functions = [(_WithFunctions, case, x) for case in _FUNCTIONS for x in _layouts]
_orbax = [(_ForOrbax, "for Orbax", layout) for layout in _layouts]
_all = [*_with_rename, *_without, (_WithoutRename, "first", "zarr"), *_functions]
_all += _orbax


@pytest.mark.parametrize("kind, case, layout", [*_all[:11:2], *_orbax])
def test_killed(server, tmp_path, kind, case, layout):
    """After SIGKILL the path is whole, old or new. Other leftovers are no checkpoints,
    and are deleted by the next save to the path, and by `clean`."""
    campaign = kind(server, tmp_path, case, layout)
    rng = random.Random(0)
    if CAN_TRACE:
        count = len(campaign.stops())
        for number in range(4):
            campaign.kill(number, at=rng.randint(1, count))
    for number in range(3):
        campaign.kill(number, seconds=rng.uniform(0, 0.05))


@pytest.mark.skipif(not CAN_TRACE, reason="it counts calls of Linux")
@pytest.mark.parametrize("layout", _layouts)
def test_what_a_repeated_save_asks_of_the_system(server, tmp_path, layout):
    """One rename, and as few syncs as there are files and directories to be synced."""
    calls = []
    for trees in ("ab", "aba"):
        stops = server.save(tmp_path / trees, trees, layout)
        calls.append(collections.Counter(stops))
    again = calls[1] - calls[0]
    steps = "rename", "renameat", "renameat2"
    assert sum(again[f"before {name}"] for name in steps) == 1
    syncs = sum(again[f"before {name}"] for name in ("fsync", "fdatasync", "syncfs"))
    if layout == "ocdbt":
        assert syncs <= 9
    else:  # Each leaf has files and directories of its own; and the one above all.
        assert syncs == len([*(tmp_path / "ab").rglob("*")]) + 2


@pytest.mark.long
@pytest.mark.parametrize("kind, case, layout", _all)
def test_killed_everywhere(server, tmp_path, kind, case, layout, capsys):
    campaign = kind(server, tmp_path, case, layout)
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
            f"\n{kind.__name__}, {layout}, {case}: {count} calls and {1000 - count} "
            f"random times; {campaign.kept} kept, {campaign.saved} saved; "
            f"{time.perf_counter() - start:.0f} s"
        )
