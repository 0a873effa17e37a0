"""Two processes make two calls on one run: one pauses before each of its looks at the
store and each of its changes, and the other makes its whole call there. What either has
decided before has to hold, or to be decided anew.
"""

import os
import pathlib
import random
import re
import shutil
import threading

import pytest
from support import inside, pauses
from support.pauses import LOOKS, Other, outcome, tree

import eqx_ckpt as ec


CHANGES = "save", "save another", "replace", "begin anew", "pin", "delete"
_DELETES = "delete", "delete its path"
PAIRS = [
    *((a, b) for a in CHANGES for b in CHANGES if a != b),
    *((a, b) for a in LOOKS for b in ("save", "delete", "replace")),
    *(("pin", "delete its path"), ("delete its path", "pin")),
    *(("clean", b) for b in ("save", "delete")),
    *(("delete the run", b) for b in ("save", "save and pin", "begin anew", "pin")),
    *((a, "delete the run") for a in ("save and pin", "begin anew", "pin")),
    *(("save a zip", "delete a zip"), ("delete a zip", "save a zip")),
    *(("for Orbax", b) for b in ("for Orbax, too", "replace", "delete")),
    *((a, "for Orbax") for a in ("replace", "replace by zarr", "delete")),
    *(("save the damaged one", b) for b in ("put a good one there", "delete")),
]
_ADDS = "for Orbax"
_SAVED = {"save": 4, "save another": 5, "begin anew": 0, "save and pin": 4}
# Those that an object store knows not, or refuses beside others.
_LOCAL = "clean", "save a zip", "delete a zip", "replace by zarr"
# Of a step that another process has deleted or saved meanwhile; and of writers to one
# path, of which one has lost.
_TOLD = {
    "pin": "There is no step 2",
    **dict.fromkeys(_DELETES, "pinned|There is no (checkpoint|step)"),
    "delete a zip": "There is no checkpoint",
    "delete the run": "pinned|being saved|was saved meanwhile|There is no checkpoint",
    "save and pin": "was (replaced|deleted)|There is no step 4",
    "replace": "was (replaced|deleted)",
    "for Orbax": "was (replaced|deleted)|There is no (checkpoint|step)",
    "put a good one there": "was (replaced|deleted)",
    "save the damaged one": "is whole now|exists already|by another|"
    "There is (no|a checkpoint)",
}


def _run(directory: pathlib.Path, is_damaged: bool) -> pathlib.Path:
    root = directory / "pattern"
    with ec.CheckpointManager(root, reuse=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree(step), {"loss": -step})
    ec.tree_serialise_leaves(root / "a.zip", tree(0))
    if is_damaged:
        (file,) = root.glob("3/default/d/*/0")
        file.write_bytes(bytes(file.stat().st_size))
    return root


