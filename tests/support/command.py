"""The command `eqx-ckpt`, run in this process as an installation starts it."""

import functools as ft
import importlib.metadata
import os
import sys
from collections.abc import Callable
from unittest import mock


@ft.cache
def _script() -> Callable[[], None]:
    entries = importlib.metadata.entry_points(group="console_scripts", name="eqx-ckpt")
    return next(iter(entries)).load()


def main(arguments: list[str | os.PathLike[str]]) -> int:
    """Runs one command and returns its exit status."""
    argv = ["eqx-ckpt", *map(os.fspath, arguments)]
    with mock.patch.object(sys, "argv", argv):
        try:
            _script()()
        except SystemExit as e:
            assert isinstance(e.code, int)
            return e.code
    raise AssertionError("the script returned")
