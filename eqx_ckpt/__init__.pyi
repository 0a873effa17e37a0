# Made by tests/project/stubs.py, of the code.
from ._version import __version__ as __version__
from . import adapters as adapters
from . import merging as merging
from ._edit._diff import diff as diff
from ._edit._difference import Diff as Diff
from ._edit._merge import merge as merge
from ._edit._stats import stats as stats
from ._functions._function import function as function
from ._functions._lazily import lazy as lazy
from ._functions._stored_function import Function as Function
from ._graft._init import unloaded as unloaded
from ._graft._inverse import inverse as inverse
from ._graft._report import Report as Report
from ._graft._skeleton import partition_rules as partition_rules
from ._graft._skeleton import skeleton as skeleton
from ._graft._unflatten import nest as nest
from ._interop._export import export_safetensors as export_safetensors
from ._interop._state_dict import from_state_dict as from_state_dict
from ._interop._state_dict import to_state_dict as to_state_dict
from ._kernel._errors import DamagedError as DamagedError
from ._kernel._errors import ReplacedError as ReplacedError
from ._kernel._load._checkpoint import Checkpoint as Checkpoint
from ._kernel._load._checkpoint import open as open
from ._kernel._load._lazy import LazyArray as LazyArray
from ._kernel._run._clean import clean as clean
from ._kernel._run._records import add_metrics as add_metrics
from ._kernel._run._records import history as history
from ._kernel._run._records import runs as runs
from ._kernel._run._step import Run as Run
from ._kernel._run._step import Step as Step
from ._kernel._runtime._arguments import Together as Together
from ._kernel._save._background import SaveHandle as SaveHandle
from ._kernel._save._delete import delete as delete
from ._kernel._save._delete import exists as exists
from ._kernel._storage._store import counting as counting
from ._kernel._tree._flatten import leaf_names as leaf_names
from ._kernel._tree._leaf import is_storable as is_storable
from ._kernel._tree._register import register_leaf as register_leaf
from ._orbax._write import write_orbax as write_orbax
from ._rename._rename import rename as rename
from ._stores._remote import Store as Store
from ._verify._scan import Problem as Problem
from ._verify._verify import verify as verify
from ._kernel._format._layouts import Layout
from ._kernel._load._load_options import Renaming
from ._kernel._run._manager import CheckpointManager as _CheckpointManager
from ._kernel._runtime._arguments import Who
from ._kernel._save._options import Base
from ._kernel._save._options import Chunks
from ._kernel._save._options import Functions
from ._kernel._storage._open_files import Readable
from ._kernel._storage._open_files import Writable
from ._kernel._tree._compare import Static
from ._kernel._tree._filters import FilterSpec
from ._kernel._tree._filters import IsLeaf
from ._rebuild._builder import Sharding
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from jaxtyping import PyTree
from typing import Any
from typing import Literal
from typing import SupportsIndex
from typing import overload
import os

def graft(
    model: PyTree,
    ckpt: str | os.PathLike[str] | Checkpoint,
    pairs: Sequence[Any],
    *,
    fresh: Callable[[PyTree], Any] | None = None,
    drop: str | Sequence[str] | Callable[[Any], Any] | None = None,
    scalars: str = 'error',
    init: Callable[[], PyTree] | None = None,
    static: Static = 'error',
    cast: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    reshard: Literal['auto', 'read', 'devices'] = 'auto',
    processes: Who = 'all',
) -> tuple[PyTree, Report]: ...

def load_or_init(
    init_fn: Callable[..., PyTree],
    path: str | os.PathLike[str] | Checkpoint,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sharding: object = None,
    where: Callable[[PyTree], Any] | None = None,
    source: str | Callable[[Any], Any] | None = None,
    rename: Renaming = None,
    missing: Literal['error', 'keep', 'init'] = 'error',
    unexpected: Literal['error', 'ignore'] = 'error',
    static: Static = 'error',
    cast: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    reshard: Literal['auto', 'read', 'devices'] = 'auto',
    processes: Who = 'all',
    filter_spec: FilterSpec = ...,
    is_leaf: IsLeaf = None,
) -> PyTree: ...

def from_bytes(
    data: bytes | bytearray | memoryview,
    like: PyTree,
    filter_spec: FilterSpec = ...,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    source: str | Callable[[Any], Any] | None = None,
    rename: Renaming = None,
    missing: Literal['error', 'keep', 'init'] = 'error',
    unexpected: Literal['error', 'ignore'] = 'error',
    static: Static = 'error',
    cast: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    reshard: Literal['auto', 'read', 'devices'] = 'auto',
    processes: Who = 'all',
) -> PyTree: ...

def to_bytes(
    pytree: PyTree,
    filter_spec: FilterSpec = ...,
    is_leaf: IsLeaf = None,
    *,
    chunks: Chunks = None,
    compression: Literal['lz4', 'zstd'] | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
    where: Callable[[PyTree], Any] | None = None,
    dtype: Any = None,
    metadata: Any = None,
    functions: Functions = None,
    base: Base = None,
) -> bytes: ...

