"""No damage is silent: what is done to the files of a checkpoint is an error that says
where, or it changes nothing that is loaded; and `verify` finds it either way.

`python -m pytest -m long tests/test_corruption.py` is the long form: 10,000 flips, and
thousands of deletions, truncations and swaps. It prints its figures.
"""

import collections
import json
import pathlib
import random

import pytest
from helpers import run_python


def _run(directory: pathlib.Path, layout: str, seed: int, count: int, each: int):
    """A campaign in a process of its own."""
    here = str(pathlib.Path(__file__).parent)
    directory.mkdir()
    out = run_python(f"""
        import sys
        sys.path.insert(0, {here!r})
        import campaign
        campaign.main({str(directory)!r}, {layout!r}, {seed}, {count}, {each})
    """)
    report = json.loads(out.splitlines()[-1])
    assert not report["failures"], "\n".join(report["failures"][:20])
    counts = collections.Counter()
    for what, kind, result, number in report["counts"]:
        counts[what, kind, result] += number
    return counts


def _table(counts: collections.Counter) -> str:
    rows = sorted({key[:2] for key in counts})
    lines = [f"{'':45} {'detected':>9} {'harmless':>9}"]
    for row in rows:
        a, b = (counts[*row, result] for result in ("detected", "harmless"))
        lines.append(f"{': '.join(row):45} {a:9} {b:9}")
    return "\n".join(lines)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_no_damage_is_silent(tmp_path, layout):
    counts = _run(tmp_path / "a", layout, 0, 100, 3)
    done = {what for what, _, _ in counts}
    assert done == {
        *("flip", "delete", "extend", "truncate", "zeros", "stale"),
        *("swap files", "swap chunks", "swap digests"),
    }
    assert sum(counts.values()) > 120
    assert {result for _, _, result in counts} == {"detected", "harmless"}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_no_damage_is_silent_long(tmp_path, layout, capsys):
    seed = random.SystemRandom().randrange(2**32)
    counts = _run(tmp_path / "a", layout, seed, 5000, 1000)
    with capsys.disabled():
        print(f"\n{layout}, seed {seed}\n{_table(counts)}")
