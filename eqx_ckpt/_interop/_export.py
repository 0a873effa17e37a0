"""`export_safetensors`: the arrays of a tree as `.safetensors` files."""

import contextlib
import functools as ft
import io
import itertools as it
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, BinaryIO, NamedTuple

import jax
from jaxtyping import PyTree

from .._formats import _foreign_index, _safetensors
from .._kernel._format import _files, _json, _names, _state_labels, _template, _text
from .._kernel._format._record import Attributes
from .._kernel._format._state_labels import Label
from .._kernel._format._template import Template
from .._kernel._load import _lazy
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._runtime import _arguments, _gc, _processes, _progress
from .._kernel._runtime._arguments import Together, Who
from .._kernel._runtime._processes import Processes
from .._kernel._save import _describe, _lazies, _payload, _streams
from .._kernel._save._options import Functions
from .._kernel._save._payload import ArrayBytes, PlannedLeaf
from .._kernel._save._tree_spec import TreeSpec
from .._kernel._save._writing import ChunkRun, Destination, Sink
from .._kernel._storage import _root
from .._kernel._storage._backend import Backend
from .._kernel._tree import (
    _compare,
    _flatten,
    _folding,
    _leaf,
    _states,
)
from .._kernel._tree._filters import FilterSpec
from .._kernel._tree._flatten import Flat
from .._rename import _rename, _renamed
from .._zips import _probe, _publish_file
from . import _shards, _state_dict
from ._shards import ShardedExport, TensorFile, WriteFiles


