"""Which process writes which chunks, and into which files.

Pure arithmetic, which comes out the same in every process of a run.
"""

import collections
import itertools as it
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._format import _grid
from .._limits import limits
from .._tree._sharding import Holders


MAX_FILE = 2 * 2**30

# Runs of the chunks of a leaf, each with the process that writes it.
Owners = list[tuple[range, int]]
# Runs of chunks, each with the index of its leaf.
Runs = list[tuple[int, range]]


class DealtLeaf(NamedTuple):
    """A leaf to be written: the number of its chunks, and the bytes of each."""

    chunks: int
    chunk_bytes: int
    owners: Owners


def deal(
    leaves: Sequence[DealtLeaf],
    processes: int,
    most: int = MAX_FILE,
    apart: frozenset[int] = frozenset(),
) -> list[tuple[int, Runs]]:
    """Deals runs of chunks out to files of about one size, in the order of the tree,
    each at most `most` bytes unless a chunk has more.

    Some leaves are dealt to files of their own, `apart` from the others.
    """
    target = _target(sum(count * size for count, size, _ in leaves), most)
    # The runs of each process: those of leaves that are `apart`, and the others.
    dealt: list[tuple[Runs, Runs]] = [([], []) for _ in range(processes)]
    for leaf_index, leaf in enumerate(leaves):
        which = 0 if leaf_index in apart else 1
        for run, process in leaf.owners:
            dealt[process][which].append((leaf_index, run))
    files: list[tuple[int, Runs]] = []
    for process in range(processes):
        # There may be millions: those that are in files are let go.
        both, dealt[process] = dealt[process], ([], [])
        for runs in both:
            files += zip(it.repeat(process), _pack(leaves, runs, target))
    return files


def _target(total: int, most: int) -> int:
    return min(max(total // limits.max_files, limits.min_file_bytes), most)


def most_files(total: int, processes: int, most: int) -> int:
    """More files than `total` bytes are dealt to, if no chunk is as large as one."""
    return 2 * total // _target(total, most) + 2 * processes


def _pack(leaves: Sequence[DealtLeaf], runs: Runs, target: int) -> list[Runs]:
    total = sum(len(run) * leaves[leaf_index].chunk_bytes for leaf_index, run in runs)
    if total <= target:
        return [runs] if runs else []
    files: list[Runs] = []
    end = 0
    for leaf_index, run in runs:
        size = leaves[leaf_index].chunk_bytes
        while True:
            room = (target - end) // size if size else len(run)
            if not files or (room < 1 and run and files[-1]):
                files.append([])
                end = 0
                continue
            take = min(len(run), max(1, room))
            # An array without elements has no chunks, and yet a place. Most runs are
            # not cut, and stay the objects that they are.
            files[-1].append((leaf_index, run if take == len(run) else run[:take]))
            end += take * size
            run = run[take:]
            if not run:
                break
    return files


def owners(
    holders: Holders,
    shape: Sequence[int],
    chunk: Sequence[int],
    size: int,
    loads: list[int],
    known: dict[tuple[Any, ...], tuple[Holders, Owners, dict[int, int]]] | None = None,
) -> Owners:
    """Shares the chunks of a leaf, of `size` bytes, out to the processes that hold
    them, each to one.

    `loads` is how many bytes each process has to write so far, and is added to. Leaves
    that are alike share one list if they are given the same `known`, unless it depends
    on the loads. It has the chunks of each process, by the id of the holders (which it
    keeps, so that no others get it), the shape and the chunks.
    **Raises:** `ValueError` if there is a chunk that no one process holds.
    """
    if 0 in shape:
        return []  # There are no chunks, whoever holds which regions.
    key = id(holders), tuple(shape), tuple(chunk)
    if known is not None and key in known:
        _, runs, counts = known[key]
        for process, count in counts.items():
            loads[process] += count * size
        return runs
    counts = _grid.grid(shape, chunk)
    chunks = np.arange(math.prod(counts)).reshape(counts)
    owner = [-1] * chunks.size
    is_even = True
    for region, processes in holders:
        if any(
            s.start % c or (s.stop % c and s.stop != n)
            for s, c, n in zip(region, chunk, shape)
        ):
            raise ValueError(
                f"chunks of {tuple(chunk)} lie in shards of several processes, such as "
                f"{tuple(s.stop - s.start for s in region)}"
            )
        box = [slice(s.start // c, -(-s.stop // c)) for s, c in zip(region, chunk)]
        numbers = chunks[tuple(box)].ravel().tolist()
        share = len(numbers) / len(processes)
        is_even = is_even and share >= 1
        for i, number in enumerate(numbers):
            if share < 1:
                process = min(processes, key=loads.__getitem__)
            else:
                process = processes[int(i / share)]
            owner[number] = process
            loads[process] += size
    if -1 in owner:
        raise ValueError("no process holds all of its chunks")
    runs = []
    start = 0
    for process, group in it.groupby(owner):
        stop = start + len(list(group))
        runs.append((range(start, stop), process))
        start = stop
    if known is not None and is_even:
        known[key] = holders, runs, collections.Counter(owner)
    return runs
