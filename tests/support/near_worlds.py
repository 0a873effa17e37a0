"""Runs with near disks that are played without processes, in thousands of ways: which
near steps count, and which stay. Disks, attempts and choices are those of the library;
a part is a small file of JSON, as to save real ones would take the time.

What a run has to do is worked out from what the world did to it, and not from disks.
"""

import json
import pathlib
import random
import shutil
from typing import Any

from eqx_ckpt._kernel._run import _attempts
from eqx_ckpt._kernel._run._attempts import Attempt
from eqx_ckpt._kernel._storage import _root
from eqx_ckpt._near import _whole
from eqx_ckpt._near._disk import Disk, NearPart
from eqx_ckpt._near._whole import NearStep, PartCopy


_TIRED = "cannot be read now"


class _Opened:
    def __init__(self, metadata: Any):
        self.metadata = metadata


def fake_open(file: pathlib.Path) -> Any:
    """In the place of `_checkpoint.open`."""
    text = file.read_text()
    if text == _TIRED:
        raise OSError(5, "the disk is tired")
    return _Opened({"near": json.loads(text)["near"]})


class World:
    """One run, with a neighbour's files on its disks."""

    def __init__(self, path: pathlib.Path, seed: int):
        self.rng = random.Random(seed)
        self.disks = [Disk(path / f"disk{i}") for i in range(5)]
        self.root = _root.resolve(f"memory://near-world-{path.name}-{seed}")
        # Of each near save the part of process 0.
        self.saves: dict[str, NearPart] = {}
        self.at_root = 0  # The newest step there.
        self.seen = dict.fromkeys(["saved", "restored", "passed", "deleted"], 0)
        other = NearPart("f" * 16, 1, 7, "e" * 16, 1, 0)
        for disk in self.disks[:2]:
            self._put(disk, other)
        self.neighbours = [disk.file(other) for disk in self.disks[:2]]

    def play(self) -> None:
        for _ in range(self.rng.randrange(2, 6)):
            self._attempt()
            assert all(file.exists() for file in self.neighbours)
            self._trouble()

    def _attempt(self) -> None:
        """A start of the run, which goes on from what there is, and is killed."""
        rng = self.rng
        count = rng.choice([1, 2, 2, 3, 3, 4])
        mine = rng.sample(self.disks, count)
        if rng.random() < 0.2:
            mine[-1] = mine[0]
        step, base = self._restore(mine)
        attempt = None
        if base is not None:
            if rng.random() < 0.1:
                return  # Killed before it has begun.
            attempt = _attempts.begin(self.root, base)
        for step in range(step + 1, step + rng.randrange(1, 14)):
            if step % 2 == 0:
                attempt = attempt or _attempts.begin(self.root, "")
                if not self._save(attempt, step, mine):
                    return
            if step % 7 == 0 and rng.random() < 0.7:
                self.at_root = max(self.at_root, step)

    # ---- A restore, and what it has to find.

    def _restore(self, mine: list[Disk]) -> tuple[int, str | None]:
        """The step, and the near save that is the base; None without a restore."""
        last = _attempts.last(self.root)
        if last is None:
            return 0, None
        bad: set[PartCopy] = set()
        while True:
            parts = [disk.find_parts()[0] for disk in mine]
            found, passed = _whole.choose(last, parts, bad)
            if found is None or not (worse := self._damaged(mine, found)):
                break
            bad |= worse
        step = max(self.at_root, found.step if found else 0)
        # However many processes there are.
        base = self.saves.get(last.near_save)
        if base is not None and not any(map(_is_part, self._files(mine, base))):
            base = None
        best = [x.step for x in self._there(mine) if _counts(x, last, base)]
        assert step == max([self.at_root, *best])
        if found is not None:
            same = self.saves[found.save]
            assert (found.step, found.run) == (same.step, last.run)
            assert len(found.sources) == same.processes
        told = {x.step for x in passed}
        for save in self._there(mine):
            # Whatever is whole and newer is restored, or told.
            assert save.step <= step or save.step in told, save
        self.seen["passed"] += any(x.step > step for x in passed)
        if step == 0:
            return 0, None
        self.seen["restored"] += step > self.at_root
        is_near = found is not None and found.step >= self.at_root
        return step, found.save if found is not None and is_near else ""

    def _files(self, mine: list[Disk], part: NearPart) -> list[pathlib.Path]:
        """All files that a save may have on these disks."""
        names = range(part.processes)
        return [disk.place(part.run, part.save, i) for i in names for disk in mine]

    def _there(self, mine: list[Disk]) -> list[NearPart]:
        """Saves of which all parts are on these disks, undamaged."""
        out = []
        for name, part in self.saves.items():
            files = [
                [disk.place(part.run, name, i) for disk in mine]
                for i in range(part.processes)
            ]
            if all(any(map(_is_good, some)) for some in files):
                out.append(part)
        return out

    def _damaged(self, mine: list[Disk], found: NearStep) -> set[PartCopy]:
        """Copies that turn out to be damaged as they are read."""
        return {
            PartCopy(found.save, source, process)
            for process, sources in enumerate(found.sources)
            for source in sources
            if not _is_good(mine[source].place(found.run, found.save, process))
        }

    # ---- A save, which may be cut off anywhere.

    def _save(self, attempt: Attempt, step: int, mine: list[Disk]) -> bool:
        """Returns whether the run is still alive."""
        rng, count = self.rng, len(mine)
        name = f"{rng.getrandbits(64):016x}"
        part = NearPart(attempt.run, attempt.number, step, name, count, 0)
        self.saves[name] = part
        copies = rng.choice([0, 1, 1, 1, 2])
        acts = [(i, i) for i in range(count)]
        acts += [
            (i, (i + k) % count) for k in range(1, copies + 1) for i in range(count)
        ]
        rng.shuffle(acts)
        dies = rng.random() < 0.15
        for process, to in acts[: rng.randrange(len(acts))] if dies else acts:
            self._put(mine[to], part._replace(process=process))
        if dies:
            return False
        self.seen["saved"] += 1
        # All have it, and each deletes what it may, or dies before.
        dies = rng.random() < 0.1
        keepers = rng.sample(range(count), rng.randrange(count) if dies else count)
        for i in keepers:
            before = self._newer_files(mine[i], step)
            mine[i].keep(part._replace(process=i))
            assert all(file.exists() for file in before), (step, before)
            assert mine[i].file(part._replace(process=i)).exists()
            for directory in _path(mine[i]).glob(f"{part.run}/*"):
                is_old = self.saves[directory.name].step <= step
                if is_old and directory.name != name:
                    assert any(f.read_text() == _TIRED for f in directory.iterdir())
        return not dies

    def _newer_files(self, disk: Disk, step: int) -> list[pathlib.Path]:
        files = _path(disk).glob("*/*/*.zip")
        newer = {name for name, part in self.saves.items() if part.step > step}
        return [f for f in files if f.parent.name in newer and _is_part(f)]

    def _put(self, disk: Disk, part: NearPart) -> None:
        file = disk.file(part)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"near": part, "data": "good"}))

    # ---- What happens to disks between attempts.

    def _trouble(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            disk = rng.choice(self.disks[2:])  # The others are the neighbour's.
            shutil.rmtree(_path(disk), ignore_errors=True)
        files = [
            file
            for disk in self.disks
            for file in _path(disk).glob("*/*/*.zip")
            if file not in self.neighbours
        ]
        for file in rng.sample(files, min(len(files), rng.choice([0, 0, 0, 1, 2]))):
            kind = rng.choice(["index", "data", "gone", "tired"])
            if kind == "gone":
                file.unlink()
            elif kind == "data" and _is_part(file):
                data = json.loads(file.read_text())
                file.write_text(json.dumps(data | {"data": "bad"}))
            else:
                file.write_text(_TIRED if kind == "tired" else "{")


def _path(disk: Disk) -> pathlib.Path:
    return pathlib.Path(disk.root.url, "eqx_ckpt.near")


def _counts(part: NearPart, last: Attempt, base: NearPart | None) -> bool:
    """`base`: what the last attempt has begun from, if any of it is there."""
    if base is not None and part.attempt == base.attempt and part.step < base.step:
        return True
    return part.attempt == last.number or part.save == last.near_save


def _is_part(file: pathlib.Path) -> bool:
    return file.exists() and file.read_text().startswith('{"near"')


def _is_good(file: pathlib.Path) -> bool:
    return _is_part(file) and '"data": "good"' in file.read_text()
