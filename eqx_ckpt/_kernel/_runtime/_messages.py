"""The messages that the processes of a run exchange in one call.

They go through the key-value store of JAX's distributed runtime. `_conversation` and
`_meeting` say what processes tell each other; here are the keys that they use, and how
long one waits for them. Lines, numbers, signs and ends are explained in `_meeting`:
here are their encodings, and this process's record of them.
"""

import collections
import contextlib
import dataclasses
import itertools as it
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import _log, _threads


# Seconds between looks at who has arrived: few at first, as most arrive together.
_LOOK_SECONDS = (0.001, 0.1)
# Seconds after which those that have not come are named in the log; then each time
# after as many again as have passed.
_LATE_SECONDS = 10.0
# The most seconds of one wait in the runtime, in which no signal is handled.
_SLICE_SECONDS = 5.0


def list_text(indices: Collection[int]) -> str:
    """Numbers of processes, or the first 20 of them, as text."""
    some = sorted(indices)
    return ", ".join(map(str, some[:20])) + (" and more" if len(some) > 20 else "")


# Words of processes, by their numbers.
Words = dict[int, bytes]
# The first byte of all that is said: a word, or an error.
WORD, ERROR = b"+", b"-"


class Heard(NamedTuple):
    """The words of a round by now, and notes of processes that have gone."""

    said: Words
    gone: Words


class LifeSign(NamedTuple):
    """The last sign of life of a process, and when it was seen."""

    word: bytes
    when: float


class PeerError(Exception):
    """An error of a conversation: that of a peer, silence, or JAX's runtime. `silent`:
    the processes that did not come."""

    def __init__(self, text: str, silent: Collection[int] = ()):
        super().__init__(text)
        self.silent = list(silent)


class ToldError(PeerError):
    """An error that process 0 has told all: nobody tells it again."""


def _unanswered(error: Exception) -> PeerError:
    return PeerError(f"JAX's runtime does not answer: {error}")


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """**Raises:** `PeerError` for an error of JAX's runtime, which is asked inside."""
    try:
        yield
    except Exception as e:
        raise _unanswered(e) from e


class CallSign(NamedTuple):
    """The sign by which a call is told from others that it meets."""

    gist: str
    account: str | None = None

    def is_like(self, other: "CallSign") -> bool:
        one, two = self.account, other.account
        is_unknown = one is None or two is None
        return self.gist == other.gist and (is_unknown or one == two)


class SignedWord(NamedTuple):
    """A word or an error, as `kind` says, with the sign of its call: as it is said in
    the first round."""

    kind: bytes
    sign: CallSign
    word: bytes

    def encode(self) -> bytes:
        return self.kind + json.dumps(self.sign).encode() + b"\n" + self.word

    @classmethod
    def decode(cls, value: bytes) -> "SignedWord":
        head, _, word = value[1:].partition(b"\n")
        return cls(value[:1], CallSign(*json.loads(head)), word)


class CallEnd(NamedTuple):
    """The end of a number without an answer: an error, or "", and the signs of the
    calls that it is for. `silent`: the processes that had not come.
    `is_vague`: whether the call of process 0 is."""

    text: str
    signs: Sequence[CallSign]
    silent: Sequence[int] = ()
    is_vague: bool = False

    @classmethod
    def for_nobody(cls) -> "CallEnd":
        """The end of a number at which calls have not met: all go on to the next."""
        return cls("", [])

    def encode(self) -> bytes:
        return ERROR + json.dumps(self).encode()

    @classmethod
    def decode(cls, answer: bytes) -> "CallEnd":
        text, signs, silent, is_vague = json.loads(answer[1:])
        return cls(text, [CallSign(*sign) for sign in signs], silent, is_vague)


def warner(where: str) -> Callable[[Collection[int]], None]:
    """A function that logs the processes for which a round has waited long."""
    since, said = time.monotonic(), 0.0

    def warn(missing: Collection[int]) -> None:
        nonlocal said
        passed = time.monotonic() - since
        if passed >= max(_LATE_SECONDS, 2 * said):
            said = passed
            text = (
                f"{where} has waited {passed:.0f} s for processes {list_text(missing)}"
            )
            _log.say(_log.WARNING, text, seconds=passed)

    return warn


@dataclasses.dataclass(slots=True)
class CallLine:
    """This process's record of the calls of one kind, path and tag. It is never dropped
    (a later call would begin at a number that is used), and a run may have millions:
    so it is small."""

    numbers: Iterator[int] = dataclasses.field(default_factory=it.count)
    # Of process 0: the sign of its call before; the signs of the last calls that met
    # and differed; and the numbers that were ended since the last answer.
    last: CallSign | None = None
    apart: tuple[CallSign, ...] = ()
    ended: tuple[str, ...] = ()


