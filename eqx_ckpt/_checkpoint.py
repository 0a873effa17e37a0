"""`open` and `Checkpoint`: what is stored, as a tree of lazy leaves."""

import difflib
import functools as ft
import itertools as it
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from . import (
    _archive,
    _commit,
    _lazy,
    _leaf,
    _match,
    _names,
    _root,
    _show,
    _team,
    formats,
)
from ._archive import Readable
from ._errors import ReplacedError
from ._filters import FilterSpec, IsLeaf
from ._index import Record
from ._lazy import LazyArray
from ._root import Root
from ._source import Source


P = ParamSpec("P")
T = TypeVar("T")


class Checkpoint:
    """A checkpoint that has been opened: its index, and lazily its leaves.

    Made by [`open`][]. It is immutable, may be used from several threads, and pickles
    as its path and save id. It is pinned to the save that was opened: once that has
    been replaced or deleted, reading raises.

    **Attributes:**

    - `path`: the absolute path or URL.
    - `metadata`: what was saved as `metadata=`.
    - `leaves`: a mapping from dotted names to [`LazyArray`][]s, in the tree's order.
    - `nbytes`: the bytes of all leaves; arrays that are shared count once.
    - `tree`: the checkpoint's own tree; its nodes have the attributes, keys and indices
        of the tree that was saved, without the classes. `ckpt.tree.model.layers[0]`.
    - `save_id`, `layout`, `writer`: the id of the save, how it lies on disk (for
        other formats their name), and the versions of the packages that wrote it.
    """

    __slots__ = ("_source", "_tree")

    def __init__(self, source: Source):
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_tree", None)

    def __setattr__(self, name: str, value: Any) -> None:
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
    def leaves(self) -> Mapping[str, LazyArray]:
        return _Leaves(self._source)

    @property
    def nbytes(self) -> int:
        index = self._source.index
        return sum(
            index.record(place).template.nbytes
            for place in range(len(index.names))
            if place not in index.aliases
        )

    @property
    def tree(self) -> Any:
        if self._tree is None:
            object.__setattr__(self, "_tree", _forest(self._source))
        return self._tree

    def __getitem__(self, name: str) -> LazyArray:
        """The leaf of a dotted name. **Raises:** `KeyError` naming the nearest."""
        return _Leaves(self._source)[name]

    def __contains__(self, name: str) -> bool:
        return name in self._source.index.places

    def __len__(self) -> int:
        return len(self._source.index.names)

    def splice(
        self,
        like: PyTree,
        filter_spec: FilterSpec = _leaf.is_storable,
        is_leaf: IsLeaf = None,
        *,
        where: Callable[[PyTree], Any] | None = None,
        source: str | Callable[[Any], Any] | None = None,
        missing: str = "error",
        unexpected: str = "error",
        static: str = "error",
        cast: bool = False,
    ) -> PyTree:
        """`like` with lazy leaves: everything is checked, and nothing is read.

        One `eqx.tree_at`. The arguments are those of [`tree_deserialise_leaves`][], and
        [`materialise`][] then reads what is left in the tree.

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
        index = self._source.index
        matched = _match.match(
            f"checkpoint at `{self.path}`",
            index,
            like,
            filter_spec,
            is_leaf,
            where=where,
            source=resolve_source(self, source),
            missing=missing,
            unexpected=unexpected,
            static=static,
            cast=cast,
        )
        if not matched.pairs:
            return like
        lazies: list[LazyArray] = []
        shared: dict[Any, LazyArray] = {}
        for number, record, target in matched.pairs:
            lazy = _lazy.lazy_of(self._source, record, target)
            leaf = matched.flat.leaves[number]
            if _leaf.is_shared(leaf) or isinstance(leaf, _leaf.jax.ShapeDtypeStruct):
                place = index.aliases.get(record.place, record.place)
                lazy = shared.setdefault((id(leaf), place), lazy)
            lazies.append(lazy)
        numbers = [pair.number for pair in matched.pairs]

        def leaves(tree: PyTree) -> list[Any]:
            found = jtu.tree_leaves(tree, is_leaf=is_leaf)
            return [found[number] for number in numbers]

        return eqx.tree_at(leaves, like, lazies, is_leaf=is_leaf)

    def __repr__(self) -> str:
        return self.describe(200)

    def describe(self, limit: int | None = None) -> str:
        """The checkpoint as a tree, in at most `limit` lines (None: all of them)."""
        index = self._source.index
        rows = ((r.name, _row(r)) for r in index.records())
        count = len(index.names)
        head = (
            f"Checkpoint({_show.escape(self.path)}: {count} "
            f"{'leaf' if count == 1 else 'leaves'}, {_show.size(self.nbytes)})"
        )
        lines = _show.tree_lines(rows, limit)
        return "\n".join([head, *("  " + line for line in lines)])

    def __copy__(self) -> "Checkpoint":
        return self

    def __deepcopy__(self, memo: Any) -> "Checkpoint":
        return self

    def __reduce__(self) -> Any:
        self._source.check_pickles()
        return _unpickle, (self._source.root, self.save_id)


def _row(record: Record) -> str:
    return f"{_leaf.show(record.template)}  {_show.size(record.template.nbytes)}"


def open(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    *,
    like: PyTree = None,
    follow_symlinks: bool = False,
) -> Checkpoint:
    """Opens a checkpoint. Reads its index, one small file, and no array.

    It may be one of another format, which is recognised by what is there: a
    `.safetensors` file, or a directory of such files with their index; a `.eqx` file; a
    directory of Orbax, levanter or eformer; a file of flax in msgpack. These have no
    digests, so that nothing of them can be verified. A checkpoint of ours in a `.zip`
    has.

    **Arguments:**

    - `path`: a string or `os.PathLike`, relative or absolute, `~` expanded, or a URL
        (`s3://`, `gs://`, `https://`, `file://`, `memory://`), or a [`Store`][]. It
        may be a symbolic link. Or a file that is open for reading in binary, which has
        to stay at its path.
    - `like`: a tree of the structure that was saved, real or a skeleton, for a format
        whose leaves have no names: `.eqx`. Others do not use it.
    - `follow_symlinks`: whether the files in the directory may be symbolic links too,
        as they are in the caches of tools that download. A link can lead to any file,
        so only where you trust who made them.

    **Returns:** a [`Checkpoint`][].

    **Raises:** `FileNotFoundError` if there is none; [`DamagedError`][] if it is
    damaged; `ValueError` if it is written in a newer format than this release reads, or
    its index is a symbolic link. A file that may not be read, a disk that fails or a
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
        path._source.check_current()
        return path
    if _archive.is_file(path):
        root = _archive.root_of(path)
        try:
            source = _open(root, like)
        except FileNotFoundError:
            _archive.forget(root)
            raise ValueError(
                "The open file is no checkpoint of a format that is read."
            ) from None
        except BaseException:
            _archive.forget(root)
            raise
        weakref.finalize(source, _archive.forget, root).atexit = False
        return Checkpoint(source)
    return Checkpoint(_open(_root.resolve(path, follow_symlinks), like))