@_arguments.checked()
@_gc.paused()
def export_safetensors(
    path: str | os.PathLike[str],
    pytree: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    *,
    skip: Sequence[str] = (),
    rename: object = None,
    metadata: object = None,
    functions: Functions = None,
    overwrite: bool = True,
    durable: bool = True,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    shard_bytes: int | None = None,
    processes: Who = "all",
) -> None:
    """Writes the arrays of a tree, or of a checkpoint, to one `.safetensors` file; or
    to several in a directory.

    The file is written atomically. Lazy leaves are read as they are written.

    **Arguments:**

    - `path`: the file to write, as in [`open`][].
    - `pytree`: a tree; an open [`Checkpoint`][], or a node of its tree.
    - `filter_spec`: which leaves to write, as in [`tree_serialise_leaves`][]: functions
        and strings are not among them by default. `eqx.is_array` leaves out Python's
        numbers as well.
    - `skip`: names of leaves that are not written, or patterns of them, in which `*`
        stands for any text. `.safetensors` has only arrays, of the dtypes of PyTorch:
        anything else is an error, which lists it, until it is in `skip`. Such are
        Python's numbers (`skip=["*.p", "*.inference"]` for `Dropout`) and PRNG keys.
    - `rename`: what [`rename`][] returns, or takes: from the names in the tree to those
        in the file. With `ec.rename(rules).inverse("model.safetensors")` what came out
        of a file gets its names back; if adapters changed arrays, [`graft`][] the model
        into `ec.open("model.safetensors").tree` by their [`inverse`][], and export that
        without a `rename`. By default a leaf is called as in [`leaf_names`][], without
        its percent signs.
    - `metadata`: strings for the header, by default those that an open checkpoint
        came with. Libraries for PyTorch want `{"format": "pt"}`.
    - `functions`: `"drop"` leaves out those that are stored with lazy leaves: a
        `.safetensors` file holds none, and they are an error until you say so.
    - `overwrite`: whether a `.safetensors` file at `path` may be replaced. Anything
        else that is there is never touched.
    - `durable`: whether to return only once the file would survive a power cut.
    - `verify`, `progress`: as in [`tree_deserialise_leaves`][], of lazy leaves.
    - `max_bytes`: how much host memory the call may take beyond the tree, 256 MiB by
        default.
    - `shard_bytes`: the most bytes of a file, unless one tensor has more. `path` then
        is a directory, which gets `model-00001-of-00002.safetensors` and so on, and
        `model.safetensors.index.json`, as libraries for Hugging Face read them. Other
        files in it stay, also those with such names that no index there names. All
        files are written beside what is there, which an export that fails leaves whole.
        Then the old index is deleted, and the new one is written last: nobody reads a
        mixture of two exports. Of two at a time to one directory of a disk the second
        waits, as files get their names, for the first. A store has no locks: make one
        export after the other there.
    - `processes`: with `shard_bytes`, in a run of many processes: all of them make the
        call, and share the path. Each writes the parts of arrays that are on its own
        devices into the files, and no array is gathered. `"own"` for an export that
        this process makes alone, as it is without `shard_bytes`.

    **Returns:** None.

    **Raises:** before anything is written, `TypeError` that names all leaves which
    `.safetensors` cannot hold; `ValueError` for two leaves of one name, and a pattern
    in `skip` that is that of none. `ValueError` too for an array of several processes
    that one is to write. It is raised for entries of a State as well, if nothing says
    what they belong to. `FileExistsError` for what is not to be replaced.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> rules = [(r"^blocks[.]", "encoder.layer.")]
        >>> model = {"blocks": [{"w": jnp.ones(2)}]}
        >>> ec.export_safetensors("model.safetensors", model, rename=rules)
        >>> ec.open("model.safetensors")["encoder.layer.0.w"]
        LazyArray(encoder.layer.0.w: f32[2])

        ```
    """
    if isinstance(pytree, str | os.PathLike):
        raise TypeError(
            f"`pytree` is `{pytree!r:.60}`. The first argument is the file to write; "
            "to export a checkpoint, pass it as `ec.open(path)` after that."
        )
    root = _root.resolve(path)
    root.check_writable()
    max_bytes = _ROOM if max_bytes is None else max_bytes
    if functions not in (None, "drop"):
        raise ValueError(
            '`functions` must be None or "drop": a `.safetensors` file holds none.'
        )
    can_drop = functions == "drop"
    plan = ft.partial(
        _plan, pytree, filter_spec, skip, rename, metadata, can_drop, verify
    )
    if shard_bytes is not None:
        run = _run_of(root, processes)
        with run.share_errors():
            tensors, metadata = plan()
            _shards.check_target(root, overwrite, _lazies.places(tensors))
            files = _shards.deal(tensors, shard_bytes)
            heads = {name: _header(some, metadata) for name, some in files.items()}
            export = ShardedExport(root, files, heads, overwrite, durable)
            if run.count > 1:
                with _lazies.keeping(tensors):
                    export.write_together(run, max_bytes)
                return
            _check_here(tensors)
            with _writer(tensors, max_bytes, progress) as write:
                export.write(write)
        return
    if isinstance(processes, Together):
        raise ValueError(
            "`processes` is for an export to several files, which many processes make "
            "together: pass `shard_bytes` too, or leave it out."
        )
    found = _probe.look(root)
    is_directory = root.entry() == "directory" or root.has(_files.INDEX)
    if found is None and is_directory:
        raise FileExistsError(f"There is a directory at `{root}`. It is left as it is.")
    if found is not None and not overwrite:
        raise FileExistsError(f"There is something at `{root}`, and `overwrite=False`.")
    if found is not None and not _safetensors.is_safetensors(found):
        raise FileExistsError(
            f"There is something at `{root}` that is no `.safetensors` file. It is "
            "left as it is."
        )
    tensors, metadata = plan()
    _check_here(tensors)
    head = _header(tensors, metadata)
    with _writer(tensors, max_bytes, progress) as write:
        files = [TensorFile("", head, len(tensors))]
        into = lambda file: Destination(FileSink(file), "", False)
        pack = lambda file: write(into(file), files)
        _publish_file.publish(root, pack, overwrite, durable)


class FileSink:
    """The `Sink` of one file, which gets all bytes."""

    has_slow_writes = True  # It may be a pipe, or a file of any library.

    # A `BytesIO` is no `BinaryIO` to checkers of types.
    def __init__(self, file: BinaryIO | io.BytesIO):
        self._file = file

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        self._file.writelines(buffers)


def _run_of(root: Backend, processes: Who) -> Processes:
    if processes == "own":
        return Processes()
    together = _arguments.together(processes)
    what = f"Exporting to `{root}`{_processes.tagged(together.tag)}"
    return _processes.of_run("export", root.url, together, what)


