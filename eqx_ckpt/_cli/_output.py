"""Results of commands: data for `--json`, lines for people.

All that comes from a file, such as names and metadata, is escaped here.
"""

import json
import math
import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import click
import numpy as np

from .._kernel._format import _text
from .._show._tables import Span
from .._show._terminal import Line


class CommandResult(NamedTuple):
    """Result of a command. `data` is what JSON has, or a function that makes it.
    `status` 1: what it was asked about is so, as damage or a difference."""

    data: Any
    lines: Iterable[Line]
    status: int = 0


_STYLES: dict[str, dict[str, Any]] = {
    "": {},
    "title": {"bold": True},
    "quiet": {"dim": True},
    "name": {"fg": "cyan"},
    "good": {"fg": "green"},
    "bad": {"fg": "red"},
    "odd": {"fg": "yellow"},
}


def say(said: CommandResult, as_json: bool) -> int:
    """Prints what a command says, and returns its exit status."""
    if as_json:
        data = said.data() if callable(said.data) else said.data
        print(json.dumps(jsonable(data), indent=2, allow_nan=False))
    else:
        has_colour = is_coloured(sys.stdout)
        for line in said.lines:
            print(drawn(line, has_colour))
    return said.status


def is_coloured(stream: Any) -> bool:
    """Obeys NO_COLOR (https://no-color.org) and FORCE_COLOR; else asks the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def drawn(line: Line, has_colour: bool) -> str:
    """A line as it is printed: escaped, and then coloured."""
    spans = [Span(line)] if isinstance(line, str) else line
    texts = [(_text.escape(span.text), _STYLES[span.style]) for span in spans]
    if not has_colour:
        return "".join(text for text, _ in texts).rstrip()
    return "".join(
        click.style(text, **style) if style else text for text, style in texts
    )


def jsonable(x: object) -> Any:
    """A value as JSON has it: numbers that are not finite are strings there."""
    if isinstance(x, dict):
        return {str(key): jsonable(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [jsonable(value) for value in x]
    if isinstance(x, np.generic):
        return jsonable(x.item())
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, complex):
        return [jsonable(x.real), jsonable(x.imag)]
    if x is None or isinstance(x, (bool, int, str)):
        return x
    return str(x)
