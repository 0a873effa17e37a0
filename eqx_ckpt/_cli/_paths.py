"""From the arguments PATH and NAME to what is meant by them."""

import contextlib
import re
from typing import Any

import click

from .._edit import _sample
from .._kernel._errors import DamagedError
from .._kernel._format import _names, _text
from .._kernel._load import _checkpoint, _nodes, _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._run import _run_path
from .._kernel._run._steps import Steps
from .._kernel._tree import _folding, _nearest


def open_any(path: str) -> Checkpoint | Steps:
    """The checkpoint at a path, or in the directory of a step there; or the steps of
    the run there.

    **Raises:** what `ec.open` raises for the path, if there is neither.
    """
    try:
        return Checkpoint(_open.open_at(path))
    except DamagedError:
        raise
    except (FileNotFoundError, ValueError):
        # A run comes before its newest step, which `ec.open` takes.
        return _run_path.run_at(path) or _checkpoint.open(path)


def node(ckpt: Checkpoint, name: str) -> Any:
    """A node of a checkpoint's own tree, by its dotted name.

    **Raises:** `KeyError` that names the nearest, if there is none.
    """
    if not any(_names.is_under(leaf, name) for leaf in ckpt):
        nodes = {x[:i] for x in ckpt for i, letter in enumerate(x) if letter == "."}
        near = _nearest.NameIndex(sorted(nodes)).nearest(name, 3)
        hint = f"The nearest nodes are {_folding.some(near)}." if near else ""
        raise KeyError(
            f"The checkpoint at `{ckpt.path}` has no node or leaf "
            f"`{_text.bounded(name, 200)}`. {hint}".rstrip()
        )
    return _nodes.node_at(ckpt.tree, name)


def part(ckpt: Checkpoint, name: str) -> Any:
    """The checkpoint, or the leaf or node of a name, with the names below it.

    **Raises:** `KeyError` as `node` does.
    """
    if not name:
        return ckpt
    return {name: ckpt[name]} if name in ckpt else node(ckpt, name)


_SLICE = re.compile(r"(.*?)\[([^\[\]]*)\]", re.DOTALL)


def split_slice(name: str) -> tuple[str, tuple[int | slice, ...] | None]:
    """`w[:8, 0]` as its name and its index; None for a name without brackets."""
    match = _SLICE.fullmatch(name)
    if match is None:
        return name, None
    index = ()
    with contextlib.suppress(ValueError):
        index = _sample.parse_index(match[2])
    if not index:
        raise click.BadParameter(
            f"`[{match[2]}]` is no index: integers and slices, as in `[0, :8]`."
        )
    return match[1], index
