"""What a file costs a reader doubles with the file, at most: for every format, of the
shapes that are worst for one. See `attacks.growth`.
"""

import json

import pytest
from support.helpers import run_python


def _run(scale):
    out = json.loads(run_python(f"from attacks import growth; growth.main({scale})"))
    bad = {name: rest for name, (is_good, *rest) in out.items() if not is_good}
    assert not bad and len(out) > 10, bad


def test_twice_as_much_costs_twice_as_much():
    _run(1)


@pytest.mark.long
def test_so_do_larger_ones():
    _run(8)
