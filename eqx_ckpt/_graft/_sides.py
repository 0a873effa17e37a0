"""The two sides of a graft, by name and by node: the model, and the checkpoint."""

import functools as ft
import keyword
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._kernel._format import _names
from .._kernel._format._record import TreeRecord
from .._kernel._load import _checkpoint, _lazy, _match, _nodes
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._tree import _filters, _flatten, _nearest, _select, _states
from .._kernel._tree._node import Node as SavedNode
from .._kernel._tree._target import Target
from ..adapters import Adapter
from . import _leaf_kinds, _nested
from ._leaf_kinds import LeafKind
from ._nested import Nested


# The keys of which `keystr` makes what Python takes.
_KEYS = jtu.GetAttrKey, jtu.SequenceKey, jtu.DictKey


class SideNode(NamedTuple):
    """A node of either side: its name, and its leaves by their names below it. The
    leaves are numbers in the model, and lazy in the checkpoint. `adapters` has the
    adapters that a rename gives to leaves of these names."""

    name: str
    leaves: dict[str, Any]
    adapters: Mapping[str, tuple[Adapter, ...]] = types.MappingProxyType({})


class Model:
    """The tree to be grafted into, by number, by name and by node."""

    def __init__(self, tree: PyTree):
        self.tree = tree
        self.flat = _flatten.flatten(tree, None)
        self.names = self.flat.names()
        self.storable = [_filters.by_default(x) for x in self.flat.leaves]
        self.below = _names.by_prefix(self.names)
        self.tagged = _select.Tagged(self.flat, self.storable, None)
        # The entries of States that leaves are of.
        self.entries = _states.state_entries(self.flat)

    @ft.cached_property
    def record(self) -> TreeRecord:
        return self.flat.record(self.storable)

    def target(self, number: int) -> Target:
        return _match.target_of(self.names[number], self.flat.leaves[number])

    def kind(self, number: int) -> LeafKind:
        return _leaf_kinds.kind(self.target(number))

    def is_array(self, number: int) -> bool:
        leaf = self.flat.leaves[number]
        arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
        is_array = isinstance(leaf, arrays) or _filters.is_other_data(leaf)
        return self.storable[number] and is_array

    def nodes(self, where: Any, called: str) -> Nested:
        """The nodes that a `where` picks, in the lists that it gives."""
        try:
            paths = self.tagged.pick(where, called).nested
        except (AttributeError, LookupError) as e:
            raise ValueError(f"`{called}` fails on the model: {said(e)}") from e
        return _nested.mapped(lambda x: self.node(_flatten.node_name(x, "")), paths)

    def node(self, name: str) -> SideNode:
        numbers = [n for n in self.below.get(name, []) if self.storable[n]]
        found = self.flat.by_name(numbers).items()
        return SideNode(name, {_names.below(leaf, name): n for leaf, n in found})

    def code(self, name: str) -> str | None:
        """`m.layers[0]`, or None where no expression leads to the node."""
        path = self.flat.paths[self.below[name][0]]
        path = path[: name.count(".") + 1 if name else 0]
        is_code = all(isinstance(key, _KEYS) for key in path)
        return f"m{jtu.keystr(path)}" if is_code else None

    def entry_code(self, name: str) -> str | None:
        """`m.state.get(m.norm.ema_state_index)`, of an entry of a State."""
        entry = self.entries.get(self.below[name][0])
        if entry is None or name != _names.joined(entry.state, str(entry.position)):
            return None
        for index in sorted(entry.label.names)[:1]:
            module, _, field = index.rpartition(".")
            state = self.code(entry.state)
            owner = self.code(module) if module in self.below else None
            return f"{state}.get({owner}.{field})" if state and owner else None
        return None


def leaf_index_of(lazy: LazyArray) -> int:
    """The index of a leaf in the checkpoint."""
    return _lazy.known_leaf(lazy).leaf_index


