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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .. import _extensions
from .._format import _files, _index, _json, _schema, _text
from .._format._journal import StepRow
from .._load import _published
from .._runtime import _log
from .._save import _background, _delete, _leftovers, _transaction
from .._storage import _root, _store
from .._storage._backend import Backend, Usage
from .._storage._local import LocalDirectory
from .._storage._objects import ObjectStore
from . import _clean, _listing, _numbered
from ._policy import Policy
from ._step_journal import index_of, Journal


_ITEM = "default"
_PINS = "eqx_ckpt.pins"
# What Orbax has in each of its trees.
_ORBAX = "_METADATA"
_MAX_METRICS = 2**20


class Signature(NamedTuple):
    """A mark that tells saves of a step apart. `is_ours`: it is not one of Orbax."""

    stamp: Any
    is_ours: bool = True


class StepFacts(NamedTuple):
    """Facts about a step: its signature, if it is complete; its metrics, if it can
    be opened; or the error because of which nobody knows."""

    signature: Signature | None
    metrics: dict[str, Any] | None = None
    error: OSError | None = None


class Skip(NamedTuple):
    """Why a step is not restored. `is_lost`: there was something to restore.
    `is_going`: another writer is about to complete it."""

    why: str
    is_lost: bool
    is_going: bool = False


