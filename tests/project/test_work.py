"""What calls take grows with the tree, and not with its square: see `support.work`."""

import json

import pytest
from support import scripts, work


def _check(count):
    done = scripts.run_module("support.work", count)
    assert done.returncode == 0, done.stderr
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
