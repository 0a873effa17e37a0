"""What the processes of `test_interrupts.py` do. No test is here.

`python -m support.interrupts DIRECTORY MOST NAMES...` makes the calls of these names
again and again, raises an exception each time at another line of the package, or of
the `contextlib` that it uses, at most so many for each (0: all), and looks at what
there is then. Prints how many lines it were.

In the main thread that is `KeyboardInterrupt`; in a thread of a save, `MemoryError`.

With `moments:COUNT` in the place of MOST, a signal interrupts each call so many times,
at any moment: between any two steps of Python, its own modules among them.
"""

import collections
import contextlib
import faulthandler
import functools as ft
import gc
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import eqx_ckpt as ec


# ---- Raising at a line.

_PACKAGE = str(pathlib.Path(ec.__file__).parent) + os.sep
Line = tuple[str, int]


def _is_ours(frame: Any) -> bool:
    """Whether it runs a line of the package, or of what enters and leaves its blocks,
    which is written in Python too."""
    while frame is not None and frame.f_code.co_filename == contextlib.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


def _traced(
    at: int | None, lines: list[Line], thread: str, finals: list[str]
) -> Callable[..., Any]:
    def trace_line(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == at:
                # Python then traces no further: what the exception sets off runs.
                raise KeyboardInterrupt if thread == MAIN else MemoryError
        return trace_line

    def skip(frame: Any, event: str, arg: Any) -> Any:
        return trace_line

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not _is_ours(frame):
            return None
        if threading.current_thread().name != thread:
            return None
        if _is_final(frame):
            finals.append(frame.f_code.co_qualname)
            return None
        # What comes before the first line of one of these, comes before it is called:
        # Python then does not enter the block, or does not leave it by another call.
        is_at_block = frame.f_code.co_name in ("__enter__", "__exit__")
        return skip if is_at_block else trace_line

    return trace


def _is_final(frame: Any) -> bool:
    """Whether a finaliser runs: what it raises, Python ignores."""
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
    return False


def _trace(call: Callable[[], Any], trace: Callable[..., Any]) -> None:
    def run() -> Iterator[None]:
        yield call()

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        # What is raised in the last step of an `except`, where Python itself raises
        # nothing, leaves that error handled: of a generator, until it ends.
        next(run())
    finally:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore


def lines_of(call: Callable[[], Any], thread: str) -> list[Line]:
    """The lines of the package that a call runs in the threads of a name, in order,
    but those of finalisers."""
    lines: list[Line] = []
    _trace(call, _traced(None, lines, thread, []))
    return lines


def finals_of(call: Callable[[], Any]) -> list[str]:
    """The finalisers that a call runs: Ctrl-C in one is lost."""
    finals: list[str] = []
    _trace(call, _traced(None, [], MAIN, finals))
    return finals


def interrupt(call: Callable[[], Any], at: int, thread: str) -> bool:
    """Makes a call, in which the line number `at` raises. Returns whether it did, and
    the call did not."""
    lines: list[Line] = []
    _trace(call, _traced(at, lines, thread, []))
    return len(lines) >= at


def spread(lines: list[Line], most: int, every: Sequence[str]) -> list[int]:
    """Numbers of lines: of each that is there the first and the last time that it runs,
    and of all of these at most so many; but each that is in some files."""
    last = {line: i for i, line in enumerate(lines, 1)}
    first = {line: i for i, line in reversed(list(enumerate(lines, 1)))}
    numbers = sorted({*first.values(), *last.values()})
    some = numbers[:: -(-len(numbers) // most)]
    all_of = [i for i in numbers if os.path.basename(lines[i - 1][0]) in every]
    return sorted({*some, *all_of})


# ---- What a call that is over may have left in the process.


class State:
    def __init__(self, directory: pathlib.Path):
        self._directory = str(directory)
        self._ignored: list[Any] = []
        sys.unraisablehook = lambda error: self._ignored.append(repr(error))
        # Threads of TensorStore close files a moment after they were read.
        end = time.monotonic() + 30
        while [*_descriptors(self._directory)] and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        return {
            "descriptors": sorted(_descriptors(self._directory)),
            "ignored": list(self._ignored),
            "threads": sorted(t.name for t in threading.enumerate()),
            "collector": (gc.isenabled(), gc.get_threshold()),
            "interval": sys.getswitchinterval(),
            "signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)],
        }

    def check(self, line: Line) -> None:
        """Waits for threads that end, and for what is not collected yet."""
        end = time.monotonic() + 30
        while (now := self._now()) != self._before and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        assert now == self._before, (line, now, self._before)


def _descriptors(directory: str) -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith(directory):
            yield target


# ---- The calls. Each may put the value 2 at a path that has 3.


@ft.cache
def tree(value: int) -> dict[str, Any]:
    large, both = np.full(2**16, value, np.float32), np.full(10, value)
    return {"jax": jnp.full(3, value), "large": large, "v": [both] * 2}


def value_at(path: pathlib.Path) -> int:
    """The value of the one tree that is at a path."""
    loaded = ec.tree_deserialise_leaves(path, tree(0))
    arrays = loaded["jax"], loaded["large"], *loaded["v"]
    value = int(arrays[0][0])
    assert all((np.asarray(array) == value).all() for array in arrays)
    return value


def save(path: pathlib.Path, value: int = 2, **options: Any) -> None:
    ec.tree_serialise_leaves(path, tree(value), durable=False, **options)


def _save_durably(path: pathlib.Path) -> None:
    ec.tree_serialise_leaves(path, tree(2))


def _save_zarr(path: pathlib.Path) -> None:
    save(path, layout="zarr")


def _save_later(path: pathlib.Path) -> None:
    handle = ec.async_tree_serialise_leaves(path, tree(2), durable=False)
    handle.staged()
    handle.add_done_callback(lambda handle: None)
    handle.done()
    handle.result()


def _save_zarr_later(path: pathlib.Path) -> None:
    ec.async_tree_serialise_leaves(path, tree(2), layout="zarr", durable=False).result()


def _reuse_later(path: pathlib.Path) -> None:
    last = None
    for _ in range(2):
        last = ec.async_tree_serialise_leaves(path, tree(2), durable=False, reuse=last)
        last.result()


def _reuse(path: pathlib.Path) -> None:
    save(path)
    save(path, reuse=path)


def _manage(path: pathlib.Path) -> None:
    step = int(path.parent.name)
    signals = [signal.SIGTERM]
    with ec.CheckpointManager(path.parent.parent, keep=2, signals=signals) as manager:
        manager.unpin(step)  # A call that was interrupted may have left it pinned.
        manager.save(step, tree(2), force=True)
        manager.save(step + 1, tree(2), {"loss": 1.0}, force=True)
        manager.save(step, tree(2), force=True)
        manager.pin(step)
        manager.unpin(step)
        manager.should_stop()
        manager.restore(tree(0))
        manager.delete(step + 1)


def _manage_a_kept_state(path: pathlib.Path) -> None:
    step = int(path.parent.name)
    with ec.CheckpointManager(path.parent.parent, every=step) as manager:
        manager.save(step - 1, tree(1))
        manager.save(step, tree(2), force=True)


def _convert(path: pathlib.Path) -> None:
    source = path.with_name("source.safetensors")
    ec.export_safetensors(source, tree(2), durable=False)
    ec.convert(source, path, durable=False)
    source.unlink()


def _read(path: pathlib.Path) -> None:
    ckpt = ec.open(path)
    ec.materialise(ckpt.tree.v)
    ec.tree_deserialise_leaves(path, tree(0), where=lambda tree: tree["large"])
    ec.load_or_init(lambda: tree(3), path)
    ec.graft(
        {"v": tree(3)["v"]},
        ckpt,
        [(lambda m: m["v"], lambda c: c.v)],
        drop=lambda c: [c.jax, c.large],
    )
    assert ec.verify(path) == []


def _others(path: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints of the values 2 and 1."""
    places = [path.parents[2] / f"others/{value}" for value in (2, 1)]
    for value, place in zip((2, 1), places):
        if not ec.exists(place):
            save(place, value)
    return places


def _save_lazily(path: pathlib.Path) -> None:
    node = ec.open(path).tree
    other, one = (ec.open(place).tree for place in _others(path))
    lazy = ec.lazy(jnp.subtract, elementwise=True)(node.jax, one.jax)
    values = {"jax": lazy, "large": other.large, "v": other.v}
    ec.tree_serialise_leaves(path, values, durable=False)


def _merge(path: pathlib.Path) -> None:
    two, one = _others(path)
    ec.stats(path)
    ec.diff(path, two)
    mean = ec.merging.average()
    merged = ec.merge([two, path, one], mean, where=lambda tree: tree.large)
    ec.tree_serialise_leaves(path, merged, durable=False)


def _in_memory(path: pathlib.Path) -> None:
    ec.from_bytes(ec.to_bytes(tree(2)), tree(0))
    with open(path.with_name("file.zip"), "wb") as file:
        ec.tree_serialise_leaves(file, tree(2))
    with open(path.with_name("file.zip"), "rb") as file:
        ec.tree_deserialise_leaves(file, tree(0))
    path.with_name("file.zip").unlink()


def _delete(path: pathlib.Path) -> None:
    ec.exists(path)
    ec.delete(path)
    ec.clean(path.parent)


# Each with the layout of what is at the path.
CALLS: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "save": (save, "ocdbt"),
    "save durably": (_save_durably, "ocdbt"),
    "save zarr": (_save_zarr, "zarr"),
    "save zarr over ocdbt": (_save_zarr, "ocdbt"),
    "save zip": (save, "zip"),
    "save later": (_save_later, "ocdbt"),
    "reuse": (_reuse, "ocdbt"),
    "manage": (_manage, "ocdbt"),
    "manage a kept state": (_manage_a_kept_state, "ocdbt"),
    "convert": (_convert, "ocdbt"),
    "read": (_read, "ocdbt"),
    "read zarr": (_read, "zarr"),
    "read zip": (_read, "zip"),
    "in memory": (_in_memory, "ocdbt"),
    "save lazily": (_save_lazily, "ocdbt"),
    "merge": (_merge, "ocdbt"),
    "delete": (_delete, "ocdbt"),
    "delete zip": (_delete, "zip"),
    "thread of a save": (_save_later, "ocdbt"),
    "thread of a zarr save": (_save_zarr_later, "zarr"),
    "thread of a reusing save": (_reuse_later, "ocdbt"),
    "thread of a manager": (_manage, "ocdbt"),
    "helper of a save": (_save_zarr_later, "zarr"),
}

MAIN = "MainThread"


def _thread(name: str) -> str:
    if name.startswith("thread"):
        return "eqx_ckpt save"
    return "eqx_ckpt" if name.startswith("helper") else MAIN


# Of these also the short form raises at each line: nearly all that changes the state of
# the process is there.
_WINDOWS = {
    "save later": (
        "_cleanup.py",
        "_descriptor.py",
        "_directory_lock.py",
        "_gc.py",
        "_background.py",
        "_threads.py",
    ),
    "helper of a save": ("_threads.py",),
    "save zip": ("_descriptor.py", "_publish_file.py"),
    # Where locks would stay that the next save waits for.
    "save zarr": ("contextlib.py",),
    # What waits for the end of a run is older than what is saved.
    "manage a kept state": ("_saves.py", "_last_state.py", "_background.py"),
    # What follows a save, and is waited for.
    "thread of a manager": ("_follow_up.py", "_saves.py"),
}

# What a call then raises. A thread may end without having said why.
_ERRORS = {True: (KeyboardInterrupt,), False: (MemoryError, RuntimeError)}

# Seconds that the next calls may take: one, and more on a busy machine.
_MOST = 120


def _next_calls(path: pathlib.Path, layout: str) -> int | None:
    """Which value is at a path after an interrupt. Other calls go on as ever, and
    leave 3 there."""
    faulthandler.dump_traceback_later(_MOST, exit=True)
    value = value_at(path) if ec.exists(path) else None
    other = path.parents[2] / "other"
    handle = ec.async_tree_serialise_leaves(other, tree(4), durable=False)
    _put(path, 3, layout)
    assert value_at(path) == 3
    handle.result()
    assert value_at(other) == 4
    faulthandler.cancel_dump_traceback_later()
    return value


def _put(path: pathlib.Path, value: int, layout: str) -> None:
    save(path, value, layout="zarr" if layout == "zarr" else "ocdbt")


def _delete_others(path: pathlib.Path) -> None:
    """Deletes all of a run but a step: with a longer history a call has more lines."""
    for other in {*path.parents[1].iterdir()} - {path.parent}:
        shutil.rmtree(other)


def interrupt_call(
    directory: pathlib.Path, name: str, most: int
) -> collections.Counter[str]:
    call, layout = CALLS[name]
    path = directory / "run/7" / ("default.zip" if layout == "zip" else "default")
    for _ in range(2):
        _put(path, 3, layout)
        call(path)
        _delete_others(path)
    _put(path, 3, layout)
    thread = _thread(name)
    if call in (save, _save_durably, _save_zarr):
        gc.collect()  # Not what calls before it have left.
        # Files that a zip was read from are open until nobody has the reader any more.
        assert layout == "zip" or not finals_of(lambda: call(path))
        _put(path, 3, layout)
    # Other threads of a call take more or less of its work. All of it is asked for.
    runs: list[list[Line]] = []
    for _ in range(5):
        runs.append(lines_of(lambda: call(path), thread))
        _next_calls(path, layout)
        _delete_others(path)
    lines = max(runs, key=len)
    state = State(directory)
    found: collections.Counter[str] = collections.Counter()
    every = _WINDOWS.get(name, ())
    for at in spread(lines, most, every) if most else range(1, len(lines) + 1):
        is_kept = False
        faulthandler.dump_traceback_later(_MOST, exit=True)
        try:
            is_kept = interrupt(lambda: call(path), at, thread)
            value = _next_calls(path, layout)
        except _ERRORS[thread == MAIN]:
            # All that was interrupted is still alive, as where Ctrl-C is caught and a
            # last state saved.
            value = _next_calls(path, layout)
        # Ctrl-C is for the caller. An error may be one of what needs not be done.
        assert not is_kept or (thread != MAIN and value == 2), lines[at - 1]
        state.check(lines[at - 1])
        assert value in (3, 2) or (value is None and call is _delete), lines[at - 1]
        # No older state is saved after it.
        is_older_there = (directory / "run/6").exists()
        assert value != 2 or not is_older_there, lines[at - 1]
        # Nor is anything left on disk that the next save, or `clean`, does not delete.
        ec.clean(directory / "run")
        for left in (path.with_name("source.safetensors"), path.with_name("file.zip")):
            left.unlink(missing_ok=True)
        left = {p.name for p in path.parent.iterdir()} - {path.name}
        # The mark of a step that is whole, for Orbax.
        left -= {"commit_success.txt"} if path.exists() else set()
        assert not left, (lines[at - 1], left)
        _delete_others(path)
        found[f"{value} is there"] += 1
    return found


def interrupt_at_moments(
    directory: pathlib.Path, name: str, count: int
) -> collections.Counter[str]:
    """The call ends each time, and so does the next one, and the process."""
    call, layout = CALLS[name]
    path = directory / "run/7" / ("default.zip" if layout == "zip" else "default")
    _put(path, 3, layout)
    call(path)
    call(path)
    start = time.perf_counter()
    call(path)
    took = time.perf_counter() - start
    # The system may give the signal to another thread, and so a moment too late.
    late = lambda *_: None
    rng = random.Random(name)
    found: collections.Counter[str] = collections.Counter()
    while found["interrupted"] < count and found.total() < 10 * count:
        faulthandler.dump_traceback_later(_MOST, exit=True)
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 1.2 * took))
            call(path)
            signal.signal(signal.SIGALRM, late)
            found["whole"] += 1
        except KeyboardInterrupt:
            signal.signal(signal.SIGALRM, late)
            found["interrupted"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        _put(path, 3, layout)
    assert _next_calls(path, layout) in (2, 3)
    return found


if __name__ == "__main__":
    place, number, *names = sys.argv[1:]
    kind, _, most = number.rpartition(":")
    make = interrupt_at_moments if kind == "moments" else interrupt_call
    for each in names:
        done = make(pathlib.Path(place) / each, each, int(most))
        print(json.dumps({each: done}), flush=True)
    # Nor does a thread keep the process.
    faulthandler.dump_traceback_later(_MOST, exit=True)
