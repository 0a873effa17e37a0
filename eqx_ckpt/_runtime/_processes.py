"""The processes of one run, and what they tell each other.

They talk through the key-value store of JAX's distributed runtime, which all of them
are connected to. Every call that they make together is a conversation of its own, in
rounds: all give process 0 a word, and it answers all. So whatever goes wrong in one of
them is known to all at the end of the round.

**How calls meet.** A *line* is what calls have in common that may meet: their kind
(save, load, ...), their path, and their tag. In each line every process numbers its
calls: 0, 1, 2. Those with one number meet, and process 0 closes the number with the
answer of the first round. A process that skips a call, fails before it speaks, or gives
up waiting, would be apart from the others from then on; these rules bring it back:

1. A process uses a number once. It says one thing there: its word, or that it has
   failed; and, if it gives up, that it is gone.
2. Process 0 closes a number for all with an answer, or with an *end*: an error, and the
   *signs* of the calls that the error is for. Ends stay until a later number of the
   line has been answered.
3. Whoever finds an end that is for a call like its own raises the error. Else it goes
   on to the next number with the same call.
4. Process 0 takes for its own call only failures and departures of calls like its own.
   At others it ends the number for nobody, and goes on to the next one.

So who is behind passes all ends at once, and who is ahead is found by process 0, which
passes what it has left: they always come to one number. What follows:

- Calls of different lines are never paired.
- An answer is given to calls of all processes, each of which takes it once.
- Who comes too late for a call has its error at once, and the next call is met.

**Signs** tell apart calls of one line that has no tag: they have a digest of the plain
numbers and the metadata that are saved, and, once it is known, of all that has to be
the same in all processes (see `_accord`). Where the signs of a line do not change from
call to call, a late call is the same as the next one; it is then taken for that, and
nobody can tell whether it was.

**Silence.** Who works says every now and then that it is alive, from a thread: so
`timeout` counts from the last sign of life, and an hour of writing is no silence. Who
has not come to a conversation shows none in it.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools as it
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from jax._src import distributed


# Seconds. JAX ends all processes 100 seconds after one has died: see docs/processes.md.
TIMEOUT = 80
# Seconds between looks at who has arrived: few at first, as most arrive together.
_LOOK = (0.001, 0.1)
# So many calls may a process be behind, and still be found to be.
_APART = 32
# The most seconds of one wait in the runtime, in which no signal is handled.
_SLICE = 5.0


class Sign(NamedTuple):
    """What a call shows of itself to the calls that it meets."""

    mark: str
    account: str | None = None

    def is_like(self, other: "Sign") -> bool:
        accounts = self.account, other.account
        return self.mark == other.mark and (None in accounts or len({*accounts}) == 1)


class _End(NamedTuple):
    """Why a number is closed without an answer: for calls with these signs."""

    text: str
    signs: list[Sign]
    silent: list[int] = []  # those who did not come
    is_vague: bool = False  # the call before looked the same

    def is_for(self, rank: int, sign: Sign) -> bool:
        if self.is_vague and rank in self.silent:
            return False
        return any(sign.is_like(other) for other in self.signs)

    def encode(self) -> bytes:
        return b"-" + json.dumps(self).encode()

    @staticmethod
    def decode(word: bytes) -> "_End":
        text, signs, silent, is_vague = json.loads(word[1:])
        return _End(text, [Sign(*sign) for sign in signs], silent, is_vague)


@dataclasses.dataclass
class Line:
    """What this process knows of the calls of one kind, path and tag."""

    next: int = 0
    # Of process 0: the sign of its call before; those of calls that differed; and the
    # numbers that were ended since the last answer.
    last: Sign | None = None
    apart: list[Sign] = dataclasses.field(default_factory=list)
    ended: list[str] = dataclasses.field(default_factory=list)


class Book:
    """What a process knows of all lines, and when old keys may be deleted."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = collections.defaultdict(Line)
        self.old: dict[str, float] = {}
        self.lock = threading.Lock()

    def sweep(self, client: Any) -> None:
        for key, end in list(self.old.items()):
            if end > time.monotonic():
                break
            if self.old.pop(key, None) is not None:
                client.key_value_delete(f"{key}/")


