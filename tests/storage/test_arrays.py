"""The memory that leaves are read into."""

import ml_dtypes
import numpy as np
import pytest
from support.helpers import assert_alike

import eqx_ckpt as ec
from eqx_ckpt._storage import _arrays


def _refuse(size):
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("size", [2**22 - 1, 2**22, 2**22 + 64])
@pytest.mark.parametrize("make", [_arrays._map, _refuse])
def test_memory_for_jax(monkeypatch, size, make):
    monkeypatch.setattr(_arrays, "_map", make)
    made = _arrays.aligned((size,), np.dtype(np.int8))
    assert made.ctypes.data % 64 == 0 and made.nbytes == size
    made[:] = 1
    assert made.flags.writeable and made.sum() == size


@pytest.mark.parametrize("make", [_arrays._map, _refuse])
def test_what_is_read_has_memory_of_its_own(tmp_path, monkeypatch, make):
    monkeypatch.setattr(_arrays, "_MAPPED", 1)
    monkeypatch.setattr(_arrays, "_map", make)
    tree = {
        "half": np.arange(40_000).astype(ml_dtypes.bfloat16).reshape(200, 200),
        "flags": np.arange(70_001) % 3 == 0,
    }
    for codec in (None, "lz4"):
        ec.tree_serialise_leaves(tmp_path, tree, compression=codec, chunks=40_000)
        got = ec.tree_deserialise_leaves(tmp_path, tree)
        assert_alike(got, tree)
        got["half"][:] = 0  # It is the caller's.
        assert_alike(ec.open(tmp_path)["half"].read(), tree["half"])


def test_too_much_memory_is_an_error():
    with pytest.raises((MemoryError, ValueError)):
        _arrays.aligned((2**62,), np.dtype(np.float32))
