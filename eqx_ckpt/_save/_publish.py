"""Publishes a save at once: at every instant the path holds the old or the new.

A save writes its data under its own save id. Then it writes the index, on condition
that the index is still the one it found: this is the commit. Then it deletes the data
of other saves. Where a layout has fixed names (`zarr`), the save is written beside the
path, and the two directories change places at once.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from .._format import _files, _index, _text
from .._format._index import Index
from .._load import _published
from .._storage import _root, _store, _write
from .._storage._root import Root
from .._storage._store import Value


class Found(NamedTuple):
    """What is at a path before a save. `index` is None unless it is a checkpoint."""

    index: Index | None
    file: Value | None
    entries: frozenset[str]


class Place(NamedTuple):
    """Where a save is written, and where it goes.

    `above` leads to the directories, from the root, that have new names in them because
    of the save. `undo` deletes what is written, until the save gets to its commit.
    """

    root: Root
    work: Root
    save: str
    found: Found
    above: list[str]
    undo: contextlib.ExitStack


def examine(root: Root, overwrite: bool) -> Found:
    """What is at `root`. **Raises:** an error when a save may not go there."""
    local = root.local
    if local is not None and _files.is_beside(local):
        raise ValueError(
            f"`{root}` is a name for saves that are being written. Choose another path."
        )
    if local is not None and _store.is_file(root):
        raise _file(root)
    tops = _store.list_top(root) or {}
    if not tops:
        # An object store may have both; to ask it takes a request.
        if _store.is_file(root):
            raise _file(root)
        return Found(None, None, frozenset())
    for name in ("d", "array_metadatas"):
        if not tops.get(name, True):
            raise FileExistsError(
                f"`{name}` in `{root}` is a file or a link, where a checkpoint has a "
                "directory, and nothing is written through a link. It is left as it is."
            )
    if _files.INDEX in tops:
        got = _published.read_index(root)
        if got is not None:
            if not overwrite:
                raise FileExistsError(
                    f"There is a checkpoint at `{root}`, and `overwrite=False`."
                )
            return Found(got[0], got[1], frozenset(tops))
    elif _is_leftover(root, tops):
        return Found(None, None, frozenset(tops))
    if _files.CLAIM in tops:
        raise FileExistsError(_claimed(root))
    some = ", ".join(f"`{_text.escape(name)}`" for name in sorted(tops)[:3])
    other = " (an Orbax checkpoint?)" if "_METADATA" in tops else ""
    raise FileExistsError(
        f"`{root}` is not empty, and not a checkpoint of eqx_ckpt{other}: it has {some}"
        f"{' and more' if len(tops) > 3 else ''}. It is left as it is. Choose another "
        "path."
    )


def _file(root: Root) -> FileExistsError:
    hint = (
        "To convert a `.eqx` file, load it with `ec.tree_deserialise_leaves` into "
        "a model of the right structure, and save that to a new path."
        if root.url.endswith(".eqx")
        else "Choose a path that does not exist, or an empty directory."
    )
    return FileExistsError(
        f"`{root}` is a file, not a checkpoint, and is left as it is. {hint}"
    )


def _is_leftover(root: Root, tops: Mapping[str, bool]) -> bool:
    # A killed first save leaves its data and no index.
    if not tops.get("d") or set(tops) - _files.SIDE - {"d"}:
        return False
    inside = _store.list_top(_root.below(root, "d")) or {}
    ours = len(_published.saves(root)) == len(inside)
    return ours and bool(inside or len(tops) == 1)


def _own_entries(found: Found) -> set[str]:
    own = {*_files.SIDE, "d", _files.INDEX}
    if found.index is not None and found.index.layout == "zarr":
        own.update(map(_files.directory, found.index.leaves.names))
    return own


def _foreign(root: Root, found: Found, entries: Mapping[str, bool]) -> list[str]:
    """What is not part of a checkpoint: beside its files, and in its directories."""
    out = set(entries) - _own_entries(found)
    leaves: set[str] = set()
    if found.index and found.index.layout == "zarr":
        leaves.update(map(_files.directory, found.index.leaves.names))
    for name in {"d"} | (leaves if root.local is not None else set()):
        inside = _store.list_top(_root.below(root, name)) if entries.get(name) else None
        for entry in inside or ():
            of_leaf = name in leaves and entry in ("zarr.json", "c")
            if not of_leaf and not (name == "d" and _index.is_save_id(entry)):
                out.add(f"{name}/{entry}")
    return sorted(out)


@contextlib.contextmanager
def begin(root: Root, layout: str, overwrite: bool) -> Iterator[Place]:
    """A place to write a save to. What is in it is deleted unless it is published."""
    if root.local is not None:
        # The path itself may be a link; its target is what is written to.
        root = root._replace(local=pathlib.Path(os.path.realpath(root.local)))
    found = examine(root, overwrite)
    save = secrets.token_hex(8)
    swaps = "zarr" in (layout, found.index and found.index.layout)
    if swaps:
        _check_swap(root, found)
    with contextlib.ExitStack() as undo:
        if root.local is not None:
            with _local_place(root, layout, swaps, save, found, undo) as place:
                yield place
            return
        if swaps:
            _claim(root, save, undo)
        else:
            undo.callback(_discard, root, f"d/{save}")
            _write.check_conditions(root, f"d/{save}/digests")
        yield Place(root, root, save, found, [], undo)


@contextlib.contextmanager
def _local_place(
    root: Root,
    layout: str,
    swaps: bool,
    save: str,
    found: Found,
    undo: contextlib.ExitStack,
) -> Iterator[Place]:
    path = root.local
    assert path is not None
    for leftover in beside(path):
        delete_abandoned(leftover)
    if swaps:
        work = _beside_of(path, save)
        own = work.local
    else:
        own, work = path / "d" / save, root
    assert own is not None
    made = [p for p in own.parents if not p.exists()]
    undo.callback(_discard_empty, made)
    undo.callback(_discard, Root(str(own), own), "")
    levels = 1 + sum(p in made for p in path.parents)
    above = ["../" * n for n in range(1, levels + 1)]
    # Its lock tells others that the writer of this directory lives.
    with _write.new_directory(own):
        if swaps and layout == "ocdbt":
            _write.make_directories(work, [f"d/{save}"])
        try:
            yield Place(root, work, save, found, above, undo)
        except FileNotFoundError as e:
            # What is noted has been committed.
            if own.exists() or hasattr(e, "__notes__"):
                raise
            raise _replaced(root) from e


def encode(place: Place) -> bytes:
    """A place for other processes: see `joined`."""
    return json.dumps([place.save, place.work != place.root]).encode()


def joined(root: Root, word: bytes) -> tuple[Root, str]:
    """Where all processes of a run write, and the directory of the save there."""
    save, beside = json.loads(word)
    if root.local is not None:
        root = root._replace(local=pathlib.Path(os.path.realpath(root.local)))
        if beside:
            root = _beside_of(root.local, save)
    return root, f"d/{save}"


def _beside_of(path: Any, save: str) -> Root:
    own = path.with_name(f"{_stem(path.name)}.eqx_ckpt-{save}")
    return Root(str(own), own)


# What is added to a name here, in bytes.
_ADDED = len(".eqx_ckpt-") + 16


def _stem(name: str) -> str:
    """What a name beside a path begins with: a part and a digest, if it is long."""
    data = os.fsencode(name)
    if len(data) + _ADDED <= _root.LONGEST_NAME:
        return name
    return f"{data[:160].decode(errors='ignore')}%~{_index.digest(data)}"


def _claim(root: Root, save: str, undo: contextlib.ExitStack) -> None:
    # The files of this layout have the same names in every save, and this store cannot
    # write them elsewhere and rename them: so a path takes one save, ever.
    if not _write.replace_file(root, "", _files.CLAIM, save.encode(), None):
        raise FileExistsError(_claimed(root))

    @undo.callback
    def _() -> None:
        for key in sorted(_store.list_top(root) or {}, key=_files.CLAIM.__eq__):
            # There was nothing at the path: all is ours but what others save below it.
            if _store.read_file(_root.below(root, key), _files.INDEX) is None:
                _discard(root, key)


def _claimed(root: Root) -> str:
    return (
        f'A save to `{root}` with `layout="zarr"` is running or was interrupted; in '
        "this store nothing tells which. It is left as it is. Delete all of it when "
        "you know that nothing writes there, or choose another path."
    )


def _replaced(root: Root) -> RuntimeError:
    if _store.read_file(root, _files.INDEX) is None:
        return RuntimeError(
            f"What was at `{root}` was deleted while this save was being written, and "
            "so was this save. Nothing is there now: save again."
        )
    return RuntimeError(
        f"The checkpoint at `{root}` was replaced by another writer while this save "
        "was being written. The other one stands; this one is discarded."
    )


def _discard(root: Root, key: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        _write.delete_tree(root, key)


def _discard_empty(made: list[pathlib.Path]) -> None:
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def unpublished(root: Root, nbytes: int = 0) -> Iterator[None]:
    """Around what a save of so many bytes does before its commit.

    **Raises:** an error of the system as one that names the path, and says that nothing
    is lost.
    """
    try:
        yield
    except OSError as e:
        # What is not there was deleted by another writer.
        if e.errno is None or e.errno == errno.ENOENT or root.local is None:
            raise
        of = f" of {_text.size(nbytes)}" if nbytes else ""
        raise OSError(
            e.errno,
            f"{os.strerror(e.errno)}, while a save{of} was being written to `{root}`. "
            f"Nothing was saved, and the path is as it was before.{_advice(e)}",
        ) from e


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return " Make room there, or save elsewhere."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Choose a path that you may write to."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return " Too many files are open: raise the limit (`ulimit -n`)."
    return ""


def _check_swap(root: Root, found: Found) -> None:
    # Listed after the index was read, and the index looked at again after that: what is
    # listed is then of the checkpoint that was found.
    entries = _store.list_top(root) or {}
    if not entries:
        return
    if root.local is None:
        raise ValueError(
            f"The store of `{root}` cannot exchange two directories at once, so a "
            'checkpoint with `layout="zarr"` cannot be replaced there, nor replace '
            'another. Use `layout="ocdbt"`, or another path.'
        )
    foreign = _foreign(root, found, entries)
    if foreign:
        if not _store.is_still(root, _files.INDEX, found.file):
            raise _replaced(root)
        raise FileExistsError(
            f"`{root}` has `{_text.escape(foreign[0])}` in it, which is not part of "
            'the checkpoint, and `layout="zarr"` replaces the whole directory. Move it '
            "elsewhere."
        )


def publish(place: Place, index: Index, side: Mapping[str, bytes], sync: bool) -> None:
    """Makes a save that is written the checkpoint at its path."""
    data = _index.encode(index)
    if place.work == place.root:
        _publish_in_place(place, data, side, sync)
    else:
        _publish_by_swap(place, data, side, sync)


def _publish_in_place(
    place: Place, data: bytes, side: Mapping[str, bytes], sync: bool
) -> None:
    root, found = place.root, place.found
    own = f"d/{place.save}"
    # What follows the commit is to need no more space: it only renames and deletes.
    with unpublished(root):
        for key, value in {**side, _files.INDEX: data}.items():
            _write.stage_file(root, own, key, value, sync)
        if sync:
            _write.sync_directories(root, [own, "d", "", *place.above])
    # Whoever replaces what is at the path holds the lock of what is there, until other
    # readers' files are in place too.
    with _write.writers_lock(root):
        # A save that begins after the commit is not among these.
        others = _published.saves(root)
        # If this fails, the commit may have been made all the same: nothing is undone.
        undo = place.undo.pop_all()
        with _noted(f"What is at `{root}` is whole: this save, or what was there."):
            replaced = _write.replace_file(root, own, _files.INDEX, data, found.file)
        if not replaced:
            undo.close()
            raise _replaced(root)
        with _committed(root):
            _follow_up(place, others, side, sync)


def _follow_up(
    place: Place, others: list[str], side: Mapping[str, bytes], sync: bool
) -> None:
    root, found = place.root, place.found
    if sync:
        _write.sync_directories(root, [""])
    # Other readers' files follow; what they refer to until then is deleted last.
    for key, value in side.items():
        _write.swap_file(root, f"d/{place.save}", key, value)
    for key in (found.entries & _files.SIDE) - {key.partition("/")[0] for key in side}:
        _discard(root, key)
    if root.local is None:
        _discard(root, _files.CLAIM)
    for save in others:
        if save == place.save:
            continue
        if root.local is not None:
            delete_abandoned(root.local / "d" / save)
        else:
            _discard(root, f"d/{save}")
    if sync:
        inside = {key.rpartition("/")[0] for key in side}
        _write.sync_directories(root, {"", *inside})


def _committed(root: Root) -> contextlib.AbstractContextManager[None]:
    return _noted(
        f"The checkpoint at `{root}` is saved and whole all the same. What failed is "
        "what follows: the files for other readers, and the deletion of the checkpoint "
        "that was there before."
    )


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        e.add_note(note)
        raise


def _publish_by_swap(
    place: Place, data: bytes, side: Mapping[str, bytes], sync: bool
) -> None:
    root, work, found = place.root, place.work, place.found
    assert root.local is not None and work.local is not None
    inside = {key.rpartition("/")[0] for key in side}
    with unpublished(root):
        _write.make_directories(work, inside)
        for key, value in side.items():
            _write.write_file(work, key, [value], sync)
        _write.write_file(work, _files.INDEX, [data], sync)
        if sync:
            own = f"d/{place.save}"
            inner = [own, "d"] if _store.is_directory(work, own) else []
            _write.sync_directories(work, [*inner, *inside, ""])
    if not found.entries:
        undo = place.undo.pop_all()
        try:
            os.rename(work.local, root.local)
        except OSError as e:
            undo.close()
            if e.errno == errno.EBUSY:
                raise _mounted(root) from e
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise RuntimeError(
                f"`{root}` was written by another while this save was being written. "
                "It stands; this save is discarded."
            ) from e
        with _committed(root):
            if sync:
                _write.sync_directories(root, place.above)
        return
    with _write.writers_lock(root):
        if not _store.is_still(root, _files.INDEX, found.file):
            raise _replaced(root)
        _check_swap(root, found)
        undo = place.undo.pop_all()
        with contextlib.suppress(OSError):
            shutil.copymode(root.local, work.local)
        try:
            _exchange(work.local, root.local)
        except OSError:
            undo.close()
            raise
        with _committed(root):
            if sync:
                _write.sync_directories(root, place.above)
            # What came in since it was listed is not ours to delete.
            for name in set(_store.list_top(work) or {}) - _own_entries(found):
                os.rename(work.local / name, root.local / name)
            _discard(work, "")


def _mounted(root: Root) -> OSError:
    return OSError(
        errno.EBUSY,
        f"`{root}` is a mount point, which cannot be renamed, so a checkpoint with "
        '`layout="zarr"` cannot be put there. What is there is left as it is. Save to '
        'a directory below it, or use `layout="ocdbt"`.',
    )


_exchange_flag = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS.
_at_cwd = -100


def _exchange(a: pathlib.Path, b: pathlib.Path) -> None:
    """Lets two directories change places at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    x, y = os.fsencode(a), os.fsencode(b)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(_at_cwd, x, _at_cwd, y, _exchange_flag)
    elif hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(x, y, _exchange_flag)
    else:
        ctypes.set_errno(errno.ENOSYS)
        failed = -1
    if failed:
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise _mounted(Root(str(b), b))
        raise OSError(
            number,
            f"The file system of `{b}` cannot exchange two directories at once "
            f"({os.strerror(number)}), so the checkpoint there cannot be replaced with "
            '`layout="zarr"`, and is left as it is. Use another path.',
        )


