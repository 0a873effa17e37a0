"""Names, arrays and rows as messages have them, folded by layer."""

import itertools as it
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._format import _names, _template, _text
from .._format._template import Template


# What `str` gives for an index: longer digits are a key that looks like one.
_number = re.compile(r"0|[1-9][0-9]{0,17}")

_folded = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")

_short = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}


def short_dtype(dtype: str) -> str:
    """`float32` as `f32`, as Equinox prints it."""
    match = re.fullmatch(r"(bfloat|float|complex|uint|int)(\d+)(_\w+)?", dtype)
    if match is None:
        return dtype
    return _short[match[1]] + match[2] + (match[3] or "")


def short_array(dtype: str, shape: Sequence[int]) -> str:
    return f"{short_dtype(dtype)}[{','.join(map(str, shape))}]"


def show(template: Template) -> str:
    """A stored leaf in a word, as in Equinox: `f32[64,64]`, `int`, `key<fry>[]`."""
    return shown(template.kind, template.dtype, template.logical_shape, template.impl)


def shown(kind: str, dtype: str, shape: Sequence[int], impl: str | None) -> str:
    if kind == "key":
        return f"key<{impl}>[{','.join(map(str, shape))}]"
    if kind not in _template.ARRAY_KINDS:
        return kind
    text = short_array(dtype, shape)
    return text + ("(numpy)" if kind == "numpy" else "")


def is_number(part: str) -> bool:
    return _number.fullmatch(part) is not None


def some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(f"`{_text.bounded(name, 200)}`" for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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
            said = f"{name} (the whole tree)" if name == _names.ROOT else name
            lines.append(f"    {said}  {text}{hint(kind, name, text)}".rstrip())
        if len(shown) > _MOST:
            lines.append(f"    ... and {len(shown) - _MOST} more")
    return lines


def _runs(numbers: list[int]) -> list[str]:
    """Numbers in order as text: each alone, or as a range of those that follow it."""
    out = []
    # Numbers that follow each other are all as far from their places.
    for _, pairs in it.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        out.append(f"{{{run[0]}..{run[-1]}}}" if len(run) > 1 else str(run[0]))
    return out
