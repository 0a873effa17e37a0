"""`convert`: a checkpoint of any format as one of ours, or as `.safetensors`."""

import dataclasses
import itertools as it
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Unpack

import jax
from jaxtyping import PyTree

from .._formats import _safetensors
from .._kernel._load import _checkpoint, _extra_files, _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._runtime import _arguments, _gc, _log
from .._kernel._runtime._processes import Processes
from .._kernel._save import _background, _lazies, _options, _plan, _serialise
from .._kernel._save._options import Base, Functions, PlaceKeywords, SaveOptions
from .._kernel._storage import _root
from .._kernel._tree import _flatten
from .._stores import _remote
from . import _export


@_arguments.checked(_options.DEFAULTS)
@_open.retried_if_replaced(0, "source")
@_gc.paused()
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
    **options: Unpack[PlaceKeywords],
) -> None:
    """Converts a checkpoint, of any format that [`open`][] reads, into a new one.

    It needs no model. It holds no more of the checkpoint in memory than `max_bytes`, or
    a few chunks if these are more.

    **Arguments:**

    - `source`: as in [`open`][], or an open [`Checkpoint`][].
    - `target`: where to write: a file if it ends in `.safetensors`, which holds arrays
        and `metadata`, and nothing else of the checkpoint: a line of the log says so
        of its base, and of own states of a [`CheckpointManager`][]; else a checkpoint
        as [`tree_serialise_leaves`][] saves it, in one file if it ends in `.zip`. At
        `hf://org/name` it is uploaded to the Hugging Face Hub as one commit, from a
        copy in a temporary directory.
    - `like`: as in [`open`][], for a `.eqx` file.
    - `skip`: as in [`export_safetensors`][]: what is left out. A `.safetensors` target
        cannot hold all that a checkpoint has, and no target holds what
        [cannot be read](../coming/index.md#leaves-that-cannot-be-read).
    - `metadata`: by default that of the source. For `.safetensors` a dict of strings.
    - `overwrite`: as in [`tree_serialise_leaves`][].
    - `verify`: whether to check the digests of what is read.
    - `functions`: by default, those of the source. `"drop"` leaves them out: a
        `.safetensors` target needs that, as it holds none.
    - `base`: as in [`tree_serialise_leaves`][]; by default, that of the source. A
        `.safetensors` target cannot record it.
    - `options`: `chunks`, `compression`, `layout`, `durable`, `orbax`, `max_bytes` (256
        MiB by default) and `progress`, as in [`tree_serialise_leaves`][]. By default,
        chunks are those of the source, if it has any.

    **Returns:** None.

    **Raises:** before anything is written, `ValueError` or `TypeError` that names what
    the target cannot hold; `FileExistsError` as [`tree_serialise_leaves`][] does;
    `RuntimeError` for damaged bytes in the source.

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
    given = SaveOptions(
        filter_spec=True,
        metadata=metadata,
        overwrite=overwrite,
        functions=functions,
        base=ckpt.base if base is None else base,
        **options,
    )
    index = _checkpoint.source_of(ckpt).index
    root = _root.resolve(target)
    if _remote.scheme(root.url) == "hf":
        hub: Any = root  # Its module is imported for it alone.
        with tempfile.TemporaryDirectory() as above:
            here = os.path.join(above, hub.split()[1] or "checkpoint")
            # Of a call of itself with `**options` Jedi makes a recursion without end.
            same: Any = dict(skip=skip, verify=verify, base=base, **options)
            convert(ckpt, here, metadata=metadata, functions=functions, **same)
            hub.upload(here, overwrite)
        return
    _background.wait_for(root)
    if root.url.endswith(_safetensors.SUFFIX):
        of_checkpoints = {"chunks", "compression", "layout", "orbax"}
        useless = sorted(options.keys() & of_checkpoints)
        useless += ["base"] if base is not None else []
        if useless:
            raise ValueError(
                f"`{useless[0]}` is for a checkpoint, and `{root}` is to be a "
                "`.safetensors` file: leave it out."
            )
        _export.export_safetensors(
            target,
            ckpt,
            skip=skip,
            metadata=metadata,
            functions=functions,
            overwrite=overwrite,
            verify=verify,
            durable=given.durable,
            max_bytes=given.max_bytes,
            progress=given.progress,
        )
        lost = ["the own states of its processes"] * bool(index.own)
        lost += ["its base"] * bool(index.base)
        if lost:
            text = f"`{root}` lacks what `{ckpt.path}` has: {' and '.join(lost)}"
            _log.say(_log.WARNING, text, path=root.url)
        return
    given = given._replace(own=_extra_files.own_states(_checkpoint.source_of(ckpt)))
    flat = _flatten.flatten(ckpt.tree, None)
    names = flat.names()
    skipped = _export.skipped_leaves(skip, names)
    kept = [number not in skipped for number in range(len(names))]
    some = [list(it.compress(x, kept)) for x in (names, flat.leaves)]
    if unread := _export.unreadable_leaves(*some):
        parts = [(_export.UNREADABLE, unread)]
        raise ValueError(_export.skip_message(parts, some[0]))
    if skipped:
        given = given._replace(filter_spec=jax.tree.unflatten(flat.structure, kept))
    if given.max_bytes is None:
        given = given._replace(max_bytes=256 * 2**20)
    plan = _plan.plan(root, ckpt.tree, given)
    leaves = [_lazies.verified(leaf, verify) for leaf in plan.leaves]
    # A node does not know the class that the index says it had.
    facts, saved = plan.facts, index.leaves
    if saved.tree is not None and [leaf.name for leaf in leaves] == list(saved.names):
        facts = dataclasses.replace(facts, record=saved.tree)
    _serialise.write(plan._replace(leaves=leaves, facts=facts), Processes())
