"""Publishes a save at once: at every instant the path holds the old or the new.

A save writes its data under its own save id. Then it writes the index, on condition
that the index is still the one it found: this is the commit. Then it deletes the data
of other saves. Where a layout has fixed names (`zarr`), the save is written beside the
path, and the two directories change places at once.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from . import _index, _layout, _store
from ._index import Index
from ._store import Root, Value


# Files at the root of a checkpoint that are ours, besides `d/`, the index and leaves.
SIDE = frozenset(
    "_METADATA _sharding _strings.json manifest.ocdbt array_metadatas zarr.json "
    "eqx_ckpt.digests".split()
)


class Found(NamedTuple):
    """What is at a path before a save. `index` is None unless it is a checkpoint."""

    index: Index | None
    file: Value | None
    entries: frozenset[str]


class Place(NamedTuple):
    """Where a save is written, and where it goes."""

    root: Root
    work: Root
    save: str
    found: Found


def read_index(root: Root) -> tuple[Index, Value] | None:
    """The index at a root and the file it is in; None where there is none.

    **Raises:** `ValueError` when it is not one that can be read.
    """
    try:
        value = _store.read_file(root, _store.INDEX, limit=_index.MAX_INDEX)
        return None if value is None else (_index.decode(value.data), value)
    except ValueError as e:
        raise ValueError(f"The checkpoint at `{root}` cannot be read: {e}.") from e


def examine(root: Root, overwrite: bool) -> Found:
    """What is at `root`. **Raises:** an error when a save may not go there."""
    local = root.local
    if local is not None and local.exists() and not local.is_dir():
        hint = (
            "To convert a `.eqx` file, load it with `eqx.tree_deserialise_leaves` into "
            "a model of the right structure, and save that to a new path."
            if local.suffix == ".eqx"
            else "Choose a path that does not exist, or an empty directory."
        )
        raise FileExistsError(
            f"`{root}` is a file, not a checkpoint, and is left as it is. {hint}"
        )
    tops = _store.list_top(root) or {}
    if not tops:
        return Found(None, None, frozenset())
    for name in ("d", "array_metadatas"):
        if not tops.get(name, True):
            raise FileExistsError(
                f"`{name}` in `{root}` is a file or a link, where a checkpoint has a "
                "directory, and nothing is written through a link. It is left as it is."
            )
    if _store.INDEX in tops:
        got = read_index(root)
        if got is not None:
            if not overwrite:
                raise FileExistsError(
                    f"There is a checkpoint at `{root}`, and `overwrite=False`."
                )
            return Found(got[0], got[1], frozenset(tops))
    elif _is_leftover(root, tops):
        return Found(None, None, frozenset(tops))
    some = ", ".join(f"`{name}`" for name in sorted(tops)[:3])
    other = " (an Orbax checkpoint?)" if "_METADATA" in tops else ""
    raise FileExistsError(
        f"`{root}` is not empty, and not a checkpoint of eqx_ckpt{other}: it has {some}"
        f"{' and more' if len(tops) > 3 else ''}. It is left as it is. Choose another "
        "path."
    )


def _is_leftover(root: Root, tops: Mapping[str, bool]) -> bool:
    # A killed first save leaves its data and no index.
    if not tops.get("d") or set(tops) - SIDE - {"d"}:
        return False
    saves = _store.list_top(_below(root, "d")) or {}
    return all(
        is_directory and _index.is_save_id(s) for s, is_directory in saves.items()
    )


def _below(root: Root, key: str) -> Root:
    local = root.local / key if root.local else None
    return root._replace(url=f"{root.url}/{key}", local=local)


def _own_entries(index: Index) -> set[str]:
    own = {*SIDE, "d", _store.INDEX}
    if index.layout == "zarr":
        own.update(map(_layout.directory, index.names))
    return own


@contextlib.contextmanager
def begin(root: Root, layout: str, overwrite: bool) -> Iterator[Place]:
    """A place to write a save to. What is in it is deleted unless it is published."""
    found = examine(root, overwrite)
    save = secrets.token_hex(8)
    swaps = layout == "zarr" or (
        found.index is not None and found.index.layout == "zarr"
    )
    work = root
    if swaps:
        _check_swap(root, found)
        if root.local is not None:
            # The path itself may be a link; its target is what is replaced.
            target = pathlib.Path(os.path.realpath(root.local))
            root = root._replace(local=target)
            beside = target.with_name(f"{target.name}.eqx_ckpt-{save}")
            work = Root(str(beside), beside)
            _clean_beside(target)
    place = Place(root, work, save, found)
    data = "" if swaps else f"d/{save}"
    made = _made_directories(work)
    _store.make_directories(work, ["", f"d/{save}"] if layout == "ocdbt" else [""])
    try:
        # The lock tells others that the writer of this directory lives.
        own = work.local / data if work.local is not None else None
        with _store.lock(own) if own is not None else contextlib.nullcontext():
            yield place
    except BaseException:
        if work != root:
            _discard(work, "")
        elif layout == "ocdbt":
            _discard(work, f"d/{save}")
            _discard_empty(work, made)
        raise


def _made_directories(root: Root) -> list[pathlib.Path]:
    # The directories that the save has to make, the innermost first.
    if root.local is None:
        return []
    out = []
    for path in (root.local / "d", root.local, *root.local.parents):
        if path.exists():
            break
        out.append(path)
    return out


def _discard(root: Root, key: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        _store.delete_tree(root, key)


def _discard_empty(root: Root, made: list[pathlib.Path]) -> None:
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def _check_swap(root: Root, found: Found) -> None:
    if found.index is None and not found.entries:
        return
    if root.local is None:
        raise ValueError(
            f"The store of `{root}` cannot exchange two directories at once, so a "
            'checkpoint with `layout="zarr"` cannot be replaced there, nor replace '
            'another. Use `layout="ocdbt"`, or another path.'
        )
    own = _own_entries(found.index) if found.index else set(found.entries)
    foreign = sorted(found.entries - own)
    if foreign:
        raise FileExistsError(
            f"`{root}` has `{foreign[0]}` in it, which is not part of the checkpoint, "
            'and `layout="zarr"` replaces the whole directory. Move it elsewhere.'
        )


def _is_abandoned(path: pathlib.Path) -> bool:
    """Whether the writer of a directory is gone: nobody holds its lock."""
    if path.is_symlink():
        return False
    try:
        with _store.lock(path) as held:
            return held
    except OSError:
        return False


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
    in_files = bool(_store.is_directory(root, own))
    if sync:
        _store.sync_directories(root, [own, "d", "", ".."] if in_files else [""])
    aside = own if in_files else ""
    if not _store.replace_file(root, aside, _store.INDEX, data, found.file, sync):
        raise RuntimeError(
            f"The checkpoint at `{root}` was replaced by another writer while this "
            "save was being written. The other one stands; this one is discarded."
        )
    if sync:
        _store.sync_directories(root, [""])
    # From here on the save is committed. Other readers' files follow; what they refer
    # to until then is deleted last.
    for key, value in side.items():
        _store.swap_file(root, aside, key, value, sync)
    _delete_stale(root, found, set(side))
    if in_files:
        for save in _store.list_top(_below(root, "d")) or {}:
            if save == place.save or not _index.is_save_id(save):
                continue
            if root.local is None or _is_abandoned(root.local / "d" / save):
                _discard(root, f"d/{save}")
    if sync:
        _store.sync_directories(root, {"", *(key.rpartition("/")[0] for key in side)})


def _delete_stale(root: Root, found: Found, written: set[str]) -> None:
    # Side files of the replaced checkpoint that the new one does not have.
    for key in (found.entries & SIDE) - {key.partition("/")[0] for key in written}:
        _discard(root, key)


def _publish_by_swap(
    place: Place, data: bytes, side: Mapping[str, bytes], sync: bool
) -> None:
    root, work, found = place.root, place.work, place.found
    assert root.local is not None and work.local is not None
    inside = {key.rpartition("/")[0] for key in side}
    _store.make_directories(work, inside)
    for key, value in side.items():
        _store.write_file(work, key, [value], sync)
    _store.write_file(work, _store.INDEX, [data], sync)
    if sync:
        own = f"d/{place.save}"
        inner = [own, "d"] if _store.is_directory(work, own) else []
        _store.sync_directories(work, [*inner, *inside, ""])
    if found.entries:
        _exchange(work.local, root.local)
        mine = found.index.save if found.index else None
        got = read_index(work)
        if (got[0].save if got else None) != mine:
            _exchange(work.local, root.local)
            raise RuntimeError(
                f"The checkpoint at `{root}` was replaced by another writer while this "
                "save was being written. The other one stands; this one is discarded."
            )
    else:
        try:
            os.rename(work.local, root.local)
        except OSError as e:
            raise RuntimeError(
                f"`{root}` was written by another while this save was being written. "
                "It stands; this save is discarded."
            ) from e
    if sync:
        _store.sync_directories(root, [".."])
    if found.entries:
        _discard(work, "")


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
        ctypes.set_errno(38)  # ENOSYS
        failed = -1
    if failed:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"The file system of `{b}` cannot exchange two directories at once "
            f"({os.strerror(number)}), so the checkpoint there cannot be replaced with "
            '`layout="zarr"`, and is left as it is. Use another path.',
        )


def _clean_beside(target: pathlib.Path) -> None:
    # What killed saves by swap left beside the path.
    pattern = re.compile(re.escape(target.name) + r"\.eqx_ckpt-[0-9a-f]{16}")
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            if pattern.fullmatch(path.name) and _is_abandoned(path):
                _discard(Root(str(path), path), "")
