"""Checks of what public calls are given, by one table, before anything else is done.

A rule goes by the name of the argument, so that one word means one thing in all calls.
Keywords that several calls have are listed once, in a `TypedDict` that they unpack, and
their defaults in the record that is made of them.
"""

import dataclasses
import functools as ft
import inspect
import math
import numbers
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax.tree_util as jtu
import numpy as np

from . import _elsewhere, _handlers


P = ParamSpec("P")
T = TypeVar("T")


class Rule(NamedTuple):
    """Rule for an argument: in words, and by its type and its value."""

    text: str
    has_type: Callable[[Any], bool]
    has_value: Callable[[Any], bool] = lambda value: True

    def check_argument(self, name: str, value: object) -> None:
        """**Raises:** `TypeError` or `ValueError` for an argument that it cannot be."""
        if not self.has_type(value):
            raise TypeError(f"`{name}` must be {self.text}, not {shown(value)}.")
        if not self.has_value(value):
            raise ValueError(f"`{name}` must be {self.text}, not {shown(value)}.")


def shown(value: object) -> str:
    """What an error shows of an argument, on one line."""
    plain = bool, str, bytes, int, float, complex, list, tuple, dict, type, type(None)
    if not isinstance(value, plain):
        return f"a `{type(value).__name__}`"
    return f"{' '.join(repr(value).split()):.60}"


def words(*allowed: str) -> Rule:
    """One of some words."""
    *most, last = (f'"{word}"' for word in allowed)
    text = f"{', '.join(most)} or {last}"
    return Rule(text, lambda x: isinstance(x, str), lambda x: x in allowed)


def integer(least: int) -> Rule:
    return Rule(f"an integer >= {least}", _is_integer, lambda x: x >= least)


def optional(rule: Rule) -> Rule:
    is_list = rule.text.startswith('"')
    return Rule(
        f"None{',' if is_list else ' or'} {rule.text}",
        lambda x: x is None or rule.has_type(x),
        lambda x: x is None or rule.has_value(x),
    )


def _is_integer(x: object) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _is_flag(x: object) -> bool:
    return isinstance(x, (bool, np.bool_))


def _is_selector(x: object) -> bool:
    """Whether it is a function, and no mask: one of a Module can be called, too."""
    leaves = jtu.tree_leaves(x)
    return callable(x) and not (leaves and all(map(_is_flag, leaves)))


FLAG = Rule("True or False", _is_flag)
FUNCTION = Rule("a function", callable)
_NODES = "a function of the tree, such as `lambda tree: tree.model`"
NODES = optional(Rule(_NODES, _is_selector))
_WHERE = f"{_NODES} (a tree of bools is a `filter_spec`)"
SECONDS = Rule("a number of seconds", _is_number, lambda x: 0 < x < math.inf)
WAIT = optional(SECONDS._replace(has_value=lambda x: not math.isnan(x)))

_TAG = Rule("None, a string or a number", lambda x: isinstance(x, str | int | None))

# Seconds. JAX ends all processes 100 seconds after one has died: see docs/processes.md.
TIMEOUT = 80


@dataclasses.dataclass(frozen=True)
class Together:
    """Many processes that make a call together: what the argument `processes` of saves
    and loads takes in a run of `jax.distributed`.

    **Arguments:**

    - `tag`: a short string or a number, such as the step, the same in all of them: only
        calls of one path and one tag meet. See docs/processes.md.
    - `timeout`: how many seconds they wait for one that gives no sign of life. A
        process gives signs while it writes or reads.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> together = ec.Together(tag=7, timeout=300)
        >>> ec.tree_serialise_leaves("memory://7", {"step": 7}, processes=together)

        ```
    """

    tag: str | int | None = None
    timeout: int | float = TIMEOUT

    def __post_init__(self) -> None:
        _TAG.check_argument("tag", self.tag)
        SECONDS.check_argument("timeout", self.timeout)


# The argument `processes` of calls.
Who = Literal["all", "own"] | Together


def together(processes: Who) -> Together:
    """Options of a call that is not of one process alone."""
    return processes if isinstance(processes, Together) else Together()