class _Pair:
    def __init__(self, directory: pathlib.Path, other: Other, one: str, two: str):
        self.names, self._other, self._is_store = (one, two), other, other.as_store
        self._pattern = _run(directory, one == "save the damaged one")
        self._root = directory / "run"

    def play(self, at: int) -> int:
        """Makes both calls, the second in the first one's pause. Returns how many
        pauses there could be."""
        one, two = self.names
        root = self._root
        shutil.copytree(self._pattern, root)
        self._other.say(one, str(root), at)
        said = self._other.hear()
        done: list[list[object]] = []
        within = threading.Thread(target=lambda: done.append(outcome(two, root)))
        within.start()
        if said == "paused":
            # It may wait for a lock that the other holds.
            within.join(0.5)
            self._other.say()
            said = self._other.hear()
        within.join()
        count, first = said
        try:
            self._check(dict(zip(self.names, [first, done[0]])))
        except AssertionError as e:
            e.add_note(f"{one} / {two} at {at} of {count}: {first} {done[0]}")
            raise
        shutil.rmtree(root, ignore_errors=True)
        return count

    def _check(self, done: dict[str, list[object]]) -> None:
        for name, (kind, said) in done.items():
            # Files that are added to what is there make no other checkpoint of it.
            told = None if name == "replace" and _ADDS in done else _TOLD.get(name)
            if kind and told:
                assert re.search(told, str(said)), (kind, said)
            else:
                assert not kind, (kind, said)
            if name in LOOKS:
                assert said not in (None, []), said
        root = self._root
        if done.get("replace", [""])[0]:
            # What it wrote where another was deleting is a leftover.
            ec.clean(root, idle=self._is_store)
        files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
        there = {int(x.parts[0]) for x in files if x.parts[0].isdecimal()}
        if not self._is_store and root.exists():
            there |= {int(x) for x in os.listdir(root) if x.isdecimal()}
        manager = ec.CheckpointManager(root)
        steps = set(manager.steps())
        if "delete the run" in done:
            # What is left of it is a run, with all that a run knows of its steps.
            history = {x.number for x in manager.history()}
            assert steps <= history and steps == there, (steps, there, history)
            if 4 in steps and done.get("save and pin", [True])[0] == "":
                assert 4 in inside.pinned(manager)
            return
        assert steps and steps == there, (steps, sorted(map(str, files)))
        for step in steps:
            assert ec.verify(manager.path(step)) == []
            assert ec.open(manager.path(step)).metadata["step"] == step
        good = {name for name, (kind, _) in done.items() if not kind}
        if "pin" in good:
            assert 2 in steps
        elif good & {*_DELETES}:
            assert 2 not in steps
        saved = [step for name, step in _SAVED.items() if name in good]
        assert len(saved) != 1 or saved[0] in steps, (saved, steps)


@pytest.fixture(scope="module", params=[False, True], ids=["directory", "store"])
def other(request):
    with pauses.stores(request.param), Other(request.param) as other:
        yield other


def _play(tmp_path, other, one, two, count=None):
    if one in _LOCAL and other.as_store:
        return 0
    pair = _Pair(tmp_path, other, one, two)
    points = pair.play(0)
    rng = random.Random(f"{one}{two}")
    some = range(1, points + 1)
    for at in some if count is None else rng.sample(some, min(count, points)):
        pair.play(at)
    return points


def _interleave(root, other, look, at, save, stop):
    """A look pauses before its call number `at` to the store, while a process that
    saves two steps goes on from its call number `stop` to the end. Returns how many
    calls there were."""
    save.say("save two", str(root), stop)
    saved = save.hear()
    other.say(look, str(root), at)
    seen = other.hear()
    saved, seen = save.finish(saved), other.finish(seen)
    assert saved[1][0] == "", saved
    count, (kind, found) = seen
    # A store has no locks: what is being saved there looks like what a kill has left.
    is_warned = other.as_store and kind == "UserWarning" and "not completed" in found
    assert is_warned or (kind == "" and found not in (None, [])), seen
    return count, saved[0]


def _beside_saves(tmp_path, other, schedules):
    pattern, root = _run(tmp_path, False), tmp_path / "run"
    rng = random.Random(0)
    with Other(other.as_store) as save:
        for look in LOOKS:
            most = 0, 0
            for _ in range(schedules):
                at, stop = (rng.randint(1, max(n, 1)) for n in most)
                shutil.copytree(pattern, root)
                try:
                    most = _interleave(root, other, look, at, save, stop)
                except AssertionError as e:
                    e.add_note(f"{look} at {at}, saves at {stop}")
                    raise
                shutil.rmtree(root)


def test_looks_in_the_midst_of_saves(tmp_path, other):
    _beside_saves(tmp_path, other, 2 if other.as_store else 6)


@pytest.mark.long
def test_looks_in_the_midst_of_saves_long(tmp_path, other):
    _beside_saves(tmp_path, other, 100)


def test_pairs_of_calls(tmp_path, other):
    some = random.Random(other.as_store).sample(PAIRS, 10)
    for number, (one, two) in enumerate(some):
        _play(tmp_path / str(number), other, one, two, 2)


@pytest.mark.long
@pytest.mark.parametrize("one, two", PAIRS)
def test_pairs_of_calls_everywhere(tmp_path, other, one, two):
    print(one, two, _play(tmp_path, other, one, two), "pauses")
