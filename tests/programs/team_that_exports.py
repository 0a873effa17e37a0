"""Exports shards of arrays that two processes have. Prints the bytes written."""

import numpy as np
from support.member import columns, copies, path, rank, rows, spread

import eqx_ckpt as ec


big = np.arange(4 * 2**20, dtype=np.float32).reshape(2048, 2048)
tree = {
    "rows": spread(big, rows),
    "columns": spread(2 * big, columns),
    "copies": spread(big[:4], copies),
    "host": big[:2],
    "step": np.int32(7),
}
wrote = lambda: int(open("/proc/self/io").read().split("wchar: ")[1].split()[0])
before = wrote()
ec.export_safetensors(
    path / "out", tree, shard_bytes=20 * 2**20, metadata={"format": "pt"}
)
print(wrote() - before)
try:
    other = {**tree, "host": big[: 1 + rank]}
    ec.export_safetensors(path / "bad", other, shard_bytes=99)
except RuntimeError as e:
    assert "disagree" in str(e), e
else:
    raise AssertionError
# One process alone has not all of it.
for alone in ({}, {"processes": "own", "shard_bytes": 99}):
    try:
        ec.export_safetensors(path / "bad", tree, **alone)
    except ValueError as e:
        assert "The leaf `columns` is spread over several processes" in str(e), e
    else:
        raise AssertionError
assert not (path / "bad").exists()
# One that fails leaves what was there.
own = path / f"damaged{rank}"
ec.tree_serialise_leaves(own, {"z": np.arange(99.0)}, processes="own")
bad = ec.open(own)["z"]
data = max((own / "d").rglob("*"), key=lambda x: x.stat().st_size * x.is_file())
data.write_bytes(bytes(data.stat().st_size))
try:
    ec.export_safetensors(path / "out", {**tree, "z": bad}, shard_bytes=20 * 2**20)
except (RuntimeError, FileNotFoundError):
    pass
else:
    raise AssertionError
