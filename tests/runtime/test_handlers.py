"""What a program's handlers of signals raise comes out of a call as it was raised."""

import gc
import inspect
import os
import signal
import sys
import weakref

import jax
import numpy as np
import pytest
from support import inside, interrupts
from support.helpers import long

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
    "array": lambda path: np.asarray(ec.open(path)["a"]),
    "store": lambda path: ec.open(path)["a"].store,
    "path": lambda path: ec.CheckpointManager(path.parent).path(1),
    "exists": ec.exists,
    "verify": ec.verify,
    "clean": lambda path: ec.clean(path.parent),
    "delete": ec.delete,
    "manager": _manage,
}


def _is_in_finaliser(frame, first):
    """Of an object that the caller has let go, after a call: Python ignores what is
    raised there. The frame that is the first one is not looked at, nor those before."""
    code = weakref.finalize.__call__.__code__
    while frame is not first and frame.f_code is not code:
        frame = frame.f_back
    return frame is not first


def _call_with_a_signal(call, at):
    """Makes a call. At its line of this number a signal comes: its handler is called
    with the frame that it interrupts, as Python does."""
    count = 0
    here = sys._getframe()

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
        return trace_line if is_ours and not _is_in_finaliser(frame, here) else None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


_ERRORS = [TimeoutError, ValueError, FileNotFoundError]


@pytest.mark.parametrize("count", [20, *long(200)])
@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_at_any_line(tmp_path, name, error, count):
    """Each error at so many lines, which are others for each error."""
    raised = []

    def handle(number, frame):
        raised.append(error("mine"))
        raise raised[-1]

    path, call = tmp_path / "c", CALLS[name]
    found = signal.signal(signal.SIGUSR2, handle)
    try:
        ec.tree_serialise_leaves(path, _tree(), durable=False)
        lines = _call_with_a_signal(lambda: call(path), None)
        step = max(1, lines // count)
        first = 1 + _ERRORS.index(error) * step // len(_ERRORS)
        for at in range(first, lines, step):
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


def test_what_a_handler_raises_as_a_file_is_closed(tmp_path):
    """Where nobody has it any more: Python ignores what is raised there."""

    def handle(number, frame):
        raise TimeoutError("mine")

    def trace(frame, event, arg):
        if frame.f_code.co_name == "__del__" and event == "line":
            sys.settrace(None)
            signal.getsignal(signal.SIGUSR2)(signal.SIGUSR2, frame)
        return trace if frame.f_code.co_name == "__del__" else None

    ec.tree_serialise_leaves(tmp_path / "c", _tree())
    found = signal.signal(signal.SIGUSR2, handle)
    gc.collect()  # Closes files of other tests.
    files = len(os.listdir("/dev/fd"))
    try:
        sys.settrace(trace)
        with pytest.raises(TimeoutError, match="mine"):
            ec.clean(tmp_path)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR2, found)
    assert len(os.listdir("/dev/fd")) == files


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


class _Limited:
    """Looks like an array; a signal comes as the package asks for its shape."""

    dtype = np.dtype("f4")

    @property
    def shape(self):
        signal.raise_signal(signal.SIGUSR2)


def test_what_the_package_catches_of_a_function_of_the_program(tmp_path):
    """It expects any error of such a function."""

    def handle(number, frame):
        raise TimeoutError("mine")

    found = signal.signal(signal.SIGUSR2, handle)
    try:
        with pytest.raises(TimeoutError, match="mine"):
            ec.tree_serialise_leaves(tmp_path / "c", {"x": 1, "y": _Limited()})
        assert signal.getsignal(signal.SIGUSR2) is handle
    finally:
        signal.signal(signal.SIGUSR2, found)


# What touches no file, or goes through a call that is among these.
_NO_FILES = {
    "Checkpoint": "path metadata save_id layout writer saved base leaves nbytes "
    "describe",
    "Diff": "plot",
    "Function": "leaves",
    "LazyArray": "name url T transpose astype update",
    "Report": "names",
    "Run": "metrics time",
    "SaveHandle": "progress add_done_callback",
    "Store": "options",
    "": "counting inverse is_storable nest partition_rules register_leaf rename "
    "unloaded",
}


def _functions(owner):
    for name, found in vars(owner).items():
        found = getattr(found, "__func__", found)
        found = getattr(found, "fget", None) or getattr(found, "func", found)
        if inspect.isfunction(found) and (name[0] != "_" or name == "__array__"):
            yield name, found


def test_all_calls_let_it_pass():
    guarded = inside.code_around(lambda: None)

    def passes(call):
        codes = []
        while call is not None:
            cells = call.__closure__ or ()
            inner = [x.cell_contents for x in cells]
            codes += [getattr(x, "__code__", None) for x in [call, *inner]]
            call = getattr(call, "__wrapped__", None)
        return guarded in codes

    owners = {name: getattr(ec, name) for name in ec.__all__}
    classes = {n: x for n, x in owners.items() if inspect.isclass(x)}
    calls = {"": {n: x for n, x in owners.items() if inspect.isfunction(x)}}
    calls |= {name: dict(_functions(owner)) for name, owner in classes.items()}
    for owner, found in calls.items():
        left = {name for name, call in found.items() if not passes(call)}
        assert left == {*_NO_FILES.get(owner, "").split()}, owner
