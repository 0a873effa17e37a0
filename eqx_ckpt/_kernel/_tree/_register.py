"""`register_leaf`: leaf types of one's own, as leaves that can be stored."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Codec(NamedTuple):
    """The two ways between values of a type and leaves that are stored.

    `name`: of the type that was registered; `cls`: that of the values, which may be a
    subclass of it.
    """

    name: str
    cls: type
    to_leaf: Callable[[Any], Any]
    from_leaf: Callable[[Any], Any]


# The registrations that are in force, by an object for each, in the order of the calls.
# Blocks of several tasks or threads overlap, and end in any order: each takes back its
# own. No lock is held, as Ctrl-C may come anywhere: each change is one step.
_registered: dict[object, tuple[type, Codec]] = {}
# Those of this task or thread, which come before those of others.
_of_task: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar(
    "_of_task", default=()
)
# What was found in `_registered`, for each type: a new dict after each change.
_found: dict[type, dict[object, Codec]] = {}

# Leaves that were made of values which may have changed since, by the ids of these.
_taken: contextvars.ContextVar[Mapping[int, Any]] = contextvars.ContextVar("_taken")

# A codec of these would be one of most other leaves, or of none.
_own = (
    *(jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct),
    *(bool, int, float, complex),
)


def register_leaf(
    cls: type, to_leaf: Callable[[Any], Any], from_leaf: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[Any]:
    """Stores the values of a type of one's own, as leaves of types that are stored.

    From then on, in this process, [`is_storable`][] is true of them, and all calls
    take them; or, as a context manager, for the calls in its block:
    `with ec.register_leaf(...):`. A [`CheckpointManager`][] has to end inside of that
    block, as it saves the last state at its own end.

    Blocks may overlap, in threads and in tasks of asyncio. If several are about one
    type, each task goes by its own, and a thread without one by the newest.

    A load makes such a value where `like` has one. It fits what is stored if the leaf
    that `to_leaf` makes of the one in `like` does: an array has to have its shape and
    dtype. Anywhere else, as in `ckpt.tree`, it is the leaf that was stored. A
    `filter_spec` sees it there as that too. If that is a str or bytes, and `like` has
    no value for it, it is unexpected only to a `filter_spec` that selects those.

    **Arguments:**

    - `cls`: the type; subclasses are of it too, unless they are registered themselves.
        What `from_leaf` makes has to be of the subclass then, where `like` has one.
        For JAX it has to be a leaf. Values of a type that JAX has as a node are leaves
        where an `is_leaf` says so.
    - `to_leaf`: a function from a value to an array, a number, a str, bytes, or a typed
        PRNG key. It gets the values in `like` too. Arrays that are one object are
        stored as one: it may not return the same buffer for several values.
    - `from_leaf`: a function from the leaf, as it is loaded, to the value.

    **Returns:** a context manager that, at its end, takes the registration back.

    **Raises:** `TypeError` for a type that is stored without it. In a save or a load,
    what goes wrong in the two functions is an error that names the leaf.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> from fractions import Fraction
        >>> with ec.register_leaf(Fraction, str, Fraction):
        ...     ec.tree_serialise_leaves("memory://ratio", {"ratio": Fraction(3, 4)})
        ...     ec.tree_deserialise_leaves("memory://ratio", {"ratio": Fraction(0)})
        {'ratio': Fraction(3, 4)}
        >>> ec.open("memory://ratio")["ratio"].read()
        '3/4'

        ```
    """
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r} is not a type. Pass the type, and not a value of it.")
    if cls in (object, *_own):
        why = "all types are of it" if cls is object else "it is stored as it is"
        raise TypeError(f"`{cls.__name__}` cannot be registered: {why}.")
    for name, function in (("to_leaf", to_leaf), ("from_leaf", from_leaf)):
        if not callable(function):
            raise TypeError(f"`{name}` is not a function, but {function!r}.")
    block = object()
    with contextlib.ExitStack() as undo:
        for _ in range(2):  # As Ctrl-C may come in the first.
            undo.callback(_take_back, block)
        _of_task.set((*filter(_registered.__contains__, _of_task.get()), block))
        _registered[block] = cls, Codec(cls.__qualname__, cls, to_leaf, from_leaf)
        _look_anew()
        return undo.pop_all()


def _take_back(block: object) -> None:
    _registered.pop(block, None)
    _look_anew()


def _look_anew() -> None:
    global _found
    _found = {}


def codec_of(cls: type) -> Codec | None:
    """The codec of leaves of a type, if it or a base of it was registered."""
    if not _registered:
        return None
    # This dict is taken first: if a registration comes or goes meanwhile, nobody asks
    # it any more.
    found = _found
    codecs = found.get(cls)
    if codecs is None:
        codecs = found[cls] = _codecs_of(cls)
    if len(codecs) > 1:
        own = [block for block in _of_task.get() if block in codecs]
        return codecs[own[-1] if own else [*codecs][-1]]
    return next(iter(codecs.values()), None)


def _codecs_of(cls: type) -> dict[object, Codec]:
    """The codecs of the nearest registered base class, by their blocks."""
    registered = _registered.copy()
    types = {of for of, _ in registered.values()}
    base = next(filter(types.__contains__, cls.__mro__), None)
    return {
        block: codec._replace(cls=cls)
        for block, (of, codec) in registered.items()
        if of is base
    }


def to_leaf(value: object) -> Any:
    """The leaf that is stored for another: itself, unless its type was registered.

    **Raises:** `ValueError` when its `to_leaf` fails.
    """
    codec = codec_of(type(value))
    if codec is None:
        return value
    if id(value) in (taken := _taken.get({})):
        return taken[id(value)]
    try:
        leaf = codec.to_leaf(value)
    except Exception as e:
        raise ValueError(
            f"`to_leaf` of `{codec.name}` failed with {type(e).__name__}: {e}"
        ) from e
    if not isinstance(leaf, (*_own, str, bytes)):
        raise ValueError(
            f"`to_leaf` of `{codec.name}` gave a `{type(leaf).__name__}`, and must "
            "give an array, a number, a str, bytes, or a typed PRNG key"
        )
    return leaf


@contextlib.contextmanager
def taken(leaves: Mapping[int, Any]) -> Iterator[None]:
    """In the block, `to_leaf` gives these leaves for the values with these ids."""
    token = _taken.set(leaves)
    try:
        yield
    finally:
        _taken.reset(token)


def from_leaf(codec: Codec, leaf: object) -> Any:
    """The value that a stored leaf was made of.

    **Raises:** `ValueError` when its `from_leaf` fails.
    """
    try:
        value = codec.from_leaf(leaf)
    except Exception as e:
        raise ValueError(
            f"`from_leaf` of `{codec.name}` failed with {type(e).__name__}: {e}"
        ) from e
    if not isinstance(value, codec.cls):
        raise ValueError(
            f"`from_leaf` of `{codec.name}` gave a `{type(value).__name__}`, and "
            f"`like` has a `{codec.cls.__name__}` there: register that type itself"
        )
    return value
