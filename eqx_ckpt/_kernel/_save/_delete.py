"""`exists` and `delete`: whether there is a checkpoint, and away with it."""

import errno
import functools as ft
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from .. import _rooms
from .._errors import DamagedError
from .._format import _files, _index, _text
from .._load import _published
from .._load._published import Published
from .._runtime import _arguments, _log
from .._storage import _open_files, _root, _store
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from .._storage._objects import ObjectStore
from . import _background, _leftovers
from ._path_state import foreign, foreign_among
from ._transaction import drop_unlisted, stamps_of


@_arguments.checked()
def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint of eqx_ckpt at a path: one that is complete.

    It looks for the index and reads no leaf: [`verify`][] says whether it is whole. It
    is false of what other libraries have written, and [`open`][] reads as well.

    **Arguments:**

    - `path`: as in [`open`][]; also that of a checkpoint of one file. The directory of
        a run, or of a step, has none itself: that is `<root>/<step>/default`.

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
    if isinstance(root, LocalDirectory) and _files.is_beside(root.name):
        return False
    return _store.look_twice(root, lambda: root.has(_files.INDEX), bool)


def _is_file(root: Backend) -> bool:
    """Whether there is a checkpoint of one file at a path."""
    at = root.entry()
    if at not in (None, "file") or at is None and not _open_files.is_archive(root):
        return False
    return _rooms.is_archive(root)


