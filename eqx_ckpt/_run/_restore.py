"""`restore`: the newest step of a run that is complete and undamaged."""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import DamagedError, ReplacedError
from .._format import _index, _schema
from .._format._schema import COUNT, Either, NONE
from .._load import _checkpoint, _deserialise
from .._load._partial import Apart
from .._runtime import _log, _processes
from .._runtime._processes import Processes
from . import _near, _own, _steps
from ._attempts import Copy, NearStep, Passed
from ._near import Asked, Chosen, Near
from ._saves import Saves
from ._steps import Signature, Skip, Steps


class Restored(NamedTuple):
    """A tree, and own states, if they were asked for."""

    tree: PyTree
    own: Any = None


# What processes say of a restore, which is checked before any of it becomes a path.
_SAID = "what a process says of a restore"
_AT = Either([COUNT, NONE])
_CHOICE = _AT, [(COUNT, (str, bool, bool))], _near.CHOSEN
_OUTCOMES = "damaged", "failed", "apart", "replaced", "loaded"
_OUTCOME = re.compile("|".join(_OUTCOMES))
_LOADED = _OUTCOME, str
_KIND = _OUTCOME, str, [COUNT]

# Options with which a restore does not read, or not check, all of a step.
_IN_PART = {"filter_spec", "where", "source", "unexpected", "verify"}

# So many steps are listed in an error.
_SHOWN = 20

# How often a restore looks again for a step that is replaced while it is read.
_AGAIN = 10


def restore(
    saves: Saves, near: Near | None, step: int | None, asked: Asked
) -> tuple[Restored, int]:
    """A step at the root that is named, or the newest of all."""
    steps = saves.steps
    with _log.timed("restore") as timer:
        if step is None:
            found, step = _newest(saves, near, asked)
        else:
            step = _steps.check(step)
            steps.check_own(step)
            found = _of_step(saves, step, asked)
            if near is not None:
                near.begin("")
    if _log.is_on(_log.INFO):
        arrays = (getattr(x, "nbytes", 0) for x in jtu.tree_leaves(found.tree))
        facts = {"nbytes": sum(arrays), "seconds": timer.seconds}
        steps.say(_log.INFO, "Restored", step, **facts)
    return found, step


def _of_step(saves: Saves, step: int, asked: Asked) -> Restored:
    path = saves.steps.path(step)
    load = _deserialise.tree_deserialise_leaves
    try:
        if asked.own is None:
            return Restored(load(path, asked.like, **asked.options))
        ckpt = _checkpoint.open(path)
        tree = load(ckpt, asked.like, **asked.options)
    except FileNotFoundError as e:
        there: list[int] = []
        with contextlib.suppress(OSError, ValueError):  # Such as over HTTP.
            there = saves.steps.complete()
        shown = ", ".join(map(str, there[-_SHOWN:])) or "none that can be listed"
        most = "the newest are" if len(there) > _SHOWN else "there are"
        raise FileNotFoundError(
            f"There is no step {step} in `{saves.steps.root}`: {most} {shown}."
        ) from e
    processes = saves.processes("restore own states", "Restoring own states", step)
    with processes.heard():
        own = _own.load(ckpt, asked.own)
        processes.gather()
        processes.broadcast()
    return Restored(tree, own)


class Found(NamedTuple):
    """A step that is restored; `near` says where, if not at the root."""

    restored: Restored
    step: int
    near: NearStep | None


@dataclasses.dataclass
class _Search:
    """The search for a step: those that are `skipped`; the near step that is `chosen`;
    copies of near parts that are `bad`, of which step, and why; and how often it may
    look again."""

    saves: Saves
    near: Near | None
    asked: Asked
    skipped: dict[int, Skip] = dataclasses.field(default_factory=dict)
    chosen: Chosen = Chosen()
    bad: dict[Copy, Passed] = dataclasses.field(default_factory=dict)
    left: int = _AGAIN


