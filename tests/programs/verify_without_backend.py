"""`verify` starts no backend of JAX, and imports no tqdm: `DIRECTORY`."""

import sys

from jax._src import xla_bridge

import eqx_ckpt as ec


for layout in ("ocdbt", "zarr"):
    assert ec.verify(sys.argv[1] + "/" + layout) == []
assert not xla_bridge.backends_are_initialized()
assert "tqdm" not in sys.modules