_book = Book()


@dataclasses.dataclass
class Team:
    """`size` processes, of which this is number `rank`, in a round of one call: of
    what they do, `what` and `where` tell people, and `key` is the line."""

    rank: int
    size: int
    what: str = ""
    where: str = ""
    key: str = ""
    mark: str = ""
    is_tagged: bool = False
    timeout: int | float = 0
    client: Any = None
    book: Book = _book
    name: str = "begin"
    # Once it has spoken.
    number: int | None = None
    is_shown: bool = False

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """What goes wrong inside, before a round, is told to the others in that."""
        try:
            yield
        except BaseException as e:
            if self.client is not None:
                with contextlib.suppress(Exception):
                    self._fail(e)
            raise

    def confer(
        self,
        work: Callable[[], bytes],
        answer: Callable[[list[bytes]], bytes],
        alike: bool = False,
    ) -> bytes:
        """One round: process 0 has the results of all, in order, and gives an answer.

        `alike`: the results are part of the signs of the first round. If they differ,
        `answer` has to lead to an error in all.
        **Raises:** what went wrong here; else, in every process, `RuntimeError` for
        what went wrong in another one, or for one that was silent for too long.
        """
        if self.client is None:
            return answer([work()])
        try:
            if self.number is None:
                with self.heard():
                    word = work()
                if self.rank > 0:
                    return self._join(word, alike)
                return self._call(word, answer, alike)
            if self.rank > 0:
                return self._ask(work)
            return self._lead(work, answer)
        except _Told as e:
            raise RuntimeError(f"{self.what}: {e}") from e.__cause__

    def round(self, name: str) -> "Team":
        """The same team in its next round, which has a name."""
        return dataclasses.replace(self, name=name)

    # ---- The first round.

    def _join(self, word: bytes, alike: bool) -> bytes:
        """A process meets the others."""
        sign = Sign(self.mark, word.decode() if alike else None)
        said = _signed(b"+", sign, b"" if alike else word)
        while True:
            try:
                self._take_number()
                self._say(f"words/{self.rank}", said)
                got = self._hear()
            except BaseException:
                self._leave(said)
                raise
            if got[:1] == b"+":
                return got[1:]
            end = _End.decode(got)
            if end.is_for(self.rank, sign):
                raise _Told(end.text)

    def _call(
        self,
        word: bytes,
        answer: Callable[[list[bytes]], bytes],
        alike: bool,
    ) -> bytes:
        """Process 0 meets the others."""
        sign = Sign(self.mark, word.decode() if alike else None)
        line = self.book.lines[self.key]
        self.book.sweep(self.client)
        # Nothing tells calls of this line apart.
        is_vague = not (alike or self.is_tagged) or (
            line.last is not None and sign.is_like(line.last)
        )
        line.last = sign
        ignored: dict[int, str] = {}
        while True:
            self._take_number()
            heard = {0: sign}
            try:
                with self.alive():
                    words = self._meet(word, heard, ignored, is_vague)
                    behind = self._behind(line, heard) if alike and words else []
                    if behind:
                        self._close(_End(_BEHIND, behind))
                        if sign in behind:
                            raise _Told(_BEHIND)
                        continue
                    if words is None:
                        self._close(_End("", []))
                        continue
                    out = answer(words)
            except BaseException as e:
                silent = e.silent if isinstance(e, _Told) else []
                signs = list(dict.fromkeys(heard.values()))
                with contextlib.suppress(Exception):
                    self._close(_End(_text(0, e), signs, silent, is_vague))
                raise
            self._answer(out)
            for key in line.ended:
                self._forget(key)
            line.ended = []
            return out

    def _meet(
        self,
        own: bytes,
        heard: dict[int, Sign],
        ignored: dict[int, str],
        is_vague: bool,
    ) -> list[bytes] | None:
        """The words of all; None if somebody has left this number with another call.

        **Raises:** as soon as one of them has failed, or left, with a call like this.
        """
        start = time.monotonic()
        words = {0: own}
        for said, gone in self._looks():
            for rank, value in gone.items():
                sign = _unsigned(value)[1]
                if is_vague or not sign.is_like(heard[0]):
                    return None
                raise _Told(f"process {rank} has given up waiting for this call.")
            for rank, value in said.items():
                kind, sign, word = _unsigned(value)
                if kind == b"+":
                    heard[rank] = sign
                    words[rank] = (sign.account or "").encode() or word
                    continue
                if not sign.is_like(heard[0]):
                    ignored[rank] = word.decode()
                    return None
                raise _Told(word.decode())
            missing = [rank for rank in range(self.size) if rank not in words]
            if not missing:
                return [words[rank] for rank in range(self.size)]
            if time.monotonic() - start > self.timeout:
                hints = [
                    f" In another call {ignored[r]}" for r in missing if r in ignored
                ]
                raise _Told(
                    f"of {self.size} processes these have not come in "
                    f"{self.timeout:g} seconds: {_shown(missing)}. They may have died, "
                    "be busy for longer than `timeout`, or never have made this call. "
                    "Every process has to make it, with the same path and `tag`."
                    + "".join([self._elsewhere(missing), *hints[:1]]),
                    missing,
                )
        raise AssertionError

    def _behind(self, line: Line, heard: dict[int, Sign]) -> list[Sign]:
        """Of calls that differ, the signs of those whose like another process has
        already made, in numbers where calls differed."""
        signs = list(dict.fromkeys(heard.values()))
        if len(signs) == 1:
            line.apart = []
            return []
        behind = [sign for sign in signs if sign in line.apart]
        if len(behind) == len(signs):
            behind = []
        if not behind:
            line.apart = [*dict.fromkeys(line.apart + signs)][-_APART:]
        return behind

    def _close(self, end: _End) -> None:
        self.client.key_value_set_bytes(f"{self._at}/begin/answer", end.encode())
        self.book.lines[self.key].ended.append(self._at)

    # ---- The rounds after it.

    def _ask(self, work: Callable[[], bytes]) -> bytes:
        with self.heard(), self.alive():
            word = work()
        try:
            self._say(f"words/{self.rank}", b"+" + word)
            got = self._hear()
        except BaseException:
            self._leave(b"")
            raise
        if got[:1] != b"+":
            raise _Told(got[1:].decode())
        return got[1:]

    def _lead(
        self, work: Callable[[], bytes], answer: Callable[[list[bytes]], bytes]
    ) -> bytes:
        with self.heard(), self.alive() as seen:
            self.book.old.pop(self._at, None)
            out = answer(self._collect(work, seen))
        self._answer(out)
        return out

    def _collect(
        self, work: Callable[[], bytes], seen: dict[int, tuple[bytes, float]]
    ) -> list[bytes]:
        """The words of all. **Raises:** as soon as one of them is an error."""
        start = time.monotonic()
        words = {0: work()}
        for said, gone in self._looks(seen):
            for rank, word in said.items():
                if word[:1] != b"+":
                    raise _Told(word[1:].decode())
                words[rank] = word[1:]
            for rank in gone:
                raise _Told(f"process {rank} has given up waiting, or was stopped.")
            missing = [rank for rank in range(self.size) if rank not in words]
            if not missing:
                break
            now = time.monotonic()
            last = {r: seen[r][1] if r in seen else start for r in missing}
            silent = [r for r in missing if now - last[r] > self.timeout]
            if silent:
                raise _Told(
                    f"of {self.size} processes these have been silent for "
                    f"{self.timeout:g} seconds: {_shown(silent)}. They may have died."
                )
        return [words[rank] for rank in range(self.size)]

    # ---- What both are made of.

    @property
    def _at(self) -> str:
        return f"{self.key}/{self.number}"

    def _take_number(self) -> None:
        line = self.book.lines[self.key]
        # Interrupted in between, the number is used twice, and ended by the first use.
        with self.book.lock:
            self.number = line.next
            line.next += 1

    def _say(self, name: str, word: bytes) -> None:
        self.client.key_value_set_bytes(f"{self._at}/{self.name}/{name}", word, True)

    def _answer(self, out: bytes) -> None:
        self.client.key_value_delete(f"{self._at}/{self.name}/words/")
        self.client.key_value_set_bytes(f"{self._at}/{self.name}/answer", b"+" + out)
        self._say_where(is_over=True)
        self._forget(self._at)

    def _forget(self, key: str) -> None:
        """Lets a key be deleted once nobody waits for it any more."""
        self.book.old.pop(key, None)
        self.book.old[key] = time.monotonic() + 3 * self.timeout

    def _fail(self, error: BaseException) -> None:
        text = _text(self.rank, error)
        if self.number is None:
            self._take_number()
            sign = Sign(self.mark)
            if self.rank == 0:
                self.book.lines[self.key].last = sign
                self._close(_End(text, [sign]))
            else:
                self._say(f"words/{self.rank}", _signed(b"-", sign, text.encode()))
        else:
            name = f"words/{self.rank}" if self.rank else "answer"
            self._say(name, b"-" + text.encode())

    def _leave(self, said: bytes) -> None:
        with contextlib.suppress(Exception):
            self.client.key_value_set_bytes(f"{self._at}/gone/{self.rank}", said, True)

    def _hear(self) -> bytes:
        """The answer of process 0. **Raises:** if that is silent for too long."""
        key = f"{self._at}/{self.name}/answer"
        seen: dict[int, tuple[bytes, float]] = {}
        start = time.monotonic()
        slept = min(self.timeout / 3, _SLICE)
        while True:
            before = time.monotonic()
            try:
                got = self.client.blocking_key_value_get_bytes(key, round(1000 * slept))
            except Exception as e:
                now = time.monotonic()
                if now - before < slept / 2:
                    raise _Told(f"JAX's runtime does not answer: {e}") from e
                self._say_where()
                self._look(seen)
                last = seen[0][1] if 0 in seen else start
                if now - last > self.timeout:
                    raise _Told(
                        f"process 0 of {self.size} has been silent for "
                        f"{self.timeout:g} seconds. It may have died, be busy for "
                        "longer than `timeout`, or never have made this call."
                        + self._elsewhere([0])
                    )
                continue
            self._say_where(is_over=True)
            return got

    def _looks(
        self, seen: dict[int, tuple[bytes, float]] | None = None
    ) -> Iterator[tuple[dict[int, bytes], dict[int, bytes]]]:
        """Again and again: the words of this round, and the notes of who has gone."""
        start = time.monotonic()
        wait = _LOOK[0]
        while True:
            yield self._look({} if seen is None else seen)
            if time.monotonic() - start > min(self.timeout / 3, _SLICE):
                self._say_where()
            time.sleep(wait)
            wait = min(2 * wait, _LOOK[1])

    def _look(
        self, seen: dict[int, tuple[bytes, float]]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        found: dict[str, dict[int, bytes]] = {"words": {}, "gone": {}, "alive": {}}
        for key, value in self.client.key_value_dir_get_bytes(f"{self._at}/"):
            *_, name, kind, rank = key.split("/")
            if kind in found and (kind != "words" or name == self.name):
                found[kind][int(rank)] = value
        for rank, value in found["alive"].items():
            if rank not in seen or seen[rank][0] != value:
                seen[rank] = value, time.monotonic()
        return found["words"], found["gone"]

    @contextlib.contextmanager
    def alive(self) -> Iterator[dict[int, tuple[bytes, float]]]:
        """Tells the others that this process is at work, and sees when they do."""
        seen: dict[int, tuple[bytes, float]] = {}
        over = threading.Event()

        def beat() -> None:
            for count in it.count():
                if over.wait(self.timeout / 10):
                    return
                # Without the runtime, whoever waits will find that out.
                with contextlib.suppress(Exception):
                    self.client.key_value_set_bytes(
                        f"{self._at}/alive/{self.rank}", b"%d" % count, True
                    )
                    if self.rank == 0:
                        self._look(seen)

        thread = threading.Thread(target=beat, name="eqx_ckpt alive", daemon=True)
        try:
            # At the end of the interpreter no thread can be started.
            with contextlib.suppress(RuntimeError):
                if self.client is not None:
                    thread.start()
            yield seen
        finally:
            over.set()

    def _say_where(self, is_over: bool = False) -> None:
        """Lets the others see in which call this process waits for long."""
        if self.is_shown is not is_over:
            return
        key = f"eqx_ckpt/waits/{self.rank}"
        self.is_shown = not is_over
        with contextlib.suppress(Exception):
            if is_over:
                self.client.key_value_delete(key)
            else:
                said = json.dumps([self.key, self.where]).encode()
                self.client.key_value_set_bytes(key, said, True)

    def _elsewhere(self, ranks: Collection[int]) -> str:
        with contextlib.suppress(Exception):
            for key, value in self.client.key_value_dir_get_bytes("eqx_ckpt/waits/"):
                rank, (line, where) = int(key.rpartition("/")[2]), json.loads(value)
                if rank in ranks and line != self.key:
                    return f" Process {rank} has waited in another call: {where}."
        return ""


_BEHIND = (
    "this call is behind that of other processes, which have made it already, and had "
    "an error, as somebody has left out a call."
)


class _Told(Exception):
    """What all processes of a call are told; with those that did not come."""

    def __init__(self, text: str, silent: Collection[int] = ()):
        super().__init__(text)
        self.silent = list(silent)


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (" and more" if len(ranks) > 20 else "")


def _text(rank: int, error: BaseException) -> str:
    if isinstance(error, _Told):
        return str(error)
    text = f"process {rank} has failed: {type(error).__name__}: {error}"
    return "\n".join([text, *getattr(error, "__notes__", ())])


def _signed(kind: bytes, sign: Sign, word: bytes) -> bytes:
    return kind + json.dumps(sign).encode() + b"\n" + word


def _unsigned(value: bytes) -> tuple[bytes, Sign, bytes]:
    head, _, word = value[1:].partition(b"\n")
    return value[:1], Sign(*json.loads(head)), word


def run(
    kind: str,
    path: Any,
    tag: Any,
    timeout: int | float,
    what: str,
    mark: Callable[[], str] = str,
) -> Team:
    """The processes of this run, for one call that all of them make.

    It meets calls of the same kind, path and tag; `mark` tells apart those without.
    """
    state = distributed.global_state
    size = state.num_processes or 1
    if state.client is None or size == 1:
        return Team(0, 1)
    line = json.dumps([kind, str(path), "" if tag is None else str(tag)])
    key = f"eqx_ckpt/{hashlib.sha256(line.encode()).hexdigest()[:32]}"
    where = f"{kind}, `{path}`{tagged(tag)}"
    own = mark() if tag is None else ""
    rank = state.process_id or 0
    is_tagged = tag is not None
    return Team(rank, size, what, where, key, own, is_tagged, timeout, state.client)


def tagged(tag: Any) -> str:
    return "" if tag is None else f" (`tag={tag!r}`)"


def size() -> int:
    """How many processes this run has."""
    return distributed.global_state.num_processes or 1
