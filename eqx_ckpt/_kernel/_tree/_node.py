"""`Node`: a node of a tree that was saved, without its class."""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jaxtyping import PyTree

from .. import _rooms
from .._format import _names, _text, _values
from .._format._names import NodeKey
from . import _folding


@dataclasses.dataclass(frozen=True)
class Spec:
    """All of a node but its children: what `jax.tree_util` compares."""

    # One for each child.
    keys: tuple[NodeKey, ...]
    # The static values of a node, encoded, as JSON: `Leaves.fields_text`.
    fields: str
    # The label of each entry of an eqx.nn.State, as `label_text` gives it. Else none.
    labels: tuple[str, ...]
    # The attribute that each child without a key is. Else none.
    attributes: tuple[str | None, ...] = ()
    # Of a sequence, how many children it had, where the last ones are not stored.
    length: int = 0
    # The parts of the node that lead to each StateIndex, which has no leaves, and the
    # label of the entry of a State that it leads to.
    indices: tuple[tuple[str, str], ...] = ()

    @ft.cached_property
    def is_sequence(self) -> bool:
        return bool(self.keys) and all(kind in "sf" for kind, _ in self.keys)

    @ft.cached_property
    def size(self) -> int:
        """The number of children, with those of a sequence that are not stored."""
        if not self.is_sequence:
            return len(self.keys)
        return max(self.length, 1 + int(self.keys[-1].key))


class Body:
    """The content of a node. Its children are any trees, in memory: what JAX makes of a
    node. A subclass finds them in an index."""

    name: str = ""

    def __init__(self, spec: Spec, children: list[Any]):
        self._given = spec, children
        self._places = dict(zip(components(spec), range(len(children))))

    def called(self) -> str:
        """The node, as messages call it."""
        return "The node"

    @ft.cached_property
    def spec(self) -> Spec:
        return self._given[0]

    @ft.cached_property
    def children(self) -> list[Any]:
        return self._given[1]

    @ft.cached_property
    def fields(self) -> str:
        """The static values: those of the `spec`, which asks for more."""
        return self.spec.fields

    def components(self) -> list[str]:
        return list(self._places)

    def child_at(self, component: str) -> Any:
        """The child of that component. **Raises:** `KeyError` if there is none."""
        return self.children[self._places[component]]

    def check_below(self) -> None:
        """**Raises:** `ValueError` if what is below the node, at any depth, cannot be.

        JAX loses a level of Python's recursion for good with each node that it is in
        when one raises: so the first that it comes to looks at all below it.
        """

    def reduce(self) -> tuple[Any, ...]:
        """The result of `Node.__reduce__`."""
        return _unflatten, self._given


# Names that everybody asks for: Python, JAX, and notebooks, which call what they find.
_ASKED = "__", "_repr_", "_ipython_"


