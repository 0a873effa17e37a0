"""Random schedules of calls of many real processes, some of which go wrong.

Each schedule is a few bad calls to paths of its own, and then ten good ones. All
processes know it, and each does its part: this runs as a program of each. What came of
it they write into a file each; `check` looks at these, and at what is on disk.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt as ec
from eqx_ckpt._kernel._load import _read_leaves
from eqx_ckpt._kernel._save import _to_ocdbt


# Seconds, of calls that somebody may leave, and of those that all make.
TIMEOUT, LONG = 5, 60
KINDS = ["save", "save", "async", "load", "manager", "stop", "restore"]
# What a process does with a call.
PARTS = ["make"] * 6 + ["skip", "fail", "late", "tree", "path", "break"]


def plan(seed: int, size: int, kills: bool) -> list[dict[str, Any]]:
    """The bad calls of a schedule: of each its kind, and what each process does. With
    `kills`, one of the processes ends at some instant of the last."""
    rng = random.Random(seed)
    calls = []
    for number in range(rng.choice([1, 2, 3])):
        kind = rng.choice(KINDS)
        parts = [
            rng.choice(PARTS) if rng.random() < 0.4 else "make" for _ in range(size)
        ]
        calls.append(
            {
                "kind": kind,
                "parts": parts,
                "tag": rng.random() < 0.5,
                "number": number,
                "kill": None,
            }
        )
    if kills:
        calls[-1]["kind"] = rng.choice(["save", "async", "manager"])
        calls[-1]["parts"] = ["make"] * size
        calls[-1]["kill"] = [rng.randrange(1, size), rng.random()]
    return calls


class Player:
    """A process of a run, which plays one schedule after the other."""

    def __init__(self, path: pathlib.Path, rank: int, size: int):
        self.path, self.rank, self.size = path, rank, size
        self.mesh = Mesh(np.asarray(jax.devices()), ("x",))
        self.rows = NamedSharding(self.mesh, P("x"))
        self.copies = NamedSharding(self.mesh, P())

    def tree(self, step: int, part: str = "make") -> dict[str, Any]:
        """A tree all of which says of what step it is."""
        x = np.full((12, 64), step, np.float32)
        tree: dict[str, Any] = {
            name: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
            for name, sharding in (("rows", self.rows), ("copies", self.copies))
        }
        tree["step"] = step
        if part == "tree":
            tree["step"] = -1
            tree["other"] = np.arange(3)
        if part == "fail":
            tree["bad"] = np.array([None])
        return tree

    def like(self) -> dict[str, Any]:
        def abstract(sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((12, 64), jnp.float32, sharding=sharding)

        return {"rows": abstract(self.rows), "copies": abstract(self.copies), "step": 0}

    def meet(self, name: str) -> None:
        """All processes wait for all, not by what is tested."""
        (self.path / f"{name}-{self.rank}").touch()
        while not all((self.path / f"{name}-{r}").exists() for r in range(self.size)):
            time.sleep(0.01)

    def play(self, seed: int, kills: bool) -> None:
        here = self.path / str(seed)
        here.mkdir(exist_ok=True)
        outcomes: list[list[str]] = []
        together = ec.Together(timeout=TIMEOUT)
        manager = ec.CheckpointManager(here / "run", processes=together)
        calls = plan(seed, self.size, kills)
        for step, call in enumerate(calls, 1):
            part = call["parts"][self.rank]
            outcomes.append([part, self._outcome(here, manager, step, call, part)])
        if kills:
            (here / f"done-{self.rank}").write_text(json.dumps({"outcomes": outcomes}))
            # The runtime would wait for all, and end the others without process 0.
            victim, left = calls[-1]["kill"][0], time.monotonic() + 30
            others = {*range(1, self.size)} - {victim}
            while self.rank == 0 and time.monotonic() < left:
                if all((here / f"done-{rank}").exists() for rank in others):
                    break
                time.sleep(0.1)
            os._exit(0)
        waited = ""
        try:
            manager.wait()
        except (RuntimeError, OSError) as e:
            waited = f"{type(e).__name__}: {e}"
        self.meet(f"met-{seed}")
        manager._saves.run_processes.together = ec.Together(timeout=LONG)
        good = []
        for step in range(101, 111):
            call = {"kind": KINDS[step % len(KINDS)], "tag": step % 2, "kill": None}
            call["timeout"] = LONG
            good.append(self._outcome(here, manager, step, call, "make"))
        manager.wait()
        done = {"outcomes": outcomes, "waited": waited, "good": good}
        (here / f"done-{self.rank}").write_text(json.dumps(done))

    def _outcome(self, here: Any, manager: Any, step: int, call: Any, part: str) -> str:
        if part == "skip":
            return "skipped"
        if part == "late":
            time.sleep(random.Random(f"{here}{step}").random() * 1.5 * TIMEOUT)
        try:
            self._make(here, manager, step, call, part)
        except (RuntimeError, TypeError, ValueError, OSError) as e:
            return f"{type(e).__name__}: {e}"
        return ""

    def _make(self, here: Any, manager: Any, step: int, call: Any, part: str) -> None:
        tag = step if call["tag"] else None
        place = here / ("other" if part == "path" else "c")
        tree = self.tree(step, part)
        together = ec.Together(tag, call.get("timeout", TIMEOUT))
        kind = call["kind"]
        with self._faults(call, part):
            if kind == "save":
                ec.tree_serialise_leaves(place, tree, processes=together)
            elif kind == "async":
                ec.async_tree_serialise_leaves(place, tree, processes=together).result()
            elif kind == "load":
                like = self.like()
                if part == "fail":
                    like["more"] = 0
                source = self.path / ("start2" if part == "path" else "start")
                ec.tree_deserialise_leaves(source, like, processes=together)
            elif kind == "manager":
                step += 50 * (part == "path")
                bad = {"loss": object()} if part == "fail" and step % 2 else {}
                tree = self.tree(step, "make" if bad else part)
                manager.save(step, tree, bad, force=True)
                # Else what goes wrong is told by it, or by a later one.
                if tag is not None or call["kill"] is not None:
                    manager.wait()
            elif kind == "stop":
                assert not manager.should_stop()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        own = dataclasses.replace(together, tag=None)
                        out, at = manager.restore(self.like(), processes=own)
                    except FileNotFoundError:
                        return
                assert_of(out, at)

    @contextlib.contextmanager
    def _faults(self, call: Any, part: str) -> Any:
        """A disk that breaks under a save or a load, or the end of a process."""
        was = _to_ocdbt.write, _read_leaves.read_leaves

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise OSError(5, "the disk is broken")

        if part == "break":
            _to_ocdbt.write = _read_leaves.read_leaves = broken
        is_last = call["kill"] is not None and call["kill"][0] == self.rank
        if is_last:
            end = threading.Timer(0.2 * call["kill"][1], os.kill, [os.getpid(), 9])
            end.start()
        try:
            yield
        finally:
            _to_ocdbt.write, _read_leaves.read_leaves = was
            if is_last:
                time.sleep(60)


def assert_of(tree: Any, step: int) -> None:
    """All that this process has of a tree is of one step."""
    assert tree["step"] == step, (tree["step"], step)
    for name in ("rows", "copies"):
        for shard in tree[name].addressable_shards:
            assert (np.asarray(shard.data) == step).all(), (name, step)


def check(path: pathlib.Path, seed: int, size: int, kills: bool) -> list[str]:
    """What ought not to have come of a schedule."""
    here, faults = path / str(seed), []
    for place in [here / "c", here / "other", *here.glob("run/*/default")]:
        if not (place / "eqx_ckpt.json").exists():
            continue
        if ec.verify(place):
            faults.append(f"{place} is damaged")
        saved = ec.materialise(ec.open(place).tree)
        numbers = set(np.unique(saved["rows"])) | set(np.unique(saved["copies"]))
        if len(numbers) != 1 or numbers != {saved["step"]}:
            faults.append(f"{place} is of {sorted(numbers)}, and {saved['step']}")
    ranks = range(size)
    if kills:
        victim = plan(seed, size, kills)[-1]["kill"][0]
        ranks = [rank for rank in ranks if rank != victim]
    done = [json.loads((here / f"done-{r}").read_text()) for r in ranks]
    for number, calls in enumerate(zip(*[d["outcomes"] for d in done])):
        states = {bool(error) for _, error in calls}
        call = plan(seed, size, kills)[number]
        kind = call["kind"]
        if kind == "manager" and not call["tag"]:
            later = [[e for _, e in d["outcomes"][number:]] for d in done]
            states = {any(es) or bool(d.get("waited")) for es, d in zip(later, done)}
        if len(states) > 1 and kind not in ("stop", "load", "restore"):
            faults.append(f"call {number}, {kind}: {calls}")
    for number, errors in enumerate(zip(*[d.get("good", []) for d in done])):
        if any(errors):
            faults.append(f"good call {number}: {errors}")
    return [f"schedule {seed} of {size}: {fault}" for fault in faults]


def start(path: pathlib.Path, rank: int, size: int) -> Player:
    player = Player(path, rank, size)
    for name in ("start", "start2"):
        ec.tree_serialise_leaves(path / name, player.tree(1))
    return player
