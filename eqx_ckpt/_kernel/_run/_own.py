"""The own states of the processes of a run, which are part of a step.

Each is a checkpoint of one file, beside the data of the step.
"""

import io
from typing import Any

from jax._src import distributed
from jaxtyping import PyTree

from .._load import _checkpoint, _deserialise, _extra_files
from .._load._checkpoint import Checkpoint
from .._runtime import _processes
from .._save import _serialise
from .._storage._open_files import FileBytes
from .._tree import _leaf


def _is_stored(leaf: object) -> bool:
    return _leaf.is_storable(leaf) or isinstance(leaf, (str, bytes))


def encode(own: PyTree) -> list[bytes]:
    """An own state as a save takes it: in a list, which is empty if there is none."""
    if own is None:
        return []
    file = io.BytesIO()
    try:
        _serialise.tree_serialise_leaves(file, own, _is_stored, processes="own")
    except (TypeError, ValueError) as e:
        e.add_note("It is in `own`, the own state of this process.")
        raise
    return [file.getvalue()]


def load(ckpt: Checkpoint, own: PyTree) -> Any:
    """The state of this process, like `own`; or the list of all, for "all".

    **Raises:** `ValueError` if the step has no such states.
    """
    source = _checkpoint.source_of(ckpt)
    count = len(source.index.own)
    if not count:
        raise _without(ckpt)
    if is_all(own):
        return [decode(data, own) for data in _extra_files.own_states(source)]
    check_count(ckpt.path, count)
    data = _extra_files.read_own(source, distributed.global_state.process_id or 0)
    return decode(data, own)


def check_count(path: str, count: int) -> None:
    """**Raises:** `ValueError` for the own states of another number of processes."""
    if count != (here := _processes.count()):
        raise ValueError(
            f"The checkpoint at `{path}` has the own states of {count} processes, "
            f'and this run has {here}: pass `own="all"`, and deal the list of them out.'
        )


def bytes_of(ckpt: Checkpoint, process: int) -> bytes:
    """The own state of a process, as it is stored."""
    source = _checkpoint.source_of(ckpt)
    if not source.index.own:
        raise _without(ckpt)
    return _extra_files.read_own(source, process)


def decode(data: bytes, own: PyTree) -> Any:
    """The inverse of `encode`: like `own`, or as plain containers for "all"."""
    file = FileBytes(data)
    if is_all(own):
        tree = _checkpoint.open(file).tree
        return _deserialise.materialise(tree, processes="own")
    load = _deserialise.tree_deserialise_leaves
    return load(file, own, _is_stored, processes="own")


def _without(ckpt: Checkpoint) -> ValueError:
    return ValueError(
        f"The checkpoint at `{ckpt.path}` was saved without `own`: leave `own` out "
        "here too."
    )


def is_all(own: PyTree) -> bool:
    return isinstance(own, str) and own == "all"
