"""Ranges of files, which are read together where they follow each other."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .._errors import MissingError
from .._storage import _store
from .._storage._backend import Backend


# A range of the bytes of a file: its key, from, to (None: its end).
Range = tuple[str, int, int | None]


def start_into(
    root: Backend, ranges: Sequence[Range], into: np.ndarray
) -> Callable[[], None]:
    """Starts to read ranges of files into an array, one after the other: requests to a
    store are sent now. What it returns waits until all is there."""
    data = into.reshape(-1).view(np.uint8)
    values = start(root, ranges) if root.is_far else None

    def arrived() -> None:
        at = 0
        if values is not None:
            for value in values():
                data[at : at + len(value)] = np.frombuffer(value, np.uint8)
                at += len(value)
            return
        for key, first, stop in ranges:
            end = data.size if stop is None else at + stop - first
            if root.read_into(key, first, data[at:end]) < end - at:
                raise MissingError("a chunk is missing")
            at = end

    return arrived


def start(root: Backend, ranges: Sequence[Range]) -> Callable[[], Iterator[memoryview]]:
    """Starts to read ranges of files, those that follow each other as one. What it
    returns waits for them, and gives the bytes of each in order."""
    runs: list[list[Range]] = []
    for one in ranges:
        if runs and runs[-1][-1][0] == one[0] and runs[-1][-1][2] == one[1]:
            runs[-1].append(one)
        else:
            runs.append([one])
    futures = [root.start_read(*run[0][:2], run[-1][2]) for run in runs]

    def values() -> Iterator[memoryview]:
        for run, future in zip(runs, futures):
            got = _store.read_answer(root, run[0][0], future)
            if got.state == "missing":
                raise MissingError("a chunk is missing")
            value = memoryview(got.value)
            first = run[0][1]
            for _, at, stop in run:
                if stop is not None and len(value) < stop - first:
                    raise MissingError("a chunk is missing")
                yield value[at - first : None if stop is None else stop - first]

    return values
