"""A near disk: the parts of near steps that are on it.

A part is a checkpoint of one file, `eqx_ckpt.near/<run>/<save>/<process>.zip`, that one
process has saved alone. Its metadata says what it is a part of; a copy of it, on the
disk of another process, is the same file. What a disk holds is told by looking.
"""

import hashlib
import os
import pathlib
import shutil
from typing import Any, NamedTuple

import numpy as np
import xxhash

from .._load import _checkpoint
from .._load._checkpoint import Checkpoint


_PLACE = "eqx_ckpt.near"


# Files that are no parts, or cannot be read, and why.
Problems = dict[pathlib.Path, Exception]


class NearPart(NamedTuple):
    """What `process` of `processes` has saved of a step. All that were saved together
    have one `save`, which process 0 has drawn."""

    run: str
    attempt: int
    step: int
    save: str
    processes: int
    process: int


class Disk:
    """The near disk of this process. Others may share it."""

    def __init__(self, path: str | os.PathLike[str]):
        text = os.fspath(path)
        if not isinstance(text, str) or "://" in text:
            raise ValueError(
                f"`near` must be a directory of this node's own disk, not {path!r}."
            )
        self.path = pathlib.Path(os.path.abspath(os.path.expanduser(text))) / _PLACE

    def file(self, part: NearPart) -> pathlib.Path:
        return self.place(part.run, part.save, part.process)

    def place(self, run: str, save: str, process: int) -> pathlib.Path:
        """The file of the part of a process."""
        return self.path / run / save / f"{process}.zip"

    def find(self, run: str = "*") -> tuple[list[NearPart], Problems]:
        """The parts that are here, as far as their indices tell; and what is wrong with
        other files."""
        parts: list[NearPart] = []
        problems: Problems = {}
        for file in sorted(self.path.glob(f"{run}/*/*.zip")):
            try:
                part = _part_in(_checkpoint.open(file))
            except (OSError, ValueError, RuntimeError) as e:
                problems[file] = e
                continue
            if part is None or self.file(part) != file:
                text = f"`{file}` is no part of a near step, or of another."
                problems[file] = ValueError(text)
            else:
                parts.append(part)
        return parts, problems

    def keep(self, part: NearPart) -> None:
        """Deletes the saves of the run that a step supersedes which is whole: those of
        no newer step. What cannot be deleted, or not be read, now may be later."""
        parts, problems = self.find(part.run)
        stay = {part.save, *(other.save for other in parts if other.step > part.step)}
        stay |= {file.parent.name for file, e in problems.items() if _may_pass(e)}
        for directory in self.path.glob(f"{part.run}/*"):
            if directory.name not in stay:
                shutil.rmtree(directory, ignore_errors=True)


def _may_pass(error: Exception) -> bool:
    """Whether a file that cannot be read now may be read later."""
    return isinstance(error, OSError)


def _part_in(ckpt: Checkpoint) -> NearPart | None:
    found = ckpt.metadata.get("near") if isinstance(ckpt.metadata, dict) else None
    fields: list[Any] = found if isinstance(found, list) else []
    if list(map(type, fields)) != [str, int, int, str, int, int]:
        return None
    part = NearPart(*fields)
    return part if 0 <= part.process < part.processes else None


class Outgoing:
    """A file that is read to be sent. Errors are kept: see `_exchange`."""

    def __init__(self, file: pathlib.Path | None):
        self.error: Exception | None = None
        self._file = file

    def size(self) -> int:
        """0 of what cannot be read."""
        try:
            return 0 if self._file is None else self._file.stat().st_size
        except OSError:
            return 0

    def read(self, start: int, into: np.ndarray) -> None:
        try:
            assert self._file is not None
            with open(self._file, "rb") as file:
                file.seek(start)
                if file.readinto(into.data) != into.size:
                    raise OSError(f"the end of `{self._file}` is missing")
        except Exception as e:
            self.error = self.error or e


class Incoming:
    """A file that is written as it comes: beside its place, until all of it is there.
    Errors are kept."""

    def __init__(self, file: pathlib.Path | None):
        self.error: Exception | None = None
        self._place = file
        self._is_begun = False
        self._digest = xxhash.xxh3_128()
        # Other processes may share the disk.
        self._beside = file and file.with_name(f"{file.name}.{os.getpid()}")

    def write(self, data: np.ndarray) -> None:
        try:
            self._digest.update(data.data)
            assert self._beside is not None
            self._beside.parent.mkdir(parents=True, exist_ok=True)
            with open(self._beside, "ab" if self._is_begun else "wb") as file:
                file.write(data.data)
            self._is_begun = True
        except Exception as e:
            self.error = self.error or e

    def finish(self, wanted: str | None = None) -> str:
        """Puts it in its place, if it has the digest that is `wanted`. Returns its own.

        **Raises:** what has gone wrong.
        """
        if self._beside is None or self._place is None:
            return ""
        found = self._digest.hexdigest()
        if self.error is not None or wanted not in (None, found):
            self._beside.unlink(missing_ok=True)
        else:
            os.replace(self._beside, self._place)
        if self.error is not None:
            raise self.error
        return found


def digest(file: pathlib.Path) -> str:
    """That of the bytes of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
