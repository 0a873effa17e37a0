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


def interrupted(monkeypatch, how, interrupt, go_on):
    """Calls of three rounds, one of which Ctrl-C ends. A process that does not `go_on`
    makes none after an error. Returns how each call has ended, and when, by its name;
    and the answers that nobody will delete."""
    world = World(3, random.Random(interrupt[1]))
    world.interrupt = interrupt
    inside.pass_time_as(monkeypatch, world)
    ends: dict[int, dict[str, tuple[str, float]]] = {i: {} for i in range(3)}

    def call(own: int) -> None:
        # One of them fails before it says a word.
        for name in ["?"] * (own == 1) + ["a", "b", "c"]:
            line, is_tagged = (name, True) if how == "tag" else ("", False)
            processes = world.processes(line, name, is_tagged, 200.0)
            end = "good"
            try:
                with processes.share_errors():
                    if name == "?":
                        raise RuntimeError
                    for i in range(3):
                        is_account = i == 0 and how == "account"
                        processes.round(name.encode(), one, is_account)
            except (RuntimeError, KeyboardInterrupt) as e:
                end = type(e).__name__
            ends[own][name] = end, world.now
            if name != "?" and end != "good" and not go_on:
                return

    world.run(call)
    return ends, world.lost_answers()


@pytest.mark.parametrize("how", ["tag", "account"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_interrupt_at_any_message_is_told_at_once(monkeypatch, rank, how):
    """Nobody waits for a timeout, the last call is good, and nothing is left over."""
    ended = 0
    for number in range(1, 60):
        for when in ("before", "after", "heard"):
            ends, lost = interrupted(monkeypatch, how, (rank, number, when), True)
            last = {i: x["c"] for i, x in ends.items()}
            assert all(t < 100 for _, t in last.values()), (number, when, ends)
            if last[rank][0] == "KeyboardInterrupt":
                break
            good = [end == "good" for end, _ in last.values()]
            assert all(good) and not lost, (number, when, ends, lost)
            ended += any(x["a"][0] != "good" for x in ends.values())
    assert ended > 5


@pytest.mark.parametrize("how", ["tag", "account"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_interrupt_is_told_without_a_later_call(monkeypatch, rank, how):
    """Nobody waits for the process in the call in which it was interrupted."""
    ended = 0
    for number in range(1, 60):
        for when in ("before", "after", "heard"):
            ends, _ = interrupted(monkeypatch, how, (rank, number, when), False)
            name, (end, then) = [*ends[rank].items()][-1]
            if end != "KeyboardInterrupt":
                break
            ended += 1
            # Process 1 makes one call more: the others may have failed by then.
            for other in {0, 2} & {i for i, x in ends.items() if name in x}:
                assert ends[other][name][1] < then + 100, (number, when, ends)
    assert ended > 10


@pytest.mark.parametrize("waiting", [0, 1])
def test_an_error_names_another_call_until_an_answer(monkeypatch, waiting):
    """A process waits for the other in vain in `a`, and later the other for it in `c`:
    at once, or after a call `b` that both make."""
    for between, is_named in ([], True), (["b"], False):
        world = World(2, random.Random(0))
        inside.pass_time_as(monkeypatch, world)
        errors = {}

        def call(own: int, world=world, between=between, errors=errors) -> None:
            if own != waiting:
                world.wait(lambda: "a" in errors, 1000.0)
            for name in ["a"] * (own == waiting) + between + ["c"] * (own != waiting):
                try:
                    world.processes(name, name, True, 60.0).decide(one)
                except RuntimeError as e:
                    errors[name] = str(e)

        world.run(call)
        assert [*errors] == ["a", "c"]
        said = f"Process {waiting} has waited in another call: a."
        assert (said in errors["c"]) is is_named, errors


def test_a_runtime_that_ends_at_any_message(monkeypatch):
    """Each call that does not go well says so, and which call it is."""
    told = set()
    for messages in range(60):
        world = World(3, random.Random(messages))
        world.messages = messages
        inside.pass_time_as(monkeypatch, world)

        def call(own: int, world=world) -> None:
            processes = world.processes("a", "", True, 20.0)
            try:
                with processes.share_errors():
                    for _ in range(3):
                        processes.round(b"", one)
                told.add("good")
            except RuntimeError as e:
                told.add(str(e))

        world.run(call)
    assert told == {"good", "a: JAX's runtime does not answer: gone"}
