"""Whatever line of the package Ctrl-C comes at, nothing is lost and nothing stays."""

import pytest
from support import interrupts, scripts
from support.helpers import long


def _run(tmp_path, most, *names):
    done = scripts.run_module("support.interrupts", tmp_path, most, *names)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


_SOME = ["save", "save zarr", "save zip", "save later", "manage", "manage a kept state"]


@pytest.mark.parametrize("names", [_SOME, *long([*interrupts.CALLS])])
def test_interrupted_at_some_lines(tmp_path, names):
    _run(tmp_path, 1, *names)


@pytest.mark.long
@pytest.mark.parametrize("name", interrupts.CALLS)
def test_interrupted_at_every_line(tmp_path, name):
    _run(tmp_path, 0, name)


# Those that wait for locks, for events and for threads.
@pytest.mark.parametrize("count", [10, *long(300)])
def test_interrupted_at_any_moment(tmp_path, count):
    names = ["read", "read zip", "save later", "save zarr", "manage", "merge"]
    _run(tmp_path, f"moments:{count}", *names)
