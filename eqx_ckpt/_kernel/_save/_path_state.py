"""The state of a path before a save, and whether a save may go there."""

import contextlib
import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .._format import _files, _index, _layouts, _text
from .._load import _published
from .._storage import _store
from .._storage._backend import Backend, Value
from .._storage._local import LocalDirectory
from .._storage._objects import ObjectStore


class PathState(NamedTuple):
    """The names at a path: `entries`, and in an object store the `keys` of all files.
    If there is a checkpoint, `index` is the file of its index, and `leaf_entries` are
    the entries that are files or directories of leaves."""

    index: Value | None
    entries: frozenset[str]
    keys: tuple[str, ...] = ()
    leaf_entries: Sequence[str] = ()


NOTHING = PathState(None, frozenset())


def examine(root: Backend, overwrite: bool) -> PathState:
    """The state of a path. **Raises:** an error when a save may not go there."""
    found = _look(root, overwrite)
    for _ in range(2):
        if isinstance(found, PathState):
            return found
        # It may be a checkpoint that is being deleted, or was replaced meanwhile.
        with contextlib.ExitStack() as locked:
            with contextlib.suppress(OSError):
                locked.enter_context(root.lock(wait=True))
            found = _look(root, overwrite)
    if isinstance(found, PathState):
        return found
    raise found


def _look(root: Backend, overwrite: bool) -> PathState | FileExistsError:
    """Like `examine`, but returns the error of what may be a checkpoint that is on
    its way out."""
    if isinstance(root, LocalDirectory) and _files.is_beside(root.name):
        raise ValueError(
            f"`{root}` is a name for saves that are being written. Choose another path."
        )
    if root.entry() in ("file", "other"):
        raise _file_error(root)
    list_it = root.list_all if isinstance(root, ObjectStore) else root.list_top
    read = ft.partial(_published.read_index, root, _index.leaf_entries)
    # An object store may have a file at the path, and files below it.
    is_file = ft.partial(_store.is_file, root)
    # In a store all begin together. An index that must not be replaced is read only if
    # it is listed.
    looks = [list_it, is_file, read] if overwrite else [list_it, is_file]
    listed, is_file, *reads = _store.ahead(root, looks)
    there = listed() or {}
    keys = () if isinstance(there, dict) else tuple(there)
    # By each name at the top of the path, whether that is a directory.
    tops = there if isinstance(there, dict) else _store.tops_of(keys)
    if not tops:
        root.check_bucket()
        if is_file():
            raise _file_error(root)
        return NOTHING
    for name in ("d", "array_metadatas"):
        if not tops.get(name, True):
            raise FileExistsError(
                f"`{name}` in `{root}` is a file or a link, where a checkpoint has a "
                "directory, and nothing is written through a link. It is left as it is."
            )
    if _files.INDEX in tops:
        # If the index is in the list, but not there, it is looked for once more.
        got = (reads[0] if reads else read)() or read()
        if got is not None:
            if not overwrite:
                raise FileExistsError(
                    f"There is a checkpoint at `{root}`, and `overwrite=False`."
                )
            own = got.content
            return PathState(got.file, frozenset(tops), keys, own)
    elif _is_leftover(root, tops):
        return PathState(None, frozenset(tops), keys)
    if _files.CLAIM in tops:
        return claimed_error(root)
    some = ", ".join(f"`{_text.escape(name)}`" for name in sorted(tops)[:3])
    other = " (an Orbax checkpoint?)" if "_METADATA" in tops else ""
    return FileExistsError(
        f"`{root}` is not empty, and not a checkpoint of eqx_ckpt{other}: it has {some}"
        f"{' and more' if len(tops) > 3 else ''}. It is left as it is. Choose another "
        "path."
    )


def _file_error(root: Backend) -> FileExistsError:
    """The error of a save to a path where there is a file."""
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


def claimed_error(root: Backend) -> FileExistsError:
    """The error of a save to a path in a store that another save has claimed."""
    return FileExistsError(
        f'A save to `{root}` with `layout="zarr"` is running or was interrupted; in '
        "this store nothing tells which. It is left as it is. Delete all of it when "
        "you know that nothing writes there, or choose another path."
    )


def replaced_error(root: Backend, found: PathState) -> RuntimeError:
    """The error of a save to a path where another writer has replaced or deleted what
    was `found`, or what this save has written."""
    now = root.read(_files.INDEX)
    if (now and now.data) == (found.index and found.index.data):
        return RuntimeError(
            f"What this save had written to `{root}` was deleted while it was being "
            "written. Nothing was saved, and the path is as it was before: save again."
        )
    if now is None:
        return RuntimeError(
            f"What was at `{root}` was deleted while this save was being written, and "
            "so was this save. Nothing is there now: save again."
        )
    return RuntimeError(
        f"The checkpoint at `{root}` was replaced by another writer while this save "
        "was being written. The other one stands; this one is discarded."
    )


def own_entries(leaf_entries: Iterable[str]) -> set[str]:
    """The names that a checkpoint has at its path, with these of leaves."""
    return {*_files.SIDE, _files.SIGNATURE, "d", _files.INDEX, *leaf_entries}


def foreign(
    root: LocalDirectory, leaf_entries: Sequence[str], entries: Mapping[str, bool]
) -> list[str]:
    """The names in a directory that are no part of the checkpoint there, which has
    `leaf_entries` for leaves."""

    def inside(name: str) -> Iterable[str]:
        return (root.below(name).list_top() if entries.get(name) else None) or ()

    return foreign_among(leaf_entries, entries, inside)


def foreign_among(
    leaf_entries: Sequence[str],
    entries: Iterable[str],
    inside: Callable[[str], Iterable[str]],
) -> list[str]:
    """The entries that `foreign` gives; `inside` lists the directory of a name."""
    out, of_leaves = set(entries) - own_entries(leaf_entries), set(leaf_entries)
    for name in {"d", _files.SIGNATURE} | of_leaves:
        for entry in inside(name):
            of_leaf = name in of_leaves and entry in _layouts.MEMBERS
            if not of_leaf and not (name == "d" and _index.is_save_id(entry)):
                out.add(f"{name}/{entry}")
    return sorted(x for x in out if not _files.is_of_system(x.rpartition("/")[2]))
