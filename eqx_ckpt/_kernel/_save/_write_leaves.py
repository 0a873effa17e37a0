"""All files of a save but its index and those for other readers at its root, written to
whatever takes files: a directory, an object store, or a zip."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._format import _files, _layouts
from .._format._index import Index, OwnState
from .._limits import limits
from .._runtime._processes import Processes
from .._runtime._progress import Advance
from .._storage._backend import Backend
from .._storage._local import LocalDirectory, SavedFile
from .._storage._objects import ObjectStore
from . import _assign, _lazies, _notes, _plan, _reuse, _writing
from ._payload import LeafBytes
from ._plan import Plan
from ._sending import UploadQueue
from ._writing import Destination, RunsOfFiles, Sink, WriteTask


class RootFiles(NamedTuple):
    """The files that the transaction of a save publishes once all others are there: the
    index, and those for other readers at the root."""

    index: Index
    side: Mapping[str, bytes]


def destination(
    plan: Plan, work: Backend, data_key: str, held: contextlib.ExitStack
) -> Destination[Backend]:
    """Where this process writes, until the end of `held`."""
    outbox = sync_all = None
    if isinstance(work, ObjectStore):
        outbox = held.enter_context(UploadQueue(work, plan.max_bytes // 2).open())
    durable, spec = plan.options.durable, plan.spec
    # A packed layout has few files.
    if durable and plan.options.layout not in _layouts.PACKED:
        is_many = spec.chunk_count + len(spec.names) > limits.singly_synced_files
        if is_many and isinstance(work, LocalDirectory):
            sync_all = held.enter_context(work.synced_together())
    return Destination(work, data_key, durable and sync_all is None, sync_all, outbox)


def write_leaves(
    plan: Plan,
    into: Destination[Sink],
    advance: Advance,
    reused: _reuse.ReusedSave | None = None,
) -> RootFiles:
    """Writes all of a save but its `RootFiles`, by this process alone. Files of
    `reused` in which nothing has changed are linked instead."""
    task = prepare_task(plan, into, advance, reused=reused)
    files = _plan.WRITERS[plan.options.layout].write(task, into)
    states = [
        _notes.write_own_state(own, process, into)
        for process, own in enumerate(plan.options.own)
    ]
    return finish(plan, task, files, states, into, reused)


def prepare_task(
    plan: Plan,
    into: Destination[Sink],
    advance: Advance,
    processes: Processes = Processes(),
    reused: _reuse.ReusedSave | None = None,
) -> WriteTask:
    """Links files that are reused, reads small lazy leaves, and makes the task of this
    process of the rest."""
    linked = _writing.NOTHING
    if reused is not None:
        linked = _reuse.link_unchanged(reused, plan, into)
    leaves, max_bytes, requests = plan.leaves, plan.max_bytes, 1
    if plan.has_lazies:
        requests = _lazies.limit_reads(leaves, max_bytes)
        if processes.leads:
            skipped = {leaf_index for leaf_index, *_ in linked.digests}
            leaves = _lazies.read_small(leaves, skipped, max_bytes)
    data = LeafBytes(leaves, plan.spec, advance)
    is_sent = into.outbox is not None
    most = _writing.largest_sent(max_bytes) if is_sent else _assign.MAX_FILE
    return WriteTask(data, processes, max_bytes, most, linked, requests)


def finish(
    plan: Plan,
    task: WriteTask,
    files: RunsOfFiles,
    states: Sequence[OwnState],
    into: Destination[Sink],
    reused: _reuse.ReusedSave | None = None,
) -> RootFiles:
    """Writes what is left of a save: the digests, the database or Zarr's JSON, and
    functions. The data `files` and the own `states` of all processes are there. Returns
    its `RootFiles`."""
    written = _plan.WRITERS[plan.options.layout].finish(task, files, into)
    side = _plan.side_files(plan, into.save_id, written)
    index = _plan.index_of(plan, into.save_id, written, side, states)
    if plan.functions:
        links = {} if reused is None else _reuse.function_files(reused)
        _write_functions(plan, into, links)
    into.settle()
    return RootFiles(index, side)


def _write_functions(
    plan: Plan, into: Destination[Sink], links: Mapping[str, SavedFile]
) -> None:
    """Writes the files of functions. Those whose digests are among the `links` get a
    second name instead."""
    into.make_directory()
    for stored, data in plan.functions.values():
        key = f"{into.data_key}/{_files.function(stored.file)}"
        link = links.get(stored.digest)
        if link is not None and isinstance(into.work, LocalDirectory):
            if into.work.link_from(link, key, into.sync):
                continue
        into.write(key, [data])
