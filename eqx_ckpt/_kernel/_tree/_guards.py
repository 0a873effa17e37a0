"""JAX's guards of the caller's own functions, such as `transfer_guard`."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Without the guards and checks of JAX: a save or a load is asked for, and copies
    all bits between hosts and devices, those of NaNs as well."""
    with (
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):
        yield
