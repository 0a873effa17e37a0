"""Whether values of JSON from anyone are of the kinds that a record has.

A kind is a type; a `range` of integers; a pattern of texts; `Any`; a list `[kind]`, of
any length; a tuple of kinds, for a list of just these; an object `{...: kind}`; or a
function that says it, such as `optional` gives.
"""

import itertools as it
import re
import types
from collections.abc import Mapping
from typing import Any

from .._errors import DamagedError
from . import _json, _text


Kind = Any


# What the index calls sizes, offsets and counts.
NUMBER = range(2**60)
# Steps, attempts and processes. Nobody counts farther.
COUNT = range(10**18)
DIGEST = re.compile("[0-9a-f]{32}")
# That of a save or a run, which may become a part of a path.
ID = re.compile("[0-9a-f]{16}")


def read(data: bytes, what: str, kind: Kind) -> Any:
    """A small record from anyone, as JSON.

    **Raises:** `DamagedError` that says `what` it should have been.
    """
    try:
        value = _json.parse(data, what)
    except ValueError as e:
        raise DamagedError(_text.bounded(str(e))) from e
    return checked(value, what, kind)


def checked(value: object, what: str, kind: Kind) -> Any:
    """A value, if it is of a kind. **Raises:** as `read`."""
    if not fits(value, kind):
        raise DamagedError(f"{what} is not as it was written: {_shown(value)}")
    return value


def _shown(value: object) -> str:
    try:
        return _text.bounded(repr(value), 200)
    except ValueError:  # Of numbers that are too long for it.
        return "it has a number of thousands of digits"


def fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a kind."""
    pending = [(value, kind)]
    while pending:
        value, kind = pending.pop()
        if type(kind) is type:
            good = type(value) is kind
        elif kind is Any:
            good = True
        elif isinstance(kind, range):
            good = type(value) is int and value in kind
        elif isinstance(kind, (list, dict)):
            good = type(value) is type(kind)
            of_items = kind[0] if isinstance(kind, list) else kind[...]
            items = value.values() if type(value) is dict else value
            if not good or not items or of_items is Any:
                pass
            # Columns of many thousands are looked at all together.
            elif type(of_items) is type:
                good = {*map(type, items)} == {of_items}
            elif isinstance(of_items, range):
                good = {*map(type, items)} == {int}
                good = good and min(items) in of_items and max(items) in of_items
            elif type(of_items) is tuple:
                good = {*map(type, items)} == {list}
                good = good and {*map(len, items)} == {len(of_items)}
                columns = map(list, zip(*items)) if good else ()
                pending.extend(zip(columns, ([kind] for kind in of_items)))
            else:
                pending.extend(zip(items, it.repeat(of_items)))
        elif isinstance(kind, re.Pattern):
            good = type(value) is str and kind.fullmatch(value) is not None
        elif isinstance(kind, types.FunctionType):
            good = kind(value)
        else:
            good = type(value) is list and len(value) == len(kind)
            if good:
                pending.extend(zip(value, kind))
        if not good:
            return False
    return True


def optional(kind: Kind) -> Kind:
    """A kind, or null."""
    return lambda value: value is None or fits(value, kind)


def fields(
    record: dict[str, Any], kinds: Mapping[str, Kind], what: str = "index"
) -> list[Any]:
    """The fields of a record, each of its kind.

    **Raises:** `ValueError` if one is not, or is not there.
    """
    values = [*map(record.get, kinds)]
    if not (kinds.keys() <= record.keys() and fits(values, (*kinds.values(),))):
        for name, kind in kinds.items():
            if name not in record or not fits(record[name], kind):
                raise ValueError(f"the {what} has no {name!r} of the right type")
    return values