class Steps:
    """All steps of a run. Nothing here knows of other processes."""

    def __init__(self, root: str | os.PathLike[str]):
        found = _root.resolve(root)
        is_path = isinstance(found, LocalDirectory)
        self.root = _root.resolve(found.target()) if is_path else found
        store_of = _extensions.find("store_of")
        self._store = store_of(root) if store_of else None
        self.journal = Journal(self.root, self.directories)
        self._known: dict[int, tuple[Any, dict[str, Any] | None]] = {}

    @property
    def cleans(self) -> bool:
        """Whether `clean` does anything: in an object store nobody can tell whether a
        step is still being saved."""
        return isinstance(self.root, LocalDirectory)

    def path(self, step: int) -> str | os.PathLike[str]:
        key = f"{check(step)}/{_ITEM}"
        return f"{self.root.url}/{key}" if self._store is None else self._store / key

    def _at(self, step: int) -> Backend:
        return self.root.below(f"{step}/{_ITEM}")

    def directories(self) -> list[int]:
        """**Raises:** `ValueError` where nobody can tell which there are."""
        return list(self._listed())

    def _listed(self) -> dict[int, str | None]:
        """The steps, as `_listing.read` has them in an object store; elsewhere a list
        does not show which are complete. **Raises:** as `directories`."""
        if not self.root.can_list():
            raise ValueError(
                f"Which steps there are in `{self.root}` cannot be told: over HTTP "
                "nothing is listed. Restore one that you know, with `step=`."
            )
        if isinstance(self.root, ObjectStore):
            return _listing.read(self.root, self.journal.steps())
        return dict.fromkeys(_numbered.steps_in(self.root.list_top() or {}))

    def complete(self) -> list[int]:
        """The complete steps, in order."""
        listed = self._listed()
        found = [step for step, save in listed.items() if save is not None]
        left = sorted(listed.keys() - set(found))
        signatures = zip(left, self.each(self.signature, left))
        return sorted([*found, *(step for step, there in signatures if there)])

    def latest(self) -> int | None:
        """The newest complete step; older ones are not looked at."""
        for listed in self.listings():
            for step, save in listed.items():
                if save is not None or self.signature(step):
                    return step
        return None

    def listings(self) -> Iterator[dict[int, str | None]]:
        """The steps, the newest first; again, where they have changed meanwhile: what
        another process saves and deletes is then neither complete nor there."""
        before: set[int] | None = None
        for _ in range(10):
            listed = self._listed()
            if listed.keys() == before:
                return
            yield dict(sorted(listed.items(), reverse=True))
            before = set(listed)

    def signature(self, step: int) -> Signature | None:
        """None of a step that is not complete, or leads through a link."""
        stamp = self.root.stamp(index_of(step))
        if stamp:
            return Signature(stamp)
        stamp = self.root.stamp(f"{step}/{_ITEM}/{_ORBAX}")
        if not stamp or self._is_left(step):
            return None
        is_renamed = isinstance(self.root, LocalDirectory)
        if not is_renamed and not self.root.stamp(f"{step}/{_published.DONE}"):
            return None
        if not _published.is_finished(self.root.below(str(step))):
            return None
        return Signature(stamp, is_ours=False)

    def _is_left(self, step: int) -> bool:
        """Whether a step without our index was once complete, and ours."""
        root = self._at(step)
        return bool(_published.saves(root)) or _files.DIGESTS in _tops(root)

    def survey(
        self, metrics: bool = True, of: Iterable[int] | None = None
    ) -> dict[int, StepFacts]:
        """Facts about each step, or some, in order, with or without its
        metrics."""
        listed = self._listed() if of is None else dict.fromkeys(of)
        known: dict[int, StepFacts] = {}
        for step, save in listed.items():
            # A list shows that it is still what the journal has.
            row = None if save is None else self.journal.row_of(step, save)
            if row is not None:
                found = row.metrics if metrics else None
                known[step] = StepFacts(Signature(row.stamp), found)
        left = [step for step in listed if step not in known]
        know = lambda step: self._know(step, listed[step] is not None, metrics)
        known.update(zip(left, self.each(know, left)))
        return dict(sorted(known.items()))

    def _know(self, step: int, is_listed: bool, metrics: bool) -> StepFacts:
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
        was, metrics = self._known.get(step, (None, None))
        if signature != was:
            try:
                metrics = self.read_metrics(step, signature)
            except (FileNotFoundError, ValueError):
                metrics = None
            self._known[step] = signature, metrics
        return metrics

    def saved(self, step: int, signature: Signature) -> int | None:
        """The time of a save of ours, in seconds since 1970, if its index has one."""
        if not signature.is_ours:
            return None
        found, saved = self.root.read(index_of(step), limit=_json.MAX_INDEX), None
        with contextlib.suppress(ValueError):
            saved = None if found is None else _index.decode(found.data).saved
        return None if saved is None else saved.time

    def read_metrics(self, step: int, signature: Signature) -> dict[str, Any]:
        if signature.is_ours:
            return self.journal.row(step, signature.stamp).metrics
        key = f"{step}/metrics/metrics"
        value = self.root.read(key, limit=_MAX_METRICS)
        found = _json.parse(value.data, f"`{key}`") if value else None
        return found if isinstance(found, dict) else {}

    def usage(self, row: StepRow) -> Usage | None:
        """Usage of the data files of a step."""
        if row.files is None:
            return self._at(row.step).usage()
        start = f"{row.step}/{_ITEM}/d/{row.save}"
        return self.root.usage([f"{start}/{number}" for number in range(row.files)])

    def each(self, ask: Any, steps: Iterable[int]) -> list[Any]:
        return _store.gather(self.root, [ft.partial(ask, step) for step in steps])

    def skip(self, step: int) -> Skip | None:
        """State of a step that is not complete; None if that is nothing."""
        if self.is_linked(step):
            return Skip("it is a symbolic link, and a manager follows none", True)
        root = self._at(step)
        tops = _tops(root)
        works: list[Backend] = [*_leftovers.beside(root)]
        works += [root.below("d").below(save) for save in _published.saves(root)]
        if any(work.is_locked() for work in works):
            return Skip("it is being saved", False, is_going=True)
        if _files.INDEX in tops:
            return Skip(f"its `{_files.INDEX}` is not a file", True)
        if _ORBAX in tops or _files.DIGESTS in tops:
            return Skip("its save was not completed, or its index was deleted", True)
        if "d" in tops or _files.CLAIM in tops or works:
            return Skip(
                "its save was not completed, as when a process is killed", False
            )
        if "_CHECKPOINT_METADATA" in _tops(self.root.below(str(step))):
            return Skip(f"Orbax has saved it without an item `{_ITEM}`", True)
        return None

    def pin(self, step: int) -> None:
        step = check(step)
        find = lambda: self.signature(step)
        if _store.look_twice(self.root, find, bool) is None:
            raise FileNotFoundError(f"There is no step {step} in `{self.root}`.")
        with contextlib.suppress(FileExistsError):
            _numbered.write(self.root, _PINS, step, b"\n")

    def unpin(self, step: int) -> None:
        _numbered.delete(self.root, _PINS, check(step))

    def pinned(self) -> set[int]:
        """The steps that are never deleted: each has a file in a directory of pins."""
        return set(_numbered.numbers(self.root, _PINS))

    def is_linked(self, step: int) -> bool:
        at = str(step)
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

    def delete(self, step: int) -> None:
        step = check(step)
        if step in self.pinned():
            raise ValueError(f"Step {step} is pinned. Call `unpin({step})` before.")
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
        self.remove(step)

    def mark(self, step: int) -> None:
        """Says that a step of ours is whole, to managers of Orbax that write steps in
        place."""
        with contextlib.suppress(FileExistsError):
            if self._is_ours(step):
                self.root.write(f"{step}/{_published.DONE}", [b"by eqx_ckpt"])

    def unmark(self, step: int) -> None:
        """Says so no more of a step of ours that is replaced or deleted."""
        if self._is_ours(step):
            _transaction.discard(self.root, f"{step}/{_published.DONE}")

    def _is_ours(self, step: int) -> bool:
        return not self.is_linked(step) and bool(self.root.stamp(index_of(step)))

    def remove(self, step: int) -> None:
        with _log.timed("delete") as timer:
            self.unmark(step)
            _delete.remove(self._at(step))
            self.root.drop_directory(str(step))
        self._known.pop(step, None)
        self.journal.deleted(step)
        self.say(_log.INFO, "Deleted", step, seconds=timer.seconds)

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
        if self.cleans and not self.is_linked(step):
            with contextlib.suppress(FileNotFoundError):
                _clean.clean(self.root.below(str(step)).url)
            self.root.drop_directory(str(step))

    def set_aside(self, step: int, force: bool) -> None:
        """Moves a damaged step away, whole, so that none is replaced that may be good.

        **Raises:** `FileExistsError` if it is not damaged after all, and not `force`;
        `OSError` if nobody can tell.
        """
        if self.signature(step) is None:
            return
        if not force and self._is_whole(step):
            raise FileExistsError(
                f"Step {step} at `{self.path(step)}` could not be read when a step was "
                "restored, and is whole now. Restore it, or replace it with "
                "`force=True`."
            )
        away = f"{_ITEM}.damaged-{secrets.token_hex(4)}"
        self.root.below(str(step)).move(_ITEM, away, _files.INDEX)
        why = f"it is damaged, and is `{away}` now"
        self.say(_log.WARNING, "Moved aside", step, why)

    def _is_whole(self, step: int) -> bool:
        try:
            return not _extensions.call("verify", self.path(step))
        except ValueError:
            return False  # Of another format, which cannot be verified.

    def look(self, step: int) -> Signature | Skip | None:
        """State of a step. What is not complete is looked at twice: another
        process may have completed it since, and a store may have erred."""
        found = self.signature(step)
        if found is not None:
            return found
        skip = self.skip(step)
        return self.signature(step) or skip


def _tops(root: Backend) -> Mapping[str, bool]:
    with contextlib.suppress(NotADirectoryError):
        return root.list_top() or {}
    return {}


def best(steps: Steps, policy: Policy) -> int | None:
    """The step with the best metric. **Raises:** as `metrics`."""
    if policy.best is None:
        raise ValueError('Pass `best=(metric, "min")` or "max" to the manager.')
    known = metrics(steps)
    while (step := policy.best_of(known)) is not None:
        if not steps.root.is_far:
            return step
        # A list does not show whether its index is damaged.
        now = steps.survey(of=[step])[step]
        if now.error is not None:
            raise now.error
        if now.metrics == known.pop(step):
            return step
        if now.metrics is not None:
            known[step] = now.metrics
    return None


def metrics(steps: Steps) -> dict[int, dict[str, Any]]:
    """Metrics of the steps that have any.

    **Raises:** `OSError` for a step that cannot be read now.
    """
    known = {}
    for step, (_, found, error) in steps.survey().items():
        if error is not None:
            raise error
        if found is not None:
            known[step] = found
    return known


def check(step: Any) -> int:
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
