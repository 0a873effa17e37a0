"""Small files that a manager has in a directory of its own at the root of the run, and
that are called by numbers.
"""

import contextlib
import re
import secrets
from collections.abc import Iterable

from .._save import _leftovers
from .._storage._backend import Backend
from .._storage._local import LocalDirectory


PINS = "eqx_ckpt.pins"
# Whether a name is that of a directory in which such a file is written.
is_work_name = re.compile(r"new-[0-9a-f]{16}").fullmatch
# Nobody counts farther: see `_schema.COUNT`.
_step = re.compile(r"0|[1-9][0-9]{0,17}")


def is_step(name: str) -> bool:
    """Whether a directory of a run is called as that of a step."""
    return _step.fullmatch(name) is not None


# As Orbax calls steps: with a prefix, or with zeros before the number.
_orbax_name = re.compile(r"(?:.+_)?0*(0|[1-9][0-9]{0,17})", re.DOTALL)


def number_of(name: str) -> int | None:
    """The number of the step that a name is of, in our form or in one of Orbax."""
    found = _orbax_name.fullmatch(name)
    return int(found[1]) if found else None


def steps_in(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names if is_step(name)]


def numbers(root: Backend, place: str) -> list[int]:
    """**Raises:** `ValueError` if the directory is a symbolic link."""
    check_not_linked(root, place)
    return steps_in(root.below(place).list_top() or {})


def create_file(root: Backend, place: str, number: int, data: bytes) -> None:
    """Makes a file, whole or not at all, or raises `FileExistsError`."""
    check_not_linked(root, place)
    root.make_directories([place])
    try:
        if isinstance(root, LocalDirectory):
            for leftover in new_directories(root, place):
                _leftovers.delete_abandoned(leftover)
            work = root.below(f"{place}/new-{secrets.token_hex(8)}")
            try:
                # Its lock says that it is being written.
                with work.make_locked():
                    work.write("file", [data], sync=True)
                    new = root.below(f"{place}/{number}")
                    work.below("file").rename(new, overwrite=False)
            finally:
                work.delete("")
        else:
            root.write(f"{place}/{number}", [data])
    finally:
        # Others may delete the run meanwhile.
        with contextlib.suppress(FileNotFoundError):
            root.sync_directories([place, ""])
            root.sync_above()


def new_directories(root: Backend, place: str) -> list[LocalDirectory]:
    """The directories in which such files are being written, or were when a process was
    killed."""
    if not isinstance(root, LocalDirectory) or root.is_link(place):
        return []
    directory = root.below(place)
    names = directory.list_top() or {}
    works = [name for name in names if names[name] and is_work_name(name)]
    return list(map(directory.below, works))


def has(root: Backend, place: str, number: int) -> bool:
    check_not_linked(root, place)
    return root.has(f"{place}/{number}")


def delete(root: Backend, place: str, number: int) -> None:
    check_not_linked(root, place)
    root.delete(f"{place}/{number}")


def check_not_linked(root: Backend, place: str) -> None:
    """**Raises:** `ValueError` if the directory is a symbolic link."""
    if root.is_link(place):
        raise ValueError(
            f"`{place}` in `{root}` is a symbolic link, and a manager follows none. "
            "What is in it is not known, and nothing is saved or deleted because of "
            "it. Put the directory in its place, or delete the link."
        )
