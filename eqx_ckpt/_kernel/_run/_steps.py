"""The directory of a run: its steps, what is known of them, and their deletion.

A step is a checkpoint at `<root>/<step>/default`, where Orbax's CheckpointManager has
one too. In an object store it is the same, by other means: there are no links, locks
and renames, and each look at a step is a request.

No link below the directory of the run is followed: a step that is one is not a step.
"""

import contextlib
import functools as ft
import operator
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

from .. import _rooms
from .._format import _files, _index, _json, _schema, _text
from .._format._history import HistoryRow, PLACE
from .._format._journal import StepRow
from .._load import _published
from .._runtime import _log
from .._save import _background, _delete, _leftovers
from .._storage import _root, _store
from .._storage._backend import Backend, Usage
from .._storage._local import LocalDirectory
from .._storage._objects import ObjectStore
from . import _attempts, _clean, _listing, _numbered
from ._attempts import Attempt, Lineage
from ._history import History
from ._listing import Listing
from ._numbered import PINS
from ._step import as_numbers, Step
from ._step_journal import index_of, Journal


_ITEM = "default"
# What Orbax has in each of its trees.
_ORBAX = "_METADATA"
_MAX_METRICS = 2**20
# So many are named in an error.
_SHOWN = 20
# The most seconds from a deletion's look for a pin to its end, in an object store.
_DELETION_SECONDS = 5
# Seconds in which a save that has made its directory has locked it, too.
_LOCKING_SECONDS = 0.01
# How often all steps are looked at, where others save and delete them meanwhile.
_LOOKS = 100


class Signature(NamedTuple):
    """A mark that tells saves of a step apart. `is_ours`: it is not one of Orbax."""

    stamp: Any
    is_ours: bool = True


class StepFacts(NamedTuple):
    """Facts about a step: its signature, if it is complete; its metrics, if it can
    be opened; or the error of a system that could not tell."""

    signature: Signature | None
    metrics: dict[str, Any] | None = None
    error: OSError | None = None


class Skip(NamedTuple):
    """Why a step is not restored. `is_lost`: there was something to restore.
    `is_going`: another writer is about to complete it. `is_unread`: nothing says that
    anything is wrong with it."""

    why: str
    is_lost: bool
    is_going: bool = False
    is_unread: bool = False


