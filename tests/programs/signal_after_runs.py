"""Two runs that handle SIGTERM end as `END` says; SIGTERM then ends the process."""

import gc
import os
import signal
import sys
import threading
from typing import Any

import eqx_ckpt as ec


end = sys.argv[1]
a, b = [ec.CheckpointManager(name, signals=[signal.SIGTERM]) for name in "ab"]
if end == "in the order of their begin":
    a.__exit__(None, None, None)
    b.__exit__(None, None, None)
elif end == "without `with`":
    del a, b
    gc.collect()
elif end == "in another thread":
    for manager in (a, b):
        thread = threading.Thread(target=manager.__exit__, args=3 * [None])
        thread.start()
        thread.join()
elif end == "below a handler of the program":
    found: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *given: found(*given))
    a.__exit__(None, None, None)
    b.__exit__(None, None, None)
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(1000):
    pass
print("goes on")
