"""Publishes a save: at every instant the path holds the old or the new.

A save writes its data under its own save id. Then it writes the index, on condition
that the index is still of the save it found: this is the commit. Then it deletes the
data of other saves. Where files have fixed names (if the layout is not packed, that of
the save before was not, or for Orbax), the save is written beside the path, and the two
directories change places. Each strategy is a class of transactions: `_inplace`, or
`_instore` in an object store, and `_swapped`. `_zips` publishes a checkpoint of one
file.
"""

import contextlib
import json
import time
from typing import cast, NamedTuple

from .._format import _index, _layouts, _schema
from .._format._index import Index
from .._limits import limits
from .._runtime._processes import Processes
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from .._storage._objects import ObjectStore
from . import _leftovers, _path_state, _swapped
from ._inplace import InPlace
from ._instore import Claimed, InStore
from ._options import SaveOptions
from ._swapped import Swapped
from ._transaction import CheckpointTransaction
from ._write_leaves import RootFiles


def begin(
    root: Backend, options: SaveOptions, held: contextlib.ExitStack
) -> CheckpointTransaction:
    """A transaction of a save to a path. At the end of `held` what is in it is deleted
    unless it is published."""
    # The path itself may be a link; its target is what is written to.
    root = root.real()
    found = _path_state.examine(root, options.overwrite)
    # Files at the root have the same names in each save.
    is_packed = options.layout in _layouts.PACKED
    swaps = options.orbax or not is_packed or bool(found.leaf_entries)
    if swaps:
        _swapped.check(root, found)
    undo = held.enter_context(contextlib.ExitStack())
    if isinstance(root, LocalDirectory):
        txn = (Swapped if swaps else InPlace)(root, found, undo)
    else:
        txn = (Claimed if swaps else InStore)(cast(ObjectStore, root), found, undo)
    txn.begin(held)
    if swaps and is_packed:
        txn.work.make_directories([txn.data_key])
    return txn


def announce(txn: CheckpointTransaction) -> bytes:
    """Where a transaction writes, as process 0 tells the others."""
    return json.dumps([txn.save_id, txn.work != txn.root]).encode()


_LOCATION = _schema.ID, bool


class Location(NamedTuple):
    """Where the processes of a save write: a directory, and the key in it of the
    directory of the save."""

    work: Backend
    data_key: str


def await_location(root: Backend, location: bytes, processes: Processes) -> Location:
    """Waits until the place that process 0 has announced is there.

    **Raises:** `RuntimeError` if it does not appear, or process 0 has failed.
    """
    save_id, is_beside = _schema.read(
        location, "what process 0 says of a save", _LOCATION
    )
    work = root.real()
    if is_beside and isinstance(work, LocalDirectory):
        work = _leftovers.directory_of(work, save_id)
    data_key = f"d/{save_id}"
    end = time.monotonic() + limits.directory_seconds

    def is_shown() -> bool:
        is_there = work.is_remote or work.is_directory(data_key)
        if not is_there and time.monotonic() > end:
            raise RuntimeError(
                f"`{work.url}/{data_key}`, which process 0 has made, is not there. "
                "The path has to be one that all processes share."
            )
        return is_there

    # Process 0 may have failed by now, and have deleted it.
    processes.wait_until(is_shown, is_collective=False)
    return Location(work, data_key)


def publish(txn: CheckpointTransaction, root_files: RootFiles, durable: bool) -> None:
    """Makes what a save has written the checkpoint at its path."""
    index = root_files.index
    txn.last_file = _layouts.digests(index.layout, txn.save_id)
    txn.publish(encoded(index), root_files.side, durable)


def encoded(index: Index) -> bytes:
    """The bytes of an index, which a reader has decoded: nothing else is published.

    **Raises:** `RuntimeError` if it does not.
    """
    sections, tree = _index.encode_sections(index), index.leaves.tree
    data = _index.sealed(b",".join(sections))
    try:
        _index.check(sections, data, tree)
    except ValueError as e:
        raise RuntimeError(
            f"What was written cannot be read: {e}. Nothing was saved, and the path is "
            "as it was before. This is an error in eqx_ckpt: please report it."
        ) from e
    return data
