"""Two processes restore a run whose newest step is deleted, replaced or not readable
once process 0 has opened it, and before process 1 has."""

import shutil

import jax
import numpy as np
import pytest
from support import inside
from support.member import meet, path, rank, rows, same, spread

import eqx_ckpt as ec


X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
root = path / "run"
# Who waits for another in vain waits for longer than the test.
together = ec.Together(timeout=1000)


def tree(step):
    return {"x": spread(X + step, rows), "step": step}


like = {"x": jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows), "step": 0}
with ec.CheckpointManager(root, processes=together) as manager:
    for step in (1, 2, 3, 4):
        manager.save(step, tree(step), own={"at": 10 * step + rank})


def restore(meanwhile, **how):
    """Restores a step. Between the two first opens of it this happens."""
    opened = []

    def make(old):
        def open_path(*args, **kwargs):
            opened.append(args)
            if len(opened) > 1:
                return old(*args, **kwargs)
            if rank == 1:
                meet(f"{meanwhile.__name__} {how}")
                meanwhile()
            found = old(*args, **kwargs)
            if rank == 0:
                meet(f"{meanwhile.__name__} {how}")
            return found

        return open_path

    with pytest.MonkeyPatch.context() as patch:
        inside.wrap(patch, "open a path", make)
        return manager.restore(like, own={"at": 0}, **how)


def delete():
    ec.delete(root / "4" / "default")


def replace():
    shutil.rmtree(root / "3" / "default")
    shutil.copytree(root / "2" / "default", root / "3" / "default")


def fail():
    raise OSError("the disk is away")


# Each looks again, for an older step or what has come to the place of that one.
for meanwhile, wanted in ((delete, 3), (replace, 2)):
    loaded, own, step = restore(meanwhile)
    assert step == 3 and own == {"at": 10 * wanted + rank}, own
    assert loaded["step"] == wanted and same(loaded["x"], X + wanted)
for how in ({}, {"step": 2}):
    try:
        restore(fail, **how)
    except (OSError, RuntimeError) as e:
        assert "the disk is away" in str(e), e
        assert "process 1 has failed: OSError" in str(e) or rank == 1, e
    else:
        raise AssertionError
# One alone waits for nobody.
if rank == 1:
    alone = {"x": X, "step": 0}
    loaded, own, _ = manager.restore(alone, 2, own={"at": 0}, processes="own")
    assert own == {"at": 21} and np.array_equal(loaded["x"], X + 2)
assert manager.restore(like)[1] == 3