# By the names of arguments, which mean the same in all calls.
RULES = {
    "axes": Rule("integers", _is_integer),
    "axis": Rule("an integer", _is_integer),
    "cast": FLAG._replace(
        text="True or False (a leaf becomes of the dtype that it has in `like`)"
    ),
    "chunks": Rule(
        "None, a number of bytes, or a function",
        lambda x: x is None or callable(x) or _is_integer(x),
        lambda x: x is None or callable(x) or x >= 1,
    ),
    "compression": optional(words("lz4", "zstd")),
    "drop": optional(
        Rule(
            "a name, a list of names, or a function",
            lambda x: isinstance(x, str | list | tuple) or callable(x),
        )
    ),
    "durable": FLAG,
    "elementwise": FLAG,
    "orbax": FLAG,
    "filter_spec": Rule(
        "a bool, a function of a leaf, or a pytree prefix of the tree made of those",
        lambda x: _is_flag(x) or not isinstance(x, str | bytes | numbers.Number),
    ),
    "fn": FUNCTION,
    "fresh": NODES,
    "is_leaf": optional(FUNCTION),
    "layout": words("ocdbt", "zarr"),
    "max_bytes": optional(integer(1)),
    "missing": words("error", "keep", "init"),
    "overwrite": FLAG,
    "processes": Rule(
        '"all", "own" or an `ec.Together`',
        lambda x: isinstance(x, str | Together),
        lambda x: not isinstance(x, str) or x in ("all", "own"),
    ),
    "platforms": optional(
        Rule(
            "a list of names, such as `cpu` and `cuda`",
            lambda x: isinstance(x, Iterable) and not isinstance(x, Iterator),
        )
    ),
    "progress": FLAG,
    "replace": Rule("a mapping of names to values", lambda x: isinstance(x, Mapping)),
    "reshard": words("auto", "read", "devices"),
    "shard_bytes": optional(integer(1)),
    "reuse": Rule(
        "None, the path of a checkpoint, or what an asynchronous save has returned",
        lambda x: x is None or isinstance(x, str | os.PathLike) or hasattr(x, "result"),
    ),
    "static": Rule(
        '"error", "ignore" or a list of names of static fields',
        lambda x: isinstance(x, Iterable) and not isinstance(x, Iterator),
    ),
    "unexpected": words("error", "ignore"),
    "verify": FLAG,
    "where": optional(Rule(_WHERE, _is_selector)),
}

_TREES = {"like", "pytree"}


def _check_order(path: object, tree: object) -> None:
    """**Raises:** `TypeError` for a path and a tree in each other's place."""
    is_path = isinstance(tree, str | os.PathLike)
    if is_path and not isinstance(path, str) and not jtu.all_leaves([path]):
        raise TypeError(
            f"The path comes first, and the tree after it: exchange {shown(tree)} and "
            f"the `{type(path).__name__}`."
        )


_IN_ORDER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_REST = inspect.Parameter.VAR_POSITIONAL


def checked(
    defaults: Mapping[str, Any] = {}, **rules: Rule
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a public call: its arguments are checked, by `rules` and else by
    `RULES`; and what handlers of signals raise passes through it.

    Its signature has the keywords that it unpacks, with `defaults`.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        signature = _expanded(inspect.signature(call), defaults)
        names = list(signature.parameters)
        table = {name: rules.get(name, RULES.get(name)) for name in names}
        parameters = signature.parameters.values()
        is_open = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)
        in_order = [x.name for x in parameters if x.kind is _IN_ORDER]
        rest = [x.name for x in parameters if x.kind is _REST]
        begins_with_path = in_order[:1] == ["path"] and not _TREES.isdisjoint(in_order)
        passed = _handlers.pass_through(call)

        @ft.wraps(call)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            if begins_with_path and len(args) > 1:
                _check_order(*args[:2])
            order = [*in_order, *rest * (len(args) - len(in_order))]
            for name, value in (*zip(order, args), *kwargs.items()):
                rule = table.get(name)
                if rule is not None:
                    rule.check_argument(name, value)
                elif name not in table and not is_open:
                    said = call.__qualname__.removesuffix(".__init__")
                    raise _elsewhere.unknown_argument(said, names, name)
            return passed(*args, **kwargs)

        vars(wrapped)["__signature__"] = signature
        return wrapped

    return decorate


def _expanded(
    signature: inspect.Signature, defaults: Mapping[str, Any]
) -> inspect.Signature:
    """A signature with the keywords of the `TypedDict` that is unpacked in it."""
    parameters = list(signature.parameters.values())
    packed = parameters[-1] if parameters else None
    if packed is None or typing.get_origin(packed.annotation) is not typing.Unpack:
        return signature
    fields = typing.get_args(packed.annotation)[0].__annotations__
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters[-1:] = [
        inspect.Parameter(name, keyword, default=defaults[name], annotation=annotation)
        for name, annotation in fields.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=parameters)
