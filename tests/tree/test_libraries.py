"""Trees of libraries that come with the tests, saved in one process and loaded in
another. `libraries.py` has those of all libraries, and prints a table."""

import libraries
import pytest
from support.helpers import long


@pytest.mark.parametrize(
    "name, most", [("equinox", 30), *long(("optax", 80), ("nnx", 8))]
)
def test_no_load_of_another_process_is_refused(tmp_path, name, most):
    found = libraries.outcomes(tmp_path, [name], 1)
    wrong = [x for x in found if not x.is_good]
    assert not wrong, libraries.table(found, [name])
    assert len(found) > most
