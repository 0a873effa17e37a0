"""Errors that callers tell apart by their type."""


class DamagedError(RuntimeError, ValueError):
    """A save that lacks some of its bytes, or has other bytes than were written. It
    is a `RuntimeError`, as loads raise, and a `ValueError`, as parsers raise.

    Every call that reads a checkpoint raises it. Nothing else is damage: a file that
    you may not read, a disk that fails or a server that does not answer raises an
    `OSError`, such as `PermissionError`. The next call may succeed.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, pathlib
        >>> ec.tree_serialise_leaves("broken", {"w": jnp.ones(3)}, layout="zarr")
        >>> _ = pathlib.Path("broken/w/c/0").write_bytes(bytes(12))
        >>> try:
        ...     ec.tree_deserialise_leaves("broken", {"w": jnp.ones(3)})
        ... except ec.DamagedError as e:
        ...     print(str(e).splitlines()[1])
          w: its bytes are not those that were saved

        ```
    """


class MissingError(DamagedError):
    """Bytes that should be there are not: a file, or the end of it."""


class BeyondError(MissingError):
    """The file is there, and what was asked for begins where it ends, or later."""


class ReplacedError(RuntimeError):
    """A checkpoint that was replaced or deleted after it was opened: open it again.

    Every call that reads an open checkpoint raises it. What was opened is never mixed
    with what came after.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("replaced", {"w": jnp.zeros(3)})
        >>> ckpt = ec.open("replaced")
        >>> ec.tree_serialise_leaves("replaced", {"w": jnp.ones(3)})
        >>> try:
        ...     ckpt["w"].read()
        ... except ec.ReplacedError:
        ...     print(ec.open("replaced")["w"].read())
        [1. 1. 1.]

        ```
    """
