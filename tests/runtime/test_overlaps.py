"""What calls change in the process is as it was when they are over, in any order."""

import pytest
from support import scripts


def _run(tmp_path, seed, count):
    done = scripts.run_module("support.overlaps", tmp_path, seed, count)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]


def test_blocks_that_overlap(tmp_path):
    _run(tmp_path, 0, 15)


@pytest.mark.long
def test_many_blocks_that_overlap(tmp_path):
    _run(tmp_path, 1000, 1500)
