"""`clean`: finds and deletes what killed saves have left.

Each of the functions here cleans one kind of it: it returns the paths of what it has
found, and with `remove`, it has deleted that.
"""

import contextlib
import functools as ft
import os
from collections.abc import Iterable, Mapping

from .. import _rooms
from .._format import _files, _history, _index, _rows
from .._load import _published
from .._runtime import _arguments, _log
from .._save import _inplace, _leftovers
from .._storage import _root
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from . import _attempts, _numbered


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

    Files for other readers that are of an older save than the checkpoint are deleted,
    as a kill right after a commit leaves them.

    **Arguments:**

    - `directory`: a directory with checkpoints in it, such as that of a run, or a
        checkpoint. Looked at are the directory itself, those directly inside it, and
        those of the steps of a run. Links are not followed.
    - `remove`: whether to delete what is found, or only list it.
    - `idle`: that nothing is being saved below `directory`. For an object store you
        have to know and say so, or nothing is deleted there. Of a near disk
        (`CheckpointManager(near=)`) it also deletes near steps of runs whose root has
        got a step as new since. `eqx-ckpt clean --list` says whose the others are.

    **Returns:** the paths of the leftovers, sorted: with `remove`, of those that are
    deleted. A warning says which cannot be.

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
    if not isinstance(root, LocalDirectory):
        root.check_writable()
        if remove and not idle:
            raise ValueError(
                f"`{root}` is not in a local file system, and only there can it be "
                "told whether the writer of a save is gone. The next save to a path "
                "cleans it. If you know that nothing is being saved there, pass "
                "`idle=True`."
            )
    here = root.real()
    tops = here.list_top() if here.entry() in (None, "directory") else None
    if tops is None:
        raise FileNotFoundError(f"There is no directory at `{root}`.")
    what = dict.fromkeys(_clean_all(here, tops, remove), "what a killed save has left")
    if isinstance(here, LocalDirectory) and (idle or not remove):
        superseded = _clean_superseded(here, remove)
        what |= dict.fromkeys(superseded, "a near step that its run needs no more")
    found = sorted(what)
    for path in found if remove else []:
        _log.say(_log.INFO, f"Deleted {what[path]}: `{path}`")
    return found


def _clean_all(here: Backend, tops: Mapping[str, bool], remove: bool) -> set[str]:
    """Cleans all that killed saves have left in a directory that has these names."""
    found = _clean_beside(_leftovers.beside(here), remove)
    found |= _clean_saves(here, remove)
    found |= _clean_inside(here, tops, remove)
    for place in (_numbered.PINS, _attempts.PLACE):
        found |= _clean_beside(_numbered.new_directories(here, place), remove)
    is_run = _history.PLACE in tops
    if is_run and isinstance(here, LocalDirectory) and not here.is_link(_history.PLACE):
        found |= _clean_history(here.below(_history.PLACE), remove)
    for step in map(here.below, filter(_numbered.is_step, tops)):
        # Others may be deleting it.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found |= _clean_step(step, is_run, remove)
    return found


def _clean_inside(here: Backend, tops: Mapping[str, bool], remove: bool) -> set[str]:
    """Cleans the directories in one that has these names, and what lies beside them."""
    found = set()
    if isinstance(here, LocalDirectory):
        found = _clean_beside(_leftovers.beside_all(here), remove)
    inside = [name for name in tops if tops[name] and name != _files.LOST]
    for place in map(here.below, inside):
        stale = _clean_saves(place, remove)
        found |= stale
        if stale and remove:
            # A first save has made these. They stay if there is anything in them.
            place.drop_directory("d")
            place.drop_directory()
    return found


def _clean_beside(works: Iterable[LocalDirectory], remove: bool) -> set[str]:
    """Cleans directories in which saves were written, beside their paths."""
    return {work.path for work in works if _leftovers.delete_abandoned(work, remove)}


def _clean_saves(place: Backend, remove: bool) -> set[str]:
    """Cleans the saves at a path that are not the checkpoint there."""
    is_local = isinstance(place, LocalDirectory)
    # What lies beside a path has the lock of its writer, and was looked at.
    if is_local and _files.is_beside(place.name) or not _may_hold_saves(place):
        return set()
    if remove:
        _inplace.delete_outdated(place)
    at, saves = place.path if is_local else str(place), _published.saves(place)
    return {f"{at}/d/{save}" for save in saves if _is_stale(place, save, remove)}


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
        published = _published.read_index(root, _index.decode)
    except (OSError, ValueError):
        return True
    if published is None and _files.INDEX in (root.list_top() or {}):
        return True  # A store has erred.
    current = published is not None and published.content.save == save
    inside = root.below("d").below(save).list_top() or {}
    return current or not all(map(_files.DATA.fullmatch, inside))


def _clean_history(place: LocalDirectory, remove: bool) -> set[str]:
    """Cleans the files of a history that are torn: their writers held its lock."""
    found = set()
    with contextlib.suppress(OSError), place.lock() as is_locked:
        names = place.list_top() if is_locked else None
        for name in filter(_history.parse_name, names or ()):
            value = place.read(name)
            if value is not None and _rows.is_torn(value.data):
                found.add(f"{place.path}/{name}")
                if remove:
                    place.delete_files([name])
    return found


def _clean_step(step: Backend, is_run: bool, remove: bool) -> set[str]:
    """Cleans the directory of a step."""
    inside = None if step.is_link() else step.list_top()
    if inside is None:
        return set()
    found = _clean_inside(step, inside, remove) | _clean_mark(step, inside, remove)
    if (found or is_run) and remove:
        # A save was killed before it wrote anything.
        for key in ("default/d", "default", ""):
            step.drop_directory(key)
    return found


def _clean_mark(step: Backend, tops: Mapping[str, bool], remove: bool) -> set[str]:
    """Cleans the mark of a step of ours that is gone."""
    mark = _published.DONE
    if set(tops) - {"default"} != {mark} or step.below("default").list_top():
        return set()
    found = None
    with contextlib.suppress(ValueError):  # One that is longer is not ours.
        found = step.read(mark, limit=len(_published.OURS))
    if found is None or found.data != _published.OURS:
        return set()
    if remove:
        step.delete(mark)
    return {f"{step.url}/{mark}"}


def _clean_superseded(here: LocalDirectory, remove: bool) -> set[str]:
    """Cleans near steps that newer ones have taken the place of."""
    found = _rooms.superseded(here)
    for path in found if remove else []:
        key = os.path.relpath(path, here.url)
        here.delete(key)
        here.below(os.path.dirname(key)).drop_directory()
    return {*found}
