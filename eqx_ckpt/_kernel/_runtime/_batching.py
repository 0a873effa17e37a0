"""Items in batches of so many bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar


T = TypeVar("T")


def batched(
    items: Iterable[T], nbytes: Callable[[T], int], most: int
) -> Iterator[list[T]]:
    """Items that follow each other, in batches of at most so many bytes, or of one."""
    batch: list[T] = []
    size = 0
    for item in items:
        more = nbytes(item)
        if batch and size + more > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch
