"""`CheckpointManager`: the checkpoints of a run, which to keep, and when to stop."""

import copy
import inspect
import json
import math
import numbers
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._errors import DamagedError, ReplacedError
from .._format import _index
from .._load import _checkpoint, _deserialise
from .._runtime import _processes, _undo
from .._runtime._processes import Team
from .._save import _async, _options, _serialise
from .._save._background import SaveHandle
from .._storage._remote import Store
from . import _steps
from ._steps import Skip, Steps


_save_options = set(
    inspect.signature(_async.async_tree_serialise_leaves).parameters
) - {"path", "pytree", "metadata", "overwrite", "reuse", "tag"}

# Options with which a restore does not read, or not check, all of a step.
_in_part = {"filter_spec", "where", "source", "unexpected", "verify"}

_STOPPED = "that was interrupted"
_DONATED = "its arrays were donated or deleted before it was due"

# How often a restore looks again for a step that is replaced while it is read.
_AGAIN = 10


class _Offer(NamedTuple):
    """A state that was given to `save`, and how: as leaves and their structure."""

    step: int
    leaves: list[Any]
    structure: Any
    metrics: Mapping[str, Any] | None
    metadata: Any
    force: bool

    @property
    def is_gone(self) -> bool:
        """Whether some of its arrays have been donated."""
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in self.leaves)


