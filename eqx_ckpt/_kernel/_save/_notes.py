"""Notes of the processes of a save on their parts, for process 0."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from .._format import _files, _index, _schema
from .._format._schema import COUNT, DIGEST, optional
from .._storage._backend import Backend
from ._writing import Destination, Files, LeafWriter, Sink


# The report of a process: the digest of its note, and its own state, if it has one.
_REPORT = str, optional((COUNT, DIGEST))


def tell(writer: LeafWriter, files: Files, into: Destination) -> str:
    """Leaves a note on the files of this process. Returns its digest."""
    note = writer.account(files)
    into.work.write(_note(writer.index, into), [note])
    return _index.digest(note)


def write_own(
    own: bytes, writer: LeafWriter, into: Destination[Sink]
) -> tuple[int, str]:
    """Writes the own state of this process."""
    into.make_directory()
    key = f"{into.data_key}/{_files.own(writer.index)}"
    into.work.write(key, [own], into.syncs)
    return len(own), _index.digest(own)


def see(
    writer: LeafWriter,
    layout: Any,
    files: Files,
    words: Sequence[bytes],
    into: Destination[Backend],
) -> tuple[Files, list[tuple[int, str]]]:
    """The files and the own states of all processes, once they have been seen: after
    the `files` of this one those of others, by their `words`."""
    reports = [_schema.read(word, "what is saved", _REPORT) for word in words]
    for process, (digest, _) in enumerate(reports[1:], 1):
        key = _note(process, into)
        note = into.work.read(key)
        with _seen(process, into):
            if note is None or _index.digest(note.data) != digest:
                raise ValueError(f"`{key}` is not there")
            ends = writer.take(process, note.data)
            files = files + layout.see(writer, process, ends, into)
        into.work.delete(key)
    states = [tuple(state) for _, state in reports if state is not None]
    for process, (nbytes, _) in enumerate(states):
        with _seen(process, into):
            key = f"{into.data_key}/{_files.own(process)}"
            into.work.check_range(key, nbytes)
    return files, states


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
    return f"{into.data_key}/part-{process}"
