"""A call in another process, which pauses before one of its calls to the store, so that
another call can be made in between, or a part of one.

This runs as that other process. `CALLS` are made on a run with the steps 1, 2 and 3.
"""

import contextlib
import inspect
import json
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import eqx_ckpt as ec
from eqx_ckpt._kernel._run._manager import CheckpointManager
from eqx_ckpt._kernel._storage._backend import Backend
from eqx_ckpt._kernel._storage._local import LocalDirectory
from eqx_ckpt._stores._buckets import BucketBackend
from support import scripts
from support.killing import without_rename


def tree(step: int) -> dict[str, Any]:
    return {"x": np.full(5, step), "step": step}


def _save(step: int, **how: Any) -> Callable[[pathlib.Path], Any]:
    def call(root: pathlib.Path) -> Any:
        options = {"keep": how["keep"]} if "keep" in how else {}
        manager = CheckpointManager(root, reuse=False, **options)
        manager.save(step, tree(step), {"loss": -step}, force=how.get("force", False))
        manager.wait()

    return call


def _anew(root: pathlib.Path) -> Any:
    """The newest step cannot be read, and is saved anew."""
    manager = CheckpointManager(root)
    manager.restore(tree(0))
    _save_with(manager, 3)


def _save_with(manager: CheckpointManager, step: int) -> None:
    manager.save(step, tree(step), {"loss": -step})
    manager.wait()


def _looked(root: pathlib.Path) -> list[int]:
    """What calls say that look for a step: each has to find one."""
    tree_, at = CheckpointManager(root).restore(tree(0))
    assert (tree_["x"] == at).all() and tree_["step"] == at
    return [at]


def _twice(root: pathlib.Path) -> Any:
    with CheckpointManager(root, keep=1, reuse=False) as manager:
        for step in (4, 5):
            _save_with(manager, step)


def _delete_run(root: pathlib.Path) -> None:
    (root / "a.zip").unlink(missing_ok=True)  # Which is no part of it.
    ec.delete(root)


def _delete_path(root: pathlib.Path) -> None:
    ec.delete(root / "2/default")
    with contextlib.suppress(OSError):  # A pin waits for its lock there.
        (root / "2").rmdir()


def _save_and_pin(root: pathlib.Path) -> None:
    manager = CheckpointManager(root, reuse=False)
    _save_with(manager, 4)
    manager.pin(4)


def _add_files_for_orbax(root: pathlib.Path) -> None:
    for step in (2, 3):
        ec.write_orbax(root / f"{step}/default")


CALLS: dict[str, Callable[[pathlib.Path], Any]] = {
    "save": _save(4, keep=1),
    "save another": _save(5, keep=1),
    "save two": _twice,
    "replace": _save(3, force=True),
    "begin anew": _save(0, keep=2),
    "save the damaged one": _anew,
    "put a good one there": lambda root: ec.tree_serialise_leaves(
        root / "3/default", tree(3), metadata={"step": 3}
    ),
    "save a zip": lambda root: ec.tree_serialise_leaves(root / "a.zip", tree(1)),
    "delete a zip": lambda root: ec.delete(root / "a.zip"),
    "delete the run": lambda root: _delete_run(root),
    "save and pin": lambda root: _save_and_pin(root),
    "pin": lambda root: CheckpointManager(root).pin(2),
    "for Orbax": _add_files_for_orbax,
    "for Orbax, too": _add_files_for_orbax,
    "replace by zarr": lambda root: ec.tree_serialise_leaves(
        root / "3/default", tree(3), metadata={"step": 3}, layout="zarr"
    ),
    "delete": lambda root: CheckpointManager(root).delete(2),
    "delete its path": lambda root: _delete_path(root),
    "latest": lambda root: CheckpointManager(root).latest(),
    "steps": lambda root: CheckpointManager(root).steps(),
    "best": lambda root: CheckpointManager(root, best=("loss", "min")).best(),
    "restore": lambda root: _looked(root),
    "open": lambda root: ec.open(root).metadata["step"],
    "clean": lambda root: ec.clean(root, idle=False),
}
LOOKS = "latest", "steps", "best", "restore", "open"


def outcome(name: str, root: pathlib.Path) -> list[Any]:
    """What came of a call: its result, or the type and text of its error. For those
    that look, a warning is one: nothing was ever killed or damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if name in LOOKS else "ignore", UserWarning)
        try:
            return ["", CALLS[name](root)]
        except Exception as e:
            return [type(e).__name__, str(e)]


class Other:
    """The other process."""

    def __init__(self, as_store: bool):
        self.as_store = as_store
        self._process = scripts.server(
            "support.pauses", int(as_store), JAX_PLATFORMS="cpu"
        )

    def __enter__(self) -> "Other":
        return self

    def __exit__(self, *_: Any) -> None:
        with self._process:
            self._process.communicate()

    def say(self, *words: Any) -> None:
        print(json.dumps(words), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        return json.loads(self._process.stdout.readline())

    def finish(self, said: Any) -> Any:
        """Goes on from a pause. Returns how many calls there were, and the outcome."""
        if said != "paused":
            return said
        self.say()
        return self.hear()


class CallsToStore:
    """Counts calls to the store, and does something before one of them."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.count, self.at = 0, 0
        self._act, self._lock = act, threading.Lock()
        for kind in (LocalDirectory, BucketBackend):
            for name, method in inspect.getmembers(Backend, inspect.isfunction):
                if name[0] != "_" and hasattr(kind, name):
                    setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                is_due = self.count == self.at
            if is_due:
                self._act()
            return method(*args, **kwargs)

        return counted


def _pause() -> None:
    print(json.dumps("paused"), flush=True)
    sys.stdin.readline()


@contextlib.contextmanager
def stores(as_store: bool) -> Iterator[None]:
    """Directories are as they are, or as in an object store, without locks, links and
    renames."""
    with without_rename() if as_store else contextlib.nullcontext():
        yield


def main() -> None:
    pauses = CallsToStore(_pause)
    with stores(sys.argv[1] == "1"):
        for line in sys.stdin:
            name, root, at = json.loads(line)
            pauses.count, pauses.at = 0, at
            done = outcome(name, pathlib.Path(root))
            print(json.dumps([pauses.count, done]), flush=True)


if __name__ == "__main__":
    main()
