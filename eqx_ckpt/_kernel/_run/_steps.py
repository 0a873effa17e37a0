"""The steps of a run: where they are, which are complete, and which count.

A step is a checkpoint at `<root>/<step>/default`, where Orbax's CheckpointManager has
one too. A *listing* has the steps that have a directory, or a link in its place. A step
is *complete* if its save is committed. The *lineage* says which complete steps count:
after a run went back, the steps that an earlier attempt has left do not.

In an object store each look at a step is a request. So what a list says there, and what
this process has saved, is not asked again. No link below the directory of the run is
followed: a step that is one is not complete.

`_step_state` says why a step is not complete, `_step_facts` what is known of one, and
`_step_place` whether one may be saved. `_pins` and `_marks` change the files of a run
that say something of a step, and `_removal` deletes a step or moves it aside.
"""

import contextlib
import operator
import os
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, SupportsIndex

from .. import _rooms
from .._format import _history, _schema, _text
from .._format._history import HistoryRow
from .._runtime import _arguments, _log
from .._storage import _root, _store
from .._storage._backend import Backend
from .._storage._local import LocalDirectory
from .._storage._objects import KeyList, ObjectStore
from . import _attempts, _listing, _numbered
from ._attempts import AttemptCache, Lineage
from ._history import History
from ._listing import ITEM, Listing
from ._orbax_steps import OrbaxSteps
from ._step_journal import index_of, Journal


# The most looks at all steps, where others save and delete them meanwhile.
MAX_LOOKS = 100


class Signature(NamedTuple):
    """A value that tells saves of a step apart: the stamp of the file that completes
    it. `is_ours`: the step is not one of Orbax."""

    stamp: Any
    is_ours: bool = True


class SavedStep(NamedTuple):
    """A step as it was committed: its signature, and its row of the history."""

    signature: Signature
    row: HistoryRow