@_arguments.checked()
def delete(path: str | os.PathLike[str]) -> None:
    """Deletes a checkpoint, damaged or not, or a run, and nothing else.

    If it is killed, the checkpoint is there or it is not; what is left of it is deleted
    by the next save to the path, or by [`clean`][]. Saves to the path that go on in the
    background are waited for. A run is deleted step by step, and its history last. A
    step that others save meanwhile is an error, and stays.

    **Arguments:**

    - `path`: as in [`exists`][], or the directory of a run. It may not be a symbolic
        link.

    **Raises:** `FileNotFoundError` if there is neither; `ValueError` if the path is a
    symbolic link or a step that is pinned, if a step of the run is pinned or being
    saved, and if its directory holds something that is not part of it, such as a step
    of Orbax. Then nothing is deleted.

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
        if not _delete_file(root):
            try:
                if not remove_checkpoint(root, lambda: _rooms.may_go(root)):
                    raise ValueError(
                        f"`{root}` is a step that is pinned. Nothing was deleted. "
                        "`unpin` it in its manager before."
                    )
            except FileNotFoundError:
                may_be_run = root.entry() in (None, "directory")
                if not (may_be_run and _rooms.delete_run(path)):
                    raise
    text = f"Deleted `{root}` in {timer.seconds:.3g} s"
    _log.say(_log.INFO, text, path=root.url, seconds=timer.seconds)


def _delete_file(root: Backend) -> bool:
    """Deletes a checkpoint of one file. Returns whether there was one."""
    directory, key = root.split()
    while _is_file(root):
        stamp = directory.stamp(key)
        # Others may have put something else there since.
        if _is_file(root) and directory.stamp(key) == stamp:
            if directory.delete_as(key, stamp):
                return True
    return False


def remove_checkpoint(
    root: Backend,
    confirm: Callable[[], bool] = lambda: True,
    may_still_go: Callable[[], bool] = lambda: True,
    once_gone: Callable[[], Any] = lambda: None,
    stamp: str = "",
) -> bool:
    """Deletes a checkpoint: atomically where there are renames, else its index first.
    Returns whether the checkpoint is deleted: it stays unless `may_still_go` and then
    `confirm` return True. `may_still_go` is called while its files are looked at, and
    `confirm` right before the deletion: where a store has locks, under that of writers.
    In an object store the checkpoint also stays if its index has another `stamp` than
    the one given. `once_gone` is called once nobody can open the checkpoint any more.

    **Raises:** `FileNotFoundError` if there is none, `ValueError` if something else is
    in its directory; then nothing is deleted.
    """
    if root.entry() not in (None, "directory"):
        raise _nothing(root)
    if isinstance(root, ObjectStore):
        return _remove_in_store(root, confirm, may_still_go, once_gone, stamp)
    assert isinstance(root, LocalDirectory)
    try:
        with root.lock(wait=True):
            entries = root.list_top() or {}
            check(root)
            if not (may_still_go() and confirm()):
                return False
            _rename_and_delete(root, entries)
            once_gone()
            return True
    except FileNotFoundError:  # Another has deleted it.
        raise _nothing(root) from None


def check(root: Backend) -> None:
    """**Raises:** as `remove_checkpoint`."""
    if isinstance(root, ObjectStore):
        _stored(root)
        return
    published, entries = _leaf_entries(root), root.list_top() or {}
    if published is not None:
        own = published.content
    else:
        own = [x for x in entries if entries[x]] if _files.DIGESTS in entries else []
    assert isinstance(root, LocalDirectory)
    _refuse_others(root, foreign(root, own, entries))


def _leaf_entries(root: Backend) -> Published[Sequence[str]] | None:
    """The entries of leaves at a root; None if its index is damaged: any directory may
    be that of a leaf then, if what is in it looks so too.

    **Raises:** `FileNotFoundError` if there is no checkpoint.
    """
    try:
        published = _published.read_index(root, _index.leaf_entries)
    except _index.Newer:
        raise
    except DamagedError:
        return None
    if published is None:
        raise _nothing(root)
    return published


def _rename_and_delete(root: LocalDirectory, entries: Iterable[str]) -> None:
    # Under this name it is a leftover, if this is killed or cannot be finished.
    work = _leftovers.directory_of(root, secrets.token_hex(8))
    try:
        root.rename(work)
    except OSError as e:
        if e.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        # At a mount point, or in a lower layer of an overlay, as the image of a
        # container is. What is left of this is a leftover too.
        root.delete(_files.INDEX)
        root.sync_directories([""])
        for key in entries:
            _leftovers.discard(root, key)
        if e.errno == errno.EXDEV:
            root.drop_directory()
        return
    # What came in since it was listed is not ours to delete.
    for name in (work.list_top() or {}).keys() - set(entries):
        root.make_directories([""])
        work.below(name).rename(root.below(name))
    # After a power cut it is there with all that is in it, or not at all.
    root.parent().sync_directories([""])
    _leftovers.discard(work)


def _refuse_others(root: Backend, others: Sequence[str]) -> None:
    """**Raises:** `ValueError` if there are names that are no part of a checkpoint."""
    if others:
        raise ValueError(
            f"`{root}` has `{_text.escape(others[0])}` in it, which is not part of the "
            "checkpoint. Nothing was deleted. Move it elsewhere."
        )


def _nothing(root: Backend) -> FileNotFoundError:
    return FileNotFoundError(
        f"There is no checkpoint of eqx_ckpt at `{root}`, and nothing was deleted."
    )


def _remove_in_store(
    root: ObjectStore,
    confirm: Callable[[], bool],
    may_still_go: Callable[[], bool],
    once_gone: Callable[[], Any],
    stamp: str,
) -> bool:
    """Deletes a checkpoint, its index first. One that was replaced meanwhile is looked
    at anew. **Raises:** as `remove_checkpoint`."""
    while True:
        looks = _store.ahead(root, [ft.partial(_stored, root), may_still_go])
        found, is_wanted_still = (look() for look in looks)
        if stamp and stamp != found.stamp or not (is_wanted_still and confirm()):
            return False
        if root.delete_as(_files.INDEX, found.stamp):
            break
    # Beside its data they are taken for a leftover, and without it for somebody else's.
    drop_unlisted(root, found.side)
    rest = {*found.keys} - {_files.INDEX, *found.side}
    jobs = [ft.partial(root.delete_files, rest), root.list_all, once_gone]
    _, now, _ = _store.gather(root, jobs)
    # The list may be older than the index that is deleted: another had saved.
    left = {key for key in now or () if key.startswith(f"{found.data}/")}
    root.delete_files(left - rest)
    return True


class _StoredCheckpoint(NamedTuple):
    """A checkpoint in a store: its entries of leaves, or None if its index is damaged;
    the stamp of that; the directory of its data, or one that no save has; all files
    that are there; and the stamps of its files for other readers."""

    leaf_entries: Sequence[str] | None
    stamp: str
    data: str = "d/none"
    keys: Collection[str] = ()
    side: dict[str, str] = {}


def _stored(root: ObjectStore) -> _StoredCheckpoint:
    """**Raises:** as `remove_checkpoint`."""
    find = ft.partial(_find_in_store, root)
    look, listed = _store.ahead(root, [find, root.list_all])
    keys = listed() or []
    inside: dict[str, set[str]] = {}
    for key in keys:
        top, slash, rest = key.partition("/")
        entries = inside.setdefault(top, set())
        if slash:
            entries.add(rest.partition("/")[0])
    try:
        found = look()
    except FileNotFoundError:
        if _files.INDEX not in keys:
            raise
        found = find()
    own = found.leaf_entries
    if own is None:
        own = [x for x in inside if inside[x]] if _files.DIGESTS in inside else []
    _refuse_others(root, foreign_among(own, inside, lambda name: inside.get(name, ())))
    # `write_orbax` may have added some since they were listed.
    keys = {*keys, *found.keys}
    return found._replace(keys=keys, side=stamps_of(root, keys))


def _find_in_store(root: ObjectStore) -> _StoredCheckpoint:
    published = _leaf_entries(root)
    if published is None:
        return _StoredCheckpoint(None, root.stamp(_files.INDEX))
    data, stamp = published.file.data, published.file.generation.hex()
    added = _index.others_in(data)
    found = _StoredCheckpoint(published.content, stamp, keys=added)
    head = _index.match_head(data)
    return found._replace(data=f"d/{head['save'].decode()}") if head else found
