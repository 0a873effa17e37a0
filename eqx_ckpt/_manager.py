"""`CheckpointManager`: the checkpoints of a run, which to keep, and when to stop."""

import concurrent.futures as cf
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
from typing import Any

from jaxtyping import PyTree

from . import (
    _async,
    _checkpoint,
    _deserialise,
    _index,
    _steps,
    _team,
)
from ._errors import DamagedError, ReplacedError
from ._pending import SaveHandle
from ._remote import Store
from ._steps import Steps
from ._team import Team


_save_options = set(
    inspect.signature(_async.async_tree_serialise_leaves).parameters
) - {"path", "pytree", "metadata", "overwrite", "reuse", "tag"}

# Options with which a restore does not read, or not check, all of a step.
_in_part = {"filter_spec", "where", "source", "unexpected", "verify"}


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

    Use it as a context manager: at the end it waits for the last save, and raises what
    went wrong. In a run of many processes all of them make the same calls, and process
    0 decides and deletes.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> with ec.CheckpointManager("run", keep=2, every=10) as manager:
        ...     for step in range(1, 51):
        ...         state = {"x": jnp.full(2, step)}
        ...         _ = manager.save(step, state, {"loss": 1 / step})
        >>> manager.steps()
        [40, 50]
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
        before, and raises what went wrong with it.

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
        if not force and not self._may_be_due(step):
            return False
        if not isinstance(metadata, Mapping | None):
            raise TypeError(f"`metadata` must be a dict, not {metadata!r:.60}.")
        given = dict(metadata or {})
        if taken := sorted(given.keys() & {"step", "metrics"}):
            raise ValueError(
                f"`metadata` has the key `{taken[0]}`, which the manager sets itself."
            )
        team = self._team("save a step", f"Saving step {step}", step)
        how = team.confer(lambda: b"", lambda _: self._decide(step, force))
        if not how:
            return False
        self.wait()
        values = {name: _number(name, x) for name, x in (metrics or {}).items()}
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
            lambda handle: self._follow_up(step, handle, over, team.rank)
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

    def _decide(self, step: int, force: bool) -> bytes:
        if not force and not (self._every is not None and step % self._every == 0):
            seconds = self._every_seconds
            if seconds is not None and time.monotonic() - self._last < seconds:
                return b""
        self.wait()
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
        try:
            if error is None:
                self.wait()
            elif self._saving is not None:
                # An error of the save does not hide this one: it is told at the end.
                handle, over = self._saving
                cf.wait([handle._saved])
                over.wait()
        finally:
            self._forget_signals()

    def _forget_signals(self) -> None:
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before or signal.SIG_DFL)

    # ---- Restoring.

    def restore(
        self, like: PyTree, step: int | None = None, **options: Any
    ) -> tuple[PyTree, int]:
        """Loads a step: by default the newest that is complete and undamaged.

        **Arguments:**

        - `like`: as in [`tree_deserialise_leaves`][], and so are the `options`.
        - `step`: the step. Without it, newer steps that are incomplete or damaged are
            skipped, with one warning that says which and why. A tree that does not fit
            is an error, and never skipped.

        **Returns:** the tree, and the step it is of.

        **Raises:** `FileNotFoundError` if there is no step to load; and what
        `tree_deserialise_leaves` raises.
        """
        self.wait()
        if step is not None:
            step = _steps.check(step)
            load = _deserialise.tree_deserialise_leaves
            return load(self.path(step), like, **options), step
        skipped: dict[int, str] = {}
        while True:
            team = self._team("restore", "Restoring")
            word = team.confer(lambda: b"", lambda _: self._newest(skipped))
            # What process 0 has skipped, the others have to know.
            step, skipped = _decoded(word)
            if step is None:
                break
            loaded = team.round("loaded")
            try:
                with loaded.alive():
                    tree, why, error = self._load(step, like, options), None, None
            except Exception as e:
                # One that another process deletes at this moment is skipped too.
                is_lost = isinstance(e, (DamagedError, ReplacedError))
                tree, why, error = None, str(e) if is_lost else None, e
            why = self._agree(loaded, error, why)
            if not why:
                self._skipped.update(skipped)
                if not _in_part & options.keys():
                    self._base = self.path(step)
                if skipped and team.rank == 0:
                    warnings.warn(
                        f"Restored step {step} of `{self._steps.root}`, as newer ones "
                        f"cannot be:{_reasons(skipped)}",
                        stacklevel=2,
                    )
                return tree, step
            skipped[step] = why
        text = _reasons(skipped) if skipped else " there is none."
        raise FileNotFoundError(
            f"There is no step to restore in `{self._steps.root}`:{text}"
        )

    def _load(self, step: int, like: PyTree, options: dict[str, Any]) -> PyTree:
        try:
            ckpt = _checkpoint.open(self.path(step))
        except (FileNotFoundError, ValueError) as e:
            if isinstance(e, _index.Newer):
                raise
            raise DamagedError(str(e)) from e
        return _deserialise.tree_deserialise_leaves(ckpt, like, **options)

    def _agree(self, team: Team, error: Exception | None, why: str | None) -> str:
        """Why all processes skip the step; "" if all have it.

        **Raises:** what is no damage, in all of them.
        """

        def answer(words: list[bytes]) -> bytes:
            states = [json.loads(word) for word in words]
            damage = [why for _, why in states if why is not None]
            failed = next((e for e, _ in states if e is not None), None)
            return json.dumps([failed, damage[0] if damage else None]).encode()

        text = None if error is None else str(error)
        word = team.confer(lambda: json.dumps([text, why]).encode(), answer)
        failed, damage = json.loads(word)
        if damage is not None:
            return damage
        if error is not None:
            raise error
        if failed is not None:
            raise RuntimeError(f"{team.what}: another process has failed: {failed}")
        return ""

    def _newest(self, skipped: dict[int, str]) -> bytes:
        """The newest complete step that was not skipped, and all that are."""
        found = dict(skipped)
        for step in sorted(self._steps.directories(), reverse=True):
            if step in skipped:
                continue
            if self._steps.signature(step) is not None:
                return json.dumps([step, list(found.items())]).encode()
            if self._steps.may_be_ours(step):
                found[step] = "its save was not completed"
        return json.dumps([None, list(found.items())]).encode()

    # ---- Which steps there are.

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return self._steps.complete()

    def latest(self) -> int | None:
        """The newest complete step, if there is one."""
        return max(self._steps.complete(), default=None)

    def best(self) -> int | None:
        """The step with the best metric, as `best` said; None if none has it."""
        if self._best is None:
            raise ValueError('Pass `best=(metric, "min")` or "max" to the manager.')
        return self._best_of(self._steps.metrics(self._steps.signatures()))

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
        self, step: int, handle: SaveHandle, over: threading.Event, rank: int
    ) -> None:
        """Deletes what need not stay, once a save is over."""
        try:
            if handle._saved.exception() is None:
                self._skipped.discard(step)
                self._base = handle
                if rank == 0:
                    self._retain(step)
        except Exception as e:
            self._undeleted.append(f"{type(e).__name__}: {e}")
        finally:
            over.set()

    def _retain(self, new: int) -> None:
        found = self._steps.signatures() if self._keep or self._steps.cleans else {}
        for step, signature in found.items():
            if step < new and signature is None:
                self._steps.clean(step)
        if self._keep is None:
            return
        # Those that are damaged are neither counted nor deleted.
        known = self._steps.metrics(
            {step: found[step] for step in found.keys() - self._skipped}
        )
        # Who went back to an older step keeps what was just saved.
        stay = {new, *sorted(known)[-self._keep :], self._best_of(known)}
        if self._keep_every is not None:
            stay.update(step for step in known if step % self._keep_every == 0)
        for step in sorted(known.keys() - stay - self._steps.pins()):
            if self._steps.is_linked(step):
                continue
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
        timeout = self._options.get("timeout", _team.TIMEOUT)
        return _team.run(kind, root, tag, timeout, f"{what}, in `{root}`")

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


def _decoded(word: bytes) -> tuple[int | None, dict[int, str]]:
    step, skipped = json.loads(word)
    return step, {int(s): why for s, why in skipped}


def _reasons(skipped: dict[int, str]) -> str:
    lines = [f"\n  step {s}: {why}" for s, why in sorted(skipped.items())]
    return "".join(lines)
