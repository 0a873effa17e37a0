"""`open` and `Checkpoint`: what is stored, as a tree of lazy leaves."""

import functools as ft
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TYPE_CHECKING

from jaxtyping import PyTree

from .. import _rooms
from .._format import _names, _text
from .._format._index import BaseFacts, SaveFacts
from .._format._leaves import Leaves
from .._runtime import _arguments, _elsewhere, _handlers
from .._storage._backend import Backend
from .._storage._open_files import Readable
from .._tree import _folding, _leaf, _nearest, _node
from .._tree._compare import Static
from .._tree._filters import FilterSpec, IsLeaf
from . import _lazy, _load_options, _nodes, _open, _source
from ._lazy import LazyArray
from ._load_options import LoadOptions
from ._match import Match, Matcher
from ._source import Source


# A checker of types at run time looks up an item of a mapping whose types it knows, and
# an item here may be damaged.
_Base = Mapping[str, LazyArray] if TYPE_CHECKING else Mapping


class Checkpoint(_Base):
    """A checkpoint that has been opened: its index, and lazily its leaves.

    Made by [`open`][]. It is immutable, may be used from several threads, and pickles
    as its path and save id. It is pinned to the save that was opened: once that has
    been replaced or deleted, reading raises.

    It is a mapping from the dotted names of its leaves to [`LazyArray`][]s, in the
    tree's order; two of them are equal if they are one object.

    **Attributes:**

    - `path`: the absolute path or URL.
    - `metadata`: what was saved as `metadata=`.
    - `leaves`: the same mapping.
    - `nbytes`: the bytes of all leaves; arrays that are shared count once.
    - `tree`: the checkpoint's own tree; its nodes have the attributes, keys and indices
        of the tree that was saved, without the classes. `ckpt.tree.model.layers[0]`.
    - `save_id`, `layout`, `writer`: the id of the save, how it lies on disk (for
        other formats their name), and the versions of the packages that wrote it.
    - `functions`: the [`Function`][]s that are stored with it, by name.
    - `saved`: its `time`, in seconds since 1970; how many `processes` saved it; and its
        `shardings`: how many leaves were spread over devices, and how, such as
        `{"P('x', None) on x=8": 12}`. None where the format does not say.
    - `base`: the `path`, `save_id` and `digest` of the checkpoint that was given as
        `base=` of the save. None if there was none.
    """

    _source: Source

    def __init__(self, source: Source):
        vars(self)["_source"] = source

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Checkpoint is immutable")

    @property
    def path(self) -> str:
        return self._source.root.url

    @property
    def metadata(self) -> Any:
        return self._source.index.metadata

    @property
    def save_id(self) -> str:
        return self._source.index.save

    @property
    def layout(self) -> str:
        return self._source.index.layout

    @property
    def writer(self) -> dict[str, str]:
        return dict(self._source.index.writer)

    @property
    def saved(self) -> SaveFacts | None:
        return self._source.index.saved

    @property
    def base(self) -> BaseFacts | None:
        return self._source.index.base

    @property
    def leaves(self) -> Mapping[str, LazyArray]:
        return self

    @property
    def nbytes(self) -> int:
        return self._source.index.leaves.nbytes

    @ft.cached_property
    @_handlers.pass_through
    def tree(self) -> Any:
        return _nodes.tree_of(self._source)

    @ft.cached_property
    @_handlers.pass_through
    def functions(self) -> Mapping[str, Any]:
        """The stored functions by name: a mapping to [`Function`][]s."""
        return _rooms.open_functions(self._source)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            names = () if name.startswith("_") else self._source.index.leaves.names
            is_node = any(_names.is_under(x, name) for x in names)
            node = f"`ckpt.tree.{name}`" if is_node else ""
            raise _elsewhere.unknown_attribute(self, "Checkpoint", name, node)

    @_handlers.pass_through
    def __getitem__(self, name: str) -> LazyArray:
        """The leaf of a dotted name. **Raises:** `KeyError` naming the nearest."""
        leaves = self._source.index.leaves
        leaf_index = leaves.leaf_indices.get(name)
        if leaf_index is None:
            raise KeyError(_unknown(name, leaves.names))
        return _lazy.lazy_of(self._source, leaves.record(leaf_index))

    def __contains__(self, name: object) -> bool:
        return name in self._source.index.leaves.leaf_indices

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.index.leaves.names)

    def __len__(self) -> int:
        return len(self._source.index.leaves.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @_arguments.checked()
    def splice(
        self,
        like: PyTree,
        filter_spec: FilterSpec = _leaf.is_storable,
        is_leaf: IsLeaf = None,
        *,
        where: Callable[[PyTree], Any] | None = None,
        source: str | Callable[[Any], Any] | None = None,
        rename: Any = None,
        missing: Literal["error", "keep", "init"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        static: Static = "error",
        cast: bool = False,
    ) -> PyTree:
        """`like` with lazy leaves: everything is checked, and nothing is read.

        It is as if one `eqx.tree_at` had put these in. The arguments are those of
        [`tree_deserialise_leaves`][], and [`materialise`][] then reads what is left in
        the tree.

        **Returns:** `like`, with a [`LazyArray`][] for every selected leaf.

        **Raises:** as `tree_deserialise_leaves`, before anything is read.

        !!! example

            ```python
            >>> import equinox as eqx, jax.random as jr, eqx_ckpt as ec
            >>> model = eqx.nn.MLP(2, 2, 8, 1, key=jr.key(0))
            >>> ec.tree_serialise_leaves("memory://splice", model)
            >>> lazy = ec.open("memory://splice").splice(model)
            >>> lazy.layers[0].weight
            LazyArray(layers.0.weight: f32[8,2])

            ```
        """
        chosen = filter_spec, is_leaf, where, source, rename
        options = LoadOptions(*chosen, missing, unexpected, static, cast)
        given = _load_options.check(options)
        matched = match_leaves(self, like, given)
        # `eqx.tree_at` does not find leaves by number: it makes one of every `()`.
        return matched.tree(
            _lazy.lazy_of(self._source, x.record, x.target)
            for x in matched.reads.values()
        )

    @_arguments.checked()
    def spec(self, name: str) -> dict[str, Any]:
        """TensorStore's spec of the stored array of a leaf, for `tensorstore.open`.

        What TensorStore opens by it is what is at the path then: with `layout="zarr"`
        and in a zip that may be another save. Dtypes that TensorStore lacks are stored
        as `uint8`, and keys as `uint32`: see FORMAT.md. TensorStore checks no digest. A
        zip is read by each member as a whole.

        **Arguments:**

        - `name`: the dotted name of a leaf.

        **Returns:** a dict that JSON can hold. It has the options of a [`Store`][] that
        was opened, which may be secret.

        **Raises:** `KeyError` as `ckpt[name]`; `ValueError` for a leaf of another
        format, and for a save with more than 2^20 chunks; also in a store without a
        driver of TensorStore: `az://`, `memory://`, an open file.

        !!! example

            ```python
            >>> import eqx_ckpt as ec, jax.numpy as jnp, tensorstore as ts
            >>> ec.tree_serialise_leaves("spec", {"w": jnp.ones(3)})
            >>> spec = ec.open("spec").spec("w")
            >>> ts.open(spec, read=True).result().shape
            (3,)

            ```
        """
        return self._source.spec(_lazy.known_leaf(self[name]).record)

    @_arguments.checked()
    def check_base(
        self, path: "str | os.PathLike[str] | Readable | Checkpoint"
    ) -> "Checkpoint":
        """Checks that a checkpoint is the one that was given as `base=` of this save.

        The digest of its index says so, as the digests of all data are in the index; no
        array is read. So a copy of its files is the base too.

        Files of other formats have no digests. Three things of theirs are compared: the
        metadata; the names, dtypes and shapes of all leaves; and the first 1024 bytes
        of each leaf, or of 512 to 1024 leaves, evenly spread, if there are more. A
        change that is only in other bytes is not noticed.

        **Arguments:**

        - `path`: the path of the base, or an open [`Checkpoint`][]. The path in
            `base.path` is the one that was given to the save, and is never opened
            unless you give it here.

        **Returns:** the base, as an open [`Checkpoint`][].

        **Raises:** `ValueError` if it is another checkpoint, or if this one was saved
        without `base=`; and as [`open`][].

        !!! example

            ```python
            >>> import eqx_ckpt as ec, jax.numpy as jnp
            >>> ec.tree_serialise_leaves("base", {"w": jnp.ones((4, 4))})
            >>> lora = {"a": jnp.ones((4, 1)), "b": jnp.zeros((1, 4))}
            >>> ec.tree_serialise_leaves("lora", lora, base="base")
            >>> ec.open("lora").check_base("base")["w"]
            LazyArray(w: f32[4,4])

            ```
        """
        base = open(path)
        _rooms.check_base(self._source, base._source)
        return base

    def __repr__(self) -> str:
        return self.describe(200)

    def describe(self, limit: int | None = None) -> str:
        """The checkpoint as a tree, in at most `limit` lines (None: all of them)."""
        return _rooms.text(self, limit)

    def _repr_html_(self) -> str:
        return _rooms.html(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: object) -> Any:
        return _rooms.treescope(self, path, subtree_renderer)

    def __copy__(self) -> "Checkpoint":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Checkpoint":
        return self

    def __reduce__(self) -> Any:
        _source.check_pickles(self._source)
        return _unpickle, (self._source.root, self.save_id)


@_arguments.checked(follow_symlinks=_arguments.FLAG)
def open(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    *,
    like: PyTree = None,
    follow_symlinks: bool = False,
) -> Checkpoint:
    """Opens a checkpoint. Reads its index, one small file, and no array.

    It may be one of another format, which is recognised by what is there: a
    `.safetensors` file, or a directory of such files; a file of `torch.save` (`.pt`,
    `pytorch_model.bin`), or several with their index; NumPy's `.npz` and `.npy`; a
    `.eqx` file; a directory of Orbax, levanter or eformer; a file of flax in msgpack.
    These have no digests, so nothing in them can be verified. A checkpoint of ours in a
    `.zip` has digests.

    **Arguments:**

    - `path`: a string or `os.PathLike`, relative or absolute, `~` expanded, or a URL
        (`s3://`, `gs://`, `az://`, `hf://`, `https://`, `memory://`), or a
        [`Store`][]. It may be a symbolic link. The directory of a run stands for its
        newest complete step, and that of a step for the checkpoint in it. You may also
        give a file that is open for reading in binary; it has to stay at its path.
    - `like`: a tree of the structure that was saved, real or a skeleton, for a format
        whose leaves have no names: `.eqx`. Others do not use it.
    - `follow_symlinks`: whether the files in the directory may be symbolic links too,
        as they are in the caches of tools that download. A link can lead to any file,
        so pass True only if you trust whoever made the links.

    **Returns:** a [`Checkpoint`][].

    **Raises:** `FileNotFoundError` if there is none; [`DamagedError`][] if it is
    damaged; `ValueError` if it is written in a newer format than this release reads, or
    its index is a symbolic link. A file that you may not read, a disk that fails or a
    server that does not answer is an `OSError`, such as `PermissionError`.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("memory://open", {"step": 3, "w": jnp.zeros(2)})
        >>> ckpt = ec.open("memory://open")
        >>> ckpt["w"]
        LazyArray(w: f32[2])
        >>> ckpt.tree.step.read()
        3

        ```
    """
    if isinstance(path, Checkpoint):
        if follow_symlinks:
            raise ValueError(
                "`follow_symlinks` must be False for a checkpoint that is open already."
            )
        path._source.check_current()
        return path
    return Checkpoint(_open.open_path(path, like, follow_symlinks))


def check_tree(tree: object) -> None:
    """**Raises:** `TypeError` for an open checkpoint in the place of a tree."""
    if isinstance(tree, Checkpoint):
        raise TypeError("An open checkpoint is no tree. Pass `ckpt.tree`.")


def check_no_path(tree: object) -> None:
    """**Raises:** `TypeError` for a path in the place of a tree."""
    if isinstance(tree, str | os.PathLike):
        raise TypeError(f"{str(tree)!r:.200} is no tree. Pass `ec.open(path).tree`.")


def source_of(ckpt: Checkpoint) -> Source:
    """The source of an open checkpoint: its index, its files and its leaves, which
    rooms ask instead of it."""
    return ckpt._source


def _unpickle(root: Backend, save: str) -> Checkpoint:
    return Checkpoint(_open.reopen(root, save))


def _unknown(name: object, names: Sequence[str]) -> str:
    text = f"The checkpoint has no leaf {name!r}."
    below = [n for n in names if isinstance(name, str) and _names.is_under(n, name)]
    if below:
        return f"{text} That is a node, with {_folding.some(below)}: see `.tree`."
    near = _nearest.NameIndex(names).nearest(str(name), 3)
    head = "The nearest names are" if near else "It has"
    return f"{text} {head} {_folding.some(near or names)}."


def match_leaves(ckpt: Checkpoint, like: PyTree, options: LoadOptions) -> Match:
    """Pairs the leaves of `like` with those of a checkpoint, after its `rename`, and
    below the node that `source` names."""
    leaves, moved = ckpt._source.index.leaves, lambda name: [name]
    if options.rename is not None:
        leaves, moved = _rooms.rename_leaves(leaves, options.rename)
    source = resolve_source(ckpt, options.source, leaves, moved)
    matcher = Matcher(leaves, like, options, source, path=ckpt.path)
    return matcher.match()


# ---- The checkpoint's own tree.


def _what_is_there(names: Sequence[str], missing: str) -> str:
    """A sentence on what the lowest node above a missing one has."""
    above, below = missing, []
    while above and not below:
        above = above.rpartition(".")[0]
        below = [name for name in names if _names.is_under(name, above)]
    where = f"`{_text.bounded(above, 200)}`" if above else "At its top it"
    if above in below:
        return f"{where} is a leaf."
    start = len(above) + 1 if above else 0
    parts = dict.fromkeys(name[start:].partition(".")[0] for name in below)
    return f"{where} has {_folding.some(list(parts))}."


def resolve_source(
    ckpt: Checkpoint,
    source: str | Callable[[Any], Any] | None,
    leaves: Leaves,
    moved: Callable[[str], list[str]],
) -> str:
    """The dotted name of the node that `like` stands for ("": all of the checkpoint),
    as it is in the `leaves` after a rename. `moved` gives the names of a node there.

    **Raises:** `KeyError` if there is none, `TypeError` if it is not a node,
    `ValueError` if a rename takes it to no one node, and any error of the function
    `source`.
    """
    if source is None or source == "":
        return ""
    if isinstance(source, str):
        names = leaves.names
        if any(_names.is_under(name, source) for name in names):
            return source
        after = " after the rename" if leaves.origin else ""
        raise KeyError(
            f"`source` is {source!r}, and the checkpoint at `{ckpt.path}` has no such "
            f"node{after}. {_what_is_there(names, source)}"
        )
    if not callable(source):
        raise TypeError(
            "`source` must be a dotted name or a function of the checkpoint's tree, "
            f"such as `lambda c: c.model`, not a `{type(source).__name__}`."
        )
    try:
        node = source(ckpt.tree)
    except (AttributeError, LookupError) as e:
        e.add_note("`source` fails on the checkpoint.")
        raise
    found = _nodes.stored_place(node)
    is_view = isinstance(node, LazyArray) and not _lazy.is_as_stored(node)
    if found is None or found[0] is not ckpt._source or is_view:
        is_edited = found is None and isinstance(node, _node.Node)
        what = "node that was edited" if is_edited else f"`{type(node).__name__}`"
        what = "view of a leaf" if is_view else what
        raise TypeError(
            "`source` must return one node of the checkpoint's tree, as "
            f"`lambda c: c.model` does, not a {what}."
        )
    name = found[1]
    nodes = moved(name) if name else [""]
    if len(nodes) != 1:
        raise ValueError(
            f"`source` is the node `{name}`, which the rename takes to "
            f"{_folding.some(nodes) or 'no one node'}. Give the name after the rename, "
            "as text."
        )
    return nodes[0]
