"""A load by a process of a team, of which the test reads how it has ended."""

import time
from typing import Any

import eqx_ckpt as ec
from support.member import path


def load(like: Any, tag: str | None = None, **options: Any) -> None:
    """Prints the error of a load of `c`, or that it has loaded."""
    start = time.monotonic()
    try:
        options["processes"] = ec.Together(tag, 500)
        ec.tree_deserialise_leaves(path / "c", like, **options)
    except Exception as e:
        print(f"{type(e).__name__}: {e}".replace(chr(10), " "))
    else:
        print("loaded")
    assert time.monotonic() - start < 400
