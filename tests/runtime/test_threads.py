"""Calls where no thread can be started: they need none. And first calls in many."""

import faulthandler
import signal
import sys
import threading

import numpy as np
import pytest
from support import scripts
from support.helpers import run_program

import eqx_ckpt as ec


_WHEN = ["as the process ends", "after the main thread", "at the limit of threads"]


@pytest.mark.parametrize("when", _WHEN)
def test_calls_without_new_threads(tmp_path, monkeypatch, when):
    monkeypatch.chdir(tmp_path)
    assert run_program("calls_without_threads", when).split("\n")[-2] == "all"


def test_all_threads_that_are_first_have_one_memory():
    run_program("first_calls_in_threads")


def test_interrupted_as_a_thread_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_program("interrupted_as_a_thread_starts")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize("call", ["verify", "load", "save"])
def test_nothing_waits_for_ever_at_a_limit_of_memory(tmp_path, call):
    """Where TensorStore cannot start its threads, it never does what it was given."""
    tree = {name: np.ones(2**22, np.float32) for name in "ab"}
    path = tmp_path / "x"
    ec.tree_serialise_leaves(path, tree, compression="lz4", chunks=2**20)
    program = scripts.program("call_at_a_limit_of_memory")
    with scripts.start(program, call, path, 20) as script:
        # The C++ in it may end the process. That is no waiting.
        assert script.communicate(timeout=120).returncode != -signal.SIGKILL


def test_threads_for_which_there_is_no_memory(tmp_path, monkeypatch):
    """`Thread.start` raises that too: the threads after it start all the same."""
    tree = {str(i): np.full(2**20, i) for i in range(16)}
    start, started = threading.Thread.start, []

    def refuse_the_first(thread):
        started.append(thread)
        if len(started) == 1:
            raise MemoryError
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_first)
    faulthandler.dump_traceback_later(60, exit=True)  # Nothing else would end a hang.
    try:
        ec.tree_serialise_leaves(tmp_path, tree, layout="zarr", durable=False)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert len(started) > 1 and ec.verify(tmp_path) == []
