"""Functions and facts that rooms around the kernel add to it, by name.

The kernel never imports those rooms: it takes what they have added when the package was
imported.
"""

from typing import Any


_added: dict[str, Any] = {}


def add(name: str, value: Any) -> None:
    _added[name] = value


def find(name: str) -> Any:
    """The addition of a room; None where the room is not there."""
    return _added.get(name)


def call(name: str, *args: Any) -> Any:
    """**Raises:** `NotImplementedError` where the room that adds it is not there."""
    if name not in _added:
        raise NotImplementedError(f"Without its room there is no `{name}`.")
    return _added[name](*args)
