"""No damage is silent: what is done to the files of a checkpoint is an error that says
where, or it changes nothing that is loaded; and `verify` finds it either way.

`python -m pytest -m long tests/load/test_corruption.py` is the long form: 10,000
flips, and thousands of deletions, truncations and swaps. It prints its figures.
"""

import collections
import json
import pathlib
import random

import pytest
from support.helpers import call_main


# Layout, compression, and how much of a campaign goes to it.
VARIANTS = [
    ("ocdbt", None, 0.35),
    ("zarr", None, 0.35),
    ("ocdbt", "lz4", 0.15),
    ("zarr", "zstd", 0.15),
]


def _run(directory: pathlib.Path, *campaigns: tuple) -> list[collections.Counter]:
    """Campaigns in a process of their own."""
    lines = call_main("support.campaign", str(directory), *campaigns)
    reports = [json.loads(line) for line in lines[-len(campaigns) :]]
    failures = [text for report in reports for text in report["failures"]]
    assert not failures, "\n".join(failures[:20])
    return [
        collections.Counter({tuple(row[:3]): row[3] for row in report["counts"]})
        for report in reports
    ]


def _table(counts: collections.Counter) -> str:
    """What came of flips in each kind of file, and of all else."""
    results = ("detected", "harmless", "of these unnoticed")
    sums = collections.Counter()
    for (what, kind, result), number in counts.items():
        sums[what + (f": {kind}" if what == "flip" else ""), result] += number
    lines = [" " * 30 + "".join(f"{result:>20}" for result in results)]
    for row in sorted({row for row, _ in sums}):
        numbers = "".join(f"{sums[row, result]:20}" for result in results)
        lines.append(f"{row:30}{numbers}")
    return "\n".join(lines)


def test_no_damage_is_silent(tmp_path):
    reports = _run(
        tmp_path,
        *((layout, codec, 0, int(60 * share), 2) for layout, codec, share in VARIANTS),
    )
    for counts in reports:
        assert {what for what, _, _ in counts} == {
            *("flip", "delete", "extend", "truncate", "zeros", "stale"),
            *("swap files", "swap chunks", "swap digests"),
        }
        assert {result for _, _, result in counts} >= {"detected", "harmless"}


@pytest.mark.long
@pytest.mark.parametrize("layout, codec, share", VARIANTS)
def test_no_damage_is_silent_long(tmp_path, layout, codec, share, capsys):
    seed = random.SystemRandom().randrange(2**32)
    flips, each = int(10_000 * share), int(1000 * share)
    (counts,) = _run(tmp_path, (layout, codec, seed, flips, each))
    with capsys.disabled():
        print(f"\n{layout}, {codec}, seed {seed}\n{_table(counts)}")