def _newest(saves: Saves, near: Near | None, asked: Asked) -> tuple[Restored, int]:
    """The newest step that can be restored, as all processes find it."""
    search = _Search(saves, near, asked)
    found = None
    while found is None:
        found = _try(search)
    if near is not None:
        near.begin("" if found.near is None else found.near.save)
    # What was not completed may be under way.
    skipped = search.skipped
    saves.damaged |= {step for step, skip in skipped.items() if skip.is_lost}
    if found.near is not None:
        saves.base = None
    elif not _IN_PART & asked.options.keys():
        saves.base = saves.steps.path(found.step)
    _tell(search, found.step)
    return found.restored, found.step


def latest(saves: Saves, near: Near | None) -> int | None:
    """The newest complete step, near ones among them."""
    if near is None:
        return saves.steps.latest()
    processes = saves.processes("latest", "Looking for the latest step")
    with processes.heard():
        words = processes.gather(near.held())
        word = b""
        if processes.leads:
            chosen, far = near.choose(words), saves.steps.latest()
            steps = [far, None if chosen.step is None else chosen.step.step]
            found = max((s for s in steps if s is not None), default=None)
            chosen.warn(
                f"The latest step of `{saves.steps.root}` is {found}, as newer ones "
                "cannot be restored:",
                above=-1 if found is None else found,
                stacklevel=3,
            )
            word = json.dumps(found).encode()
        return _schema.read(processes.broadcast(word), _SAID, _AT)


def _tell(search: _Search, step: int) -> None:
    """Says what was skipped."""
    steps = search.saves.steps
    told = {s: skip for s, skip in search.skipped.items() if not skip.is_going}
    for other, skip in told.items():
        level = _log.WARNING if other > step else _log.INFO
        steps.say(level, "Skipped", other, skip.why)
    search.skipped = told
    search.chosen.passed.extend(search.bad.values())
    search.bad = {}
    search.chosen.warn("", above=step, stacklevel=6)
    # Where the step is another copy's, or also at the root, nothing is lost.
    reasons = _reasons(search, above=step)
    if reasons and _processes.leads():
        warnings.warn(
            f"Restored step {step} of `{steps.root}`, as newer ones cannot "
            f"be:{reasons}",
            stacklevel=6,
        )


def _try(search: _Search) -> Found | None:
    """One look for a step, and an attempt to load it. None: look again."""
    saves, near, asked = search.saves, search.near, search.asked
    processes = saves.processes("restore", "Restoring")
    found, error, said = Restored(None), None, _Said("")
    with processes.heard():
        words = processes.gather(b"" if near is None else near.held())
        word = _choice(search, words) if processes.leads else b""
        # What process 0 has skipped, the others have to know.
        step, search.skipped, search.chosen = _decoded(processes.broadcast(word))
        at = search.chosen.step
        if step is not None:
            if near is not None and at is not None:
                near.fetch(processes, at)
            try:
                if near is not None and at is not None:
                    found = Restored(*near.load(processes.index, at, asked))
                else:
                    found = _load(saves.steps, step, asked)
            except Exception as e:
                error = e
            said = _agree(processes, error)
            if said.outcome == "loaded" and at is not None and asked.own is not None:
                own = _own.gathered(processes, found.own, asked.own)
                found = found._replace(own=own)
    if step is None:
        raise _nothing(saves.steps, search)
    if said.outcome == "loaded":
        return Found(found, step, at)
    if said.outcome == "failed" or (said.outcome == "apart" and at is None):
        what = f"{processes.what}: another process has failed: {said.why}"
        raise error or RuntimeError(what)
    if at is not None:
        _exclude(search, at, said)
    elif said.outcome == "damaged":
        search.skipped[step] = Skip(said.why, True)
    elif search.left == 0:
        raise error or ReplacedError(said.why)
    else:
        search.left -= 1
        saves.steps.say(_log.INFO, "Looking again, without", step, said.why)
    return None


def _exclude(search: _Search, at: NearStep, said: "_Said") -> None:
    """Takes note of copies of near parts that are of no use."""
    is_apart = said.outcome == "apart"
    for process in range(len(at.sources)) if is_apart else said.who:
        source = at.sources[process]
        where = f"part {process} on the disk of process {source}"
        why = f"{where}: {said.why}"
        search.bad[at.save, source, process] = Passed(at.step, why)


