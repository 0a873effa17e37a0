"""The conversation of the processes that make one call together.

It has rounds. In each, every process says a *word*, and process 0 chooses the *answer*,
which all get. So whatever goes wrong in one process is known to all at the end of the
round. In the first round calls also have to find each other: see `_meeting`. What is
said goes through the key-value store of JAX's distributed runtime: see `_messages`.

A round gets one answer: the store refuses a second. If process 0 fails just after it
has answered, the error becomes the answer of the next round. A process that gives up
waiting after its word says that it is gone. What goes wrong after the last round is
told to nobody.

**Silence.** A process at work says every now and then that it is alive, from a thread.
So `timeout` counts from the last sign of life, and an hour of writing is no silence. A
process shows no sign of life in a conversation before it has come to it.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

from ._arguments import together, Who
from ._meeting import gone_error, is_ended_by, Meeting
from ._messages import (
    CallEnd,
    CallSign,
    Channel,
    ERROR,
    Heard,
    PeerError,
    SignedWord,
    ToldError,
    WORD,
    Words,
)


# Seconds between looks of `wait_until`: first; and at most, for collectives and others.
_FIRST_WAIT, _MAX_WAIT, _MAX_SLOW_WAIT = 0.0002, 0.002, 0.05
# Seconds between looks of `wait_until` for processes that have failed meanwhile.
_LISTEN_SECONDS = 0.5
# Ends the error of `wait_until` about a collective.
_STUCK = (
    " The devices of the others may wait for it for ever: end the program, and start "
    "it again."
)
_NO_ANSWER = lambda words: b""


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

    def round(
        self,
        word: bytes = b"",
        choose: Callable[[list[bytes]], bytes] = _NO_ANSWER,
        is_account: bool = False,
    ) -> bytes:
        """Makes one round, inside `share_errors`. Process 0 calls `choose` with the
        words of all, in order, and all return what it chooses. Without arguments,
        each process waits here for all others.

        `is_account` is for a first round whose words are accounts of the call. If they
        differ, process 0 has to make it an error in all.
        """
        return self._round(word, choose, is_account)

    def _round(
        self, word: bytes, choose: Callable[[list[bytes]], bytes], is_account: bool
    ) -> bytes:
        return choose([word])

    def wait_until(
        self, is_ready: Callable[[], bool], is_collective: bool = True
    ) -> None:
        """Waits between two rounds until `is_ready()`, which needs the other processes.
        What is no collective is asked less often. A process alone returns at once,
        ready or not.

        **Raises:** as soon as one of them has failed, or is silent for too long: it may
        never take part.
        """

    def decide(
        self, choose: Callable[[list[bytes]], bytes], say: Callable[[], bytes] = bytes
    ) -> bytes:
        """Makes a call of one round: each process says a word, and process 0 chooses
        the answer. Returns that."""
        with self.share_errors():
            return self.round(say(), choose)

    def tell_failed(self, error: BaseException) -> None:
        """Tells the others that this process has given up. `share_errors` does: call it
        only outside of one."""

    def for_part(self, who: Who, name: str) -> Who:
        """Options of a call that is a part of this one. No other call has its tag. So
        if a process is interrupted before it comes to the inner call, the next one does
        not find what was left of it."""
        return who


class _Conversation(Processes):
    """The processes of a run in one call. All make the same rounds.

    People are told `what` they do. `gist` is that of the sign of the call.
    """

    def __init__(self, what: str, gist: str, is_tagged: bool, channel: Channel):
        self.index, self.count, self.what = channel.index, channel.count, what
        self._gist, self._is_tagged, self.channel = gist, is_tagged, channel

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            if not isinstance(e, ToldError):
                self.tell_failed(e)
            if isinstance(e, PeerError):
                raise RuntimeError(f"{self.what}: {e}") from e.__cause__
            raise
        finally:
            self.channel.end_beats()

    def wait_until(
        self, is_ready: Callable[[], bool], is_collective: bool = True
    ) -> None:
        wait, next_look = _FIRST_WAIT, time.monotonic() + _LISTEN_SECONDS
        while not is_ready():
            time.sleep(wait)
            wait = min(2 * wait, _MAX_WAIT if is_collective else _MAX_SLOW_WAIT)
            if time.monotonic() > next_look:
                try:
                    self._listen()
                except ToldError:
                    raise
                except PeerError as e:
                    stuck = _STUCK if is_collective else ""
                    raise PeerError(f"{e}{stuck}", e.silent) from None
                next_look = time.monotonic() + _LISTEN_SECONDS

    def tell_failed(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            try:
                self._tell(error)
            except KeyboardInterrupt:  # It must not keep the others from hearing of it.
                self._tell(error)
                raise

    def for_part(self, who: Who, name: str) -> Who:
        if who == "own":
            return who
        return dataclasses.replace(together(who), tag=f"{name} {self.channel.number}")

    def _sign(self, word: bytes, is_account: bool) -> CallSign:
        return CallSign(self._gist, word.decode() if is_account else None)

    def _tell(self, error: BaseException) -> None:
        """Tells the others of an error here, as far as they can still hear it."""
        raise NotImplementedError

    def _listen(self) -> None:
        """**Raises:** if it is known by now that a process has failed or died."""
        raise NotImplementedError


class _Leader(_Conversation):
    """The conversation as process 0 has it: it hears all, and answers."""

    # Where it meets the others. From the first word on.
    _meeting: Meeting | None = None

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        try:
            with super().share_errors():
                yield
        finally:
            if self.channel.round > 0:
                self.channel.forget(self.channel.at)

    def _round(
        self, word: bytes, choose: Callable[[list[bytes]], bytes], is_account: bool
    ) -> bytes:
        channel = self.channel
        if channel.round == 0:
            words = self._meet(self._sign(word, is_account)).words(word)
        else:
            words = self._gather(word)
        answer = choose(words)
        channel.answer(WORD + answer)
        if channel.round == 0:  # See rule 2 of `_meeting`.
            channel.forget_ends()
        channel.next_round()
        return answer

    def _meet(self, sign: CallSign) -> Meeting:
        if self._meeting is None:
            self._meeting = Meeting(self.channel, sign, self._is_tagged)
        return self._meeting

    def _gather(self, own: bytes) -> list[bytes]:
        """The words of all, after the first round.

        **Raises:** `PeerError` as soon as a word is an error, and once a process has
        been silent for `timeout`.
        """
        channel, words = self.channel, {0: own}
        for heard in channel.looks(words):
            words.update(_words(heard))
            channel.check_alive(channel.missing(words))
        return [words[index] for index in range(self.count)]

    def _tell(self, error: BaseException) -> None:
        channel, text = self.channel, _error_text(self.index, error)
        meeting = self._meet(CallSign(self._gist))
        if channel.number is None:
            channel.take_number()
        answer = ERROR + text.encode()
        try:
            if channel.round == 0:
                meeting.close(
                    text, error.silent if isinstance(error, PeerError) else []
                )
            else:
                channel.answer(answer)
        except Exception:
            # This round may have its answer: then the others are in the next one.
            channel.next_round()
            channel.answer(answer)

    def _listen(self) -> None:
        _words(self.channel.look())
        self.channel.check_alive(range(1, self.count))


class _Follower(_Conversation):
    """The conversation as all but process 0 have it: they say, and hear the answer."""

    # Its word in this round, until it has the answer.
    _said: bytes | None = None

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        with super().share_errors():
            try:
                yield
            except FileNotFoundError:
                # If process 0 has failed, it has deleted what all of them write to.
                if self.channel.round > 0:
                    self._listen()
                raise

    def _round(
        self, word: bytes, choose: Callable[[list[bytes]], bytes], is_account: bool
    ) -> bytes:
        channel = self.channel
        if channel.round == 0:
            sign = self._sign(word, is_account)
            # An account is in the sign.
            said = SignedWord(WORD, sign, b"" if is_account else word)
            self._said = said.encode()
            channel.take_number()
            channel.say(self._said)
            answer = self._hear_first()
        else:
            self._said = WORD + word
            channel.say(self._said)
            answer = channel.hear()
            if answer[:1] == ERROR:
                raise ToldError(answer[1:].decode())
        channel.begin_beats()
        channel.next_round()
        self._said = None
        return answer[1:]

    def _hear_first(self) -> bytes:
        """The first answer. Until that comes, ends of other calls are passed."""
        channel = self.channel
        while self._is_passed(answer := channel.hear()):
            assert self._said is not None
            channel.take_number()
            channel.say(self._said)
        if answer[:1] == ERROR:
            raise ToldError(CallEnd.decode(answer).text)
        return answer

    def _is_passed(self, answer: bytes | None) -> bool:
        """Whether a first answer is an end, and for other calls than this."""
        if answer is None or answer[:1] != ERROR:
            return False
        assert self._said is not None
        sign = SignedWord.decode(self._said).sign
        return not is_ended_by(CallEnd.decode(answer), sign, self.index)

    def _tell(self, error: BaseException) -> None:
        channel = self.channel
        if channel.number is None:
            channel.take_number()
        word = _error_text(self.index, error).encode()
        if self._said is not None:
            channel.leave(self._said)
            # Ctrl-C in the wait is raised after it: an end of other calls may be there,
            # and the others at the next number.
            while channel.round == 0 and self._is_passed(channel.answered()):
                channel.take_number()
                channel.leave(self._said)
        elif channel.round == 0:
            channel.say(SignedWord(ERROR, CallSign(self._gist), word).encode())
        else:
            channel.say(ERROR + word)

    def _listen(self) -> None:
        channel = self.channel
        # Before all have said their words, an answer can only be an error.
        if (answer := channel.answered()) is not None:
            raise ToldError(answer[1:].decode())
        channel.look()
        channel.check_alive([0])


def conversation(what: str, gist: str, is_tagged: bool, channel: Channel) -> Processes:
    """The part of this process in a conversation of many."""
    cls = _Leader if channel.index == 0 else _Follower
    return cls(what, gist, is_tagged, channel)


def is_of_others(error: BaseException) -> bool:
    """Whether an error that `share_errors` raises is one of the conversation: told by
    another process, of silence, or of JAX's runtime."""
    return isinstance(error.__context__, PeerError)


def _words(heard: Heard) -> Words:
    """The words that were said by now, after the first round.

    **Raises:** `PeerError` for one that is an error, and if a process is gone.
    """
    for value in heard.said.values():
        if value[:1] == ERROR:
            raise PeerError(value[1:].decode())
    if heard.gone:
        raise gone_error(min(heard.gone))
    return {index: value[1:] for index, value in heard.said.items()}


def _error_text(index: int, error: BaseException) -> str:
    if isinstance(error, PeerError):
        return str(error)
    text = f"process {index} has failed: {type(error).__name__}: {error}"
    return "\n".join([text, *getattr(error, "__notes__", ())])
