"""The attempts of a run: which of its steps count.

A run that goes back to an older step, or begins anew, begins an attempt; with near
disks each start does. An attempt has a file `eqx_ckpt.run/<number>` at the root. That
has the id of the run, and the near save that the attempt began from. It also lists the
steps at the root that earlier attempts had left by then. A step at the root is told by
the id of its save, so that one that is saved again is of the new attempt.

At the root an attempt counts once it has a step of its own. So if its first save is
killed, the run is as it was.
"""

import functools as ft
import json
import re
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .._errors import DamagedError
from .._format import _schema
from .._format._schema import COUNT, ID, optional
from .._storage import _store
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from . import _numbered


PLACE = "eqx_ckpt.run"
_MAX_BYTES = 2**26


class Attempt(NamedTuple):
    """`near_save`: the one that it began from; "" for none. `after`: the step at the
    root that it went on from, if it did. `earlier`: the steps at the root that do not
    count, with the ids of their saves; "" for those of Orbax, and those that were
    damaged."""

    run: str
    number: int = 0
    near_save: str = ""
    after: int | None = None
    earlier: list[tuple[int, str]] = []

    def encode(self) -> bytes:
        """The part of an attempt that near disks need, as JSON."""
        return json.dumps(self[:3]).encode()

    @staticmethod
    def decode(word: bytes) -> "Attempt":
        """**Raises:** `DamagedError`."""
        said = "what process 0 says of an attempt"
        return Attempt(*_schema.read(word, said, (ID, COUNT, _SAVE)))


_SAVE = re.compile(f"{ID.pattern}|")


class Lineage:
    """The attempt at the root that counts, if there is one; and which steps earlier
    ones have left, by `is_save`: whether a step is still that save."""

    def __init__(
        self, attempt: Attempt | None, is_save: Callable[[int, str], bool]
    ) -> None:
        self.attempt = attempt
        self._saves = dict(attempt.earlier) if attempt else {}
        self._is_save = ft.cache(is_save)

    @property
    def number(self) -> int:
        """The number of the attempt; 0 before the first."""
        return self.attempt.number if self.attempt else 0

    def is_left(self, step: int) -> bool:
        """Whether an earlier attempt has left a step."""
        save = self._saves.get(step)
        return save is not None and self._is_save(step, save)

    def is_own(self, step: int) -> bool:
        """Whether a step that is there was saved since the attempt began."""
        after = None if self.attempt is None else self.attempt.after
        return (after is None or step > after) and not self.is_left(step)

    def note_saved(self, step: int) -> None:
        """Is told that a step was saved since, which no earlier attempt has left."""
        self._saves.pop(step, None)

    def left(self, steps: Iterable[int]) -> set[int]:
        return {step for step in steps if self.is_left(step)}


class AttemptCache:
    """The attempts of a run that were read, by their numbers and, on a disk, the stamps
    of their files.

    An attempt never changes, but another run may come in the place of this one. In an
    object store there are no stamps: so the cache is emptied when no file of the
    history is one that was there before.
    """

    def __init__(self, root: Backend):
        self._root = root
        self._known: dict[tuple[int, str], Attempt] = {}
        self._history_names: set[str] = set()

    def note_history(self, names: Iterable[str]) -> None:
        """Is told of the files of the history in each list of an object store."""
        before, self._history_names = self._history_names, {*names}
        if self._history_names.isdisjoint(before):
            self._known.clear()

    def numbers(self, listed: list[int] | None) -> list[int]:
        """The numbers of the attempts, the last first: as they are `listed`, or by a
        list. **Raises:** `ValueError` if their directory is a link."""
        found = _numbered.numbers(self._root, PLACE) if listed is None else listed
        return sorted(found, reverse=True)

    def attempt(self, number: int) -> Attempt | None:
        """An attempt; None if there is none of this number. **Raises:** as `last`."""
        is_local = isinstance(self._root, LocalDirectory)
        stamp = self._root.stamp(f"{PLACE}/{number}") if is_local else ""
        known = self._known.get((number, stamp))
        found = known or read_attempt(self._root, number)
        if found is not None:
            self._known[number, stamp] = found
        return found


def last(root: Backend) -> Attempt | None:
    """The last attempt of the run at a root.

    **Raises:** `DamagedError` if nobody can tell: if an older one were taken for it,
    steps would count that do not.
    """
    return _last(root, _numbered.numbers(root, PLACE))


def _last(root: Backend, numbers: Iterable[int]) -> Attempt | None:
    for number in sorted(numbers, reverse=True):
        if (found := read_attempt(root, number)) is not None:
            return found
    return None


def read_attempt(root: Backend, number: int) -> Attempt | None:
    """An attempt; None if there is none of this number. **Raises:** as `last`."""
    look = ft.partial(_read_once, root, number)
    try:
        return _store.look_twice(root, look, lambda found: found is not None)
    except ValueError as e:
        raise DamagedError(
            f"Which steps of `{root}` count cannot be told: {e}. None is read, and "
            f"nothing was deleted. Delete `{PLACE}` there to go on from the newest "
            "step, without near steps."
        ) from e


def _read_once(root: Backend, number: int) -> Attempt | None:
    key = f"{PLACE}/{number}"
    value = root.read(key, limit=_MAX_BYTES)
    # Of one that was killed as it began nothing counts.
    if value is None or not value.data:
        return None
    own = range(number, number + 1)
    form = ID, own, _SAVE, optional(COUNT), [(COUNT, _SAVE)]
    found = Attempt(*_schema.read(value.data, f"`{key}`", form))
    return found._replace(earlier=[(step, save) for step, save in found.earlier])


def begin(
    root: Backend,
    near_save: str = "",
    after: int | None = None,
    earlier: Iterable[tuple[int, str]] = (),
    counting: Attempt | None = None,
) -> Attempt:
    """Begins an attempt. The files of those before it are deleted, but for the last and
    the one that is `counting`. **Raises:** as `last`."""
    numbers = _numbered.numbers(root, PLACE)
    before = _last(root, numbers) or Attempt(secrets.token_hex(8))
    number = max([0, *numbers]) + 1
    new = Attempt(before.run, number, near_save, after, list(earlier))
    _numbered.create_file(root, PLACE, number, json.dumps(new).encode())
    stay = {before.number, counting.number if counting else 0}
    for other in numbers:
        if other not in stay:
            _numbered.delete(root, PLACE, other)
    return new