def _open(root: Root, like: PyTree = None) -> Source:
    local = root.local
    if local is not None and not local.is_dir():
        source = formats.find(root, like)
        if source is None and local.exists():
            raise FileNotFoundError(
                f"`{root}` is a file, and not a checkpoint of a format that is read."
            )
        if source is None:
            raise FileNotFoundError(f"There is no checkpoint at `{root}`.")
        return source
    if local is not None and _commit.is_beside(local):
        raise FileNotFoundError(
            f"There is no checkpoint at `{root}`: it is what a save that was "
            "interrupted has left, or one that is being written."
        )
    got = _commit.read_index(root)
    if got is not None:
        return Source(root, got[0])
    source = formats.find(root, like)
    if source is None:
        raise FileNotFoundError(
            f"There is no checkpoint at `{root}`: it has no `{_root.INDEX}`, which is "
            "written last. A save may have been interrupted there."
        )
    return source


# How often a call is made again at least, and for how many seconds.
_TRIES, _SECONDS = 3, 30


def again(place: int, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Of a call that is given a path, as argument number `place` or as `name`: it is
    made again if that is replaced while it is read. An open checkpoint stays as it is.

    The call raises `ReplacedError` if that happens each time.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @ft.wraps(call)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            path = args[place] if len(args) > place else kwargs.get(name)
            # Of many processes none can try again alone.
            if not isinstance(path, (str, os.PathLike)) or _team.size() > 1:
                return call(*args, **kwargs)
            end = time.monotonic() + _SECONDS
            for count in it.count(1):
                try:
                    return call(*args, **kwargs)
                except ReplacedError as e:
                    if count >= _TRIES and time.monotonic() > end:
                        raise ReplacedError(
                            f"The checkpoint at `{_show.escape(os.fspath(path))}` was "
                            f"replaced {count} times while it was read. Read it when "
                            "nothing is saved there, or save less often."
                        ) from e
            raise AssertionError

        return wrapped

    return decorate


def reopen(root: Root, save: str) -> Source:
    """**Raises:** `ReplacedError` if the path no longer holds this save."""
    _root.check_fork()
    source = _open(root)
    if source.index.save != save:
        raise ReplacedError(
            f"The checkpoint at `{root}` was replaced after it was pickled. Open it "
            "again."
        )
    return source


def _unpickle(root: Root, save: str) -> Checkpoint:
    return Checkpoint(reopen(root, save))


class _Leaves(Mapping[str, LazyArray]):
    """Dotted names to lazy leaves, made when they are asked for."""

    def __init__(self, source: Source):
        self._source = source

    def __getitem__(self, name: str) -> LazyArray:
        index = self._source.index
        place = index.places.get(name)
        if place is None:
            raise KeyError(_unknown(name, index.names))
        return _lazy.lazy_of(self._source, index.record(place))

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.index.names)

    def __len__(self) -> int:
        return len(self._source.index.names)

    def __repr__(self) -> str:
        return f"<{len(self)} leaves: {_some(self._source.index.names)}>"


