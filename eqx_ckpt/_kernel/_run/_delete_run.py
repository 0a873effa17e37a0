"""The deletion of a run: of all of it, if all is ours, or of nothing."""

import os
import re
from collections.abc import Iterator

from .._format import _files, _history, _journal, _text
from .._load import _published
from .._save import _delete, _leftovers, _path_state
from .._storage import _root
from .._storage._backend import Backend
from . import (
    _attempts,
    _listing,
    _numbered,
    _pins,
    _removal,
    _step_place,
    _step_state,
)
from ._listing import ITEM
from ._numbered import PINS
from ._step_state import Skip
from ._steps import Signature, Steps


# The directories of small files that a manager has, and what such files are called.
_SMALL = {
    PINS: _numbered.is_step,
    _attempts.PLACE: _numbered.is_step,
    _history.PLACE: _history.parse_name,
}
_is_damaged = re.compile(r"default\.damaged-[0-9a-f]{8}").fullmatch


def delete_run(path: str | os.PathLike[str]) -> bool:
    """Deletes the run at a path. Returns whether there was one.

    **Raises:** `ValueError` for what is not ours, pinned or being saved; then nothing
    is deleted. Steps that others save meanwhile stay, with the records of the run.
    """
    if not _root.resolve(path).can_list():
        return False
    run = Steps(path)
    if not _step_state.is_run(run):
        return False
    root = run.root
    root.check_writable()
    tops = root.list_top() or {}
    # Others may delete and save some meanwhile.
    begun = _numbered.steps_in(name for name in tops if tops[name])
    steps = sorted({*run.listing().steps, *begun})
    _check_deletable(run, tops, steps)
    for step in steps:
        _delete_step(run, step)
    if new := sorted(run.listing().steps):
        raise ValueError(
            f"Step {new[0]} of the run at `{root}` was saved meanwhile. It stays, and "
            "so do the history and the pins. Delete the run once nothing saves to it."
        )
    # The history says to the last what there was.
    root.delete_files([_journal.KEY])
    for place, is_name in _SMALL.items():
        for name in root.below(place).list_top() or {}:
            is_of_other = place == PINS and is_name(name) and int(name) not in steps
            if is_name(name) and not is_of_other:
                root.delete_files([f"{place}/{name}"])
        for leftover in _numbered.new_directories(root, place):
            _leftovers.delete_abandoned(leftover)
        root.drop_directory(place)
    root.drop_directory()
    return True


def _check_deletable(run: Steps, tops: dict[str, bool], steps: list[int]) -> None:
    if pinned := _pins.pinned(run) & {*steps}:
        step = min(pinned)
        why = f"Step {step} of the run at `{run.root}` is pinned"
        raise ValueError(f"{why}. Nothing was deleted. Call `unpin({step})` before.")
    known = {*map(str, steps), _journal.KEY, *_SMALL}
    for name in sorted(tops):
        is_known = name in known and not (tops[name] and name == _journal.KEY)
        if not is_known and not _files.is_of_system(name):
            raise _not_ours(run.root, name)
    for place, is_name in _SMALL.items():
        _numbered.check_not_linked(run.root, place)
        below = run.root.below(place)
        names = below.list_top() or {} if place in tops else {}
        for name, is_directory in names.items():
            is_ours = _numbered.is_work_name if is_directory else is_name
            inside = below.below(name).list_top() if is_directory else None
            if not is_ours(name) or {*(inside or ())} - {"file"}:
                raise _not_ours(run.root, f"{place}/{name}")
    for step in steps:
        _check_step(run, step)


def _check_step(run: Steps, step: int) -> None:
    _step_place.check_not_linked(run, step)
    found = _step_state.look(run, step)
    if isinstance(found, Skip) and found.is_going:
        raise ValueError(
            f"Step {step} of the run at `{run.root}` is being saved. Nothing was "
            "deleted. Wait for it."
        )
    if isinstance(found, Skip) and found.is_lost:
        why = f"Step {step} of the run at `{run.root}` cannot be deleted: {found.why}"
        raise ValueError(f"{why}. Nothing was deleted. Delete it yourself.")
    is_of_orbax = isinstance(found, Signature) and not found.is_ours
    if is_of_orbax or _removal.is_read(run, step):
        raise _not_ours(run.root, str(step))
    at = run.root.below(str(step))
    for name, is_directory in (at.list_top() or {}).items():
        is_step = name == ITEM and is_directory
        is_ours = is_step or name == _published.DONE or _is_damaged(name)
        if not (is_ours or _files.is_beside(name)):
            raise _not_ours(run.root, f"{step}/{name}")
        if is_step and isinstance(found, Signature):
            _delete.check(at.below(name))
        elif is_step:
            for other in _others_in_begun(at.below(name)):
                raise _not_ours(run.root, f"{step}/{name}/{other}")


def _others_in_begun(root: Backend) -> Iterator[str]:
    """Names of files that are not ours at the path of a save that was not completed."""
    entries = _listing.names_in(root)
    inside = lambda name: _listing.names_in(root.below(name))
    yield from _path_state.foreign_among((), entries, inside)
    if not entries.get("d", True):
        yield "d"
    for save in _published.saves(root):
        for name in inside(f"d/{save}"):
            if not _files.DATA.fullmatch(name):
                yield f"d/{save}/{name}"


def _delete_step(run: Steps, step: int) -> None:
    """Deletes what is known to be ours. What has come since stays, and so does the
    directory then."""
    if run.signature(step) is not None and not _removal.remove_step(run, step):
        raise ValueError(f"Step {step} of the run at `{run.root}` was just pinned.")
    at = run.root.below(str(step))
    if run.is_local:
        _removal.clean_step(run, step)
    else:
        for save in _published.saves(at.below("default")):
            at.delete(f"default/d/{save}")
    for name in filter(_is_damaged, at.list_top() or {}):
        at.delete(name)
    run.root.drop_directory(str(step))


def _not_ours(root: Backend, name: str) -> ValueError:
    return ValueError(
        f"The run at `{root}` has `{_text.escape(name)}` in it, which eqx_ckpt has not "
        "made. Nothing was deleted. Move it elsewhere."
    )
