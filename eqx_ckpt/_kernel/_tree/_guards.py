"""JAX's guards of the caller's own functions, such as `transfer_guard`."""

import contextlib
import operator
from collections.abc import Iterator

import jax


# The options that are set for a block, and to what. Each has a context manager in JAX
# that is called so, and a flag in its configuration.
_LIFTED = {
    "disable_jit": False,
    "debug_nans": False,
    "debug_infs": False,
    "transfer_guard_host_to_device": "allow",
    "transfer_guard_device_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
}
_in_force = operator.attrgetter(*(f"jax_{name}" for name in _LIFTED))
_free = {None, *_LIFTED.values()}


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Without the guards and checks of JAX: a save or a load is asked for, and copies
    all bits between hosts and devices, those of NaNs as well."""
    # To set them takes longer than a look, and most often nothing is in force.
    if _free.issuperset(_in_force(jax.config)):
        yield
        return
    with contextlib.ExitStack() as held:
        for name, value in _LIFTED.items():
            held.enter_context(getattr(jax, name)(value))
        yield
