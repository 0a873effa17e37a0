"""The calls that load a whole tree, as functions of a path and a tree.

No test is here."""

from collections.abc import Callable
from typing import Any

import eqx_ckpt as ec


def load(path: Any, like: Any, **options: Any) -> Any:
    return ec.tree_deserialise_leaves(path, like, **options)


def splice(path: Any, like: Any, **options: Any) -> Any:
    return ec.materialise(ec.open(path).splice(like, **options))


def init(path: Any, like: Any, **options: Any) -> Any:
    return ec.load_or_init(lambda: like, path, **options)


def graft(path: Any, like: Any, **options: Any) -> Any:
    options = {"scalars": "load", **options}
    return ec.graft(like, path, [(lambda m: m, lambda c: c)], **options)[0]


BY_PATH: dict[str, Callable[..., Any]] = {
    call.__name__: call for call in (load, splice, init, graft)
}
