"""The names of functions and classes, and what they may stand for.

As in pickle a name is one only if it leads to the very same object: what `jax.grad`
returns calls itself as the function that it was given. Nothing is imported by a name.
"""

import functools as ft
import sys
from typing import Any, NamedTuple

import equinox as eqx


class Name(NamedTuple):
    """The module that a function or a class says it is of, and its qualified name."""

    module: str
    qualified: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def shown(self) -> str:
        return f"{self.module}.{self.qualified}"

    def is_alike(self, other: "Name") -> bool:
        """Whether both are of one package, in which functions may have moved. What a
        script has is in `__main__` when it runs, and elsewhere when it is imported."""
        packages = {self.package, other.package} - _SCRIPTS
        return self.qualified == other.qualified and len(packages) < 2


_SCRIPTS = {"__main__", "__mp_main__"}


def own(x: Any) -> Name | None:
    """The name that a function or a class gives itself, which may be any."""
    module = getattr(x, "__module__", None)
    text = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    if isinstance(module, str) and isinstance(text, str) and module and text:
        return Name(module, text)
    return None


def name_of(x: Any) -> Name | None:
    """The name of a function or a class, if it leads to it."""
    if not callable(x):
        return None
    # Equinox looks at each attribute of a Module that is asked for.
    if (
        _has_no_name(type(x))
        and not _NAMES & object.__getattribute__(x, "__dict__").keys()
    ):
        return None
    try:
        name = own(x)
        if name is None:
            return None
        found: Any = sys.modules[name.module]
        for part in name.qualified.split("."):
            found = getattr(found, part)
    except Exception:  # Of the methods of a class that we do not know.
        return None
    return name if found is x else None


_NAMES = {"__name__", "__qualname__"}


@ft.lru_cache(maxsize=4096)
def _has_no_name(cls: type) -> bool:
    """Whether a Module of a class has no name but one of its own."""
    if not issubclass(cls, eqx.Module):
        return False
    if cls.__getattribute__ is not eqx.Module.__getattribute__:
        return False
    ways = {*_NAMES, "__getattr__"}
    return not any(ways & vars(base).keys() for base in cls.__mro__)


def parse(value: Any) -> Name | None:
    """A name as an index has it; None for what is none."""
    if type(value) is list and len(value) == 2:
        if all(type(x) is str and x for x in value):
            return Name(*value)
    return None
