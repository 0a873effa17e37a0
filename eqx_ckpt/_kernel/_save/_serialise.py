"""`tree_serialise_leaves`: plans a save, writes its data files, and publishes it.

`_plan` checks the tree and says what is written. `_publish.begin` opens a transaction.
`_write_leaves` writes all files but the index and those for other readers at the root,
into the directory of the transaction. `_publish.publish` adds these, and commits: from
then on the path holds the save.
"""

import contextlib
import functools as ft
import json
import os
from typing import Any, Unpack

from jaxtyping import PyTree

from .. import _rooms
from .._format import _text
from .._runtime import _arguments, _gc, _log, _processes, _progress
from .._runtime._processes import Processes
from .._runtime._progress import Advance, Count
from .._storage import _open_files, _root
from .._storage._open_files import Writable
from .._tree import _leaf
from .._tree._filters import FilterSpec, IsLeaf
from . import (
    _agree,
    _background,
    _lazies,
    _notes,
    _options,
    _payload,
    _plan,
    _publish,
    _reuse,
    _write_leaves,
)
from ._background import Committed
from ._options import SaveKeywords, SaveOptions
from ._plan import Plan
from ._transaction import CheckpointTransaction, errors_before_commit


@_arguments.checked(_options.DEFAULTS)
@_gc.paused()
def tree_serialise_leaves(
    path: str | os.PathLike[str] | Writable,
    pytree: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    **options: Unpack[SaveKeywords],
) -> None:
    """Saves the leaves of a pytree, each under the dotted name of its key path.

    Saves are atomic: a reader sees the old checkpoint or the complete new one. If
    anything fails, the old one stays.

    **Arguments:**

    - `path`: where to save: a string or `os.PathLike`, relative or absolute, `~`
        expanded, or a URL (`s3://`, `gs://`, `az://`, `memory://`), or a [`Store`][].
        A directory is made; or one file, a zip that is not compressed, if the path ends
        in `.zip`. If it is a file open for writing in binary, that gets such a zip.
    - `pytree`: the tree. It is never copied as a whole. Lazy leaves ([`LazyArray`][])
        are read and verified as they are written. The checkpoint that they are of has
        to stay until the save is over; it may be at `path` itself.
    - `filter_spec`: which leaves to store, as in `eqx.filter`: a pytree prefix of bools
        and of functions `leaf -> bool`. By default [`is_storable`][].
    - `is_leaf`: called on every node; if true, that node is treated as a leaf.
    - `where`: a function from the tree to the nodes to store; all of it by default.
    - `dtype`: a floating dtype to cast floating arrays to as they are written. A number
        that does not fit is a `ValueError`, which names all leaves that have some.
    - `metadata`: anything that JSON gives back exactly, such as hyperparameters.
    - `layout`: `"ocdbt"`, a few files however many leaves; or `"zarr"`, a Zarr v3 array
        of its own for each leaf, in a directory of its name.
    - `chunks`: the size of chunks in bytes; or a function
        `(name, shape, dtype) -> chunk shape or None`. By default 4 MiB, and 32 MiB with
        `layout="zarr"`. Arrays are cut along their first axes.
    - `compression`: None, or `"lz4"` or `"zstd"` for leaves of more than 64 KiB. Both
        are Blosc with shuffled bits or bytes. `"lz4"` is faster, and `"zstd"` makes
        weights smaller: docs/benchmarks.md has figures. To compress a checkpoint that
        is stored in another way, use [`convert`][], or save its lazy leaves.
    - `overwrite`: whether a checkpoint at `path` may be replaced. Anything else that is
        there is never touched.
    - `durable`: whether to return only once the checkpoint would survive a power cut. A
        save of more than 256 files (`layout="zarr"`) syncs its whole file system, if
        that is possible, and waits for what other programs have written there too.
    - `max_bytes`: how much host memory the call may take beyond the tree: by default
        1 GiB, or a quarter of what this process may have, as in a container, if that is
        less; but at least a few chunks. On CPU the arrays of JAX are written from where
        they are; what is copied (NumPy's, which may change; for `dtype`, other orders
        of memory, `compression`, and from accelerators) is copied chunk by chunk.
    - `progress`: whether to show a progress bar. This needs `eqx_ckpt[progress]`.
    - `reuse`: the path of another checkpoint in the same local file system, such as of
        the step before; or the [`SaveHandle`][] of the save that has written it. Its
        data files in which nothing has changed get a second name (a hard link), and are
        not written again. If they are less than a 64th of the save, they are. Each of
        the two checkpoints is whole without the other; a file that is damaged on disk
        is damaged in both. This needs `layout="ocdbt"`. If it cannot be done, as with
        many processes, all is written. Digests tell what has changed, so all of the
        tree is read, except for lazy leaves of that checkpoint, whatever their names
        are now. With a handle, a jax.Array on an accelerator that is the very same
        object as in that save is taken as unchanged, and neither read nor copied.
        (Leave `reuse` out if another framework writes to the memory of such arrays, by
        DLPack.)
    - `functions`: a dict of names to functions of the tree, each made by
        [`function`][], that are stored with it, and run without its classes:
        docs/portable.md. You can also give those in the `functions` of a checkpoint.
        By default, lazy leaves bring the functions of their checkpoint along. That is
        an error if leaves that these need are not saved; `"drop"` leaves them out.
    - `base`: the checkpoint that this one is worth nothing without, such as the model
        of an adapter: a path, an open [`Checkpoint`][], or the `base` of one. The index
        records its path as given, its save id and its digest. Later,
        [`Checkpoint.check_base`][] tells whether another path has it. A query and a
        password in a URL are left out. A base that was opened from a file object has no
        path, and is an error; so is a file of another format without any value.
    - `orbax`: whether to write the few files, too, with which Orbax restores the
        checkpoint, and TensorStore finds all of it in one database at `path`. They are
        there when the save is, and an overwrite without `orbax` leaves none of them.
        With them the new directory takes the place of the old one; in a store the path
        must be empty.
    - `processes`: `"own"` for a save that this process of many makes alone, at a path
        of its own: no other takes part, or is waited for. If an array is spread over
        processes, the parts on this process's devices are stored; docs/processes.md
        says who can load them. By default `"all"`, or a [`Together`][], which also says
        how long they wait for each other.

    In a run of many processes (`jax.distributed`) all of them make the call, with the
    same `path`, in one place that they share. Each writes shards that it has, and a
    shard that several have is written once. NumPy arrays, scalars, and arrays on a
    process's own devices have to be the same everywhere: those of process 0 are saved.
    If anything fails in one process, nothing is saved, and it is an error in all.

    **Returns:** None.

    **Raises:** before anything is written, `ValueError` or `TypeError` that names the
    leaf for what cannot be stored: tracers, deleted arrays, abstract leaves, object
    dtypes, more than 32 axes, two leaves with one name. They are raised too for
    `metadata` that JSON would change, and for a selection of nothing.
    `FileExistsError` if what is at `path` is not a checkpoint, or with
    `overwrite=False`. `RuntimeError` if another writer
    replaced the checkpoint meanwhile, or for the error of an earlier
    [`async_tree_serialise_leaves`][].

    !!! example

        ```python
        >>> import equinox as eqx, jax.random as jr, eqx_ckpt as ec
        >>> model = eqx.nn.MLP(2, 2, 8, 1, key=jr.key(0))
        >>> ec.tree_serialise_leaves("memory://save", model, metadata={"width": 8})
        >>> ec.open("memory://save").metadata
        {'width': 8}

        ```
    """
    save(path, pytree, SaveOptions(filter_spec, is_leaf, **options))


