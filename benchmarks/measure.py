"""Measures the peers in turns: whole trees in this process, parts in new ones."""

import gc
import itertools as it
import json
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from counters import files, peak, reads, reads_since, reset_peak
from peers import Case, Peer
from program import call
from workloads import nbytes, Tree


Row = dict[str, Any]


class Settings(NamedTuple):
    scratch: pathlib.Path
    rounds: int


def _turns(peers: list[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    for turn in range(rounds):
        # Every other round backwards, so that no peer always follows the same one.
        for peer in peers if turn % 2 else peers[::-1]:
            yield turn, peer


def _clean(directory: pathlib.Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _error(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"


def whole(make: Callable[[], Tree], peers: list[Peer], settings: Settings) -> Row:
    """Every peer saves the tree, durable and not, and loads what it saved last.

    The first round warms up, and its times and peaks are not counted.
    """
    tree = make()
    rows: dict[str, Row] = {
        peer.name: {"save": [], "durable": [], "load": [], "save_peak": 0}
        | {"load_peak": 0, "seconds": 0.0}
        for peer in peers
    }
    for turn, peer in _turns(peers, settings.rounds + 1):
        row = rows[peer.name]
        if "error" in row:
            continue
        try:
            _one_turn(tree, peer, row, turn > 0, settings)
        except Exception as e:
            row["error"] = _error(e)
    shutil.rmtree(settings.scratch)
    return {"leaves": len(tree), "bytes": nbytes(tree), "peers": rows}


def _one_turn(
    tree: Tree, peer: Peer, row: Row, counted: bool, settings: Settings
) -> None:
    path = settings.scratch / "checkpoint"
    gc.collect()
    for durable in peer.durable:
        _clean(settings.scratch)
        os.sync()
        resident = reset_peak()
        start = time.perf_counter()
        finish = peer.save(path, tree, durable)
        seconds = time.perf_counter() - start
        if callable(finish):
            finish()
        row["seconds"] += seconds
        if counted:
            row["durable" if durable else "save"].append(seconds)
            row["save_peak"] = max(row["save_peak"], peak() - resident)
    written = files(settings.scratch)
    row["files"] = len(written)
    row["disk"] = sum(file.stat().st_size for file in written)
    like = peer.like(tree)
    gc.collect()
    resident = reset_peak()
    before = reads()
    start = time.perf_counter()
    loaded = jax.block_until_ready(peer.load(path, like))
    seconds = time.perf_counter() - start
    row["seconds"] += seconds
    if counted:
        row["load"].append(seconds)
        row["load_peak"] = max(row["load_peak"], peak() - resident - nbytes(tree))
    row |= reads_since(before)
    if peer.maps:
        row["read"] = row["requests"] = None
    _check(loaded, tree)


def _check(loaded: Any, tree: Tree) -> None:
    if not isinstance(loaded, dict):
        assert sum(x.nbytes for x in loaded) == nbytes(tree)  # Raw bytes.
        return
    assert loaded.keys() == tree.keys()
    for name in (next(iter(tree)), next(reversed(tree))):
        a, b = np.asarray(loaded[name]), np.asarray(tree[name])
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name


def part(
    make: Callable[[], Tree],
    leaf: str,
    rows: tuple[int, int] | None,
    peers: list[Peer],
    settings: Settings,
) -> Row:
    """Every peer that can reads a leaf, or rows of it, each time in a new process."""
    tree = make()
    before = it.takewhile(lambda name: name != leaf, tree)
    x, offset = tree[leaf], sum(tree[name].nbytes for name in before)
    case = Case(leaf, x.shape, x.dtype.name, offset, rows)
    expected = np.asarray(case.slice(x)).tobytes()
    peers = [peer for peer in peers if peer.part]
    out: dict[str, Row] = {peer.name: {"open": [], "first": []} for peer in peers}
    _clean(settings.scratch)
    for peer in peers:
        peer.save(settings.scratch / peer.name, tree, True)
    result = {"leaves": len(tree), "bytes": len(expected), "peers": out}
    del tree, x
    program = str(pathlib.Path(__file__).parent / "part.py")
    for _, peer in _turns(peers, settings.rounds):
        row = out[peer.name]
        if "error" in row:
            continue
        path = str(settings.scratch / peer.name)
        try:
            got = call(program, peer.name, path, json.dumps(case._asdict()))
            assert got.pop("crc") == zlib.crc32(expected), "other bytes were read"
        except Exception as e:
            row["error"] = _error(e)
            continue
        for key in ("open", "first"):
            row[key].append(got.pop(key))
        row |= got
        if peer.maps:
            row["read"] = row["requests"] = None
    shutil.rmtree(settings.scratch)
    return result
