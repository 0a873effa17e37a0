import os


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jaxtyping


# Every call in the tests checks the types of the package.
jaxtyping.install_import_hook("eqx_ckpt", "beartype.beartype")

import hypothesis
import jax.random as jr
import pytest


# Machines that run the tests are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at each call, the same ones every run."""
    keys = iter(jr.split(jr.key(0), 1000))
    return lambda: next(keys)
