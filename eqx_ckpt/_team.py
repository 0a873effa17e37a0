"""The processes of one run, and what they tell each other.

They talk through the key-value store of JAX's distributed runtime, which all of them
are connected to. Every call that they take part in together is a conversation of its
own, in rounds: all give process 0 a word, and it answers all. So whatever goes wrong in
one of them is known to all at the end of the round.
"""

import contextlib
import itertools as it
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax._src import distributed


# Every process makes the calls that it shares with others in the same order.
_numbers = it.count()
# Seconds between looks at who has arrived: few at first, as most arrive together.
_LOOK = (0.001, 0.1)


class Team(NamedTuple):
    """`size` processes, of which this is number `rank`; `what` they are doing."""

    rank: int
    size: int
    what: str = ""
    key: str = ""
    timeout: int | float = 0
    client: Any = None
    before: str = ""

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """What goes wrong inside, before a round, is told to the others in that."""
        try:
            yield
        except BaseException as e:
            if self.client is not None:
                name = f"words/{self.rank}" if self.rank else "answer"
                self._say(name, b"-" + _text(self.rank, e))
            raise

    def confer(
        self, work: Callable[[], bytes], answer: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """One round: process 0 has the results of all, in order, and gives an answer.

        **Raises:** what went wrong here; else, in every process, `RuntimeError` for
        what went wrong in another one, or for one that has not come in time.
        """
        if self.client is None:
            return answer([work()])
        if self.rank > 0:
            return self._ask(work)
        try:
            words = self._collect(work())
            # All have heard what came before this.
            for key in (f"{self.key}/words/", self.before):
                if key:
                    self.client.key_value_delete(key)
            out = answer(words)
        except BaseException as e:
            self._say("answer", b"-" + _text(0, e))
            raise
        self._say("answer", b"+" + out)
        return out

    def round(self, name: str) -> "Team":
        """The same team in its next round, which has a name."""
        key = f"{self.key.rpartition('/')[0]}/{name}"
        return self._replace(key=key, before=f"{self.key}/answer")

    def _say(self, name: str, word: bytes) -> None:
        self.client.key_value_set_bytes(f"{self.key}/{name}", word)

    def _ask(self, work: Callable[[], bytes]) -> bytes:
        error = None
        try:
            word = b"+" + work()
        except BaseException as e:
            error, word = e, b"-" + _text(self.rank, e)
        try:
            self._say(f"words/{self.rank}", word)
            if error is not None:
                raise error
            key, wait = f"{self.key}/answer", round(1000 * self.timeout)
            got = self.client.blocking_key_value_get_bytes(key, wait)
        except Exception as e:
            if e is error:
                raise
            raise RuntimeError(
                f"{self.what}: process 0 of {self.size} has not answered in "
                f"{self.timeout:g} seconds ({str(e).splitlines()[0]}). It may have "
                "died, or never have made this call."
            ) from e
        if got[:1] != b"+":
            raise RuntimeError(f"{self.what}: {got[1:].decode()}")
        return got[1:]

    def _collect(self, own: bytes) -> list[bytes]:
        """The words of all. **Raises:** as soon as one of them is an error."""
        words: dict[int, bytes] = {0: own}
        wait = _LOOK[0]
        end = time.monotonic() + self.timeout
        while True:
            for key, word in self.client.key_value_dir_get_bytes(f"{self.key}/words/"):
                rank = int(key.rpartition("/")[2])
                if word[:1] != b"+":
                    raise RuntimeError(f"{self.what}: {word[1:].decode()}")
                words[rank] = word[1:]
            missing = [rank for rank in range(self.size) if rank not in words]
            if not missing:
                return [words[rank] for rank in range(self.size)]
            if time.monotonic() > end:
                shown = ", ".join(map(str, missing[:20]))
                shown += " and more" if len(missing) > 20 else ""
                raise RuntimeError(
                    f"{self.what}: of {self.size} processes these have not come in "
                    f"{self.timeout:g} seconds: {shown}. They may have died, or never "
                    "have made this call. Every process has to make it."
                )
            time.sleep(wait)
            wait = min(2 * wait, _LOOK[1])


def _text(rank: int, error: BaseException) -> bytes:
    text = f"process {rank} has failed: {type(error).__name__}: {error}"
    return "\n".join([text, *getattr(error, "__notes__", ())]).encode()


def run(what: str, timeout: int | float) -> Team:
    """The processes of this run, for one call that all of them make."""
    state = distributed.global_state
    size = state.num_processes or 1
    if state.client is None or size == 1:
        return Team(0, 1)
    key = f"eqx_ckpt/{next(_numbers)}/begin"
    return Team(state.process_id or 0, size, what, key, timeout, state.client)


def size() -> int:
    """How many processes this run has."""
    return distributed.global_state.num_processes or 1
