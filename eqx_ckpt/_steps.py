"""The directory of a run: its steps, what is known of them, and their deletion.

A step is a checkpoint at `<root>/<step>/default`, where Orbax's CheckpointManager has
one too. A pin is a file `<root>/eqx_ckpt.pins/<step>`. In an object store it is
the same, by other means: there are no links, locks and renames, and each look at a step
is a request.
"""

import contextlib
import functools as ft
import operator
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from . import _checkpoint, _clean, _commit, _remote, _root, _store, _write
from ._remote import Store
from ._root import Root


_ITEM = "default"
_PINS = "eqx_ckpt.pins"


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
        return _commit.below(self.root, f"{step}/{_ITEM}")

    def directories(self) -> list[int]:
        """**Raises:** `ValueError` where nobody can tell which there are."""
        if _remote.is_read_only(self.root.url):
            raise ValueError(
                f"Which steps there are in `{self.root}` cannot be told: over HTTP "
                "nothing is listed. Restore one that you know, with `step=`."
            )
        return _numbers(_store.list_top(self.root) or {})

    def signatures(self) -> dict[int, Any]:
        """The `signature` of each directory, in order."""
        steps = sorted(self.directories())
        return dict(zip(steps, self._each(self.signature, steps)))

    def complete(self) -> list[int]:
        """The complete steps, in order."""
        return [step for step, found in self.signatures().items() if found is not None]

    def signature(self, step: int) -> Any:
        """What tells one save of a step from another; None if it is not complete."""
        root = self._at(step)
        if root.local is None:
            return _store.stamp(root, _root.INDEX) or None
        try:
            found = _store.look(root, _root.INDEX)
        except ValueError:
            return None
        return found and (found.st_ino, found.st_mtime_ns, found.st_size)

    def metrics(self, signatures: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
        """The metrics of complete steps, but for those that cannot be opened.

        **Raises:** `OSError` where it is not known whether they can be.
        """
        complete = [step for step, found in signatures.items() if found is not None]
        found = self._each(lambda step: self._metrics(step, signatures[step]), complete)
        return {step: of for step, of in zip(complete, found) if of is not None}

    def _metrics(self, step: int, signature: Any) -> dict[str, Any] | None:
        was, metrics = self._known.get(step, (None, None))
        if signature != was:
            try:
                metadata = _checkpoint.open(self.path(step)).metadata
                found = metadata.get("metrics") if isinstance(metadata, dict) else None
                metrics = found if isinstance(found, dict) else {}
            except (FileNotFoundError, ValueError):
                metrics = None
            self._known[step] = signature, metrics
        return metrics

    def _each(self, ask: Any, steps: Iterable[int]) -> list[Any]:
        return _store.gather(self.root, [ft.partial(ask, step) for step in steps])

    def may_be_ours(self, step: int) -> bool:
        """Whether a step that is not complete looks like one of our saves."""
        root = self._at(step)
        tops: Mapping[str, bool] = {}
        with contextlib.suppress(NotADirectoryError):
            tops = _store.list_top(root) or {}
        if {"d", _root.INDEX, _commit.CLAIM} & tops.keys():
            return True
        return root.local is not None and bool(_commit.beside(root.local))

    def pins(self) -> set[int]:
        return set(_numbers(_store.list_top(_commit.below(self.root, _PINS)) or {}))

    def pin(self, step: int) -> None:
        step = check(step)
        if self.signature(step) is None:
            raise FileNotFoundError(f"There is no step {step} in `{self.root}`.")
        _write.make_directories(self.root, [_PINS])
        with contextlib.suppress(FileExistsError):
            _write.write_file(self.root, f"{_PINS}/{step}", [b"\n"], sync=True)
        _write.sync_directories(self.root, [_PINS, ""])

    def unpin(self, step: int) -> None:
        _write.delete_tree(self.root, f"{_PINS}/{check(step)}")

    def is_linked(self, step: int) -> bool:
        local = self._at(step).local
        return local is not None and (local.is_symlink() or local.parent.is_symlink())

    def delete(self, step: int) -> None:
        step = check(step)
        if step in self.pins():
            raise ValueError(f"Step {step} is pinned. Call `unpin({step})` before.")
        if self.is_linked(step):
            raise ValueError(
                f"`{self.path(step)}` leads through a symbolic link, and nothing is "
                "deleted through one."
            )
        self.remove(step)

    def remove(self, step: int) -> None:
        root = self._at(step)
        _commit.remove(root)
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
            found = _commit.read_index(root)
        except ValueError:
            found = None
        # See `_commit._check_swap`.
        is_fixed = root.local is None and "zarr" in (layout, found and found[0].layout)
        if found is None or is_fixed:
            away = f"{_ITEM}.damaged-{secrets.token_hex(4)}"
            above = _commit.below(self.root, str(step))
            _write.move_tree(above, _ITEM, away, _root.INDEX)

    def _drop_empty(self, root: Root) -> None:
        if root.local is not None:
            with contextlib.suppress(OSError):
                root.local.parent.rmdir()


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
