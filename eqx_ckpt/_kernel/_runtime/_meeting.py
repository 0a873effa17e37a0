"""The first round of a call, in which the calls of all processes find each other.

Processes may be interrupted, and make different calls. Calls that may meet are of one
*line*: they have the same kind (save, load, ...), path and tag. In each line every
process counts its calls: 0, 1, 2. Calls with the same *number* meet, and process 0
closes the number with the answer of the first round. A process may skip a call, fail
before it speaks, or give up waiting. Its count would differ from then on. These rules
bring it back:

1. A process uses a number once. In the first round it says one thing there: its word,
   or that it has failed. If it gives up waiting after its word, it also says that it is
   gone.
2. Process 0 closes a number for all: with an answer, or with an *end*. That is an
   error, and the *signs* of the calls that the error is for. Ends stay until a later
   number of the line has been answered.
3. A process that finds an end for a call like its own raises the error; but not if the
   call of process 0 was vague and the end says that this process was silent. Otherwise
   it makes the same call with the next number.
4. Process 0 raises the error of another process only if that process's call is like its
   own. Otherwise it ends the number for nobody, and goes on to the next one: so it does
   too if a process is gone and its own call is vague, as nobody knows which was left.

So a process that is behind passes all ends without a wait. One that is ahead has left
the numbers that process 0 then uses: process 0 sees that, and passes them too. In
the end all come to one number. Besides:

- Calls of different lines are never paired.
- An answer is given to calls of all processes, each of which takes it once.
- A process that is late for a call has its error immediately, and meets the next call.

A call that is part of another has a line of its own each time (`Processes.for_part`).
Otherwise a process that is interrupted in the outer call, before the inner one, would
come too late for the inner one when both are made again.

**Signs** tell calls of one line apart if it has no tag. A sign has a *gist*: a digest
of the plain numbers and the metadata that are saved. Once it is known, a sign also has
the call's *account*: a digest of all that has to be the same in all processes (see
`_agree`). A call is *vague* if it has neither tag nor account, or if its sign is like
that of the call before. Then a late call looks like the next one, and is taken for
that: nothing tells them apart.
"""

from collections.abc import Sequence

from ._messages import (
    CallEnd,
    CallSign,
    Channel,
    Heard,
    list_text,
    PeerError,
    SignedWord,
    ToldError,
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


class _OtherCall(Exception):
    """A process has failed in this number, or has left it, with another call."""


class Meeting:
    """The first round of a call of process 0, with this sign."""

    def __init__(self, channel: Channel, sign: CallSign, is_tagged: bool):
        self._channel, self._sign, self._line = channel, sign, channel.line
        has_name = is_tagged or sign.account is not None
        before = self._line.last
        self._is_vague = not has_name or (before is not None and sign.is_like(before))
        self._line.last = sign
        # The signs of the calls that have come to this number, by process.
        self._heard: dict[int, CallSign] = {}
        # Errors of other calls than this, by process.
        self._errors_elsewhere: dict[int, str] = {}
        # The number that was ended last, or is about to be, for others to pass it.
        self._passed: int | None = None

    def words(self, own: bytes) -> list[bytes]:
        """The words of all, at the first number to which all have come. Numbers before
        that are closed. Accounts may still differ where nobody is behind: that is left
        to the caller.

        **Raises:** `PeerError` as soon as one of them has failed, or left, in a call
        like this one, and once one has not come for `timeout`.
        """
        channel = self._channel
        channel.book.sweep(channel.client)
        while True:
            channel.take_number()
            channel.begin_beats()
            try:
                words = self._gather(own)
            except _OtherCall:
                self._pass(CallEnd.for_nobody())
                continue
            behind = [] if self._sign.account is None else self._behind()
            if not behind:
                return words
            self._pass(CallEnd(_BEHIND, behind))
            if self._sign in behind:
                raise ToldError(_BEHIND)

    def close(self, text: str, silent: Sequence[int]) -> None:
        """Ends the number by an error; these processes have been `silent`."""
        channel = self._channel
        end = CallEnd(text, self._signs(), silent, self._is_vague)
        try:
            channel.close(end)
        except Exception:
            if channel.number != self._passed:
                raise
            # Ctrl-C came just after `_pass`: others may wait at the next number.
            channel.take_number()
            channel.close(end)

    def _pass(self, end: CallEnd) -> None:
        """Ends the number. Whoever the end is not for goes on to the next."""
        self._passed = self._channel.number
        self._channel.close(end)

    def _gather(self, own: bytes) -> list[bytes]:
        """The words of all, in this number. **Raises:** also `_OtherCall`."""
        channel, words = self._channel, {0: own}
        self._heard = {}
        start = channel.now()
        for heard in channel.looks(words):
            words.update(self._take_words(heard))
            missing = channel.missing(words)
            if missing and channel.now() - start > channel.timeout:
                raise self._absent_error(missing)
        return [words[index] for index in range(channel.count)]

    def _take_words(self, heard: Heard) -> Words:
        """The words that were said by now, whose signs it notes.

        **Raises:** `PeerError` for an error of a call like this, and for a process that
        has left it; `_OtherCall` for those of another call.
        """
        for index, value in heard.gone.items():
            # It may have left another call. Of a vague one nobody can tell.
            sign = SignedWord.decode(value).sign
            if self._is_vague or not sign.is_like(self._sign):
                raise _OtherCall
            raise gone_error(index)
        words: Words = {}
        for index, value in heard.said.items():
            kind, sign, word = SignedWord.decode(value)
            if kind == WORD:
                self._heard[index] = sign
                words[index] = word if sign.account is None else sign.account.encode()
            elif sign.is_like(self._sign):
                raise PeerError(word.decode())
            else:
                self._errors_elsewhere[index] = word.decode()
                raise _OtherCall
        return words

    def _absent_error(self, missing: Sequence[int]) -> PeerError:
        channel, errors = self._channel, self._errors_elsewhere
        hints = [f" In another call {errors[i]}" for i in missing if i in errors]
        return PeerError(
            f"of {channel.count} processes these have not come in "
            f"{channel.timeout:g} seconds: {list_text(missing)}. They may have died, "
            "be busy for longer than `timeout`, or never have made this call. Every "
            "process has to make it, with the same path and `tag`."
            + "".join([channel.elsewhere(missing), *hints[:1]]),
            missing,
        )

    def _signs(self) -> list[CallSign]:
        """Signs of this call and of all heard, each once."""
        return list(dict.fromkeys([self._sign, *self._heard.values()]))

    def _behind(self) -> list[CallSign]:
        """If calls differ that met here, the signs of those that are behind. Such a
        sign was heard in an earlier number whose calls differed: other processes have
        made that call already."""
        signs, line = self._signs(), self._line
        if len(signs) == 1:
            line.apart = ()
            return []
        # If all are in `apart`, nobody can tell who is behind.
        behind = [sign for sign in signs if sign in line.apart]
        if behind and len(behind) < len(signs):
            return behind
        line.apart = tuple(dict.fromkeys([*line.apart, *signs]))[-_MAX_APART:]
        return []


def is_ended_by(end: CallEnd, sign: CallSign, index: int) -> bool:
    """Whether an end is for the call of process `index` with this sign: rule 3."""
    # Process 0 gave this process up. Its call may be the next one by now.
    may_be_next = end.is_vague and index in end.silent
    return any(map(sign.is_like, end.signs)) and not may_be_next


def gone_error(index: int) -> PeerError:
    return PeerError(f"process {index} has given up waiting, or was stopped.")
