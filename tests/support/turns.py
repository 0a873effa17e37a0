"""Calls that take turns in one process, on a store in memory: each is made by a thread
that pauses before one of its calls to the store."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from eqx_ckpt._kernel._storage import _store
from eqx_ckpt._kernel._storage._backend import Backend
from eqx_ckpt._kernel._storage._objects import ObjectStore


class Turn:
    """A call, which pauses before its call number `at` to the store: `go()` until then
    or to its end. `count` counts them; `error` is what it has raised."""

    def __init__(self, call: Callable[[], Any], at: int):
        self.count, self.error = 0, None
        self._at, self._go, self._said = at, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call,))

    def _run(self, call: Callable[[], Any]) -> None:
        _own.turn = self
        try:
            call()
        except Exception as e:
            self.error = e
        self._said.set()

    def go(self) -> None:
        self._said.clear()
        self._go.set()
        if self._thread.ident is None:
            self._thread.start()
        self._said.wait()

    def end(self) -> None:
        while self._thread.ident is None or self._thread.is_alive():
            self.go()
            self._thread.join(0.001)

    def step(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._go.clear()
            self._said.set()
            self._go.wait()


_own = threading.local()


def watch(patch: pytest.MonkeyPatch) -> None:
    """Lets calls to a store be counted. None of them is made by a helper then."""
    patch.setattr(_store, "gather", lambda root, jobs: [job() for job in jobs])
    for name, _ in inspect.getmembers(Backend, inspect.isfunction):
        if name[0] != "_" and name in vars(ObjectStore):
            patch.setattr(ObjectStore, name, _counted(vars(ObjectStore)[name]))


def _counted(method: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if turn := getattr(_own, "turn", None):
            turn.step()
        return method(*args, **kwargs)

    return counted
