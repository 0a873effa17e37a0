"""`restore`: the newest step of a run that is complete and undamaged."""

import json
import warnings
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._errors import DamagedError, ReplacedError
from .._format import _index
from .._load import _checkpoint, _deserialise
from .._runtime import _log
from .._runtime._processes import Processes
from . import _own
from ._saves import Saves
from ._steps import Skip, Steps


class Asked(NamedTuple):
    """What is restored: a tree, with the options of a load, and own states, if `own` is
    not None. See `CheckpointManager.restore`."""

    like: PyTree
    own: PyTree
    options: dict[str, Any]


class Restored(NamedTuple):
    """A tree, and own states, if they were asked for."""

    tree: PyTree
    own: Any = None


# Options with which a restore does not read, or not check, all of a step.
_IN_PART = {"filter_spec", "where", "source", "unexpected", "verify"}

# How often a restore looks again for a step that is replaced while it is read.
_AGAIN = 10


def of_step(saves: Saves, step: int, asked: Asked) -> Restored:
    """A step that is named."""
    path = saves.steps.path(step)
    load = _deserialise.tree_deserialise_leaves
    if asked.own is None:
        return Restored(load(path, asked.like, **asked.options))
    ckpt = _checkpoint.open(path)
    tree = load(ckpt, asked.like, **asked.options)
    processes = saves.processes("restore own states", "Restoring own states", step)
    with processes.heard():
        own = _own.load(ckpt, asked.own)
        processes.gather()
        processes.broadcast()
    return Restored(tree, own)


def newest(saves: Saves, asked: Asked) -> tuple[Restored, int]:
    """The newest step that can be restored, as all processes find it."""
    steps = saves.steps
    skipped: dict[int, Skip] = {}
    left = _AGAIN
    while True:
        processes = saves.processes("restore", "Restoring")
        found, error, outcome, why = Restored(None), None, "", ""
        with processes.heard():
            processes.gather()
            word = _newest(steps, skipped) if processes.leads else b""
            # What process 0 has skipped, the others have to know.
            step, skipped = _decoded(processes.broadcast(word))
            if step is not None:
                try:
                    found = _load(steps, step, asked)
                except Exception as e:
                    error = e
                outcome, why = _agree(processes, error)
        if step is None:
            raise _nothing(steps, skipped)
        if outcome == "loaded":
            break
        if outcome == "failed":
            what = f"{processes.what}: another process has failed: {why}"
            raise error or RuntimeError(what)
        if outcome == "damaged":
            skipped[step] = Skip(why, True)
        elif left == 0:
            raise error or ReplacedError(why)
        else:
            left -= 1
            steps.say(_log.INFO, "Looking again, without", step, why)
    # What was not completed may be under way.
    saves.damaged |= {step for step, skip in skipped.items() if skip.is_lost}
    if not _IN_PART & asked.options.keys():
        saves.base = steps.path(step)
    told = {s: skip for s, skip in skipped.items() if not skip.is_going}
    for other, skip in told.items():
        steps.say(_log.WARNING, "Skipped", other, skip.why)
    if told and processes.leads:
        warnings.warn(
            f"Restored step {step} of `{steps.root}`, as newer ones cannot "
            f"be:{_reasons(told)}",
            stacklevel=3,
        )
    return found, step


def _nothing(steps: Steps, skipped: dict[int, Skip]) -> Exception:
    text, root = _reasons(skipped), steps.root
    if any(skip.is_lost for skip in skipped.values()):
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


def _agree(processes: Processes, error: Exception | None) -> tuple[str, str]:
    """Whether the step was "loaded", is "damaged" or was "replaced", or the load has
    "failed" for something else in any of them; and why."""
    kinds = [(DamagedError, "damaged"), (ReplacedError, "replaced")]
    is_of = (word for kind, word in kinds if isinstance(error, kind))
    own = "loaded" if error is None else next(is_of, "failed")
    text = "" if error is None else str(error)
    words = processes.gather(json.dumps([own, text]).encode())
    said = dict(json.loads(word) for word in reversed(words))
    order = ("damaged", "failed", "replaced", "loaded")
    worst = next(((x, said[x]) for x in order if x in said), None)
    outcome, why = json.loads(processes.broadcast(json.dumps(worst).encode()))
    return outcome, why


def _newest(steps: Steps, skipped: dict[int, Skip]) -> bytes:
    """The newest complete step that was not skipped, and all that are."""
    found = dict(skipped)
    for listed in steps.listings():
        found = dict(skipped)
        for step in listed:
            if step in skipped:
                continue
            skip = None
            if steps.signature(step) is None:
                skip = steps.skip(step)
                # Another process may have completed it since.
                if steps.signature(step) is None:
                    if skip is not None:
                        found[step] = skip
                    continue
            return json.dumps([step, list(found.items())]).encode()
    return json.dumps([None, list(found.items())]).encode()


def _decoded(word: bytes) -> tuple[int | None, dict[int, Skip]]:
    step, skipped = json.loads(word)
    return step, {int(s): Skip(*skip) for s, skip in skipped}


def _reasons(skipped: dict[int, Skip]) -> str:
    lines = [f"step {s}: {skip.why}" for s, skip in sorted(skipped.items())]
    return "".join("\n  " + line.replace("\n", "\n    ") for line in lines)
