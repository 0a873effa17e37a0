"""`convert`: a checkpoint of any format as one of ours, or as `.safetensors`."""

import os
from collections.abc import Sequence
from typing import Any

from jaxtyping import PyTree

from .._load import _checkpoint, _open, formats
from .._load._checkpoint import Checkpoint
from .._runtime._processes import Processes
from .._save import _background, _lazies, _plan, _serialise
from .._save._function import Functions
from .._save._options import Chunks, SaveOptions, Selected
from .._storage import _root
from . import _export


@_open.again(0, "source")
def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    like: PyTree = None,
    skip: Sequence[str] = (),
    metadata: Any = None,
    layout: str = "ocdbt",
    chunks: Chunks = None,
    compression: str | None = None,
    overwrite: bool = True,
    durable: bool = True,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    functions: Functions = None,
) -> None:
    """Writes a checkpoint of any format that [`open`][] reads as another one.

    It needs no model, and holds no more of the checkpoint in memory than `max_bytes`,
    but at least a few chunks.

    **Arguments:**

    - `source`: as in [`open`][], or an open [`Checkpoint`][].
    - `target`: where to write: a file if it ends in `.safetensors`; else a checkpoint
        as [`tree_serialise_leaves`][] saves, in one file if it ends in `.zip`.
    - `like`: as in [`open`][], for a `.eqx` file.
    - `skip`: as in [`export_safetensors`][], for a target in `.safetensors`, which
        cannot hold all that a checkpoint has. A checkpoint of ours holds all.
    - `metadata`: by default that of the source. For `.safetensors` a dict of strings.
    - `layout`, `chunks`, `compression`, `overwrite`, `durable`: as in
        [`tree_serialise_leaves`][]; by default chunks are as in the source, if it has
        some.
    - `verify`, `max_bytes`, `progress`: as in [`tree_deserialise_leaves`][].
    - `functions`: by default, those of the source; `"drop"` leaves them out, which a
        target in `.safetensors` needs, as it holds none.

    **Returns:** None.

    **Raises:** before anything is written, `ValueError` or `TypeError` that names what
    the target cannot hold; `FileExistsError` as the functions above; `RuntimeError` for
    bytes of the source that are damaged.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.export_safetensors("model.safetensors", {"layers": [jnp.ones(2)]})
        >>> ec.convert("model.safetensors", "ckpt.zip")
        >>> ec.open("ckpt.zip").tree.layers[0]
        LazyArray(layers.0: f32[2])

        ```
    """
    ckpt = _checkpoint.open(source, like=like)
    metadata = ckpt.metadata if metadata is None else metadata
    root = _root.resolve(target)
    _background.wait_for(root)
    if root.url.endswith(formats.SUFFIX):
        if ckpt.functions and functions != "drop":
            raise ValueError(
                f"A `.safetensors` file holds no functions, and `{ckpt.path}` has "
                f"{len(ckpt.functions)}: nothing was written. Leave them out, with "
                '`functions="drop"`, or write a checkpoint.'
            )
        _export.export_safetensors(
            target,
            ckpt,
            skip=skip,
            metadata=metadata,
            overwrite=overwrite,
            durable=durable,
            verify=verify,
            max_bytes=max_bytes,
            progress=progress,
        )
        return
    if skip:
        raise ValueError("`skip` is for a `.safetensors` file: this target holds all.")
    max_bytes = 256 * 2**20 if max_bytes is None else max_bytes
    options = SaveOptions(
        metadata=metadata,
        layout=layout,
        chunks=chunks,
        compression=compression,
        overwrite=overwrite,
        durable=durable,
        max_bytes=max_bytes,
        progress=progress,
        functions=functions,
    )
    plan = _plan.plan(root, Selected(ckpt.tree, filter_spec=True), options)
    leaves = [_lazies.verified(leaf, verify) for leaf in plan.leaves]
    # A node does not know all that the index says of it: such as which release recorded
    # its static fields.
    saved = ckpt._source.index.leaves
    label = {saved.names[place]: label for place, label in saved.markers.items()}
    markers = {i: label[x.name] for i, x in enumerate(leaves) if x.name in label}
    plan = plan._replace(leaves=leaves, markers=markers, statics=saved.statics)
    if [leaf.name for leaf in leaves] == saved.names:
        plan = plan._replace(structure=saved.structure)
    _serialise.write(plan, Processes())
