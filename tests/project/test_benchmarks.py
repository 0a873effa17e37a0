"""The short form of the benchmarks fails where a limit is exceeded, and only there."""

import json
import pathlib
import subprocess
import sys

import pytest
from support.helpers import run_program


benchmarks = pathlib.Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the benchmarks read /proc"
)


def test_limits(tmp_path):
    out = run_program("limits_of_benchmarks", benchmarks, tmp_path)
    kept, exceeded = map(json.loads, out.splitlines())
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
