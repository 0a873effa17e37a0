"""Publishes a save: at every instant the path holds the old or the new.

A save writes its data under its own save id. Then it writes the index, on condition
that the index is still the one it found: this is the commit. Then it deletes the data
of other saves. Where a layout has fixed names (`zarr`), the save is written beside the
path, and the two directories change places. What is one file takes the place of
another. These are the strategies: `_inplace`, or `_instore` in an object store,
`_swapped` and `_onefile`.
"""

import contextlib
import errno
import functools as ft
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping

from .._format import _files, _index, _schema, _text
from .._format._index import Index
from .._load import _published
from .._storage import _store
from .._storage._backend import Backend, Renames, Sends
from . import _inplace, _instore, _leftovers, _swapped
from ._place import discard, foreign, Found, not_part, Place, unpublished as unpublished


def examine(root: Backend, overwrite: bool) -> Found:
    """The state of a path. **Raises:** an error when a save may not go there."""
    found = _look(root, overwrite)
    for _ in range(2):
        if isinstance(found, Found):
            return found
        # It may be a checkpoint that is being deleted, or was replaced meanwhile.
        with contextlib.ExitStack() as locked:
            with contextlib.suppress(OSError):
                locked.enter_context(root.writers_lock())
            found = _look(root, overwrite)
    if isinstance(found, Found):
        return found
    raise found


def _look(root: Backend, overwrite: bool) -> Found | FileExistsError:
    """As `examine`. Returns the error that there is something else."""
    if isinstance(root, Renames) and _files.is_beside(root.name):
        raise ValueError(
            f"`{root}` is a name for saves that are being written. Choose another path."
        )
    if root.entry() in ("file", "other"):
        raise _file(root)
    list_it = root.list_all if isinstance(root, Sends) else root.list_top
    read = ft.partial(_published.read_outline, root)
    # An object store may have a file too.
    listed, is_file, index = _store.ahead(root, [list_it, root.is_file, read])
    there = listed() or {}
    keys = () if isinstance(there, dict) else tuple(there)
    tops = there if isinstance(there, dict) else _store.tops_of(keys)
    if not tops:
        root.check_bucket()
        if is_file():
            raise _file(root)
        return Found(None, None, frozenset())
    for name in ("d", "array_metadatas"):
        if not tops.get(name, True):
            raise FileExistsError(
                f"`{name}` in `{root}` is a file or a link, where a checkpoint has a "
                "directory, and nothing is written through a link. It is left as it is."
            )
    if _files.INDEX in tops:
        # What is in a list and not there is looked for once more.
        got = index() or read()
        if got is not None:
            if not overwrite:
                raise FileExistsError(
                    f"There is a checkpoint at `{root}`, and `overwrite=False`."
                )
            return Found(got[0], got[1], frozenset(tops), keys)
    elif _is_leftover(root, tops):
        return Found(None, None, frozenset(tops), keys)
    if _files.CLAIM in tops:
        return _instore.claimed(root)
    some = ", ".join(f"`{_text.escape(name)}`" for name in sorted(tops)[:3])
    other = " (an Orbax checkpoint?)" if "_METADATA" in tops else ""
    return FileExistsError(
        f"`{root}` is not empty, and not a checkpoint of eqx_ckpt{other}: it has {some}"
        f"{' and more' if len(tops) > 3 else ''}. It is left as it is. Choose another "
        "path."
    )


def _file(root: Backend) -> FileExistsError:
    hint = (
        "To convert a `.eqx` file, load it with `ec.tree_deserialise_leaves` into "
        "a model of the right structure, and save that to a new path."
        if root.url.endswith(".eqx")
        else "Choose a path that does not exist, or an empty directory."
    )
    return FileExistsError(
        f"`{root}` is a file, not a checkpoint, and is left as it is. {hint}"
    )


def _is_leftover(root: Backend, tops: Mapping[str, bool]) -> bool:
    # A killed first save leaves its data and no index.
    if not tops.get("d") or set(tops) - _files.SIDE - {"d"}:
        return False
    inside = root.below("d").list_top() or {}
    ours = all(is_dir and _index.is_save_id(name) for name, is_dir in inside.items())
    return ours and bool(inside or len(tops) == 1)


