"""`async_tree_serialise_leaves`."""

import contextlib
import copy
import functools as ft
import os
import sys
from collections.abc import Callable, Set
from typing import Any, Unpack

from jaxtyping import PyTree

from .. import _rooms
from .._runtime import _arguments, _gc, _log, _threads
from .._runtime._processes import Processes
from .._runtime._settings import Setting
from .._storage import _open_files, _root
from .._tree import _host_copy, _leaf
from .._tree._filters import FilterSpec, IsLeaf
from .._tree._sharding import Shards
from . import (
    _background,
    _lazies,
    _options,
    _path_state,
    _payload,
    _plan,
    _reuse,
    _serialise,
)
from ._background import Committed, SaveHandle
from ._options import SaveKeywords, SaveOptions
from ._payload import PlannedLeaf
from ._plan import Plan


@_arguments.checked(_options.DEFAULTS)
def async_tree_serialise_leaves(
    path: str | os.PathLike[str],
    pytree: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    **options: Unpack[SaveKeywords],
) -> SaveHandle:
    """Saves the leaves of a pytree, as
    [`tree_serialise_leaves`][] does, but in the background.

    On CPU it copies all arrays and then returns. The copy is needed because a jax.Array
    may share its memory with a NumPy array or another framework, and nothing tells
    whether it does. After the call you may overwrite, donate and delete the arrays. On
    accelerators you may do so after [`SaveHandle.staged`][]. The checkpoints of lazy
    leaves have to stay until [`SaveHandle.result`][].

    The save is atomic: the checkpoint appears when it is complete, and until then
    `open` opens what was there before. Saves are written one after the other, in the
    order of the calls; a blocking save to the same path waits for them. Together they
    hold at most 2 GiB of copies, or those of one save: a call waits for earlier saves
    until there is room for its own.

    **No error is lost.** What is wrong with the tree or the path is raised here. A
    later error is raised by the handle. If you never ask the handle, the next save of
    the process, blocking or not, is not started. It raises the error once, as the cause
    of a `RuntimeError`. If there is no next save, the error is written to stderr at
    exit, and the exit status is 120.

    **The end of the process** waits for the saves that are under way, also after an
    exception or Ctrl-C in the main thread. A second Ctrl-C interrupts that wait: then
    the path holds what it held before, or all of the save if it was at its end. stderr
    and the exit status say that. In an `atexit` handler the save is done before this
    returns. A forked child has no part in the saves of its parent, which go on
    there: start processes with `spawn`.

    **Arguments:**

    - `path`, `pytree`, `filter_spec`, `is_leaf`, `options`: as in
        [`tree_serialise_leaves`][]. What the caller does to arrays on CPU and to
        `metadata` after this returns does not change the save. `max_bytes` does
        not count the copies described above. `functions` are exported before this
        returns. `reuse` is looked at when the saves before this one are over. What its
        handle knows of arrays helps only if that save is over when this is called.

    **Returns:** a [`SaveHandle`][].

    **Raises:** what [`tree_serialise_leaves`][] raises before it writes; and
    `RuntimeError` for the error of an earlier save.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, eqx_ckpt as ec
        >>> step = jax.jit(lambda x: x + 1, donate_argnums=0)
        >>> x = jnp.zeros(3)
        >>> handle = ec.async_tree_serialise_leaves("memory://later", {"x": x})
        >>> handle.staged()
        >>> x = step(x)
        >>> handle.result()
        >>> ec.open("memory://later")["x"].read().tolist()
        [0.0, 0.0, 0.0]

        ```
    """
    given = SaveOptions(filter_spec, is_leaf, **options)
    processes = _serialise.processes_of(path, pytree, given)
    with processes.share_errors():
        handle, start = stage_save(path, pytree, given, processes)
    start()
    return handle