class CheckpointManager:
    """The checkpoints of a run, one for each step that is saved.

    A step is an ordinary checkpoint at `<root>/<step>/default`, which all other calls
    take too, and Orbax's `CheckpointManager` reads.

    **Arguments:**

    - `root`: the directory of the run, or a URL, as in [`open`][]. In an object store
        nobody can tell whether a save goes on: what killed saves have left is deleted
        when the run saves the same step again, or by [`clean`][].
    - `every`, `every_seconds`: [`save`][] saves steps that are multiples of `every`,
        and when so many seconds have passed since the last save. Without either it
        saves at each call.
    - `keep`: how many of the newest steps to keep; by default all. An older step is
        deleted once a newer one would survive a power cut.
    - `keep_every`: steps that are multiples of this are kept too.
    - `best`: `(metric, "min")` or `(metric, "max")`: the best step is kept too.
    - `signals`: signals that mean that the run has to stop, such as
        `[signal.SIGTERM]`; handlers that were there are called too. Only in the main
        thread.
    - `reuse`: whether what has not changed since the step before, such as a frozen
        base, is not written again, as of a save's `reuse`: on local file systems. It
        first is written once more, apart from what changes. From then on jax.Arrays on
        accelerators that are the very same objects as in the step before are not even
        looked at, so say False if another framework writes to their memory, by DLPack.
    - `options`: of every save: `filter_spec`, `is_leaf`, `where`, `dtype`, `layout`,
        `chunks`, `compression`, `durable`, `max_bytes`, `progress` and `timeout`, as in
        [`async_tree_serialise_leaves`][].

    Use it as a context manager: at the end of the `with` it saves the last state that
    was given to [`save`][] and was not due, waits, and raises what went wrong. So a run
    ends with its last state, whatever ends it: its last step, a `break`, one of the
    `signals`, or an exception. After an exception there are two cases in which the
    newest state is that of the last save, and the exception has a note that says so:
    its arrays have been donated meanwhile, or this is one of many processes. What is
    saved because of an exception lets no older step be deleted.

    In a run of many processes all of them make the same calls, and process 0 decides
    and deletes. No link below the root is followed. Complete steps that Orbax's
    `CheckpointManager` has saved there are steps too, and are never deleted.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> with ec.CheckpointManager("run", keep=2, every=10) as manager:
        ...     for step in range(1, 56):
        ...         state = {"x": jnp.full(2, step)}
        ...         _ = manager.save(step, state, {"loss": 1 / step})
        >>> manager.steps()
        [50, 55]
        >>> state, step = manager.restore(state)
        >>> ec.open(manager.path(50)).metadata
        {'step': 50, 'metrics': {'loss': 0.02}}

        ```
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        every: int | None = None,
        every_seconds: int | float | None = None,
        signals: Iterable[int] = (),
        reuse: bool = True,
        **options: Any,
    ):
        steps = Steps(root)
        given = {"keep": keep, "keep_every": keep_every, "every": every}
        for name, number in given.items():
            if number is None:
                continue
            if not (isinstance(number, numbers.Integral) and number >= 1):
                raise ValueError(f"`{name}` must be an integer >= 1, not {number!r}.")
        if best is not None and tuple(best)[1:] not in (("min",), ("max",)):
            raise ValueError(
                f'`best` must be `(metric, "min")` or `(metric, "max")`, not {best!r}.'
            )
        if unknown := sorted(options.keys() - _save_options):
            raise TypeError(
                f"`{unknown[0]}` is no option of a save. These are: "
                f"{', '.join(sorted(_save_options))}."
            )
        if keep is not None and not options.get("durable", True):
            raise ValueError(
                "`keep` deletes older steps, which is safe only once the new one would "
                "survive a power cut: leave `durable` as it is, or `keep` out."
            )
        self._steps = steps
        self._keep, self._keep_every, self._best = keep, keep_every, best
        self._every, self._every_seconds = every, every_seconds
        self._options = options
        self._is_reusing = reuse
        self._last = time.monotonic()
        # The save that goes on, and whether what follows it is done too.
        self._saving: tuple[SaveHandle, threading.Event] | None = None
        self._undeleted: list[str] = []
        # The last step that was saved here, or restored: known to be whole.
        self._base: SaveHandle | str | Store | None = None
        # What was last given to `save`, until it is saved.
        self._offered: _Offer | None = None
        self._begun: int | None = None
        # Steps that could not be restored: saves may replace them.
        self._skipped: set[int] = set()
        self._is_told = self._is_stopping = False
        self._handlers: dict[int, Any] = {}
        try:
            for number in signals:
                self._handlers[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)
        except BaseException:
            self._forget_signals()
            raise

    def __repr__(self) -> str:
        return f"CheckpointManager({self._steps.root.url!r})"

    # ---- Saving.

    def save(
        self,
        step: int,
        tree: PyTree,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step in the background, if it is due.

        As of [`async_tree_serialise_leaves`][], it returns once the arrays may be
        donated or overwritten. One save goes on at a time: this waits for the one
        before, and raises what went wrong with it. A state that is not due is kept
        until the next call, for the end of the `with`: that copies its NumPy arrays,
        and nothing else. So do not write to memory that a jax.Array of it shares.

        **Arguments:**

        - `step`: the number of the step, not negative.
        - `tree`: what to save.
        - `metrics`: numbers, or arrays of one. They become part of the metadata, those
            that are not finite as strings; it is only of saved steps that they are
            computed.
        - `metadata`: as of a save, a dict. `step` and `metrics` are put into it.
        - `force`: whether to save now, due or not, and to replace the step if it is
            there.

        **Returns:** whether it saves.

        **Raises:** `FileExistsError` if the step exists, without `force`; and what
        `async_tree_serialise_leaves` raises.
        """
        step = _steps.check(step)
        given = step, metrics, metadata, force
        if not force and not self._may_be_due(step):
            self._keep_offer(tree, *given)
            return False
        try:
            saves = self._save(tree, *given)
        except BaseException as e:
            # Another try might do what a disk or a store has not done now.
            # What is refused leaves the state before it the last one.
            is_refused = isinstance(e, (FileExistsError, TypeError, ValueError))
            if not is_refused and _processes.size() == 1:
                self._keep_offer(tree, *given)
            raise
        if saves:
            self._offered = None
        else:
            self._keep_offer(tree, *given)
        return saves

    def _keep_offer(
        self,
        tree: PyTree,
        step: int,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        force: bool,
    ) -> None:
        """Keeps what was given to `save`, so that nobody can change it."""
        is_leaf = self._options.get("is_leaf")
        leaves, structure = jtu.tree_flatten(tree, is_leaf=is_leaf)
        leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in leaves]
        metrics = {
            name: x.copy() if isinstance(x, np.ndarray) else x
            for name, x in (metrics or {}).items()
        }
        given = metrics, copy.deepcopy(metadata), force
        self._offered = _Offer(step, leaves, structure, *given)

    def _save_offer(self, offer: _Offer, retain: bool = True) -> None:
        step, leaves, structure, metrics, metadata, force = offer
        tree = jtu.tree_unflatten(structure, leaves)
        wrong = None
        try:
            values = {name: _number(name, x) for name, x in (metrics or {}).items()}
        except Exception as e:
            # A state is worth more than its metrics.
            values, wrong = {}, e
        self._save(tree, step, values, metadata, force, due=True, retain=retain)
        if wrong is not None:
            warnings.warn(
                f"Step {step} is saved without its metrics: {wrong}", stacklevel=4
            )

    def _save(
        self,
        tree: PyTree,
        step: int,
        metrics: Mapping[str, Any] | None,
        metadata: Any,
        force: bool,
        due: bool = False,
        retain: bool = True,
    ) -> bool:
        """Saves a step, if it is due or `due` says so, and deletes older ones then."""
        if not isinstance(metadata, Mapping | None):
            raise TypeError(f"`metadata` must be a dict, not {metadata!r:.60}.")
        _options.check_name(self._steps.root)
        given = dict(metadata or {})
        if taken := sorted(given.keys() & {"step", "metrics"}):
            raise ValueError(
                f"`metadata` has the key `{taken[0]}`, which the manager sets itself."
            )
        team = self._team("save a step", f"Saving step {step}", step)
        try:
            how = team.confer(lambda: b"", lambda _: self._decide(step, force, due))
        except Exception as e:
            # What went wrong with the save before is told now, and not once more.
            try:
                self.wait()
            except Exception as before:
                if before is not e:
                    e.add_note(f"The save before has failed: {before}")
            raise
        if not how:
            return False
        # The others are about to save.
        timeout = self._options.get("timeout", _processes.TIMEOUT)
        saving = _serialise.team_of(self.path(step), None, None, timeout, step)
        with saving.heard():
            self.wait()
            values = {name: _number(name, x) for name, x in (metrics or {}).items()}
        self._begun = step
        handle = _async.async_tree_serialise_leaves(
            self.path(step),
            tree,
            metadata={**given, "step": step, "metrics": values},
            overwrite=how == b"replace",
            reuse=self._base if self._is_reusing else None,
            tag=step,
            **self._options,
        )
        self._last = time.monotonic()
        over = threading.Event()
        handle.add_done_callback(
            lambda handle: self._follow_up(
                step, handle, over, retain and team.rank == 0
            )
        )
        # Last: whoever waits for it waits for both.
        self._saving = handle, over
        try:
            handle.staged()
        except Exception:
            self._saving = None  # It is over, and this says why.
            raise
        return True

    def _may_be_due(self, step: int) -> bool:
        """All processes know alike; with `every_seconds` process 0 has to decide."""
        if self._every is not None and step % self._every == 0:
            return True
        return self._every is None or self._every_seconds is not None

    def _decide(self, step: int, force: bool, due: bool) -> bytes:
        due = due or (self._every is not None and step % self._every == 0)
        if not (force or due):
            seconds = self._every_seconds
            if seconds is not None and time.monotonic() - self._last < seconds:
                return b""
        self.wait()
        self._steps.check_own(step)
        if step in self._skipped:
            self._steps.set_aside(step, self._options.get("layout", "ocdbt"))
        elif not force and self._steps.signature(step) is not None:
            raise FileExistsError(
                f"Step {step} exists already, at `{self.path(step)}`. Delete it, or "
                "replace it with `force=True`."
            )
        return b"replace" if force or step in self._skipped else b"new"

    def wait(self) -> None:
        """Waits until the save that goes on is done, and older steps are deleted.

        **Raises:** what went wrong with the save. It warns of what was not deleted.
        """
        if self._saving is None:
            return
        handle, over = self._saving
        try:
            handle.result()
            over.wait()
        except Exception:
            self._saving = None
            raise
        self._saving = None  # But not after Ctrl-C: it goes on.
        if self._undeleted:
            text, self._undeleted = "\n  ".join(self._undeleted), []
            warnings.warn(f"Older steps were not deleted:\n  {text}", stacklevel=2)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        with _undo.surely(self._forget_signals):
            if error is not None:
                self._save_after(error)
                return
            try:
                self.wait()
                self._save_last()
                self.wait()
            except BaseException as e:
                self._save_after(e)
                raise
            self._offered = None

    def _forget_signals(self) -> None:
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before or signal.SIG_DFL)

    def _save_last(self) -> None:
        """Saves what was last given to `save`, if it is not saved."""
        offer = self._offered
        if offer is None:
            return
        if offer.is_gone:
            self._offered = None
            warnings.warn(self._not_saved(offer, _DONATED), stacklevel=3)
        else:
            self._save_offer(offer)

    def _save_after(self, error: BaseException) -> None:
        """Saves it after an error, which has notes on what cannot be done."""
        offer, self._offered = self._offered, None
        is_begun = offer and self._saving is not None and self._begun == offer.step
        try:
            self.wait()
        except Exception as e:
            is_begun = False
            if e is not error:
                error.add_note(f"The save before has failed: {type(e).__name__}: {e}")
        except BaseException:
            if offer is not None and not is_begun:
                error.add_note(self._not_saved(offer, _STOPPED))
            raise
        if offer is None or is_begun:
            return
        if offer.is_gone:
            error.add_note(self._not_saved(offer, _DONATED))
        elif _processes.size() > 1:
            error.add_note(self._not_saved(offer, "the other processes take no part"))
        else:
            try:
                self._save_offer(offer, retain=False)
                self.wait()
            except BaseException as e:
                why = f"{type(e).__name__}: {e}" if str(e) else _STOPPED
                error.add_note(self._not_saved(offer, why))
                if not isinstance(e, Exception):
                    raise

    def _not_saved(self, offer: _Offer, why: str) -> str:
        return (
            f"The state of step {offer.step}, the last that was given to `save`, is "
            f"not saved in `{self._steps.root}`: {why}."
        )

    # ---- Restoring.

    def restore(
        self, like: PyTree, step: int | None = None, **options: Any
    ) -> tuple[PyTree, int]:
        """Loads a step: by default the newest that is complete and undamaged.

        **Arguments:**

        - `like`: as in [`tree_deserialise_leaves`][], and so are the `options`.
        - `step`: the step. Without it, newer steps that are incomplete or damaged are
            skipped, with one warning that says which and why. A tree that does not fit
            is an error, and never skipped. So is a step that cannot be read now, as the
            disk or the store fails: nothing says that it is damaged.

        **Returns:** the tree, and the step it is of.

        **Raises:** `FileNotFoundError` if no step was ever completed;
        [`DamagedError`][] if there are steps, and none is whole; and what
        `tree_deserialise_leaves` raises.
        """
        self.wait()
        self._offered = None
        if step is not None:
            step = _steps.check(step)
            self._steps.check_own(step)
            load = _deserialise.tree_deserialise_leaves
            return load(self.path(step), like, **options), step
        skipped: dict[int, Skip] = {}
        left = _AGAIN
        while True:
            team = self._team("restore", "Restoring")
            word = team.confer(lambda: b"", lambda _: self._newest(skipped))
            # What process 0 has skipped, the others have to know.
            step, skipped = _decoded(word)
            if step is None:
                raise self._nothing(skipped)
            tree, error = None, None
            loaded = team.round("loaded")
            try:
                with loaded.alive():
                    tree = self._load(step, like, options)
            except Exception as e:
                error = e
            outcome, why = self._agree(loaded, error)
            if outcome == "loaded":
                break
            if outcome == "damaged":
                skipped[step] = Skip(why, True)
            elif left == 0:
                raise error or ReplacedError(why)
            else:
                left -= 1
        self._skipped.update(skipped)
        if not _in_part & options.keys():
            self._base = self.path(step)
        if skipped and team.rank == 0:
            warnings.warn(
                f"Restored step {step} of `{self._steps.root}`, as newer ones cannot "
                f"be:{_reasons(skipped)}",
                stacklevel=2,
            )
        return tree, step

    def _nothing(self, skipped: dict[int, Skip]) -> Exception:
        text, root = _reasons(skipped), self._steps.root
        if any(skip.is_lost for skip in skipped.values()):
            return DamagedError(
                f"No step in `{root}` can be restored as it was saved:{text}\nNothing "
                "was changed or deleted. Load what is left of one with `step=` and "
                "`where=`, or choose another directory to start anew."
            )
        return FileNotFoundError(
            f"There is no step to restore in `{root}`:{text or ' there is none.'}"
        )

    def _load(self, step: int, like: PyTree, options: dict[str, Any]) -> PyTree:
        try:
            ckpt = _checkpoint.open(self.path(step))
        except FileNotFoundError as e:
            # It was there a moment ago: another process has deleted it.
            raise ReplacedError(str(e)) from e
        except ValueError as e:
            if isinstance(e, _index.Newer):
                raise
            raise DamagedError(str(e)) from e
        return _deserialise.tree_deserialise_leaves(ckpt, like, **options)

    def _agree(self, team: Team, error: Exception | None) -> tuple[str, str]:
        """Whether the step was "loaded", is "damaged" or was "replaced", and why.

        **Raises:** what else went wrong in any of them, in all processes.
        """
        kinds = [(DamagedError, "damaged"), (ReplacedError, "replaced")]
        is_of = (word for kind, word in kinds if isinstance(error, kind))
        own = "loaded" if error is None else next(is_of, "failed")

        def answer(words: list[bytes]) -> bytes:
            said = dict(json.loads(word) for word in reversed(words))
            order = ("damaged", "failed", "replaced", "loaded")
            return json.dumps(next((x, said[x]) for x in order if x in said)).encode()

        text = "" if error is None else str(error)
        outcome, why = json.loads(
            team.confer(lambda: json.dumps([own, text]).encode(), answer)
        )
        if outcome == "failed":
            if error is not None:
                raise error
            raise RuntimeError(f"{team.what}: another process has failed: {why}")
        return outcome, why

    def _newest(self, skipped: dict[int, Skip]) -> bytes:
        """The newest complete step that was not skipped, and all that are."""
        found = dict(skipped)
        for listed in self._steps.listings():
            found = dict(skipped)
            for step in listed:
                if step in skipped:
                    continue
                skip = None
                if self._steps.signature(step) is None:
                    skip = self._steps.skip(step)
                    # Another process may have completed it since.
                    if self._steps.signature(step) is None:
                        if skip is not None:
                            found[step] = skip
                        continue
                return json.dumps([step, list(found.items())]).encode()
        return json.dumps([None, list(found.items())]).encode()

    # ---- Which steps there are.

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return self._steps.complete()

    def latest(self) -> int | None:
        """The newest complete step, if there is one."""
        return self._steps.latest()

    def best(self) -> int | None:
        """The step with the best metric, as `best` said; None if none has it.

        Steps that are damaged have none. **Raises:** `OSError` for one that cannot be
        read now: it might be the best.
        """
        if self._best is None:
            raise ValueError('Pass `best=(metric, "min")` or "max" to the manager.')
        known = {}
        for step, (_, metrics, error) in self._steps.survey().items():
            if error is not None:
                raise error
            if metrics is not None:
                known[step] = metrics
        return self._best_of(known)

    def path(self, step: int) -> str | Store:
        """Where the checkpoint of a step is, or will be."""
        return self._steps.path(step)

    def _best_of(self, known: Mapping[int, dict[str, Any]]) -> int | None:
        if self._best is None:
            return None
        metric, way = self._best
        sign = 1 if way == "max" else -1
        values = {step: of.get(metric) for step, of in known.items()}
        ranked = [
            (sign * value, step)
            for step, value in values.items()
            if isinstance(value, int | float)
        ]
        return max(ranked)[1] if ranked else None

    # ---- Which steps stay.

    def pin(self, step: int) -> None:
        """Keeps a step until [`unpin`][]: it is not deleted.

        **Raises:** `FileNotFoundError` if there is no such step.
        """
        self.wait()
        self._first(f"Pinning step {step}", lambda: self._steps.pin(step))

    def unpin(self, step: int) -> None:
        """Undoes [`pin`][]."""
        self._first(f"Unpinning step {step}", lambda: self._steps.unpin(step))

    def delete(self, step: int) -> None:
        """Deletes a step, as [`delete`][].

        **Raises:** `ValueError` if it is pinned; and what `delete` raises.
        """
        self.wait()
        self._first(f"Deleting step {step}", lambda: self._steps.delete(step))

    def _follow_up(
        self, step: int, handle: SaveHandle, over: threading.Event, retain: bool
    ) -> None:
        """Deletes what need not stay, once a save is over."""
        try:
            if handle._saved.exception() is None:
                self._skipped.discard(step)
                self._base = handle
                if retain:
                    self._retain(step)
        except Exception as e:
            self._undeleted.append(f"{type(e).__name__}: {e}")
        finally:
            over.set()

    def _retain(self, new: int) -> None:
        if self._keep is None and not self._steps.cleans:
            return
        known, ours = {}, set()
        for step, found in self._steps.survey(self._keep is not None).items():
            signature, metrics, error = found
            if error is not None:
                # It is neither counted nor deleted, and may be the next time.
                self._undeleted.append(f"step {step} cannot be looked at: {error}")
            elif signature is None:
                if step < new:
                    self._steps.clean(step)
            # Nor are those that are damaged.
            elif metrics is not None and step not in self._skipped:
                known[step] = metrics
                if signature.is_ours:
                    ours.add(step)
        if self._keep is None:
            return
        # Who went back to an older step keeps what was just saved.
        stay = {new, *sorted(known)[-self._keep :], self._best_of(known)}
        if self._keep_every is not None:
            stay.update(step for step in known if step % self._keep_every == 0)
        for step in sorted(ours - stay - self._steps.pins()):
            try:
                self._steps.remove(step)
            except (OSError, ValueError) as e:
                self._undeleted.append(f"step {step}: {e}")

    # ---- Stopping, and other processes.

    def should_stop(self) -> bool:
        """Whether one of the `signals` has come, in any process of the run.

        All processes of a run have to call this at the same steps, and are told alike:
        it takes a message to process 0 and back.
        """
        if not self._is_stopping:
            team = self._team("stop", "Asking whether to stop")
            word = team.confer(lambda: b"1" if self._is_told else b"", b"".join)
            self._is_stopping = bool(word)
        return self._is_stopping

    def _on_signal(self, number: int, frame: Any) -> None:
        self._is_told = True
        before = self._handlers.get(number)
        # Python's own for Ctrl-C ends the run at once.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _team(self, kind: str, what: str, tag: Any = None) -> Team:
        root = self._steps.root
        timeout = self._options.get("timeout", _processes.TIMEOUT)
        return _processes.run(kind, root, tag, timeout, f"{what}, in `{root}`")

    def _first(self, what: str, act: Callable[[], Any]) -> None:
        """Process 0 acts; an error of it is one of all processes."""

        def answer(_: list[bytes]) -> bytes:
            act()
            return b""

        self._team(what, what).confer(lambda: b"", answer)


def _number(name: str, x: Any) -> int | float | str:
    try:
        if getattr(x, "size", None) == 1:
            x = x.item()
        number = x if type(x) is int else float(x)
        return number if math.isfinite(number) else str(number)
    except (TypeError, ValueError, OverflowError) as e:
        raise TypeError(
            f"The metric `{name}` is not a number, nor an array of one: {e}"
        ) from e


def _decoded(word: bytes) -> tuple[int | None, dict[int, Skip]]:
    step, skipped = json.loads(word)
    return step, {int(s): Skip(*skip) for s, skip in skipped}


def _reasons(skipped: dict[int, Skip]) -> str:
    lines = [f"step {s}: {skip.why}" for s, skip in sorted(skipped.items())]
    return "".join("\n  " + line.replace("\n", "\n    ") for line in lines)
