"""A run of real processes with near disks, in attempts of any number of them. They are
killed one after the other at random instants, and disks are permuted, wiped and left
out. The root and the near disks may be slow. What each process has done is in logs
beside the disks; `Campaign` looks whether the next attempt begins from what it has to
begin from: the newest near step that was said to be whole, and any that is older than
the newest that was due.
"""

import collections
import json
import pathlib
import random
import shutil
from typing import NamedTuple

import eqx_ckpt as ec
from eqx_ckpt._kernel._run import _attempts
from eqx_ckpt._kernel._storage import _root
from support import near


class Found(NamedTuple):
    """A near save that is on disks, and the files of it."""

    save: str
    step: int
    attempt: int
    processes: int
    files: dict[pathlib.Path, int]

    def is_whole(self, disks: list[pathlib.Path]) -> bool:
        there = {i for f, i in self.files.items() if f.parents[3] in disks}
        return len(there) == self.processes


class Campaign:
    def __init__(self, path: pathlib.Path, seed: int):
        self.path, self.rng = path, random.Random(seed)
        path.mkdir()
        self.disks = [path / f"disk{i}" for i in range(4)]
        self.size, self.order = self.rng.choice([2, 3, 4]), [0, 1, 2, 3]
        # Of each attempt, by its noise: the one that it went on from, and the step.
        self.origin: dict[int, tuple[int, int]] = {}
        # The newest near step that must not be lost, and who has saved it.
        self.reached = self.attempt = 0
        # The newest step that was done.
        self.done = 0
        self.count = self.size
        # Disks that were wiped, or left out, since the last near step.
        self.lost: set[pathlib.Path] = set()
        self.seen: collections.Counter[str] = collections.Counter()

    def play(self, attempts: int) -> None:
        for _ in range(attempts):
            self.attempt += 1
            self._attempt()

    def _attempt(self) -> None:
        rng = self.rng
        self._trouble()
        here = [self.disks[i] for i in self._here()]
        before = self._find()
        least = self._least(before, here)
        # Seconds after they have begun, or have saved so many steps.
        after = rng.choice([0, *range(1, 13)])
        delay, gap = rng.random() * (0.1 if after else 1), rng.random() * 0.1
        logs = {
            "attempt": self.attempt,
            "delays": [delay + gap * rng.random() for _ in range(self.size)],
            "after": after,
            # Without copies a step is whole once it is saved.
            "whole": "Copied" if self.size > 1 else "Saved",
            "slow_near": rng.choice([0, 0, 0.1 * rng.random()]),
            "slow_root": rng.choice([0, 0, rng.random()]),
        }
        near.run(
            self.path,
            self.size,
            until=1000,
            order=[self.order.index(disk) for disk in range(4)],
            every=rng.choice([5, 6, 100]),
            noise=7 * self.attempt,
            all_own=True,
            logs=logs,
        )
        self._check(before, here, max(least, self.reached))

    def _trouble(self) -> None:
        """What happens between attempts. Some of it may lose what was reached."""
        rng, disks = self.rng, self.disks
        before = self.order[: self.size]
        if rng.random() < 0.4:
            self.size = rng.choice([1, 2, 3, 4])
        if rng.random() < 0.2:
            rng.shuffle(self.order)
        else:
            self.order[: self.size] = rng.sample(self.order[: self.size], self.size)
        if rng.random() < 0.2:
            shutil.rmtree(disks[self.order[0]], ignore_errors=True)
            self.lost.add(disks[self.order[0]])
        self.lost |= {disks[i] for i in before} - {disks[i] for i in self._here()}
        # Each part has one copy on another disk, but for a single process.
        if len(self.lost) > (self.count > 1):
            self.reached = 0
        self.seen["nothing lost"] += self.reached > 0
        self.seen["other counts"] += self.reached > 0 and self.size != self.count

    def _here(self) -> list[int]:
        return self.order[: self.size]

    def _find(self) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for file in self.path.glob("disk*/*/*/*/*.zip"):
            _, attempt, step, save, count, process = ec.open(file).metadata["near"]
            one = found.setdefault(save, Found(save, step, attempt, count, {}))
            one.files[file] = process
        return found

    def _least(self, found: dict[str, Found], here: list[pathlib.Path]) -> int:
        """The newest step that can be restored, as the files say."""
        root = self.path / "run"
        last = _attempts.last(_root.resolve(root)) if root.exists() else None
        steps = ec.CheckpointManager(root).steps() if root.exists() else []
        for x in found.values():
            if last is None or not x.is_whole(here):
                continue
            if x.attempt == last.number or x.save == last.near_save:
                steps.append(x.step)
        return max(steps, default=0)

    # ---- What came of it.

    def _check(
        self, before: dict[str, Found], here: list[pathlib.Path], least: int
    ) -> None:
        logs = [self._log(rank) for rank in range(self.size)]
        lines = [line for log in logs for line in log]
        self.seen["attempts"] += 1
        begins = [line for line in lines if line[0] == "from"]
        steps = [line[1] for line in lines if line[0] in ("from", "saved")]
        # The save that is under way as they are killed may be whole.
        whole = max(steps, default=-1 - near.NEAR_EVERY)
        after = self._find()
        for x in before.values():
            if x.step > whole + near.NEAR_EVERY:
                left = after[x.save].files if x.save in after else {}
                assert x.files.items() <= left.items(), f"{x} was deleted"
        if not begins:
            self.seen["killed as they began"] += 1
            return
        at = begins[0][1]
        noises = {own["noise"] for _, _, whose, _ in begins for own in whose}
        assert {line[1] for line in begins} == {at} and len(noises) == 1
        assert at >= least, f"began from {at}, and not from {least}"
        self.seen["went on"] += at > 0
        if self.reached:
            lost = max(0, self.done - at)
            assert lost < 2 * near.NEAR_EVERY, f"{lost} steps are lost"
            self.seen[f"{lost} steps lost"] += 1
        (noise,) = noises
        state = near.parts_of(self._state(noise, at), self.size)
        for rank, log in enumerate(logs):
            for word in log:
                if word[0] == "from":
                    assert word[3] == state[rank], f"process {rank}: a wrong state"
                    cursors = [own["cursor"] for own in word[2]]
                    own = [100 * at + i for i in range(len(cursors))]
                    assert cursors == own
        told = " ".join(line[1] for line in lines if line[0] == "warning")
        for x in before.values():
            if x.step > at and x.is_whole(here) and logs[0]:
                self.seen["told"] += 1
                assert f"near step {x.step}:" in told, f"{x} is passed over in silence"
        self.origin[7 * self.attempt] = noise, at
        # A near step is whole, with its copies, before the next is begun.
        newest = (max(steps) // near.NEAR_EVERY - 1) * near.NEAR_EVERY
        newest = max([newest, *(line[1] for line in lines if line[0] == "whole")])
        if newest > at:
            self.reached, self.count, self.lost = newest, self.size, set()
        self.done = max(steps)

    def _log(self, rank: int) -> list[list]:
        file = self.path / f"log{self.attempt}-{rank}"
        return [json.loads(x) for x in file.read_text().splitlines()]

    def _state(self, noise: int, step: int) -> near.State:
        """What an attempt has at a step."""
        if noise == 0:
            return near.fresh()
        origin, start = self.origin[noise]
        return near.trained(
            self._state(origin, start), range(start + 1, step + 1), noise
        )
