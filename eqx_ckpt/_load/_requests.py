"""The requests of a read, and the arrays that it gives."""

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from .._format import _text
from .._format._leaves import Record
from .._format._view import View
from .._storage import _kv
from .._storage._backend import Backend
from .._tree._restore import Conversion
from ._pages import Digests
from ._source import Source


CHANGED = "its bytes are not those that were saved"
MISSING = "a chunk of it is missing"


class Request(NamedTuple):
    """A stored array to read, or views of it, each into an array of its own.

    `conversion` is for what is read in parts: what is small comes as it is stored.
    `wants` are the numbers of the leaves that the arrays are for.
    """

    record: Record
    views: tuple[View, ...] | None = None
    conversion: Conversion | None = None
    wants: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        template = self.record.template
        if self.views is None:
            return template.nbytes
        return sum(math.prod(view.shape) for view in self.views) * template.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements to read."""
        if 0 in self.record.template.shape:
            return True
        views = self.views
        return views is not None and all(0 in view.shape for view in views)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        if self.views is None:
            return [self.record.template.shape]
        return [view.shape for view in self.views]


class Fetched(NamedTuple):
    """The arrays that a request has given.

    `owned`: the memory is the caller's alone, and may be written to. `converted`: the
    numbers are out of the `conversion` of the request. `lost`: why that failed.
    """

    arrays: list[np.ndarray]
    owned: bool
    converted: bool = False
    lost: str = ""


Results = Generator[tuple[Request, Fetched], None, None]


class Reading(NamedTuple):
    """One planned read: `digests` waits for them, and is None if nothing is verified;
    `budget` is the memory for what is under way, `problems` says what is wrong with
    which leaf."""

    source: Source
    digests: Digests | None
    budget: int
    problems: dict[str, str]

    def explain(self, error: Exception) -> str:
        """The fault in bytes that could not be read.

        **Raises:** the error, unless it says that they are missing or damaged.
        """
        return _text.escape(unreadable(self.source.root, error, MISSING))


def unreadable(root: Backend, error: Exception, missing: str) -> str:
    """The fault in bytes that could not be read.

    **Raises:** the error, unless it says that they are missing or damaged.
    """
    found = root.explain(error)
    if _kv.is_missing(found):
        return missing
    if not isinstance(found, ValueError):
        raise found from error
    return f"it cannot be read ({str(found).splitlines()[0]})"
