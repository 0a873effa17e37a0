"""The classes and functions that names out of a checkpoint may stand for."""

import functools as ft
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._kernel._runtime import _arguments
from .._kernel._tree import _named
from .._kernel._tree._named import Name


def finder(known: object) -> Callable[[Name], list[Any]]:
    """A function from a name to the objects that it may stand for, of the classes and
    functions that a caller allows: one, if all is well. Nothing is imported.

    A class or a function in `known` itself may be of any package, as they move. A
    module stands for itself and those below it that have been imported, and of each for
    what is of its own package: `from os import system` allows no `system`. Of several
    objects, those count that are of the package of the name, and then of its module.
    """
    if isinstance(known, str) or not isinstance(known, Iterable):
        given = _arguments.shown(known)
        raise TypeError(f"`known` is a list of {_KINDS}, not {given}.")
    objects: list[Any] = []
    modules: list[types.ModuleType] = []
    for x in known:
        if isinstance(x, types.ModuleType):
            modules += _submodules(x)
        elif callable(x) and _named.own_name(x) is not None:
            objects.append(x)
        else:
            raise TypeError(
                f"`known` has {x!r}. It is a list of {_KINDS}, so that nothing is "
                "imported by the name of a thing."
            )

    def find_objects(name: Name) -> list[Any]:
        direct = list(_in_objects(objects, name))
        every = [
            (x, _named.own_name(x)) for x in [*direct, *_in_modules(modules, name)]
        ]
        alike = [x for x, own in every if own is not None and own.is_alike(name)]
        found = list({id(x): x for x in alike or direct}.values())
        same = [x for x in found if _named.own_name(x) == name]
        return same if same and len(found) > 1 else found

    return ft.cache(find_objects)


_KINDS = "classes, functions and modules"


def _submodules(module: types.ModuleType) -> list[types.ModuleType]:
    below = module.__name__ + "."
    some = [x for name, x in list(sys.modules.items()) if name.startswith(below)]
    return [module, *(x for x in some if isinstance(x, types.ModuleType))]


def _in_objects(known: Sequence[Any], name: Name) -> Iterator[Any]:
    """The objects of the name, and what is in a class of its first parts."""
    for x in known:
        own = _named.own_name(x)
        if own is None:
            continue
        if own.qualified == name.qualified:
            yield x
        elif isinstance(x, type) and name.qualified.startswith(own.qualified + "."):
            rest = name.qualified[len(own.qualified) + 1 :]
            yield from _below(x, rest.split("."), name)


def _in_modules(modules: Sequence[types.ModuleType], name: Name) -> Iterator[Any]:
    first, *rest = name.qualified.split(".")
    for module in modules:
        x = vars(module).get(first)
        own = _named.own_name(x) if callable(x) else None
        package = module.__name__.partition(".")[0]
        if own is not None and own.package == package:
            yield from _below(x, rest, name)


def _below(x: object, rest: Sequence[str], name: Name) -> Iterator[Any]:
    """The object that these parts of the name lead to, through classes only. Its own
    name has to be the whole: no attribute is found that only happens to be there."""
    for part in rest:
        if not isinstance(x, type) or not any(part in vars(y) for y in x.__mro__):
            return
        x = type.__getattribute__(x, part)
    own = _named.own_name(x) if callable(x) else None
    if own is not None and own.qualified == name.qualified:
        yield x
