"""What calls take grows with the tree, and not with its square: see `support.work`."""

import json
import subprocess
import sys

import pytest
from support import work


def _check(count):
    command = [sys.executable, "-m", "support.work", str(count)]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, _, _ in rows} == set(work.CALLS)
    assert not [row for row in rows if row[2] > work.MOST * row[1]]
    return rows


@pytest.mark.long
def test_four_times_the_leaves():
    _check(60)


@pytest.mark.long
def test_up_to_100_000_leaves():
    rows = _check(12_500)
    print(f"{len(rows)} calls with 25,000 and 100,000 leaves")
    for name, _, seconds in rows:
        print(f"  {name}: {seconds:.1f} s")
