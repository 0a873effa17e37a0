"""README's table of features is what `python benchmarks --claims` finds."""

import pathlib
import subprocess
import sys

import pytest
from support.helpers import new_orbax


root = pathlib.Path(__file__).parents[2]
readme = (root / "README.md").read_text()
_section = readme.split("## Beside others")[1].split("\n## ")[0]
table = [line for line in _section.splitlines() if line.startswith("|")]

pytestmark = [
    pytest.mark.long,
    new_orbax,
    pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc"),
]


def test_the_table():
    command = [sys.executable, "benchmarks", "--claims"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, *said = done.stdout.split("\n\n")
    assert printed.splitlines() == table
    # What was done is said of each cell.
    _, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    peers = [cell.strip() for cell in table[0].split("|")[2:-1]]
    for (what, *cells), text in zip(rows, said, strict=True):
        title, *lines = text.strip().splitlines()
        assert title == f"{what}:"
        for peer, cell, line in zip(peers, cells, lines, strict=True):
            start = f"  {peer}: {cell}. "
            assert line.startswith(start) and len(line) > len(start) + 10