def publish_file(
    root: Root,
    write: Callable[[BinaryIO], None],
    overwrite: bool,
    sync: bool,
    nbytes: int = 0,
) -> None:
    """Lets a file be written, and puts it at its path at once: whatever file is there,
    or, without `overwrite`, if there is none.

    Until then it is in a directory beside it, as a save that is to be swapped in.

    **Raises:** `FileExistsError`.
    """
    if root.local is None:
        directory, key = _root.split(root)
        buffer = io.BytesIO()
        write(buffer)
        if overwrite:
            _write.write_file(directory, key, [buffer.getbuffer()])
        elif not _write.replace_file(directory, "", key, buffer.getvalue(), None):
            raise _came(root)
        return
    path = pathlib.Path(os.path.realpath(root.local))
    for leftover in beside(path):
        delete_abandoned(leftover)
    work = _beside_of(path, secrets.token_hex(8))
    own = work.local
    assert own is not None
    made = [p for p in path.parents if not p.exists()]
    with contextlib.ExitStack() as undo:
        undo.callback(_discard_empty, made)
        undo.callback(_discard, work, "")
        with contextlib.ExitStack() as locked:
            with unpublished(root, nbytes):
                locked.enter_context(_write.new_directory(own))
                with open(own / "file", "wb") as file:
                    write(file)
                    file.flush()
                    if sync:
                        os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                shutil.copymode(path, own / "file")
            if overwrite:
                os.replace(own / "file", path)
            else:
                _put(root, own / "file", path)
            if sync:
                levels = range(1 + len(made))
                _write.sync_directories(
                    Root(str(path.parent), path.parent), ["../" * n for n in levels]
                )


