"""Near saves on a disk: whose they are, and which their runs need no more."""

from typing import NamedTuple

from .._kernel._errors import DamagedError
from .._kernel._format import _files
from .._kernel._load import _checkpoint
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._run import _attempts, _numbered
from .._kernel._storage import _root
from .._kernel._storage._backend import Backend
from .._kernel._storage._local import LocalDirectory
from ._disk import Disk, NearPart


class NearSave(NamedTuple):
    """Near save of the run at `root`, as far as it is on a disk. `stays` says why it
    may be needed; "" if nobody needs it."""

    path: str
    root: str
    step: int
    attempt: int
    stays: str

    def __str__(self) -> str:
        whose = f"near step {self.step}, attempt {self.attempt} at `{self.root}`"
        return f"{self.path}  {whose}: {self.stays or 'it is not needed'}"


def near_saves(directory: Backend) -> list[NearSave]:
    """The near saves on a near disk, by run and step."""
    disk = Disk(directory.url)
    parts = {(part.run, part.step, part.save): part for part in disk.find_parts()[0]}
    return [_near_save(disk, parts[key]) for key in sorted(parts)]


def unneeded_paths(directory: Backend) -> list[str]:
    """Paths of near saves on a disk that nobody needs."""
    return [save.path for save in near_saves(directory) if not save.stays]


def _near_save(disk: Disk, part: NearPart) -> NearSave:
    file = disk.file(part)
    try:
        ckpt = _checkpoint.open(file)
        root = ckpt.metadata.get("root", "") if isinstance(ckpt.metadata, dict) else ""
        root = root if isinstance(root, str) else ""
        stays = _stays(root, part, _time(ckpt))
    except (OSError, ValueError, DamagedError) as e:
        root, stays = "", str(e)
    return NearSave(str(file.parent), root, part.step, part.attempt, stays)


def _time(ckpt: Checkpoint) -> int | float:
    return 0 if ckpt.saved is None else ckpt.saved.time


def _stays(root: str, part: NearPart, time: int | float) -> str:
    """Why a part may be needed, that was saved at a time. It is not, if the root of its
    run has got a whole step as new since."""
    # It is a file that says so: nothing is asked over a network because of it.
    here = _root.resolve(root) if root and "://" not in root else None
    if not isinstance(here, LocalDirectory):
        return "which steps its run has cannot be told here"
    last = _attempts.last(here)
    if last is None or last.run != part.run:
        return "its run is not there"
    for step in _numbered.steps_in(here.list_top() or ()):
        index = f"{step}/default/{_files.INDEX}"
        if step >= part.step and here.has(index):
            if _time(_checkpoint.open(f"{root}/{step}/default")) >= time:
                return ""
    return "its run has no newer step"
