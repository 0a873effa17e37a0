"""Steps of a run in an object store, by one listing of it, without a request for
each of them.

The index of a step is written last, and deleted first. What is in `d/<save id>` is of
one save, and the index that is committed deletes the data of all others. So a step with
an index and the data of one save is that save, whatever was read of it earlier.
"""

import contextlib
import functools as ft
import itertools as it
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from .._format import _files, _index
from .._format._history import PLACE
from .._limits import limits
from .._runtime import _threads
from .._storage._backend import Backend
from .._storage._objects import KeyList, ObjectStore
from . import _attempts, _numbered


# The directory of the checkpoint in that of a step.
ITEM = "default"
# Most steps have no more keys than this. So many requests one after the other are no
# worse than many that are nearly empty.
_KEYS, _PAGES = 10, 4
# Lists that are asked for at a time.
_LISTS = 64
_key = re.compile(
    r"(0|[1-9][0-9]{0,17})/(?:default/(?:(d)/([^/]+)/.|(.+))|([^/]+)/_METADATA$)?"
)


class Listing(NamedTuple):
    """The steps of a run. One that the list shows to be complete has the id of its save
    here, or "" if the data of several saves are there; any other has None. `attempts`
    are numbers, and `history` the names of files: None if they have to be listed.
    `trees`: what steps of Orbax have in the place of `default`."""

    steps: dict[int, str | None]
    attempts: list[int] | None
    history: list[str] | None
    trees: dict[int, list[str]] = {}


def list_run(
    root: ObjectStore,
    known: Callable[[], Collection[int]],
    asked: KeyList | None = None,
) -> Listing:
    """Lists a run. `known` gives steps that there have been, or any others: by these
    the store is asked for parts of the list that are a few pages long. As that may take
    a request, all of the list is asked for at the same time; or it was `asked` for
    before, and may be there."""
    asked = asked or root.ask_all()
    others: dict[str, list[str]] = {_attempts.PLACE: [], PLACE: []}
    trees: dict[int, list[str]] = {}
    complete: set[int] = set()
    saves: dict[int, set[str]] = {}
    jobs: list[Any] = [asked.wait]
    if not asked.is_there() and (parts := _parts(known())):
        jobs = [ft.partial(root.list_all, start) for start in parts]
    lists = _threads.gather_requests(jobs, _LISTS)
    for key in it.chain.from_iterable(lists):
        found = _key.match(key)
        if found is None:
            place, _, name = key.partition("/")
            others.get(place, []).append(name)
            continue
        step = int(found[1])
        own = saves.setdefault(step, set())
        if found[5]:
            trees.setdefault(step, []).append(found[5])
        if found[4] == _files.INDEX:
            complete.add(step)
        elif found[2] and _index.is_save_id(found[3]):
            own.add(found[3])
    only = {step: own.pop() if len(own) == 1 else "" for step, own in saves.items()}
    steps = {step: save if step in complete else None for step, save in only.items()}
    attempts = _numbered.steps_in(others[_attempts.PLACE])
    return Listing(steps, attempts, others[PLACE], trees)


def _parts(known: Collection[int]) -> list[str]:
    """Starts of the keys of steps, each in one part; none if there are few steps."""
    if len(known) * _KEYS <= limits.listed_keys:
        return []
    steps = _split("", [str(step) for step in known])
    return [*steps, f"{_attempts.PLACE}/", f"{PLACE}/"]


def _split(start: str, names: Iterable[str]) -> list[str]:
    inside = [name for name in names if name.startswith(start)]
    if start and len(inside) * _KEYS <= _PAGES * limits.listed_keys:
        return [start]
    digits = [start + digit for digit in "0123456789"]
    parts = [part for digit in digits for part in _split(digit, inside)]
    return [f"{start}/", *parts] if start else parts


def names_in(directory: Backend) -> Mapping[str, bool]:
    """The names in a directory, which may not be there, and whether each is of one."""
    with contextlib.suppress(NotADirectoryError):
        return directory.list_top() or {}
    return {}
