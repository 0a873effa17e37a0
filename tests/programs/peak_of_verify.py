"""Peaks of memory of `verify`, in MiB, with little and with much: `PATH`."""

import sys
import tracemalloc

import eqx_ckpt as ec


verify = ec.verify  # It is imported before.
for mebibytes in (4, 256):
    tracemalloc.start()
    assert verify(sys.argv[1], max_bytes=mebibytes * 2**20) == []
    print(tracemalloc.get_traced_memory()[1] / 2**20)
    tracemalloc.stop()