def _check_here(tensors: list[PlannedLeaf]) -> None:
    """**Raises:** `ValueError` for arrays that one process alone cannot write."""
    for leaf in tensors:
        value = leaf.value
        if isinstance(value, jax.Array) and not (
            _leaf.is_local(value.sharding) or _leaf.is_whole(value.sharding)
        ):
            raise ValueError(
                f"The leaf `{leaf.name}` is spread over several processes, and this "
                "one has not all of it. Nothing was written. Let all of them make the "
                "call, with `shard_bytes`; or give it to this one first, by "
                "`jax.experimental.multihost_utils.process_allgather(x, tiled=True)`."
            )


@contextlib.contextmanager
def _writer(
    tensors: Sequence[PlannedLeaf], max_bytes: int, progress: bool
) -> Iterator[WriteFiles]:
    """A function that writes tensors, in their order, to files of which each has the
    next few. A bar counts them."""
    size = min(_lazies.PART, max_bytes // _payload.COPIES)
    numbers: dict[Template, int] = {}
    # Of leaves that are written alike, the template and its number.
    alike: dict[tuple[Template, tuple[int, ...]], tuple[Template, int]] = {}
    leaves: list[PlannedLeaf] = []
    for leaf in tensors:
        key = leaf.template, _lazies.grain_of(leaf.value)
        if key not in alike:
            t = leaf.template._replace(chunk=_lazies.whole_chunks(*key, size))
            alike[key] = t, numbers.setdefault(t, len(numbers))
        leaves.append(PlannedLeaf(leaf.name, leaf.value, *alike[key], None))
    names, template_of = zip(*((x.name, x.template_number) for x in leaves))
    spec = TreeSpec(names, template_of, tuple(numbers), ())
    requests = _lazies.limit_reads(leaves, max_bytes)
    bar = _progress.bar("save", spec.nbytes, len(leaves), progress)
    with bar as advance, _lazies.keeping(leaves):
        leaves = _lazies.read_small(leaves, frozenset(), max_bytes)
        data = ArrayBytes(leaves, spec, advance)
        yield ft.partial(_write_tensors, data, requests)


def _write_tensors(
    data: ArrayBytes,
    requests: int,
    into: Destination[Sink],
    files: Sequence[TensorFile],
) -> None:
    leaf_indices = iter(range(len(data.leaves)))
    for key, head, count in files:
        runs = _runs(data.spec, it.islice(leaf_indices, count), len(head))
        batches = _streams.batches(data.spec, runs)
        _streams.write_file(data, into, key, batches, requests, head)


def _runs(spec: TreeSpec, leaf_indices: Iterable[int], at: int) -> Iterator[ChunkRun]:
    """Leaves that lie one after the other in a file, from an offset on."""
    kinds = [
        (range(len(grid.keys)), t.nbytes)
        for grid, t in zip(spec.template_grids, spec.templates)
    ]
    for leaf_index in leaf_indices:
        chunks, size = kinds[spec.template_of[leaf_index]]
        yield ChunkRun(leaf_index, chunks, at, None)
        at += size


class ExportPlan(NamedTuple):
    """The tensors to write, and the metadata of their files."""

    tensors: list[PlannedLeaf]
    metadata: dict[str, str] | None


def _plan(
    pytree: PyTree,
    filter_spec: FilterSpec,
    skip: Sequence[str],
    rename: object,
    metadata: object,
    can_drop: bool,
    verify: bool,
) -> ExportPlan:
    if metadata is None and isinstance(pytree, Checkpoint):
        metadata = pytree.metadata
    if metadata is not None and not _foreign_index.is_texts(metadata):
        raise ValueError(
            "`.safetensors` takes a dict of strings as metadata: pass `metadata=`, for "
            f"instance one of JSON, instead of {metadata!r:.200}."
        )
    leaves, own = _tensors(pytree, filter_spec, skip, rename, can_drop)
    tensors = [_lazies.verified(leaf, verify) for leaf in leaves]
    texts = {k: json.dumps(x, separators=(",", ":")) for k, x in own.items() if x}
    return ExportPlan(tensors, {**(metadata or {}), **texts} if texts else metadata)


def _tensors(
    pytree: PyTree,
    filter_spec: FilterSpec,
    skip: Sequence[str],
    rename: object,
    can_drop: bool,
) -> tuple[list[PlannedLeaf], dict[str, Any]]:
    """The tensors to write, and our own metadata: what positions in their names do not
    say. `can_drop`: whether they may be without the functions of their checkpoint."""
    if isinstance(pytree, Checkpoint):
        pytree = pytree.tree
    flat = _flatten.flatten(pytree, None)
    all_names = flat.names()
    chosen = _describe.selected(filter_spec, pytree, flat.leaves, None)
    skipped = skipped_leaves(skip, all_names)
    numbers = [i for i, good in enumerate(chosen) if good and i not in skipped]
    if not numbers:
        raise ValueError(
            "Nothing to write: `filter_spec` selects no leaf of the tree, or `skip` "
            "leaves out all that it selects."
        )
    names, leaves = [all_names[i] for i in numbers], [flat.leaves[i] for i in numbers]
    if not can_drop:
        _check_functions(leaves)
    entries = _states.state_entries(flat)
    _states.check_order(flat, {*numbers})
    unread = unreadable_leaves(names, leaves)
    described = _described(names, leaves, {name for name, _ in unread})
    templates = {id(x.template): x.template for x in described}
    refused = {key: _refused(template) for key, template in templates.items()}
    bad = [(x.name, what) for x in described if (what := refused[id(x.template)])]
    if bad or unread:
        why = "`.safetensors` has only arrays, and not all dtypes. It cannot hold:"
        holds = (
            "; a checkpoint of ours (`ec.tree_serialise_leaves`, or `ec.convert` to a "
            "directory or a `.zip`) holds them"
        )
        parts = [(why, bad), (UNREADABLE, unread)]
        error = ValueError if unread else TypeError
        raise error(skip_message(parts, names, "" if unread else holds))
    label_of = {i: entries[i].label for i in numbers if i in entries}
    new = names
    if rename is not None:
        new, label_of = _moved(rename, names, all_names, label_of)
    out: dict[str, tuple[str, PlannedLeaf]] = {}
    labels: dict[str, str] = {}
    for i, to, leaf in zip(numbers, new, described):
        name = leaf.name
        if name == to == _names.ROOT:
            raise ValueError(
                "The tree is one array, which has no name that `.safetensors` could "
                'hold: write `{"name": array}`.'
            )
        to = _foreign_index.flat_name(to)
        if not _json.is_unicode(to):
            raise ValueError(f"The name of the leaf `{name}` is not Unicode text.")
        if to in out:
            raise ValueError(
                f"The leaves `{out[to][0]}` and `{name}` both get the name `{to}`."
            )
        out[to] = name, leaf if to == name else leaf._replace(name=to)
        label = _state_labels.label_text(label_of[i]) if i in label_of else None
        if label is not None:
            labels[to] = label
    # As the library of the format writes them: the widest first, so all are aligned.
    order = {ours: -number for number, ours in enumerate(_safetensors.DTYPES.values())}
    key = lambda leaf: (order[leaf.template.dtype], leaf.name.encode())
    attributes = _attributes(flat, names, new)
    own = {_safetensors.LABELS: labels, _safetensors.ATTRIBUTES: attributes}
    return sorted((leaf for _, leaf in out.values()), key=key), own


def _attributes(flat: Flat, names: list[str], new: list[str]) -> Attributes:
    """The attributes of children without keys, by the names of nodes in the file."""
    here = _state_dict.attributes_of(flat)
    return {
        _foreign_index.flat_name(there): here[node]
        for name, to in zip(names, new if here else ())
        for node, there in _names.node_pairs(name, to)
        if node in here
    }


def _check_functions(leaves: Iterable[Any]) -> None:
    """**Raises:** `ValueError` if checkpoints of lazy leaves have functions."""
    lazies = (leaf for leaf in leaves if isinstance(leaf, LazyArray))
    for source in _lazy.sources_of(lazies):
        if count := len(source.index.functions):
            raise ValueError(
                f"A `.safetensors` file holds no functions, and `{source.root}` has "
                f'{count}: nothing was written. Leave them out, with `functions="drop"'
                "`, or write a checkpoint."
            )


def _described(
    names: Sequence[str], leaves: Sequence[Any], unreadable: Set[str]
) -> list[PlannedLeaf]:
    """The leaves that can be read, as they are stored. Of lazy ones that are alike only
    the first is described: the others are made like it."""
    out: list[PlannedLeaf] = []
    known: dict[Any, _describe.StoredValue] = {}
    for name, leaf in zip(names, leaves):
        if name not in unreadable:
            likeness = _lazies.likeness(leaf) or name
            if likeness in known:
                value, template = known[likeness]
                value = value.like(leaf)
            else:
                try:
                    known[likeness] = _describe.stored_value(leaf, None)
                except (ValueError, TypeError) as e:
                    raise type(e)(f"The leaf `{name}` cannot be written: {e}") from None
                value, template = known[likeness]
            out.append(PlannedLeaf(name, value, template, 0, None))
    return out


def _moved(
    rename: object, names: list[str], all_names: list[str], labels: Mapping[int, Label]
) -> tuple[list[str], dict[int, Label]]:
    """The names in the file, and the labels there. A rule may be for leaves that are
    not written."""
    how = _rename.of_names(rename)
    used: set[int] = set()
    new = [_rename.apply(how, name, used, "rename=").name for name in names]
    for name in all_names if how.all_rules else ():
        _rename.apply(how, name, used, "rename=")
    _rename.check_used(how, used, names, "tree")
    moves = _renamed.Moves(how, names, new, used)
    return new, _renamed.moved_labels(labels, moves)


def skipped_leaves(skip: Sequence[str], names: list[str]) -> set[int]:
    """Which leaves of these names a `skip` leaves out."""
    is_list = isinstance(skip, Sequence) and not isinstance(skip, str)
    if not is_list or not all(isinstance(x, str) for x in skip):
        raise TypeError(
            '`skip` must be a list of names, as ["step"], not '
            f"{_arguments.shown(skip)}."
        )
    out: set[int] = set()
    for pattern in skip:
        found = {i for i, name in enumerate(names) if _compare.matches(pattern, name)}
        if not found:
            raise ValueError(f"`skip` has {pattern!r}, which is the name of no leaf.")
        out |= found
    return out


UNREADABLE = "These leaves of a file of another library cannot be read:"


def unreadable_leaves(
    names: Sequence[str], leaves: Sequence[Any]
) -> list[tuple[str, str]]:
    """The names of leaves that cannot be read, each with the reason."""
    bodies = [
        (name, _lazy.body_of(leaf))
        for name, leaf in zip(names, leaves)
        if isinstance(leaf, LazyArray)
    ]
    return [(name, why) for name, body in bodies if (why := body.unreadable)]


def skip_message(
    parts: Sequence[tuple[str, list[tuple[str, str]]]], names: list[str], more: str = ""
) -> str:
    """The error for leaves of these names that are refused, each for a reason, among
    those of all `names`."""
    lines: list[str] = []
    for why, bad in parts:
        rows = [f"  {name}  {what}" for name, what in _folding.fold_rows(bad)]
        lines += [why] * bool(rows) + _text.first(rows, _MOST)
    bad = [row for _, rows in parts for row in rows]
    refused = {name for name, _ in bad}
    last = lambda name: name.rpartition(".")[2]
    others = {last(name) for name in names if name not in refused}
    skip = [x if last(x) in others or "." not in x else f"*.{last(x)}" for x, _ in bad]
    skip = list(dict.fromkeys(skip))
    text = ", ".join(f'"{name}"' for name in skip[:_MOST])
    text += ", ..." if len(skip) > _MOST else ""
    lines.append(f"Nothing was written. `skip=[{text}]` leaves them out{more}.")
    return _text.message(lines)


# Of the leaves that an error lists.
_MOST = 40


def _refused(template: Template) -> str | None:
    """The dtype or kind of a leaf that `.safetensors` cannot hold; None if it can."""
    if template.kind not in _template.ARRAY_KINDS:
        return f"({template.kind})"
    return None if template.dtype in _safetensors.DTYPES.values() else template.dtype


def _header(tensors: Sequence[PlannedLeaf], metadata: dict[str, str] | None) -> bytes:
    value: dict[str, Any] = (
        {} if metadata is None else {_safetensors.METADATA: metadata}
    )
    dtypes = {ours: theirs for theirs, ours in _safetensors.DTYPES.items()}
    end = 0
    for tensor in tensors:
        if tensor.name == _safetensors.METADATA:
            raise ValueError(f"A leaf cannot have the name `{tensor.name}`.")
        t = tensor.template
        start, end = end, end + t.nbytes
        value[tensor.name] = {
            "dtype": dtypes[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_ROOM = 256 * 2**20
