"""Prints the bytes that a process reads as lazy leaves and grafts are resharded."""

import jax
import numpy as np
from support.member import columns, copies, path, read, same

import eqx_ckpt as ec


x = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
ckpt = ec.open(path / "c")
lazy = {n: ckpt[n].update(sharding=copies) for n in "vw"}
lazy["slice"] = ckpt["v"][:2].update(sharding=copies)
lazy["double"] = ec.lazy(lambda y: 2 * y, elementwise=True)(ckpt["v"][:2])
like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns) for n in "vw"}
pairs = [(lambda m: m["v"], lambda c: c.v), (lambda m: m["w"], lambda c: c.w)]
calls = [
    lambda: ec.materialise(lazy, reshard="devices"),
    lambda: ec.graft(like, ckpt, pairs, reshard="devices")[0],
]
for call in calls:
    call()  # The first one imports and compiles.
    before = read()
    out = call()
    print(f"read={(read() - before) / x.nbytes};")
    assert same(out["v"], x) and same(out["w"], x + 1)
    assert "slice" not in out or same(out["slice"], x[:2])
    assert np.array_equal(out.get("double", 2 * x[:2]), 2 * x[:2])
