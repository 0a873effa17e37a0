"""Two processes save steps of one run, stop together, and restore."""

import os
import signal
import warnings

import jax
import jax.experimental.multihost_utils
import numpy as np
from support.member import columns, path, rank, rows, same, spread

import eqx_ckpt as ec


X = np.arange(64.0).reshape(8, 8)


def tree(step):
    return {"x": spread(X + step, rows), "step": step}


like = {"x": jax.ShapeDtypeStruct(X.shape, np.float32, sharding=columns), "step": 0}
kept = []
with ec.CheckpointManager(
    path,
    every=2,
    every_seconds=1000,
    keep=1,
    signals=[signal.SIGUSR1],
    processes=ec.Together(timeout=60),
) as manager:
    for step in range(1, 9):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        stop = manager.should_stop()
        # The clocks of processes differ: process 0 decides.
        if step == 3 and rank == 0:
            manager._saves._last_begin_time -= 1000
        if step == 2 and rank == 1:
            manager._saves._last_begin_time -= 10000
        if manager.save(step, tree(step), {"loss": 1 / step}, force=stop):
            kept.append(step)
        if stop:
            break
    manager.pin(5)
    manager.wait()
    out, at = manager.restore(like)
    assert at == 5 and same(out["x"], (X + 5).astype("float32"))
    manager.save(6, tree(6), force=True)
    manager.wait()
    jax.experimental.multihost_utils.sync_global_devices("saved")
    if rank == 0:
        file = next((path / "6" / "default").glob("d/*/0"))
        file.write_bytes(bytes(len(file.read_bytes())))
    jax.experimental.multihost_utils.sync_global_devices("broken")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, at = manager.restore(like)
    assert at == 5 and same(out["x"], (X + 5).astype("float32"))
    told = [w for w in caught if "Restored step 5" in str(w.message)]
    assert len(told) == (rank == 0)
    try:
        manager.restore({"x": like["x"], "other": 0})
    except RuntimeError as e:
        assert "fit" in str(e), e
    else:
        raise AssertionError
    # What each sees of the directory may differ.
    try:
        manager.restore(like, 5 + rank)
    except ValueError as e:
        assert f"restores step {5 + rank}" in str(e) and f"{6 - rank}." in str(e), e
    else:
        raise AssertionError
    # Other steps do not meet. That costs this call, and none after it.
    with ec.CheckpointManager(path, processes=ec.Together(timeout=3)) as other:
        try:
            other.save(7 + rank, tree(0))
        except RuntimeError as e:
            assert "3 seconds" in str(e), e
        else:
            raise AssertionError
        other._saves.run_processes.together = ec.Together(timeout=60)
        for step in (20, 21):
            assert other.save(step, tree(step))
        assert other.steps()[-1] in (20, 21)
# What one finds wrong as it begins to save is an error of all, for which none waits.
if rank == 0:
    (path / "eqx_ckpt.history").rename(path / "history")
    (path / "eqx_ckpt.history").symlink_to("history")
other = ec.CheckpointManager(path, processes=ec.Together(timeout=1000))
try:
    other.save(21, tree(21), force=True)
    other.wait()
except (ValueError, RuntimeError) as e:
    assert "`eqx_ckpt.history`" in str(e) and "is a symbolic link" in str(e), e
else:
    raise AssertionError
print(kept)
