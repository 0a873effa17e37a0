"""What a program's handlers of signals raise comes out of a call as it was raised."""

import signal
import sys

import jax
import numpy as np
import pytest
from support import interrupts

import eqx_ckpt as ec


def _tree():
    return {"a": np.ones(3000, np.float32), "b": [np.ones(3)] * 2}


def _manage(path):
    with ec.CheckpointManager(path.parent / "run", every=1, keep=1) as manager:
        manager.save((manager.latest() or 0) + 1, _tree())
        manager.wait()
        manager.pin(manager.latest())


CALLS = {
    "save": lambda path: ec.tree_serialise_leaves(path, _tree(), durable=False),
    "load": lambda path: ec.tree_deserialise_leaves(path, _tree()),
    "open": lambda path: ec.open(path)["a"][:2].read(),
    "tree": lambda path: ec.open(path).tree.b[0].read(),
    "nodes": lambda path: jax.tree.leaves(ec.open(path).tree),
    "exists": ec.exists,
    "verify": ec.verify,
    "clean": lambda path: ec.clean(path.parent),
    "delete": ec.delete,
    "manager": _manage,
}


def _call_with_a_signal(call, at):
    """Makes a call. At its line of this number a signal comes: its handler is called
    with the frame that it interrupts, as Python does."""
    count = 0

    def trace_line(frame, event, arg):
        nonlocal count
        count += event == "line"
        if event == "line" and count == at:
            sys.settrace(None)
            signal.getsignal(signal.SIGUSR2)(signal.SIGUSR2, frame)
        return trace_line

    def trace(frame, event, arg):
        # Before the first line of one of these, it is not called yet.
        is_at_block = frame.f_code.co_name in ("__enter__", "__exit__")
        is_ours = interrupts._is_ours(frame) and not is_at_block
        return trace_line if is_ours else None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("error", [TimeoutError, ValueError, FileNotFoundError])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_at_any_line(tmp_path, name, error):
    raised = []

    def handle(number, frame):
        raised.append(error("mine"))
        raise raised[-1]

    path, call = tmp_path / "c", CALLS[name]
    found = signal.signal(signal.SIGUSR2, handle)
    try:
        ec.tree_serialise_leaves(path, _tree(), durable=False)
        lines = _call_with_a_signal(lambda: call(path), None)
        step = max(1, lines // 40)
        for at in range(1 + len(raised), lines, step):
            ec.tree_serialise_leaves(path, _tree(), durable=False)
            raised.clear()
            try:
                _call_with_a_signal(lambda: call(path), at)
            except error as e:
                assert raised and e is raised[0]
            else:
                assert not raised
            assert signal.getsignal(signal.SIGUSR2) is handle
    finally:
        signal.signal(signal.SIGUSR2, found)


def test_what_a_handler_raises_in_a_function_of_the_program(tmp_path):
    """The program may expect it there."""
    caught = []

    def handle(number, frame):
        raise TimeoutError("mine")

    def where(tree):
        try:
            signal.raise_signal(signal.SIGUSR2)
        except TimeoutError as e:
            caught.append(e)
        return tree

    found = signal.signal(signal.SIGUSR2, handle)
    try:
        ec.tree_serialise_leaves(tmp_path / "c", _tree(), where=where)
    finally:
        signal.signal(signal.SIGUSR2, found)
    assert caught and ec.exists(tmp_path / "c")
