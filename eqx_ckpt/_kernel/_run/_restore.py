"""`restore`: the newest step of a run that is complete and undamaged."""

import contextlib
import dataclasses
import json
import numbers
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, SupportsIndex

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import DamagedError, ReplacedError
from .._format import _index, _schema
from .._format._schema import COUNT, optional
from .._load import _checkpoint, _deserialise
from .._load._load_options import DEFAULTS, LoadOptions
from .._load._partial import Apart
from .._runtime import _arguments, _conversation, _log, _processes
from .._runtime._arguments import Who
from .._runtime._processes import Processes
from . import _attempt_start, _own, _step_place, _step_state, _steps
from ._near_interface import LoadRequest, NearSearch, NearSteps, Restored
from ._saves import Saves
from ._shared_records import share_records
from ._step_state import Skip
from ._steps import Signature, Steps


# What processes say of a restore, which is checked before any of it becomes a path.
_SAID = "what a process says of a restore"
_AT = optional(COUNT)
_SKIPPED = [(COUNT, (str, bool, bool, bool))]
# The worst first: `_agree` takes that of all processes.
_KINDS = "damaged", "failed", "apart", "replaced", "told", "loaded"
_KIND = re.compile("|".join(_KINDS))
_OUTCOME = _KIND, str, [(COUNT, COUNT)]

# Options of which other values than the defaults leave a part of a step unread, or
# unchecked.
_IN_PART = "filter_spec", "where", "source", "unexpected", "verify"


def restore(
    saves: Saves, near: NearSteps, step: SupportsIndex | None, request: LoadRequest
) -> Restored:
    """Loads a step at the root that is named, or the newest of all."""
    steps = saves.steps
    who = request.options.get("processes", saves.run_processes.together)
    request = _with_processes(request, who)
    with _log.timed("restore") as timer:
        if step is None:
            found = _newest(saves, near, request)
        else:
            _check_order(request.like, step)
            step = _steps.check_step(step)
            if who != "own":
                _check_agreed(saves, step, who)
            _step_place.check_not_linked(steps, step)
            found = _of_step(saves, step, request)
            saves.attempt_start.note_restored(step)
            near.note_restored()
    if _log.is_on(_log.INFO):
        arrays = (getattr(x, "nbytes", 0) for x in jtu.tree_leaves(found.tree))
        facts = {"nbytes": sum(arrays), "seconds": timer.seconds}
        steps.log_step(_log.INFO, "Restored", found.step, **facts)
    return found


def _check_order(like: PyTree, step: SupportsIndex) -> None:
    """**Raises:** `TypeError` for a tree and a step in each other's place."""
    if isinstance(like, numbers.Integral) and not hasattr(step, "__index__"):
        raise TypeError(
            "The tree comes first, and the step after it: "
            f"`restore(like, step={like})`."
        )


def _with_processes(request: LoadRequest, who: Who) -> LoadRequest:
    return request._replace(options={**request.options, "processes": who})


def _check_agreed(saves: Saves, step: int, who: Who) -> None:
    """**Raises:** `ValueError` in all processes if they do not restore one step."""
    root = saves.steps.root
    together, what = _arguments.together(who), f"Restoring a step, in `{root}`"
    processes = _processes.of_run("restore a step", root, together, what)
    with processes.share_errors():
        said = share_records(processes, step, _SAID, COUNT)
    if found := sorted({*said} - {step}):
        raise ValueError(
            f"This process restores step {step} of `{root}`, and others restore "
            f"{', '.join(map(str, found))}. `latest()` gives all processes one step."
        )


def _load_processes(steps: Steps, step: int, request: LoadRequest) -> Processes:
    """The processes of the load that follows. Others may be in that load by now, and
    wait: so an error before it is shared with them as one of that call."""
    # This look is the one that `last_known_path` tells of. The load says what is wrong.
    with contextlib.suppress(Exception):
        steps.path(step)
    path, options = steps.last_known_path(step), LoadOptions(**request.options)
    return _deserialise.processes_of("load", [path], request.like, options)


def _of_step(saves: Saves, step: int, request: LoadRequest) -> Restored:
    steps = saves.steps
    with _load_processes(steps, step, request).share_errors():
        # Orbax may have it elsewhere, or as several trees.
        if steps.signature(step) is None:
            skip = _step_state.why_skipped(steps, step)
            if skip is not None and skip.is_unread:
                raise ValueError(
                    f"A manager does not restore step {step} of `{steps.root}`: "
                    f"{skip.why}."
                )
        path = steps.path(step)
        ckpt = None if request.own is None else _checkpoint.open(path)
    load = _deserialise.tree_deserialise_leaves
    tree = load(path if ckpt is None else ckpt, request.like, **request.options)
    if ckpt is None:
        return Restored(tree, None, step)
    processes = Processes()
    if request.options.get("processes") != "own":
        processes = saves.run_processes.of_call(
            "restore own states", "Restoring own states"
        )
    with processes.share_errors():
        own = _own.load(ckpt, request.own)
        processes.round()
    return Restored(tree, own, step)


