"""Every read of every call that reads fails, with every errno, once and for ever.

What the system refuses is raised as what it is: it is no damage, it changes nothing,
and the next call is right. See `refusing.py` for how, `reading.py` for what is called.
"""

import json
import pathlib
import subprocess
import sys

import pytest
import refusing


_script = str(pathlib.Path(__file__).with_name("reading.py"))
_layouts = pytest.mark.parametrize("layout", ["ocdbt", "zarr", "zip"])


def _sweep(directory, layout, *arguments):
    if not refusing.is_possible():
        pytest.skip("the kernel cannot be asked to refuse reads here")
    errors = ",".join(map(str, refusing.ERRORS))
    done = subprocess.run(
        [sys.executable, _script, str(directory), layout, errors, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    return found["count"]


@_layouts
def test_a_read_that_fails(tmp_path, layout):
    assert _sweep(tmp_path, layout) > 80


@pytest.mark.long
@_layouts
def test_a_read_that_fails_in_every_way(tmp_path, layout):
    print(layout, _sweep(tmp_path, layout, "long"), "refused reads")
