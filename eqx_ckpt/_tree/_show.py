"""How names, trees and sizes are printed: folded by layer, and always escaped."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .._format import _text


T = TypeVar("T")


# What `str` gives for an index: longer digits are a key that looks like one.
_number = re.compile(r"0|[1-9][0-9]{0,17}")

_folded = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")

_short = {
    "bool": "bool",
    "bfloat16": "bf16",
    "float": "f",
    "complex": "c",
    "uint": "u",
    "int": "i",
}


class TreeLine(NamedTuple):
    """What is shown of a leaf, or of a static field (`nbytes` is None)."""

    name: str
    text: str
    nbytes: int | None = None

    @property
    def row(self) -> tuple[str, str]:
        if self.nbytes is None:
            return self.name, self.text
        return self.name, f"{self.text}  {_text.size(self.nbytes)}"


def short_dtype(dtype: str) -> str:
    """`float32` as `f32`, as Equinox prints it."""
    if dtype in ("bool", "bfloat16"):
        return _short[dtype]
    match = re.fullmatch(r"(float|complex|uint|int)(\d+)(_\w+)?", dtype)
    if match is None:
        return dtype
    return _short[match[1]] + match[2] + (match[3] or "")


def short_array(dtype: str, shape: Sequence[int]) -> str:
    return f"{short_dtype(dtype)}[{','.join(map(str, shape))}]"


def is_number(part: str) -> bool:
    return _number.fullmatch(part) is not None


def fold(names: Iterable[str]) -> list[str]:
    """Dotted names with runs of numbers folded: `layers.{0..31}.weight`."""
    rows: dict[tuple[str, ...], None] = dict.fromkeys(
        tuple(name.split(".")) for name in names
    )
    depth = max(map(len, rows), default=0)
    for position in range(depth):
        groups: dict[Any, list[int]] = {}
        for row in rows:
            if position < len(row) and _number.fullmatch(row[position]):
                key = (row[:position], row[position + 1 :])
                groups.setdefault(key, []).append(int(row[position]))
            else:
                groups[row] = []
        rows = {}
        for key, numbers in groups.items():
            if not numbers:
                rows[key] = None
                continue
            for run in _runs(sorted(set(numbers))):
                rows[(*key[0], run, *key[1])] = None
    return [".".join(row) for row in rows]


def unfold(name: str) -> Iterator[str]:
    """The names that were folded into one."""
    found = _folded.search(name)
    if found is None:
        yield name
        return
    for i in range(int(found[1]), int(found[2]) + 1):
        yield from unfold(f"{name[: found.start()]}{i}{name[found.end() :]}")


def fold_rows(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """`(dotted name, text)` rows, with the names of one text folded, in their order."""
    grouped: dict[str, list[str]] = {}
    order: dict[str, int] = {}
    for number, (name, text) in enumerate(rows):
        grouped.setdefault(text, []).append(name)
        order.setdefault(name, number)

    def place(row: tuple[str, str]) -> int:
        return order.get(_folded.sub(r"\1", row[0]), 0)

    folded = [(name, text) for text, names in grouped.items() for name in fold(names)]
    return sorted(folded, key=place)


# Of the problems of one kind.
_MOST = 40


class Problems:
    """All that is wrong with a call, by its kind: `(name of the leaf, text)` rows."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, name: str, text: str = "") -> None:
        self.rows.setdefault(kind, []).append((name or ".", text))

    def names(self, kind: str) -> list[str]:
        return [name for name, _ in self.rows.get(kind, [])]

    def count(self) -> str:
        return ", ".join(f"{len(rows)} {kind}" for kind, rows in self.rows.items())


def sections(
    rows: Mapping[str, list[tuple[str, str]]],
    titles: Mapping[str, str],
    hint: Callable[[str, str, str], str] = lambda kind, name, text: "",
) -> list[str]:
    """The lines of a report: for each kind of problem its title and its rows, folded,
    with a hint for `(kind, name, text)` after each."""
    lines = []
    for kind, title in titles.items():
        if not rows.get(kind):
            continue
        lines.append(f"  {title}:")
        shown = fold_rows(rows[kind])
        for name, text in shown[:_MOST]:
            lines.append(f"    {name}  {text}{hint(kind, name, text)}".rstrip())
        if len(shown) > _MOST:
            lines.append(f"    ... and {len(shown) - _MOST} more")
    return lines


def _runs(numbers: list[int]) -> list[str]:
    out = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        out.append(str(start) if start == previous else f"{{{start}..{previous}}}")
        if number is not None:
            start = previous = number
    return out


_WIDTH = 100


def tree_lines(rows: Iterable[tuple[str, str]], limit: int | None = None) -> list[str]:
    """Draws `(dotted name, text)` rows as an indented tree: the lines of `tree_rows`.

    At most `limit` lines are returned, the last of which then says how many leaves are
    left out.
    """
    lines = tree_rows(rows)
    # Longer ones stand out: else each line would be as long as the longest.
    lengths = [len(left) for left, right in lines if right]
    width = max((length for length in lengths if length <= _WIDTH), default=0)
    out = [
        _text.escape(f"{a.ljust(width)}  {b}" if b else a).rstrip() for a, b in lines
    ]
    if limit is not None and len(out) > limit:
        more = len(out) - limit
        out = [*out[:limit], f"... and {more} more lines: see `.leaves`"]
    return out


def tree_rows(rows: Iterable[tuple[str, T]]) -> list[tuple[str, T | None]]:
    """The rows of an indented tree: the last part of each name, and what it has. Nodes
    have None.

    Numbered siblings that have the same are one row, as `{0..31}`.
    """
    return _draw(nested(rows), "")


def nested(rows: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The rows as dicts in dicts, by the parts of their names."""
    top: dict[str, Any] = {}
    for name, text in rows:
        node = top
        *parents, last = name.split(".")
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):  # A leaf and a node of one name.
                child = node.setdefault(part + ".", {})
            node = child
        node[last if last not in node else last + "."] = text
    return top


def _draw(node: dict[str, Any], indent: str) -> list[tuple[str, Any]]:
    blocks: list[tuple[str, Any, list[tuple[str, Any]]]] = []
    for part, child in node.items():
        if isinstance(child, dict):
            blocks.append((part, None, _draw(child, indent + "  ")))
        else:
            blocks.append((part, child, []))
    lines: list[tuple[str, Any]] = []
    at = 0
    while at < len(blocks):
        part, text, below = blocks[at]
        end = at + 1
        if _number.fullmatch(part):
            while (
                end < len(blocks)
                and blocks[end][0] == str(int(part) + end - at)
                and blocks[end][1:] == (text, below)
            ):
                end += 1
        if end > at + 1:
            part = f"{{{part}..{blocks[end - 1][0]}}}"
        lines.append((indent + part, text))
        lines.extend(below)
        at = end
    return lines
