"""Small records from anyone: JSON is read, and checked by functions that say what each
part of it has to be. Nothing of it is believed before that.
"""

import re
from collections.abc import Callable
from typing import Any

from .._errors import DamagedError
from . import _index, _json, _text


Check = Callable[[Any], bool]
# Nobody counts farther, and no name of a number is longer.
MOST = 10**18


def read(data: bytes, what: str, check: Check) -> Any:
    """A record. **Raises:** `DamagedError` that says `what` it should have been."""
    try:
        value = _json.parse(data, what)
    except ValueError as e:
        raise DamagedError(_text.bounded(str(e))) from e
    return checked(value, what, check)


def checked(value: Any, what: str, check: Check) -> Any:
    """A value, if it is what it has to be. **Raises:** as `read`."""
    if not check(value):
        raise DamagedError(f"{what} is not as it was written: {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    try:
        return _text.bounded(repr(value), 200)
    except ValueError:  # Of numbers that are too long for it.
        return "it has a number of thousands of digits"


def is_text(value: Any) -> bool:
    return type(value) is str


def is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_id(value: Any) -> bool:
    """Whether it is the id of a run or a save, which may become a part of a path."""
    return type(value) is str and _index.is_save_id(value)


def is_digest(value: Any) -> bool:
    return type(value) is str and re.fullmatch("[0-9a-f]{32}", value) is not None


def either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def same(constant: Any) -> Check:
    return lambda value: type(value) is type(constant) and value == constant


def each(check: Check) -> Check:
    """A list of what this checks."""
    return lambda value: type(value) is list and all(map(check, value))


def row(*checks: Check) -> Check:
    """A list of so many, each as its own check says."""

    def check(value: Any) -> bool:
        if type(value) is not list or len(value) != len(checks):
            return False
        return all(own(item) for own, item in zip(checks, value))

    return check
