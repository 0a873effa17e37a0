"""Directories that saves are written in beside their paths, and leftovers among all
directories of saves: those that nobody locks, as their writers were killed."""

import contextlib
import os
from collections.abc import Callable

from .._format import _files, _index, _layouts
from .._runtime import _log
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from .._storage._root import LONGEST_NAME


# What is added to a name here, in bytes.
_ADDED = len(".eqx_ckpt-") + 16


def directory_of(root: LocalDirectory, save: str) -> LocalDirectory:
    """Where a save is written that is to be swapped in: beside its path."""
    return root.parent().below(f"{_stem(root.name)}.eqx_ckpt-{save}")


def _stem(name: str) -> str:
    """The beginning of the names of such directories: the name of the path, or a part
    of it and a digest if it is long."""
    data = os.fsencode(name)
    if len(data) + _ADDED <= LONGEST_NAME:
        return name
    return f"{data[:160].decode(errors='ignore')}%~{_index.digest(data)}"


def beside(root: Backend) -> list[LocalDirectory]:
    """The directories, beside a path, of saves to it."""
    if not isinstance(root, LocalDirectory):
        return []
    return beside_all(root.parent(), f"{_stem(root.name)}.eqx_ckpt-")


def beside_all(directory: LocalDirectory, prefix: str = "") -> list[LocalDirectory]:
    """The directories of saves to any path in a directory; or to one path, if `prefix`
    is how their names begin. In a checkpoint whose leaves have directories there are
    none: what has such a name there is a leaf or a node."""
    with contextlib.suppress(OSError):
        # Of a save to a path among 10,000, this takes most of the time.
        names = [name for name in directory.names() if name.startswith(prefix)]
        found = [directory.below(name) for name in names if _files.is_beside(name)]
        if found and directory.below(_files.DIGESTS).entry() == "nothing":
            return [p for p in found if not p.is_link() and not _is_of_leaf(p)]
    return []


# The names that directories of leaves have in them, and no checkpoint at its root, but
# for leaves of such names.
_CHUNKS = _layouts.MEMBERS - _files.SIDE


def _is_of_leaf(directory: Backend) -> bool:
    """Whether a directory is that of a leaf, in what is left of a checkpoint."""
    try:
        names = (directory.list_top() or {}).items()
        chunks = [(n, is_dir) for n, is_dir in names if n in _CHUNKS]
        below = lambda name: directory.below(name).list_top() or {}
        inside = {x for n, is_dir in chunks for x in (below(n) if is_dir else [""])}
    except (OSError, ValueError):
        return True  # Nobody knows.
    return bool(inside) and inside.isdisjoint(_layouts.MEMBERS)


def delete_abandoned(
    directory: LocalDirectory,
    remove: bool = True,
    unless: Callable[[], bool] | None = None,
) -> bool:
    """Deletes a directory whose writer is gone: nobody holds its lock. It stays where
    there are no locks, and where `unless`, called under the lock, is true.

    Returns whether it is a leftover, and with `remove`, whether it is deleted. If not
    `remove`, nothing is deleted.
    """
    if directory.is_link():
        return False
    with contextlib.suppress(OSError), directory.lock() as is_locked:
        if not is_locked or (unless is not None and unless()):
            return False
        return not remove or discard(directory)
    return False


def discard(root: Backend, key: str = "") -> bool:
    """Deletes what is of no use any more. Returns whether that can be done; if not, a
    warning says what stays."""
    try:
        root.delete(key)
    except (OSError, ValueError) as e:
        where = f"{root}/{key}" if key else root
        _log.say(_log.WARNING, f"`{where}` cannot be deleted: {e}", path=root.url)
        _log.warn(f"`{where}` is of no use any more, and cannot be deleted: {e}")
        return False
    return True
