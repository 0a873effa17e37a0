"""The arguments of a save, frozen at the public call and handed on as they are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._load import formats
from .._runtime import _processes
from .._storage import _archive, _root
from .._storage._backend import Backend
from .._tree import _leaf
from .._tree._filters import FilterSpec, IsLeaf
from ._function import Functions


Chunks = None | int | Callable[[str, tuple[int, ...], np.dtype], Any]


class Selected(NamedTuple):
    """The leaves to save: those of a tree that a call selects."""

    tree: PyTree
    filter_spec: FilterSpec = _leaf.is_storable
    is_leaf: IsLeaf = None
    where: Callable[[PyTree], Any] | None = None


class SaveOptions(NamedTuple):
    """How they are saved: the keywords of `tree_serialise_leaves` with these names, and
    the `own` state of this process, as a checkpoint of one file."""

    dtype: Any = None
    metadata: Any = None
    layout: str = "ocdbt"
    chunks: Chunks = None
    compression: str | None = None
    overwrite: bool = True
    durable: bool = True
    max_bytes: int | None = None
    progress: bool = False
    functions: Functions = None
    processes: str = "all"
    own: bytes | None = None

    @property
    def count(self) -> int:
        """How many processes make the save together."""
        return 1 if self.processes == "own" else _processes.count()


def check(root: Any, options: SaveOptions) -> None:
    """**Raises:** `ValueError` for what no save to `root` can have."""
    layout, compression = options.layout, options.compression
    _processes.check(options.processes)
    if isinstance(root, Backend):
        root.check_writable()
        check_name(root)
    else:
        _archive.check_open(root)
    if layout not in _root.LAYOUTS:
        raise ValueError(f'`layout` must be "ocdbt" or "zarr", not {layout!r}.')
    if layout != "ocdbt" and _archive.is_archive(root):
        raise ValueError('A checkpoint of one file has `layout="ocdbt"`.')
    if compression not in (None, "lz4", "zstd"):
        raise ValueError(
            f'`compression` must be None, "lz4" or "zstd", not {compression!r}.'
        )


def check_name(root: Backend) -> None:
    """**Raises:** `ValueError` for the name of a file that is no checkpoint of ours,
    `FileExistsError` if there is one."""
    if root.url.endswith(formats.SUFFIX):
        error, what = ValueError, "is the name of a file that a save does not write"
        if root.entry() == "file":
            error, what = FileExistsError, "is a file, not a checkpoint"
        raise error(
            f"`{root}` {what}; nothing was saved. For a `.safetensors` file, of arrays "
            f"only: `ec.export_safetensors({str(root)!r}, tree)`. For a checkpoint "
            "choose another name."
        )
