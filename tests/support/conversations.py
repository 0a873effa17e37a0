"""Processes that talk as those of a run do, in one process and in a time of its own.

`World` runs a function for each of them, one at a time, and changes from one to another
at every message, as a random number says: what it finds once it finds again.
"""

import math
import random
import threading
from collections.abc import Callable
from typing import Any

from eqx_ckpt._kernel._runtime import _messages
from eqx_ckpt._kernel._runtime._conversation import conversation, Processes
from eqx_ckpt._kernel._runtime._messages import Channel


class _Process:
    def __init__(self, rank: int):
        self.rank = rank
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.until = 0.0
        self.is_over = False
        self.sent = 0
        self.book = _messages.CallBook()


class World:
    """The processes, their key-value store, which is the client of each, and the time,
    which passes when all of them wait."""

    def __init__(self, size: int, rng: random.Random):
        self.own = [_Process(rank) for rank in range(size)]
        # For how long the next message finds a process stopped, as by SIGSTOP.
        self.stopped: dict[int, float] = {}
        # Which message of which process Ctrl-C comes at: before it is sent, after, or
        # as the answer to it is heard.
        self.interrupt: tuple[int, int, str] | None = None
        # How many messages the store takes before it answers nobody any more.
        self.messages = math.inf
        self.rng = rng
        self.now = 0.0
        self.store: dict[str, bytes] = {}
        self._local = threading.local()
        self._back = threading.Semaphore(0)

    def run(self, of: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def start(process: _Process) -> None:
            self._local.process = process
            process.turn.acquire()
            try:
                of(process.rank)
            except BaseException as e:
                errors.append(e)
            process.is_over = True
            self._back.release()

        threads = [threading.Thread(target=start, args=[p]) for p in self.own]
        for thread in threads:
            thread.start()
        while left := [p for p in self.own if not p.is_over]:
            able = [p for p in left if p.until <= self.now or p.ready()]
            if not able:
                self.now = min(p.until for p in left)
                continue
            self.rng.choice(able).turn.release()
            self._back.acquire()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        process = self._local.process
        process.ready, process.until = ready, self.now + seconds
        self._back.release()
        process.turn.acquire()

    def processes(
        self, line: str, gist: str, tagged: bool, timeout: float
    ) -> Processes:
        process = self._local.process
        count, index = len(self.own), process.rank
        channel = Channel(index, count, line, line, timeout, self, process.book)
        return conversation(line, gist, tagged, channel)

    def lost_answers(self) -> list[str]:
        """The first answers and the ends that process 0 will never delete."""
        book = self.own[0].book
        known = [*book.old, *(x for line in book.lines.values() for x in line.ended)]
        answers = {key for key in self.store if key.endswith("/0/answer")}
        return sorted(answers - {f"{key}/0/answer" for key in known})

    # ---- As the module `time`.

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        seconds += self.stopped.pop(self._local.process.rank, 0)
        self.wait(lambda: False, seconds)

    # ---- As the client of JAX's runtime.

    def _pass(self) -> bool:
        """Lets others go first. Threads that say that a process lives say nothing."""
        if not hasattr(self._local, "process"):
            return False
        self.wait(lambda: True, 0)
        self._local.process.sent += 1
        self._interrupt("before")
        self._end_if_used_up()
        return True

    def _end_if_used_up(self) -> None:
        self.messages -= 1
        if self.messages < 0:
            raise ConnectionError("gone")

    def _interrupt(self, when: str) -> None:
        process = self._local.process
        if self.interrupt == (process.rank, process.sent, when):
            raise KeyboardInterrupt

    def key_value_set_bytes(self, key: str, value: bytes, again: bool = False) -> None:
        if self._pass():
            if key in self.store and not again:
                raise ValueError(f"{key} is there")
            self.store[key] = value
            self._interrupt("after")

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        if not self._pass():
            return []
        return [(k, v) for k, v in self.store.items() if k.startswith(key)]

    def key_value_try_get_bytes(self, key: str) -> bytes:
        self._pass()
        return self.store[key]

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        if (seconds := self.stopped.pop(self._local.process.rank, 0)) > 0:
            self.wait(lambda: False, seconds)
            raise TimeoutError(key)
        self.wait(lambda: key in self.store, milliseconds / 1000)
        self._end_if_used_up()
        if key not in self.store:
            raise TimeoutError(key)
        self._interrupt("heard")
        return self.store[key]

    def key_value_delete(self, key: str) -> None:
        if self._pass():
            for k in list(self.store):
                if k == key or k.startswith(key.rstrip("/") + "/"):
                    del self.store[k]
            self._interrupt("after")


def _differ(words: list[bytes]) -> bytes:
    raise RuntimeError("the trees differ")


class Call:
    """What one process does at one place of the program that all run."""

    def __init__(self, what: str, delay: float, tree: int):
        self.what, self.delay, self.tree = what, delay, tree


class Play:
    """A program of calls that some processes skip, fail, make late, or with another
    tree; and then of good ones to each path, all of which but some `spare` ones have to
    go well. `how` says what tells calls apart: "tag", "gist" (plain numbers in the
    tree), or "account" (what is compared). All wait for all before each call if
    `in_step`, before the good ones if not, or never."""

    timeout = 10.0

    def __init__(self, seed: int, how: str, in_step: bool | None):
        self.rng = rng = random.Random(seed)
        self.how, self.in_step = how, in_step
        size = rng.choice([2, 2, 3, 4])
        self.world = World(size, rng)
        self.paths = ["a", "b"][: rng.choice([1, 2])]
        self.bad = rng.randrange(1, 6)
        self.program = [
            (rng.choice(self.paths), [self._call() for _ in range(size)])
            for _ in range(self.bad)
        ]
        # What fails before it has an account cannot be told from what comes next: that
        # may cost some more calls of a path.
        self.spare = 4 if how == "account" else 0
        if in_step is None:
            # The good calls begin while others are still late, or wait, in bad ones.
            rows = zip(*(calls for _, calls in self.program))
            latest = max(sum(call.delay for call in row) for row in rows)
            self.spare = 2 + self.bad + math.ceil(latest / self.timeout)
        for _ in range(max(10, self.spare + 2)):
            for path in self.paths:
                calls = [Call("make", rng.random(), 0) for _ in range(size)]
                self.program.append((path, calls))
        self.over = [0] * size
        self.saved: dict[tuple[str, Any], list[int]] = {}
        self.ok: dict[tuple[str, Any], set[int]] = {}
        self.done = [[False] * size for _ in self.program]
        self.errors: list[tuple[int, int, str]] = []

    def _call(self) -> Call:
        rng, late = self.rng, [0, 0, 0, 0, 5, 15, 40]
        what = rng.choice(["make"] * 6 + ["skip", "skip", "plan", "write"])
        return Call(what, rng.choice(late) * rng.random(), rng.choice([0] * 6 + [1]))

    def run(self) -> "Play":
        self.world.run(self._process)
        return self

    def _process(self, rank: int) -> None:
        for number, (path, calls) in enumerate(self.program):
            call = calls[rank]
            if self.in_step or (self.in_step is False and number == self.bad):
                # As the collectives of a training step: all wait for all.
                self.over[rank] = number
                self.world.wait(lambda: min(self.over) >= number, 10**6)
            self.world.sleep(call.delay)
            if call.what == "skip":
                continue
            try:
                self._save(rank, number, path, call)
                self.done[number][rank] = True
            except (RuntimeError, OSError) as e:
                self.errors.append((number, rank, str(e)))
        self.over[rank] = len(self.program)

    def _save(self, rank: int, number: int, path: str, call: Call) -> None:
        """As `_serialise.write` does."""
        line = f"{path}{number if self.how == 'tag' else ''}"
        gist = f"{number}-{call.tree}" if self.how == "gist" else ""
        processes: Any = self.world.processes(
            line, gist, self.how == "tag", self.timeout
        )
        account = f"{number if self.how in ('gist', 'account') else ''}-{call.tree}"
        with processes.share_errors():
            if call.what == "plan":
                raise OSError("bad tree")
        with processes.share_errors():
            same = lambda accounts: b"+" if len(set(accounts)) == 1 else b""
            if not processes.round(account.encode(), same, is_account=True):
                processes.round(choose=_differ)
            if call.what == "write":
                raise OSError("disk full")
            self.world.sleep(self.rng.random())

            def save(words: list[bytes]) -> bytes:
                numbers = [int(word) for word in words]
                self.saved[line, processes.channel.number] = numbers
                return b""

            processes.round(b"%d" % number, save)
        self.ok.setdefault((line, processes.channel.number), set()).add(rank)

    def faults(self) -> list[str]:
        """What ought not to be."""
        out = []
        for at, numbers in self.saved.items():
            if len(set(numbers)) > 1:
                out.append(f"{at} is of {numbers}")
        for at, ranks in self.ok.items():
            if len(ranks) < len(self.world.own):
                out.append(f"{at} was good only for {ranks}")
        spare = self.spare * len(self.paths)
        for number, good in enumerate(self.done[self.bad :]):
            if not all(good) and number >= spare:
                out.append(f"good call {number} failed: {good}")
        return out
