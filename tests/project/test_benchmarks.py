"""The short form of the benchmarks fails where a limit is exceeded, and only there."""

import json
import pathlib
import subprocess
import sys

import pytest
from support.helpers import run_python


benchmarks = pathlib.Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the benchmarks read /proc"
)

# Ours; then one that does all that ours must not, and one that hides what it reads. In
# a new process, as memory is measured.
_measured = """
import json, os, pathlib, sys
sys.path.insert(0, {benchmarks!r})
import jax, jax.numpy as jnp, numpy as np
import limits, measure, peers, workloads

PEER, UNVERIFIED = limits.PEERS
known = {{peer.name: peer for peer in peers.PEERS}}
ours, zarr, raw = known[PEER], known["eqx_ckpt, zarr"], known["raw, one thread"]

def wasteful_save(path, tree, durable):
    copy = jax.block_until_ready(jax.tree.map(jnp.copy, tree))
    ours.save(path, copy, durable)
    zarr.save(path.with_name("again"), tree, durable)

def wasteful_load(path, like):
    both = ours.load(path, like), ours.load(path, like)
    for _ in range(200):
        (path / "eqx_ckpt.json").read_bytes()
    return jax.block_until_ready(both)[0]

def hidden_load(path, like):
    return [np.array(np.memmap(path, np.uint8, "r"))]

wasteful = ours._replace(save=wasteful_save, load=wasteful_load)
hidden = raw._replace(name=UNVERIFIED, load=hidden_load)
make = workloads.sizes(short=True).whole["L"]
settings = measure.Settings(pathlib.Path({scratch!r}) / "w", 1)
for both in ([ours, known[UNVERIFIED]], [wasteful, hidden]):
    whole = {{"L": measure.whole(make, both, settings)}}
    print(json.dumps(limits.check({{"whole": whole, "parts": {{}}}})))
"""


def test_limits(tmp_path):
    code = _measured.format(benchmarks=str(benchmarks), scratch=str(tmp_path))
    kept, exceeded = map(json.loads, run_python(code).splitlines())
    assert kept == []
    wasted = [line for line in exceeded if line.startswith("L, eqx_ckpt: ")]
    keys = ["files", "disk", "read", "requests", "save_peak", "load_peak"]
    assert [problem.split("`")[1] for problem in wasted] == keys
    assert "bytes of 67,108,864 were seen being read" in exceeded[-1]


def test_the_short_form_fails(tmp_path):
    done = subprocess.run(
        [sys.executable, str(benchmarks), "--short", "S", "--only", "raw"]
        + ["--scratch", str(tmp_path), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    # Ours, which has limits, was left out.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "S, eqx_ckpt: it was not measured." in done.stdout
    assert list(json.loads((tmp_path / "out/results.json").read_text())["whole"]) == [
        "S"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tables_of_the_pages(monkeypatch):
    """They are those of the results, each of which is on a page."""
    monkeypatch.syspath_prepend(str(benchmarks))
    import pages

    results, shown = pages.results(), set()
    for page in pages.PAGES:
        text = page.read_text()
        assert pages.written(text, results) == text, "python benchmarks --pages"
        shown |= {name for name in pages.TABLES if f"<!-- table: {name} -->\n" in text}
    assert shown == pages.TABLES.keys()


@pytest.mark.long
def test_edits():
    """What an edit reads, writes and takes of memory; it fails beyond its limits."""
    program = str(benchmarks / "editing.py")
    command = [sys.executable, program, "--short"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| lazy |") == done.stdout.count("| whole |") == 8
    assert done.stdout.count("| NumPy |") == 4


@pytest.mark.long
def test_functions():
    """What functions take of disk; it fails beyond its limits."""
    command = [sys.executable, str(benchmarks / "functions.py"), "--short"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| MLP, ") == 2
