"""Measures one workload against all peers, interleaved in one process."""

import gc
import os
import pathlib
import shutil
import statistics
import time
from typing import Any

import jax
import numpy as np
from peers import Peer
from workloads import nbytes, Tree


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> int:
    """Resets the peak of resident memory to what is resident, and returns that."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _bytes_read() -> int:
    # What the kernel copied to us, and what TensorStore mapped.
    import tensorstore as ts

    fields = dict(
        line.split(": ")
        for line in pathlib.Path("/proc/self/io").read_text().splitlines()
    )
    mapped = sum(
        v.get("value", 0)
        for m in ts.experimental_collect_matching_metrics(
            "/tensorstore/file/mmap_bytes"
        )
        for v in m["values"]
    )
    return int(fields["rchar"]) + mapped


def clean(directory: pathlib.Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _check(loaded: Any, tree: Tree) -> None:
    if not isinstance(loaded, dict):
        return  # Raw bytes.
    for name in (next(iter(tree)), next(reversed(tree))):
        a, b = np.asarray(loaded[name]), np.asarray(tree[name])
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name


def measure(
    tree: Tree, peers: list[Peer], scratch: pathlib.Path, rounds: int, budget: float
) -> dict[str, dict[str, Any]]:
    """Runs every peer `rounds` times in turns, and one that has used up its `budget` of
    seconds no more. The first round warms up and is not counted; files are in the page
    cache when they are loaded."""
    out: dict[str, dict[str, Any]] = {
        p.name: {"durable": p.durable, "save": [], "load": []} for p in peers
    }
    spent = dict.fromkeys(out, 0.0)
    for turn in range(rounds + 1):
        # Every other round backwards, so that no peer always follows the same one.
        for peer in peers if turn % 2 else peers[::-1]:
            row = out[peer.name]
            if spent[peer.name] > budget or "error" in row:
                continue
            clean(scratch)
            path = scratch / "checkpoint"
            os.sync()
            gc.collect()
            resident = _reset_peak()
            start = time.perf_counter()
            try:
                peer.save(path, tree)
                seconds = time.perf_counter() - start
                spent[peer.name] += seconds
                if turn:
                    row["save"].append(seconds)
                row["save_peak"] = _status("VmHWM") - resident
                files = [f for f in scratch.rglob("*") if f.is_file()]
                row["files"] = len(files)
                row["disk"] = sum(f.stat().st_size for f in files)
                if peer.load is None:
                    continue
                gc.collect()
                resident = _reset_peak()
                read = _bytes_read()
                start = time.perf_counter()
                loaded = peer.load(path, tree)
                jax.block_until_ready(loaded)
                seconds = time.perf_counter() - start
                spent[peer.name] += seconds
                if turn:
                    row["load"].append(seconds)
                row["load_peak"] = _status("VmHWM") - resident
                row["read"] = _bytes_read() - read
                _check(loaded, tree)
                del loaded
            except Exception as e:
                row["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
    clean(scratch)
    return out


def table(title: str, tree: Tree, results: dict[str, dict[str, Any]]) -> str:
    """Seconds as median (min); ratios are of medians, `eqx_ckpt` of the same durability
    being 1."""
    mib = 2**20
    ours = {False: results.get("eqx_ckpt"), True: results.get("eqx_ckpt, durable")}
    lines = [
        f"{title}: {len(tree)} leaves, {nbytes(tree) / mib:.0f} MiB",
        f"{'':26}{'save s':>15}{'ratio':>7}{'load s':>15}{'ratio':>7}"
        f"{'files':>7}{'disk MiB':>10}{'read MiB':>10}"
        f"{'+RSS save':>10}{'+RSS load':>10}",
    ]
    for name, row in results.items():
        if "error" in row:
            lines.append(f"{name:26}  {row['error'][:90]}")
            continue
        cells = []
        for what in ("save", "load"):
            times = row[what]
            base = ours[row["durable"] if what == "save" else False]
            if not times or base is None or not base[what]:
                cells += [f"{'-':>15}{'':7}"]
                continue
            median = statistics.median(times)
            ratio = median / statistics.median(base[what])
            cells += [f"{median:8.3f} ({min(times):.3f}){ratio:6.2f}x"]
        read = f"{row['read'] / mib:10.1f}" if "read" in row else f"{'-':>10}"
        peak = f"{row['load_peak'] / mib:10.0f}" if "load_peak" in row else f"{'-':>10}"
        lines.append(
            f"{name:26}{''.join(cells)}{row['files']:7d}{row['disk'] / mib:10.1f}"
            f"{read}{row['save_peak'] / mib:10.0f}{peak}"
        )
    return "\n".join(lines)