def _choice(search: _Search, words: list[bytes]) -> bytes:
    """The newest step, all that are skipped, and where it is if it is a near one."""
    step, skipped = _newest_at_root(search.saves.steps, search.skipped)
    chosen = Chosen()
    if search.near is not None:
        chosen = search.near.choose(words, search.bad.keys())
    if chosen.step is not None and (step is None or chosen.step.step >= step):
        step = chosen.step.step
    else:
        chosen = chosen._replace(step=None)
    return json.dumps([step, list(skipped.items()), chosen]).encode()


def _nothing(steps: Steps, search: _Search) -> Exception:
    text, root = _reasons(search, search.chosen.notes), steps.root
    known = [*search.bad, *(x for x in search.chosen.passed if x.is_whole)]
    if known or any(skip.is_lost for skip in search.skipped.values()):
        return DamagedError(
            f"No step in `{root}` can be restored as it was saved:{text}\nNothing "
            "was changed or deleted. Load what is left of one with `step=` and "
            "`where=`, or choose another directory to start anew."
        )
    return FileNotFoundError(
        f"There is no step to restore in `{root}`:{text or ' there is none.'}"
    )


def _load(steps: Steps, step: int, asked: Asked) -> Restored:
    try:
        ckpt = _checkpoint.open(steps.path(step))
    except FileNotFoundError as e:
        # It was there a moment ago: another process has deleted it.
        raise ReplacedError(str(e)) from e
    except ValueError as e:
        if isinstance(e, _index.Newer):
            raise
        raise DamagedError(str(e)) from e
    load = _deserialise.tree_deserialise_leaves
    tree = load(ckpt, asked.like, **asked.options)
    # Last: before it one process alone would leave the others waiting.
    return Restored(tree, None if asked.own is None else _own.load(ckpt, asked.own))


class _Said(NamedTuple):
    """Whether a step was "loaded", is "damaged", has other parts than are wanted
    ("apart") or was "replaced", or the load has "failed" for something else in any of
    the processes; why; and in which."""

    outcome: str
    why: str = ""
    who: list[int] = []


def _agree(processes: Processes, error: Exception | None) -> _Said:
    """What all say of a load."""
    kinds = [(DamagedError, "damaged"), (ReplacedError, "replaced"), (Apart, "apart")]
    is_of = (word for kind, word in kinds if isinstance(error, kind))
    own = "loaded" if error is None else next(is_of, "failed")
    text = "" if error is None else str(error)
    words = processes.gather(json.dumps([own, text]).encode())
    said = [_schema.read(word, _SAID, _LOADED) for word in words]
    for outcome in _OUTCOMES:
        who = [index for index, x in enumerate(said) if x[0] == outcome]
        if who:
            word = json.dumps(_Said(outcome, said[who[0]][1], who)).encode()
            break
    else:
        word = b""
    return _Said(*_schema.read(processes.broadcast(word), _SAID, _KIND))


def _newest_at_root(
    steps: Steps, skipped: dict[int, Skip]
) -> tuple[int | None, dict[int, Skip]]:
    """The newest complete step that was not skipped, and all that are."""
    found = dict(skipped)
    for listed in steps.listings():
        found = dict(skipped)
        for step in listed:
            if step in skipped:
                continue
            there = steps.look(step)
            if isinstance(there, Signature):
                return step, found
            if there is not None:
                found[step] = there
    return None, found


def _decoded(word: bytes) -> tuple[int | None, dict[int, Skip], Chosen]:
    step, skipped, (at, passed, notes) = _schema.read(word, _SAID, _CHOICE)
    at = None if at is None else NearStep(*at)
    chosen = Chosen(at, [Passed(*x) for x in passed], notes)
    return step, {int(s): Skip(*skip) for s, skip in skipped}, chosen


def _reasons(search: _Search, notes: Iterable[str] = (), above: int = -1) -> str:
    """Why steps above one are not restored, a line for each; "" if there are none."""
    skipped, near = search.skipped, [*search.chosen.passed, *search.bad.values()]
    lines = [f"step {s}: {x.why}" for s, x in sorted(skipped.items()) if s > above]
    lines += [*(str(x) for x in near if x.step > above), *notes]
    return "".join("\n  " + line.replace("\n", "\n    ") for line in lines)
