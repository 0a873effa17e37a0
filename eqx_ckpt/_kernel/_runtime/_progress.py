"""Progress of a call: the bar that `progress=True` shows, and what a handle says."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import _threads


# Called with the bytes and the leaves that are done since the last call, by any thread.
Advance = Callable[[int, int], None]


class Count:
    """Bytes that are done, and the bar that shows them, if there is one. Threads add to
    it without a lock, each to a number of its own: Ctrl-C may come anywhere."""

    def __init__(self) -> None:
        self._done: dict[int, int] = {}
        self.bar: Advance | None = None

    def advance(self, nbytes: int, leaves: int) -> None:
        thread = threading.get_ident()
        self._done[thread] = self._done.get(thread, 0) + nbytes
        if self.bar is not None:
            self.bar(nbytes, leaves)

    @property
    def nbytes(self) -> int:
        return sum(list(self._done.values()))


@contextlib.contextmanager
def bar(what: str, nbytes: int, leaves: int, show: bool) -> Iterator[Advance]:
    """A bar to `nbytes` and `leaves`, which what it yields moves on.

    **Raises:** `ImportError` if it is to be shown, and tqdm is not installed.
    """
    if not show:
        yield lambda nbytes, leaves: None
        return
    lock = _threads.Lock()
    done = 0
    with _tqdm()(
        desc=what, total=nbytes, unit="B", unit_scale=True, unit_divisor=1024
    ) as shown:

        def show_more(nbytes: int, count: int) -> None:
            nonlocal done
            done += count
            shown.set_postfix_str(f"{done}/{leaves} leaves", refresh=False)
            shown.update(nbytes)

        def advance(nbytes: int, count: int) -> None:
            lock.run(lambda: show_more(nbytes, count))

        advance(0, 0)
        yield advance


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as e:
        raise ImportError(
            "`progress=True` shows its bar with tqdm, which is not installed. Install "
            "it with `pip install 'eqx_ckpt[progress]'`."
        ) from e
    return tqdm
