"""Errors of arguments of wrong types."""

import fractions

import eqx_ckpt as ec


for call in (
    lambda: ec.register_leaf(fractions.Fraction(1), str, str),
    lambda: ec.register_leaf(fractions.Fraction, None, str),
    lambda: ec.from_state_dict([1, 2], {}),
    lambda: ec.CheckpointManager("runs", best="loss"),
    lambda: ec.CheckpointManager("runs", best=("loss",)),
    lambda: ec.CheckpointManager("runs", keep=2.5),
    lambda: ec.CheckpointManager("runs").save(1, {"a": 1}, metadata=[1]),
    lambda: ec.CheckpointManager("runs").save(1.0, {"a": 1}),
):
    try:
        call()
    except (TypeError, ValueError) as e:
        print(type(e).__name__, e)
