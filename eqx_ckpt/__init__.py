"""Checkpoints for Equinox: save any tree by name, open it lazily, load any part."""

from . import _platform as _platform


# isort: split
import importlib as _importlib
import typing as _typing

from . import (
    _formats as _formats,
    _functions as _functions,
    _near as _near,
    _orbax as _orbax,
    _plots as _plots,
    _rename as _rename,
    _reshard as _reshard,
    _show as _show,
    _stores as _stores,
    _verify as _verify,
    _zips as _zips,
)

# Rooms that provide hooks. Nothing else is imported before a name is first asked for.
from ._kernel import _run as _run
from ._kernel._runtime._threads import Lock as _Lock
from ._version import __version__ as __version__


if _typing.TYPE_CHECKING:
    from . import adapters as adapters, merging as merging
    from ._edit._diff import diff as diff
    from ._edit._difference import Diff as Diff
    from ._edit._merge import merge as merge
    from ._edit._stats import stats as stats
    from ._functions._function import function as function
    from ._functions._lazily import lazy as lazy
    from ._functions._stored_function import Function as Function
    from ._graft._graft import graft as graft
    from ._graft._init import load_or_init as load_or_init, unloaded as unloaded
    from ._graft._inverse import inverse as inverse
    from ._graft._report import Report as Report
    from ._graft._skeleton import (
        partition_rules as partition_rules,
        skeleton as skeleton,
    )
    from ._graft._unflatten import nest as nest
    from ._interop._bytes import from_bytes as from_bytes, to_bytes as to_bytes
    from ._interop._convert import convert as convert
    from ._interop._export import export_safetensors as export_safetensors
    from ._interop._state_dict import (
        from_state_dict as from_state_dict,
        to_state_dict as to_state_dict,
    )
    from ._kernel._errors import (
        DamagedError as DamagedError,
        ReplacedError as ReplacedError,
    )
    from ._kernel._load._checkpoint import Checkpoint as Checkpoint, open as open
    from ._kernel._load._deserialise import (
        materialise as materialise,
        tree_deserialise_leaves as tree_deserialise_leaves,
    )
    from ._kernel._load._lazy import LazyArray as LazyArray
    from ._kernel._run._clean import clean as clean
    from ._kernel._run._manager import CheckpointManager as CheckpointManager
    from ._kernel._run._records import (
        add_metrics as add_metrics,
        history as history,
        runs as runs,
    )
    from ._kernel._run._step import Run as Run, Step as Step
    from ._kernel._runtime._arguments import Together as Together
    from ._kernel._save._async import (
        async_tree_serialise_leaves as async_tree_serialise_leaves,
    )
    from ._kernel._save._background import SaveHandle as SaveHandle
    from ._kernel._save._delete import delete as delete, exists as exists
    from ._kernel._save._serialise import tree_serialise_leaves as tree_serialise_leaves
    from ._kernel._storage._store import counting as counting
    from ._kernel._tree._flatten import leaf_names as leaf_names
    from ._kernel._tree._leaf import is_storable as is_storable
    from ._kernel._tree._register import register_leaf as register_leaf
    from ._orbax._write import write_orbax as write_orbax
    from ._rebuild._rebuild import rebuild as rebuild
    from ._rename._rename import rename as rename
    from ._stores._remote import Store as Store
    from ._verify._scan import Problem as Problem
    from ._verify._verify import verify as verify


# The same names at run time, by the module that each is imported from when it is first
# asked for.
_NAMES = {
    "_edit._diff": "diff",
    "_edit._difference": "Diff",
    "_edit._merge": "merge",
    "_edit._stats": "stats",
    "_functions._function": "function",
    "_functions._lazily": "lazy",
    "_functions._stored_function": "Function",
    "_graft._graft": "graft",
    "_graft._init": "load_or_init unloaded",
    "_graft._inverse": "inverse",
    "_graft._report": "Report",
    "_graft._skeleton": "partition_rules skeleton",
    "_graft._unflatten": "nest",
    "_interop._bytes": "from_bytes to_bytes",
    "_interop._convert": "convert",
    "_interop._export": "export_safetensors",
    "_interop._state_dict": "from_state_dict to_state_dict",
    "_kernel._errors": "DamagedError ReplacedError",
    "_kernel._load._checkpoint": "Checkpoint open",
    "_kernel._load._deserialise": "materialise tree_deserialise_leaves",
    "_kernel._load._lazy": "LazyArray",
    "_kernel._run._clean": "clean",
    "_kernel._run._manager": "CheckpointManager",
    "_kernel._run._records": "add_metrics history runs",
    "_kernel._run._step": "Run Step",
    "_kernel._runtime._arguments": "Together",
    "_kernel._save._async": "async_tree_serialise_leaves",
    "_kernel._save._background": "SaveHandle",
    "_kernel._save._delete": "delete exists",
    "_kernel._save._serialise": "tree_serialise_leaves",
    "_kernel._storage._store": "counting",
    "_kernel._tree._flatten": "leaf_names",
    "_kernel._tree._leaf": "is_storable",
    "_kernel._tree._register": "register_leaf",
    "_orbax._write": "write_orbax",
    "_rebuild._rebuild": "rebuild",
    "_rename._rename": "rename",
    "_stores._remote": "Store",
    "_verify._scan": "Problem",
    "_verify._verify": "verify",
    # These are modules themselves.
    "adapters": "adapters",
    "merging": "merging",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


# Python itself suggests names that are near: not those of the rooms.
def __dir__() -> list[str]:
    return [*sorted(_MODULES), "__version__"]


if not _typing.TYPE_CHECKING:
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> _typing.Any:
        if name not in _MODULES:
            if name.startswith("_"):
                raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
            from ._kernel._runtime import _elsewhere

            raise _elsewhere.unknown_name(__name__, _MODULES, name)
        return globals().setdefault(name, _importing.run(lambda: _import(name)))


# Python gives up where threads import modules of a circle, such as JAX's, at once.
_importing = _Lock()


def _import(name: str) -> _typing.Any:
    module = _MODULES[name]
    try:
        found = _importlib.import_module(f".{module}", __name__)
    except AttributeError as e:  # Else Python says that the name is not there.
        raise ImportError(f"`{__name__}.{name}` cannot be imported: {e}") from e
    return found if name == module else getattr(found, name)
