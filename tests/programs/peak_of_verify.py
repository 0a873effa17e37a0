"""Peaks of memory of `verify`, in MiB, with little and with much: `PATH`."""

import sys
import tracemalloc

import eqx_ckpt as ec


for mebibytes in (4, 256):
    tracemalloc.start()
    assert ec.verify(sys.argv[1], max_bytes=mebibytes * 2**20) == []
    print(tracemalloc.get_traced_memory()[1] / 2**20)
    tracemalloc.stop()
