"""The directory of a run: its steps, what is known of them, and their deletion.

A step is a checkpoint at `<root>/<step>/default`, where Orbax's CheckpointManager has
one too. A pin is an empty file `<root>/eqx_ckpt.pins/<step>`.
"""

import contextlib
import operator
import os
import re
import secrets
from typing import Any

from . import _checkpoint, _clean, _commit, _delete, _store
from ._remote import Store
from ._store import Root


_ITEM = "default"
_PINS = "eqx_ckpt.pins"
_name = re.compile(r"0|[1-9][0-9]*")


class Steps:
    """All steps of a run. Nothing here knows of other processes."""

    def __init__(self, root: str | os.PathLike[str]):
        found = _store.resolve(root)
        if found.local is not None:
            found = _store.resolve(os.path.realpath(found.local))
        self.root = found
        self._store = root if isinstance(root, Store) else None
        self._known: dict[int, tuple[Any, dict[str, Any] | None]] = {}

    def path(self, step: int) -> str | Store:
        key = f"{check(step)}/{_ITEM}"
        return f"{self.root.url}/{key}" if self._store is None else self._store / key

    def _at(self, step: int) -> Root:
        return _commit.below(self.root, f"{step}/{_ITEM}")

    def directories(self) -> list[int]:
        tops = _store.list_top(self.root) or {}
        return [int(name) for name in tops if _name.fullmatch(name)]

    def complete(self) -> list[int]:
        """The complete steps, in order."""
        found = (s for s in self.directories() if self.signature(s) is not None)
        return sorted(found)

    def signature(self, step: int) -> Any:
        """What tells one save of a step from another; None if it is not complete."""
        root = self._at(step)
        try:
            if root.local is None:
                return _delete.exists(self.path(step)) or None
            found = _store.look(root, _store.INDEX)
        except ValueError:
            return None
        return found and (found.st_ino, found.st_mtime_ns, found.st_size)

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The metrics of a step; None if it cannot be opened."""
        signature = self.signature(step)
        was, metrics = self._known.get(step, (None, None))
        if signature is None or signature is True or signature != was:
            try:
                metadata = _checkpoint.open(self.path(step)).metadata
                found = metadata.get("metrics") if isinstance(metadata, dict) else None
                metrics = found if isinstance(found, dict) else {}
            except (OSError, ValueError):
                metrics = None
            self._known[step] = signature, metrics
        return metrics

    def may_be_ours(self, step: int) -> bool:
        """Whether a step that is not complete looks like one of our saves."""
        root = self._at(step)
        with contextlib.suppress(OSError):
            if {"d", _store.INDEX} & (_store.list_top(root) or {}).keys():
                return True
        return root.local is not None and bool(_commit.beside(root.local))

    def pins(self) -> set[int]:
        names = _store.list_top(_commit.below(self.root, _PINS)) or {}
        return {int(name) for name in names if _name.fullmatch(name)}

    def pin(self, step: int) -> None:
        if self.signature(step) is None:
            raise FileNotFoundError(f"There is no step {step} in `{self.root}`.")
        _store.make_directories(self.root, [_PINS])
        with contextlib.suppress(FileExistsError):
            _store.write_file(self.root, f"{_PINS}/{step}", [b""], sync=True)
        _store.sync_directories(self.root, [_PINS, ""])

    def unpin(self, step: int) -> None:
        _store.delete_tree(self.root, f"{_PINS}/{check(step)}")

    def is_linked(self, step: int) -> bool:
        local = self._at(step).local
        return local is not None and (local.is_symlink() or local.parent.is_symlink())

    def delete(self, step: int) -> None:
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

    def set_aside(self, step: int) -> None:
        """Renames a step whose index cannot be read: a save would not replace it."""
        path = self._at(step).local
        if path is None or self.signature(step) is None:
            return
        if self.metrics(step) is None:
            path.rename(path.with_name(f"{_ITEM}.damaged-{secrets.token_hex(4)}"))

    def _drop_empty(self, root: Root) -> None:
        if root.local is not None:
            with contextlib.suppress(OSError):
                root.local.parent.rmdir()


def check(step: Any) -> int:
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"A step must not be negative: {number}.")
    return number
