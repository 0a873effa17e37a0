"""Small files that a manager has in a directory of its own at the root of the run, and
that are called by numbers.
"""

import re
from collections.abc import Iterable

from .._storage._backend import Backend


# Nobody counts farther: see `_schema.COUNT`.
_step = re.compile(r"0|[1-9][0-9]{0,17}")


def is_step(name: str) -> bool:
    """Whether a directory of a run is called as that of a step."""
    return _step.fullmatch(name) is not None


def steps_in(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names if is_step(name)]


def numbers(root: Backend, place: str) -> list[int]:
    """**Raises:** `ValueError` if the directory is a symbolic link."""
    check(root, place)
    return steps_in(root.below(place).list_top() or {})


def write(root: Backend, place: str, number: int, data: bytes) -> None:
    """Makes a file, or raises `FileExistsError`."""
    check(root, place)
    root.make_directories([place])
    try:
        root.write(f"{place}/{number}", [data], sync=True)
    finally:
        root.sync_directories([place, ""])
        root.sync_above()


def delete(root: Backend, place: str, number: int) -> None:
    check(root, place)
    root.delete(f"{place}/{number}")


def check(root: Backend, place: str) -> None:
    """**Raises:** `ValueError` if the directory is a symbolic link."""
    if root.is_link(place):
        raise ValueError(
            f"`{place}` in `{root}` is a symbolic link, and a manager follows none. "
            "What is in it is not known, and nothing is saved or deleted because of "
            "it. Put the directory in its place, or delete the link."
        )
