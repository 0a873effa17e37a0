"""`clean`: finds and deletes what killed saves have left."""

import contextlib
import functools as ft
import os

from .. import _extensions
from .._format import _files
from .._load import _published
from .._runtime import _arguments, _log
from .._save import _inplace, _leftovers
from .._storage import _root
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from . import _numbered


@_arguments.checked(remove=_arguments.FLAG, idle=_arguments.FLAG)
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

    A save that was killed right after its commit is finished: the files for other
    readers are put in their place. So is the last one when a manager is made.

    **Arguments:**

    - `directory`: a directory with checkpoints in it, such as that of a run, or a
        checkpoint. Looked at are the directory itself, those directly inside it, and
        those of the steps of a run. Renames are not followed.
    - `remove`: whether to delete what is found, or only list it.
    - `idle`: that nothing is being saved below `directory`. For an object store you
        have to know and say so, or nothing is deleted there. Of a near disk
        (`CheckpointManager(near=)`) it also deletes near steps of runs whose root has
        got a step as new since. `eqx-ckpt clean --list` says whose the others are.

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
    found = _cleaned(root, remove, idle)
    if remove:
        for path in found:
            _log.say(_log.INFO, f"Deleted what a killed save has left: `{path}`")
    return found


def _cleaned(root: Backend, remove: bool, idle: bool) -> list[str]:
    if not isinstance(root, LocalDirectory):
        return _clean_far(root, remove, idle)
    if root.entry() != "directory":
        raise FileNotFoundError(f"There is no directory at `{root}`.")
    here = root.real()
    assert isinstance(here, LocalDirectory)
    found = _clean(here, remove)
    for step in map(here.below, filter(_numbered.is_step, here.list_top() or ())):
        # Others may be deleting it.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            left = set() if step.is_link() else _clean(step, remove)
            found |= left
            if left and remove:
                step.drop_directory()
    if idle or not remove:
        superseded = _extensions.find("superseded")
        over = superseded(here) if superseded else []
        found |= set(over)
        for path in over if remove else []:
            key = os.path.relpath(path, here.url)
            here.delete(key)
            here.below(os.path.dirname(key)).drop_directory()
    return sorted(found)


def _clean(here: LocalDirectory, remove: bool) -> set[str]:
    """Cleans a directory and those directly inside it. Returns what was found."""
    inside = here.list_top()
    if inside is None:
        return set()
    below = [here.below(name) for name, is_directory in inside.items() if is_directory]
    found = []
    for work in [*_leftovers.beside(here), *_leftovers.besides(here)]:
        if _leftovers.delete_abandoned(work, remove):
            found.append(work.path)
    # What lies beside a path has the lock of its writer, and was looked at.
    places = [p for p in [here, *below] if not _files.is_beside(p.name)]
    for place in places:
        if remove and _may_hold_saves(place):
            _inplace.finish(place)
        stale = _stale_saves(place, remove)
        found += [place.below("d").below(save).path for save in stale]
        if stale and remove and place != here:
            # A first save has made these. They stay if there is anything in them.
            place.drop_directory("d")
            place.drop_directory()
    return set(found)


def _clean_far(root: Backend, remove: bool, idle: bool) -> list[str]:
    root.check_writable()
    if remove and not idle:
        raise ValueError(
            f"`{root}` is not in a local file system, and only there can it be told "
            "whether the writer of a save is gone. The next save to a path cleans it. "
            "If you know that nothing is being saved there, pass `idle=True`."
        )
    tops = root.list_top()
    if tops is None:
        raise FileNotFoundError(f"There is no directory at `{root}`.")
    steps = [root.below(name) for name in tops if _numbered.is_step(name)]
    places = [
        *(root.below(name) for name, inside in tops.items() if inside),
        *(
            step.below(name)
            for step in steps
            for name, inside in (step.list_top() or {}).items()
            if inside
        ),
    ]
    return sorted(
        f"{place}/d/{save}"
        for place in [root, *places]
        for save in _stale_saves(place, remove)
    )


def _stale_saves(root: Backend, remove: bool) -> list[str]:
    """The saves at a path that are not the checkpoint there."""
    if not _may_hold_saves(root):
        return []
    return [save for save in _published.saves(root) if _is_stale(root, save, remove)]


def _is_stale(root: Backend, save: str, remove: bool) -> bool:
    unless = ft.partial(_must_stay, root, save)
    own = root.below("d").below(save)
    if isinstance(own, LocalDirectory):
        return _leftovers.delete_abandoned(own, remove, unless=unless)
    if unless():
        return False
    if remove:
        own.delete("")
    return True


def _may_hold_saves(root: Backend) -> bool:
    # Without an index, a directory is ours only if there is nothing else in it.
    tops = root.list_top() or {}
    return bool(tops.get("d")) and (_files.INDEX in tops or len(tops) == 1)


def _must_stay(root: Backend, save: str) -> bool:
    """Whether a save is the checkpoint, or not ours, or that cannot be told."""
    try:
        got = _published.read_index(root)
    except (OSError, ValueError):
        return True
    if got is None and _files.INDEX in (root.list_top() or {}):
        return True  # A store has erred.
    current = got is not None and got[0].save == save
    inside = root.below("d").below(save).list_top() or {}
    return current or not all(map(_files.DATA.fullmatch, inside))
