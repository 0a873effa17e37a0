"""What several tests use. No test is here."""

import contextlib
import fcntl
import json
import os
import pathlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import hypothesis
import jax
import jax.experimental
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest

import eqx_ckpt as ec
from support import scripts


# What the oldest versions that are supported lack, or call otherwise.
enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
_orbax = tuple(map(int, version("orbax-checkpoint").split(".")[:2]))
new_orbax = pytest.mark.skipif(_orbax < (0, 12), reason="needs Orbax 0.12")


def examples(count: int) -> hypothesis.settings:
    """So many examples of a property with `-m long`, and otherwise a sixth."""
    default = hypothesis.settings().max_examples
    return hypothesis.settings(max_examples=count * default // 100)


def long(*cases: Any) -> list[Any]:
    """Parameters of a test with which it is run by `-m long` only."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]


def run_python(code: str, *, check: bool = True, **env: str) -> str:
    """Runs code in a process of its own and returns what it prints."""
    done = scripts.run(code, **env)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_program(name: str, *arguments: object, check: bool = True, **env: str) -> str:
    """Runs a program of tests/programs in a process of its own and returns what it
    prints. It is a process without the type checks of the tests."""
    done = scripts.run(scripts.program(name), *arguments, **env)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call_main(name: str, *arguments: object, **env: str) -> list[str]:
    """Calls `main` of a module of the tests in a process of its own, with arguments
    that JSON has, and returns the lines that it prints."""
    out = run_program("call_a_main", name, json.dumps(arguments), **env)
    return out.splitlines()


class BytesRead:
    """Counts the bytes that are read from files in a `with` block: `.total`."""

    def __enter__(self):
        self._counting = ec.counting()
        self._count = self._counting.__enter__()
        return self

    def __exit__(self, *error):
        self._counting.__exit__(*error)
        self.total = self._count()


def tree_at(step: int) -> dict[str, Any]:
    """What is saved at a step of a run."""
    return {"x": jnp.full(1000, float(step)), "step": step}


def fill_run(manager: Any, steps: Sequence[int], **metrics: Sequence[float]) -> None:
    """Saves steps, with one of the values of each metric."""
    for i, step in enumerate(steps):
        numbers = {name: values[i] for name, values in metrics.items()}
        assert manager.save(step, tree_at(step), numbers)


def until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until something is so that is about to be, however busy the machine is."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"it is not so after {seconds} seconds"
        time.sleep(0.002)


def files_of(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """All files below a directory and their bytes."""
    root = pathlib.Path(path)
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def damage(path: pathlib.Path) -> None:
    """Flips a bit in the middle of the largest file."""
    files = [x for x in [path, *path.rglob("*")] if x.is_file()]
    file = max(files, key=lambda x: x.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the advisory lock of a directory, as a process that saves there does."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(directory: str | os.PathLike[str]) -> bool:
    """Whether somebody holds that lock."""
    try:
        with locked(directory):
            return False
    except BlockingIOError:
        return True


def _bits(array: np.ndarray) -> bytes:
    """The bits of an array. Where they are fewer than a byte, the rest may differ."""
    if array.dtype.itemsize > 1 or array.dtype.kind in "biu":
        return array.tobytes()
    kind = ml_dtypes.iinfo if "int" in array.dtype.name else ml_dtypes.finfo
    mask = np.uint8(2 ** kind(array.dtype).bits - 1)
    return (np.ascontiguousarray(array).view(np.uint8) & mask).tobytes()


def facts(x: Any) -> tuple:
    """All that has to be the same of a leaf that comes back, down to its bits."""
    if isinstance(x, jax.Array):
        place = (x.committed, x.sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return "key", x.dtype, x.shape, np.asarray(jr.key_data(x)).tobytes(), *place
        bits = _bits(np.asarray(x))
        return "jax", x.dtype, x.shape, bool(x.weak_type), bits, *place
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind not in "SU":
        if x.dtype == jax.dtypes.float0:
            return type(x), x.dtype, x.shape
        return type(x), x.dtype, x.shape, _bits(np.asarray(x))
    if type(x) is float:
        return float, struct.pack("d", x)
    if type(x) is complex:
        return complex, struct.pack("dd", x.real, x.imag)
    return type(x), x


def assert_alike(tree: Any, expected: Any) -> None:
    """Two trees are of one structure, and so are their leaves in every respect."""
    assert jtu.tree_structure(tree) == jtu.tree_structure(expected)
    leaves, _ = jtu.tree_flatten_with_path(tree)
    for (path, leaf), other in zip(leaves, jtu.tree_leaves(expected), strict=True):
        assert facts(leaf) == facts(other), jtu.keystr(path)


def read_unreadable(path):
    """Opens a file of another format, where its leaves that cannot be read say why.

    All others are read."""
    ckpt = ec.open(path)
    bad = [leaf for leaf in ckpt.values() if repr(leaf).endswith("(unreadable))")]
    names = {leaf.name for leaf in bad}
    ec.materialise([leaf for leaf in ckpt.values() if leaf.name not in names])
    for leaf in bad:
        leaf.read()
