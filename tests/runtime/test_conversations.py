"""How calls of many processes meet: schedules that are played through in no time."""

import random

import pytest
from support import inside
from support.conversations import Play, World


def play(monkeypatch, seeds, hows=("tag", "gist", "account")):
    for seed in seeds:
        for how in hows:
            for in_step in (True, False, None)[: 3 if how == "tag" else 2]:
                made = Play(seed, how, in_step)
                inside.pass_time_as(monkeypatch, made.world)
                made.run()
                assert not made.faults(), (seed, how, in_step)


def test_schedules(monkeypatch):
    play(monkeypatch, range(3))


@pytest.mark.long
def test_many_schedules(monkeypatch):
    play(monkeypatch, range(3, 4003))
    print("28,000 schedules")


@pytest.mark.parametrize("rank", [1, 2])
def test_a_process_that_was_stopped_hears_what_the_others_said(monkeypatch, rank):
    for seed in range(20):
        world = World(3, random.Random(seed))
        world.stopped = {rank: 1000.0}
        inside.pass_time_as(monkeypatch, world)
        heard: dict[int, bytes] = {}

        def call(own: int, world=world, heard=heard) -> None:
            processes = world.processes("a", "", False, 10.0)
            heard[own] = processes.decide(b"".join, lambda: b"%d" % own)

        world.run(call)
        assert heard == dict.fromkeys(range(3), b"012")
