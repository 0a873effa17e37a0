"""Completion in the shell: paths, steps of runs, and names of nodes and leaves. Only
local files are read, an index or a header each, and no array.
"""

import contextlib
import errno
import functools as ft
import json
import os
import re
import stat
import zipfile
from typing import Any, BinaryIO

import click
from click.shell_completion import CompletionItem


_INDEX = "eqx_ckpt.json"
# More is not read while somebody waits.
_MAX_BYTES = 2**21
_MOST = 1000
_step = re.compile(r"0|[1-9][0-9]{0,17}")
# What a name in a file may have so that a shell is told of it.
_plain = re.compile(r"[\w.%~+=/-]+", re.ASCII)


def _steps(path: str) -> list[int]:
    """The steps below a directory, the newest first."""
    with contextlib.suppress(OSError):
        found = filter(_step.fullmatch, os.listdir(path or "."))
        return sorted(
            (int(x) for x in found if os.path.isdir(f"{path or '.'}/{x}/default")),
            reverse=True,
        )
    return []


def _paths(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str] | list[CompletionItem]:
    """Paths of steps; other files are known to the shell."""
    above, slash, start = incomplete.rpartition("/")
    steps = _steps(above + slash)
    if not steps:
        return click.Path().shell_complete(ctx, param, incomplete)
    return [f"{above}{slash}{x}" for x in steps if str(x).startswith(start)][:_MOST]


def _numbers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Steps of the run that the command is given."""
    steps = map(str, _steps(_path(ctx) or ""))
    return [x for x in steps if x.startswith(incomplete)][:_MOST]


def _leaves(
    ctx: click.Context, param: click.Parameter, incomplete: str, has_nodes: bool = False
) -> list[str]:
    """Names of leaves, or of nodes too, of the checkpoint that the command is given."""
    path = _path(ctx)
    return _next(_names(path), incomplete, has_nodes)[:_MOST] if path else []


def _next(names: list[str], start: str, has_nodes: bool) -> list[str]:
    """The nodes and leaves of the next level; below a node that is the only one,
    those of the level after it."""
    while True:
        inside = [x for x in names if x.startswith(start)]
        ends = (x.find(".", len(start)) for x in inside)
        found = {x[: None if n < 0 else n]: n < 0 for x, n in zip(inside, ends)}
        if len(found) != 1 or all(found.values()):
            # A node that is one of several ends the word: its dot is typed.
            return [x if y or has_nodes else f"{x}." for x, y in found.items()]
        (only,) = found
        if has_nodes and only != start.removesuffix("."):
            return [only, *_next(inside, f"{only}.", has_nodes)]
        start = f"{only}."


def _path(ctx: click.Context) -> str | None:
    """The first path that a command is given. While an option waits for its value,
    Click leaves paths among what it has not read yet."""
    given = ctx.params
    first = given.get("path") or given.get("source")
    return first or next(iter([*(given.get("sources") or ()), *ctx.args]), None)


def _names(path: str) -> list[str]:
    """The names in a checkpoint, or in the newest step of a run; of what cannot be
    read none."""
    steps = _steps(path)
    places = [path, f"{path}/default", *(f"{path}/{x}/default" for x in steps[:1])]
    for place in places:
        with contextlib.suppress(Exception):  # Whatever is in it: nobody has asked yet.
            return [x for x in _stored(place) if _plain.fullmatch(x)]
    return []


def _opened(path: str) -> BinaryIO:
    """**Raises:** `OSError` for what is no file, and may have no end."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
    return os.fdopen(number, "rb")


def _stored(path: str) -> list[str]:
    if path.endswith(".safetensors"):
        with _opened(path) as file:
            size = int.from_bytes(file.read(8), "little")
            # What is cut off is no JSON.
            header = json.loads(file.read(min(size, _MAX_BYTES)))
        return [x for x in header if x != "__metadata__"]
    if path.endswith(".zip"):
        with (
            _opened(path) as whole,
            zipfile.ZipFile(whole) as archive,
            archive.open(_INDEX) as file,
        ):
            data = file.read(_MAX_BYTES)
    else:
        with _opened(f"{path}/{_INDEX}") as file:
            data = file.read(_MAX_BYTES)
    return json.loads(data)["names"]


# For Click: the arguments and options that take paths, steps, and names of these kinds.
PATH: dict[str, Any] = {"type": click.Path(path_type=str), "shell_complete": _paths}
STEP: dict[str, Any] = {"type": int, "shell_complete": _numbers}
LEAF: dict[str, Any] = {"shell_complete": _leaves}
NODE: dict[str, Any] = {"shell_complete": ft.partial(_leaves, has_nodes=True)}
