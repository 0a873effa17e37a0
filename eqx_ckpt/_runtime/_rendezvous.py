"""Rendezvous: process 0 finds the calls of all others that meet with its own: see
`_processes`.
"""

import dataclasses
import time

from ._messages import CallFingerprint, Channel, End, Late, listed, PeerError, unsigned


# So many calls may a process be behind, and still be found to be.
_APART = 32


class Behind(PeerError):
    """This call of process 0 is behind: its number has been ended for it too."""


@dataclasses.dataclass
class Rendezvous:
    """The first round of a call, in process 0. `is_vague`: nothing tells calls of its
    line apart. `heard` are the signs of the others."""

    channel: Channel
    sign: CallFingerprint
    is_vague: bool = False
    heard: dict[int, CallFingerprint] = dataclasses.field(default_factory=dict)

    @staticmethod
    def begin(channel: Channel, sign: CallFingerprint, is_tagged: bool) -> "Rendezvous":
        channel.book.sweep(channel.client)
        line = channel.line
        is_vague = not (sign.account is not None or is_tagged) or (
            line.last is not None and sign.is_like(line.last)
        )
        line.last = sign
        return Rendezvous(channel, sign, is_vague)

    @property
    def signs(self) -> list[CallFingerprint]:
        """Signs of this call and of all heard, each once."""
        return list(dict.fromkeys([self.sign, *self.heard.values()]))

    def words(self, own: bytes) -> list[bytes]:
        """The words of all, in the first number that they come to with calls like this.

        **Raises:** as soon as one of them has failed, or left, with such a call.
        """
        channel = self.channel
        ignored: dict[int, str] = {}
        while True:
            channel.take_number()
            channel.begin_beats()
            self.heard = {}
            words = self._arrivals(own, ignored)
            behind = self._behind() if self.sign.account is not None and words else []
            if behind:
                channel.close(End(_BEHIND, behind))
                if self.sign in behind:
                    raise Behind(_BEHIND)
            elif words is None:
                channel.close(End("", []))
            else:
                return words

    def _arrivals(self, own: bytes, ignored: dict[int, str]) -> list[bytes] | None:
        """The words of all; None if somebody has left this number with another call."""
        channel = self.channel
        start = time.monotonic()
        words = {0: own}
        late = Late(channel.where)
        for said, gone in channel.looks():
            for index, value in gone.items():
                sign = unsigned(value)[1]
                if self.is_vague or not sign.is_like(self.sign):
                    return None
                raise PeerError(f"process {index} has given up waiting for this call.")
            for index, value in said.items():
                kind, sign, word = unsigned(value)
                if kind == b"+":
                    self.heard[index] = sign
                    words[index] = (sign.account or "").encode() or word
                    continue
                if not sign.is_like(self.sign):
                    ignored[index] = word.decode()
                    return None
                raise PeerError(word.decode())
            missing = [index for index in range(channel.count) if index not in words]
            if not missing:
                break
            late.say(missing)
            if time.monotonic() - start > channel.timeout:
                raise self._nobody(missing, ignored)
        return [words[index] for index in range(channel.count)]

    def _nobody(self, missing: list[int], ignored: dict[int, str]) -> PeerError:
        channel = self.channel
        hints = [f" In another call {ignored[i]}" for i in missing if i in ignored]
        return PeerError(
            f"of {channel.count} processes these have not come in "
            f"{channel.timeout:g} seconds: {listed(missing)}. They may have died, be "
            "busy for longer than `timeout`, or never have made this call. Every "
            "process has to make it, with the same path and `tag`."
            + "".join([channel.elsewhere(missing), *hints[:1]]),
            missing,
        )

    def _behind(self) -> list[CallFingerprint]:
        """Signs, of calls that differ, of those whose like another process has
        already made, in numbers where calls differed."""
        line, signs = self.channel.line, self.signs
        if len(signs) == 1:
            line.apart = []
            return []
        behind = [sign for sign in signs if sign in line.apart]
        if len(behind) == len(signs):
            behind = []
        if not behind:
            line.apart = [*dict.fromkeys(line.apart + signs)][-_APART:]
        return behind


_BEHIND = (
    "this call is behind that of other processes, which have made it already, and had "
    "an error, as somebody has left out a call."
)
