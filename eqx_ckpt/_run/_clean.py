"""`clean`: finds and deletes what killed saves have left."""

import contextlib
import functools as ft
import os
import pathlib
import re

from .._format import _files
from .._load import _published
from .._save import _publish
from .._storage import _root, _store, _write
from .._storage._root import Root


def clean(
    directory: str | os.PathLike[str], remove: bool = True, *, idle: bool = False
) -> list[str]:
    """Deletes what killed saves have left in a directory of checkpoints.

    The next save to a path deletes what is left at that path; this is for paths that
    are never saved to again. A leftover is the data of a save that is not the
    checkpoint, and that nobody is writing: its writer would hold a lock. So run it
    where the writers run, or where their locks are seen; and not while something else
    than eqx_ckpt copies checkpoints into the directory. In an object store there are no
    locks, and what a running save has written is listed too.

    **Arguments:**

    - `directory`: a directory with checkpoints in it, such as that of a run, or a
        checkpoint. Looked at are the directory itself, those directly inside it, and
        those of the steps of a run. Links are not followed.
    - `remove`: whether to delete what is found, or only list it.
    - `idle`: that nothing is being saved below `directory`. For an object store you
        have to know and say so, or nothing is deleted there.

    **Returns:** the paths of the leftovers, sorted.

    **Raises:** `FileNotFoundError` if there is no such directory; `ValueError` if it is
    in an object store, unless `idle=True` or `remove=False`.

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
    root = _root.resolve(directory)
    if root.local is None:
        return _clean_far(root, remove, idle)
    if not root.local.is_dir():
        raise FileNotFoundError(f"There is no directory at `{root}`.")
    here = pathlib.Path(os.path.realpath(root.local))
    found = _clean(here, remove)
    for step in map(here.joinpath, filter(is_step, os.listdir(here))):
        # Others may be deleting it.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            left = set() if step.is_symlink() else _clean(step, remove)
            found |= left
            if left and remove:
                with contextlib.suppress(OSError):
                    step.rmdir()
    return sorted(found)


_step = re.compile(r"0|[1-9][0-9]*")


def is_step(name: str) -> bool:
    """Whether a directory of a run is called as that of a step."""
    return _step.fullmatch(name) is not None


def _clean(here: pathlib.Path, remove: bool) -> set[str]:
    """What is cleaned in a directory, and in those directly inside it."""
    with os.scandir(here) as entries:
        below = [here / e.name for e in entries if e.is_dir(follow_symlinks=False)]
    found = []
    for path in [*_publish.beside(here), *_publish.besides(here)]:
        if _publish.delete_abandoned(path, remove):
            found.append(path)
    for path in [here, *below]:
        stale = _stale_saves(Root(str(path), path), remove)
        found += [path / "d" / save for save in stale]
        if stale and remove and path != here:
            # A first save has made these. They stay if there is anything in them.
            with contextlib.suppress(OSError):
                (path / "d").rmdir()
                path.rmdir()
    return set(map(str, found))


_ours = re.compile(
    r"[0-9]+|part-[0-9]+|tree|manifest\.ocdbt|digests|.+\.new", re.DOTALL
)


def _clean_far(root: Root, remove: bool, idle: bool) -> list[str]:
    _root.check_writable(root)
    if remove and not idle:
        raise ValueError(
            f"`{root}` is not in a local file system, and only there can it be told "
            "whether the writer of a save is gone. The next save to a path cleans it. "
            "If you know that nothing is being saved there, pass `idle=True`."
        )
    tops = _store.list_top(root)
    if tops is None:
        raise FileNotFoundError(f"There is no directory at `{root}`.")
    steps = [_root.below(root, name) for name in tops if is_step(name)]
    places = [
        *(_root.below(root, name) for name, inside in tops.items() if inside),
        *(
            _root.below(step, name)
            for step in steps
            for name, inside in (_store.list_top(step) or {}).items()
            if inside
        ),
    ]
    return sorted(
        f"{place}/d/{save}"
        for place in [root, *places]
        for save in _stale_saves(place, remove)
    )


def _stale_saves(root: Root, remove: bool) -> list[str]:
    """The saves at a path that are not the checkpoint there."""
    if not _may_hold_saves(root):
        return []
    return [save for save in _published.saves(root) if _is_stale(root, save, remove)]


def _is_stale(root: Root, save: str, remove: bool) -> bool:
    unless = ft.partial(_must_stay, root, save)
    if root.local is not None:
        return _publish.delete_abandoned(root.local / "d" / save, remove, unless=unless)
    if unless():
        return False
    if remove:
        _write.delete_tree(root, f"d/{save}")
    return True


def _may_hold_saves(root: Root) -> bool:
    # Without an index, a directory is ours only if there is nothing else in it.
    tops = _store.list_top(root) or {}
    return bool(tops.get("d")) and (_files.INDEX in tops or len(tops) == 1)


def _must_stay(root: Root, save: str) -> bool:
    """Whether a save is the checkpoint, or not ours, or that cannot be told."""
    try:
        got = _published.read_index(root)
    except (OSError, ValueError):
        return True
    current = got is not None and got[0].save == save
    inside = _store.list_top(_root.below(root, f"d/{save}")) or {}
    return current or not all(map(_ours.fullmatch, inside))
