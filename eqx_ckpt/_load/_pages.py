"""The digests of a save, of which only those pages are read that are needed."""

import bisect
import threading
from collections.abc import Callable, Sequence

from .._format import _digests, _index


# Pages that follow each other are read together, if they have no more bytes.
_TOGETHER = 2**20
_DAMAGED = "its file of digests is damaged"


class Digests:
    """The file of digests of a save. It may be asked by several threads.

    `pages` are the numbers of the first digest of each page, and of all of them; and
    `good` has the digest of each page. `start` asks for some bytes of the file, and
    gives what waits for them: None where there is no file. `twice` looks at what is
    damaged once more, and `lost` makes the error of what cannot be read.
    """

    def __init__(
        self,
        pages: Sequence[int],
        good: str,
        start: Callable[[int, int], Callable[[], bytes | None]],
        twice: Callable[[Callable[[], bytes]], bytes],
        lost: Callable[[str], RuntimeError],
    ):
        self._pages, self._good, self._start, self._lost = pages, good, start, lost
        self._twice = twice
        self._lock = threading.Lock()
        # The first page of each read, and the last one's end.
        self._reads = [0]
        for page in range(1, len(pages) - 1):
            if _digests.SIZE * (pages[page + 1] - pages[self._reads[-1]]) > _TOGETHER:
                self._reads.append(page)
        self._reads.append(len(pages) - 1)
        self._starts = [pages[page] for page in self._reads]
        self._data: dict[int, bytes] = {}
        self._coming: dict[int, Callable[[], bytes | None]] = {}

    def rows(self, first: int, stop: int) -> bytes:
        """The digests of these numbers, which are in one page.

        **Raises:** `DamagedError`, `ReplacedError`.
        """
        number = bisect.bisect_right(self._starts, first) - 1
        data = self._data.get(number)
        if data is None:
            if first == stop:
                return b""
            data = self._load(number)
        at = self._starts[number]
        return data[_digests.SIZE * (first - at) : _digests.SIZE * (stop - at)]

    def load(self) -> None:
        """Reads all of them. **Raises:** as `rows`."""
        for number in range(len(self._reads) - 1):
            self._load(number)

    def prepare(self, is_far: bool) -> None:
        """Reads them, if that is one read; or asks a store for them, which answers
        other requests meanwhile. **Raises:** as `rows`."""
        if len(self._reads) != 2:
            return
        if not is_far:
            self._load(0)
        elif not self._data:
            # What a read before has asked for, and not waited for, may never come.
            self._coming[0] = self._ask(0)

    def _ask(self, number: int) -> Callable[[], bytes | None]:
        first, stop = self._reads[number : number + 2]
        size = _digests.SIZE
        return self._start(size * self._pages[first], size * self._pages[stop])

    def _load(self, number: int) -> bytes:
        with self._lock:
            if number in self._data:
                return self._data[number]
            try:
                data = self._twice(lambda: self._arrived(number))
            except FileNotFoundError as e:
                raise self._lost("its file of digests is missing") from e
            except ValueError as e:
                raise self._lost(f"{_DAMAGED} ({e})" if str(e) else _DAMAGED) from e
            self._data[number] = data
            return data

    def _arrived(self, number: int) -> bytes:
        """**Raises:** `FileNotFoundError` if there is no file, `ValueError` unless the
        bytes are those that were written."""
        data = (self._coming.pop(number, None) or self._ask(number))()
        if data is None:
            raise FileNotFoundError
        pages = self._pages[self._reads[number] : self._reads[number + 1] + 1]
        size, at, memory = _digests.SIZE, pages[0], memoryview(data)
        for i, (start, stop) in enumerate(zip(pages, pages[1:]), self._reads[number]):
            page = memory[size * (start - at) : size * (stop - at)]
            good = self._good[2 * size * i : 2 * size * (i + 1)]
            if len(page) != size * (stop - start) or _index.digest(page) != good:
                raise ValueError
        return data
