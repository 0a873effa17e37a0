"""Stored leaves as their targets ask for them: one planned read of a checkpoint."""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format import _view
from .._format._leaves import Record
from .._format._view import View
from .._runtime import _progress
from .._runtime._progress import Advance
from .._tree import _moves, _restore
from .._tree._moves import Move
from .._tree._target import Target
from . import _partial, _read
from ._requests import Fetched, Request
from ._source import Source


class Want(NamedTuple):
    """One leaf to read: what a load and `materialise` have in common. With a `move`, it
    is read as the bits that are moved."""

    record: Record
    view: View | None
    target: Target
    move: Move | None = None


# Smaller arrays are soon on their devices.
_LARGE = 1 << 16
# So many leaves of one shape and dtype are worth a compiled function.
_MANY = 1024


def load(
    source: Source,
    wants: Sequence[Want],
    verify: bool,
    max_bytes: int | None = None,
    progress: bool = False,
) -> list[Any]:
    """Reads leaves as their targets ask, stored arrays that are shared only once.

    **Raises:** `RuntimeError` as `_read.read`, and for values that a conversion loses.
    """
    with bar(source, wants, progress) as advance:
        return load_some(source, wants, verify, max_bytes, advance)


@contextlib.contextmanager
def bar(
    source: Source, wants: Sequence[Want], progress: bool
) -> Iterator[Advance | None]:
    """The progress bar of a load, if it is to be shown."""
    requests = _requests(source, wants) if progress else []
    nbytes = sum(request.nbytes for request in requests)
    with _progress.bar("load", nbytes, len(requests), progress) as advance:
        yield advance if progress else None


def load_some(
    source: Source,
    wants: Sequence[Want],
    verify: bool,
    max_bytes: int | None,
    advance: Advance | None,
) -> list[Any]:
    """As `load`, of a part of what a bar counts."""
    made = _Made(wants)
    sending = _Sending(_read.BUDGET if max_bytes is None else max_bytes)
    requests = _requests(source, wants)
    results = _read.read(source, requests, verify, max_bytes)
    with contextlib.closing(results):
        for request, arrays in results:
            made.add(request, arrays)
            del arrays  # They are not to live until the next ones have arrived.
            sending.add(made, request)
            if advance is not None:
                advance(request.nbytes, 1)
    out = made.finish()
    if made.lost:
        lines = [f"  {name}: {why}" for name, why in made.lost.items()]
        raise RuntimeError(
            f"Values of the checkpoint at `{source.root}` do not survive the "
            "conversion that is asked for; nothing was loaded:\n" + "\n".join(lines)
        )
    return out


def _requests(source: Source, wants: Sequence[Want]) -> list[Request]:
    """The requests of a load: each stored array is read once."""
    aliases = source.index.leaves.aliases
    if not aliases and len({want.record.place for want in wants}) == len(wants):
        return _alone(wants)
    requests: dict[Any, Request] = {}
    members: dict[Any, list[int]] = {}
    for i, want in enumerate(wants):
        request = _request(want, [])
        dtype = request.conversion and request.conversion.dtype
        place = want.record.place
        key = (aliases.get(place, place), request.views, dtype)
        members.setdefault(key, []).append(i)
        requests.setdefault(key, request._replace(wants=members[key]))
    return list(requests.values())


def _alone(wants: Sequence[Want]) -> list[Request]:
    """The requests of leaves of which each has a stored array of its own."""
    # Most leaves are wanted as another one like them, and are asked for as that.
    known: dict[tuple[int, int], Request] = {}
    out = []
    for i, want in enumerate(wants):
        record, view, target, move = want
        key = id(record.template), id(target)
        is_plain = view is None and move is None and record.part is None
        alike = known.get(key) if is_plain else None
        if alike is not None:
            out.append(Request(record, alike.views, alike.conversion, [i]))
            continue
        request = _request(want, [i])
        if is_plain:
            known[key] = request
        out.append(request)
    return out


def _request(want: Want, wants: list[int]) -> Request:
    record, view, target, move = want
    views = None if view is None else (view,)
    regions = _restore.regions(target)
    if move is not None:
        regions = _moves.regions(move)
    elif record.part is not None:
        regions = _partial.stored_regions(record, view, regions)
    if regions is not None:
        whole = view or _view.whole(record.template.shape)
        views = tuple(whole.take((*region, ...)) for region in regions)
    return Request(record, views, _restore.conversion(record.template, target), wants)


class _Sending:
    """Leaves on their way to devices: what they are made of stays in host memory until
    they are there. So no more than `budget` bytes are under way."""

    def __init__(self, budget: int):
        self._budget = budget
        self._leaves: collections.deque[tuple[int, list[Any]]] = collections.deque()
        self._size = 0

    def add(self, made: "_Made", request: Request) -> None:
        nbytes = request.nbytes
        if nbytes < _LARGE:
            return
        self._leaves.append((nbytes, made.of(request)))
        self._size += nbytes
        while self._size > self._budget:
            size, leaves = self._leaves.popleft()
            jax.block_until_ready(leaves)
            self._size -= size


class _Made:
    """The leaves, made as their arrays arrive. Small ones of which there are many alike
    are made into jax arrays together."""

    def __init__(self, wants: Sequence[Want]):
        self.lost: dict[str, str] = {}
        self._wants = wants
        self._out: list[Any] = [None] * len(wants)
        counts = collections.Counter(want.target for want in wants)
        self._waiting: dict[Target, list[tuple[int, np.ndarray]]] = {
            target: [] for target, count in counts.items() if count >= _MANY
        }

    def add(self, request: Request, arrays: Fetched) -> None:
        owned = arrays.owned
        for i in request.wants:
            name = self._wants[i].record.name
            if arrays.lost:
                self.lost[name] = arrays.lost
            elif arrays.converted or not self._wait(i, arrays.arrays):
                try:
                    self._out[i] = self._leaf(i, arrays, owned)
                except (ValueError, TypeError) as e:
                    self.lost[name] = str(e)
                owned = False  # Other leaves that share the bytes get copies.

    def of(self, request: Request) -> list[Any]:
        """The leaves that were made of a request."""
        return [self._out[i] for i in request.wants]

    def _leaf(self, i: int, arrays: Fetched, owned: bool) -> Any:
        record, _, target, move = self._wants[i]
        arguments = arrays.arrays, record.template, target, owned, arrays.converted
        if move is None:
            return _restore.from_host(*arguments)
        parts = _restore.host_parts(*arguments)
        return _moves.begin(move, parts)

    def _wait(self, i: int, arrays: Sequence[np.ndarray]) -> bool:
        """Whether a leaf is one of many, and is made of one array with those."""
        target = self._wants[i].target
        waiting = self._waiting.get(target)
        if waiting is None or target.sharding is not None:
            return False
        (array,) = arrays
        if not _restore.is_plain_small(target, array):
            return False
        waiting.append((i, array))
        if len(waiting) == _restore.BATCH:
            numbers, arrays = zip(*waiting)
            for number, made in zip(numbers, _restore.batch_to_jax(*arrays)):
                self._out[number] = made
            waiting.clear()
        return True

    def finish(self) -> list[Any]:
        for target, waiting in self._waiting.items():
            for i, array in waiting:
                template = self._wants[i].record.template
                self._out[i] = _restore.from_host([array], template, target, False)
        return self._out
