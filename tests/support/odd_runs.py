"""Runs in a store that answers oddly, now and then, through random calls. No test is
here.

`python -m support.odd_runs KIND FIRST LAST` makes the runs of some seeds in a store of
the kind "s3", "gs" or "az", and prints what is wrong.

After each call all is looked at: a step that was there holds what was saved last, or
has been deleted by a call or by `keep`. Where a call has raised an error, what it was
to do is done or not. A pin stays, and its step with it.
"""

import itertools
import random
import sys
import threading
import warnings
from typing import Any

import numpy as np

import eqx_ckpt as ec
from support.odd_answers import tree, world_of
from support.servers import BUCKETS, Proxy
from support.stores import StoredFiles


_DRIVERS = {"s3": "s3", "gs": "gcs", "az": "azure"}
# What is tried again; and what is answered at most once in a call.
_AGAIN = (429, 500, 503, "drop", "lose")
_ONCE = ("short", "empty", "404", "304", "412", "done, 412", 403)


class _Faults:
    """Answers some requests of a call oddly: for a while, now and then, or once."""

    def __init__(self, rng: random.Random, kind: str):
        self._rng, self._kind, self._lock = rng, kind, threading.Lock()
        self._count = itertools.count()
        self._again = rng.sample(_AGAIN, 2) if rng.random() < 0.6 else []
        self._once = [] if self._again and rng.random() < 0.5 else [rng.choice(_ONCE)]
        self._rate, self._at = rng.choice([0.02, 0.1, 0.3]), rng.randrange(30)
        self._end = self._at + rng.choice([1, 5, 20, 1000])
        self._only = rng.choice([None, None, "GET", "HEAD", "PUT", "DELETE"])
        self.log: list[tuple[Any, ...]] = []

    def __call__(self, method: str, path: str) -> Any:
        with self._lock:
            number = next(self._count)
            if self._only not in (None, method):
                return None
            answer: Any = None
            if self._once and number >= self._at:
                answer = self._once.pop()
            elif self._again and self._at <= number < self._end:
                if self._rng.random() < max(self._rate, self._end > 500):
                    answer = self._rng.choice(self._again)
            # TensorStore ends the process.
            is_odd = answer == "304" and self._kind == "gs"
            if answer is None or is_odd:
                return None
            self.log.append((answer, method, path.partition("?")[0][-60:]))
            return answer


