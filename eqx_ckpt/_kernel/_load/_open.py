"""From a path to a `Source`: of our format, or of another.

`open_path` is what `open` calls: it takes open files, and paths that stand for another,
such as that of a run for its newest step. `open_source` takes a root, and finds only
what is at it. Both look for a checkpoint of ours, and then for one of another format:
`_find` does, and of a store `open_path` itself, which lists a run meanwhile.
"""

import contextlib
import functools as ft
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jaxtyping import PyTree

from .. import _rooms
from .._errors import DamagedError, ReplacedError
from .._format import _files, _index, _text
from .._limits import limits
from .._runtime import _log, _processes
from .._storage import _context, _open_files, _root, _store
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from .._storage._open_files import Readable
from . import _published, _source
from ._source import Source


P = ParamSpec("P")
T = TypeVar("T")


def open_path(
    path: str | os.PathLike[str] | Readable,
    like: PyTree = None,
    follow_symlinks: bool = False,
) -> Source:
    """The source at a path, or in an open file; or that of what the path stands for,
    such as the newest step of a run. See `open`."""
    if _open_files.is_file(path):
        return _open_file(path, like)
    root = _root.resolve(path, follow_symlinks)
    source, error, find_other = None, None, None
    try:
        if not root.is_remote:
            source = _find(root, like)
        elif (source := _source.ours_at(root)) is None:
            if not _store.is_likely_file(root):
                # The list of a run comes while other formats are looked for.
                find_other = _rooms.stands_for(path)
            source = _other_at(root, like)
    except (DamagedError, _index.Newer):
        raise
    except (FileNotFoundError, ValueError) as e:
        error = e
    if source is None:
        found_nothing = not isinstance(error, ValueError)
        find_other = find_other or _rooms.stands_for(path)
        source = _open_other(path, find_other, found_nothing, like, follow_symlinks)
    if source is None:
        raise error or _missing_error(root)
    # The list of a run goes on as long as this is there, and the traceback of an error
    # would keep it.
    del find_other
    return source


def _open_file(path: Any, like: PyTree) -> Source:
    """The source in an open file, which it keeps."""
    root = _open_files.root_of(path)
    try:
        source = open_source(root, like)
    except BaseException as e:
        _open_files.forget(root)
        if isinstance(e, FileNotFoundError):
            raise ValueError(
                "The open file is no checkpoint of a format that is read."
            ) from None
        raise
    weakref.finalize(source, _open_files.forget, root).atexit = False
    return source


def _open_other(
    path: object,
    find_other: Callable[[bool], Any],
    found_nothing: bool,
    like: PyTree,
    follow_symlinks: bool,
) -> Source | None:
    """The source of what a path without one stands for, as `find_other` says, which is
    told whether nothing that is known was found at the path."""
    before = None
    while (other := find_other(found_nothing)) not in (None, before):
        try:
            return open_at(other, like, follow_symlinks)
        except FileNotFoundError:
            # Its run may have deleted it since, for a newer one.
            before, find_other = other, _rooms.stands_for(path)
    return None


def open_at(path: object, like: PyTree = None, follow_symlinks: bool = False) -> Source:
    """The source that is at a path itself, which stands for no other."""
    return open_source(_root.resolve(path, follow_symlinks), like)


def open_source(root: Backend, like: PyTree = None) -> Source:
    """The source at a root. **Raises:** `FileNotFoundError` if there is none; `OSError`
    for a store that has no such bucket, or is elsewhere."""
    source = _find(root, like)
    if source is None:
        raise _missing_error(root)
    return source


def _find(root: Backend, like: PyTree) -> Source | None:
    """The source at a root, if there is one."""
    # None: in a store it would take a request to know.
    if root.entry() not in (None, "directory"):
        return _in_file(root, like)
    if _is_unfinished(root):
        return None
    return _source.ours_at(root) or _other_at(root, like)


def _in_file(root: Backend, like: PyTree) -> Source | None:
    """The source that is a file; None if nothing is there. **Raises:**
    `FileNotFoundError` for another file."""
    above, key = root.split()
    stamp = above.stamp(key)
    for _ in range(_LOOKS):
        if (source := _rooms.find_source(root, like)) is not None:
            return source
        if (entry := root.entry()) == "nothing":
            return None
        if entry in (None, "directory"):
            return _find(root, like)  # A first save has come as we looked.
        # Others may have deleted a file, and saved it again, as it was looked at.
        before, stamp = stamp, above.stamp(key)
        if stamp == before:
            break
    raise FileNotFoundError(
        f"`{root}` is a file, and not a checkpoint of a format that is read."
    )