class Node:
    """A node of a checkpoint's own tree: attributes, keys and indices as they were.

    It needs no class code. Static fields of a Module are attributes too. It is a pytree
    and stays a node in `jax.tree.map`, `eqx.tree_at`, `eqx.filter` and
    `eqx.partition`, which put any leaves into it; only [`materialise`][] makes plain
    dicts and lists of it. What is saved of a node has the names, static fields, labels
    of States and attributes of children without keys that it has.

    Whatever was stored, `keys` for instance, is an attribute before the node's own
    methods are; names with two underscores in front, and `_repr_…` and `_ipython_…`,
    are reached by `[...]` only.
    """

    __slots__ = ("_body",)

    def __init__(self, body: Body):
        object.__setattr__(self, "_body", body)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a node is immutable: `eqx.tree_at(lambda t: t.{name}, node, value)` "
            "makes another one"
        )

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith(_ASKED):
            body = body_of(self)
            try:
                return body.child_at(_names.quote(name))
            except KeyError:
                fields = static_fields(self)
                if name in fields:
                    return fields[name]
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(_ASKED):
            raise AttributeError(_missing(self, f"`{_text.escape(name)}`"))
        if _names.quote(name) in body_of(self).components():
            raise AttributeError(f"`{name}` is reached by `[{name!r}]`.")
        raise AttributeError(name)

    def __getitem__(self, key: object) -> Any:
        body = body_of(self)
        if isinstance(key, slice):
            if not body.spec.is_sequence:
                raise TypeError(_missing(self, "sequence to slice"))
            names, known = map(str, range(len(self))[key]), {*body.components()}
            return [body.child_at(name) if name in known else None for name in names]
        if type(key) is int and key < 0 and body.spec.is_sequence:
            key += len(self)
        try:
            return _child_of(body, key)
        except KeyError:
            text = _missing(self, f"{key!r}")
            if isinstance(key, str) and key in static_fields(self):
                text += f" The static field is an attribute: `.{key}`."
            raise KeyError(text) from None

    def keys(self) -> list[Any]:
        return [key for _, key in body_of(self).spec.keys]

    def __iter__(self) -> Iterator[Any]:
        body = body_of(self)
        if not body.spec.is_sequence:
            return iter([key for _, key in body.spec.keys])
        places = [int(key) for _, key in body.spec.keys]
        return iter(_listed(dict(zip(places, body.children)), len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __contains__(self, key: object) -> bool:
        try:
            _child_of(body_of(self), key)
        except (KeyError, ValueError):
            return False
        return True

    def __len__(self) -> int:
        return body_of(self).spec.size

    def __dir__(self) -> list[str]:
        keys = [str(key) for _, key in body_of(self).spec.keys]
        return [x for x in (*keys, *static_fields(self)) if x.isidentifier()]

    def __repr__(self) -> str:
        return _rooms.text(self, 200)

    def _repr_html_(self) -> str:
        return _rooms.html(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: object) -> Any:
        return _rooms.treescope(self, path, subtree_renderer)

    def __copy__(self) -> "Node":
        return self

    def __reduce__(self) -> Any:
        return body_of(self).reduce()


# The slot itself: `node._body` would give a stored child of that name.
_slot: Any = vars(Node)["_body"]


def body_of(node: Node) -> Body:
    return _slot.__get__(node)


def static_fields(node: Node) -> dict[str, Any]:
    """The static fields that JSON holds. They are the caller's, who may change them."""
    return _values.plain_fields(body_of(node).fields)


def _missing(node: Node, what: str) -> str:
    body = body_of(node)
    some = _folding.some(body.components()) or "nothing"
    return f"{_text.bounded(body.called(), 200)} has no {what}. It has {some}."


def _child_of(body: Body, key: object) -> Any:
    """**Raises:** `KeyError` if there is no such child, `ValueError` for no key."""
    names = [_names.key_component(key).text]
    if isinstance(key, str) and key.startswith("%="):
        names.append(key)  # As `keys` has those that are neither strings nor integers.
    # A node may have given JAX the key itself, in none of JAX's classes of keys.
    names.append(_names.component(key).text)
    for name in names:
        with contextlib.suppress(KeyError):
            return body.child_at(name)
    raise KeyError(key)


# ---- Nodes as JAX has them.


def components(spec: Spec) -> list[str]:
    """The parts of names that lead to the children."""
    rows = [(kind, str(key)) for kind, key in spec.keys]
    return [key if kind in "osfi" else _names.quote(key) for kind, key in rows]


class _Odd(NamedTuple):
    """Stands for a key that is neither a string nor an integer: it has its `repr`."""

    text: str

    def __repr__(self) -> str:
        return _names.unquote(self.text.removeprefix("%="))


def _key(kind: str, key: Any) -> Any:
    """The entry of a key path that leads to the child of this key."""
    if kind == "a":
        return jtu.GetAttrKey(key)
    if kind == "s":
        return jtu.SequenceKey(key)
    if kind == "f":
        return jtu.FlattenedIndexKey(key)
    return jtu.DictKey(_Odd(key) if kind == "o" else key)


def _flatten_with_keys(node: Node) -> tuple[list[tuple[Any, Any]], Spec]:
    body = body_of(node)
    body.check_below()
    spec = body.spec
    keys = [_key(kind, key) for kind, key in spec.keys]
    return list(zip(keys, body.children)), spec


def _flatten(node: Node) -> tuple[list[Any], Spec]:
    body_of(node).check_below()
    return body_of(node).children, body_of(node).spec


def _unflatten(spec: Spec, children: Any) -> Node:
    return Node(Body(spec, list(children)))


jtu.register_pytree_with_keys(Node, _flatten_with_keys, _unflatten, _flatten)


# ---- Plain containers.


def plain(tree: PyTree) -> PyTree:
    """A tree with dicts and lists in the place of nodes."""
    is_node = lambda x: isinstance(x, Node)
    return jtu.tree_map(
        lambda x: _plain(x) if isinstance(x, Node) else x, tree, is_leaf=is_node
    )


def _plain(top: Node) -> Any:
    # Trees may be deep: nodes are listed, parents first, and not walked by recursion.
    nodes = [top]
    for node in nodes:
        nodes += [x for x in body_of(node).children if isinstance(x, Node)]
    made: dict[int, Any] = {}
    for node in reversed(nodes):
        spec = body_of(node).spec
        rows: dict[Any, Any] = {}
        _names.check_hashes([key for _, key in spec.keys])
        for (_, key), child in zip(spec.keys, body_of(node).children):
            if not isinstance(child, Node):
                rows[key] = child if jtu.all_leaves([child]) else plain(child)
            elif id(child) in made:
                rows[key] = made[id(child)]
        # Modules of static fields alone leave nothing.
        if rows or node is top:
            made[id(node)] = _listed(rows, spec.size) if spec.is_sequence else rows
    return made[id(top)]


def _listed(rows: dict[Any, Any], size: int) -> list[Any]:
    # What was not stored, as a function in a tuple, leaves a gap: all else keeps its
    # place.
    out: list[Any] = [None] * size
    for key, child in rows.items():
        out[key] = child
    return out
