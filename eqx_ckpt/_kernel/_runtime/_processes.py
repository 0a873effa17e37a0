"""The processes of one run, and how they agree.

They talk through the key-value store of JAX's distributed runtime, which all of them
are connected to (see `_messages`). Every call that they make together is a conversation
of its own. It has rounds: process 0 gathers a *word* of each process, and broadcasts an
*answer*. So whatever goes wrong in one process is known to all at the end of the round.
Most of this module is about the first round, in which calls have to find each other:
processes may be interrupted, and make different calls.

**How calls meet.** Calls that may meet are of one *line*: they have the same kind
(save, load, ...), path and tag. In each line every process counts its calls: 0, 1, 2.
Calls with the same *number* meet, and process 0 closes the number with the answer of
the first round. A process may skip a call, fail before it speaks, or give up waiting.
Its count would differ from then on. These rules bring it back:

1. A process uses a number once. It says one thing there: its word, or that it has
   failed. If it gives up waiting after its word, it also says that it is gone.
2. Process 0 closes a number for all: with an answer, or with an *end*. That is an
   error, and the *signs* of the calls that the error is for. Ends stay until a later
   number of the line has been answered.
3. A process that finds an end for a call like its own raises the error; but not if the
   call is vague and the end says that this process was silent. Otherwise it makes the
   same call with the next number.
4. Process 0 raises an error of another process only if its call is like its own.
   Otherwise it ends the number for nobody, and goes on to the next one.

So a process that is behind passes all ends without a wait. One that is ahead has left
the numbers that process 0 then uses: process 0 sees that, and passes them too. In
the end all come to one number. Besides:

- Calls of different lines are never paired.
- An answer is given to calls of all processes, each of which takes it once.
- A process that is late for a call has its error immediately, and meets the next call.

A call that is part of another has a line of its own each time (`for_part`). Otherwise a
process that is interrupted in the outer call, before the inner one, would come too late
for the inner one when both are made again.

**Signs** tell calls of one line apart if it has no tag. A sign has a *gist*: a digest
of the plain numbers and the metadata that are saved. Once it is known, a sign also has
the call's *account*: a digest of all that has to be the same in all processes (see
`_agree`). A call is *vague* if it has neither tag nor account, or if its sign is like
that of the call before. Then a late call looks like the next one, and is taken for
that: nothing tells them apart.

**Silence.** A process at work says every now and then that it is alive, from a thread.
So `timeout` counts from the last sign of life, and an hour of writing is no silence. A
process that has not come to a conversation shows none in it.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from jax._src import distributed

from ._arguments import Together, Who
from ._messages import (
    CallEnd,
    CallLine,
    CallSign,
    Channel,
    ERROR,
    listed,
    PeerError,
    signed,
    unsigned,
    warner,
    WORD,
    Words,
)


# The signs of so many calls, the last that met and differed, are kept to find which
# process is behind.
_MAX_APART = 32
_BEHIND = (
    "other processes have made this call already, and it failed there. They have left "
    "out a call, or this process has made one more."
)
# Seconds between looks of `until`: first; and at most, for collectives and for others.
_FIRST_WAIT, _MAX_WAIT, _MAX_SLOW_WAIT = 0.0002, 0.002, 0.05
# Seconds between looks of `until` for processes that have failed meanwhile.
_LISTEN = 0.5
# At the end of what it then says of a collective.
_STUCK = (
    " The devices of the others may wait for it for ever: end the program, and start "
    "it again."
)


class Processes:
    """The processes that make one call together. Here it is this one alone, and there
    is nobody to talk to."""

    index: int = 0
    count: int = 1
    what: str = ""

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
        yield

    def gather(self, word: bytes = b"") -> list[bytes]:
        """The words of all processes, in order, in process 0; in the others nothing."""
        return [word]

    def gather_accounts(self, account: bytes) -> list[bytes]:
        """The same in the first round, of accounts of the calls. If they differ,
        process 0 has to make it an error in all."""
        return self.gather(account)

    def broadcast(self, word: bytes = b"") -> bytes:
        """The word of process 0, in all. It ends the round."""
        return word

    def until(self, is_ready: Callable[[], bool], collective: bool = True) -> None:
        """Waits, between two rounds, for what all processes do together, such as a
        collective. Any other thing is looked at less often.

        **Raises:** as soon as one of them has failed, or is silent for too long: it may
        never take part.
        """

    def decide(
        self, choose: Callable[[list[bytes]], bytes], say: Callable[[], bytes] = bytes
    ) -> bytes:
        """What process 0 is to `choose`, by what all `say`: a call of one round."""
        with self.share_errors():
            words = self.gather(say())
            return self.broadcast(choose(words) if self.leads else b"")

    def fail(self, error: BaseException) -> None:
        """Tells the others, outside `share_errors`, that this process gives up."""

    def for_part(self, who: Who, name: str) -> Who:
        """Options of a call that is a part of this one. No other call has its tag. So
        if a process is interrupted before it comes to the inner call, the next one does
        not find what was left of it."""
        return who


class ManyProcesses(Processes):
    """All processes of a run in one call. People are told `what` they do, and `gist` is
    that of the sign.

    All make the same sequence of `gather` and `broadcast`, inside `share_errors`.
    """

    def __init__(self, what: str, gist: str, is_tagged: bool, channel: Channel):
        self.index, self.count, self.what = channel.index, channel.count, what
        self.gist, self.is_tagged, self.channel = gist, is_tagged, channel
        # When this round began.
        self._since = 0.0
        # What this process has said in it, unless it is process 0.
        self._said: bytes | None = None
        # Whether it has nothing more to say in it.
        self._is_over = False
        # The sign of this call, from its first word on.
        self._sign = CallSign("")

        # ---- In process 0, of the first round.

        # Whether this call is vague.
        self._is_vague = False
        # The signs of the calls that have come to this number, by process.
        self._heard: dict[int, CallSign] = {}
        # What went wrong in other calls of a process.
        self._errors_elsewhere: dict[int, str] = {}

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        channel = self.channel
        try:
            try:
                yield
            except FileNotFoundError:
                # If process 0 has failed, it has deleted what all of them write to.
                if channel.round > 0 and not self.leads:
                    self._listen()
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

    def gather(self, word: bytes = b"") -> list[bytes]:
        if self.channel.number is None:
            return self._gather_first(CallSign(self.gist), word)
        if self.leads:
            # It is None only in first rounds.
            return self._collect(word) or []
        self._said = WORD + word
        self.channel.say(f"words/{self.index}", self._said)
        return []

    def gather_accounts(self, account: bytes) -> list[bytes]:
        return self._gather_first(CallSign(self.gist, account.decode()), account)

    def _gather_first(self, sign: CallSign, word: bytes) -> list[bytes]:
        self._sign = sign
        if self.leads:
            return self._meet(word)
        # An account is in the sign.
        self._said = signed(WORD, sign, word if sign.account is None else b"")
        self.channel.take_number()
        self.channel.say(f"words/{self.index}", self._said)
        return []

    def broadcast(self, word: bytes = b"") -> bytes:
        channel = self.channel
        if self.leads:
            # If this is interrupted from here on, the answer may have been heard.
            self._is_over = True
            channel.answer(word)
            if channel.round == 0:  # See rule 2.
                for key in channel.line.ended:
                    channel.forget(key)
                channel.line.ended = []
        else:
            word = self._hear()
            channel.begin_beats()
        channel.round += 1
        self._said, self._is_over, self._since = None, False, channel.now()
        return word

    def until(self, is_ready: Callable[[], bool], collective: bool = True) -> None:
        wait, next_look = _FIRST_WAIT, time.monotonic() + _LISTEN
        while not is_ready():
            time.sleep(wait)
            wait = min(2 * wait, _MAX_WAIT if collective else _MAX_SLOW_WAIT)
            if time.monotonic() > next_look:
                self._listen(_STUCK if collective else "")
                next_look = time.monotonic() + _LISTEN

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self._tell(error)

    def for_part(self, who: Who, name: str) -> Who:
        if who == "own":
            return who
        return dataclasses.replace(together(who), tag=f"{name} {self.channel.number}")

    def _tell(self, error: BaseException) -> None:
        """Says that this process has failed, or that it waits no longer."""
        if self._is_over:
            return
        has_spoken = self.channel.number is not None
        if not has_spoken:
            self.channel.take_number()
            self._sign = CallSign(self.gist)
        text = _error_text(self.index, error)
        if not self.leads:
            self._tell_leader(text, has_spoken)
            return
        if not has_spoken:
            self.channel.line.last = self._sign  # As `_meet` does.
        silent = error.silent if isinstance(error, PeerError) else []
        self._tell_all(text, silent)

    # ---- In all but process 0.

    def _hear(self) -> bytes:
        """The answer of process 0. In the first round it passes ends that are for other
        calls."""
        channel = self.channel
        while True:
            answer = channel.hear()
            if answer[:1] == WORD:
                return answer[1:]
            if channel.round > 0:
                self._is_over = True
                raise PeerError(answer[1:].decode())
            end = CallEnd.decode(answer)
            if self._is_ended_by(end):
                self._is_over = True
                raise PeerError(end.text)
            assert self._said is not None
            channel.take_number()
            channel.say(f"words/{self.index}", self._said)

    def _is_ended_by(self, end: CallEnd) -> bool:
        """Whether an end is for this call."""
        is_like = any(map(self._sign.is_like, end.signs))
        # Process 0 gave this process up. Its call may be the next one by now.
        may_be_next = end.is_vague and self.index in end.silent
        return is_like and not may_be_next

    def _tell_leader(self, text: str, has_spoken: bool) -> None:
        """Tells process 0 of an error here: that this process is gone, if it has said
        its word; else the error, in place of that."""
        if self._said is not None:
            self.channel.leave(self._said)
            return
        word = text.encode()
        said = ERROR + word if has_spoken else signed(ERROR, self._sign, word)
        self.channel.say(f"words/{self.index}", said)

    # ---- In process 0: the calls of all others that meet with its own.

    def _meet(self, own: bytes) -> list[bytes]:
        """The words of all, in the first number that they come to with calls like this.
        Numbers before that are closed.

        **Raises:** as soon as one of them has failed, or left, with such a call.
        """
        channel = self.channel
        channel.book.sweep(channel.client)  # Deletes old keys.
        line, sign = channel.line, self._sign
        has_name = self.is_tagged or sign.account is not None
        is_repeated = line.last is not None and sign.is_like(line.last)
        self._is_vague = not has_name or is_repeated
        line.last = sign
        while True:
            channel.take_number()
            channel.begin_beats()
            self._heard = {}
            words = self._collect(own)
            if words is None:
                channel.close(CallEnd.for_nobody())
                continue
            behind = [] if sign.account is None else self._behind(line)
            if not behind:
                # They may still differ: `gather_accounts` leaves that to its caller.
                return words
            channel.close(CallEnd(_BEHIND, behind))
            if sign in behind:
                self._is_over = True
                raise PeerError(_BEHIND)

    def _collect(self, own: bytes) -> list[bytes] | None:
        """The words of all; None if a process has failed or left in this number with
        another call.

        **Raises:** `PeerError` as soon as a word is an error, and once a process has
        been silent for `timeout`."""
        channel = self.channel
        start = channel.now()
        words = {0: own}
        warn = warner(channel.where)
        for said, gone in channel.looks():
            found = self._words(said, gone)
            if found is None:
                return None
            words.update(found)
            missing = [index for index in range(self.count) if index not in words]
            if not missing:
                break
            warn(missing)
            if channel.round > 0:
                self._check_alive(missing)
            elif channel.now() - start > channel.timeout:
                raise self._absent_error(missing)
        return [words[index] for index in range(self.count)]

    def _words(self, said: Words, gone: Words) -> Words | None:
        """The words that were said by now; None if another call has failed here, or was
        left. **Raises:**
        `PeerError` for a word that is an error, and for a process that is gone."""
        if self.channel.round == 0:
            return self._first_words(said, gone)
        for value in said.values():
            if value[:1] != WORD:
                raise PeerError(value[1:].decode())
        if gone:
            raise _gone_error(min(gone))
        return {index: value[1:] for index, value in said.items()}

    def _first_words(self, said: Words, gone: Words) -> Words | None:
        """Equal to `_words`, for the first round, in which words have signs."""
        for index, value in gone.items():
            # It may have left another call. Of a vague one nobody can tell.
            if self._is_vague or not unsigned(value).sign.is_like(self._sign):
                return None
            raise _gone_error(index)
        words: Words = {}
        for index, value in said.items():
            kind, sign, word = unsigned(value)
            if kind == WORD:
                self._heard[index] = sign
                words[index] = word if sign.account is None else sign.account.encode()
            elif sign.is_like(self._sign):
                raise PeerError(word.decode())
            else:
                self._errors_elsewhere[index] = word.decode()
                return None
        return words

    def _absent_error(self, missing: list[int]) -> PeerError:
        """The error for processes that have not come to the first round."""
        channel, errors = self.channel, self._errors_elsewhere
        hints = [f" In another call {errors[i]}" for i in missing if i in errors]
        return PeerError(
            f"of {self.count} processes these have not come in "
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
        """If calls differ that met here, the signs of those that are behind. Such a
        sign was heard in an earlier number whose calls differed: other processes have
        made that call already."""
        signs = self._signs()
        if len(signs) == 1:
            line.apart = []
            return []
        # If all are in `apart`, nobody can tell who is behind.
        behind = [sign for sign in signs if sign in line.apart]
        if behind and len(behind) < len(signs):
            return behind
        line.apart = [*dict.fromkeys(line.apart + signs)][-_MAX_APART:]
        return []

    def _tell_all(self, text: str, silent: Sequence[int]) -> None:
        """Tells all of an error here; these have been `silent`."""
        if self.channel.round > 0:
            self.channel.say("answer", ERROR + text.encode())
        else:
            end = CallEnd(text, self._signs(), silent, self._is_vague)
            self.channel.close(end)

    # ---- Signs of life.

    def _listen(self, stuck: str = "") -> None:
        """**Raises:** if it is known by now that a process has failed or died. The
        error ends with `stuck`, unless process 0 has said it to all."""
        channel = self.channel
        said, gone = channel.look(channel.seen)
        try:
            if self.leads:
                self._words(said, gone)
            elif (answer := channel.answered()) is not None:
                self._is_over = True
                raise PeerError(answer[1:].decode())
            others = range(1, self.count) if self.leads else [0]
            self._check_alive(others)
        except PeerError as e:
            raise PeerError(f"{e}{'' if self._is_over else stuck}", e.silent) from None

    def _check_alive(self, missing: Iterable[int]) -> None:
        """**Raises:** if one of these has given no sign of life for `timeout`."""
        now, timeout, seen = self.channel.now(), self.channel.timeout, self.channel.seen
        # When each was last seen, or this round began, if that is later.
        last = lambda index: max(seen[index].when if index in seen else 0, self._since)
        silent = [index for index in missing if now - last(index) > timeout]
        if silent:
            raise PeerError(
                f"of {self.count} processes these have been silent for "
                f"{timeout:g} seconds: {listed(silent)}. They may have died."
            )


def is_of_others(error: BaseException) -> bool:
    """Whether an error that `share_errors` raises is of another process, or for one
    that was silent."""
    return isinstance(error.__context__, PeerError)


def _gone_error(index: int) -> PeerError:
    return PeerError(f"process {index} has given up waiting, or was stopped.")


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
    gist: Callable[[], str] = str,
) -> Processes:
    """The processes of this run, for one call that all make. It meets calls of the same
    `kind`, path and tag; `what` tells people of it, and `gist` tells apart calls
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
    return ManyProcesses(what, gist() if tag is None else "", tag is not None, channel)


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
