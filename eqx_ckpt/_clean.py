"""`clean`: finds and deletes what killed saves have left."""

import contextlib
import functools as ft
import os
import pathlib
import re

from . import _commit, _store
from ._store import Root


def clean(directory: str | os.PathLike[str], remove: bool = True) -> list[str]:
    """Deletes what killed saves have left in a directory of checkpoints.

    The next save to a path deletes what is left at that path; this is for paths that
    are never saved to again. A leftover is the data of a save that is not the
    checkpoint, and that nobody is writing: its writer would hold a lock. So run it
    where the writers run, or where their locks are seen; and not while something else
    than eqx_ckpt copies checkpoints into the directory.

    **Arguments:**

    - `directory`: a local directory with checkpoints in it, or a checkpoint. Looked at
        are the directory itself and those directly inside it. Links are not followed.
    - `remove`: whether to delete what is found, or only list it.

    **Returns:** the paths of the leftovers, sorted.

    **Raises:** `FileNotFoundError` if there is no such directory; `ValueError` for a
    URL of a store that has no locks.

    !!! example

        ```python
        >>> import os, tempfile, eqx_ckpt as ec
        >>> steps = tempfile.mkdtemp()
        >>> ec.tree_serialise_leaves(f"{steps}/1", {"step": 1})
        >>> os.makedirs(f"{steps}/2/d/0123456789abcdef")  # A save was killed here.
        >>> [os.path.relpath(path, steps) for path in ec.clean(steps)]
        ['2/d/0123456789abcdef']
        >>> os.listdir(steps)
        ['1']

        ```
    """
    root = _store.resolve(directory)
    if root.local is None:
        raise ValueError(
            f"`{root}` is not in a local file system, and only there can it be told "
            "whether the writer of a save is gone. The next save to a path cleans it."
        )
    if not root.local.is_dir():
        raise FileNotFoundError(f"There is no directory at `{root}`.")
    here = pathlib.Path(os.path.realpath(root.local))
    with os.scandir(here) as entries:
        below = [here / e.name for e in entries if e.is_dir(follow_symlinks=False)]
    found = []
    for path in [*_commit.beside(here), *filter(_commit.is_beside, below)]:
        if _commit.delete_abandoned(path, remove):
            found.append(path)
    for path in [here, *below]:
        stale = _stale_saves(path, remove)
        found += stale
        if stale and remove and path != here:
            # A first save has made these. They stay if there is anything in them.
            with contextlib.suppress(OSError):
                (path / "d").rmdir()
                path.rmdir()
    return sorted(map(str, found))


_ours = re.compile(r"[0-9]+|tree|manifest\.ocdbt|digests|.+\.new", re.DOTALL)


def _stale_saves(path: pathlib.Path, remove: bool) -> list[pathlib.Path]:
    """The directories of saves that are not the checkpoint at a path."""
    root = Root(str(path), path)
    if not _may_hold_saves(root):
        return []
    return [
        own
        for save in _commit.saves(root)
        if _commit.delete_abandoned(
            own := path / "d" / save, remove, unless=ft.partial(_must_stay, root, own)
        )
    ]


def _may_hold_saves(root: Root) -> bool:
    # Without an index, a directory is ours only if there is nothing else in it.
    tops = _store.list_top(root) or {}
    return bool(tops.get("d")) and (_store.INDEX in tops or len(tops) == 1)


def _must_stay(root: Root, own: pathlib.Path) -> bool:
    """Whether a save is the checkpoint, or not ours, or that cannot be told."""
    try:
        got = _commit.read_index(root)
    except (OSError, ValueError):
        return True
    current = got is not None and got[0].save == own.name
    return current or not all(map(_ours.fullmatch, os.listdir(own)))
