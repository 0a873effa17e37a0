"""JAX's guards of the caller's own functions, such as `transfer_guard`."""

import contextlib
import operator
from collections.abc import Iterator

import jax


_in_force = operator.attrgetter(
    *("jax_disable_jit", "jax_debug_nans", "jax_debug_infs"),
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_device",
    "jax_transfer_guard_device_to_host",
)


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Without the guards and checks of JAX: a save or a load is asked for, and copies
    all bits between hosts and devices, those of NaNs as well."""
    # To set them takes longer than a look, and most often nothing is in force.
    if {None, False, "allow"}.issuperset(_in_force(jax.config)):
        yield
        return
    with (
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):
        yield
