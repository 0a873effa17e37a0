"""The arguments of loads: their keywords, and the record that a call hands on."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable, TypedDict

from jaxtyping import PyTree

from .._runtime._arguments import Who
from .._tree import _leaf
from .._tree._compare import Static
from .._tree._filters import FilterSpec, IsLeaf


@runtime_checkable
class IsRename(Protocol):
    """What `ec.rename` returns."""

    @property
    def has_adapters(self) -> bool: ...


# What `ec.rename` takes, or returns.
Renaming = Callable[[str], str] | Sequence[tuple] | IsRename | None


class TogetherKeywords(TypedDict, total=False):
    """Keywords of a call that reads, which many processes may make together."""

    verify: bool
    max_bytes: int | None
    progress: bool
    reshard: Literal["auto", "read", "devices"]
    processes: Who


class SpliceKeywords(TypedDict, total=False):
    """Keywords that say which stored leaf becomes which of `like`, and how strictly."""

    where: Callable[[PyTree], Any] | None
    source: str | Callable[[Any], Any] | None
    rename: Renaming
    missing: Literal["error", "keep", "init"]
    unexpected: Literal["error", "ignore"]
    static: Static
    cast: bool


class LoadKeywords(SpliceKeywords, TogetherKeywords, total=False):
    """All keywords of a load."""


class FilteredKeywords(LoadKeywords, total=False):
    """Keywords of a load, and what it takes by position too."""

    filter_spec: FilterSpec
    is_leaf: IsLeaf


class LoadOptions(NamedTuple):
    """All arguments of `tree_deserialise_leaves` but its path and `like`."""

    filter_spec: FilterSpec = _leaf.is_storable
    is_leaf: IsLeaf = None
    where: Callable[[PyTree], Any] | None = None
    source: str | Callable[[Any], Any] | None = None
    rename: Renaming = None
    missing: str = "error"
    unexpected: str = "error"
    static: Static = "error"
    cast: bool = False
    verify: bool = True
    max_bytes: int | None = None
    progress: bool = False
    reshard: str = "auto"
    processes: Who = "all"


DEFAULTS = LoadOptions._field_defaults

# What words of `missing` mean, and where.
_MISSING = {
    "keep": "is for a load into a `like`, whose values it keeps",
    "init": "is for `load_or_init`, which has a function that makes what is missing",
}


def check(options: LoadOptions, missing: str = "keep") -> LoadOptions:
    """The options, if they make sense together. `missing`: the word that the call takes
    for it besides "error".

    **Raises:** `ValueError` for what no load can have.
    """
    if options.processes == "own" and options.reshard == "devices":
        raise ValueError(
            '`reshard="devices"` sends what one process reads to others, and with '
            '`processes="own"` there are none.'
        )
    if options.missing not in ("error", missing):
        raise ValueError(
            f'`missing="{options.missing}"` {_MISSING[options.missing]}. Here it is '
            f'"error" or "{missing}".'
        )
    return options
