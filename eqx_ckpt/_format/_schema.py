"""Whether values of JSON from anyone are of the kinds that a record has.

A kind is a type; a `range` of integers; a pattern of texts; `Any`; a list `[kind]`, of
any length; a tuple of kinds, for a list of just these; an object `{...: kind}`; a
function that says it; or an `Either`.
"""

import re
import types
from collections.abc import Collection
from typing import Any

from .._errors import DamagedError
from . import _json, _text


Kind = Any


class Either(tuple[Kind, ...]):
    """One of some kinds."""


# What the index calls sizes, offsets and counts.
NUMBER, POSITIVE = range(2**60), range(1, 2**60)
# Steps, attempts and processes. Nobody counts farther.
COUNT = range(10**18)
DIGEST = re.compile("[0-9a-f]{32}")
# That of a save or a run, which may become a part of a path.
ID = re.compile("[0-9a-f]{16}")
NONE = type(None)


def read(data: bytes, what: str, kind: Kind) -> Any:
    """A small record from anyone, as JSON.

    **Raises:** `DamagedError` that says `what` it should have been.
    """
    try:
        value = _json.parse(data, what)
    except ValueError as e:
        raise DamagedError(_text.bounded(str(e))) from e
    return checked(value, what, kind)


def checked(value: Any, what: str, kind: Kind) -> Any:
    """A value, if it is of a kind. **Raises:** as `read`."""
    if not fits(value, kind):
        raise DamagedError(f"{what} is not as it was written: {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    try:
        return _text.bounded(repr(value), 200)
    except ValueError:  # Of numbers that are too long for it.
        return "it has a number of thousands of digits"


def fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a kind."""
    if kind is Any:
        return True
    if isinstance(kind, range):
        return type(value) is int and value in kind
    if isinstance(kind, re.Pattern):
        return type(value) is str and kind.fullmatch(value) is not None
    if isinstance(kind, Either):
        return any(fits(value, one) for one in kind)
    if isinstance(kind, types.FunctionType):
        return kind(value)
    if isinstance(kind, tuple):
        is_list = type(value) is list and len(value) == len(kind)
        return is_list and all(map(fits, value, kind))
    if isinstance(kind, list):
        return type(value) is list and _all_fit(value, kind[0])
    if isinstance(kind, dict):
        return type(value) is dict and _all_fit(value.values(), kind[...])
    return type(value) is kind


def _all_fit(values: Collection[Any], kind: Kind) -> bool:
    # Columns of many thousands are looked at without a call for each.
    if isinstance(kind, type) and kind is not Any:
        return {*map(type, values)} <= {kind}
    if isinstance(kind, range) and values:
        is_int = {*map(type, values)} == {int}
        return is_int and min(values) in kind and max(values) in kind
    return all(fits(value, kind) for value in values)


def field(record: dict[str, Any], name: str, kind: Kind, what: str = "index") -> Any:
    """The field of a record, which is of a kind.

    **Raises:** `ValueError` if it is not, or is not there.
    """
    if name not in record or not fits(record[name], kind):
        raise ValueError(f"the {what} has no {name!r} of the right type")
    return record[name]