@dataclasses.dataclass
class _Search:
    """The search for a step: the near steps in it; the steps at the root that are
    `skipped`; and how many more looks it may take."""

    saves: Saves
    near: NearSearch
    request: LoadRequest
    skipped: dict[int, Skip] = dataclasses.field(default_factory=dict)
    looks_left: int = _steps.MAX_LOOKS
    # Newer steps that an earlier attempt has left, as process 0 knows.
    passed: Sequence[int] = ()

    @property
    def is_near(self) -> bool:
        """Whether a near step is chosen."""
        return self.near.step is not None


def _newest(saves: Saves, near: NearSteps, request: LoadRequest) -> Restored:
    """Loads the newest step that can be restored, as all processes find it."""
    search = _Search(saves, near.search(), request)
    found = None
    while found is None:
        found = _try(search)
    step = found.step
    saves.attempt_start.note_restored(step, search.near.near_save, search.near.has_near)
    near.note_restored()
    # What was not completed may be under way.
    skipped = search.skipped
    damaged = {step for step, skip in skipped.items() if skip.is_lost}
    options = {**DEFAULTS, **request.options}
    is_whole = all(options[x] is DEFAULTS[x] or options[x] == "error" for x in _IN_PART)
    is_in_part = search.is_near or not is_whole
    path = None if is_in_part else saves.steps.last_known_path(step)
    saves.note_restored(path, search.is_near, damaged)
    _tell(search, step)
    return found


def _tell(search: _Search, step: int) -> None:
    """Says what was skipped."""
    steps = search.saves.steps
    told = {s: skip for s, skip in search.skipped.items() if not skip.is_going}
    for other, skip in told.items():
        level = _log.WARNING if other > step else _log.INFO
        steps.log_step(level, "Skipped", other, skip.why)
    search.skipped = told
    if search.passed:
        steps.log_step(_log.WARNING, "Restored", step, _passed(search))
    search.near.warn(step)
    # Reasons for this very step are left out: it was loaded, from another copy or from
    # the root.
    reasons = _skip_reasons(search, above=step)
    if reasons and _processes.leads():
        _log.warn(
            f"Restored step {step} of `{steps.root}`. Newer ones are skipped:{reasons}",
        )


def _try(search: _Search) -> Restored | None:
    """Makes one look for a step, and loads it: process 0 chooses the same one for all
    processes. Returns None if they have to look again.

    In one conversation they report their near disks, get the choice, load the step, and
    share how that went.
    """
    near, steps, loaded = search.near, search.saves.steps, None
    processes = search.saves.run_processes.of_call("restore", "Restoring")
    with processes.share_errors():
        choose = lambda reports: _choice(search, reports)
        # What process 0 has skipped, the others have to know.
        step = _take(search, processes.round(near.report(), choose))
        if step is not None:
            loaded = _load_chosen(search, step, processes)
    if step is None or loaded is None:
        raise _nothing(search)
    found, error, (kind, why, copies) = loaded
    if kind == "loaded":
        return found
    if kind in ("failed", "told") or (kind == "apart" and not search.is_near):
        what = f"{processes.what}: another process has failed: {why}"
        raise error or RuntimeError(what)
    if search.is_near:
        near.exclude(why, copies)
    elif kind == "damaged":
        search.skipped[step] = Skip(why, True)
    elif search.looks_left == 0:
        raise error or ReplacedError(why)
    else:
        search.looks_left -= 1
        steps.log_step(_log.INFO, "Looking again, without", step, why)
    return None


class _Outcome(NamedTuple):
    """The outcome of a load. The step was "loaded", is "damaged", has other parts than
    are wanted ("apart") or was "replaced", the load has "failed" for another reason, or
    this process was only "told" that it has not gone well in another.
    Bad `copies` of parts have the process on whose disk they are, and their number."""

    kind: str
    why: str
    copies: list[tuple[int, int]]


class _Loaded(NamedTuple):
    """A step as this process has loaded it, or its error; and the worst outcome in any
    process."""

    found: Restored | None
    error: Exception | None
    outcome: _Outcome


def _load_chosen(search: _Search, step: int, processes: Processes) -> _Loaded:
    near, request = search.near, search.request
    found = error = None
    if search.is_near:
        near.fetch(processes, request)
    try:
        if search.is_near:
            found = near.load(processes.index, request)
        else:
            who = request.options.get("processes", "all")
            part = processes.for_part(who, "restore")
            found = _load(search.saves.steps, step, _with_processes(request, part))
    except Exception as e:
        error = e
    outcome = _agree(processes, error, near.blamed)
    if search.is_near and found is not None and outcome.kind == "loaded":
        own = near.finish(processes, found.own, request)
        found = found._replace(own=own)
    return _Loaded(found, error, outcome)


