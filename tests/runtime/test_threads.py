"""Calls where no thread can be started: they need none. And first calls in many."""

import pytest
from support.helpers import run_program


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
