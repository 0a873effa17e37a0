"""Notes of the processes of a save on their parts, for process 0."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._format import _files, _index, _schema
from .._format._index import OwnState
from .._format._schema import COUNT, DIGEST, optional
from .._storage._backend import Backend
from ._writing import Destination, LayoutWriter, RunsOfFiles, Sink, WriteTask


# The report of a process: the digest of its note, and its own state, if it has one.
_REPORT = str, optional((COUNT, DIGEST))


class CollectedNotes(NamedTuple):
    """The data files of all processes of a save, and the own states of those that have
    some, in their order."""

    files: RunsOfFiles
    states: list[OwnState]


def leave_note(task: WriteTask, files: RunsOfFiles, into: Destination) -> str:
    """Leaves a note on the files of this process. Returns its digest."""
    note = task.account(files)
    into.work.write(_note_key(task.process, into), [note])
    return _index.digest(note)


def write_own_state(own: bytes, process: int, into: Destination[Sink]) -> OwnState:
    """Writes the own state of a process."""
    into.make_directory()
    key = f"{into.data_key}/{_files.own(process)}"
    into.work.write(key, [own], into.sync)
    return OwnState(len(own), _index.digest(own))


def collect_notes(
    task: WriteTask,
    writer: LayoutWriter,
    files: RunsOfFiles,
    gathered: Sequence[bytes],
    into: Destination[Backend],
) -> CollectedNotes:
    """Checks that all that the reports `gathered` from the processes name is there.
    `files` are those of this process, 0.

    **Raises:** `RuntimeError` if it is not.
    """
    reports = [_schema.read(report, "what is saved", _REPORT) for report in gathered]
    for process, (digest, _) in enumerate(reports[1:], 1):
        key = _note_key(process, into)
        note = into.work.read(key)
        with _errors_of_notes(process, into):
            if note is None or _index.digest(note.data) != digest:
                raise ValueError(f"`{key}` is not there")
            ends = task.take(process, note.data)
            files = files + writer.files_of_process(task, process, ends, into)
        into.work.delete(key)
    states = [OwnState(*state) for _, state in reports if state is not None]
    for process, state in enumerate(states):
        with _errors_of_notes(process, into):
            key = f"{into.data_key}/{_files.own(process)}"
            into.work.check_range(key, state.nbytes)
    return CollectedNotes(files, states)


@contextlib.contextmanager
def _errors_of_notes(process: int, into: Destination) -> Iterator[None]:
    try:
        yield
    except ValueError as e:
        raise RuntimeError(
            f"Process 0 does not see what process {process} has written to "
            f"`{into.work}` ({e}). The path has to be one that all processes share. "
            "Nothing was saved."
        ) from e


def _note_key(process: int, into: Destination) -> str:
    return f"{into.data_key}/part-{process}"
