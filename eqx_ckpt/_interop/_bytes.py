"""`to_bytes` and `from_bytes`: a checkpoint as the bytes of one file."""

import io
from typing import Unpack

from jaxtyping import PyTree

from .._kernel._load import _deserialise, _load_options
from .._kernel._load._load_options import LoadKeywords
from .._kernel._runtime import _arguments
from .._kernel._save import _options, _serialise
from .._kernel._save._options import BytesKeywords
from .._kernel._storage._open_files import FileBytes
from .._kernel._tree import _leaf
from .._kernel._tree._filters import FilterSpec, IsLeaf


_DATA = _arguments.Rule(
    "bytes", lambda x: isinstance(x, bytes | bytearray | memoryview)
)


@_arguments.checked(_options.DEFAULTS)
def to_bytes(
    pytree: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    **options: Unpack[BytesKeywords],
) -> bytes:
    """A tree as the bytes of a checkpoint in one file, to be sent or kept elsewhere.

    If you write them to a file whose name ends in `.zip`, [`open`][] opens it.

    **Arguments:**

    - `pytree`, `filter_spec`, `is_leaf`, `options`: as in [`tree_serialise_leaves`][],
        except those about a path. `max_bytes` does not count the bytes that are
        returned.

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
    _serialise.tree_serialise_leaves(file, pytree, filter_spec, is_leaf, **options)
    return file.getvalue()


@_arguments.checked(_load_options.DEFAULTS, data=_DATA)
def from_bytes(
    data: bytes | bytearray | memoryview,
    like: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    **options: Unpack[LoadKeywords],
) -> PyTree:
    """Loads leaves into a tree from the bytes of [`to_bytes`][], each by its name.

    Bytes of other formats work too: those of any one file that [`open`][] reads, such
    as a `.safetensors`. To open the bytes lazily, use `ec.open(io.BytesIO(data))`.

    **Arguments:**

    - `data`: the bytes. They are read where they are, and not copied.
    - `like`, `filter_spec`, `is_leaf`, `options`: as in [`tree_deserialise_leaves`][].

    **Returns:** `like`, with the selected leaves loaded.

    **Raises:** as `tree_deserialise_leaves`; `ValueError` for bytes that are not a
    checkpoint, or are a damaged one.

    !!! example

        ```python
        >>> import jax.numpy as jnp, eqx_ckpt as ec
        >>> data = ec.to_bytes({"model": {"w": jnp.ones(2)}, "step": 3})
        >>> ec.from_bytes(data, {"w": jnp.zeros(2)}, source=lambda c: c.model)
        {'w': Array([1., 1.], dtype=float32)}

        ```
    """
    load = _deserialise.tree_deserialise_leaves
    return load(FileBytes(data), like, filter_spec, is_leaf, **options)