def _some(names: list[str], most: int = 8) -> str:
    shown = ", ".join(f"`{_show.escape(name)}`" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _unknown(name: Any, names: list[str]) -> str:
    text = f"The checkpoint has no leaf {name!r}."
    below = [n for n in names if isinstance(name, str) and _names.is_under(n, name)]
    if below:
        return f"{text} That is a node, with {_some(below)}: see `.tree`."
    near = difflib.get_close_matches(str(name), names[:5000], 3, 0.5)
    head = "The nearest names are" if near else "It has"
    return f"{text} {head} {_some(near or names)}."


# ---- The checkpoint's own tree.


class Node:
    """A node of a checkpoint's own tree: attributes, keys and indices as they were.

    It needs no class code. It is a pytree of lazy leaves, and comes out of `tree_map`
    and [`materialise`][] as plain dicts and lists.
    """

    __slots__ = ("_source", "_name", "_children")

    def __init__(self, source: Source, name: str, children: dict[str, Any]):
        # Component -> (kind of its key, key, place of the leaf or children).
        self._source = source
        self._name = name
        self._children = children

    def _get(self, component: str) -> Any:
        if self._name == "" and component not in self._children:
            component = _names.join("", [component])
        _, _, below = self._children[component]
        if isinstance(below, int):
            return _lazy.lazy_of(self._source, self._source.index.record(below))
        name = f"{self._name}.{component}" if self._name else component
        return Node(self._source, name, below)

    def _missing(self, what: str) -> str:
        place = f"`{_show.escape(self._name)}`" if self._name else "The checkpoint"
        return f"{place} has no {what}. It has {_some(list(self._children))}."

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        component = _names.quote(name)
        try:
            return self._get(component)
        except KeyError:
            raise AttributeError(self._missing(f"`{name}`")) from None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            if not self._is_sequence():
                raise TypeError(self._missing("sequence to slice"))
            return list(self)[key]
        if isinstance(key, str):
            component = _names.quote(key)
        elif type(key) is int:
            if key < 0 and self._is_sequence():
                key += len(self)
            component = str(key)
        else:
            component = _names.component(jtu.DictKey(key))[1]
        try:
            return self._get(component)
        except KeyError:
            raise KeyError(self._missing(f"{key!r}")) from None

    def _is_sequence(self) -> bool:
        kinds = [kind for kind, _, _ in self._children.values()]
        return bool(kinds) and all(kind in "sf" for kind in kinds)

    def _keys(self) -> list[Any]:
        return [key for _, key, _ in self._children.values()]

    def keys(self) -> list[Any]:
        return self._keys()

    def __iter__(self) -> Iterator[Any]:
        if not self._is_sequence():
            return iter(self._keys())
        # Where nothing was stored, as a function, is None: every other keeps its place.
        there = {key: child for child, (_, key, _) in self._children.items()}
        numbers = range(len(self))
        return (self._get(there[n]) if n in there else None for n in numbers)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __contains__(self, key: Any) -> bool:
        return key in self._keys()

    def __len__(self) -> int:
        if self._is_sequence():
            return 1 + max(self._keys())
        return len(self._children)

    def __dir__(self) -> list[str]:
        return [str(key) for key in self._keys() if str(key).isidentifier()]

    def __repr__(self) -> str:
        index = self._source.index
        cut = len(self._name) + 1 if self._name else 0
        rows = []
        for place in _places(self._children):
            record = index.record(place)
            rows.append((record.name[cut:], _row(record)))
        head = f"Node({_show.escape(self._name) or '.'})"
        return "\n".join([head, *("  " + x for x in _show.tree_lines(rows, 200))])


def _places(children: dict[str, Any]) -> Iterator[int]:
    for _, _, below in children.values():
        if isinstance(below, int):
            yield below
        else:
            yield from _places(below)


def _flatten_node(node: Node) -> tuple[list[Any], Any]:
    children = [(jtu.DictKey(c), node._get(c)) for c in node._children]
    return children, (node._is_sequence(), tuple(node._keys()))


def _plain(aux: tuple[bool, tuple], children: Any) -> Any:
    is_sequence, keys = aux
    if not is_sequence:
        return dict(zip(keys, children))
    # What was not stored, as a function in a tuple, leaves a gap.
    out: list[Any] = [None] * (1 + max(keys))
    for key, child in zip(keys, children):
        out[key] = child
    return out


jtu.register_pytree_with_keys(Node, _flatten_node, _plain)


# Of sequences with gaps, where functions stood or nothing was stored.
_MAX_GAPS = 2**22


def _forest(source: Source) -> Any:
    index = source.index
    top: dict[str, Any] = {}
    gaps = 0
    for place, name in enumerate(index.names):
        template = index.record(place).template
        keys = _names.keys_of(name, template.keys)
        if not keys:
            return _lazy.lazy_of(source, index.record(place))
        node = top
        components = name.split(".")
        for component, (kind, key) in zip(components[:-1], keys[:-1]):
            entry = node.get(component)
            if entry is None:
                gaps += _gap(node, kind, key)
                entry = node[component] = (kind, key, {})
            if entry[0] != kind or isinstance(entry[2], int):
                raise ValueError(f"The index has a leaf and a node at {name!r}.")
            node = entry[2]
        if components[-1] in node:
            raise ValueError(f"The index has a leaf and a node at {name!r}.")
        gaps += _gap(node, *keys[-1])
        node[components[-1]] = (*keys[-1], place)
        if gaps > _MAX_GAPS:
            raise ValueError("The index has sequences that are mostly gaps.")
    return Node(source, "", top)


def _gap(node: dict[str, Any], kind: str, key: str | int) -> int:
    """By how many places a new child of a sequence comes after the last one."""
    if kind not in "sf":
        return 0
    last = next(reversed(node.values()), (kind, -1, None))[1] if node else -1
    return max(0, int(key) - int(last) - 1) if isinstance(last, int) else int(key)


def resolve_source(ckpt: Checkpoint, source: str | Callable[[Any], Any] | None) -> str:
    """The dotted name of the node that `like` stands for ("": all of the checkpoint).

    **Raises:** `KeyError` if there is none, `TypeError` if it is not a node.
    """
    if source is None or source == "":
        return ""
    if isinstance(source, str):
        names = ckpt._source.index.names
        if source in ckpt or any(_names.is_under(name, source) for name in names):
            return source
        raise KeyError(
            f"`source` is {source!r}, and the checkpoint at `{ckpt.path}` has no such "
            f"node. {_top(names)}"
        )
    if not callable(source):
        raise TypeError(
            "`source` must be a dotted name or a function of the checkpoint's tree, "
            f"such as `lambda c: c.model`, not a `{type(source).__name__}`."
        )
    node = source(ckpt.tree)
    if isinstance(node, Node):
        return node._name
    if isinstance(node, LazyArray) and node._view is None:
        return "" if node.name == _names.ROOT else node.name
    raise TypeError(
        "`source` must return one node of the checkpoint's tree, as "
        f"`lambda c: c.model` does, not a `{type(node).__name__}`."
    )


def _top(names: list[str]) -> str:
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"At its top it has {_some(tops)}."
