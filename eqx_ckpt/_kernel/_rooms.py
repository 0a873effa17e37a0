"""Hooks: the functions that rooms around the kernel provide to it, and `_run`, its top
floor, to the floors below.

The kernel never imports the rooms around it. It calls a hook below, and the room that
provides the hook does so when the package is imported: its `__init__` says where the
function is, and imports nothing else. A type checker follows both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TYPE_CHECKING, TypeVar


if TYPE_CHECKING:
    from .._edit._difference import Diff
    from .._stores._remote import Store
    from .._verify._scan import Problem
    from .._zips._probe import Probe
    from ._format._index import BaseFacts, StoredFunction
    from ._format._leaves import Leaves
    from ._load._checkpoint import Checkpoint
    from ._load._lazy import LazyArray
    from ._load._load_options import LoadOptions
    from ._load._read_leaves import ReadPlan
    from ._load._reads import LeafRead
    from ._load._source import Source
    from ._run._manager import CheckpointManager
    from ._run._near_interface import NearSteps
    from ._run._saves import Saves
    from ._runtime._progress import Advance
    from ._save._options import Functions
    from ._save._payload import PlannedFunction, PlannedLeaf
    from ._save._plan import Plan
    from ._storage._backend import Backend
    from ._tree._flatten import Flat
    from ._tree._node import Node


P = ParamSpec("P")
T = TypeVar("T")


class Hook(Generic[P, T]):
    """A function that a room provides. Until then a call is one of `otherwise`."""

    def __init__(self, otherwise: Callable[P, T]):
        self._load: Callable[[], Callable[P, T]] = lambda: otherwise

    def provide(self, load: Callable[[], Callable[P, T]]) -> Callable[[], Any]:
        """Decorates a function that imports the function of the room, and returns it.
        Each call of the hook begins with that."""
        self._load = load
        return load

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._load()(*args, **kwargs)


def _without(room: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"Without `eqx_ckpt.{room}` this cannot be done.")

    return refuse


# ---- Stores.

# By the scheme of a URL, what makes its root of the path that was given; "*" is for all
# other schemes. And what contexts of TensorStore say of them.
kinds_of_stores: Hook[[], Mapping[str, Callable[[Any], Backend]]] = Hook(dict)
context_of_stores: Hook[[], Mapping[str, Any]] = Hook(dict)

# ---- Loads and open checkpoints.

# The checkpoint of one file, or of another library, at a path.
find_source: Hook[[Backend, Any], Source | None] = Hook(lambda root, like: None)
# A checkpoint of another library, and the keys that tell such a one in a store.
read_format: Hook[[Probe, Any], Source | None] = Hook(lambda probe, like: None)
keys_of_formats: Hook[[], Sequence[str]] = Hook(lambda: ())
# Begins to look for what a path without a checkpoint stands for, such as the newest
# step of a run. Returns a function that gives the path of that, or None, if it is told
# whether nothing known was found at the path: see `_run_path.stands_for`.
stands_for: Hook[[Any], Callable[[bool], Any]] = Hook(lambda path: lambda _: None)
rename_leaves: Hook[[Leaves, Any], tuple[Leaves, Callable[[str], list[str]]]] = Hook(
    _without("_rename")
)
# What an index with so many leaves says of functions.
parse_functions: Hook[[dict[str, dict], int], dict[str, StoredFunction]] = Hook(
    lambda rows, count: {}
)
plan_reshard: Hook[[Source, Sequence[LeafRead], LoadOptions], ReadPlan] = Hook(
    _without("_reshard")
)
open_functions: Hook[[Source], Mapping[str, Any]] = Hook(_without("_functions"))
# The array that a lazy one is once it is read: its numbers are as a cast has left them.
as_read: Hook[[LazyArray], LazyArray] = Hook(_without("_functions"))
verify: Hook[[Any], list[Problem]] = Hook(_without("_verify"))
check_base: Hook[[Source, Source], None] = Hook(_without("_verify"))

# ---- Saves.

base_facts: Hook[[str | os.PathLike[str] | Checkpoint], BaseFacts] = Hook(
    _without("_verify")
)
plan_functions: Hook[
    [Functions, Flat, dict[int, PlannedLeaf]], dict[str, PlannedFunction]
] = Hook(_without("_functions"))
# **Raises:** an error of functions that no save stores, whatever its tree.
check_functions: Hook[[object], object] = Hook(_without("_functions"))
# The files for Orbax of a save, by the manifest of its database.
orbax_files: Hook[[Plan, str, bytes], dict[str, bytes]] = Hook(_without("_orbax"))
save_file: Hook[[Plan, Advance], None] = Hook(_without("_zips"))
check_file: Hook[[Backend, bool], None] = Hook(_without("_zips"))
is_archive: Hook[[Backend], bool] = Hook(lambda root: False)

# ---- Runs.

# Deletes the run at a path, if there is one: returns whether there was.
delete_run: Hook[[str | os.PathLike[str]], bool] = Hook(lambda path: False)
# Whether a checkpoint may be deleted, right before it is: unless it is a pinned step.
may_go: Hook[[Backend], bool] = Hook(lambda root: True)
# The user and the password of a URL are in no path: the store has them.
store_of: Hook[[str | os.PathLike[str]], Store | None] = Hook(lambda path: None)
near_steps: Hook[
    [Saves, str | os.PathLike[str] | None, int | None, int | None], NearSteps
] = Hook(_without("_near"))
superseded: Hook[[Backend], list[str]] = Hook(lambda directory: [])

# ---- People.

text: Hook[[Checkpoint | Node, int | None], str] = Hook(_without("_show"))
html: Hook[[Any], str] = Hook(_without("_show"))
treescope: Hook[[Checkpoint | Node, Any, Any], Any] = Hook(_without("_show"))
plot: Hook[[LazyArray | Diff | CheckpointManager, Any], Any] = Hook(_without("_plots"))