def save(path: Any, pytree: PyTree, options: SaveOptions) -> None:
    """Does what `tree_serialise_leaves` does, with options that are checked."""
    processes = processes_of(path, pytree, options)
    with processes.share_errors():
        root: Any = path
        if not _open_files.is_file(path):
            root = _root.resolve(path)
            _background.wait_for(root)
        _background.raise_unreported()
        planned = _plan.plan(root, pytree, options)
        reused = None
        if options.reuse is not None:
            reused = _reuse.find_reused(planned, processes)
    write(planned, processes, reused)


def processes_of(path: object, tree: PyTree, options: SaveOptions) -> Processes:
    """The processes that save a tree together."""
    if options.processes == "own" or _processes.count() == 1:
        return Processes()
    together = _arguments.together(options.processes)
    what = f"Saving to `{path}`{_processes.tagged(together.tag)}"
    gist = ft.partial(_agree.gist, tree, options.metadata)
    return _processes.of_run("save", _root.place(path), together, what, gist)


def write(
    plan: Plan,
    processes: Processes,
    reused: _reuse.ReusedSave | None = None,
    count: Count | None = None,
) -> Committed:
    """Writes the data files of a planned save, and publishes it. Around that it shows
    the progress bar and logs the time. Of many processes, process 0 publishes. The
    bytes that are written are added to the `count`.

    Returns what was committed.
    """
    count = count or Count()
    spec, options = plan.spec, plan.options
    with _log.timed("save") as timer, contextlib.ExitStack() as held:
        if plan.has_lazies:
            held.enter_context(_background.reading(_lazies.places(plan.leaves)))
            held.enter_context(_lazies.keeping(plan.leaves))
        if options.progress:
            bar = _progress.bar("save", spec.nbytes, sum(spec.counts), True)
            count.bar = held.enter_context(bar)
        committed, is_one_file = Committed(), _open_files.is_archive(plan.root)
        if is_one_file and processes.count > 1:
            raise ValueError("Several processes cannot write one file: save to a path.")
        with processes.share_errors(), _payload.errors_of_casts(plan.leaves, spec):
            if is_one_file:
                _rooms.save_file(plan, count.advance)
            elif processes.count > 1:
                committed = _save_together(plan, processes, count.advance, held)
            else:
                committed = _save_alone(plan, reused, count.advance, held)
    if _log.is_on(_log.INFO):
        metadata = options.metadata
        step = metadata.get("step") if isinstance(metadata, dict) else None
        what = f"step {step}, " if isinstance(step, int) else ""
        _log.say(
            _log.INFO,
            f"Saved {what}`{plan.root}`: {_text.rate(spec.nbytes, timer.seconds)}",
            path=str(plan.root),
            step=step,
            nbytes=spec.nbytes,
            seconds=timer.seconds,
        )
    return committed


