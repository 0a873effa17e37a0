"""A save while another one of the process runs: `PATH KIND`."""

import os
import sys
import threading
import time

import numpy as np
import pytest
from support import inside

import eqx_ckpt as ec


path, kind = sys.argv[1:]
parent = os.getpid()
entered = threading.Event()


def note(text):
    with open(f"{path}.turns", "a") as file:
        file.write(f"{text}\n")


def slowly(put):
    def run(*arguments):
        is_first = os.getpid() == parent and not entered.is_set()
        note("first" if is_first else "second")
        if is_first:
            entered.set()
            time.sleep(2)
            note("first")
        return put(*arguments)

    return run


def save(value):
    ec.tree_serialise_leaves(path, {"x": np.full(3, value)})


save(0)
with pytest.MonkeyPatch.context() as patch:
    inside.wrap(patch, "delete what is left", slowly)
    thread = threading.Thread(target=save, args=(1,))
    thread.start()
    entered.wait()
    if kind == "thread":
        save(2)
    elif (child := os.fork()) == 0:
        save(2)
        os._exit(0)
    else:
        os.waitpid(child, 0)
    thread.join()