@_gc.paused()
def stage_save(
    path: str | os.PathLike[str],
    tree: PyTree,
    options: SaveOptions,
    processes: Processes,
) -> tuple[SaveHandle, Callable[[], Any]]:
    """Stages a save that `processes` make together. From then on the tree may be
    changed; arrays on accelerators may once the handle is `staged`. Returns its handle,
    and a function that starts the save, `start_staged`: a thread then does
    `_background._work_on`, `write_quietly` and at last `_serialise.write`.

    Call this in a block of `processes.share_errors()`, and the function after it.

    **Raises:** what is wrong with the tree or the path.
    """
    with _log.timed("stage"):
        root = _root.resolve(path)
        _background.raise_unreported()
        planned = _plan.plan(root, tree, options)
        # Only to raise now what `_publish.begin` would raise later. In an object store
        # this look would cost requests.
        if not root.is_remote and processes.leads:
            if _open_files.is_archive(root):
                _rooms.check_file(root, options.overwrite)
            else:
                _path_state.examine(root, options.overwrite)
        reused = _reuse.find_reused(planned, processes)
        arrays = _reuse.SavedArrays(planned.leaves, planned.spec)
        unchanged = _reuse.hold_unchanged(reused, planned.leaves, planned.spec)
        copied = _copied(planned, unchanged)
        _background.make_room(copied)
        planned = stage(planned, unchanged)
    handle = SaveHandle(root, planned.spec.nbytes, copied)
    handle._arrays = arrays
    write = lambda: _serialise.write(planned, processes, reused, handle._count)
    return handle, ft.partial(start_staged, handle, planned, write, processes)


def start_staged(
    handle: SaveHandle,
    planned: Plan,
    write: Callable[[], Committed | None],
    processes: Processes,
) -> None:
    """Starts a thread that writes what was staged, once that has arrived: this
    process's part of what `processes` do together."""
    leaves, is_remote = planned.leaves, planned.root.is_remote

    def write_quietly() -> Committed | None:
        # In an object store it is TensorStore's threads that write.
        quietly = contextlib.nullcontext() if is_remote else _threads.quietly()
        try:
            with quietly, _interval.changed():
                return write()
        finally:
            # The handle may live on, without them.
            leaves.clear()

    waits = [x for x in leaves if type(x.value) is Shards]
    is_staged = all(_host_copy.is_staged(leaf.value) for leaf in waits)
    collect = None if is_staged else ft.partial(_collect, leaves)
    if planned.has_lazies:
        handle._reads = _lazies.places(leaves)
    _background.start(handle, collect, write_quietly, processes.tell_failed)


def _copied(planned: Plan, unchanged: Set[int]) -> int:
    """The bytes of the copies of leaves: of lazy ones there are none."""
    if not (unchanged or planned.has_lazies):
        return planned.spec.nbytes
    return sum(
        leaf.template.nbytes
        for leaf_index, leaf in enumerate(planned.leaves)
        if leaf.alias is None and leaf_index not in unchanged
        if not isinstance(leaf.value, _lazies.LazySource)
    )


def stage(planned: Plan, unchanged: Set[int]) -> Plan:
    """The plan of what the tree holds now, whatever becomes of it. Copies from devices
    are started, except of leaves that are `unchanged` since an earlier save."""
    leaves = planned.leaves
    # The bytes of an alias are those of another leaf.
    away = unchanged | {leaf_index for leaf_index, _ in planned.spec.aliases}
    with _payload.errors_of_casts(leaves, planned.spec):
        copies = _payload.copied_together(leaves, away)
        copies |= dict.fromkeys(away)
        values = [
            copies[leaf_index] if leaf_index in copies else _stage_value(leaf)
            for leaf_index, leaf in enumerate(leaves)
        ]
    names, _, *rest = zip(*leaves)
    leaves, options = _payload.leaves_of_columns(names, values, *rest), planned.options
    options = options._replace(metadata=copy.deepcopy(options.metadata))
    return planned._replace(leaves=leaves, options=options)


def _stage_value(leaf: PlannedLeaf) -> Any:
    leaf = leaf._replace(value=_host_copy.stage(leaf.value, leaf.template))
    # What can be done now is done: in the background, the work for each of many leaves
    # would wait for the main thread again and again.
    is_staged = _host_copy.is_staged(leaf.value)
    return _payload.prepare(leaf).value if is_staged else leaf.value


def _collect(leaves: list[PlannedLeaf]) -> None:
    """Waits for the copies from devices."""
    for leaf_index, leaf in enumerate(leaves):
        if not _host_copy.is_staged(leaf.value):
            leaves[leaf_index] = leaf._replace(value=_host_copy.collect(leaf.value))


# Seconds. Python's own are 0.005, and no program sets these.
_PROMPTLY = 97e-6

# Threads that compute in Python hand over the interpreter sooner. A save gives it up
# for each of some hundred calls to the system. To get it back, it would each time wait
# for a whole interval of a busy main thread.
_interval = Setting(
    get=sys.getswitchinterval,
    # Python cuts it to whole microseconds.
    put=lambda found: sys.setswitchinterval(found + 0.5e-6),
    change=lambda found: min(found, _PROMPTLY),
    is_changed=lambda now: round(now * 1e6) == round(_PROMPTLY * 1e6),
)
