"""`counting`: the bytes that a block of code reads."""

import contextlib
from collections.abc import Callable, Iterator

from . import _store


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Counts the bytes that are read from files in a `with` block.

    It shows what a load costs: arrays, digests and the index together. Reads by this
    library and by TensorStore count, memory-mapped ones too, in all threads of the
    process. Requests to object stores and servers do not count.

    **Returns:** a context manager. Its value is a function that returns the number of
    bytes so far; after the block it returns the number of the whole block.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("two", {"a": jnp.ones(1000), "b": jnp.ones(9000)})
        >>> ckpt = ec.open("two")
        >>> with ec.counting() as bytes_read:
        ...     a = ckpt["a"].read()
        >>> a.nbytes, 4_000 <= bytes_read() < 5_000
        (4000, True)

        ```
    """
    start = _store.bytes_read()
    end: int | None = None
    try:
        yield lambda: (_store.bytes_read() if end is None else end) - start
    finally:
        end = _store.bytes_read()
