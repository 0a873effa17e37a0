"""Blocks that change the state of the process, overlapping at random. No test is here.

`python -m support.overlaps SEED COUNT` makes so many sequences, each in an order of its
own: blocks of `register_leaf` in several tasks, runs with signals, saves that go on,
what a program itself does with the same settings, and forked children. It compares the
state of the process with a model of it, after each step and at the end.
"""

import contextvars
import gc
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import eqx_ckpt as ec
from support import inside


SIGNAL = signal.SIGUSR1


class Ratio:
    """A leaf type that blocks register, each with a tag of its own."""


class Slow:
    """A leaf whose save goes on until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def wait(self) -> float:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return 0.0


class Program:
    """What goes on at a time, and what there has to be."""

    def __init__(self, seed: int, directory: str):
        self._random, self._directory = random.Random(seed), directory
        self._tasks = [contextvars.Context() for _ in range(3)]
        self._ends: list[tuple[str, Any]] = []
        # Tags that are registered, by their number, with the number of their task.
        self._tags: dict[int, int] = {}
        self._managers: dict[int, ec.CheckpointManager] = {}
        self._told: set[int] = set()
        self._count = 0
        self._handled: list[str] = []
        self._expected: list[str] = []
        self._layers = ["program"]
        signal.signal(SIGNAL, lambda *_: self._handled.append("program"))
        self._calls, self._is_later = 0, False

    # ---- Steps.

    def begin_type(self) -> None:
        number, task = self._next(), self._random.randrange(3)
        context = self._tasks[task]
        to_leaf = lambda _: np.full(1, number)
        block = context.run(ec.register_leaf, Ratio, to_leaf, lambda x: Ratio())
        context.run(block.__enter__)
        self._tags[number] = task
        self._ends.append(("type", (number, context, block)))

    def end_type(self, number: int, context: Any, block: Any) -> None:
        context.run(block.__exit__, None, None, None)
        del self._tags[number]

    def begin_run(self) -> None:
        number = self._next()
        path = f"{self._directory}/{number}"
        self._managers[number] = ec.CheckpointManager(path, signals=[SIGNAL])
        self._ends.append(("run", (number,)))

    def end_run(self, number: int) -> None:
        manager = self._managers.pop(number)
        if self._random.random() < 0.5:
            manager.__exit__(None, None, None)
        del manager  # Or it is never ended.

    def begin_call(self) -> None:
        slow, path = Slow(), f"{self._directory}/{self._next()}"
        save = lambda: ec.tree_serialise_leaves(path, {"a": slow}, durable=False)
        thread = threading.Thread(target=save)
        thread.start()
        assert slow.has_begun.wait(60)
        self._begin(slow, thread.join)

    def begin_later(self) -> None:
        if self._is_later:  # They are written one after the other.
            return
        self._is_later = True
        slow, path = Slow(), f"{self._directory}/{self._next()}"
        with pytest.MonkeyPatch.context() as patch:
            inside.watch(patch, "write a save", lambda *_: slow.wait())
            handle = ec.async_tree_serialise_leaves(path, {"a": 1}, durable=False)
            assert slow.has_begun.wait(60)

        def wait() -> None:
            handle.result()
            self._is_later = False

        self._begin(slow, wait)

    def _begin(self, slow: Slow, wait: Any) -> None:
        self._calls += 1
        self._ends.append(("call", (slow, wait)))

    def end_call(self, slow: Slow, wait: Any) -> None:
        slow.may_end.set()
        wait()
        self._calls -= 1

    def change_settings(self) -> None:
        """As a program may at any time."""
        gc.set_threshold(self._random.randrange(500, 900))
        sys.setswitchinterval(self._random.randrange(200, 900) * 1e-6)
        self._settings = _settings()

    def switch_collector(self) -> None:
        self._random.choice([gc.enable, gc.disable])()
        self._is_enabled = gc.isenabled()

    def put_handler(self) -> None:
        """As one that calls the handler that it finds."""
        found: Any = signal.getsignal(SIGNAL)
        name = str(self._next())

        def handle(number: int, frame: Any) -> None:
            self._handled.append(name)
            found(number, frame)

        signal.signal(SIGNAL, handle)
        self._layers.append(name)

    def send(self) -> None:
        os.kill(os.getpid(), SIGNAL)
        self._told |= self._managers.keys()
        self._expected += reversed(self._layers)

    def fork(self) -> None:
        child = os.fork()
        if not child:
            status = 1
            try:
                self._managers.clear()
                os.kill(os.getpid(), SIGNAL)
                self._expected += reversed(self._layers)
                self._calls = 0
                self.check()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0

    def _next(self) -> int:
        self._count += 1
        return self._count

    # ---- The model.

    def check(self) -> None:
        assert ec.is_storable(Ratio()) == bool(self._tags)
        for task, context in enumerate(self._tasks if self._tags else ()):
            own = [tag for tag, of in self._tags.items() if of == task]
            tag = own[-1] if own else [*self._tags][-1]
            (saved,) = context.run(ec.to_state_dict, {"a": Ratio()}).values()
            assert saved == tag, (saved, tag)
        assert self._handled == self._expected
        for number, manager in self._managers.items():
            assert manager.should_stop() == (number in self._told)
        assert gc.isenabled() == self._is_enabled
        if not self._calls:
            assert _settings() == self._settings

    def run(self, steps: int) -> None:
        found = _settings(), signal.getsignal(SIGNAL)
        self._settings, self._is_enabled = found[0], gc.isenabled()
        begins = [self.begin_type, self.begin_run, self.begin_call, self.begin_later]
        acts = [self.change_settings, self.switch_collector, self.put_handler]
        for _ in range(steps):
            kind = self._random.choice(["begin", "begin", "end", "end", "act", "send"])
            if kind == "begin":
                self._random.choice(begins)()
            elif kind == "end" and self._ends:
                self._end(self._random.randrange(len(self._ends)))
            elif kind == "act":
                self._random.choice([*acts, self.fork])()
            elif kind == "send":
                self.send()
            self.check()
        while self._ends:
            self._end(self._random.randrange(len(self._ends)))
        self.check()
        gc.collect()
        if len(self._layers) == 1:
            assert signal.getsignal(SIGNAL) is found[1]

    def _end(self, which: int) -> None:
        kind, facts = self._ends.pop(which)
        getattr(self, f"end_{kind}")(*facts)


def _settings() -> tuple[Any, ...]:
    return gc.get_threshold(), sys.getswitchinterval()


if __name__ == "__main__":
    directory, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    ec.register_leaf(Slow, Slow.wait, lambda x: x)
    for number in range(seed, seed + count):
        print(number, flush=True)
        Program(number, f"{directory}/{number}").run(40)
