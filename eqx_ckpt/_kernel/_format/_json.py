"""JSON from anyone, and JSON that comes back as it was."""

import functools as ft
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np


# An index of 500,000 leaves is not as long, nor has it as many values. A parser makes
# objects of up to 30 times the bytes of its input.
MAX_INDEX = 32 * 2**20
_MAX_PARSED = 160 * 2**20


def parse(
    data: bytes,
    what: str = "the index",
    encoding: str = "utf-8",
    repeated: Callable[[list[tuple[str, Any]]], bool] | None = None,
) -> Any:
    """JSON from anyone. `repeated` says of the pairs of an object whether a key may be
    there twice, of which the last counts; else none may.

    **Raises:** `ValueError` if it is not, or has values that are not JSON, or a key
    twice in an object, or is too much to parse. It says `what`."""
    check_cost(data, what)
    decoder = _STRICT if repeated is None else _decoder(repeated)
    try:
        return decoder.decode(data.decode(encoding))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{what} is not JSON ({e})") from e


def _decoder(
    repeated: Callable[[list[tuple[str, Any]]], bool] = lambda _: False,
) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_constant=_refuse,
        parse_float=_finite,
        object_pairs_hook=ft.partial(_object, repeated),
    )


def parse_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON that begins at a place in a text, and where it ends.

    **Raises:** `ValueError` as `parse`.
    """
    try:
        return _STRICT.raw_decode(text, start)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def check_cost(data: bytes, what: str = "the index") -> None:
    """**Raises:** `ValueError` for what a reader has no memory to parse."""
    check_length(data, what)
    if len(data) > _MAX_PARSED // 128:
        # Nothing in JSON takes more memory than this: lists, dicts and their items.
        text = np.frombuffer(data, np.uint8)
        counts = [
            sum(np.count_nonzero(block == ord(sign)) for block in blocks(text))
            for sign in "[{,:"
        ]
        containers, items = counts[0] + counts[1], counts[2] + counts[3]
        if 88 * containers + 64 * items > _MAX_PARSED:
            raise ValueError(f"{what} has more values than are read")


def check_length(data: bytes, what: str = "the index") -> None:
    """**Raises:** `ValueError` for what is longer than any that is read."""
    if len(data) > MAX_INDEX:
        most = MAX_INDEX >> 20
        raise ValueError(f"{what} is longer than {most} MiB, the most that is read")


# Bytes of which NumPy makes no array that is new to the system.
BLOCK = 2**15


def blocks(text: np.ndarray) -> list[np.ndarray]:
    """An array in parts, of which copies are made faster than of all."""
    return [text[start : start + BLOCK] for start in range(0, text.size, BLOCK)]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number that Python has")
    return number


def _object(
    repeated: Callable[[list[tuple[str, Any]]], bool], pairs: list[tuple[str, Any]]
) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs) and not repeated(pairs):
        raise ValueError("an object has a key twice")
    return out


_STRICT = _decoder()


def check_depth(value: Any, most: int) -> None:
    """**Raises:** `ValueError` for a tree of an index that is too deep for what calls
    itself for each level."""
    level = [value]
    for _ in range(most):
        below: list[Any] = []
        for x in level:
            if type(x) in (dict, list):
                below.extend(x.values() if type(x) is dict else x)
        if not (level := below):
            return
    raise ValueError(f"the index has a tree that is nested more than {most} deep")


# Far less than what Python's parser can take, wherever it is called from.
_MAX_DEPTH, MAX_BITS = 100, 2048


def check_json(value: object, path: tuple[Any, ...] = ("metadata",)) -> None:
    """**Raises:** `ValueError` that names the part which JSON would change or refuse.
    `path`: what the value is called, and the keys that lead to it."""
    if len(path) > _MAX_DEPTH + 1:
        raise ValueError(
            f"`{_where(path)}` is nested more than {_MAX_DEPTH} deep, or contains "
            "itself."
        )
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(
                    f"`{_where(path)}` has the key {key!r}, of type "
                    f"`{type(key).__name__}`: JSON would turn it into a string. Use "
                    "strings as keys."
                )
            check_json(key, (f"{path[0]} key",))
            check_json(item, (*path, key))
    elif type(value) is list:
        for number, item in enumerate(value):
            check_json(item, (*path, number))
    elif type(value) is float:
        if not math.isfinite(value):
            raise ValueError(
                f"`{_where(path)}` is {value!r}, which JSON has no number for."
            )
    elif type(value) is str:
        if not is_unicode(value):
            text = ascii(value)[:200]
            raise ValueError(f"`{_where(path)}` is not Unicode text: {text}.")
    elif type(value) is int:
        if abs(value) >> MAX_BITS:
            raise ValueError(
                f"`{_where(path)}` is an integer of more than {MAX_BITS} bits, which "
                "parsers of JSON refuse. Store it as a leaf, or as a string."
            )
    elif value is not None and type(value) is not bool:
        advice = {
            tuple: "Use a list.",
            np.ndarray: "Store arrays in the tree.",
        }.get(type(value), "Use None, bool, int, float, str, list or dict.")
        raise ValueError(
            f"`{_where(path)}` is of type `{type(value).__name__}`, which JSON would "
            f"not give back as it was. {advice}"
        )


def _where(path: tuple[Any, ...]) -> str:
    text = str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
    return text if len(text) <= 100 else text[:60] + "..."


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: a lone surrogate cannot."""
    return re.search("[\ud800-\udfff]", text) is None