@contextlib.contextmanager
def begin(root: Backend, layout: str, overwrite: bool) -> Iterator[Place]:
    """A place to write a save to. What is in it is deleted unless it is published."""
    # The path itself may be a link; its target is what is written to.
    root = root.real()
    found = examine(root, overwrite)
    swaps = "zarr" in (layout, found.outline and found.outline.layout)
    if swaps:
        _swapped.check(root, found)
    with contextlib.ExitStack() as undo:
        if isinstance(root, Renames):
            strategy = _swapped if swaps else _inplace
            start = strategy.begin(root, found, undo)
        else:
            assert isinstance(root, Sends)
            start = (_instore.claim if swaps else _instore.begin)(root, found, undo)
        with start as place:
            if swaps and layout == "ocdbt":
                place.work.make_directories([place.own])
            yield place


def tell(place: Place) -> bytes:
    """A place, as process 0 tells the others of it."""
    return json.dumps([place.save, place.work != place.root]).encode()


_PLACE = _schema.ID, bool


def told(root: Backend, word: bytes) -> tuple[Backend, str]:
    """Where the others write, once the place is there: the directory, and that of the
    save in it."""
    save, is_beside = _schema.read(word, "what process 0 says of a save", _PLACE)
    work = root.real()
    if is_beside and isinstance(work, Renames):
        work = _leftovers.directory_of(work, save)
    own = f"d/{save}"
    work.await_directory(own)
    return work, own


def publish(place: Place, index: Index, side: Mapping[str, bytes], sync: bool) -> None:
    """Makes a save that is written the checkpoint at its path."""
    is_zarr = index.layout == "zarr"
    place.last = _files.DIGESTS if is_zarr else f"{place.own}/digests"
    place.publish(encoded(index), side, sync)


def encoded(index: Index) -> bytes:
    """The bytes of an index, which a reader has taken: nothing else is published.

    **Raises:** `RuntimeError` if it does not.
    """
    data = _index.encode(index)
    try:
        _index.decode(data).check_leaves()
    except ValueError as e:
        raise RuntimeError(
            f"What was written cannot be read: {e}. Nothing was saved, and the path is "
            "as it was before. This is an error in eqx_ckpt: please report it."
        ) from e
    return data


def remove(root: Backend) -> None:
    """Deletes a checkpoint: atomically where there are renames, else its index first.

    **Raises:** `FileNotFoundError` if there is none, `ValueError` if something else is
    in its directory, or its index cannot be read; then nothing is deleted.
    """
    if root.entry() not in (None, "directory"):
        raise _nothing(root)
    if isinstance(root, Sends):
        if not _instore.remove(root):
            raise _nothing(root)
        return
    assert isinstance(root, Renames)
    try:
        with root.writers_lock():
            got = _published.read_outline(root)
            if got is None:
                raise _nothing(root)
            entries = root.list_top() or {}
            others = foreign(root, Found(got[0], got[1], frozenset(entries)), entries)
            if others:
                raise not_part(root, others[0])
            _rename_and_delete(root, entries)
    except FileNotFoundError:  # Another has deleted it.
        raise _nothing(root) from None


def _rename_and_delete(root: Renames, entries: Iterable[str]) -> None:
    # Under this name it is a leftover, if this is killed or cannot be finished.
    work = _leftovers.directory_of(root, secrets.token_hex(8))
    try:
        root.rename(work)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        # At a mount point. What is left of this is a leftover too.
        root.delete(_files.INDEX)
        root.sync_directories([""])
        for key in entries:
            discard(root, key)
        return
    # After a power cut it is there with all that is in it, or not at all.
    root.parent().sync_directories([""])
    discard(work)


def _nothing(root: Backend) -> FileNotFoundError:
    return FileNotFoundError(
        f"There is no checkpoint of eqx_ckpt at `{root}`, and nothing was deleted."
    )
