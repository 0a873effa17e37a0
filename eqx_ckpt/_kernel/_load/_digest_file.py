"""The file of digests of a save: read in a few reads, as they are asked for, and
verified by the digests that the index has of its pages.
"""

import bisect
import functools as ft
from collections.abc import Sequence
from typing import Any

from .._format import _digests, _index
from .._limits import limits
from .._runtime import _threads
from .._storage import _store


_DAMAGED = "its file of digests is damaged"


class DigestFile:
    """The digests of the chunks of a `Source`, by the numbers that `Extents.digest_of`
    gives them. It may be asked by several threads."""

    def __init__(self, source: Any):
        self._source = source
        self._pages = pages = source.index.extents.pages
        self._lock = _threads.Lock()
        # The first page of each read, and the last one's end.
        self._reads = [0]
        for page in range(1, len(pages) - 1):
            nbytes = _digests.SIZE * (pages[page + 1] - pages[self._reads[-1]])
            if nbytes > limits.joint_digest_bytes:
                self._reads.append(page)
        self._reads.append(len(pages) - 1)
        self._starts = [pages[page] for page in self._reads]
        self._is_one_read = len(self._reads) == 2
        self._data: dict[int, bytes] = {}
        self._coming: Any = None

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

    def each(self, numbers: Sequence[int]) -> list[bytes]:
        """The digest of each of these numbers. **Raises:** as `rows`."""
        if not self._is_one_read:
            return [self.rows(number, number + 1) for number in numbers]
        data, size = self.rows(0, self._pages[-1]), _digests.SIZE
        return [data[size * number : size * (number + 1)] for number in numbers]

    @property
    def are_loaded(self) -> bool:
        return len(self._data) == len(self._reads) - 1

    def load(self) -> None:
        """Reads all of them. **Raises:** as `rows`."""
        for number in range(len(self._reads) - 1):
            self._load(number)

    def prepare(self) -> None:
        """Reads them, if that is one read. In a store it only begins to, so that other
        requests go on meanwhile. **Raises:** as `rows`."""
        if not self._is_one_read:
            return
        source = self._source
        if not (source.is_ours and source.root.is_remote):
            self._load(0)
        elif not self._data:
            # What a read before has asked for, and not waited for, may never come.
            stop = _digests.SIZE * self._pages[-1]
            self._coming = source.root.start_read(source.digests_key, 0, stop)

    def _load(self, number: int) -> bytes:
        return self._lock.run(ft.partial(self._read_once, number))

    def _read_once(self, number: int) -> bytes:
        source = self._source
        if number in self._data:
            return self._data[number]
        try:
            data = _store.look_twice(source.root, ft.partial(self._checked, number))
        except FileNotFoundError as e:
            raise source.error_for("its file of digests is missing") from e
        except ValueError as e:
            raise source.error_for(f"{_DAMAGED} ({e})" if str(e) else _DAMAGED) from e
        self._data[number] = data
        return data

    def _checked(self, number: int) -> bytes:
        """The bytes of some pages, each with the digest that the index has of it.

        **Raises:** `FileNotFoundError` if there is no file, `ValueError` unless the
        bytes are those that were written."""
        source, size = self._source, _digests.SIZE
        pages = self._pages[self._reads[number] : self._reads[number + 1] + 1]
        coming, self._coming = self._coming, None
        if coming is not None:
            got = _store.read_answer(source.root, source.digests_key, coming)
            data = got.value if got.state == "value" else None
        else:
            span = size * pages[0], size * pages[-1], size * self._pages[-1]
            data = source.read_beside(source.digests_key, *span)
        if data is None:
            raise FileNotFoundError
        at, memory = pages[0], memoryview(data)
        for i, (start, stop) in enumerate(zip(pages, pages[1:]), self._reads[number]):
            page = memory[size * (start - at) : size * (stop - at)]
            good = source.index.digests[2 * size * i : 2 * size * (i + 1)]
            if len(page) != size * (stop - start) or _index.digest(page) != good:
                raise ValueError
        return data
