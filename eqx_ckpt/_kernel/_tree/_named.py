"""The names of functions and classes, and what they may stand for.

As in pickle a name is one only if it leads to the very same object: what `jax.grad`
returns calls itself as the function that it was given. Nothing is imported by a name.
"""

import functools as ft
import sys
from typing import Any

import equinox as eqx

from .._format._values import Name


def own_name(x: object) -> Name | None:
    """The name in the attributes of a function or a class. It may lead elsewhere."""
    module = getattr(x, "__module__", None)
    text = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    if isinstance(module, str) and isinstance(text, str) and module and text:
        return Name(module, text)
    return None


def name_of(x: object) -> Name | None:
    """The name of a function or a class, if that name leads to this object."""
    if not callable(x):
        return None
    try:
        name = own_name(x)
        if name is None:
            return None
        found: Any = sys.modules[name.module]
        for part in name.qualified.split("."):
            found = getattr(found, part)
    except Exception:  # Of the methods of a class that we do not know.
        return None
    return name if found is x else None


def is_module(cls: type) -> bool:
    """Whether a class is one of Modules. `issubclass` asks each class of Modules that
    there is."""
    return eqx.Module in cls.__mro__


@ft.lru_cache(maxsize=4096)
def class_name(cls: type) -> Name:
    """The name that a class gives itself."""
    return own_name(cls) or Name("", cls.__name__)
