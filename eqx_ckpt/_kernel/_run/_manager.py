"""`CheckpointManager`: the checkpoints of a run, which to keep, and when to stop."""

import os
import signal
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, overload, SupportsIndex, TYPE_CHECKING, Unpack

from jaxtyping import PyTree

from .. import _rooms
from .._load import _load_options
from .._load._checkpoint import Checkpoint
from .._load._load_options import FilteredKeywords
from .._runtime import _arguments, _cleanup, _elsewhere, _handlers
from .._runtime._arguments import Rule
from .._save import _options
from .._save._options import Functions, RunKeywords, SaveOptions
from .._tree import _leaf
from . import _best, _pins, _records, _removal, _restore, _steps
from ._near_interface import LoadRequest, NearSteps
from ._pending import PendingState
from ._policy import Policy
from ._saves import Saves
from ._signals import Signals
from ._step import Step
from ._steps import Steps


_COUNT = _arguments.optional(_arguments.integer(1))
_RULES = {
    "keep": _COUNT,
    "keep_every": _COUNT,
    "keep_nearest": _COUNT,
    "keep_seconds": _arguments.optional(_arguments.SECONDS),
    "best": _records.BEST,
    "keep_best": _COUNT,
    "keep_if": _arguments.optional(Rule("a function of a step", callable)),
    "every": _COUNT,
    "every_seconds": _arguments.optional(_arguments.SECONDS),
    "signals": Rule(
        "a list of signals, such as `[signal.SIGTERM]`",
        lambda x: isinstance(x, Collection) and not isinstance(x, str),
        lambda x: {*x} <= signal.valid_signals(),
    ),
    "reuse": _arguments.FLAG,
    "near_every": _COUNT,
    "copies": _arguments.optional(_arguments.integer(0)),
}
_MAPPING = Rule("a dict", lambda x: isinstance(x, Mapping | None))


