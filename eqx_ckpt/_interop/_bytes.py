"""`to_bytes` and `from_bytes`: a checkpoint as bytes, which are a file of ours."""

import io
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from .._load import _deserialise
from .._load._rename import Renaming
from .._runtime import _processes
from .._save import _serialise
from .._save._function import Functions
from .._tree import _leaf
from .._tree._filters import FilterSpec, IsLeaf
from .._tree._static import Static


def to_bytes(
    pytree: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    dtype: Any = None,
    metadata: Any = None,
    compression: str | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
    functions: Functions = None,
) -> bytes:
    """A tree as the bytes of a checkpoint in one file, to be sent or kept elsewhere.

    Written to a file whose name ends in `.zip`, they are a checkpoint that [`open`][]
    opens.

    **Arguments:**

    - `pytree`, `filter_spec`, `is_leaf`, `where`, `dtype`, `metadata`: as in
        [`tree_serialise_leaves`][].
    - `compression`, `progress`, `functions`: as there.
    - `max_bytes`: as there, beyond the bytes that are returned.

    **Returns:** bytes.

    **Raises:** as `tree_serialise_leaves`, for what cannot be stored.

    !!! example

        ```python
        >>> import jax.numpy as jnp, eqx_ckpt as ec
        >>> data = ec.to_bytes({"w": jnp.ones(2), "step": 3})
        >>> ec.from_bytes(data, {"w": jnp.zeros(2), "step": 0})
        {'step': 3, 'w': Array([1., 1.], dtype=float32)}

        ```
    """
    file = io.BytesIO()
    _serialise.tree_serialise_leaves(
        file,
        pytree,
        filter_spec,
        is_leaf,
        where=where,
        dtype=dtype,
        metadata=metadata,
        compression=compression,
        max_bytes=max_bytes,
        progress=progress,
        functions=functions,
    )
    return file.getvalue()


def from_bytes(
    data: bytes | bytearray | memoryview,
    like: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    source: str | Callable[[Any], Any] | None = None,
    rename: Renaming = None,
    missing: str = "error",
    unexpected: str = "error",
    static: Static = "error",
    cast: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    timeout: int | float = _processes.TIMEOUT,
    tag: str | int | None = None,
) -> PyTree:
    """Loads leaves into a tree from the bytes of [`to_bytes`][], each by its name.

    Bytes of other formats do as well: what is in a `.safetensors`, a `.eqx` or a
    msgpack file of flax. For a checkpoint that is opened lazily there is
    `ec.open(io.BytesIO(data))`.

    **Arguments:**

    - `data`: the bytes. They are copied once.
    - `like`, `filter_spec`, `is_leaf`, `where`, `source`, `rename`: as in
        [`tree_deserialise_leaves`][].
    - `missing`, `unexpected`, `static`, `cast`, `verify`: as there.
    - `max_bytes`, `progress`, `timeout`, `tag`: as there.

    **Returns:** `like`, with the selected leaves loaded.

    **Raises:** as `tree_deserialise_leaves`; `ValueError` for bytes that are no
    checkpoint, or a damaged one.

    !!! example

        ```python
        >>> import jax.numpy as jnp, eqx_ckpt as ec
        >>> data = ec.to_bytes({"model": {"w": jnp.ones(2)}, "step": 3})
        >>> ec.from_bytes(data, {"w": jnp.zeros(2)}, source=lambda c: c.model)
        {'w': Array([1., 1.], dtype=float32)}

        ```
    """
    return _deserialise.tree_deserialise_leaves(
        io.BytesIO(data),
        like,
        filter_spec,
        is_leaf,
        where=where,
        source=source,
        rename=rename,
        missing=missing,
        unexpected=unexpected,
        static=static,
        cast=cast,
        verify=verify,
        max_bytes=max_bytes,
        progress=progress,
        timeout=timeout,
        tag=tag,
    )