class Steps:
    """All steps of a run. Nothing here talks to other processes."""

    def __init__(self, root: str | os.PathLike[str]):
        found = _root.resolve(root)
        is_path = isinstance(found, LocalDirectory)
        self.root = _root.resolve(found.target()) if is_path else found
        # The directory of the run, as a caller may pass it on: a `Store` if it was
        # given as one, as that has options.
        self.location = _rooms.store_of(root) or self.root.url
        self.orbax = OrbaxSteps(self.root)
        self.journal = Journal(self.root, lambda: self.listing().steps)
        self.history = History(self.root)
        self.attempts = AttemptCache(self.root)
        # In an object store, the steps of the last list, with those saved here since,
        # and without those deleted here. None: it was not listed yet.
        self._listed: set[int] | None = None
        # What was saved here, and is in the history. Only `note_saved` and
        # `note_deleted` change it.
        self.saved: dict[int, SavedStep] = {}
        # The keys of the trees of Orbax's steps, as the last look at each step found.
        self._orbax_keys: dict[int, str] = {}

    @property
    def is_local(self) -> bool:
        """Whether the run is on a disk, which has locks, links and renames. In an
        object store each look is a request, and no process can tell whether a step is
        still being saved."""
        return isinstance(self.root, LocalDirectory)

    # ---- Where a step is: its path, as other calls take it, its key and its directory.
    # One of Orbax may be elsewhere than one of ours. `path` looks for it on a disk.
    # `last_known_path` and `last_known_key` go by the last look, which is the last call
    # of `signature`; so does `path` in an object store. `own_path` and `own_directory`
    # are of a step of ours.

    def path(self, step: SupportsIndex) -> str | os.PathLike[str]:
        """The path of a step: on a disk by a look, else by the last one."""
        step = check_step(step)
        if self.is_local:
            self.signature(step)
        return self.last_known_path(step)

    def last_known_path(self, step: int) -> str | os.PathLike[str]:
        """The path of a step, by the last look."""
        return path_below(self.location, self.last_known_key(step))

    def own_path(self, step: int) -> str | os.PathLike[str]:
        """The path of a step of ours, without a look."""
        return path_below(self.location, f"{step}/{ITEM}")

    def last_known_key(self, step: int) -> str:
        """The key of a step at the root, by the last look."""
        return self._orbax_keys.get(step, f"{step}/{ITEM}")

    def orbax_key(self, step: int) -> str | None:
        """The key of the tree of a step of Orbax, by the last look."""
        return self._orbax_keys.get(step)

    def own_directory(self, step: int) -> Backend:
        """The directory of a step of ours."""
        return self.root.below(f"{step}/{ITEM}")

    # ---- Which steps there are.

    def listing(self, asked: KeyList | None = None) -> Listing:
        """A list of the steps that have a directory, or a link, complete or not. Only
        that of an object store (`_listing.list_run`) shows which are complete; what it
        needs may have been `asked` for before.

        **Raises:** `ValueError` over HTTP, where nothing is listed.
        """
        if not self.root.can_list():
            raise ValueError(
                f"Which steps there are in `{self.root}` cannot be told: over HTTP "
                "nothing is listed. Restore one that you know, with `step=`."
            )
        if isinstance(self.root, ObjectStore):
            return self._list_store(self.root, asked)
        names = self.root.list_top() or {}
        # Others may have called a file by a number. `names` says what is a directory.
        may_be_step = lambda name: names[name] or self.root.is_link(name)
        own = filter(may_be_step, filter(_numbered.is_step, names))
        steps = [*map(int, own), *self.orbax.note_names(names)]
        # None: there are some, which are listed once somebody asks.
        attempts = None if _attempts.PLACE in names else []
        history = None if _history.PLACE in names else []
        return Listing(dict.fromkeys(steps), attempts, history)

    def _list_store(self, root: ObjectStore, asked: KeyList | None) -> Listing:
        listing = _listing.list_run(root, self.journal.steps, asked)
        self.orbax.note_trees(listing.trees)
        self.attempts.note_history(listing.history or ())
        self._listed = set(listing.steps)
        return listing

    def listings(self, first: Listing | None = None) -> Iterator[Listing]:
        """Listings of the run, until the caller stops. `first` is a look that was just
        taken.

        Between two looks others may complete a newer step and delete an older one. So a
        caller that finds no complete step looks again, until three looks in a row have
        the same steps, or two have none.
        """
        before, repeats = None, 0
        for _ in range(MAX_LOOKS):
            listing, first = first or self.listing(), None
            there = set(listing.steps)
            repeats = repeats + 1 if there == before else 0
            if repeats == (2 if there else 1):
                return
            yield listing
            before = there

    def is_known_absent(self, step: int) -> bool:
        """In an object store, whether a step was neither listed nor saved here. If
        another process has saved it since, the commit is refused. On a disk False:
        there a look is cheap."""
        return self._listed is not None and step not in self._listed

    def note_committed(self, step: int) -> None:
        if self._listed is not None:
            self._listed.add(step)

    def note_saved(self, new: SavedStep) -> None:
        """Is told of a step of this process that is committed, and in the history."""
        self.saved[new.row.step] = new

    def note_deleted(self, step: int) -> None:
        self.saved.pop(step, None)
        if self._listed is not None:
            self._listed.discard(step)
        self.journal.deleted(step)

    def signature(self, step: int) -> Signature | None:
        """The signature of a step, which changes with the save; None if the step is not
        complete, or leads through a link. It is the look by which `last_known_path`
        goes."""
        stamp = self.root.stamp(index_of(step))
        tree = None if stamp else self.orbax.tree_of(step)
        if tree is None:
            self._orbax_keys.pop(step, None)
            return Signature(stamp) if stamp else None
        self._orbax_keys[step] = tree.key
        return Signature(tree.stamp, is_ours=False)

    def find_signature(self, step: int) -> Signature | None:
        """The signature of a step. A store that gives none is asked twice: it may be
        wrong once."""
        return _store.look_twice(self.root, lambda: self.signature(step), bool)

    def is_complete(self, step: int, listing: Listing) -> bool:
        return listing.steps[step] is not None or self.signature(step) is not None

    def complete(self, listing: Listing | None = None) -> list[int]:
        """The complete steps, in order: of a listing, or as others leave them now."""
        for listed in self.listings() if listing is None else [listing]:
            steps = sorted(listed.steps)
            unsure = [step for step in steps if listed.steps[step] is None]
            # On a disk the oldest is looked at first: an older step is deleted only
            # after a newer one is complete. So if the older is missed, the newer is
            # seen. In a store all are looked at together, and the list shows most.
            found = _store.each(self.root, self.signature, unsure)
            signatures = dict(zip(unsure, found))
            # Those that the list shows to be complete were not looked at.
            if found_complete := [x for x in steps if signatures.get(x, True)]:
                return found_complete
        return []

    # ---- Which of them count.

    def latest(
        self, has_near: bool = False, first: Listing | None = None
    ) -> int | None:
        """The step that a restore would take now, but for near ones: the first that is
        complete. `has_near`: as of `lineage`; `first`: as of `listings`."""
        for listing in self.listings(first):
            lineage = self.lineage(listing, has_near)
            if (step := self.first_to_restore(listing, lineage)) is not None:
                return step
        return None

    def first_to_restore(
        self, listing: Listing, lineage: Lineage, without: Collection[int] = ()
    ) -> int | None:
        """The first complete step of a listing, in the order in which they are
        restored."""
        for step in in_restore_order(listing, lineage):
            if step not in without and self.is_complete(step, listing):
                return step
        return None

    def lineage(self, listing: Listing, has_near: bool = False) -> Lineage:
        """The lineage of the attempt that counts: the last attempt with a complete step
        of its own. If `has_near`, the last attempt has near steps, and counts without a
        step at the root."""
        is_save = lambda step, save: self._is_save(step, save, listing)
        for number in self.attempts.numbers(listing.attempts):
            attempt = self.attempts.attempt(number)
            if attempt is not None:
                lineage = Lineage(attempt, is_save)
                newest_first = sorted(listing.steps, reverse=True)
                own = filter(lineage.is_own, newest_first)
                if has_near or any(self.is_complete(step, listing) for step in own):
                    return lineage
        return Lineage(None, is_save)

    def _is_save(self, step: int, save: str, listing: Listing) -> bool:
        """Whether a step is still this save, or one that cannot be read any more."""
        return step in listing.steps and self.save_of(step, listing) in (save, None)

    def save_of(self, step: int, listing: Listing) -> str | None:
        """The id of the save of a step; "" for one of Orbax, and None if it has none
        that can be read."""
        if listing.steps[step]:  # Neither None nor "": see `Listing`.
            return listing.steps[step]
        found = self.signature(step)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if found is not None:
                return self.journal.row(step, found.stamp).save if found.is_ours else ""
        return None

    def left_steps(self) -> set[int]:
        """The steps that an earlier attempt has left."""
        listing = self.listing()
        return self.lineage(listing).left(listing.steps)

    # ---- Links, and the log.

    def is_linked(self, step: int) -> bool:
        at = self.orbax.name_of(step)
        return self.root.is_link(f"{at}/{ITEM}") or self.root.is_link(at)

    def log_step(
        self, level: int, did: str, step: int, why: str = "", **facts: Any
    ) -> None:
        """Logs what was done with a step."""
        text = f"{did} step {step} of `{self.root}`"
        if "nbytes" in facts:
            text += f": {_text.rate(facts['nbytes'], facts['seconds'])}"
        elif "seconds" in facts:
            text += f" in {facts['seconds']:.3g} s"
        facts = {"step": step, "path": self.root.url, **facts}
        _log.say(level, f"{text}: {why}" if why else text, **facts)


def path_below(path: str | os.PathLike[str], key: str) -> str | os.PathLike[str]:
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
        raise TypeError(f"A step must be an integer, not {_arguments.shown(step)}.")
    if number not in _schema.COUNT:
        # Python shows no number of thousands of digits.
        shown = number if abs(number) < 10**40 else "one of many digits"
        raise ValueError(
            f"A step must not be negative, nor have more than 18 digits: {shown}."
        )
    return number