class CheckpointManager:
    """The checkpoints of a run, one for each step that is saved.

    A step is an ordinary checkpoint at `<root>/<step>/default`. All other calls take it
    too. With `orbax=True` the `CheckpointManager` of Orbax reads it.

    **Arguments:**

    - `root`: the directory of the run, or a URL, as in [`open`][]. In an object store
        nothing tells whether a save still goes on. So what killed saves have left there
        is deleted only when the run saves the same step again, or by [`clean`][].

    When a step is saved:

    - `every`, `every_seconds`: [`save`][] saves a step if it is a multiple of `every`,
        or if so many seconds have passed since the last save. Without either, it saves
        at each call.

    Which steps stay:

    - `keep`: how many of the newest steps to keep; by default all. An older step is
        deleted once a newer one would survive a power cut. A run that goes back, or
        begins anew, begins an attempt, and this counts within that: see
        docs/resuming.md.
    - `keep_every`: steps that are multiples of this are kept too.
    - `keep_nearest`: the step nearest to each multiple of this is kept too, for runs
        whose steps are saved by the clock.
    - `keep_seconds`: steps that were saved at most so many seconds before the new one
        are kept too.
    - `best`, `keep_best`: `(metric, "min")` or `(metric, "max")`: the best step is kept
        too, or so many of the best.
    - `keep_if`: a rule of your own: a function that is given a [`Step`][] that no other
        rule keeps, and returns whether to keep it. Process 0 calls it after each save,
        in another thread. If it raises an error, the step is kept, with a warning.

    When the run ends:

    - `signals`: signals that tell the run to stop, such as `[signal.SIGTERM]`; in the
        main thread only. Handlers that were there are called too.

    How a step is saved:

    - `reuse`: whether data that have not changed since the step before, such as a
        frozen base, are linked instead of written again. It is the `reuse` of a save,
        on local file systems only. Such data are first written once more, apart from
        what changes. From then on, a jax.Array on an accelerator that is the very same
        object as in the step before is not even looked at. So pass False if another
        framework writes to the memory of such arrays, by DLPack.
    - `options`: for every save: `filter_spec`, `is_leaf`, `where`, `dtype`, `layout`,
        `chunks`, `compression`, `durable`, `orbax`, `max_bytes`, `progress`, `base` and
        `processes` (a [`Together`][] with a `timeout`), as in
        [`async_tree_serialise_leaves`][].

    Steps on the disks of nodes:

    - `near`: a directory on this node's own disk, for near steps: multiples of
        `near_every`. Each process saves its own part there, and sends `copies` of it to
        the disks of others. So a run that loses a node goes on from its newest near
        step. A near step is whole before the next is begun: of the steps for which
        `save` has returned, fewer than `2 * near_every` are lost. docs/processes.md has
        more.

    Several threads may use one manager: `save` is called by one after the other.

    Use it as a context manager. At the end of the `with` it saves the last state that
    you gave to [`save`][], if that was not due; it waits; and it raises what went
    wrong. So a run ends with its last state saved, whatever ends it: its last step, a
    `break`, one of the `signals`, or an exception. Without a `with` that state is lost,
    and a warning and a line of the log say so.

    After an exception there are two cases in which the last state is not saved: its
    arrays have been donated meanwhile, or this is one of many processes. The newest
    state is then that of the last save, and the exception has a note that says so. A
    step that is saved because of an exception
    causes no older step to be deleted.

    In a run of many processes all of them make the same calls, and process 0 decides
    and deletes. No symbolic link below the root is followed. Complete steps that the
    `CheckpointManager` of Orbax has saved there are steps too, and are never deleted.

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

    @_arguments.checked(_options.DEFAULTS, **_RULES)
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_nearest: int | None = None,
        keep_seconds: int | float | None = None,
        best: tuple[str, str] | None = None,
        keep_best: int | None = None,
        keep_if: Callable[[Step], Any] | None = None,
        every: int | None = None,
        every_seconds: int | float | None = None,
        signals: Iterable[int] = (),
        reuse: bool = True,
        near: str | os.PathLike[str] | None = None,
        near_every: int | None = None,
        copies: int | None = None,
        **options: Unpack[RunKeywords],
    ):
        self._steps = Steps(root)
        self._policy = Policy(
            keep=keep,
            keep_every=keep_every,
            keep_nearest=keep_nearest,
            keep_seconds=keep_seconds,
            best=best,
            keep_best=keep_best,
            keep_if=keep_if,
            every=every,
            every_seconds=every_seconds,
            reuse=reuse,
        )
        of_saves = SaveOptions(**options)
        self._policy.check_options(of_saves)
        _leaf.check_cast(of_saves.dtype)
        of_saves = of_saves._replace(base=_options.base_facts(of_saves.base))
        self._saves = Saves(self._steps, self._policy, of_saves)
        # It saves nothing, unless the room of near disks gives another.
        self._near = NearSteps(self._saves)
        if (near, near_every, copies) != (None, None, None):
            self._near = _rooms.near_steps(self._saves, near, near_every, copies)
        self._signals = Signals(signals)
        weakref.finalize(self, self._saves.warn_if_unsaved)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _elsewhere.unknown_attribute(self, "CheckpointManager", name)

    def __repr__(self) -> str:
        return f"CheckpointManager({self._steps.root.url!r})"

    def _repr_html_(self) -> str:
        return _rooms.html(self)

    @_arguments.checked(metrics=_MAPPING, metadata=_MAPPING, force=_arguments.FLAG)
    def save(
        self,
        step: SupportsIndex,
        tree: PyTree,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        functions: Functions = None,
        own: PyTree = None,
    ) -> bool:
        """Saves a step in the background, if it is due.

        It returns once you may donate or overwrite the arrays. One save goes on at a
        time: this waits for the one before, and raises what went wrong with it.

        A state that is not due is kept until the next call, for the end of the `with`.
        That copies its NumPy arrays, calls `to_leaf` of [`register_leaf`][] for values
        of registered types, and copies nothing else. So do not write to memory that a
        jax.Array in it shares.

        **Arguments:**

        - `step`: the number of the step, not negative.
        - `tree`: what to save.
        - `metrics`: numbers, or arrays of one number. They become part of the metadata;
            those that are not finite become strings. They are computed only for steps
            that are saved; of many processes those of process 0 count. Until a step has
            the metric of `best`, metrics without it draw a warning, and no step is
            deleted.
        - `metadata`: a dict, as in a save. `step` and `metrics` are put into it.
        - `force`: whether to save now, due or not, and to replace the step if it is
            there.
        - `functions`: as in a save.
        - `own`: a state that each process of a run has for itself, such as that of its
            data loader: a small tree on the host, in which str and bytes are stored
            too. All processes give one, or none does. It is part of the step, and
            comes back by `own=` of [`restore`][].

        **Returns:** whether it saves to the root.

        **Raises:** `FileExistsError` if the step exists, without `force`, and if it is
        pinned; `ValueError` for a run that has only steps of Orbax that are not read;
        and what `async_tree_serialise_leaves` raises.
        """
        step = _steps.check_step(step)
        given = metrics or {}
        state = PendingState(step, tree, given, metadata, force, functions, own)
        # If the handler of a signal saves during this call, `last_begun` is another
        # save afterwards, and a state that it has saved is not kept again.
        begun = self._saves.last_begun
        try:
            self._near.save_if_due(state)
        except Exception:
            # The save at the root may go well all the same.
            self._saves.save_if_due(state, begun)
            raise
        return self._saves.save_if_due(state, begun)

    @_handlers.pass_through
    def wait(self) -> None:
        """Waits until the save that goes on is done, and older steps are deleted; and
        until the near step that is being saved is whole.

        **Raises:** what went wrong with the save. A warning says what was not deleted.
        """
        try:
            self._near.wait()
        finally:
            self._saves.wait()

    def __enter__(self) -> "CheckpointManager":
        return self

    @_handlers.pass_through
    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._saves.is_forked:
            return
        try:
            with _cleanup.surely(self._signals.forget):
                if error is None:
                    try:
                        self._near.wait()
                    finally:
                        self._saves.end()
                else:
                    self._saves.end_after(error)
                    self._near.end_after(error)
        finally:
            # Again, as Ctrl-C may come before the first step of `surely`.
            self._signals.forget()

    @overload
    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        *,
        own: None = None,
        **options: Unpack[FilteredKeywords],
    ) -> tuple[PyTree, int]: ...

    @overload
    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        *,
        own: PyTree,
        **options: Unpack[FilteredKeywords],
    ) -> tuple[PyTree, PyTree, int]: ...

    @_arguments.checked(_load_options.DEFAULTS)
    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        *,
        own: object = None,
        **options: Unpack[FilteredKeywords],
    ) -> tuple[Any, ...]:
        """Loads a step: by default the newest that is complete and undamaged, of the
        newest attempt; near steps are among them. A state that `save` keeps for the end
        of the run stays kept.

        **Arguments:**

        - `like`, `options`: as in [`tree_deserialise_leaves`][].
        - `step`: a step at the root, the same in all processes, unless each loads alone
            with `processes="own"`. Without it, newer steps that are incomplete or
            damaged are skipped, and one warning says which and why. There is no warning
            for a step that another process is saving, if that holds its lock. A tree
            that does not fit is an error, and its step is not skipped. The same holds
            for a step that cannot be read now because the disk or the store fails:
            nothing says that it is damaged.
        - `own`: a tree like this process's own state, as [`save`][] was given it; or
            `"all"`, for the list of the states of all processes that saved the step, as
            plain containers. A state belongs to the process with the same number. So if
            there are now more or fewer processes, anything but `"all"` is an error.

        **Returns:** the tree, and its step; with `own`, the tree, this process's own
        state or the list of all of them, and the step.

        **Raises:** `FileNotFoundError` if no step was ever completed;
        [`DamagedError`][] if there are steps, and none is whole; and what
        `tree_deserialise_leaves` raises.
        """
        self.wait()
        request = LoadRequest(like, own, options)
        found = _restore.restore(self._saves, self._near, step, request)
        return (found.tree, found.step) if own is None else tuple(found)

    # ---- Which steps there are.

    @_handlers.pass_through
    def steps(self) -> list[int]:
        """The complete steps at the root, in order.

        In a run of many processes each looks for itself, and a network's file system
        may show older ones to one of them: where they branch, let them ask `latest`.
        """
        return self._steps.complete()

    @_handlers.pass_through
    def latest(self) -> int | None:
        """The newest complete step of the newest attempt, if there is one; near steps
        count. In a run of many processes all have to ask, and all get the same answer.

        **Raises:** `ValueError` if there are only steps of Orbax that are not read.
        """
        return self._near.latest()

    @overload
    def best(self, n: None = None) -> int | None: ...

    @overload
    def best(self, n: int) -> list[int]: ...

    @_arguments.checked(n=_COUNT)
    def best(self, n: int | None = None) -> int | list[int] | None:
        """The step of the newest attempt with the best metric, as `best=` says; None
        if no step has metrics. With `n` a list of so many, the best first, or of fewer
        if there are no more.

        Damaged steps count as without it. In a run of many processes each looks for
        itself, as `steps` does. **Raises:** `OSError` for a step that cannot be read
        now; `ValueError` if steps have metrics, and none has this one.
        """
        found = _best.best_steps(self._steps, self._policy, 1 if n is None else n)
        return found if n is not None else next(iter(found), None)

    @_arguments.checked(metrics=_MAPPING)
    def add_metrics(
        self, step: SupportsIndex | Checkpoint, metrics: Mapping[str, Any]
    ) -> None:
        """Adds metrics to a step that is saved, as [`add_metrics`][] does."""
        _records.add_to(self._steps, step, metrics)

    @_handlers.pass_through
    def history(self) -> list[Step]:
        """Every step that the run has ever saved, with its metrics, as [`history`][]
        gives it: those that are deleted too."""
        return _records.steps_of(self._steps)

    @_handlers.pass_through
    def path(self, step: SupportsIndex) -> str | os.PathLike[str]:
        """Where the checkpoint of a step is, or will be."""
        return self._steps.path(step)

    @_handlers.pass_through
    def plot(self, ax: Any = None) -> Any:
        """Draws the metrics of all steps that were saved, also of deleted ones, with
        matplotlib (`eqx_ckpt[plot]`). Steps that an earlier attempt left are not drawn.

        **Arguments:**

        - `ax`: the axes to draw into; by default, the current ones.

        **Returns:** the axes.
        """
        return _rooms.plot(self, ax)

    @_handlers.pass_through
    def pin(self, step: SupportsIndex) -> None:
        """Keeps a step until [`unpin`][]: it is not deleted, and no manager replaces
        it. A save to its own path does.

        **Raises:** `FileNotFoundError` if there is no such step.
        """
        self.wait()
        self._saves.run_processes.do_in_process_0(
            f"Pinning step {step}", lambda: _pins.pin(self._steps, step)
        )

    @_handlers.pass_through
    def unpin(self, step: SupportsIndex) -> None:
        """Undoes [`pin`][]."""
        self._saves.run_processes.do_in_process_0(
            f"Unpinning step {step}", lambda: _pins.unpin(self._steps, step)
        )

    @_handlers.pass_through
    def delete(self, step: SupportsIndex) -> None:
        """Deletes a step, as [`delete`][] deletes a checkpoint.

        **Raises:** `ValueError` if it is pinned; and what `delete` raises.
        """
        self.wait()
        self._saves.run_processes.do_in_process_0(
            f"Deleting step {step}", lambda: _removal.delete_step(self._steps, step)
        )

    @_handlers.pass_through
    def should_stop(self) -> bool:
        """Whether one of the `signals` has come, in any process of the run.

        All processes of a run have to call this at the same steps, and all get the same
        answer. A call takes a message to process 0 and back. If SIGTERM is the only
        signal, and JAX's preemption service is on, it takes none: that service looks
        for the signal once a second.
        """
        return self._signals.have_come(self._saves.run_processes.any_was_told)


def steps_of(manager: CheckpointManager) -> Steps:
    """The steps of a run, and its directory, which rooms ask instead of its manager."""
    return manager._steps
