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


def one(words: list[bytes]) -> bytes:
    if len({*words}) > 1:
        raise RuntimeError("the calls differ")
    return words[0]


@pytest.mark.parametrize("how", ["tag", "account"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_at_any_message_is_told_at_once(monkeypatch, rank, how):
    """Calls of three rounds, one of which Ctrl-C ends: nobody waits for a timeout, and
    the last is good."""
    ended = 0
    for number in range(1, 60):
        for when in ("before", "after"):
            world = World(3, random.Random(number))
            world.interrupt = rank, number, when
            inside.pass_time_as(monkeypatch, world)
            ends: dict[int, list[str]] = {i: [] for i in range(3)}

            def call(own: int, world=world, ends=ends) -> None:
                # One of them fails before it says a word.
                for name in ["?"] * (own == 1) + ["a", "b", "c"]:
                    line, is_tagged = (name, True) if how == "tag" else ("", False)
                    processes = world.processes(line, name, is_tagged, 1000.0)
                    try:
                        with processes.share_errors():
                            if name == "?":
                                raise RuntimeError
                            for i in range(3):
                                is_account = i == 0 and how == "account"
                                processes.round(name.encode(), one, is_account)
                        ends[own].append("good")
                    except (RuntimeError, KeyboardInterrupt) as e:
                        ends[own].append(type(e).__name__)

            world.run(call)
            assert world.now < 100, (number, when, ends)
            if ends[rank][-1] == "KeyboardInterrupt":  # It came in the last call.
                break
            assert [x[-1] for x in ends.values()] == ["good"] * 3, (number, when, ends)
            ended += any("good" not in x[:1] for x in ends.values())
    assert ended > 5