def _save_alone(
    plan: Plan,
    reused: _reuse.ReusedSave | None,
    advance: Advance,
    held: contextlib.ExitStack,
) -> Committed:
    """Writes and publishes a save by this process alone. In a file system, a lock on
    the directory of the save tells others that its writer lives, until `held` ends."""
    with errors_before_commit(plan.root, plan.spec.nbytes):
        txn = _publish.begin(plan.root, plan.options, held)
        into = _write_leaves.destination(plan, txn.work, txn.data_key, held)
        root_files = _write_leaves.write_leaves(plan, into, advance, reused)
    _publish.publish(txn, root_files, plan.options.durable)
    return Committed(txn.save_id, txn.stamp)


def _save_together(
    plan: Plan, processes: Processes, advance: Advance, held: contextlib.ExitStack
) -> Committed:
    """Saves as `_save_alone` does, by many processes. Each writes its own part of the
    leaves. Process 0 holds the transaction, collects notes on all parts, and
    publishes."""
    root, options, nbytes = plan.root, plan.options, plan.spec.nbytes
    writer = _plan.WRITERS[options.layout]
    txn: CheckpointTransaction | None = None

    def begin(plans: list[bytes]) -> bytes:
        nonlocal txn
        if len(set(plans)) > 1:
            return b""
        with errors_before_commit(root, nbytes):
            begun = txn = _publish.begin(root, options, held)
            begun.work.make_directories([begun.data_key])
        return _publish.announce(begun)

    digest = _agree.digest_of_plan(plan)
    location = processes.round(digest, begin, is_account=True)
    if not location:
        _agree.raise_disagreement(plan, processes)
    work, data_key = _publish.await_location(root, location, processes)
    into = _write_leaves.destination(plan, work, data_key, held)
    task = _write_leaves.prepare_task(plan, into, advance, processes)
    with errors_before_commit(root, nbytes):
        files = writer.write(task, into)
        into.settle()
        note = "" if processes.leads else _notes.leave_note(task, files, into)
        state = None
        if options.own:
            (own,) = options.own
            state = _notes.write_own_state(own, processes.index, into)

    def publish(reports: list[bytes]) -> bytes:
        assert txn is not None
        with errors_before_commit(root, nbytes):
            found = _notes.collect_notes(task, writer, files, reports, into)
            root_files = _write_leaves.finish(plan, task, *found, into)
        _publish.publish(txn, root_files, options.durable)
        return b""

    processes.round(json.dumps([note, state]).encode(), publish)
    stamp = "" if txn is None else txn.stamp
    return Committed(into.save_id, stamp)
