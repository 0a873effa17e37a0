"""A large leaf: read in parts, which threads verify as they arrive.

A leaf whose bytes lie row after row is a `RowLeaf` (`_row_leaf`): its parts are runs of
rows. Any other one, such as a compressed one, is a `ChunkLeaf` (`_chunk_leaf`): its
parts are runs of chunks.
"""

import abc
import functools as ft
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, runtime_checkable, TypeVar

import numpy as np

from . import _reads
from ._reads import ReadJob, ReadResult, ReadState, StoredRead


@runtime_checkable
class LeafPart(Protocol):
    """A part of a leaf: the bytes that are under way for it, and whether it is the last
    one."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_last(self) -> bool: ...


P = TypeVar("P", bound=LeafPart)

# Parts have about this many bytes, so that some are verified while others arrive.
PART = 16 * 2**20


class LargeLeaf(abc.ABC, Generic[P]):
    """A leaf that is read: an array for each of its views. `lost` says which values the
    conversion could not keep."""

    arrays: list[np.ndarray]

    def __init__(self, state: ReadState, read: StoredRead):
        self.state, self.read, self.views = state, read, read.all_views
        self.lost: list[ValueError] = []

    def jobs(self) -> Iterator[ReadJob[Any]]:
        """A job for each part, of which the last gives the leaf: the others have
        arrived then."""
        # Not before the files are known to hold it.
        self.arrays = self.read.memory()
        for part in self._parts():
            yield ReadJob(part.nbytes, ft.partial(self._start, part))

    def _start(self, part: P) -> Callable[[], Any]:
        return ft.partial(self._finish, part, self._reading(part))

    def _finish(self, part: P, read: Callable[[], np.ndarray]) -> Any:
        state, name = self.state, self.read.record.name
        digests = None if state.digests is None else self._saved_digests(part)
        try:
            data = read()
            if digests is None or self._is_good(part, data, digests):
                self._keep(part, data)
            else:
                state.problems.setdefault(name, _reads.CHANGED)
        except Exception as e:
            state.problems.setdefault(name, state.explain(e))
        return self if part.is_last else None

    def result(self) -> ReadResult:
        return _reads.arranged(self.views, self.arrays, self.lost)

    # ---- What a kind does with a part.

    @abc.abstractmethod
    def _parts(self) -> Iterable[P]:
        """Its parts, in order."""

    @abc.abstractmethod
    def _reading(self, part: P) -> Callable[[], np.ndarray]:
        """A call that reads a part, and gives the memory that its bytes are in. In a
        store the requests for it are sent before: the call waits for the answers."""

    @abc.abstractmethod
    def _saved_digests(self, part: P) -> bytes:
        """The digests of the chunks of a part, as they were saved."""

    @abc.abstractmethod
    def _is_good(self, part: P, data: np.ndarray, digests: bytes) -> bool:
        """Whether the bytes of a part have these digests."""

    @abc.abstractmethod
    def _keep(self, part: P, data: np.ndarray) -> None:
        """Puts what is wanted of a part into the arrays, if it is not there already."""
