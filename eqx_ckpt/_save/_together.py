"""A save that many processes make together: each writes its own part of the leaves, as
one that saves alone does. Process 0 holds the transaction, collects the notes on all
parts, and publishes.
"""

import contextlib
import json

from .._runtime._processes import Processes
from .._runtime._progress import Advance
from . import _agree, _notes, _plan, _publish, _write_leaves
from ._plan import Plan
from ._transaction import unpublished


def save(
    plan: Plan, processes: Processes, advance: Advance, held: contextlib.ExitStack
) -> str:
    """Returns the id of the save, whose writer is seen to live while it is `held`."""
    root, options, nbytes = plan.root, plan.options, plan.spec.nbytes
    layout = _plan.LAYOUTS[options.layout]
    accounts = processes.gather(_agree.account(plan), alike=True)
    txn = contents = None
    if processes.leads and len(set(accounts)) == 1:
        with unpublished(root, nbytes):
            txn = _publish.begin(root, options, held)
            txn.work.make_directories([txn.own])
    word = processes.broadcast(b"" if txn is None else _publish.announce(txn))
    if not word:
        _agree.explain(plan, processes)
    if txn is not None:
        work, own = txn.work, txn.own
    else:
        work, own = _publish.await_location(root, word, processes)
    into = _write_leaves.destination(plan, work, own, held)
    writer = _write_leaves.writer_of(plan, into, advance, processes)
    with unpublished(root, nbytes):
        files = layout.write(writer, into)
        into.settle()
        note = "" if processes.leads else _notes.tell(writer, files, into)
        state = None
        if options.own is not None:
            state = _notes.write_own(options.own, writer, into)
        words = processes.gather(json.dumps([note, state]).encode())
        if txn is not None:
            files, states = _notes.see(writer, layout, files, words, into)
            contents = _write_leaves.finish(plan, writer, files, states, into)
    if txn is not None and contents is not None:
        _publish.publish(txn, contents, options.durable)
    processes.broadcast()
    return into.save_id
