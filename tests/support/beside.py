"""Processes that save, delete and clean beside each other. No test is here.

`python -m support.beside ACTOR PATH ARGUMENTS...` does what one of them does, until its
input ends, and prints what came of each call.
"""

import concurrent.futures as cf
import contextlib
import functools as ft
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import eqx_ckpt as ec
from support import scripts
from support.faulty import tree, value_at


class Done(NamedTuple):
    """A call: what was saved, when it began and ended, and its error."""

    value: int
    start: float
    stop: float
    error: str | None


def _save(
    path: str, layouts: str, first: str, alone: str, functions: str = ""
) -> Callable[[int], int]:
    of, stored = layouts.split(","), _functions() if functions else None

    def save(number: int) -> int:
        value = int(first) + number
        how = {"layout": of[number % len(of)], "durable": False, "functions": stored}
        if functions and number % 2:
            ec.async_tree_serialise_leaves(path, _called(value), **how).result()
        else:
            made = _called(value) if functions else tree(value)
            ec.tree_serialise_leaves(path, made, **how)
        if alone == "alone":
            assert (called_at if functions else value_at)(path) == value
        return value

    return save


def _called(value: int) -> dict[str, Any]:
    """A tree with a leaf that a function is of."""
    return {**tree(value), "w": jax.device_put(np.float32([value]))}


@ft.cache
def _functions() -> dict[str, Any]:
    """Exported once: the trees of all values are alike."""
    x = np.ones(2, np.float32)
    return {"f": ec.function(lambda t, x: t["w"] * x, x, platforms=["cpu"])}


def called_at(path: Any) -> int:
    """The value of the one tree that is at a path, and that its function is of."""
    ckpt = ec.open(path)
    loaded = ec.tree_deserialise_leaves(ckpt, _called(0))
    value = loaded["value"]
    assert (loaded["x"] == value).all() and loaded["w"].tolist() == [value], value
    got = ckpt.functions["f"](np.float32([1, 3])).tolist()
    assert got == [value, 3 * value], (got, value)
    return value


def _manage(path: str, first: str) -> Callable[[int], int]:
    manager = ec.CheckpointManager(path, keep=3, best=("loss", "min"), reuse=True)

    def save(number: int) -> int:
        value = int(first) + number
        metrics = {"loss": value % 7}
        manager.save(value, _called(value), metrics, functions=_functions())
        if number % 5 == 0:
            loaded, at = manager.restore(_called(0))
            assert at == value == loaded["value"]
            assert called_at(manager.path(at)) == value
        return value

    return save


def _follow(path: str) -> Callable[[int], int]:
    """Reads whatever is the newest step of a run of another process."""
    manager = ec.CheckpointManager(path)

    def follow(number: int) -> int:
        step = manager.latest()
        return -1 if step is None else called_at(manager.path(step)) - step

    return follow


def _clean(path: str) -> Callable[[int], int]:
    return lambda number: len(ec.clean(os.path.dirname(path) if number % 3 else path))


def _delete(path: str) -> Callable[[int], int]:
    def delete(number: int) -> int:
        time.sleep(0.005)
        ec.delete(path)
        return -1

    return delete


def _read(path: str) -> Callable[[int], int]:
    return lambda number: value_at(path, verify=number % 2 == 0)


def _call(path: str) -> Callable[[int], int]:
    return lambda number: called_at(path)


_ACTORS = {
    "save": _save,
    "manage": _manage,
    "clean": _clean,
    "delete": _delete,
    "read": _read,
    "call": _call,
    "follow": _follow,
}


def _run(
    over: threading.Event,
    done: list[Done],
    may_end: Callable[[], bool],
    actor: str,
    *arguments: Any,
) -> list[Done]:
    """Acts so often, and at most a hundred times as often until it `may_end`."""
    path, count, *rest = map(str, arguments)
    act, number = _ACTORS[actor](path, *rest), 0
    while not over.is_set() and number < 100 * int(count):
        if number >= int(count) and may_end():
            break
        start, value, error = time.monotonic(), -1, None
        try:
            value = act(number)
        except Exception as e:
            error = f"{type(e).__name__}: {e}".replace(path, "PATH")
        done.append(Done(value, start, time.monotonic(), error))
        number += 1
    return done


def _main(*actor: str) -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print("ready", flush=True)
    print(json.dumps(_run(over, [], lambda: True, *actor)))


@contextlib.contextmanager
def threads(*actors: tuple[Any, ...]) -> Iterator[Callable[..., list[Done]]]:
    """As `running`, in this process; and none ends before each has done something."""
    over = [threading.Event() for _ in actors]
    done: list[list[Done]] = [[] for _ in actors]
    have_acted = lambda: all(any(x.error is None for x in of.copy()) for of in done)
    with cf.ThreadPoolExecutor(len(actors)) as pool:
        jobs = zip(over, done, actors)
        futures = [
            pool.submit(_run, end, of, have_acted, *actor) for end, of, actor in jobs
        ]

        def result(place: int, wait: bool = True) -> list[Done]:
            if not wait:
                over[place].set()
            return futures[place].result()

        try:
            yield result
        finally:
            for end in over:
                end.set()


@contextlib.contextmanager
def running(*actors: tuple[Any, ...]) -> Iterator[Callable[..., list[Done]]]:
    """Starts actors, each as a process, and yields a function that waits for one of
    them, by its place, or tells it to end (`wait=False`)."""
    with contextlib.ExitStack() as stack:
        start = ft.partial(scripts.server, XLA_FLAGS="", JAX_PLATFORMS="cpu")
        processes = [
            stack.enter_context(start("support.beside", *actor)) for actor in actors
        ]

        def result(place: int, wait: bool = True) -> list[Done]:
            process = processes[place]
            lines = process.stdout.read() if wait else ""
            process.stdin.close()
            lines += process.stdout.read()
            assert process.wait() == 0
            return [Done(*row) for row in json.loads(lines.splitlines()[-1])]

        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield result


def false_errors(of: list[Done], others: list[list[Done]]) -> list[str]:
    """The errors of a writer which say that another one was there, when none was."""
    won = [done for row in others for done in row if done.error is None]
    return [
        done.error
        for done in of
        if done.error
        and not any(x.start < done.stop and done.start < x.stop for x in won)
    ]


if __name__ == "__main__":
    _main(*sys.argv[1:])
