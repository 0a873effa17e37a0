"""The directory of a run: its steps, what is known of them, and their deletion.

A step is a checkpoint at `<root>/<step>/default`, where Orbax's CheckpointManager has
one too. A pin is a file `<root>/eqx_ckpt.pins/<step>`. In an object store it is
the same, by other means: there are no links, locks and renames, and each look at a step
is a request.

No link below the directory of the run is followed: a step that is one is not a step.
"""

import contextlib
import functools as ft
import operator
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .._format import _files, _json
from .._load import _checkpoint, _published
from .._save import _publish
from .._storage import _remote, _root, _store, _write
from .._storage._remote import Store
from .._storage._root import Root
from . import _clean


_ITEM = "default"
_PINS = "eqx_ckpt.pins"
# What Orbax has in each of its trees, and writes last of a step where nothing can be
# renamed.
_ORBAX, _ORBAX_DONE = "_METADATA", "commit_success.txt"
_MAX_METRICS = 2**20


class Signature(NamedTuple):
    """What tells one save of a step from another. `is_ours`: it is not one of Orbax."""

    stamp: Any
    is_ours: bool = True


class Known(NamedTuple):
    """What is known of a step: its signature, if it is complete; its metrics, if it can
    be opened; or the error because of which nobody knows."""

    signature: Signature | None
    metrics: dict[str, Any] | None = None
    error: OSError | None = None


class Skip(NamedTuple):
    """Why a step is not restored. `is_lost`: there was something to restore."""

    why: str
    is_lost: bool