class StoredSide:
    """An open checkpoint, by name and by node."""

    def __init__(self, ckpt: Checkpoint):
        self.ckpt = ckpt
        self.source = _checkpoint.source_of(ckpt)
        self.saved = self.source.index.leaves
        self.below = _names.by_prefix(self.saved.names)

    def nodes(self, where: object, called: str) -> Nested:
        """The nodes that a pair says, in the lists that it gives."""
        if isinstance(where, str):
            if where not in self.below:
                near = _nearest.NameIndex(self.below).nearest(where, 3)
                names = ", ".join(f"`{x}`" for x in near or self.saved.names[:3])
                raise ValueError(
                    f"`{called}` is {where!r}, which the checkpoint at "
                    f"`{self.ckpt.path}` does not have. The nearest there: {names}."
                )
            return self.node(where)
        if isinstance(where, (list, tuple)) and where:
            return [self.nodes(x, called) for x in where]
        if not callable(where):
            raise TypeError(
                f"`{called}` must be a dotted name or a function of the checkpoint's "
                f"tree, such as `lambda c: c.model`, not a `{type(where).__name__}`."
            )
        try:
            picked = where(self.ckpt.tree)
        except (AttributeError, LookupError, TypeError) as e:
            raise ValueError(f"`{called}` fails on the checkpoint: {said(e)}") from e
        nodes = self.collect(picked, called)
        if not _nested.flat(nodes):
            raise ValueError(f"`{called}` selects nothing of the checkpoint.")
        return nodes

    def collect(self, picked: object, called: str) -> Nested:
        if isinstance(picked, (SavedNode, LazyArray)):
            found = _nodes.stored_place(picked)
            if found is None:
                raise ValueError(
                    f"`{called}` returned a node that was edited: save it, and open "
                    "what was saved."
                )
            source, name = found
            if source is not self.source:
                raise ValueError(
                    f"`{called}` returned a node of another checkpoint, that at "
                    f"`{source.root}`."
                )
            if isinstance(picked, SavedNode):
                return self.node(name)
            return SideNode(name, {"": picked})
        if isinstance(picked, dict):
            picked = list(picked.values())
        if isinstance(picked, (list, tuple)):
            some = [x for x in picked if x is not None]  # In a slice: not stored.
            return [self.collect(x, called) for x in some]
        advice = (
            " Make a list of it." if isinstance(picked, types.GeneratorType) else ""
        )
        raise TypeError(
            f"`{called}` must return nodes of the checkpoint's tree, as "
            f"`lambda c: c.model` does, and not a `{type(picked).__name__}`.{advice}"
        )

    def node(self, name: str) -> SideNode:
        return SideNode(
            name,
            {
                _names.below(self.saved.names[leaf_index], name): _lazy.lazy_of(
                    self.source, self.saved.record(leaf_index, is_name_checked=True)
                )
                for leaf_index in self.below.get(name, [])
            },
        )

    def kind(self, leaf_index: int) -> LeafKind:
        return _leaf_kinds.kind(self.saved.record(leaf_index).whole)

    def code(self, name: str) -> str:
        """`c.layers[0]`, of a node of the checkpoint."""
        record = self.saved.record(self.below[name][0])
        keys = _names.keys_of(record.name, record.template.keys)
        out = "c"
        for kind, key in keys[: name.count(".") + 1 if name else 0]:
            part = str(key)
            if kind in "sfi":
                out += f"[{key}]"
            elif part.isidentifier() and not keyword.iskeyword(part) and part != "keys":
                out += f".{part}"
            else:
                out += f"[{part!r}]"
        return out


def said(error: Exception) -> str:
    # Of a KeyError, `str` is the `repr` of what was said, which may be the key alone.
    said = str(error.args[0]) if error.args else type(error).__name__
    if type(error) is KeyError and " " not in said:
        return f"there is no {said!r}"
    fields = _select.fields_said(error)
    return f"{said}.{fields}" if fields else said
