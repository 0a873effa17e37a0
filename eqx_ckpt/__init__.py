"""Checkpoints for Equinox: save any tree by name, open it lazily, load any part."""

from . import adapters as adapters
from ._async import async_tree_serialise_leaves as async_tree_serialise_leaves
from ._bytes import from_bytes as from_bytes, to_bytes as to_bytes
from ._checkpoint import Checkpoint as Checkpoint, open as open
from ._clean import clean as clean
from ._convert import convert as convert
from ._delete import delete as delete, exists as exists
from ._deserialise import (
    materialise as materialise,
    tree_deserialise_leaves as tree_deserialise_leaves,
)
from ._errors import DamagedError as DamagedError
from ._export import export_safetensors as export_safetensors
from ._graft import graft as graft
from ._init import load_or_init as load_or_init, unloaded as unloaded
from ._lazy import LazyArray as LazyArray
from ._leaf import is_storable as is_storable
from ._manager import CheckpointManager as CheckpointManager
from ._nest import nest as nest
from ._pairs import rename as rename
from ._pending import SaveHandle as SaveHandle
from ._register import register_leaf as register_leaf
from ._remote import Store as Store
from ._report import Report as Report
from ._serialise import tree_serialise_leaves as tree_serialise_leaves
from ._skeleton import (
    leaf_names as leaf_names,
    partition_rules as partition_rules,
    skeleton as skeleton,
)
from ._state_dict import (
    from_state_dict as from_state_dict,
    to_state_dict as to_state_dict,
)
from ._verify import Problem as Problem, verify as verify
from ._version import __version__ as __version__
