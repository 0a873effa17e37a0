"""A near disk: the parts of near steps that are on it.

A part is a checkpoint of one file, `eqx_ckpt.near/<run>/<save>/<process>.zip`, that one
process has saved alone. Its metadata says what it is a part of; a copy of it, on the
disk of another process, is the same file. What a disk holds is told by looking.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._kernel._format import _schema
from .._kernel._format._schema import COUNT, ID
from .._kernel._load import _checkpoint
from .._kernel._run import _numbered
from .._kernel._save import _transaction
from .._kernel._storage import _backend, _root


_PLACE = "eqx_ckpt.near"


# Files that are no parts, or cannot be read, and why.
Problems = dict[pathlib.Path, Exception]


class NearPart(NamedTuple):
    """Part of a step that `process` of `processes` has saved. All that were saved
    together have one `save`, which process 0 has drawn."""

    run: str
    attempt: int
    step: int
    save: str
    processes: int
    process: int


def is_part(value: Any) -> bool:
    return _schema.fits(value, _ROW) and value[5] < value[4]


_ROW = (ID, COUNT, COUNT, ID, COUNT, COUNT)
_REPORT = [is_part], [(str, str, str)], str


class DiskReport(NamedTuple):
    """The parts on the disk of a process; the problems of other files, each with the
    run, the save and the reason; and the path of the disk."""

    parts: list[NearPart]
    problems: list[list[str]]
    path: str


def read_report(word: bytes, index: int) -> DiskReport:
    what = f"what process {index} says of its near disk"
    parts, problems, path = _schema.read(word, what, _REPORT)
    return DiskReport([NearPart(*part) for part in parts], problems, path)


class Disk:
    """The near disk of this process. Others may share it. No link in it is followed."""

    def __init__(self, path: str | os.PathLike[str]):
        text = os.fspath(path)
        if not isinstance(text, str) or "://" in text:
            raise ValueError(
                f"`near` must be a directory of this node's own disk, not {path!r}."
            )
        self.root = _root.resolve(text)

    def file(self, part: NearPart) -> pathlib.Path:
        return self.place(part.run, part.save, part.process)

    def place(self, run: str, save: str, process: int) -> pathlib.Path:
        """The file of the part of a process."""
        return self._path(f"{_PLACE}/{run}/{save}/{process}.zip")

    def _path(self, key: str) -> pathlib.Path:
        return pathlib.Path(self.root.url, key)

    def key(self, file: pathlib.Path) -> str:
        return str(file.relative_to(self.root.url))

    def make_room(self, file: pathlib.Path) -> None:
        """Makes the directory of a file that is about to be written, and deletes what
        is in its place. **Raises:** `OSError` where a link is on the way."""
        key = self.key(file)
        with _transaction.errors_before_commit(self.root):
            self.root.make_directories([os.path.dirname(key)])
            self.root.delete(key)

    def find_parts(self, run: str | None = None) -> tuple[list[NearPart], Problems]:
        """The parts that are here, as far as their indices tell; and what is wrong with
        other files. **Raises:** `ValueError` if all of it is behind a link."""
        parts: list[NearPart] = []
        problems: Problems = {}
        _numbered.check_not_linked(self.root, _PLACE)
        for key in self._keys(run, problems):
            file = self._path(key)
            try:
                is_file = self.root.has(key)
                part = _part_in(_checkpoint.open(file).metadata) if is_file else None
            except (OSError, ValueError, RuntimeError) as e:
                problems[file] = e
                continue
            if part is None or self.file(part) != file:
                text = f"`{file}` is no part of a near step, or of another."
                problems[file] = ValueError(text)
            else:
                parts.append(part)
        return parts, problems

    def _keys(self, run: str | None, problems: Problems) -> list[str]:
        """Keys of the files of parts, in order: of a run, or of all."""
        runs = self._names(_PLACE, problems) if run is None else [f"{_PLACE}/{run}"]
        saves = [x for key in runs for x in self._names(key, problems)]
        files = [x for key in saves for x in self._names(key, problems, ids=False)]
        return [key for key in files if key.endswith(".zip")]

    def _names(self, key: str, problems: Problems, ids: bool = True) -> list[str]:
        """The keys in a directory, in order: those that are ids, or all. Nothing else
        is ours."""
        try:
            inside = self.root.below(key).list_top() or ()
        except OSError as e:
            # As the file of a part: the last names of all are of a run and a save.
            problems[self._path(key + "/?" * (3 - key.count("/")))] = e
            return []
        names = sorted(name for name in inside if not ids or _schema.fits(name, ID))
        return [f"{key}/{name}" for name in names]

    def report(self) -> bytes:
        """Report for process 0: the parts that are here; the run, the save and the
        error of each that cannot be used; and where the disk is.

        **Raises:** an error that says nothing of the files, as this process is full."""
        parts, problems = self.find_parts()
        for e in filter(_backend.is_exhausted, problems.values()):
            raise e
        rows = [(f.parts[-3], f.parts[-2], str(e)) for f, e in problems.items()]
        return json.dumps([parts, rows, self.root.url]).encode()

    def keep(self, part: NearPart) -> None:
        """Deletes the saves of the run that a step supersedes which is whole: those of
        no newer step. What cannot be deleted, or not be read, now may be later."""
        parts, problems = self.find_parts(part.run)
        stay = {part.save, *(other.save for other in parts if other.step > part.step)}
        # What the system does not read now it may read later.
        cut = [file for file, e in problems.items() if isinstance(e, OSError)]
        stay |= {file.parent.name for file in cut}
        for save in self._names(f"{_PLACE}/{part.run}", {}):
            if save.rpartition("/")[2] not in stay:
                with contextlib.suppress(OSError):
                    self.root.delete(save)


def _part_in(metadata: object) -> NearPart | None:
    found = metadata.get("near") if isinstance(metadata, dict) else None
    return NearPart(*found) if found is not None and is_part(found) else None


def _unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_into(file: pathlib.Path | None, start: int, into: np.ndarray) -> None:
    """Reads a file that is sent."""
    assert file is not None
    with open(file, "rb", opener=_unlinked) as opened:
        opened.seek(start)
        if opened.readinto(into.data) != into.size:
            raise OSError(f"the end of `{file}` is missing")


class Incoming:
    """A file that is written as it comes: beside its place, until all of it is
    there."""

    def __init__(self, disk: Disk, file: pathlib.Path | None):
        self._disk, self._place = disk, file
        self._is_begun = False
        self._digest = xxhash.xxh3_128()
        # Other processes may share the disk.
        self._beside = file and file.with_name(f"{file.name}.{os.getpid()}")

    def write(self, data: np.ndarray) -> None:
        self._digest.update(data.data)
        assert self._beside is not None
        if not self._is_begun:
            self._disk.make_room(self._beside)
        mode = "ab" if self._is_begun else "xb"
        with open(self._beside, mode, opener=_unlinked) as file:
            file.write(data.data)
        self._is_begun = True

    def finish(self, error: Exception | None, wanted: str | None = None) -> str:
        """Puts it in its place, if it has the digest that is `wanted`. Returns its own.

        **Raises:** the `error` that it came with.
        """
        if self._beside is None or self._place is None:
            return ""
        found = self._digest.hexdigest()
        if error is not None or wanted not in (None, found):
            self._beside.unlink(missing_ok=True)
        else:
            os.replace(self._beside, self._place)
        if error is not None:
            raise error
        return found


def digest(file: pathlib.Path) -> str:
    """Digest of the bytes of a file."""
    with open(file, "rb", opener=_unlinked) as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
