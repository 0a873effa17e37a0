"""Checkpoints at paths without an index of ours: ours in one file, and those of other
formats, by what other rooms add.
"""

import functools as ft
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._kernel import _rooms
from .._kernel._errors import DamagedError
from .._kernel._format import _files, _index, _text
from .._kernel._load._source import Source
from .._kernel._runtime import _gc, _threads
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend


# So much of a file is enough to tell its format.
_HEAD = 512


class Probe(NamedTuple):
    """A file, by its key in a directory and with its first bytes, which stays open if
    it is local; or a directory (`key` is None) and the names of what is in it."""

    root: Backend
    directory: Backend
    key: str | None
    head: bytes
    names: frozenset[str]

    def has_suffix(self, suffix: str) -> bool:
        # The file that a link leads to may have any name.
        return self.root.url.endswith(suffix)


@_gc.paused()
def find_source(root: Backend, like: PyTree) -> Source | None:
    """The checkpoint that is a file, or of another format, at a path; None if there is
    none.

    **Raises:** `ValueError` for one that is damaged, or cannot be read here.
    """

    def read_once() -> Source | None:
        probe = look(root)
        return None if probe is None else _rooms.read_format(probe, like)

    return _store.look_twice(root, read_once)


def is_archive(root: Backend) -> bool:
    """Whether what is at a path is a checkpoint of ours, in one file."""
    probe = look(root)
    try:
        source = None if probe is None else _rooms.read_format(probe, None)
    except ValueError:
        return False
    return source is not None and source.has_digests and not source.is_ours


def refusal(root: Backend, error: ValueError) -> ValueError:
    """The error of a checkpoint that cannot be read for a reason."""
    # What is not supported is not damaged.
    kinds = (DamagedError, _index.Newer, ValueError)
    kind = next(kind for kind in kinds if isinstance(error, kind))
    why = _text.escape(str(error))  # It may name anything that is in a file.
    return kind(f"The checkpoint at `{root}` cannot be read: {why}.")


def look(root: Backend) -> Probe | None:
    """Looks at a path; None if there is nothing."""
    looks = [ft.partial(_file, root), ft.partial(_directory, root)]
    found = (look() for look in _store.ahead_in_directory(root, looks))
    return next(filter(None, found), None)


def _file(root: Backend) -> Probe | None:
    directory, key = root.split()
    if not key or root.entry() not in (None, "file"):
        return None
    try:
        directory = directory.pinned(key)
        head = first_bytes(directory, key, _HEAD)
    except (FileNotFoundError, IsADirectoryError):
        return None
    return Probe(root, directory, key, head, frozenset())


def first_bytes(directory: Backend, key: str, most: int) -> bytes:
    """The first bytes of a file, at most so many."""
    into = np.empty(most, np.uint8)
    return into[: directory.read_into(key, 0, into)].tobytes()


def _directory(root: Backend) -> Probe | None:
    names = names_in(root)
    return Probe(root, root, None, b"", names) if names else None


def names_in(root: Backend) -> frozenset[str]:
    """The names in a directory; in an object store those that tell its format."""
    if not root.is_remote:
        try:
            return frozenset(root.list_top() or ())
        except NotADirectoryError:
            return frozenset()
    telling = [_files.DIGESTS, *_rooms.keys_of_formats()]
    jobs = [ft.partial(root.has, key) for key in telling]
    there = zip(telling, _threads.gather(jobs, len(jobs), waiting=True))
    return frozenset(key.partition("/")[0] for key, is_there in there if is_there)
