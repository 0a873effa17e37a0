"""`convert`: a checkpoint of any format as one of ours, or as `.safetensors`."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from .._format import _json, _view
from .._format._leaves import Record
from .._format._template import Template
from .._load import _checkpoint, _fetch, _open, _read, formats
from .._load._checkpoint import Checkpoint
from .._load._requests import Request
from .._load._source import Source
from .._runtime._processes import Processes
from .._save import _background, _layout, _options, _plan, _serialise
from .._save._layout import Leaf
from .._save._options import Chunks, Options
from .._save._plan import Plan
from .._storage import _root
from .._tree import _leaf, _restore
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
    options = Options(
        metadata=metadata,
        layout=layout,
        chunks=chunks,
        compression=compression,
        overwrite=overwrite,
        durable=durable,
        max_bytes=max_bytes,
        progress=progress,
    )
    _options.check(root, options)
    _json.check_metadata(metadata)
    pinned = ckpt._source
    index = pinned.index
    # As many threads as there may be read a chunk each.
    room = max(1, max_bytes // 8)
    leaves: list[Leaf] = []
    numbers: dict[Template, int] = {}
    for record in index.leaves.records():
        template = _template(pinned, record, options)
        number = numbers.setdefault(template, len(numbers))
        value = _value(pinned, record, verify, room)
        alias = index.leaves.aliases.get(record.place)
        leaves.append(Leaf(record.name, value, template, number, alias))
    if layout == "zarr":
        _layout.check_case([leaf.name for leaf in leaves], root)
    plan = Plan(
        root,
        options,
        leaves,
        list(numbers),
        [],
        index.leaves.markers,
        index.leaves.statics,
    )
    _plan.check_index(plan)
    _serialise.write(plan, Processes())


def _template(source: Source, record: Record, options: Options) -> Template:
    t = record.template
    if options.chunks is not None or source.is_run(record):
        t = t._replace(chunk=_layout.chunk_shape(record.name, t, options))
    return t._replace(codec=_layout.codec_of(t, options.compression))


def _value(source: Source, record: Record, verify: bool, room: int) -> Any:
    """The source of a leaf: itself if it is a value, else a reader of its regions."""
    if record.template.kind not in ("jax", "numpy", "key"):
        want = _fetch.Want(record, None, _restore.own_target(record.template))
        return _fetch.load(source, [want], verify)[0]

    def read(region: tuple[slice, ...]) -> np.ndarray:
        view = _view.whole(record.template.shape).take(region)
        ((_, got),) = _read.read(source, [Request(record, (view,))], verify, room)
        return got.arrays[0]

    return _leaf.Unread(read)
