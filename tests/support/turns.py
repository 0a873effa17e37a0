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
        self.count, self.error, self.is_over = 0, None, False
        self._at, self._call = at, call
        # Each is released once for each time that the other is waited for.
        self._may_go, self._has_gone = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        _own.turn = self
        self._may_go.acquire()
        try:
            self._call()
        except BaseException as e:
            self.error = e
        self.is_over = True
        self._has_gone.release()

    def go(self) -> None:
        if not self.is_over:
            self._may_go.release()
            self._has_gone.acquire()

    def end(self) -> None:
        while not self.is_over:
            self.go()

    def step(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._has_gone.release()
            self._may_go.acquire()


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
