"""What a file costs a reader doubles with the file, at most: for every format, of the
shapes that are worst for one. See `attacks.growth`.
"""

import json

import pytest
from attacks.growth import GROWTHS
from support.helpers import run_python


# Of some formats.
_some = list({name.partition("_")[0]: name for name in GROWTHS}.values())[::4]


def _run(scale, names):
    out = json.loads(
        run_python(f"from attacks import growth; growth.main({scale}, {names})")
    )
    bad = {name: rest for name, (is_good, *rest) in out.items() if not is_good}
    assert not bad and set(out) == set(names), bad


def test_twice_as_much_costs_twice_as_much():
    _run(1, _some)


@pytest.mark.long
@pytest.mark.parametrize("scale", [1, 8])
def test_so_does_every_kind_and_size(scale):
    _run(scale, list(GROWTHS))
