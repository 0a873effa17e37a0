"""Errors of steps that are no integers: `RUN`."""

import sys

import equinox as eqx
import jax.random as jr
import numpy as np

import eqx_ckpt as ec


manager = ec.CheckpointManager(sys.argv[1])
for call in (manager.delete, manager.pin, manager.unpin):
    for step in ("1", 1.0, "../1"):
        try:
            call(step)
        except TypeError as e:
            assert str(e) == f"A step must be an integer, not {step!r}.", e
        else:
            raise AssertionError
try:
    manager.delete(np.array(1))
except ValueError as e:
    assert "pinned" in str(e)
# A tree and a step in each other's place.
tree = {"model": eqx.nn.MLP(2, 2, 4, 2, key=jr.key(0))}
for call, said in (
    (lambda: manager.restore(40, tree), "comes first, and the step after it"),
    (lambda: manager.save(tree, 40), "must be an integer, not {'model': MLP"),
):
    try:
        call()
    except TypeError as e:
        assert said in str(e), e
        assert len(str(e)) < 250 and "\n" not in str(e), e
    else:
        raise AssertionError
print(manager.steps())
