"""The peaks of memory, in MiB, of `to_bytes` and `from_bytes` beyond what they return,
within a `max_bytes` of 16 MiB: as it is, and compressed. The leaf takes 64 MiB. Then
that of an export of 16 MiB which needs all chunks of a compressed leaf again and again:
`PATH`."""

import sys
from typing import Any

import numpy as np
from support.peaks import peak

import eqx_ckpt as ec


data = np.random.default_rng(0).bytes(2**26)
tree = {"w": np.frombuffer(data, np.float32).reshape(64, -1)}
compression: Any
for compression in (None, "lz4"):
    save = lambda tree: ec.to_bytes(tree, compression=compression, max_bytes=2**24)
    small = {"w": tree["w"][:1]}
    ec.from_bytes(save(small), small)
    saving, saved = peak(lambda: save(tree))
    held = bytearray(saved)
    loading, _ = peak(lambda: ec.from_bytes(held, tree, max_bytes=2**24))
    print(saving - len(saved) / 2**20, loading - 64)


def export(path: str, rows: int) -> None:
    ec.tree_serialise_leaves(
        path, tree["w"][:rows].reshape(-1, 2**20), compression="lz4"
    )
    lazy = {"w": ec.open(path)["%root"].T}
    write = ec.export_safetensors
    print(peak(lambda: write(f"{path}.safetensors", lazy, max_bytes=2**24))[0])


export(sys.argv[1], 8)
export(sys.argv[1], 16)