class Steps:
    """All steps of a run. Nothing here knows of other processes."""

    def __init__(self, root: str | os.PathLike[str]):
        found = _root.resolve(root)
        is_path = isinstance(found, LocalDirectory)
        self.root = _root.resolve(found.target()) if is_path else found
        # The directory of the run, as other calls take it: a `Store` has its options.
        self.location = _rooms.store_of(root) or self.root.url
        self.journal = Journal(self.root, self.directories)
        self.history = History(self.root)
        # Of steps of Orbax: the names that are not their number alone, by `listing`;
        # the key of the tree of each, by `signature`; and the names of all its trees,
        # by the last list of an object store.
        self._names: dict[int, str] | None = None
        self._trees: dict[int, str] = {}
        self._listed_trees: dict[int, list[str]] = {}
        # The attempts that were read: an attempt never changes.
        self._attempts: dict[int, Attempt] = {}
        # In an object store, the steps of the last list, with those saved here since,
        # and without those deleted here. None: it was not listed yet.
        self._there: set[int] | None = None
        # Steps that `add_saved` has put into the history: `remove` need not do it.
        self._in_history: dict[int, Signature] = {}

    @property
    def is_local(self) -> bool:
        """Whether the run is on a disk, which has locks, links and renames. In an
        object store each look is a request, and no process can tell whether a step is
        still being saved."""
        return isinstance(self.root, LocalDirectory)

    def path(self, step: SupportsIndex) -> str | os.PathLike[str]:
        step = check_step(step)
        if self.is_local:
            self.signature(step)
        key = self._trees.get(step, f"{step}/{_ITEM}")
        return below(self.location, key)

    def _at(self, step: int) -> Backend:
        return self.root.below(f"{step}/{_ITEM}")

    def directories(self) -> list[int]:
        """The steps that have a directory, complete or not.

        **Raises:** `ValueError` over HTTP, where nothing is listed.
        """
        return list(self.listing().steps)

    def listing(self) -> Listing:
        """A list of the steps. Only that of an object store (`_listing.list_run`) shows
        which are complete. **Raises:** as `directories`."""
        if not self.root.can_list():
            raise ValueError(
                f"Which steps there are in `{self.root}` cannot be told: over HTTP "
                "nothing is listed. Restore one that you know, with `step=`."
            )
        if isinstance(self.root, ObjectStore):
            listing = _listing.list_run(self.root, self.journal.steps)
            self._listed_trees = listing.trees
            self._there = set(listing.steps)
            return listing
        names = self.root.list_top() or {}
        steps = _numbered.steps_in(names)
        others = {_numbered.number_of(name): name for name in names if names[name]}
        self._names = {
            step: name
            for step, name in others.items()
            if step is not None and str(step) not in names and self._is_orbax(name)
        }
        attempts = None if _attempts.PLACE in names else []
        history = None if PLACE in names else []
        steps = dict.fromkeys([*steps, *self._names])
        return Listing(steps, attempts, history)

    def is_run(self, listing: Listing | None = None) -> bool:
        """Whether there is a run: steps, complete or begun, or a history. An empty
        directory with the name of a step is none. **Raises:** as `directories`."""
        listing = listing or self.listing()
        if listing.history != []:
            return True
        newest = sorted(listing.steps, reverse=True)
        is_complete = lambda step: self.is_complete(step, listing)
        return any(map(is_complete, newest)) or any(map(self.why_skipped, newest))

    def is_new(self, step: int) -> bool:
        """Whether a step was neither listed nor saved here, where it takes requests to
        know more. If another process has saved it since, the commit is refused."""
        return self._there is not None and step not in self._there

    def attempts(self, listing: Listing) -> list[int]:
        """The numbers of attempts, the last first. **Raises:** as `numbers` does."""
        numbers = listing.attempts
        if numbers is None:
            numbers = _numbered.numbers(self.root, _attempts.PLACE)
        return sorted(numbers, reverse=True)

    def complete(self, listing: Listing | None = None) -> list[int]:
        """The complete steps, in order."""
        for listed in self.listings() if listing is None else [listing]:
            # From the oldest on: an older one goes when a newer one is complete.
            rest = sorted(s for s, save in listed.steps.items() if save is None)
            there = dict(zip(rest, self.ask_each(self.signature, rest)))
            found = [s for s in sorted(listed.steps) if there.get(s, True)]
            if found:
                return found
        return []

    def is_complete(self, step: int, listing: Listing) -> bool:
        return listing.steps[step] is not None or self.signature(step) is not None

    def latest(
        self, is_begun: bool = False, first: Listing | None = None
    ) -> int | None:
        """The newest complete step that counts; older ones are not looked at.
        `is_begun`: as of `lineage`; `first`: as of `listings`."""
        for listing in self.listings(first):
            lineage = self.lineage(listing, is_begun)
            if (step := self.newest(listing, lineage)) is not None:
                return step
        return None

    def newest(
        self, listing: Listing, lineage: Lineage, without: Collection[int] = ()
    ) -> int | None:
        """The newest complete step, in the order in which they are restored."""
        for step in in_restore_order(listing, lineage):
            if step not in without and self.is_complete(step, listing):
                return step
        return None

    def listings(self, first: Listing | None = None) -> Iterator[Listing]:
        """Listings of the run, until the caller stops. `first` is a look that was just
        taken. Between two looks others may complete a newer step and delete an older
        one. So a caller that finds no complete step looks again, until looks agree."""
        before: list[set[int]] = []
        for _ in range(_LOOKS):
            listing, first = first or self.listing(), None
            there = set(listing.steps)
            looks = 2 if there else 1
            if before[-looks:] == [there] * looks:
                return
            yield listing
            before.append(there)

    def lineage(self, listing: Listing, is_begun: bool = False) -> Lineage:
        """The attempt that counts: the last that has a complete step of its own, or
        `is_begun`, as it has near steps."""
        is_save = lambda step, save: self._is_save(step, save, listing)
        for number in self.attempts(listing):
            attempt = self._attempt(number)
            if attempt is not None:
                lineage = Lineage(attempt, is_save)
                newest_first = sorted(listing.steps, reverse=True)
                own = filter(lineage.is_own, newest_first)
                if is_begun or any(self.is_complete(step, listing) for step in own):
                    return lineage
        return Lineage(None, is_save)

    def left(self) -> set[int]:
        """The steps that an earlier attempt has left."""
        listing = self.listing()
        return self.lineage(listing).left(listing.steps)

    def _attempt(self, number: int) -> Attempt | None:
        if number not in self._attempts:
            found = _attempts.read_attempt(self.root, number)
            if found is None:
                return None
            self._attempts[number] = found
        return self._attempts[number]

    def _is_save(self, step: int, save: str, listing: Listing) -> bool:
        """Whether a step is still a save, or nothing or damaged by now."""
        return step in listing.steps and self.save_of(step, listing) in (save, None)

    def save_of(self, step: int, listing: Listing) -> Any:
        """The id of the save of a step; "" for one of Orbax, and None if it has none
        that can be read."""
        if listing.steps[step]:
            return listing.steps[step]
        signature = self.signature(step)
        if signature is None or not signature.is_ours:
            return None if signature is None else ""
        row = self._row_of(step, signature)
        return row and row.save

    def signature(self, step: int) -> Signature | None:
        """The signature of a step, which changes with the save; None if the step is not
        complete, or leads through a link. It also notes in `_trees` where the tree of a
        step of Orbax is."""
        self._trees.pop(step, None)
        if stamp := self.root.stamp(index_of(step)):
            return Signature(stamp)
        name = self._name(step)
        key = f"{name}/{_ITEM}"
        stamp = self.root.stamp(f"{key}/{_ORBAX}")
        # A step of Orbax may have one tree, that is called otherwise.
        if not stamp and len(items := self.items(step)) == 1:
            key = f"{name}/{items[0]}"
            stamp = self.root.stamp(f"{key}/{_ORBAX}")
        if not stamp or self._has_lost_index(step):
            return None
        is_renamed = isinstance(self.root, LocalDirectory)
        if not is_renamed and not self.root.stamp(f"{name}/{_published.DONE}"):
            return None
        if not _published.is_finished(self.root.below(name)):
            return None
        self._trees[step] = key
        return Signature(stamp, is_ours=False)

    # ---- Steps of Orbax, which may be called otherwise, and have other items.

    def _name(self, step: int) -> str:
        if self._names is None and self.is_local:
            if not self.root.is_directory(str(step)):
                self.listing()
        return (self._names or {}).get(step, str(step))

    def _is_orbax(self, name: str) -> bool:
        keys = f"{name}/{_published.TOP}", f"{name}/{_ITEM}/{_ORBAX}"
        return any(map(self.root.stamp, keys))

    def items(self, step: int) -> list[str]:
        """The trees in a step of Orbax, but `default`; in an object store, as they were
        listed."""
        name = self._name(step)
        if not self.is_local or not self.root.stamp(f"{name}/{_published.TOP}"):
            return self._listed_trees.get(step, [])
        tops = _tops(self.root.below(name))
        inside = sorted(item for item in tops if tops[item] and item != _ITEM)
        return [item for item in inside if self.root.stamp(f"{name}/{item}/{_ORBAX}")]

    def check_readable(self) -> None:
        """For a run without a complete step. **Raises:** `ValueError` if Orbax has
        saved steps there that are not read: they are not nothing."""
        tops = _tops(self.root)
        there = [name for name in sorted(tops) if tops[name] and self._is_other(name)]
        if there:
            shown = ", ".join(f"`{_text.escape(name)}`" for name in there[-_SHOWN:])
            raise ValueError(
                f"`{self.root}` has steps of Orbax that a manager does not read: "
                f"{shown}. Open one by its path, and choose another directory for this "
                "run."
            )

    def _is_other(self, name: str) -> bool:
        """Whether a name is that of a step that Orbax has finished."""
        if _numbered.number_of(name) is None or not self._is_orbax(name):
            return False
        if _numbered.is_step(name) and self._has_lost_index(int(name)):
            return False
        return _published.is_finished(self.root.below(name))

    def _has_lost_index(self, step: int) -> bool:
        """Whether a step without our index was once complete, and ours."""
        root = self._at(step)
        return bool(_published.saves(root)) or _files.DIGESTS in _tops(root)

    def survey(
        self, of: Mapping[int, str | None] | Iterable[int], metrics: bool = True
    ) -> dict[int, StepFacts]:
        """Facts about each of some steps, in order, with or without its metrics. `of`
        may be a list of them, as `listing` has it."""
        listed = of if isinstance(of, Mapping) else dict.fromkeys(of)
        known: dict[int, StepFacts] = {}
        for step, save in listed.items():
            # A list shows that it is still what the journal has.
            row = None if save is None else self.journal.row_of(step, save)
            if row is not None:
                found = self.history.over(row).metrics if metrics else None
                known[step] = StepFacts(Signature(row.stamp), found)
        rest = sorted(step for step in listed if step not in known)
        know = lambda step: self._facts_of(step, listed[step] is not None, metrics)
        known.update(zip(rest, self.ask_each(know, rest)))
        return dict(sorted(known.items()))

    def _facts_of(self, step: int, is_listed: bool, metrics: bool) -> StepFacts:
        try:
            signature = self.signature(step)
            if signature is None and is_listed:
                signature = self.signature(step)
            if signature is None or not metrics:
                return StepFacts(signature)
            return StepFacts(signature, self._metrics(step, signature))
        except OSError as e:
            return StepFacts(None, error=e)

    def _metrics(self, step: int, signature: Signature) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return self.read_metrics(step, signature)
        return None

    def time_of(self, step: int, signature: Signature) -> int | None:
        """The time of a save of ours, in seconds since 1970, if its index has one."""
        if not signature.is_ours:
            return None
        found, saved = self.root.read(index_of(step), limit=_json.MAX_INDEX), None
        with contextlib.suppress(ValueError):
            saved = None if found is None else _index.decode(found.data).saved
        return None if saved is None else saved.time

    def read_metrics(self, step: int, signature: Signature) -> dict[str, Any]:
        if signature.is_ours:
            return self.row(step, signature.stamp).metrics
        of_orbax = ft.partial(self._orbax_metrics, step)
        own = self.journal.known(step, signature, of_orbax)
        return {**own, **self.history.added(step, "")}

    def _orbax_metrics(self, step: int) -> dict[str, Any]:
        key = f"{self._name(step)}/metrics/metrics"
        value = self.root.read(key, limit=_MAX_METRICS)
        found = _json.parse(value.data, f"`{key}`") if value else None
        return found if isinstance(found, dict) else {}

    def row(self, step: int, stamp: str) -> StepRow:
        """The journal's row of a step, with metrics that were added later."""
        return self.history.over(self.journal.row(step, stamp))

    # ---- The history of the run.

    def add_saved(self, row: HistoryRow, signature: Signature) -> None:
        """Adds a save that was just made here to the history."""
        self.history.append([row])
        self._in_history[row.step] = signature

    def refresh(self, listing: Listing | None = None) -> None:
        """Reads the metrics that were added to steps since."""
        self.history.refresh_added(listing and listing.history)

    def add_to_history(self, steps: Iterable[int], attempt: int | None = None) -> None:
        """Adds saves of steps to the history, unless they are there. `attempt`: its
        number; None if it is that of the run."""
        rows: list[HistoryRow] = []
        for step in steps:
            found = self.signature(step)
            row = found and self._row_of(step, found)
            if found and row and not self.history.has(step, row.save):
                if attempt is None:
                    attempt = self.lineage(self.listing()).number
                time = self._time(row, found)
                facts = attempt, time, row.nbytes, row.metrics
                rows.append(HistoryRow(step, row.save, *facts))
        if rows:
            self.history.append(rows)

    def add_metrics(self, step: SupportsIndex, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to a step that is saved.

        **Raises:** `FileNotFoundError` if it is not there, or is deleted meanwhile;
        `ValueError` if it is damaged.
        """
        step = check_step(step)
        with self._locked_step(step) as found:
            is_ours = found.is_ours
            save = self.journal.row(step, found.stamp).save if is_ours else ""
            if self.signature(step) == found:
                self.history.add(step, save, metrics)
                if self._is_staying(step):
                    return
        raise self._missing(step)

    @contextlib.contextmanager
    def _locked_step(self, step: int) -> Iterator[Signature]:
        """Holds the lock of a step: a deletion looks under it for pins and metrics that
        were added. **Raises:** `FileNotFoundError` if there is no such step."""
        find = lambda: self.signature(step)
        found = _store.look_twice(self.root, find, bool)
        if found is None:
            raise self._missing(step)
        tree = self.root.below(self._trees.get(step, f"{step}/{_ITEM}"))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with tree.lock(wait=True):
                yield found
                return
        raise self._missing(step)

    def _missing(self, step: int) -> FileNotFoundError:
        return FileNotFoundError(f"There is no step {step} in `{self.root}`.")

    def facts(self, step: int, found: Signature, metrics: Mapping[str, Any]) -> Step:
        """A step that is there, with its metrics, as `keep_if` is given it."""
        row = self._row_of(step, found)
        saved = row and self.history.row_of(step, row.save)
        when = saved or row
        return Step(
            step,
            as_numbers(metrics),
            when and when.time,
            row and row.nbytes,
            saved.attempt or 0 if saved else 0,
            self.path(step),
        )

    def _row_of(self, step: int, found: Signature) -> StepRow | None:
        """The journal's row of a step; None if it is gone, damaged or not ours."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return self.journal.row(step, found.stamp) if found.is_ours else None

    def _time(self, row: StepRow, found: Signature) -> int | float:
        saved = row.time if row.time is not None else self.time_of(row.step, found)
        return round(time.time() if saved is None else saved, 3)

    def usage(self, row: StepRow) -> Usage | None:
        """Usage of the data files of a step."""
        if row.files is None:
            return self._at(row.step).usage()
        start = f"{row.step}/{_ITEM}/d/{row.save}"
        return self.root.usage([f"{start}/{number}" for number in range(row.files)])

    def ask_each(self, ask: Any, steps: Iterable[int]) -> list[Any]:
        return _store.gather(self.root, [ft.partial(ask, step) for step in steps])

    def why_skipped(self, step: int) -> Skip | None:
        """State of a step that is not complete; None if that is nothing."""
        if self.is_linked(step):
            return Skip("it is a symbolic link, and a manager follows none", True)
        root = self._at(step)
        tops, works = _tops(root), _work_directories(root)
        for looks_left in reversed(range(_LOOKS)):
            # Nothing is in the directory of a save before that has its lock.
            is_new = not root.is_remote and {} in [x.list_top() for x in works.values()]
            if any(work.is_locked() for work in works.values()):
                return Skip("it is being saved", False, is_going=True)
            # It has that just after it, but on a busy machine. Or the save whose files
            # were seen may have ended since, and be deleted.
            time.sleep(_LOCKING_SECONDS if works else 0)
            before, tops, works = (
                (tops, works.keys()),
                _tops(root),
                _work_directories(root),
            )
            if before == (tops, works.keys()) and not (is_new and looks_left):
                break
        if _files.INDEX in tops:
            return Skip(f"its `{_files.INDEX}` is not a file", True)
        if _ORBAX in tops or _files.DIGESTS in tops:
            return Skip("its save was not completed, or its index was deleted", True)
        # A save that has begun just now has no more than an empty directory.
        has_data = "d" in tops and root.below("d").list_top()
        if has_data or _files.CLAIM in tops or works:
            return Skip(
                "its save was not completed, as when a process is killed", False
            )
        if items := self.items(step):
            has = " and ".join(f"`{_text.escape(item)}`" for item in items)
            why = f"Orbax has saved it as {has}: load each by its path"
            return Skip(why, False, is_unread=True)
        return None

    def pin(self, step: SupportsIndex) -> None:
        """**Raises:** `FileNotFoundError` if there is no such step."""
        step = check_step(step)
        with self._locked_step(step):
            is_new = self._pin(step)
            if self._is_staying(step):
                return
            if is_new:
                self.unpin(step)
        raise self._missing(step)

    def _pin(self, step: int) -> bool:
        """Returns whether it was not pinned before."""
        with contextlib.suppress(FileExistsError):
            _numbered.create_file(self.root, PINS, step, b"\n")
            return True
        return False

    def _is_staying(self, step: int) -> bool:
        """Whether a step is there, once it is pinned. Where there are no locks, whoever
        deletes a step takes its mark away before it looks for a pin, and puts it back
        if there is one: so a step of ours without a mark may be on its way."""
        end = time.monotonic() + _DELETION_SECONDS
        while (found := self.signature(step)) is not None:
            is_marked = self.is_local or self.root.has(f"{step}/{_published.DONE}")
            if not found.is_ours or is_marked or time.monotonic() > end:
                return True
            time.sleep(0.05)
        return False

    def unpin(self, step: SupportsIndex) -> None:
        _numbered.delete(self.root, PINS, check_step(step))

    def pinned(self) -> set[int]:
        """The steps that are never deleted: each has a file in a directory of pins."""
        return set(_numbered.numbers(self.root, PINS))

    def is_linked(self, step: int) -> bool:
        at = self._name(step)
        return self.root.is_link(f"{at}/{_ITEM}") or self.root.is_link(at)

    def check_own(self, step: int) -> None:
        """**Raises:** `ValueError` for a step that leads through a link."""
        if self.is_linked(step):
            raise ValueError(
                f"`{self.path(step)}` leads through a symbolic link, and a manager "
                "follows none. It is left as it is."
            )

    def check_root(self) -> None:
        """**Raises:** `ValueError` if the root is a checkpoint: nobody could tell which
        of the two a path means."""
        if self.root.stamp(_files.INDEX):
            raise ValueError(
                f"`{self.root}` is a checkpoint, and no directory of a run. Nothing "
                "was saved. Choose another directory."
            )

    def is_read(self, step: int) -> bool:
        """Whether a save that goes on reads lazy leaves of it."""
        return _background.is_read(self._at(step))

    def delete(self, step: SupportsIndex) -> None:
        step = check_step(step)
        if self.is_read(step):
            raise ValueError(
                f"A save that goes on reads lazy leaves of step {step}. Delete it once "
                "that is over (`result()`)."
            )
        self.check_own(step)
        found = self.signature(step)
        if found and not found.is_ours:
            raise ValueError(
                f"Step {step} of `{self.root}` was saved by Orbax, and is left as it "
                "is. Delete it with Orbax's own manager."
            )
        if not self.remove(step):
            raise ValueError(f"Step {step} is pinned. Call `unpin({step})` before.")

    def mark_complete(
        self,
        step: int,
        is_new: bool = False,
        marked: Callable[[None], Any] = lambda _: None,
    ) -> None:
        """Marks a step of ours as complete: managers of Orbax that write steps in place
        look for that file. `is_new`: its save was just committed. `marked` is called as
        soon as the mark is there."""
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            with self._at(step).lock(wait=True):
                if is_new and self._there is not None:
                    self._there.add(step)
                if (is_new and not self.is_local) or self._is_ours(step):
                    self._write_mark(step, marked)

    def _write_mark(
        self, step: int, marked: Callable[[None], Any] = lambda _: None
    ) -> None:
        self.root.write(f"{step}/{_published.DONE}", [_published.OURS])
        marked(None)
        # Where there are no locks, another may have deleted it.
        if not self.is_local:
            look = lambda: self.root.stamp(index_of(step))
            if not _store.look_twice(self.root, look, bool):
                self._drop_mark(step)

    def unmark(self, step: int) -> None:
        """Takes the mark away from a step of ours that is replaced."""
        if self._is_ours(step):
            self._drop_mark(step)

    def _drop_mark(self, step: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.root.delete_files([f"{step}/{_published.DONE}"])

    def _is_ours(self, step: int) -> bool:
        return not self.is_linked(step) and bool(self.root.stamp(index_of(step)))

    def remove(
        self,
        step: int,
        may_still_go: Callable[[], bool] = lambda: True,
        unless: Callable[[], bool] = lambda: False,
        seen: Signature | None = None,
    ) -> bool:
        """Deletes a step of ours, and returns whether it has. The step stays if it is
        pinned, if `unless()` holds, or if it is not the one that was `seen` any more.
        When it calls `may_still_go` is said by `_delete.remove`."""
        if seen is None or self._in_history.get(step) != seen:
            self.add_to_history([step])

        def confirm() -> bool:
            # First: see `_is_staying`.
            self._drop_mark(step)
            is_pinned = lambda: _numbered.has(self.root, PINS, step)
            if not any(look() for look in _store.ahead(self.root, [is_pinned, unless])):
                return True
            with contextlib.suppress(FileExistsError):
                self._write_mark(step)
            return False

        # Another may have put the mark there since.
        follow, stamp = lambda: self._drop_mark(step), seen.stamp if seen else ""
        with _log.timed("delete") as timer:
            at = self._at(step)
            if not _delete.remove(at, confirm, may_still_go, follow, stamp):
                if not self.is_local:  # The mark may be that of a save since.
                    self.mark_complete(step)
                return False
            self.root.drop_directory(str(step))
        self._in_history.pop(step, None)
        if self._there is not None:
            self._there.discard(step)
        self.journal.deleted(step)
        self.say(_log.INFO, "Deleted", step, seconds=timer.seconds)
        return True

    def say(self, level: int, did: str, step: int, why: str = "", **facts: Any) -> None:
        """Logs what was done with a step."""
        text = f"{did} step {step} of `{self.root}`"
        if "nbytes" in facts:
            text += f": {_text.rate(facts['nbytes'], facts['seconds'])}"
        elif "seconds" in facts:
            text += f" in {facts['seconds']:.3g} s"
        facts = {"step": step, "path": self.root.url, **facts}
        _log.say(level, f"{text}: {why}" if why else text, **facts)

    def clean(self, step: int) -> None:
        """Deletes what a killed save of a step has left, and a killed deletion."""
        if self.is_local and not self.is_linked(step):
            with contextlib.suppress(FileNotFoundError):
                _clean.clean(self.root.below(str(step)).url)
            self.root.drop_directory(str(step))

    def set_aside(self, step: int, force: bool) -> None:
        """Moves a damaged step away, whole, so that none is replaced that may be good.

        **Raises:** `FileExistsError` if it is not damaged after all, and not `force`;
        `OSError` if nobody can tell.
        """
        while (found := self.signature(step)) is not None:
            if not force and self._is_whole(step):
                raise FileExistsError(
                    f"Step {step} at `{self.path(step)}` could not be read when a step "
                    "was restored, and is whole now. Restore it, or replace it with "
                    "`force=True`."
                )
            # Another may have deleted it, or saved it anew since.
            with contextlib.suppress(FileNotFoundError):
                with self._at(step).lock(wait=True):
                    if self.signature(step) == found and self._move_aside(step):
                        return

    def _move_aside(self, step: int) -> bool:
        away = f"{_ITEM}.damaged-{secrets.token_hex(4)}"
        if not self.root.below(str(step)).move(_ITEM, away, _files.INDEX):
            return False
        why = f"it is damaged, and is `{away}` now"
        self.say(_log.WARNING, "Moved aside", step, why)
        return True

    def _is_whole(self, step: int) -> bool:
        try:
            return not _rooms.verify(self.path(step))
        except ValueError:
            return False  # Of another format, which cannot be verified.

    def look(self, step: int) -> Signature | Skip | None:
        """State of a step. What is not complete is looked at twice: another
        process may have completed it since, and a store may have erred."""
        found = self.signature(step)
        if found is not None:
            return found
        skip = self.why_skipped(step)
        return self.signature(step) or skip


def _tops(root: Backend) -> Mapping[str, bool]:
    with contextlib.suppress(NotADirectoryError):
        return root.list_top() or {}
    return {}


def _work_directories(root: Backend) -> dict[str, Backend]:
    """The directories of saves to a path that go on, or were stopped, by URL."""
    inside = [root.below("d").below(save) for save in _published.saves(root)]
    return {work.url: work for work in [*_leftovers.beside(root), *inside]}


def below(path: str | os.PathLike[str], key: str) -> str | os.PathLike[str]:
    """A place below a path or URL, with the options of its store."""
    if not key:
        return path
    store = _rooms.store_of(path)
    return f"{path}/{key}" if store is None else store / key


def in_restore_order(listing: Listing, lineage: Lineage) -> Iterator[int]:
    """The steps as they are restored: the newest first, and last those that an earlier
    attempt has left."""
    left: list[int] = []
    for step in sorted(listing.steps, reverse=True):
        if lineage.is_left(step):
            left.append(step)
        else:
            yield step
    yield from left


def check_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(f"A step must be an integer, not {step!r}.")
    if number not in _schema.COUNT:
        raise ValueError(
            "A step must not be negative, nor have more than 18 digits: "
            f"{number!s:.40}."
        )
    return number