def _is_unfinished(root: Backend) -> bool:
    """Whether it is a directory in which a save is written, or was, before it changes
    places with the one at its path: its name says so."""
    return isinstance(root, LocalDirectory) and bool(_files.is_beside(root.name))


def _missing_error(root: Backend) -> FileNotFoundError:
    """The error of a root without a source."""
    where = _what_is_there(root) if root.entry() in (None, "directory") else ""
    return FileNotFoundError(f"There is no checkpoint at `{root}`{where}.")


def _what_is_there(root: Backend) -> str:
    """Describes, as the rest of an error, a root without a checkpoint. **Raises:**
    `FileNotFoundError` if it is known that nothing can be there."""
    if _is_unfinished(root):
        unfinished = "what a save that was interrupted has left, or one that is being"
        return f": it is {unfinished} written"
    root.check_bucket()
    lacks = f": it has no `{_files.INDEX}`, which is written last"
    with contextlib.suppress(PermissionError):  # To list may not be allowed.
        if _published.are_files_of_ours(root):
            return f"{lacks}. A save may have been interrupted there"
    names = [] if root.is_remote else sorted(root.list_top() or ())
    if not names:
        where = f": it has no `{_files.INDEX}`, and the directory is empty"
        return "" if root.is_remote else where
    some = _text.bounded(", ".join(f"`{name}`" for name in names[:3]), 200)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f": it has no `{_files.INDEX}`, and nothing that tells another format. What is "
        f"in it is {some}{more}"
    )


def _other_at(root: Backend, like: PyTree) -> Source | None:
    """The checkpoint of another format. Or ours, if that has come since it was looked
    for, or if a store has denied that it has it: then the files for other readers are
    found, and look like another format."""
    source, wrong = None, None
    looks = [
        ft.partial(_rooms.find_source, root, like),
        ft.partial(_source.ours_at, root),
    ]
    find, find_ours = _store.ahead_in_directory(root, looks)
    try:
        source = find()
    except (FileNotFoundError, ValueError) as e:
        wrong = e
    # If it is not there any more, it was deleted while it was looked at.
    ours = find_ours() if source is None or not root.is_remote else None
    if ours is None and isinstance(wrong, ValueError):
        raise wrong
    return ours or source


# A call is made at least so often, and is begun again for `limits.reopen_seconds`.
_TRIES = 3
# How often a file is looked at that others replace meanwhile.
_LOOKS = 100


def retried_if_replaced(
    place: int, name: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a call again if the path that it is given, as argument number `place` or as
    `name`, is replaced while it is read. A call with an open checkpoint is made once.

    The call raises `ReplacedError` if that happens each time.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @ft.wraps(call)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            path = args[place] if len(args) > place else kwargs.get(name)
            # One of many processes cannot try again alone.
            if not isinstance(path, (str, os.PathLike)) or _processes.count() > 1:
                return call(*args, **kwargs)
            end = time.monotonic() + limits.reopen_seconds
            count = 0
            while True:
                count += 1
                try:
                    return call(*args, **kwargs)
                except ReplacedError as e:
                    if count >= _TRIES and time.monotonic() > end:
                        raise ReplacedError(
                            f"The checkpoint at `{_text.escape(os.fspath(path))}` was "
                            f"replaced {count} times while it was read. Read it when "
                            "nothing is saved there, or save less often."
                        ) from e
                    _log.say(
                        _log.INFO,
                        f"The checkpoint at `{_text.escape(os.fspath(path))}` was "
                        "replaced while it was read: it is read again",
                        path=os.fspath(path),
                    )

        return wrapped

    return decorate


def reopen(root: Backend, save: str) -> Source:
    """**Raises:** `ReplacedError` if the path no longer holds this save."""
    _context.check_fork()
    source = open_source(root)
    if source.index.save != save:
        raise ReplacedError(
            f"The checkpoint at `{root}` was replaced after it was pickled. Open it "
            "again."
        )
    return source
