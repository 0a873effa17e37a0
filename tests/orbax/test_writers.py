"""Files for Orbax are added to a checkpoint in a store while others save there, delete
it, and add such files."""

import itertools
import random
import re

import numpy as np
import pytest
from support import turns
from support.helpers import long
from support.stores import StoredFiles
from support.turns import Turn

import eqx_ckpt as ec


_numbers = itertools.count()
_CALLS = {
    "add": ec.write_orbax,
    "save": lambda path: ec.tree_serialise_leaves(path, {"x": np.ones(next(_numbers))}),
    "delete": ec.delete,
}
# The first is paused; the second is made; the third is paused; then all go on.
_SCHEDULES = [
    *(("add", second, "add") for second in _CALLS),
    *(("save", second, "add") for second in ("add", "save")),
    *(("delete", second, "add") for second in ("add", "save")),
    *(("add", "save", third) for third in ("save", "delete")),
]
_LOST = "was (replaced|deleted)|There is no checkpoint"


def _play(calls, at, is_for_orbax):
    """Returns how many calls to the store the first and the last have made."""
    path = f"memory://beside{next(_numbers)}"
    _CALLS["save"](path)
    if is_for_orbax:
        ec.write_orbax(path)
    first, third = (
        Turn(lambda x=x: _CALLS[x](path), n) for x, n in zip(calls[::2], at)
    )
    second = Turn(lambda: _CALLS[calls[1]](path), 0)
    first.go()
    second.end()
    third.go()
    first.end()
    third.end()
    errors = [turn.error for turn in (first, second, third)]
    for error in filter(None, errors):
        assert re.search(_LOST, str(error)), error
    if ec.exists(path):
        assert ec.verify(path) == []
    else:
        assert not {*StoredFiles(path)} and "delete" in calls
    return first.count, third.count


@pytest.mark.parametrize("most", [2, *long(200)])
@pytest.mark.parametrize("calls", _SCHEDULES, ids=" ".join)
def test_three_at_a_time(monkeypatch, calls, most):
    turns.watch(monkeypatch)
    rng = random.Random(str(calls))
    for is_for_orbax in (False, True):
        points = _play(calls, (0, 0), is_for_orbax)
        for _ in range(most):
            at = tuple(rng.randint(1, n) for n in points)
            try:
                _play(calls, at, is_for_orbax)
            except AssertionError as e:
                e.add_note(f"at {at} of {points}, with files: {is_for_orbax}")
                raise
