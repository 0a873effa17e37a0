"""`exists` and `delete`: whether there is a checkpoint, and away with it."""

import os

from .._format import _files
from .._load import formats
from .._runtime import _log
from .._storage import _archive, _root, _store
from .._storage._backend import Backend, Renames
from . import _background, _publish


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint of eqx_ckpt at a path: one that is complete.

    It looks for the index and reads no leaf: [`verify`][] says whether it is whole. It
    is false of what other libraries have written, and [`open`][] reads as well.

    **Arguments:**

    - `path`: as in [`open`][]; also that of a checkpoint of one file.

    **Raises:** `ValueError` if its index is a symbolic link.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.tree_serialise_leaves("memory://there", {"step": 1})
        >>> ec.exists("memory://there"), ec.exists("memory://elsewhere")
        (True, False)

        ```
    """
    root = _root.resolve(path)
    if _is_file(root):
        return True
    if isinstance(root, Renames) and _files.is_beside(root.name):
        return False
    return _store.look_twice(root, lambda: root.has(_files.INDEX), bool)


def _is_file(root: Backend) -> bool:
    """Whether there is a checkpoint of one file at a path."""
    at = root.entry()
    if at not in (None, "file") or at is None and not _archive.is_archive(root):
        return False
    return formats.is_archive(formats.look(root))


def delete(path: str | os.PathLike[str]) -> None:
    """Deletes a checkpoint, and nothing else.

    If it is killed, the checkpoint is there or it is not; what is left of it is deleted
    by the next save to the path, or by [`clean`][]. Saves to the path that go on in the
    background are waited for.

    **Arguments:**

    - `path`: as in [`exists`][]. It may not be a symbolic link.

    **Raises:** `FileNotFoundError` if there is no checkpoint; `ValueError` if its
    directory holds something that is not part of it, if its index cannot be read, or if
    the path is a symbolic link. Then nothing is deleted.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.tree_serialise_leaves("memory://away", {"step": 1})
        >>> ec.delete("memory://away")
        >>> ec.exists("memory://away")
        False

        ```
    """
    root = _root.resolve(path)
    if root.is_link():
        raise ValueError(
            f"`{root}` is a symbolic link, and nothing is deleted through one. Delete "
            f"what it leads to, `{root.target()}`."
        )
    _background.wait_for(root)
    with _log.timed("delete") as timer:
        if _is_file(root):
            directory, key = root.split()
            directory.delete(key)
        else:
            _publish.remove(root)
    text = f"Deleted `{root}` in {timer.seconds:.3g} s"
    _log.say(_log.INFO, text, path=root.url, seconds=timer.seconds)