def _put(root: Root, file: pathlib.Path, path: pathlib.Path) -> None:
    """Puts a file where there is none."""
    try:
        os.link(file, path)
    except FileExistsError:
        raise _came(root) from None
    except OSError:  # There are no links.
        if os.path.lexists(path):
            raise _came(root) from None
        os.replace(file, path)


def _came(root: Root) -> FileExistsError:
    return FileExistsError(
        f"There is a file at `{root}`, which was not there when this save began, and "
        "`overwrite=False`."
    )


def remove(root: Root) -> None:
    """Deletes a checkpoint: at once where there are renames, else its index first.

    **Raises:** `FileNotFoundError` if there is none, `ValueError` if something else is
    in its directory, or its index cannot be read; then nothing is deleted.
    """
    if root.local is not None and not root.local.is_dir():
        raise _nothing(root)
    with _write.writers_lock(root):
        got = _published.read_index(root)
        if got is None:
            raise _nothing(root)
        entries = _store.list_top(root) or {}
        foreign = _foreign(root, Found(*got, frozenset(entries)), entries)
        if foreign:
            raise ValueError(
                f"`{root}` has `{_text.escape(foreign[0])}` in it, which is not part "
                "of the checkpoint. Nothing was deleted. Move it elsewhere."
            )
        if root.local is None:
            for key in sorted(entries, key=_files.INDEX.__ne__):
                _write.delete_tree(root, key)
            return
        # Under this name it is a leftover, if this is killed or cannot be finished.
        work = _beside_of(root.local, secrets.token_hex(8))
        try:
            os.rename(root.local, work.url)
        except OSError as e:
            if e.errno != errno.EBUSY:
                raise
            # At a mount point. What is left of this is a leftover too.
            os.unlink(root.local / _files.INDEX)
            for key in entries.keys() - {_files.INDEX}:
                _discard(root, key)
            return
        _discard(work, "")


