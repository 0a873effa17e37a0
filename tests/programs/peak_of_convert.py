"""The peak of memory of a conversion, in KiB: `DIRECTORY`."""

import gc
import resource
import sys

import eqx_ckpt as ec


path = sys.argv[1]
# The process is a fork, whose memory is its own only once it is touched.
gc.collect()
ec.convert(f"{path}/small.safetensors", f"{path}/a", durable=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ec.convert(f"{path}/a.safetensors", f"{path}/b", max_bytes=2**25, durable=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
