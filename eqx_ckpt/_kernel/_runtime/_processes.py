"""The processes of one run, and how they agree.

They talk through the key-value store of JAX's distributed runtime, which all of them
are connected to (see `_messages`). Every call that they make together is a conversation
of its own, in rounds: process 0 gathers a word of each, and broadcasts an answer. So
whatever goes wrong in one of them is known to all at the end of the round.

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
3. A process that finds an end for a call like its own raises the error. Else it goes
   on to the next number with the same call.
4. Process 0 takes for its own call only failures and departures of calls like its own.
   At others it ends the number for nobody, and goes on to the next one.

So a process that is behind passes all ends without a wait. Process 0 finds a process
that is ahead, and passes the numbers that it has left. They always come to one number:

- Calls of different lines are never paired.
- An answer is given to calls of all processes, each of which takes it once.
- A process that is late for a call has its error immediately, and meets the next call.

A call that is part of another has a line of its own each time (`within`). Else a
process that is interrupted in the outer call, before the inner one, would come too late
for that when both are made again.

**Signs** tell apart calls of one line that has no tag. They have a digest of the plain
numbers and the metadata that are saved. Once it is known, they have one too of all that
has to be the same in all processes (see `_agree`). If the signs of a line do not change
from call to call, a late call looks like the next one. It is taken for that: nothing
tells them apart.

**Silence.** A process at work says every now and then that it is alive, from a thread.
So `timeout` counts from the last sign of life, and an hour of writing is no silence. A
process that has not come to a conversation shows none in it.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator

from jax._src import distributed

from ._arguments import Together, Who
from ._messages import (
    CallLine,
    CallSign,
    Channel,
    listed,
    PeerError,
    signed,
    unsigned,
    warner,
    Words,
)


# So many calls may a process be behind, and still be found to be.
_APART = 32
_BEHIND = (
    "this call is behind that of other processes, which have made it already, and had "
    "an error, as somebody has left out a call."
)
# Seconds between looks at what all do together: few at first. Every so many seconds
# one looks for those that have failed.
_WAIT, _SLOW, _LISTEN = (0.0002, 0.002), 0.05, 0.5
_STUCK = (
    " The devices of the others may wait for it for ever: end the program, and start "
    "it again."
)


@dataclasses.dataclass
class Processes:
    """`count` processes, of which this is number `index`, in one call: `what` they do
    is for people, `mark` for the signs. Without a `channel` this is the only one.

    All make the same sequence of `gather` and `broadcast`, inside `share_errors`.
    """

    index: int = 0
    count: int = 1
    what: str = ""
    mark: str = ""
    is_tagged: bool = False
    channel: Channel | None = None
    # Of the round: what this process has said, and whether it may say more.
    _said: bytes | None = None
    _is_over: bool = False
    _since: float = 0.0
    # Of the first round: the sign of this call. In process 0, those of the others, and
    # whether nothing tells calls of its line apart.
    _sign: CallSign = CallSign("")
    _heard: dict[int, CallSign] = dataclasses.field(default_factory=dict)
    _is_vague: bool = False

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        """Errors inside are told to the other processes, which raise them too.

        **Raises:** what went wrong here; else `RuntimeError` for what went wrong in
        another process, or for one that was silent for too long.
        """
        channel = self.channel
        if channel is None:
            yield
            return
        try:
            try:
                yield
            except FileNotFoundError:
                # If process 0 has failed, it has deleted what all of them write to.
                if channel.round > 0 and not self.leads:
                    self._listen(channel)
                raise
        except BaseException as e:
            self.fail(e)
            if isinstance(e, PeerError):
                raise RuntimeError(f"{self.what}: {e}") from e.__cause__
            raise
        finally:
            channel.end_beats()
            if self.leads and channel.round > 0:
                channel.forget(channel.at)

    def gather(self, word: bytes = b"", alike: bool = False) -> list[bytes]:
        """The words of all processes, in order, in process 0; in the others nothing.

        `alike`: the words of the first round are part of the signs. If they differ,
        process 0 has to make it an error in all.
        """
        channel = self.channel
        if channel is None:
            return [word]
        if channel.number is None:
            self._sign = CallSign(self.mark, word.decode() if alike else None)
            if self.leads:
                return self._meet(channel, word)
            self._said = signed(b"+", self._sign, b"" if alike else word)
            channel.take_number()
        elif self.leads:
            return self._collect(channel, word, {}) or []
        else:
            self._said = b"+" + word
        channel.say(f"words/{self.index}", self._said)
        return []

    def broadcast(self, word: bytes = b"") -> bytes:
        """The word of process 0, in all. It ends the round."""
        channel = self.channel
        if channel is None:
            return word
        if self.leads:
            # Interrupted from here on, it may have been heard.
            self._is_over = True
            channel.answer(word)
            if channel.round == 0:
                for key in channel.line.ended:
                    channel.forget(key)
                channel.line.ended = []
        else:
            word = self._hear(channel)
            channel.begin_beats()
        channel.round += 1
        self._said, self._is_over, self._since = None, False, channel.now()
        return word

    def until(self, is_ready: Callable[[], bool], collective: bool = True) -> None:
        """Waits for what all processes do together, such as a collective. It is for the
        time between two rounds, as no round is to begin before it is ready. Any other
        thing is looked at less often.

        **Raises:** as soon as one of them has failed, or is silent for too long: it may
        never take part.
        """
        channel = self.channel
        if channel is None:
            return
        wait, next_look = _WAIT[0], time.monotonic() + _LISTEN
        while not is_ready():
            time.sleep(wait)
            wait = min(2 * wait, _WAIT[1] if collective else _SLOW)
            if time.monotonic() > next_look:
                self._listen(channel, _STUCK if collective else "")
                next_look = time.monotonic() + _LISTEN

    def decide(
        self, decide: Callable[[list[bytes]], bytes], say: Callable[[], bytes] = bytes
    ) -> bytes:
        """The decision of process 0, by what all `say`: a call of one round."""
        with self.share_errors():
            words = self.gather(say())
            return self.broadcast(decide(words) if self.leads else b"")

    def fail(self, error: BaseException) -> None:
        """Tells the others, outside `share_errors`, that this process gives up."""
        if self.channel is not None:
            with contextlib.suppress(Exception):
                self._tell(self.channel, error)

    def within(self, who: Who, name: str) -> Who:
        """Options of a call that is made as a part of this one. No other has its tag:
        if a process is interrupted before it comes to that call, the next one does not
        find what was left of it."""
        if self.channel is None or who == "own":
            return who
        return dataclasses.replace(together(who), tag=f"{name} {self.channel.number}")

    def _hear(self, channel: Channel) -> bytes:
        while True:
            got = channel.hear()
            if got[:1] == b"+":
                return got[1:]
            if channel.round > 0:
                self._is_over = True
                raise PeerError(got[1:].decode())
            text, signs, silent, is_vague = json.loads(got[1:])
            is_like = any(self._sign.is_like(CallSign(*sign)) for sign in signs)
            if is_like and not (is_vague and self.index in silent):
                self._is_over = True
                raise PeerError(text)
            assert self._said is not None
            channel.take_number()
            channel.say(f"words/{self.index}", self._said)

    def _tell(self, channel: Channel, error: BaseException) -> None:
        """Says that this process has failed, or that it waits no longer."""
        text = _error_text(self.index, error)
        if self._is_over:
            return
        if channel.number is None:
            channel.take_number()
            self._sign = CallSign(self.mark)
            if self.leads:
                channel.line.last = self._sign
            else:
                said = signed(b"-", self._sign, text.encode())
                channel.say(f"words/{self.index}", said)
                return
        if self._said is not None:
            channel.leave(self._said)
        elif not self.leads:
            channel.say(f"words/{self.index}", b"-" + text.encode())
        elif channel.round > 0:
            channel.say("answer", b"-" + text.encode())
        else:
            silent = error.silent if isinstance(error, PeerError) else []
            channel.close(text, self._signs(), silent, self._is_vague)

    # ---- In process 0: the calls of all others that meet with its own.

    def _meet(self, channel: Channel, own: bytes) -> list[bytes]:
        """The words of all, in the first number that they come to with calls like this.

        **Raises:** as soon as one of them has failed, or left, with such a call.
        """
        channel.book.sweep(channel.client)
        line, sign = channel.line, self._sign
        self._is_vague = not (sign.account is not None or self.is_tagged) or (
            line.last is not None and sign.is_like(line.last)
        )
        line.last = sign
        ignored: dict[int, str] = {}
        while True:
            channel.take_number()
            channel.begin_beats()
            self._heard = {}
            words = self._collect(channel, own, ignored)
            behind = self._behind(line) if sign.account is not None and words else []
            if behind:
                channel.close(_BEHIND, behind)
                if sign in behind:
                    self._is_over = True
                    raise PeerError(_BEHIND)
            elif words is None:
                channel.close("", [])
            else:
                return words

    def _collect(
        self, channel: Channel, own: bytes, ignored: dict[int, str]
    ) -> list[bytes] | None:
        """The words of all; None if a process has left this number with another call.

        **Raises:** `PeerError` as soon as a word is an error, and once a process has
        been silent for `timeout`."""
        start = channel.now()
        words = {0: own}
        warn = warner(channel.where)
        for said, gone in channel.looks():
            found = self._words(channel, said, gone, ignored)
            if found is None:
                return None
            words.update(found)
            missing = [index for index in range(self.count) if index not in words]
            if not missing:
                break
            warn(missing)
            if channel.round > 0:
                self._check_alive(channel, missing)
            elif channel.now() - start > channel.timeout:
                raise self._absent_error(channel, missing, ignored)
        return [words[index] for index in range(self.count)]

    def _words(
        self, channel: Channel, said: Words, gone: Words, ignored: dict[int, str]
    ) -> Words | None:
        """The words that were said by now; None as of `_collect`. **Raises:**
        `PeerError` for a word that is an error, and for a process that is gone."""
        words = {index: value[1:] for index, value in said.items()}
        for index in [i for i in said if channel.round > 0 and said[i][:1] != b"+"]:
            raise PeerError(words[index].decode())
        for index, value in gone.items():
            if channel.round == 0:
                if self._is_vague or not unsigned(value).sign.is_like(self._sign):
                    return None
            raise PeerError(f"process {index} has given up waiting, or was stopped.")
        for index, value in said.items() if channel.round == 0 else ():
            kind, sign, word = unsigned(value)
            if kind == b"+":
                self._heard[index] = sign
                words[index] = (sign.account or "").encode() or word
            elif sign.is_like(self._sign):
                raise PeerError(word.decode())
            else:
                ignored[index] = word.decode()
                return None
        return words

    def _absent_error(
        self, channel: Channel, missing: list[int], ignored: dict[int, str]
    ) -> PeerError:
        hints = [f" In another call {ignored[i]}" for i in missing if i in ignored]
        return PeerError(
            f"of {channel.count} processes these have not come in "
            f"{channel.timeout:g} seconds: {listed(missing)}. They may have died, be "
            "busy for longer than `timeout`, or never have made this call. Every "
            "process has to make it, with the same path and `tag`."
            + "".join([channel.elsewhere(missing), *hints[:1]]),
            missing,
        )

    def _signs(self) -> list[CallSign]:
        """Signs of this call and of all heard, each once."""
        return list(dict.fromkeys([self._sign, *self._heard.values()]))

    def _behind(self, line: CallLine) -> list[CallSign]:
        """The signs heard here, if they differ, that were heard in an earlier number
        whose calls differed: other processes have made such a call already."""
        signs = self._signs()
        if len(signs) == 1:
            line.apart = []
            return []
        behind = [sign for sign in signs if sign in line.apart]
        if len(behind) == len(signs):
            behind = []
        if not behind:
            line.apart = [*dict.fromkeys(line.apart + signs)][-_APART:]
        return behind

    # ---- Signs of life.

    def _listen(self, channel: Channel, stuck: str = "") -> None:
        """**Raises:** if it is known by now that a process has failed or died; if it is
        not over for this one, it says that it is `stuck`."""
        said, gone = channel.look(channel.seen)
        try:
            if self.leads:
                self._words(channel, said, gone, {})
            elif (answer := channel.answered()) is not None:
                self._is_over = True
                raise PeerError(answer[1:].decode())
            others = range(1, self.count) if self.leads else [0]
            self._check_alive(channel, others)
        except PeerError as e:
            raise PeerError(f"{e}{'' if self._is_over else stuck}", e.silent) from None

    def _check_alive(self, channel: Channel, missing: Iterable[int]) -> None:
        now = channel.now()
        silent = [i for i in missing if now - self._last(channel, i) > channel.timeout]
        if silent:
            raise PeerError(
                f"of {self.count} processes these have been silent for "
                f"{channel.timeout:g} seconds: {listed(silent)}. They may have died."
            )

    def _last(self, channel: Channel, index: int) -> float:
        """When a process gave its last sign of life, in this round or before it."""
        seen = channel.seen.get(index)
        return self._since if seen is None else max(seen[1], self._since)


def _error_text(index: int, error: BaseException) -> str:
    if isinstance(error, PeerError):
        return str(error)
    text = f"process {index} has failed: {type(error).__name__}: {error}"
    return "\n".join([text, *getattr(error, "__notes__", ())])


def of_run(
    kind: str,
    path: object,
    together: Together,
    what: str,
    mark: Callable[[], str] = str,
) -> Processes:
    """The processes of this run, for one call that all make. It meets calls of the same
    `kind`, path and tag; `what` tells people of it, and `mark` tells apart calls
    without a tag."""
    tag = together.tag
    state = distributed.global_state
    if state.client is None or count() == 1:
        return Processes()
    line = json.dumps([kind, str(path), "" if tag is None else str(tag)])
    key = f"eqx_ckpt/{hashlib.sha256(line.encode()).hexdigest()[:32]}"
    where = f"{kind}, `{path}`{tagged(tag)}"
    index = state.process_id or 0
    channel = Channel(index, count(), key, where, together.timeout, state.client)
    own = mark() if tag is None else ""
    return Processes(index, count(), what, own, tag is not None, channel)


def tagged(tag: object) -> str:
    return "" if tag is None else f" (`tag={tag!r}`)"


def together(processes: Who) -> Together:
    """Options of a call that is not of one process alone."""
    return processes if isinstance(processes, Together) else Together()


def leads() -> bool:
    """Whether this is process 0 of the run."""
    return count() == 1 or not distributed.global_state.process_id


def count() -> int:
    """Number of processes of this run."""
    return distributed.global_state.num_processes or 1