def _nothing(root: Root) -> FileNotFoundError:
    return FileNotFoundError(
        f"There is no checkpoint of eqx_ckpt at `{root}`, and nothing was deleted."
    )


# ---- What killed saves leave.


def beside(path: pathlib.Path) -> list[pathlib.Path]:
    """The directories of such saves to a path."""
    prefix = f"{path.name}.eqx_ckpt-"
    return [p for p in besides(path.parent) if p.name.startswith(prefix)]


def besides(directory: pathlib.Path) -> list[pathlib.Path]:
    """The directories of such saves to all paths in a directory. In a checkpoint with
    `layout="zarr"` leaves may have such names."""
    if (directory / _files.DIGESTS).exists():
        return []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        paths = [directory / e.name for e in entries if _files.BESIDE.fullmatch(e.name)]
        return [p for p in paths if not p.is_symlink() and not _is_array(p)]
    return []


# The first is that of the directory itself; a group lists those of its members.
_node_type = re.compile(rb'"node_type"\s*:\s*"([a-z]*)"')


def _is_array(path: pathlib.Path) -> bool:
    """Whether a directory is that of a leaf, whatever has become of the others."""
    root = Root(str(path), path)
    try:
        found = _store.read_file(root, "zarr.json", stop=4096)
    except (OSError, ValueError):
        return True  # Nobody knows.
    match = _node_type.search(found.data) if found else None
    return match is not None and match[1] == b"array"


def delete_abandoned(
    path: pathlib.Path, remove: bool = True, unless: Callable[[], bool] | None = None
) -> bool:
    """Deletes a directory whose writer is gone: nobody holds its lock. Not so where
    there are no locks, nor if it turns out under the lock that it must stay (`unless`).

    Returns whether it is a leftover.
    """
    if path.is_symlink():
        return False
    with contextlib.suppress(OSError), _write.lock(path) as held:
        if not held or (unless is not None and unless()):
            return False
        if remove:
            _discard(Root(str(path), path), "")
        return True
    return False