def _choice(search: _Search, reports: list[bytes]) -> bytes:
    """In process 0: the newest step, all that are skipped, and what near disks add to
    it, as JSON. `reports` are those of all processes on their near disks."""
    search.near.look(reports)
    step, skipped = _newest_at_root(search)
    near = search.near.choose(step)
    return json.dumps([step, list(skipped.items()), near]).encode()


def _take(search: _Search, choice: bytes) -> int | None:
    """Takes the choice of process 0. Returns its step."""
    form = _AT, _SKIPPED, search.near.schema
    step, skipped, near = _schema.read(choice, _SAID, form)
    search.skipped = {int(s): Skip(*skip) for s, skip in skipped}
    search.near.take(near)
    return step if search.near.step is None else search.near.step


def _nothing(search: _Search) -> Exception:
    near, steps = search.near, search.saves.steps
    root = steps.root
    text = _skip_reasons(search, near.notes)
    is_lost = any(skip.is_lost for skip in search.skipped.values())
    if not search.skipped:
        steps.orbax.check_readable()
    if not is_lost and any(skip.is_unread for skip in search.skipped.values()):
        return ValueError(
            f"No step in `{root}` can be restored by a manager:{text}\nThey may be "
            "whole: open one by its path, and choose another directory for this run."
        )
    if is_lost or near.knows_lost():
        return DamagedError(
            f"No step in `{root}` can be restored as it was saved:{text}\nNothing "
            "was changed or deleted. Load what is left of one with `step=` and "
            "`where=`, or choose another directory to start anew."
        )
    return FileNotFoundError(
        f"There is no step to restore in `{root}`:{text or ' none was ever completed.'}"
    )


def _load(steps: Steps, step: int, request: LoadRequest) -> Restored:
    try:
        with _load_processes(steps, step, request).share_errors():
            ckpt = _checkpoint.open(steps.path(step))
    except FileNotFoundError as e:
        # It was there a moment ago: another process has deleted it.
        raise ReplacedError(str(e)) from e
    except ValueError as e:
        if isinstance(e, _index.Newer):
            raise
        raise DamagedError(str(e)) from e
    load = _deserialise.tree_deserialise_leaves
    tree = load(ckpt, request.like, **request.options)
    # After the load: if this failed before it in one process alone, the others would
    # wait in the load.
    own = None if request.own is None else _own.load(ckpt, request.own)
    return Restored(tree, own, step)


def _agree(
    processes: Processes, error: Exception | None, blamed: list[tuple[int, int]]
) -> _Outcome:
    """The worst outcome in any process."""
    kinds = [(DamagedError, "damaged"), (ReplacedError, "replaced"), (Apart, "apart")]
    is_of = (word for kind, word in kinds if isinstance(error, kind))
    other = "told" if error and _conversation.is_of_others(error) else "failed"
    here = "loaded" if error is None else next(is_of, other)
    outcome = _Outcome(here, "" if error is None else str(error), blamed)
    said = share_records(processes, outcome, _SAID, _OUTCOME)
    kind = min((kind for kind, *_ in said), key=_KINDS.index)
    worst = [(why, copies) for other, why, copies in said if other == kind]
    copies = [(disk, i) for _, bad in worst for disk, i in bad]
    return _Outcome(kind, worst[0][0], copies)


def _newest_at_root(search: _Search) -> tuple[int | None, dict[int, Skip]]:
    """The newest complete step that was not skipped, and all that are."""
    steps = search.saves.steps
    # What was not lost may be complete by now.
    skipped = {step: skip for step, skip in search.skipped.items() if skip.is_lost}
    found = dict(skipped)
    for listing in steps.listings():
        found = dict(skipped)
        lineage = steps.lineage(listing, search.near.has_near)
        for step in _steps.in_restore_order(listing, lineage):
            if step in skipped:
                continue
            # One that the list shows to be complete is read without a look.
            is_listed = listing.steps[step] is not None
            there = None if is_listed else _step_state.look(steps, step)
            if is_listed or isinstance(there, Signature):
                newer = (s for s in sorted(listing.steps) if s > step)
                search.passed = [*filter(lineage.is_left, newer)]
                return step, found
            if there is not None:
                found[step] = there
    return None, found


def _passed(search: _Search) -> str:
    return f"{_attempt_start.shown(search.passed)} of an earlier attempt at this run"


def _skip_reasons(search: _Search, notes: Iterable[str] = (), above: int = -1) -> str:
    """Why steps above one are not restored, a line for each; "" if there are none."""
    skipped = sorted(search.skipped.items())
    lines = [f"step {s}: {x.why}" for s, x in skipped if s > above]
    lines += [_passed(search)] if search.passed else []
    lines += search.near.skip_reasons(above)
    lines += notes
    return "".join("\n  " + line.replace("\n", "\n    ") for line in lines)