class Steps:
    """All steps of a run. Nothing here knows of other processes."""

    def __init__(self, root: str | os.PathLike[str]):
        found = _root.resolve(root)
        if found.local is not None:
            found = _root.resolve(os.path.realpath(found.local))
        self.root = found
        self._store = root if isinstance(root, Store) else None
        self._known: dict[int, tuple[Any, dict[str, Any] | None]] = {}

    @property
    def cleans(self) -> bool:
        """Whether `clean` does anything: in an object store nobody can tell whether a
        step is still being saved."""
        return self.root.local is not None

    def path(self, step: int) -> str | Store:
        key = f"{check(step)}/{_ITEM}"
        return f"{self.root.url}/{key}" if self._store is None else self._store / key

    def _at(self, step: int) -> Root:
        return _root.below(self.root, f"{step}/{_ITEM}")

    def directories(self) -> list[int]:
        """**Raises:** `ValueError` where nobody can tell which there are."""
        if _remote.is_read_only(self.root.url):
            raise ValueError(
                f"Which steps there are in `{self.root}` cannot be told: over HTTP "
                "nothing is listed. Restore one that you know, with `step=`."
            )
        return _numbers(_store.list_top(self.root) or {})

    def complete(self) -> list[int]:
        """The complete steps, in order."""
        steps = sorted(self.directories())
        found = self._each(self.signature, steps)
        return [step for step, is_there in zip(steps, found) if is_there]

    def latest(self) -> int | None:
        """The newest complete step; older ones are not looked at."""
        for steps in self.listings():
            for step in steps:
                if self.signature(step):
                    return step
        return None

    def listings(self) -> Iterator[list[int]]:
        """The steps, the newest first; again, where they have changed meanwhile: what
        another process saves and deletes is then neither complete nor there."""
        before: list[int] | None = None
        for _ in range(10):
            steps = sorted(self.directories(), reverse=True)
            if steps == before:
                return
            yield steps
            before = steps

    def signature(self, step: int) -> Signature | None:
        """None of a step that is not complete, or leads through a link."""
        stamp = self._stamp(f"{step}/{_ITEM}/{_files.INDEX}")
        if stamp:
            return Signature(stamp)
        stamp = self._stamp(f"{step}/{_ITEM}/{_ORBAX}")
        if not stamp or self._is_left(step):
            return None
        if self.root.local is None and not self._stamp(f"{step}/{_ORBAX_DONE}"):
            return None
        return Signature(stamp, is_ours=False)

    def _stamp(self, key: str) -> Any:
        if self.root.local is None:
            return _store.stamp(self.root, key)
        try:
            found = _store.look(self.root, key)
        except ValueError:
            return None
        return found and (found.st_ino, found.st_mtime_ns, found.st_size)

    def _is_left(self, step: int) -> bool:
        """Whether a step without our index was once complete, and ours."""
        root = self._at(step)
        return bool(_published.saves(root)) or "eqx_ckpt.digests" in _tops(root)

    def survey(self, metrics: bool = True) -> dict[int, Known]:
        """What is known of each step, in order, with or without its metrics."""
        steps = sorted(self.directories())
        return dict(zip(steps, self._each(ft.partial(self._know, metrics), steps)))

    def _know(self, metrics: bool, step: int) -> Known:
        try:
            signature = self.signature(step)
            if signature is None or not metrics:
                return Known(signature)
            return Known(signature, self._metrics(step, signature))
        except OSError as e:
            return Known(None, error=e)

    def _metrics(self, step: int, signature: Signature) -> dict[str, Any] | None:
        was, metrics = self._known.get(step, (None, None))
        if signature != was:
            try:
                metrics = self._read_metrics(step, signature)
            except (FileNotFoundError, ValueError):
                metrics = None
            self._known[step] = signature, metrics
        return metrics

    def _read_metrics(self, step: int, signature: Signature) -> dict[str, Any]:
        if signature.is_ours:
            metadata = _checkpoint.open(self.path(step)).metadata
            found = metadata.get("metrics") if isinstance(metadata, dict) else None
        else:
            key = f"{step}/metrics/metrics"
            value = _store.read_file(self.root, key, limit=_MAX_METRICS)
            found = _json.parse(value.data, f"`{key}`") if value else None
        return found if isinstance(found, dict) else {}

    def _each(self, ask: Any, steps: Iterable[int]) -> list[Any]:
        return _store.gather(self.root, [ft.partial(ask, step) for step in steps])

    def skip(self, step: int) -> Skip | None:
        """What there is of a step that is not complete; None if that is nothing."""
        if self.is_linked(step):
            return Skip("it is a symbolic link, and a manager follows none", True)
        root = self._at(step)
        tops = _tops(root)
        if _files.INDEX in tops:
            return Skip(f"its `{_files.INDEX}` is not a file", True)
        if _ORBAX in tops or "eqx_ckpt.digests" in tops:
            return Skip("its save was not completed, or its index was deleted", True)
        if "d" in tops or _files.CLAIM in tops:
            return Skip("its save was not completed", False)
        if root.local is not None and _publish.beside(root.local):
            return Skip("its save was not completed", False)
        if "_CHECKPOINT_METADATA" in _tops(_root.below(self.root, str(step))):
            return Skip(f"Orbax has saved it without an item `{_ITEM}`", True)
        return None

    def pins(self) -> set[int]:
        self._check_pins()
        return set(_numbers(_store.list_top(_root.below(self.root, _PINS)) or {}))

    def _check_pins(self) -> None:
        local = self.root.local
        if local is not None and (local / _PINS).is_symlink():
            raise ValueError(
                f"`{_PINS}` in `{self.root}` is a symbolic link, and a manager follows "
                "none. Which steps are pinned cannot be told, and none is deleted."
            )

    def pin(self, step: int) -> None:
        step = check(step)
        self._check_pins()
        if self.signature(step) is None:
            raise FileNotFoundError(f"There is no step {step} in `{self.root}`.")
        _write.make_directories(self.root, [_PINS])
        with contextlib.suppress(FileExistsError):
            _write.write_file(self.root, f"{_PINS}/{step}", [b"\n"], sync=True)
        _write.sync_directories(self.root, [_PINS, ""])

    def unpin(self, step: int) -> None:
        step = check(step)
        self._check_pins()
        _write.delete_tree(self.root, f"{_PINS}/{step}")

    def is_linked(self, step: int) -> bool:
        local = self._at(step).local
        return local is not None and (local.is_symlink() or local.parent.is_symlink())

    def check_own(self, step: int) -> None:
        """**Raises:** `ValueError` for a step that leads through a link."""
        if self.is_linked(step):
            raise ValueError(
                f"`{self.path(step)}` leads through a symbolic link, and a manager "
                "follows none. It is left as it is."
            )

    def delete(self, step: int) -> None:
        step = check(step)
        if step in self.pins():
            raise ValueError(f"Step {step} is pinned. Call `unpin({step})` before.")
        self.check_own(step)
        found = self.signature(step)
        if found and not found.is_ours:
            raise ValueError(
                f"Step {step} of `{self.root}` was saved by Orbax, and is left as it "
                "is. Delete it with Orbax's own manager."
            )
        self.remove(step)

    def remove(self, step: int) -> None:
        root = self._at(step)
        _publish.remove(root)
        self._drop_empty(root)

    def clean(self, step: int) -> None:
        """Deletes what a killed save of a step has left, and a killed deletion."""
        root = self._at(step)
        if root.local is not None and not self.is_linked(step):
            with contextlib.suppress(FileNotFoundError):
                _clean.clean(root.local.parent)
            self._drop_empty(root)

    def set_aside(self, step: int, layout: str) -> None:
        """Moves a complete step away that a save of this layout would not replace."""
        root = self._at(step)
        if self.signature(step) is None:
            return
        try:
            found = _published.read_index(root)
        except ValueError:
            found = None
        # What a save would refuse to replace. See `_commit._check_swap`.
        is_fixed = root.local is None and "zarr" in (layout, found and found[0].layout)
        if found is None or is_fixed:
            away = f"{_ITEM}.damaged-{secrets.token_hex(4)}"
            above = _root.below(self.root, str(step))
            _write.move_tree(above, _ITEM, away, _files.INDEX)

    def _drop_empty(self, root: Root) -> None:
        if root.local is not None:
            with contextlib.suppress(OSError):
                root.local.parent.rmdir()


def _tops(root: Root) -> Mapping[str, bool]:
    with contextlib.suppress(NotADirectoryError):
        return _store.list_top(root) or {}
    return {}


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names if _clean.is_step(name)]


def check(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"A step must be an integer, not {step!r}.") from None
    if number < 0:
        raise ValueError(f"A step must not be negative: {number}.")
    return number
