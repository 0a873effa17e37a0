"""The published checkpoint at a root: its index, and the saves below it."""

import contextlib
import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from .._errors import DamagedError
from .._format import _files, _index, _json, _text
from .._format._index import is_save_id
from .._storage import _store
from .._storage._backend import Backend, Value


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Published(Generic[T]):
    """The decoded index at a root, and the file that it was read from."""

    content: T
    file: Value


def read_index(root: Backend, decode: Callable[[bytes], T]) -> Published[T] | None:
    """The index at a root, as `_index.decode` or `_index.leaf_entries` gives it;
    None where there is none.

    **Raises:** `DamagedError` when it is not one that can be read, `Newer` when a later
    release can.
    """

    def look() -> Published[T] | None:
        file = root.read(_files.INDEX, limit=_json.MAX_INDEX)
        return None if file is None else Published(decode(file.data), file)

    try:
        return _store.look_twice(root, look)
    except ValueError as e:
        error = _index.Newer if isinstance(e, _index.Newer) else DamagedError
        why = _text.escape(str(e))
        raise error(f"The checkpoint at `{root}` cannot be read: {why}.") from e


def saves(root: Backend) -> list[str]:
    """The save ids that have a directory below `d/`, whatever has become of them."""
    if root.is_link("d"):
        return []
    inside: Mapping[str, bool] = {}
    # A file may have that name, or that of the checkpoint.
    with contextlib.suppress(NotADirectoryError):
        inside = root.below("d").list_top() or {}
    return list(filter(is_save_id, it.compress(inside, inside.values())))


def are_files_of_ours(root: Backend) -> bool:
    """Whether there are files of a save of ours, without its index."""
    looks = [ft.partial(root.has, key) for key in (_files.CLAIM, _files.DIGESTS)]
    return any(look() for look in _store.ahead(root, [*looks, lambda: saves(root)]))


def read_json(directory: Backend, key: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a file of JSON, and the object in it.

    **Raises:** `ValueError` if there is none.
    """
    value = directory.read(key, limit=_json.MAX_INDEX)
    if value is None:
        raise ValueError(f"`{key}` is missing")
    parsed = _json.parse(value.data, f"`{key}`")
    if type(parsed) is not dict:
        raise ValueError(f"`{key}` is not a JSON object")
    return value.data, parsed


# In a step of Orbax: the file of its metadata, and the file that says that the step is
# finished. Until then `_TIME` is None in the metadata.
TOP, DONE = "_CHECKPOINT_METADATA", "commit_success.txt"
# What that file says of a step of ours.
OURS = b"by eqx_ckpt"
_TIME = "commit_timestamp_nsecs"


def is_finished(step: Backend) -> bool:
    """Whether Orbax has finished a directory with a step. Where it writes in place, it
    adds a file last; else the directory is renamed once the time is in its metadata.
    See `CommitFileTemporaryPath` and `AtomicRenameTemporaryPath` in Orbax."""
    if step.has(DONE):
        return True
    try:
        _, value = read_json(step, TOP)
    except ValueError:
        return True  # Nothing says that it is not.
    return value.get(_TIME, 0) is not None
