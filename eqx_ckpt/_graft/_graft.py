"""`graft`: parts of a checkpoint into a model, with nothing left unsaid."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._functions._computed import Formula
from .._kernel._load import (
    _checkpoint,
    _deserialise,
    _lazy,
    _load_options,
    _open,
    _read_leaves,
)
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._load._load_options import LoadOptions, TogetherKeywords
from .._kernel._load._reads import LeafRead
from .._kernel._runtime import _arguments, _gc
from .._kernel._storage import _store
from .._kernel._tree import _from_host, _host_copy, _leaf, _leaked_tracers
from .._kernel._tree._compare import Static
from ..adapters import _deferred
from . import _graft_plan, _init, _layouts
from ._adapting import Placed
from ._matching import Matching
from ._report import Report, ReportRow
from ._sides import Model, StoredSide


@_arguments.checked(
    _load_options.DEFAULTS,
    scalars=_arguments.words("error", "load", "keep"),
    init=_arguments.optional(_arguments.FUNCTION),
)
@_open.retried_if_replaced(1, "ckpt")
@_gc.paused()
def graft(
    model: PyTree,
    ckpt: str | os.PathLike[str] | Checkpoint,
    pairs: Sequence[Any],
    *,
    fresh: Callable[[PyTree], Any] | None = None,
    drop: str | Sequence[str] | Callable[[Any], Any] | None = None,
    scalars: str = "error",
    init: Callable[[], PyTree] | None = None,
    static: Static = "error",
    cast: bool = False,
    **options: Unpack[TogetherKeywords],
) -> tuple[PyTree, Report]:
    """Puts parts of a checkpoint into a model of another structure.

    You say where everything goes: each array of the model is in one pair or in `fresh`,
    and each leaf of the checkpoint is in a pair or in `drop`. An error lists what you
    left out, and shows the likely pair as code. Within a pair, leaves match by their
    names below its two nodes. All of it is checked before an array is read. Then only
    the bytes that are needed are read, together.

    **Arguments:**

    - `model`: the tree to graft into, real or a skeleton. It says how each leaf comes
        back, as the `like` of [`tree_deserialise_leaves`][] does. One array at two
        places becomes two if it is made of two.
    - `ckpt`: as in [`open`][], or an open [`Checkpoint`][].
    - `pairs`: a list of `(where in the model, where in the checkpoint)`: two functions
        from the tree to a node, such as
        `(lambda m: m.backbone.encoder, lambda c: c.model.encoder)`. The second may be a
        dotted name, and may give lazy views, such as `c.embedding.weight[:100]`. If
        both give lists of nodes, these are paired one by one. If one pair is below a
        node of another, the leaves there belong to the pair below. After the two sides
        you may put a [`rename`][] if names differ, and adapters if shapes differ.
        Adapters come from `ec.adapters`, or are functions `(saved, like) -> array`.
        Give these steps one by one or in a list, in the order in which they apply.
        [`inverse`][] gives the steps of the way back.
    - `fresh`: a function from the model to the nodes that keep the values that they
        have in it, such as a new head.
    - `drop`: a function from the checkpoint's tree to the nodes that you do not want,
        or their dotted names. A leaf is dropped as a whole: a slice is an error.
    - `scalars`: what to do if a Python scalar in a pair, such as a counter or
        `Dropout.p`, was saved with another value than the model's: `"error"`; `"load"`
        the saved one; or `"keep"` the model's. The report says what differs. A scalar
        that is a pair by itself is loaded.
    - `init`: for a skeleton, the function that makes the model. It computes what is
        `fresh`, in a jit, and nothing that is loaded. See [`load_or_init`][].
    - `static`: as in [`tree_deserialise_leaves`][]; names may be those of the model or
        those of the checkpoint.
    - `cast`: as there.
    - `verify`, `max_bytes`, `progress`, `reshard`, `processes`: as in
        [`tree_deserialise_leaves`][]. Slices, and what adapters take, are read by each
        process that needs them, and never move between devices.

    A weight that has the right shape may be stored in another order. Where libraries
    have several for a layer of Equinox that is square, and no adapter says which, that
    is a warning: see docs/layouts.md.

    If the model has arrays that are sharded over several processes, all processes of
    the run have to make the call. If it fails in one of them, it raises in all.

    **Returns:** the model, and a [`Report`][].

    **Raises:** one `RuntimeError` that lists everything that does not fit, or every
    leaf whose bytes are damaged; `ValueError` or `TypeError` for a pair, a `fresh` or a
    `drop` that picks no nodes.

    !!! example

        ```python
        >>> import jax.numpy as jnp, eqx_ckpt as ec
        >>> saved = {"encoder": jnp.ones(2), "head": jnp.ones(5)}
        >>> ec.tree_serialise_leaves("memory://graft", saved)
        >>> model = {"backbone": jnp.zeros(2), "head": jnp.zeros(3)}
        >>> model, report = ec.graft(
        ...     model,
        ...     "memory://graft",
        ...     [(lambda m: m["backbone"], lambda c: c.encoder)],
        ...     fresh=lambda m: m["head"],
        ...     drop=lambda c: c.head,
        ... )
        >>> model["backbone"], model["head"]
        (Array([1., 1.], dtype=float32), Array([0., 0., 0.], dtype=float32))
        >>> report.names("loaded"), report.names("fresh"), report.names("dropped")
        (['backbone'], ['head'], ['head'])

        ```
    """
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Sequence) or not pairs:
        raise TypeError(
            "`pairs` must be a list of pairs `(where in the model, where in the "
            "checkpoint)`: `[(lambda m: m.encoder, lambda c: c.model.encoder)]`."
        )
    given = _load_options.check(LoadOptions(**options))
    before = _store.bytes_read()
    ours = Model(model)
    _leaked_tracers.check_no_tracers(ours.flat, ours.record)
    place = ckpt.path if isinstance(ckpt, Checkpoint) else ckpt
    leaves = list(ours.flat.leaves)
    processes = _deserialise.processes_of("graft", [place], leaves, given)

    with processes.share_errors():
        stored = StoredSide(_checkpoint.open(ckpt))
        as_saved = lambda some: _lazy.fetch(some, given.verify, given.max_bytes)
        plan = _graft_plan.plan(
            ours,
            stored,
            pairs,
            fresh=fresh,
            drop=drop,
            scalars=scalars,
            static=static,
            cast=cast,
            can_init=init is not None,
            read_scalars=as_saved,
        )
        untied = [x for x in plan.placed if x.number not in plan.tied]
        wants = [want for x in untied for want in _wants(x)]
        planned = _read_leaves.plan(stored.source, wants, given)

    def make_leaves() -> list[Any]:
        values = planned.run(processes)[::-1]
        return [_make_leaf(x, values, ours.names) for x in untied]

    save = stored.source.index.save
    values = _deserialise.read_in_step(processes, [save], [planned], make_leaves)
    for x, value in zip(untied, values):
        leaves[x.number] = value
    for number, origin in plan.tied.items():
        leaves[number] = leaves[origin]
    tree = jtu.tree_unflatten(ours.flat.structure, leaves)
    if init is not None:
        tree = _init.initialise(tree, init)
    _layouts.warn(plan.matching, plan.placed)
    report = Report(
        stored.ckpt.path,
        tuple(_rows(plan.matching, plan.placed)),
        tuple(dict.fromkeys(plan.differences)),
        None if stored.source.root.is_remote else _store.bytes_read() - before,
        stored.saved.nbytes,
    )
    return tree, report


def _wants(placed: Placed) -> list[LeafRead]:
    """The reads that a leaf is made of."""
    made = placed.made
    if isinstance(made, LazyArray):
        return [_lazy.known_leaf(made).read_as(placed.target)]
    parts = _deferred.parts_of(made)
    return [_lazy.known_leaf(x).read_as(_lazy.host_target(x)) for x in parts]


def _make_leaf(x: Placed, values: list[Any], names: list[str]) -> Any:
    """Makes a leaf of the model. Takes what was read for it off the end of `values`."""
    made, owned = x.made, False
    if isinstance(made, LazyArray):
        return values.pop()
    try:
        if isinstance(made, Formula):
            # Popped one by one, so that parts live no longer than they are needed.
            made = made.make([values.pop() for _ in made.parts], None, ())
            owned = True
        template = _leaf.template_of(made)
        array = _host_copy.to_host(made, template)
        arrays = [array[region] for region in _from_host.regions(x.target) or [...]]
        return _from_host.from_host(arrays, template, x.target, owned)
    except ValueError as e:
        raise RuntimeError(
            f"The model's leaf `{names[x.number]}` cannot be made of "
            f"{', '.join(f'`{name}`' for name in x.job.sources)} by "
            f"{x.job.how or 'a view'}: {e}"
        ) from e


def _rows(matching: Matching, placed: list[Placed]) -> list[ReportRow]:
    model, saved = matching.model, matching.stored.saved
    sizes = [template.nbytes for template in saved.templates]
    rows: dict[int, ReportRow] = {}
    for x in placed:
        nbytes = _nbytes(model.flat.leaves[x.number])
        rows[x.number] = ReportRow(
            x.status, model.names[x.number], x.job.sources, x.how(saved), nbytes
        )
    for number, node in matching.fresh.items():
        if model.is_array(number):
            nbytes = _nbytes(model.flat.leaves[number])
            rows[number] = ReportRow("fresh", model.names[number], (), node, nbytes)
    dropped = [
        ReportRow("dropped", saved.names[p], (), node, sizes[saved.template_of[p]])
        for p, node in sorted(matching.dropped.items())
    ]
    return [*(rows[n] for n in sorted(rows)), *dropped]


def _nbytes(leaf: Any) -> int:
    """The bytes of a leaf of the model, as it is in memory."""
    if not hasattr(leaf, "dtype"):
        return 0
    if _leaf.is_key(leaf):
        leaf = jax.eval_shape(jr.key_data, leaf)
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
