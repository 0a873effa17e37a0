"""The arguments of saves: their keywords, and the record that a call hands on."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from jaxtyping import PyTree

from .. import _rooms
from .._format import _layouts
from .._format._index import BaseFacts
from .._format._layouts import Layout
from .._load._checkpoint import Checkpoint
from .._runtime import _processes
from .._runtime._arguments import Who
from .._storage import _open_files
from .._storage._backend import Backend
from .._tree import _leaf
from .._tree._filters import FilterSpec, IsLeaf
from ._background import SaveHandle


# Functions of the tree by name, made by `ec.function` or of a checkpoint; or "drop".
Functions = Mapping[str, Any] | str | None
# A checkpoint that a tree belongs to; or what another one says of it.
Base = str | os.PathLike[str] | Checkpoint | BaseFacts | None
Chunks = None | int | Callable[[str, tuple[int, ...], np.dtype], Any]


class EncodeKeywords(TypedDict, total=False):
    """Keywords that say how leaves are stored."""

    chunks: Chunks
    compression: Literal["lz4", "zstd"] | None
    max_bytes: int | None
    progress: bool


class PlaceKeywords(EncodeKeywords, total=False):
    """Keywords that say how leaves are stored, and lie on disk."""

    layout: Layout
    durable: bool
    orbax: bool


class BytesKeywords(EncodeKeywords, total=False):
    """Keywords of a save in memory: which leaves, as what, and what is beside them."""

    where: Callable[[PyTree], Any] | None
    dtype: Any
    metadata: Any
    functions: Functions
    base: Base


class SaveKeywords(BytesKeywords, PlaceKeywords, total=False):
    """All keywords of a save."""

    overwrite: bool
    reuse: str | os.PathLike[str] | SaveHandle | None
    processes: Who


class RunKeywords(PlaceKeywords, total=False):
    """Keywords of all saves of a run."""

    filter_spec: FilterSpec
    is_leaf: IsLeaf
    where: Callable[[PyTree], Any] | None
    dtype: Any
    processes: Who
    base: Base


class SaveOptions(NamedTuple):
    """All arguments of `tree_serialise_leaves` but its path and tree; and `own`, states
    of processes alone, each as a checkpoint of one file. A process has one or none,
    unless this save copies another one: then it has those of all processes."""

    filter_spec: FilterSpec = _leaf.is_storable
    is_leaf: IsLeaf = None
    where: Callable[[PyTree], Any] | None = None
    dtype: Any = None
    metadata: Any = None
    layout: Layout = "ocdbt"
    chunks: Chunks = None
    compression: Literal["lz4", "zstd"] | None = None
    overwrite: bool = True
    durable: bool = True
    max_bytes: int | None = None
    progress: bool = False
    reuse: str | os.PathLike[str] | SaveHandle | None = None
    functions: Functions = None
    processes: Who = "all"
    own: Sequence[bytes] = ()
    base: Base = None
    orbax: bool = False

    @property
    def count(self) -> int:
        """Number of processes that make the save together."""
        return 1 if self.processes == "own" else _processes.count()


DEFAULTS = SaveOptions._field_defaults


def base_facts(base: Base) -> BaseFacts | None:
    """**Raises:** as `open`; `TypeError` for what is no path."""
    if base is None or isinstance(base, BaseFacts):
        return base
    return _rooms.base_facts(base)


def check(root: object, options: SaveOptions) -> None:
    """**Raises:** `ValueError` for what no save to `root` can have."""
    if isinstance(root, Backend):
        root.check_writable()
        check_name(root)
    else:
        _open_files.check_open(root)
    is_packed = options.layout in _layouts.PACKED
    if not is_packed and options.reuse is not None:
        raise ValueError(
            '`reuse` needs `layout="ocdbt"`: files of another layout belong to one '
            "checkpoint."
        )
    if not is_packed and _open_files.is_archive(root):
        raise ValueError('A checkpoint of one file has `layout="ocdbt"`.')
    if options.orbax and _open_files.is_archive(root):
        raise ValueError("`orbax` is for a checkpoint in a directory, not in one file.")


def check_name(root: Backend) -> None:
    """**Raises:** `ValueError` for the name of a file that is no checkpoint of ours,
    `FileExistsError` if there is one."""
    if root.url.endswith(".safetensors"):
        error, what = ValueError, "is the name of a file that a save does not write"
        if root.entry() == "file":
            error, what = FileExistsError, "is a file, not a checkpoint"
        raise error(
            f"`{root}` {what}; nothing was saved. For a `.safetensors` file, of arrays "
            f"only: `ec.export_safetensors({str(root)!r}, tree)`. For a checkpoint "
            "choose another name."
        )
