"""Functions and facts that rooms around the kernel add to it, by name.

The kernel never imports those rooms: it takes what they have added when the package was
imported.
"""

import importlib
from collections.abc import Callable
from typing import Any


_added: dict[str, Any] = {}


def add(name: str, value: Any) -> None:
    _added[name] = value


def later(package: str, module: str, name: str) -> Callable[..., Any]:
    """A function of a module of a package, which is imported when it is first called:
    who never calls it does not wait for that."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)(*args)

    return call


def find(name: str) -> Any:
    """The addition of a room; None where the room is not there."""
    return _added.get(name)


def call(name: str, *args: Any) -> Any:
    """**Raises:** `NotImplementedError` where the room that adds it is not there."""
    if name not in _added:
        raise NotImplementedError(f"Without its room there is no `{name}`.")
    return _added[name](*args)
