"""How calls of many processes meet: schedules that are played through in no time."""

import pytest
from support import inside
from support.conversations import Play


def play(monkeypatch, seeds, hows=("tag", "mark", "account")):
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
