"""`tree_deserialise_leaves` and `materialise`: they read what is stored into a tree.

A load opens the checkpoint (`_open`), and pairs the leaves of `like` with stored ones
(`_match`). It plans the read of these, does it (`_read_leaves`, and below that
`_read_arrays`), and puts the leaves into the tree.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import ReplacedError
from .._format import _schema, _text
from .._runtime import _arguments, _gc, _log, _processes
from .._runtime._processes import Processes
from .._storage import _root
from .._storage._open_files import Readable
from .._tree import _flatten, _leaf, _node, _target
from .._tree._filters import FilterSpec, IsLeaf
from .._tree._node import Node
from . import _checkpoint, _lazy, _load_options, _open, _read_leaves
from ._checkpoint import Checkpoint
from ._lazy import LazyArray
from ._load_options import LoadKeywords, LoadOptions, TogetherKeywords
from ._read_leaves import ReadPlan


@_arguments.checked(_load_options.DEFAULTS)
@_open.retried_if_replaced(0, "path")
@_gc.paused()
def tree_deserialise_leaves(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    like: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    **options: Unpack[LoadKeywords],
) -> PyTree:
    """Loads leaves into a tree, each from the leaf that was saved under its name.

    Everything is checked before an array is read: names, shapes, dtypes, and the static
    fields of the Modules that are loaded.

    **Arguments:**

    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `like`: a tree of the structure to load into: real, or a skeleton made by
        `eqx.filter_eval_shape` or [`skeleton`][]. It says how each leaf comes back: a
        `jax.ShapeDtypeStruct` or jax.Array as a jax.Array with its sharding; a NumPy
        array as one; a Python scalar as its type; a typed PRNG key as a key.
    - `filter_spec`: which leaves of `like` to load, as in `eqx.filter`; what it leaves
        out stays as in `like`. Functions see a skeleton's leaves as tracers, so
        `eqx.is_array` is true of them.
    - `is_leaf`: called on every node of `like`; if true, it is treated as a leaf.
    - `where`: a function from `like` to the nodes to load; the rest of `like` is
        returned untouched. All of it by default.
    - `source`: the one node of the checkpoint that `like` stands for: a dotted name, or
        a function of the checkpoint's own tree, such as `lambda c: c.model`.
    - `rename`: a [`rename`][], or what that takes, from the names that are stored to
        those in `like`, as after a class has changed. It is given whole names, as the
        checkpoint prints them, before `source` is cut off; a `source` that is a text is
        a name after it. Modules and the entries of an `eqx.nn.State` go with their
        leaves: static fields are compared, and statistics found, under the new names.
        Two leaves of one name, and a rule that changes nothing, are errors.
    - `missing`: `"error"`, or `"keep"` the value in `like` of a selected leaf that the
        checkpoint lacks. An abstract leaf has none to keep: that is an error.
    - `unexpected`: `"error"`, or `"ignore"` leaves of the checkpoint that name none of
        `like`. Only those inside what is loaded are unexpected.
    - `static`: `"error"`, or `"ignore"` static fields that have changed, or a list of
        those that may: names as the error shows them, or patterns, in which `*` stands
        for any text, as in `["*.vocab_size"]`. A leading `*.` may stand for nothing. A
        name of no static field of the checkpoint is an error. Functions and classes
        are compared by package and qualified name, also where they are leaves of a
        Module. Not compared are functions without one, such as lambdas, arrays of JAX
        and objects of unknown classes; of what holds one of these, the rest is.
    - `cast`: whether floats may become other floats, which rounds them, and ints other
        ints: a value that is out of range is an error. Also whether the data of legacy
        PRNG keys may become typed keys, or the other way round.
    - `verify`: whether to check the digests of all that is read.
    - `max_bytes`: how much host memory the call may take beyond the tree, 256 MiB by
        default, but at least a chunk, and as much as it takes to decode and convert
        that. Leaves larger than it are read in parts. What goes onto devices with
        memory of their own is in host memory until it is there: at most `max_bytes` at
        a time, but at least one leaf. See docs/devices.md.
    - `progress`: whether to show a progress bar. This needs `eqx_ckpt[progress]`.
    - `reshard`: what becomes of arrays of which several processes need the same chunks.
        `"read"`: each process reads what it needs. `"devices"`: each reads an even
        share, once, and the devices move it to where it is needed. `"auto"` does that
        where it is likely to take less time. See docs/processes.md.
    - `processes`: `"own"` where this process of many loads alone what it needs, at a
        path of its own or not: no other takes part, or is waited for. It is how what
        was saved with `processes="own"` is loaded. By default `"all"`, or a
        [`Together`][], which also says how long they wait for each other.

    In a run of many processes (`jax.distributed`) all of them make the call if `like`
    has arrays that are sharded over several of them. Each reads what its own devices
    need. If that fails in one process, it is an error in all.

    Where another process saves to the path while this one reads it, what is loaded is
    one of the two saves: if the first one is lost, the call begins again, at least
    twice and for half a minute, and then raises. An open `Checkpoint` stays at the save
    that it is.

    **Returns:** `like`, with the selected leaves loaded.

    **Raises:** one `RuntimeError` that lists by name everything that does not fit; one
    [`DamagedError`][] that lists every leaf whose bytes are damaged; `ValueError` for a
    selection of nothing; `FileNotFoundError` if there is no checkpoint.

    !!! example

        ```python
        >>> import equinox as eqx, jax.random as jr, eqx_ckpt as ec
        >>> model = eqx.nn.MLP(2, 2, 8, 1, key=jr.key(0))
        >>> ec.tree_serialise_leaves("memory://load", {"model": model, "step": 3})
        >>> like = eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 8, 1, key=jr.key(0))
        >>> loaded = ec.tree_deserialise_leaves("memory://load", like, source="model")
        >>> bool(eqx.tree_equal(loaded, model))
        True

        ```
    """
    given = LoadOptions(filter_spec, is_leaf, **options)
    return load(path, like, _load_options.check(given))


def load(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    like: PyTree,
    options: LoadOptions,
) -> PyTree:
    """Loads as `tree_deserialise_leaves` does, with options that are checked, but does
    not try again where the checkpoint is replaced meanwhile."""
    place = path.path if isinstance(path, Checkpoint) else path
    processes = processes_of("load", [place], like, options)
    with processes.share_errors():
        # Only a `like` of all that is saved says what the leaves of a `.eqx` file are.
        ckpt = _checkpoint.open(path, like=like if options.source is None else None)
        source = ckpt._source
        matched = _checkpoint.match_leaves(ckpt, like, options)
        wanted = list(matched.reads.values())
        plan = _read_leaves.plan(source, wanted, options)
    with _log.timed("load") as timer:
        read = lambda: plan.run(processes)
        values = read_in_step(processes, [source.index.save], [plan], read)
    if _log.is_on(_log.DEBUG):
        nbytes = sum(x.record.template.nbytes for x in wanted)
        _log.say(
            _log.DEBUG,
            f"Loaded from `{_text.escape(ckpt.path)}`, {len(wanted)} of its leaves: "
            f"{_text.rate(nbytes, timer.seconds)}",
            path=ckpt.path,
            nbytes=nbytes,
            seconds=timer.seconds,
        )
    return matched.tree(values)


_doing = {"load": "Loading", "read": "Reading lazy leaves of", "graft": "Grafting"}


def processes_of(
    kind: str, paths: list[Any], tree: PyTree, options: LoadOptions
) -> Processes:
    """The processes that have to load the leaves of this tree together."""
    if options.processes == "own" or _processes.count() == 1:
        return Processes()
    if not any(map(_target.is_spread, jtu.tree_leaves(tree))):
        return Processes()
    places = sorted({_root.place(path) for path in paths})
    together = _arguments.together(options.processes)
    tagged = _processes.tagged(together.tag)
    what = f"{_doing[kind]} `{'`, `'.join(places[:3])}`{tagged}"
    return _processes.of_run(kind, places, together, what)


_READ_REPORT = [str], str


def read_in_step(
    processes: Processes,
    saves: list[str],
    plans: Sequence[ReadPlan],
    read: Callable[[], list[Any]],
) -> list[Any]:
    """The result of `read`, which does these plans. Before it, all processes make sure
    that they have opened the same saves and plan the same moves; none returns before
    all have read."""
    if processes.count == 1:
        values = read()
    else:
        with processes.share_errors():
            _check_same(processes, saves, " ".join(plan.digest for plan in plans))
            values = read()
            processes.round()
    for plan in plans:
        plan.log_moves()
    return values


def _check_same(processes: Processes, saves: list[str], moves: str) -> None:
    def compare(words: list[bytes]) -> bytes:
        reports = [_schema.read(x, "what a load says", _READ_REPORT) for x in words]
        for index, (own_saves, own_moves) in enumerate(reports):
            if own_saves != reports[0][0]:
                raise ReplacedError(
                    f"{processes.what}: process {index} has opened another save than "
                    "process 0: it was replaced meanwhile. Load again."
                )
            if own_moves != reports[0][1]:
                raise RuntimeError(
                    f"{processes.what}: process {index} would move other arrays over "
                    "the devices than process 0, and nothing was loaded. Pass the same "
                    "shardings, `reshard` and `max_bytes` in all processes."
                )
        return b""

    processes.round(json.dumps([saves, moves]).encode(), compare)


@_arguments.checked(_load_options.DEFAULTS)
@_gc.paused()
def materialise(tree: PyTree, **options: Unpack[TogetherKeywords]) -> PyTree:
    """Reads every lazy leaf of a tree, in one planned read; the rest stays as it is.

    **Arguments:**

    - `tree`: any tree with [`LazyArray`][]s in it, from any checkpoints; or a part of a
        checkpoint's own tree, such as `ckpt.tree.model`, which comes back as plain
        dicts, lists and arrays.

        Plain containers have no static fields and no labels of States, so that what is
        saved of them is checked less when it is loaded. To prune or edit a checkpoint
        without its classes, keep the nodes, and read their leaves:

        ```python
        leaves, structure = jax.tree.flatten(ckpt.tree.model)
        model = jax.tree.unflatten(structure, ec.materialise(leaves))
        ec.tree_serialise_leaves("pruned", model)
        ```
    - `options`: `verify`, `max_bytes`, `progress`, `reshard` and `processes`, as in
        [`tree_deserialise_leaves`][]. Slices, and what [`lazy`][] computes, are read
        and never moved.

    **Returns:** the tree, with the leaves read: as `like` had them if they were spliced
    into one, else as they were saved.

    **Raises:** as [`LazyArray.read`][].

    !!! example

        ```python
        >>> import jax.numpy as jnp, eqx_ckpt as ec
        >>> ec.tree_serialise_leaves("memory://tree", {"a": {"b": [1, 2.5]}, "c": 0})
        >>> ec.materialise(ec.open("memory://tree").tree.a)
        {'b': [1, 2.5]}

        ```
    """
    _checkpoint.check_tree(tree)
    _checkpoint.check_no_path(tree)
    given = _load_options.check(LoadOptions(**options))
    flat = _flatten.flatten(tree, None)
    lazies = {id(x): x for x in flat.leaves if isinstance(x, LazyArray)}
    todo = list(lazies.values())
    sources = _lazy.sources_of(todo)
    paths = [source.root.url for source in sources]
    processes = processes_of("read", paths, todo, given)
    with processes.share_errors():
        planned = _lazy.plans(todo, given)
    saves = list(dict.fromkeys(source.index.save for source in sources))
    read = lambda: _lazy.read(todo, planned, given, processes)
    fetched = read_in_step(processes, saves, [plan for _, plan in planned], read)
    values = dict(zip(lazies, fetched))
    read_leaves = [values.get(id(x), x) for x in flat.leaves]
    out = jtu.tree_unflatten(flat.structure, read_leaves)
    return _node.plain(out) if Node in flat.walk.types else out