class CallBook:
    """A process's record of all lines, of when old keys may be deleted, and of the line
    that the others are shown as the one in which it waits."""

    def __init__(self) -> None:
        self.lines: dict[str, CallLine] = collections.defaultdict(CallLine)
        self.old: dict[str, float] = {}
        self.shown: str | None = None

    @_asking()
    def sweep(self, client: Any) -> None:
        """Deletes old keys whose time has come."""
        for key, end in list(self.old.items()):
            if end <= time.monotonic() and self.old.pop(key, None) is not None:
                client.key_value_delete(f"{key}/")


_book = CallBook()


@dataclasses.dataclass
class Channel:
    """The messages of process `index` of `count` in one call: in the line `key`, which
    `where` tells people of, under its `number` there, in one round after the other. In
    process 0 the thread of `begin_beats` looks too: `seen` and `_awake` are changed in
    one step each."""

    index: int
    count: int
    key: str
    where: str
    timeout: int | float
    client: Any
    book: CallBook = _book
    round: int = 0
    # When this round began, in seconds of `now`.
    since: float = 0.0
    # The last sign of life of each process.
    seen: dict[int, LifeSign] = dataclasses.field(default_factory=dict)
    # The numbers that the call has had. The last is its own.
    _numbers: list[int] = dataclasses.field(default_factory=list)
    _over: _threads.Event | None = None
    # Seconds awake, and when that was looked at last (`inf`: never).
    _awake: tuple[float, float] = (0.0, math.inf)

    @property
    def number(self) -> int | None:
        """The number of the call in its line; None before its first word."""
        return self._numbers[-1] if self._numbers else None

    def now(self) -> float:
        """Seconds that this process has been awake in this call. Time in which it was
        stopped does not count, as it could not hear the others. Call it several times
        in each `timeout`."""
        passed, last = self._awake
        now = time.monotonic()
        passed += min(max(0.0, now - last), self.timeout / 3)
        self._awake = passed, now
        return passed

    @property
    def line(self) -> CallLine:
        return self.book.lines[self.key]

    @property
    def at(self) -> str:
        return f"{self.key}/{self.number}"

    def take_number(self) -> None:
        # One step, in which no Ctrl-C is handled: the number is taken, or it is not.
        self._numbers.extend(it.islice(self.line.numbers, 1))

    def next_round(self) -> None:
        self.round += 1
        self.since = self.now()

    @_asking()
    def say(self, word: bytes) -> None:
        """Says the word of this process in this round."""
        key = f"{self.at}/{self.round}/words/{self.index}"
        self.client.key_value_set_bytes(key, word, True)

    @_asking()
    def answer(self, answer: bytes) -> None:
        """Gives the answer of process 0 to all, which ends the round.

        **Raises:** also if the round has an answer.
        """
        self.client.key_value_delete(f"{self.at}/{self.round}/words/")
        key = f"{self.at}/{self.round}/answer"
        self.client.key_value_set_bytes(key, answer)
        self._say_where(is_over=True)

    @_asking()
    def close(self, end: CallEnd) -> None:
        """Ends the number before its first answer. **Raises:** as `answer`."""
        self.line.ended += (self.at,)  # First: Ctrl-C may come once it is closed.
        self.client.key_value_set_bytes(f"{self.at}/0/answer", end.encode())

    def forget_ends(self) -> None:
        """Forgets the ends of numbers, once a later one is answered."""
        ended, self.line.ended = self.line.ended, ()
        for key in ended:
            self.forget(key)

    def forget(self, key: str) -> None:
        """Lets a key be deleted once nobody waits for it any more."""
        self.book.old.pop(key, None)
        self.book.old[key] = time.monotonic() + 3 * self.timeout

    def leave(self, said: bytes) -> None:
        """Says that this process waits no longer for an answer to what it `said`."""
        with contextlib.suppress(Exception):
            self.client.key_value_set_bytes(f"{self.at}/gone/{self.index}", said, True)

    def hear(self) -> bytes:
        """The answer of process 0. **Raises:** if that is silent for too long."""
        key = f"{self.at}/{self.round}/answer"
        start = self.now()
        wait = min(self.timeout / 3, _SLICE_SECONDS)
        while True:
            before = time.monotonic()
            try:
                got = self.client.blocking_key_value_get_bytes(key, round(1000 * wait))
            except Exception as e:
                # That of a timeout comes after all of the wait.
                if time.monotonic() - before < wait / 2:
                    raise _unanswered(e) from e
                self._say_where()
                self.look()
                if self.now() - self._last_sign(0, start) > self.timeout:
                    raise PeerError(
                        f"process 0 of {self.count} has been silent for "
                        f"{self.timeout:g} seconds. It may have died, be busy for "
                        "longer than `timeout`, or never have made this call."
                        + self.elsewhere([0])
                    )
                continue
            self._say_where(is_over=True)
            return got

    def answered(self) -> bytes | None:
        """The answer of process 0, if it is there already."""
        with contextlib.suppress(Exception):  # JAX raises one where there is none.
            return self.client.key_value_try_get_bytes(f"{self.at}/{self.round}/answer")
        return None

    def missing(self, words: Words) -> list[int]:
        """The processes that have said no word."""
        return [index for index in range(self.count) if index not in words]

    def looks(self, words: Words) -> Iterator[Heard]:
        """Looks again and again, less often with time, until all have said their word:
        the caller adds what it has heard to the `words`."""
        start, wait, warn = time.monotonic(), _LOOK_SECONDS[0], warner(self.where)
        while True:
            yield self.look()
            if not (missing := self.missing(words)):
                return
            warn(missing)
            if time.monotonic() - start > min(self.timeout / 3, _SLICE_SECONDS):
                self._say_where()
            time.sleep(wait)
            wait = min(2 * wait, _LOOK_SECONDS[1])

    def check_alive(self, indices: Iterable[int]) -> None:
        """**Raises:** if one of these has given no sign of life for `timeout`."""
        earliest = self.now() - self.timeout
        silent = [i for i in indices if self._last_sign(i, self.since) < earliest]
        if silent:
            raise PeerError(
                f"of {self.count} processes these have been silent for "
                f"{self.timeout:g} seconds: {list_text(silent)}. They may have died."
            )

    def _last_sign(self, index: int, start: float) -> float:
        """When a process gave its last sign of life; or `start`, if that is later."""
        sign = self.seen.get(index)
        return start if sign is None else max(start, sign.when)

    @_asking()
    def look(self) -> Heard:
        """What was said in this round by now. Signs of life go into `seen`."""
        found: dict[str, Words] = {"words": {}, "gone": {}, "alive": {}}
        for key, value in self.client.key_value_dir_get_bytes(f"{self.at}/"):
            *_, name, kind, index = key.split("/")
            if kind in found and (kind != "words" or name == str(self.round)):
                found[kind][int(index)] = value
        for index, value in found["alive"].items():
            if index not in self.seen or self.seen[index].word != value:
                self.seen[index] = LifeSign(value, self.now())
        return Heard(found["words"], found["gone"])

    def begin_beats(self) -> None:
        """Tells the others from now on, from a thread, that this process is at work:
        until `end_beats`. In process 0 the thread also sees when they do."""
        if self._over is not None:
            return
        over = self._over = _threads.Event()

        def beat() -> None:
            for count in it.count():
                if over.wait(self.timeout / 10):
                    return
                # Without the runtime, whoever waits will find that out.
                with contextlib.suppress(Exception):
                    self.client.key_value_set_bytes(
                        f"{self.at}/alive/{self.index}", b"%d" % count, True
                    )
                    if self.index == 0:
                        self.look()

        _threads.Worker(beat, "eqx_ckpt alive", daemon=True).start()

    def end_beats(self) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None

    def _say_where(self, is_over: bool = False) -> None:
        """Shows the others in which call this process waits for long. After an error
        that stays until the next answer, as the others may wait for longer."""
        shown = None if is_over else self.key
        if self.book.shown == shown:
            return
        self.book.shown = shown
        key = f"eqx_ckpt/waits/{self.index}"
        with contextlib.suppress(Exception):
            if is_over:
                self.client.key_value_delete(key)
            else:
                said = json.dumps([self.key, self.where]).encode()
                self.client.key_value_set_bytes(key, said, True)

    def elsewhere(self, indices: Collection[int]) -> str:
        """Names the other call in which one of these processes waits, or waited last: a
        sentence, or nothing."""
        with contextlib.suppress(Exception):
            for key, value in self.client.key_value_dir_get_bytes("eqx_ckpt/waits/"):
                index = int(key.rpartition("/")[2])
                line, where = json.loads(value)
                if index in indices and line != self.key:
                    return f" Process {index} has waited in another call: {where}."
        return ""
