"""Asks for all public names in threads at once, and prints the errors."""

import sys
import threading

import eqx_ckpt as ec


sys.setswitchinterval(1e-5)
names, wrong = [*reversed(dir(ec))], []
barrier = threading.Barrier(len(names))


def ask(name):
    barrier.wait()
    try:
        getattr(ec, name)
    except BaseException as e:
        wrong.append(repr(e))


threads = [threading.Thread(target=ask, args=(x,)) for x in names]
for x in threads:
    x.start()
for x in threads:
    x.join()
print(wrong)
