"""The journal of a run, which saves the reading of the index of each step.

A file says what the indices of most steps say. It is a cache: a row of it counts only
while the index has the stamp that it had when it was read; or if a list of an object
store shows that the step is still the save of the row. Any other index is read, and
what was read of a step is kept here and nowhere else.
"""

import contextlib
import copy
import functools as ft
import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast, TypeVar

from .._format import _files, _index_summary, _journal, _json
from .._format._index_summary import IndexSummary
from .._format._journal import JournalRow
from .._limits import limits
from .._storage import _store
from .._storage._backend import Backend, Value


T = TypeVar("T")

# Steps that a save reads at most for the journal.
_MAX_STEPS = 1024


def index_of(step: int) -> str:
    return f"{step}/default/{_files.INDEX}"


class Journal:
    """Cache of the indices of a run, by the stamps of their files."""

    def __init__(self, root: Backend, list_steps: Callable[[], Iterable[int]]):
        self._root = root
        self._list_steps = list_steps
        self._summaries: dict[tuple[str, str], IndexSummary] = {}
        self._rows: dict[int, JournalRow] | None = None
        # What was read of steps that are not in it, or the error, by the stamps of
        # their indices, or the signatures of steps of Orbax.
        self._looked: dict[int, tuple[Hashable, Any]] = {}
        # Steps whose rows are not in the file, and since when that is known.
        self._missing: dict[int, float] = {}
        self._is_listed = False

    def row(self, step: int, stamp: str) -> JournalRow:
        """The row of an index with a stamp.

        **Raises:** `FileNotFoundError` if it is gone; `ValueError` as
        `_index_summary.summarise`, or for what is no file.
        """
        rows = self._read_rows()
        row = rows.get(step)
        if row is None or row.stamp != stamp:
            self._missing.setdefault(step, time.monotonic())
            row = self.known(step, stamp, ft.partial(self._look, step, stamp))
        return row

    def known(self, step: int, stamp: Hashable, read: Callable[[], T]) -> T:
        """The value that `read` gives for a step: it is read once while the step has
        the stamp. **Raises:** as `read`; a `ValueError` is kept like a value."""
        was, found = self._looked.get(step, (None, None))
        if was != stamp:
            try:
                found = read()
            except ValueError as e:
                self._looked[step] = stamp, copy.copy(e)
                raise
            self._looked[step] = stamp, found
        if isinstance(found, ValueError):
            raise copy.copy(found)
        return cast(T, found)

    def steps(self) -> set[int]:
        """The steps that it knows, which may be gone."""
        return set(self._read_rows())

    def row_of(self, step: int, save: str) -> JournalRow | None:
        """The row of the index of this save, if it is in the journal."""
        row = self._read_rows().get(step)
        return row if row is not None and row.save == save else None

    def _read_rows(self) -> dict[int, JournalRow]:
        if self._rows is None:
            rows: list[JournalRow] = []
            # Whatever is wrong with it, the indices are right.
            with contextlib.suppress(OSError, ValueError):
                found = self._root.read(_journal.KEY, limit=_json.MAX_INDEX)
                if found is not None:
                    rows = _journal.FORMAT.decode(found.data)
            self._rows = {row.step: row for row in rows}
        return self._rows

    def _look(self, step: int, stamp: str) -> JournalRow:
        def look() -> tuple[Value, IndexSummary]:
            got = self._root.read(index_of(step), limit=_json.MAX_INDEX)
            if got is None:
                raise FileNotFoundError(f"There is no step {step} in `{self._root}`.")
            return got, _index_summary.summarise(got.data, self._summaries)

        got, found = _store.look_twice(self._root, look)
        save, metadata, leaves, nbytes, files = found
        metrics = metrics_in(metadata)
        return JournalRow(step, stamp, save, leaves, nbytes, files, got.time, metrics)

    # ---- Writing it.

    def note_saved(self, step: int) -> None:
        """Is told of a step that is saved, after the deletion of older ones, and writes
        the journal once there is enough that it does not say. That it cannot is no
        error: it is a cache."""
        with contextlib.suppress(OSError, ValueError):
            rows = self._read_rows()
            if not self._is_listed:
                self._list(rows)
            self._missing[step] = now = time.monotonic()
            missing = list(self._missing.items())
            old = now - limits.stamp_seconds
            settled = sorted(step for step, since in missing if since < old)
            share = len(rows) // limits.unlisted_step_share
            if len(settled) >= max(limits.unlisted_steps, share):
                self._record(settled[:_MAX_STEPS], rows)

    def deleted(self, step: int) -> None:
        self._missing.pop(step, None)
        self._looked.pop(step, None)
        if self._rows is not None:
            self._rows.pop(step, None)

    def _list(self, rows: dict[int, JournalRow]) -> None:
        there = set(self._list_steps())
        for gone in rows.keys() - there:
            del rows[gone]
        for step in there - rows.keys():
            self._missing.setdefault(step, -math.inf)
        self._is_listed = True

    def _record(self, steps: list[int], rows: dict[int, JournalRow]) -> None:
        for step, row in zip(steps, _store.each(self._root, self._settled, steps)):
            self._missing.pop(step, None)
            if row is not None:
                rows[step] = row
        data = _journal.FORMAT.encode(sorted(rows.values()))
        if self._root.has(_journal.KEY):
            self._root.delete(_journal.KEY)
        self._root.write(_journal.KEY, [data])

    def _settled(self, step: int) -> JournalRow | None:
        """The row of a step, if another index there would have another stamp."""
        with contextlib.suppress(OSError, ValueError):
            stamp = self._root.stamp(index_of(step))
            row = self._look(step, stamp) if stamp else None
            old = time.time() - limits.stamp_seconds
            if row and (row.time is None or row.time < old):
                return row
        return None


def metrics_in(metadata: object) -> dict[str, Any]:
    """The metrics in the metadata of a step. A text is a number that is not finite;
    what is neither was not saved by a manager."""
    found = metadata.get("metrics") if isinstance(metadata, dict) else None
    some = found if isinstance(found, dict) else {}
    return {name: x for name, x in some.items() if type(x) in (int, float, str)}
