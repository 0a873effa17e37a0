"""What each process of a save tells process 0 of the part that it has written."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._format import _files, _index
from .._format._index import SavedState
from .._storage._backend import Backend, Sink
from ._layout import Destination, Files, Layout, Save


class Said(NamedTuple):
    """What a process says once it has written its part: the digest of its note, and its
    own state, if it has one."""

    note: str
    own: SavedState | None = None


def tell(save: Save, files: Files, into: Destination) -> str:
    """Leaves a note of what this process has written. Returns its digest."""
    note = save.account(files)
    into.work.write(_note(save.index, into), [note])
    return _index.digest(note)


def write_own(own: bytes, save: Save, into: Destination[Sink]) -> SavedState:
    """Writes the own state of this process."""
    if isinstance(into.work, Backend):
        into.work.make_directories([into.own])
    key = f"{into.own}/{_files.own(save.index)}"
    into.work.write(key, [own], into.syncs)
    return SavedState(len(own), _index.digest(own))


def see_own(own: Sequence[SavedState], into: Destination[Backend]) -> None:
    for process, state in enumerate(own):
        with _seen(process, into):
            key = f"{into.own}/{_files.own(process)}"
            into.work.check_range(key, state.nbytes)


def see(
    save: Save, layout: Layout, said: Said, process: int, into: Destination
) -> Files:
    """The files of another process, once they have been seen."""
    key = _note(process, into)
    note = into.work.read(key)
    with _seen(process, into):
        if note is None or _index.digest(note.data) != said.note:
            raise ValueError(f"`{key}` is not there")
        files = layout.see(save, process, save.take(process, note.data), into)
    into.work.delete(key)
    return files


@contextlib.contextmanager
def _seen(process: int, into: Destination) -> Iterator[None]:
    try:
        yield
    except ValueError as e:
        raise RuntimeError(
            f"Process 0 does not see what process {process} has written to "
            f"`{into.work}` ({e}). The path has to be one that all processes share. "
            "Nothing was saved."
        ) from e


def _note(process: int, into: Destination) -> str:
    return f"{into.own}/part-{process}"