class _Run:
    """A run, and what may be there: the values of each step, None for none, and whether
    it is pinned."""

    def __init__(self, kind: str, root: ec.Store, rng: random.Random):
        self.kind, self.root, self.rng = kind, root, rng
        self.keep = rng.choice([None, 1, 2, 3])
        fixed = {"layout": "zarr"} if rng.random() < 0.3 else {}
        self.options: dict[str, Any] = {"keep": self.keep, **fixed}
        self.manager = ec.CheckpointManager(root, **self.options)
        self.values: dict[int, set[int | None]] = {}
        self.pins: dict[int, set[bool]] = {}
        self.last, self.value, self.said = 0, 0, [str(self.options)]

    def call(self, proxy: Proxy) -> None:
        """Makes a call, and looks at what has come of it."""
        there = [step for step, of in self.values.items() if of != {None}]
        names = ["save"] * 5 + ["restore", "latest", "anew"]
        if there:
            names += "force delete delete pin pin unpin verify clean away".split()
        name, step = self.rng.choice(names), max([0, *there])
        if name == "save":
            step = self.last = self.last + 1
        elif there and name != "force":  # An older one would begin an attempt.
            step = self.rng.choice(there)
        faults = _Faults(self.rng, self.kind)
        if self.rng.random() < 0.7:
            proxy.fault = faults
        self.value += 1
        error = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(self, f"_{name}")(step)
        except (OSError, ValueError) as e:
            error = e
        finally:
            proxy.fault = lambda *_: None
        self.said.append(f"{name} {step}: {error!r}, {faults.log}")
        if error is not None:
            is_pinned = "pinned" in str(error) and self.pins.get(step) == {True}
            is_fixed = "layout" in self.options and name == "force"
            is_gone = isinstance(error, FileNotFoundError) and not there
            assert is_pinned or is_fixed or is_gone or faults.log, error
            assert isinstance(error, OSError) or is_pinned or is_fixed, error
        self._note(name, step, error is not None)
        self._look()

    def _note(self, name: str, step: int, is_unsure: bool) -> None:
        """Notes what a call may have changed, or has."""
        of, pins = self.values.get(step, {None}), self.pins.get(step, {False})
        value: set[int | None] = {self.value}
        if name in ("save", "force"):
            self.values[step] = of | value if is_unsure else value
            newer = sorted(s for s, of in self.values.items() if of != {None})
            for old in newer[: -self.keep] if self.keep else ():
                if self.pins.get(old) != {True} and old != step:
                    self.values[old] = self.values[old] | {None}
        elif name in ("delete", "away"):
            assert is_unsure or pins != {True}, "a pinned step was deleted"
            if pins != {True}:
                self.values[step] = of | {None} if is_unsure else {None}
        elif name in ("pin", "unpin"):
            now = {name == "pin"}
            self.pins[step] = pins | now if is_unsure else now

    def _look(self) -> None:
        """Looks at all steps, and at the pins."""
        manager = ec.CheckpointManager(self.root)
        there = manager.steps()
        for step, of in self.values.items():
            found = None
            if step in there:
                path = manager.path(step)
                loaded = ec.tree_deserialise_leaves(path, tree(0))
                found = loaded["value"]
                wanted = tree(found)
                assert all(np.array_equal(loaded[x], wanted[x]) for x in wanted)
                assert ec.open(path).metadata["note"] == found
                assert ec.verify(path) == []
            assert found in of, f"step {step} is {found}, and not of {of}"
            self.values[step] = {found}
        assert {*there} <= {*self.values}
        keys = [*StoredFiles(self.root)]
        for step, of in self.pins.items():
            is_pinned = f"eqx_ckpt.pins/{step}" in keys
            assert is_pinned in of, f"step {step} is pinned: {is_pinned}"
            self.pins[step] = {is_pinned}

    # ---- The calls.

    def _save(self, step: int, force: bool = False) -> None:
        metadata = {"note": self.value}
        self.manager.save(step, tree(self.value), metadata=metadata, force=force)
        self.manager.wait()

    def _force(self, step: int) -> None:
        self._save(step, force=True)

    def _restore(self, _: int) -> None:
        loaded, step = ec.CheckpointManager(self.root).restore(tree(0))
        assert loaded["value"] in self.values[step]
        assert step == max(s for s, of in self.values.items() if of != {None})

    def _latest(self, _: int) -> None:
        there = [s for s, of in self.values.items() if of != {None}]
        assert self.manager.latest() == max(there, default=None)

    def _anew(self, _: int) -> None:
        self.manager = ec.CheckpointManager(self.root, **self.options)

    def _delete(self, step: int) -> None:
        self.manager.delete(step)

    def _away(self, step: int) -> None:
        ec.delete(self.manager.path(step))

    def _pin(self, step: int) -> None:
        self.manager.pin(step)

    def _unpin(self, step: int) -> None:
        self.manager.unpin(step)

    def _verify(self, step: int) -> None:
        assert ec.verify(self.manager.path(step)) == []

    def _clean(self, _: int) -> None:
        ec.clean(self.root, idle=True)


def run(proxy: Proxy, kind: str, seed: int, calls: int = 12) -> None:
    """Makes calls of a run. **Raises:** `AssertionError` for what is wrong."""
    retries = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "1ms"}
    url = f"{BUCKETS[kind]}/odd-runs/{seed}"
    root = ec.Store(url, **{f"{_DRIVERS[kind]}_request_retries": retries})
    some = _Run(kind, root, random.Random(seed))
    try:
        for _ in range(calls):
            some.call(proxy)
    except Exception as e:
        e.add_note("\n".join([f"seed {seed}", *some.said]))
        raise


def main(kind: str, first: str, last: str) -> None:
    with world_of(kind) as world:
        for seed in range(int(first), int(last)):
            run(world.proxy, kind, seed)


if __name__ == "__main__":
    main(*sys.argv[1:])
