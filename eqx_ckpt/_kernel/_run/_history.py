"""The history of a run: all saves of its steps, and metrics that are added to them.

It is a directory of files that nobody changes: one is written for each save. Where
there are many of a size they are joined, so that their number grows as the logarithm of
that of the steps, until files have so many rows that they stay. Several processes may
write and join at a time: a row that is twice there counts once.
"""

import itertools as it
import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .._format import _history, _json
from .._format._history import HistoryRow, PLACE
from .._format._journal import JournalRow
from .._runtime import _log
from .._storage import _store
from .._storage._backend import Backend
from . import _numbered


R = TypeVar("R", JournalRow, HistoryRow)

# What the rows of a file are.
_KINDS = "saved", "added"
# So many files of one size class (`_size_class`) are joined to one, but not those of
# about `_MOST` rows or more.
_JOINED, _MOST = 16, 2**16
# How often the files are listed, where others join them meanwhile.
_LOOKS = 100


class History:
    """The rows of a run, by the steps and the ids of their saves."""

    def __init__(self, root: Backend):
        self._root = root
        # The files that there are, and those whose rows are known.
        self._names: set[str] = set()
        self._taken: set[str] = set()
        self._is_listed = self._is_read = False
        self._saved: dict[tuple[int, str], HistoryRow] = {}
        self._added: dict[tuple[int, str], list[HistoryRow]] = {}
        # The steps to which metrics were added, in the order in which that was read.
        self.changes: list[int] = []

    # ---- Reading it.

    def refresh(self) -> None:
        """Reads what is new. **Raises:** `OSError` if it cannot be read now."""
        self._read_rows(_KINDS, None)
        self._is_read = True

    def refresh_added(self, names: Iterable[str] | None = None) -> None:
        """Reads what is new of added metrics. `names`: of all files, if they have been
        listed. **Raises:** as above."""
        self._read_rows(_KINDS[1:], names)

    def _read_rows(self, kinds: Sequence[str], names: Iterable[str] | None) -> None:
        for _ in range(_LOOKS):
            new = self._new(kinds, names)
            looks = _store.each(self._root, self._rows_in, new)
            for name, rows in zip(new, looks):
                if rows:
                    self._take(name, rows)
            # One that is not there has been joined with others.
            if None not in looks:
                break
            names = None

    def is_behind(self) -> bool:
        """Whether metrics were added that `refresh_added` would read."""
        new = self._new(_KINDS[1:], None)
        # A file without rows is torn, or damaged, and may stay so for good.
        return any(x != [] for x in _store.each(self._root, self._rows_in, new))

    def _new(self, kinds: Sequence[str], names: Iterable[str] | None) -> list[str]:
        """The files of some kinds whose rows are not known."""
        self._list(names)
        return sorted(x for x in self._names - self._taken if _kind(x)[0] in kinds)

    def has(self, step: int, save: str) -> bool:
        """Whether it has a save."""
        if (step, save) not in self._saved and not self._is_read:
            self.refresh()
        return (step, save) in self._saved

    def row_of(self, step: int, save: str) -> HistoryRow | None:
        """The row of a save, if it is known."""
        return self._saved.get((step, save))

    def rows(self) -> list[HistoryRow]:
        """A row for each save that is known, with all its metrics."""
        saved = list(self._saved.values())
        return list(map(self.with_added, saved))

    def with_added(self, row: R) -> R:
        """A row of a save, with the metrics that were added."""
        metrics = {**row.metrics, **self.added(row.step, row.save)}
        return row._replace(metrics=metrics)

    def added(self, step: int, save: str) -> dict[str, Any]:
        """The metrics that were added to a save: of one name, the last."""
        rows = sorted(self._added.get((step, save), ()), key=lambda row: row.time)
        return {name: x for row in rows for name, x in row.metrics.items()}

    def _list(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            _numbered.check_not_linked(self._root, PLACE)
            names = self._root.below(PLACE).list_top() or {}
        there = set(filter(_history.parse_name, names))
        if self._names and self._names.isdisjoint(there):
            # All were joined since, or another run has come in the place of this one.
            # Either way what is there says all.
            self._taken, self._is_read = set(), False
            self._saved.clear()
            self._added.clear()
        self._names, self._is_listed = there, True

    def _take(self, name: str, rows: Iterable[HistoryRow]) -> None:
        for row in rows:
            key = row.step, row.save
            if row.attempt is not None:
                self._saved.setdefault(key, row)
            elif row not in (known := self._added.setdefault(key, [])):
                known.append(row)
                self.changes.append(row.step)
        self._taken.add(name)

    def _rows_in(self, name: str) -> list[HistoryRow] | None:
        """The rows of a file; none of one that is torn, as it may be being written, or
        that is damaged; None if it is not there."""
        found = self._root.read(f"{PLACE}/{name}", limit=_json.MAX_INDEX)
        if found is None:
            return None
        try:
            return _history.FORMAT.decode(found.data)
        except ValueError as e:
            text = f"`{PLACE}/{name}` of `{self._root}` is not read: {e}"
            _log.say(_log.DEBUG, text)
            return []

    # ---- Writing it.

    def add(self, step: int, save: str, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to a save, unless they are what was added last. They come after
        all that were added before, whatever the clocks of hosts say."""
        self.refresh_added()
        if metrics.items() <= self.added(step, save).items():
            return
        before = [row.time for row in self._added.get((step, save), ())]
        when = max([time.time(), *(math.nextafter(x, math.inf) for x in before)])
        self.append([HistoryRow(step, save, None, when, None, {**metrics})])

    def append(self, rows: list[HistoryRow]) -> None:
        """Adds rows, all of saves or all of added metrics. They are there after a power
        cut, once this returns."""
        if not self._is_listed:
            self._list()
        kind, size = _kind(self._write_rows(rows))
        while size < _size_class(_MOST) and self._join(kind, size):
            size += 1

    def _write_rows(self, rows: list[HistoryRow]) -> str:
        data = _history.FORMAT.encode(rows)
        name = _history.name(rows, secrets.token_hex(8))
        self._root.make_directories([PLACE])
        # It says to `clean` that a file which is not whole is being written.
        with self._root.below(PLACE).lock(wait=True):
            self._root.write(f"{PLACE}/{name}", [data], sync=True)
        self._root.sync_directories([PLACE, ""])
        self._root.sync_above()
        self._names.add(name)
        self._take(name, rows)
        return name

    def _alike(self, *kind: Any) -> list[str]:
        return [name for name in [*self._names] if _kind(name) == kind]

    def _join(self, kind: str, size: int) -> bool:
        """Joins all files of a size, if they are many, and others have not joined them.
        Returns whether it has."""
        # What cannot be joined now is not tried again at once.
        if len(self._alike(kind, size)) % _JOINED:
            return False
        self._list()
        names = self._alike(kind, size)
        looks = _store.each(self._root, self._rows_in, names)
        parts = {name: rows for name, rows in zip(names, looks) if rows}
        if len(parts) < _JOINED:
            return False
        rows = {json.dumps(row): row for row in it.chain.from_iterable(parts.values())}
        try:
            self._write_rows(list(rows.values()))
        except ValueError:  # It would be more than is read.
            return False
        # They are not gone before what has all of them would survive a power cut.
        for name in parts:
            self._root.delete(f"{PLACE}/{name}")
            self._names.discard(name)
        return True


def _size_class(count: int) -> int:
    """The size class of files with so many rows: `_JOINED` files of one class make one
    of the next."""
    return (count.bit_length() - 1) // (_JOINED.bit_length() - 1)


def _kind(name: str) -> tuple[str, int]:
    """The kind of the rows of a file, and its size class."""
    found = _history.parse_name(name)
    assert found is not None
    return found[0], _size_class(found[1])