def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    like: PyTree = None,
    skip: Sequence[str] = (),
    metadata: object = None,
    overwrite: bool = True,
    verify: bool = True,
    functions: Functions = None,
    base: Base = None,
    chunks: Chunks = None,
    compression: Literal['lz4', 'zstd'] | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
    layout: Layout = 'ocdbt',
    durable: bool = True,
    orbax: bool = False,
) -> None: ...

def materialise(
    tree: PyTree,
    *,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    reshard: Literal['auto', 'read', 'devices'] = 'auto',
    processes: Who = 'all',
) -> PyTree: ...

def tree_deserialise_leaves(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    like: PyTree,
    filter_spec: FilterSpec = ...,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    source: str | Callable[[Any], Any] | None = None,
    rename: Renaming = None,
    missing: Literal['error', 'keep', 'init'] = 'error',
    unexpected: Literal['error', 'ignore'] = 'error',
    static: Static = 'error',
    cast: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    reshard: Literal['auto', 'read', 'devices'] = 'auto',
    processes: Who = 'all',
) -> PyTree: ...

class CheckpointManager(_CheckpointManager):
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_nearest: int | None = None,
        keep_seconds: int | float | None = None,
        best: tuple[str, str] | None = None,
        keep_best: int | None = None,
        keep_if: Callable[[Step], Any] | None = None,
        every: int | None = None,
        every_seconds: int | float | None = None,
        signals: Iterable[int] = (),
        reuse: bool = True,
        near: str | os.PathLike[str] | None = None,
        near_every: int | None = None,
        copies: int | None = None,
        chunks: Chunks = None,
        compression: Literal['lz4', 'zstd'] | None = None,
        max_bytes: int | None = None,
        progress: bool = False,
        layout: Layout = 'ocdbt',
        durable: bool = True,
        orbax: bool = False,
        filter_spec: FilterSpec = ...,
        is_leaf: IsLeaf = None,
        where: Callable[[PyTree], Any] | None = None,
        dtype: Any = None,
        processes: Who = 'all',
        base: Base = None,
    ) -> None: ...
    @overload
    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        *,
        own: None = None,
        where: Callable[[PyTree], Any] | None = None,
        source: str | Callable[[Any], Any] | None = None,
        rename: Renaming = None,
        missing: Literal['error', 'keep', 'init'] = 'error',
        unexpected: Literal['error', 'ignore'] = 'error',
        static: Static = 'error',
        cast: bool = False,
        verify: bool = True,
        max_bytes: int | None = None,
        progress: bool = False,
        reshard: Literal['auto', 'read', 'devices'] = 'auto',
        processes: Who = 'all',
        filter_spec: FilterSpec = ...,
        is_leaf: IsLeaf = None,
    ) -> tuple[PyTree, int]: ...
    @overload
    def restore(
        self,
        like: PyTree,
        step: SupportsIndex | None = None,
        *,
        own: PyTree,
        where: Callable[[PyTree], Any] | None = None,
        source: str | Callable[[Any], Any] | None = None,
        rename: Renaming = None,
        missing: Literal['error', 'keep', 'init'] = 'error',
        unexpected: Literal['error', 'ignore'] = 'error',
        static: Static = 'error',
        cast: bool = False,
        verify: bool = True,
        max_bytes: int | None = None,
        progress: bool = False,
        reshard: Literal['auto', 'read', 'devices'] = 'auto',
        processes: Who = 'all',
        filter_spec: FilterSpec = ...,
        is_leaf: IsLeaf = None,
    ) -> tuple[PyTree, PyTree, int]: ...

def async_tree_serialise_leaves(
    path: str | os.PathLike[str],
    pytree: PyTree,
    filter_spec: FilterSpec = ...,
    is_leaf: IsLeaf = None,
    *,
    chunks: Chunks = None,
    compression: Literal['lz4', 'zstd'] | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
    where: Callable[[PyTree], Any] | None = None,
    dtype: Any = None,
    metadata: Any = None,
    functions: Functions = None,
    base: Base = None,
    layout: Layout = 'ocdbt',
    durable: bool = True,
    orbax: bool = False,
    overwrite: bool = True,
    reuse: str | os.PathLike[str] | SaveHandle | None = None,
    processes: Who = 'all',
) -> SaveHandle: ...

def tree_serialise_leaves(
    path: str | os.PathLike[str] | Writable,
    pytree: PyTree,
    filter_spec: FilterSpec = ...,
    is_leaf: IsLeaf = None,
    *,
    chunks: Chunks = None,
    compression: Literal['lz4', 'zstd'] | None = None,
    max_bytes: int | None = None,
    progress: bool = False,
    where: Callable[[PyTree], Any] | None = None,
    dtype: Any = None,
    metadata: Any = None,
    functions: Functions = None,
    base: Base = None,
    layout: Layout = 'ocdbt',
    durable: bool = True,
    orbax: bool = False,
    overwrite: bool = True,
    reuse: str | os.PathLike[str] | SaveHandle | None = None,
    processes: Who = 'all',
) -> None: ...

def rebuild(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    known: Sequence[Any],
    source: str | Callable[[Any], Any] | None = None,
    replace: Mapping[str, Any] = ...,
    *,
    sharding: Sharding | None = None,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    reshard: Literal['auto', 'read', 'devices'] = 'auto',
    processes: Who = 'all',
) -> PyTree: ...
