"""The history of a run: all saves of its steps, and metrics that are added to them.

It is a directory of files that nobody changes: one is written for each save. Where
there are many of a size they are joined, so that their number grows as the logarithm of
that of the steps. Several processes may write and join at a time: a row that is twice
there counts once.
"""

import itertools as it
import json
import secrets
from collections.abc import Iterable
from typing import Any

from .._format import _history, _json
from .._format._history import HistoryRow, PLACE
from .._format._journal import StepRow
from .._runtime import _log
from .._storage import _store
from .._storage._backend import Backend
from . import _numbered


# So many files of a size are joined to one; but not those that have more rows.
_JOINED, _MOST = 16, 2**16
# How often the files are listed, where others join them meanwhile.
_LOOKS = 100


class History:
    """The rows of a run, by the steps and the ids of their saves."""

    def __init__(self, root: Backend):
        self._root = root
        # The files that are known, and those whose rows are.
        self._names: set[str] = set()
        self._taken: set[str] = set()
        self._is_listed = self._is_read = False
        self._saved: dict[tuple[int, str], HistoryRow] = {}
        self._added: dict[tuple[int, str], list[HistoryRow]] = {}

    # ---- Reading it.

    def refresh(self) -> set[int]:
        """Reads what is new. Returns the steps to which metrics were added since.

        **Raises:** `OSError` if it cannot be read now.
        """
        changed: set[int] = set()
        for _ in range(_LOOKS):
            new = sorted(self._list() - self._taken)
            looks = _store.each(self._root, _read, new)
            for name, rows in zip(new, looks):
                if rows:
                    changed |= self._take(name, rows)
            # One that is not there has been joined with others.
            if None not in looks:
                break
        self._is_read = True
        return changed

    def is_behind(self) -> bool:
        """Whether there are rows that `refresh` would read."""
        return bool(self._list() - self._taken)

    def has(self, step: int, save: str) -> bool:
        """Whether it has a save."""
        if (step, save) not in self._saved and not self._is_read:
            self.refresh()
        return (step, save) in self._saved

    def rows(self) -> list[HistoryRow]:
        """A row for each save that is known, with all its metrics."""
        saved = list(self._saved.values())
        return [x._replace(metrics=self._over(x)) for x in saved]

    def over(self, row: StepRow) -> StepRow:
        """A row of a step, with the metrics that were added."""
        return row._replace(metrics=self._over(row))

    def _over(self, row: StepRow | HistoryRow) -> dict[str, Any]:
        return {**row.metrics, **self.added(row.step, row.save)}

    def added(self, step: int, save: str) -> dict[str, Any]:
        """The metrics that were added to a save: of one name, the last."""
        rows = sorted(self._added.get((step, save), ()), key=lambda row: row.time)
        return {name: x for row in rows for name, x in row.metrics.items()}

    def _list(self) -> set[str]:
        _numbered.check(self._root, PLACE)
        names = self._root.below(PLACE).list_top() or {}
        self._names = set(filter(_history.count_in, names))
        self._is_listed = True
        return self._names

    def _take(self, name: str, rows: Iterable[HistoryRow]) -> set[int]:
        """Takes the rows of a file. Returns the steps to which metrics are new."""
        changed: set[int] = set()
        for row in rows:
            key = row.step, row.save
            if row.attempt is not None:
                self._saved.setdefault(key, row)
            elif row not in (known := self._added.setdefault(key, [])):
                known.append(row)
                changed.add(row.step)
        self._taken.add(name)
        return changed

    # ---- Writing it.

    def append(self, rows: list[HistoryRow]) -> None:
        """Adds rows. They are there after a power cut, once this returns."""
        if not self._is_listed:
            self._list()
        self._write(rows)
        size = _size(len(rows))
        while size < _size(_MOST) and self._is_full(size) and self._join(size):
            size += 1

    def _write(self, rows: list[HistoryRow]) -> None:
        data = _history.encode(rows)
        name = _history.name(len(rows), secrets.token_hex(8))
        self._root.make_directories([PLACE])
        self._root.write(f"{PLACE}/{name}", [data], sync=True)
        self._root.sync_directories([PLACE, ""])
        self._root.sync_above()
        self._names.add(name)
        self._take(name, rows)

    def _of_size(self, size: int) -> list[str]:
        return [x for x in self._names if _size(_history.count_in(x)) == size]

    def _is_full(self, size: int) -> bool:
        # What cannot be joined now is not tried again at once.
        return len(self._of_size(size)) % _JOINED == 0

    def _join(self, size: int) -> bool:
        """Joins all files of a size, unless others have. Returns whether it has."""
        self._list()
        names = self._of_size(size)
        looks = _store.each(self._root, _read, names)
        parts = {name: rows for name, rows in zip(names, looks) if rows}
        if len(parts) < _JOINED:
            return False
        rows = {json.dumps(row): row for row in it.chain.from_iterable(parts.values())}
        try:
            self._write(list(rows.values()))
        except ValueError:  # It would be more than is read.
            return False
        # They are not gone before what has all of them would survive a power cut.
        for name in parts:
            self._root.delete(f"{PLACE}/{name}")
            self._names.discard(name)
        return True


def _size(count: int) -> int:
    return (count.bit_length() - 1) // (_JOINED.bit_length() - 1)


def _read(root: Backend, name: str) -> list[HistoryRow] | None:
    """The rows of a file; none of one that is torn, as it may be being written, or that
    is damaged; None if it is not there."""
    found = root.read(f"{PLACE}/{name}", limit=_json.MAX_INDEX)
    if found is None:
        return None
    try:
        return _history.decode(found.data)
    except ValueError as e:
        text = f"`{PLACE}/{name}` of `{root}` is not read: {e}"
        _log.say(_log.DEBUG, text)
        return []
