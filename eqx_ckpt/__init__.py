"""Checkpoints for Equinox: save any tree by name, open it lazily, load any part."""

from . import _platform as _platform


# isort: split
from typing import Any as _Any, TYPE_CHECKING as _TYPE_CHECKING

from . import (
    _formats as _formats,
    _near as _near,
    _orbax as _orbax,
    _plots as _plots,
    _reshard as _reshard,
    _show as _show,
    _stores as _stores,
    _zips as _zips,
    adapters as adapters,
    merging as merging,
)
from ._edit._diff import diff as diff
from ._edit._difference import Diff as Diff
from ._edit._merge import merge as merge
from ._edit._stats import stats as stats
from ._errors import DamagedError as DamagedError, ReplacedError as ReplacedError
from ._functions._function import function as function
from ._functions._lazily import lazy as lazy
from ._functions._stored_function import Function as Function
from ._graft._graft import graft as graft
from ._graft._init import load_or_init as load_or_init, unloaded as unloaded
from ._graft._inverse import inverse as inverse
from ._graft._report import Report as Report
from ._graft._skeleton import partition_rules as partition_rules, skeleton as skeleton
from ._graft._unflatten import nest as nest
from ._interop._bytes import from_bytes as from_bytes, to_bytes as to_bytes
from ._interop._convert import convert as convert
from ._interop._export import export_safetensors as export_safetensors
from ._interop._state_dict import (
    from_state_dict as from_state_dict,
    to_state_dict as to_state_dict,
)
from ._load._checkpoint import Checkpoint as Checkpoint, open as open
from ._load._deserialise import (
    materialise as materialise,
    tree_deserialise_leaves as tree_deserialise_leaves,
)
from ._load._lazy import LazyArray as LazyArray
from ._orbax._write import write_orbax as write_orbax
from ._rebuild._rebuild import rebuild as rebuild
from ._rename._rename import rename as rename
from ._run._clean import clean as clean
from ._run._manager import CheckpointManager as CheckpointManager
from ._run._records import (
    add_metrics as add_metrics,
    history as history,
    runs as runs,
)
from ._run._step import Run as Run, Step as Step
from ._runtime._arguments import (
    no_attribute as _no_attribute,
    public as _public,
    Together as Together,
)
from ._save._async import async_tree_serialise_leaves as async_tree_serialise_leaves
from ._save._background import SaveHandle as SaveHandle
from ._save._delete import delete as delete, exists as exists
from ._save._serialise import tree_serialise_leaves as tree_serialise_leaves
from ._storage._store import counting as counting
from ._stores._remote import Store as Store
from ._tree._flatten import leaf_names as leaf_names
from ._tree._leaf import is_storable as is_storable
from ._tree._register import register_leaf as register_leaf
from ._verify._scan import Problem as Problem
from ._verify._verify import verify as verify
from ._version import __version__ as __version__


# Python itself suggests names that are near: not those of the rooms.
def __dir__() -> list[str]:
    return [*_public(globals()), "__version__"]


if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        raise _no_attribute(globals(), name)
