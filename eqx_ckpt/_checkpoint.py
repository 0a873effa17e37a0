"""`open` and `Checkpoint`: what is stored, as a tree of lazy leaves."""

import contextlib
import functools as ft
import itertools as it
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TYPE_CHECKING, TypeVar

import jax.tree_util as jtu
from jaxtyping import PyTree

from . import (
    _archive,
    _commit,
    _lazy,
    _leaf,
    _match,
    _names,
    _nearest,
    _node,
    _remote,
    _root,
    _show,
    _store,
    _team,
    formats,
)
from ._archive import Readable
from ._errors import ReplacedError
from ._filters import FilterSpec, IsLeaf
from ._index import Record
from ._lazy import LazyArray
from ._node import Node, Spec
from ._root import Root
from ._source import Source
from ._static import Static


P = ParamSpec("P")
T = TypeVar("T")


# Who checks types as the code runs looks at an item of a mapping of known types, which
# here may be damaged.
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
        return self

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
        index = self._source.index
        place = index.places.get(name)
        if place is None:
            raise KeyError(_unknown(name, index.names))
        return _lazy.lazy_of(self._source, index.record(place))

    def __contains__(self, name: object) -> bool:
        return name in self._source.index.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.index.names)

    def __len__(self) -> int:
        return len(self._source.index.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

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
        static: Static = "error",
        cast: bool = False,
    ) -> PyTree:
        """`like` with lazy leaves: everything is checked, and nothing is read.

        As one `eqx.tree_at` would. The arguments are those of
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
        # `eqx.tree_at` does not find leaves by number: it makes one of every `()`.
        leaves = list(matched.flat.leaves)
        shared: dict[Any, LazyArray] = {}
        for number, record, target in matched.pairs:
            lazy = _lazy.lazy_of(self._source, record, target)
            leaf = leaves[number]
            if _leaf.is_shared(leaf) or isinstance(leaf, _leaf.jax.ShapeDtypeStruct):
                place = index.aliases.get(record.place, record.place)
                lazy = shared.setdefault((id(leaf), place), lazy)
            leaves[number] = lazy
        return jtu.tree_unflatten(matched.flat.structure, leaves)

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
        raise FileNotFoundError(_nothing(root))
    return source


def _nothing(root: Root) -> str:
    """**Raises:** `OSError` for a store that has no such bucket, or is elsewhere."""
    text = f"There is no checkpoint at `{root}`"
    if root.local is None and not _remote.is_read_only(root.url):
        _remote.check_bucket(root.url)
        with contextlib.suppress(PermissionError):  # To list may not be allowed.
            if not _store.list_below(root, "d/"):
                return f"{text}."
    return (
        f"{text}: it has no `{_root.INDEX}`, which is written last. A save may have "
        "been interrupted there."
    )


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


def _some(names: list[str], most: int = 8) -> str:
    shown = ", ".join(f"`{_show.bounded(name, 200)}`" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _unknown(name: Any, names: list[str]) -> str:
    text = f"The checkpoint has no leaf {name!r}."
    below = [n for n in names if isinstance(name, str) and _names.is_under(n, name)]
    if below:
        return f"{text} That is a node, with {_some(below)}: see `.tree`."
    near = _nearest.Names(names).nearest(str(name), 3)
    head = "The nearest names are" if near else "It has"
    return f"{text} {head} {_some(near or names)}."


# ---- The checkpoint's own tree.


# Of sequences with gaps, where functions stood or nothing was stored.
_MAX_GAPS = 2**22


class _Stored:
    """A node that is in the index. What is below it is made as it is asked for.

    `members` are the places of the leaves below it, and the names of the Modules there
    that have static fields. `gaps` is how many more gaps the tree may have: names are
    data from a file.
    """

    def __init__(
        self, source: Source, name: str, members: list[int | str], gaps: list[int]
    ):
        self.source = source
        self.name = name
        self._members = members
        self._gaps = gaps
        self._depth = name.count(".") + 1 if name else 0
        self._made: dict[str, Any] = {}
        self._is_checked = False

    def shown(self) -> tuple[str, str]:
        return self.name, f"`{self.name}`" if self.name else "The checkpoint"

    @ft.cached_property
    def _fields(self) -> str:
        return _node.fields_text(self.source.index.statics, self.name)

    def fields(self) -> str:
        return self._fields

    @ft.cached_property
    def _groups(self) -> dict[str, list[int | str]]:
        """The members below each child, by its component."""
        names = self.source.index.names
        start = len(self.name) + 1 if self.name else 0
        out: dict[str, list[int | str]] = {}
        for member in self._members:
            name = names[member] if isinstance(member, int) else member
            if name == self.name:
                if isinstance(member, int):
                    raise ValueError(f"The index has a leaf and a node at {name!r}.")
                continue
            end = name.find(".", start)
            component = name[start:] if end < 0 else name[start:end]
            out.setdefault(component, []).append(member)
        return out

    def components(self) -> list[str]:
        return list(self._groups)

    def find(self, component: str) -> Any:
        if component not in self._groups and not self.name:
            component = _names.join("", [component])
        if component not in self._made:
            child = self._make(component, self._groups[component])
            self._made.setdefault(component, child)
        return self._made[component]

    def _make(self, component: str, members: list[int | str]) -> Any:
        self._key(component)
        index = self.source.index
        name = f"{self.name}.{component}" if self.name else component
        leaves = [place for place in members if isinstance(place, int)]
        if not leaves or index.names[leaves[0]] != name:
            if self._depth + 1 >= _names.MAX_DEPTH:
                # What walks a tree calls itself, and JAX does not recover from that.
                most = f"at most {_names.MAX_DEPTH} can be stored"
                raise ValueError(f"The index has more nodes in each other: {most}.")
            return Node(_Stored(self.source, name, members, self._gaps))
        if len(leaves) > 1:
            raise ValueError(f"The index has a leaf and a node at {name!r}.")
        return _lazy.lazy_of(self.source, index.record(leaves[0]))

    def _kinds(self, members: list[int | str]) -> set[str]:
        """Of the keys at which these lie below the node."""
        index = self.source.index
        number = index.template
        out: set[str] = set()
        for i in {number[place] for place in members if isinstance(place, int)}:
            keys = index.templates[i].keys
            if not isinstance(keys, str):
                raise ValueError("The index has a malformed template.")
            out.add(keys[self._depth : self._depth + 1])
        return out

    def _key(self, component: str) -> tuple[str, str | int]:
        kinds = self._kinds(self._groups[component])
        if len(kinds) > 1:
            name = f"{self.name}.{component}"
            raise ValueError(f"The index has keys of two kinds at {name!r}.")
        if not kinds:
            return self._likely_key(component)
        kind = kinds.pop()
        return kind, _names.key_of(kind, component, self._depth == 0)

    def _likely_key(self, component: str) -> tuple[str, str | int]:
        """Of a Module without leaves, whose keys the index does not have: a key as
        those beside it, if it can be one."""
        for kind in [*(kind for kind in "sfiak" if kind in self._all_kinds), *"soa"]:
            with contextlib.suppress(ValueError):
                return kind, _names.key_of(kind, component, self._depth == 0)
        raise ValueError("The index has static fields of what is never saved.")

    @ft.cached_property
    def _all_kinds(self) -> set[str]:
        return self._kinds(self._members)

    @ft.cached_property
    def _rows(self) -> list[tuple[tuple[str, str | int], str]]:
        """The key and the component of each child, in their order."""
        rows = [(self._key(component), component) for component in self._groups]
        if all(kind in "sf" for (kind, _), _ in rows):
            rows.sort(key=lambda row: row[0][1])
            if rows:
                self._gaps[0] -= int(rows[-1][0][1]) + 1 - len(rows)
        if self._gaps[0] < 0:
            raise ValueError("The index has sequences that are mostly gaps.")
        return rows

    @ft.cached_property
    def _spec(self) -> Spec:
        keys = tuple(key for key, _ in self._rows)
        return Spec(keys, self._fields, self._labels)

    @property
    def _labels(self) -> tuple[str | None, ...]:
        """Those of the entries, if the node is an eqx.nn.State: all differ then."""
        markers = self.source.index.markers
        if not markers or any(kind not in "sf" for (kind, _), _ in self._rows):
            return ()
        labels = []
        for _, component in self._rows:
            members = self._groups[component]
            of = {markers.get(x) if isinstance(x, int) else None for x in members}
            labels.append(of.pop() if len(of) == 1 else None)
        return () if None in labels or len({*labels}) < len(labels) else tuple(labels)

    def spec(self) -> Spec:
        return self._spec

    def children(self) -> list[Any]:
        return [self.find(component) for _, component in self._rows]

    def check(self) -> None:
        if self._is_checked:
            return
        bodies: list[_Stored] = [self]
        for body in bodies:
            nodes = [x for x in body.children() if isinstance(x, Node)]
            bodies += [x for x in map(_node.body_of, nodes) if isinstance(x, _Stored)]
        for body in bodies:
            body._is_checked = True

    def rows(self) -> Iterator[tuple[str, str]]:
        index = self.source.index
        cut = len(self.name) + 1 if self.name else 0
        for member in self._members:
            if isinstance(member, int):
                yield index.names[member][cut:], _row(index.record(member))
            else:
                fields = _node.fields_text(index.statics, member)
                yield from _node.field_rows(fields, member[cut:])

    def reduce(self) -> tuple[Any, ...]:
        return _reopen_node, (self.source.root, self.source.index.save, self.name)


def _node_at(source: Source, name: str) -> Node:
    index = source.index
    members: list[int | str] = [
        place for place, x in enumerate(index.names) if _names.is_under(x, name)
    ]
    for module in index.statics.of:
        if len(module) > _names.MAX_NAME or module.count(".") >= _names.MAX_DEPTH:
            raise ValueError("The index has static fields of what is never saved.")
        if _names.is_under(module, name):
            members.append(module)
    return Node(_Stored(source, name, members, [_MAX_GAPS]))


def _reopen_node(root: Root, save: str, name: str) -> Node:
    return _node_at(reopen(root, save), name)


def _forest(source: Source) -> Any:
    index = source.index
    if index.names == [_names.ROOT]:
        return _lazy.lazy_of(source, index.record(0))
    return _node_at(source, "")


def origin(x: Any) -> tuple[Source, str] | None:
    """Where a node or a lazy leaf of a checkpoint's own tree is: its name there, ""
    for all of it. None for any other value, and for nodes that have been edited."""
    if isinstance(x, Node):
        body = _node.body_of(x)
        return (body.source, body.name) if isinstance(body, _Stored) else None
    if isinstance(x, LazyArray):
        return x._source, "" if x.name == _names.ROOT else x.name
    return None


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
    found = origin(node)
    is_view = isinstance(node, LazyArray) and node._view is not None
    if found is not None and found[0] is ckpt._source and not is_view:
        return found[1]
    raise TypeError(
        "`source` must return one node of the checkpoint's tree, as "
        f"`lambda c: c.model` does, not a `{type(node).__name__}`."
    )


def _top(names: list[str]) -> str:
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"At its top it has {_some(tops)}."
