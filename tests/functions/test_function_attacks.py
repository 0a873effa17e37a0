"""Functions that mean harm end in one clear error before they are compiled."""

import shutil

import attacks.functions as harm
import jax.numpy as jnp
import pytest
from support.clock import timed

import eqx_ckpt as ec


pytest.importorskip("flatbuffers")

# Seconds of processor time. Alone on a machine each takes less than 1.
_LIMIT = 4


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "c"
    harm.make(path)
    return path


def test_what_is_attacked_is_good(good, tmp_path):
    shutil.copytree(good, tmp_path / "c")
    harm.Held(tmp_path / "c").write()
    for function in ec.open(tmp_path / "c").functions.values():
        assert function(jnp.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", harm.ATTACKS)
def test_attack(good, tmp_path, name):
    path = tmp_path / "c"
    shutil.copytree(good, path)
    held = harm.Held(path)
    harm.ATTACKS[name](held)
    held.write()

    def use():
        with pytest.raises(ValueError) as caught:
            function = ec.open(path).functions["f"]
            assert len(repr(function)) < 5000
            function.exported
        return caught

    caught, seconds = timed(_LIMIT, use)
    assert seconds <= _LIMIT
    # What JAX does not read has the right digest, so it may be of another release.
    is_unread = "cannot be read by JAX" in str(caught.value)
    assert isinstance(caught.value, ec.DamagedError) or is_unread, caught.value
    assert len(str(caught.value)) < 5000 and "\x1b" not in str(caught.value)
    assert str(path) in str(caught.value)
