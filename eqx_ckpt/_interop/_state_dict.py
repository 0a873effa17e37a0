"""`to_state_dict` and `from_state_dict`: a tree as nested dicts, by our names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from .._kernel._format import _names, _state_labels
from .._kernel._format._leaves import Leaves
from .._kernel._format._record import Attributes
from .._kernel._format._state_labels import Label
from .._kernel._format._template import Template
from .._kernel._load import _checkpoint, _load_options
from .._kernel._load._load_options import LoadOptions, Renaming
from .._kernel._load._match import Matcher
from .._kernel._runtime import _arguments
from .._kernel._save import _describe
from .._kernel._save._describe import StoredValue
from .._kernel._tree import (
    _flatten,
    _from_host,
    _host_copy,
    _leaf,
    _register,
    _states,
)
from .._kernel._tree._filters import FilterSpec, IsLeaf
from .._kernel._tree._flatten import Flat
from .._kernel._tree._target import Target
from .._rename import _renamed
from . import _torch_tensors


@_arguments.checked()
def to_state_dict(
    pytree: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
) -> dict[str, Any]:
    """The leaves of a tree in nested dicts, whose keys are the parts of their names.

    Lists and Modules become dicts too, `layers.0.weight` being
    `out["layers"]["0"]["weight"]`. The leaves are those of the tree, and not copies.
    Entries of an `eqx.nn.State` have keys that say what they belong to, as positions do
    not: [`from_state_dict`][] finds them by those. So have children of a node that was
    registered without keys: the attributes that they are.

    **Arguments:**

    - `pytree`, `filter_spec`, `is_leaf`: as in [`tree_serialise_leaves`][]. The tree
        may be abstract, or have lazy leaves.

    **Returns:** nested dicts, whose order is the tree's. A tree that is one leaf has
    the key `"%root"`.

    **Raises:** `ValueError` for two leaves of one name.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.to_state_dict({"layers": [{"rate": 0.5}, {"rate": 0.1}], "act": print})
        {'layers': {'0': {'rate': 0.5}, '1': {'rate': 0.1}}}

        ```
    """
    _checkpoint.check_tree(pytree)
    flat = _flatten.flatten(pytree, is_leaf)
    chosen = _describe.selected(filter_spec, pytree, flat.leaves, is_leaf)
    entries = _states.state_entries(flat)
    _states.check_order(flat, {i for i, good in enumerate(chosen) if good})
    attributes = _attributes(flat)
    out: dict[str, Any] = {}
    for number, (path, leaf) in enumerate(zip(flat.paths, flat.leaves)):
        if not chosen[number]:
            continue
        name = own = _names.name_of(path).name
        if number in entries and any(entries[number].label):
            name = _labelled(name, entries[number])
        parts = name.split(".")
        if attributes:
            parts = _with_attributes(own.split("."), parts, attributes)
            name = ".".join(parts)
        *parents, last = parts
        node = out
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"Two leaves have the name `{name}`, or the start of it: rename one of "
                "their keys."
            )
        try:
            node[last] = _register.to_leaf(leaf)
        except ValueError as e:
            raise ValueError(f"Leaf `{name}`: {e}") from e.__cause__
    return out


def attributes_of(flat: Flat) -> Attributes:
    """The attributes of the children without keys in a tree."""
    walk = flat.walk
    return {
        names[place]: dict(zip(group.kind.parts, group.kind.attributes))
        for layer, names in zip(walk.layers, walk.nodes.names)
        for group in layer.groups
        if group.kind.attributes
        for place in group.places
    }


def _attributes(flat: Flat) -> dict[str, dict[str, str]]:
    """The same as parts of names, of those children that are one."""
    return {
        node: {part: _names.quote(x) for part, x in some.items() if x is not None}
        for node, some in attributes_of(flat).items()
    }


def _with_attributes(
    own: Sequence[str], parts: Sequence[str], attributes: dict[str, dict[str, str]]
) -> list[str]:
    """The parts of a name with attributes in the place of positions. `own` are those
    that the leaf has in the tree."""
    node, out = "", []
    for one, part in zip(own, parts):
        out.append(attributes.get(node, {}).get(one, part))
        node = _names.child(node, one)
    return out


def _with_positions(name: str, positions: dict[str, dict[str, str]]) -> str:
    """The inverse of `_with_attributes`. `positions`: of each node, by attributes."""
    node, out = "", []
    for part in name.split("."):
        out.append(positions.get(node, {}).get(part, part))
        node = _names.child(node, out[-1])
    return ".".join(out)


def _labelled(name: str, entry: _states.Entry) -> str:
    """The name of a leaf of a State, with the entry's label for its position."""
    _, dot, rest = _names.below(name, entry.state).partition(".")
    above = [entry.state] if entry.state else []
    text = _names.quote(str(_state_labels.label_text(entry.label)))
    return ".".join([*above, "%=" + text]) + dot + rest


def _positions(
    names: list[str], states: set[str]
) -> tuple[list[str], dict[int, Label]]:
    """The inverse of `_labelled`: names with positions, and the labels of leaves, by
    their places. Entries without labels keep the positions that they have."""
    out, labels = list(names), {}
    for state in states:
        below = state + "." if state else ""
        places: dict[str, int] = {}
        for number, name in enumerate(names):
            entry, dot, rest = name[len(below) :].partition(".")
            if name.startswith(below) and entry.startswith(("%=%3D", "%=%40")):
                label = _names.unquote(entry.removeprefix("%="))
                place = places.setdefault(label, len(places))
                out[number] = f"{below}{place}{dot}{rest}"
                labels[number] = _state_labels.label_of(label)
    return out, labels


@_arguments.checked()
def from_state_dict(
    state_dict: Mapping,
    like: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    rename: Renaming = None,
    missing: str = "error",
    unexpected: str = "error",
    cast: bool = False,
) -> PyTree:
    """Puts the leaves of nested dicts into a tree, each by its name.

    It checks all that [`tree_deserialise_leaves`][] checks, but for static fields,
    which such dicts do not have. Entries of an `eqx.nn.State` go by the keys that
    `to_state_dict` gives them; by their positions only where nothing else could be
    meant, and that is an error else.

    **Arguments:**

    - `state_dict`: nested dicts as of [`to_state_dict`][]; keys may be joined with
        dots, so that `{"layers.0.weight": ...}` will do. Other signs in them are
        encoded, as in all names: `weight:0` is `weight%3A0`. Leaves may be tensors of
        PyTorch, as in `model.state_dict()`: of any device and dtype, with gradients or
        without.
    - `like`, `filter_spec`, `is_leaf`, `where`: as in [`tree_deserialise_leaves`][].
        `like` says how each leaf comes back. A jax.Array that is so already is taken
        as it is; anything else is copied.
    - `rename`, `missing`, `unexpected`, `cast`: as in [`tree_deserialise_leaves`][].

    **Returns:** `like`, with the selected leaves of the dicts.

    **Raises:** one `RuntimeError` that lists all that does not fit; `ValueError` or
    `TypeError` that names the leaf for what cannot be a leaf.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.random as jr, eqx_ckpt as ec
        >>> mlp = eqx.nn.MLP(2, 2, 8, 1, key=jr.key(0))
        >>> like = eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 8, 1, key=jr.key(1))
        >>> again = ec.from_state_dict(ec.to_state_dict(mlp), like)
        >>> bool(eqx.tree_equal(again, mlp))
        True

        ```
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"A state dict is nested dicts, and not a `{type(state_dict).__name__}`."
        )
    saved, values = _leaves(state_dict, like, is_leaf)
    given = LoadOptions(
        filter_spec=filter_spec,
        is_leaf=is_leaf,
        where=where,
        missing=missing,
        unexpected=unexpected,
        cast=cast,
    )
    given = _load_options.check(given)
    if rename is not None:
        saved = _renamed.renamed(saved, rename).leaves
    matched = Matcher(saved, like, given, thing="state dict").match()
    out = []
    for record, _, target, _ in matched.reads.values():
        try:
            out.append(_loaded(values[record.leaf_index], record.template, target))
        except (ValueError, TypeError) as e:
            raise RuntimeError(f"The state dict's leaf `{record.name}`: {e}") from e
    return matched.tree(out)


class _Flat(NamedTuple):
    """The leaves of nested dicts as those of a checkpoint, and their values."""

    leaves: Leaves
    values: list[Any]


def _leaves(state_dict: Mapping, like: PyTree, is_leaf: IsLeaf) -> _Flat:
    """The leaves of a state dict, under the names that they would have if it was saved.
    Those of States in `like` have positions in their names, and labels beside them."""
    values: dict[str, Any] = {}
    templates: dict[Template, int] = {}
    numbers: list[int] = []
    rows = list(_walk(state_dict, ()))
    flat = _flatten.flatten(like, is_leaf)
    entries, attributes = _states.state_entries(flat), _attributes(flat)
    states = {entry.state for entry in entries.values()}
    names = [name for name, _ in rows]
    if attributes:
        inverse = {
            node: {attribute: part for part, attribute in some.items()}
            for node, some in attributes.items()
        }
        names = [_with_positions(name, inverse) for name in names]
    positions, labels = _positions(names, states)
    for name, (_, value) in zip(positions, rows):
        name, keys = _own_name(name)
        if name in values:
            raise ValueError(f"The state dict has two leaves of the name `{name}`.")
        value, template = _described(name, value)
        chunk = tuple(max(1, n) for n in template.shape)
        template = template._replace(keys=keys, chunk=chunk)
        values[name] = value
        numbers.append(templates.setdefault(template, len(templates)))
    labels = _with_names(labels, list(values))
    saved = Leaves(list(values), list(templates), numbers, given_labels=labels)
    return _Flat(saved, list(values.values()))


def _with_names(labels: dict[int, Label], names: Sequence[str]) -> dict[int, Label]:
    """The labels with the names that their StateIndices have beside these leaves."""
    nodes = _names.by_prefix(names) if labels else ()
    found = _state_labels.names_by_markers({*labels.values()}, nodes)
    return {
        number: label._replace(names=frozenset(found.get(label, label.names)))
        for number, label in labels.items()
    }


def _own_name(name: str) -> tuple[str, str]:
    """The name of ours that a leaf of a state dict has, and the kinds of its keys: the
    name that it has there, with its signs encoded unless it is one of ours."""
    quoted = ".".join(map(_names.quote, name.split(".")))
    wrong: list[ValueError] = []
    for one in (name, quoted):
        try:
            keys = "".join("o" if x[:2] == "%=" else "k" for x in one.split("."))
            keys = "" if one == _names.ROOT else keys
            _names.keys_of(one, keys)
        except ValueError as e:
            wrong.append(e)
        else:
            return one, keys
    raise ValueError(
        f"The state dict has a leaf at {_names.shorten(name)}, which is no name of a "
        f"leaf: {wrong[0]}. `ec.leaf_names` shows those of a tree."
    ) from None


def _described(name: str, value: object) -> StoredValue:
    """A leaf as it would be stored."""
    try:
        if _torch_tensors.is_tensor(value):
            value = _torch_tensors.to_numpy(value)
        # What has been through `to_leaf` is what was stored.
        if not (_leaf.is_own(value) or isinstance(value, (str, bytes))):
            value = _register.to_leaf(value)
        if isinstance(value, (list, tuple)):
            raise TypeError(
                "lists are dicts here, such as `{'0': ..., '1': ...}`. The tree "
                "of a checkpoint is loaded by `tree_deserialise_leaves` or `graft`."
            )
        if value is None or callable(value):
            raise TypeError(f"{value!r:.60} is not a leaf. Remove the entry.")
        return StoredValue(value, _leaf.template_of(value))
    except (ValueError, TypeError) as e:
        raise type(e)(f"The state dict's leaf `{name}`: {e}") from None


def _walk(node: Mapping, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The values in nested dicts, each with its keys joined by dots."""
    for key, value in node.items():
        if not isinstance(key, str):
            raise TypeError(
                f"The state dict has the key {key!r:.60}, and takes strings only: "
                f'`"{key!r:.60}"`.'
            )
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def _loaded(value: object, template: Template, target: Target) -> Any:
    """A value as the target asks for it: itself if it is so already, or a copy."""
    if isinstance(value, jax.Array) and target.registered is None:
        same = template.kind == target.kind and template.weak == target.weak
        same = same and (target.kind == "key" or value.dtype == target.dtype)
        if same and target.sharding in (None, value.sharding):
            return value
    array = _host_copy.to_host(value, template)
    parts = [array[region] for region in _from_host.regions(target) or [...]]
    return _from_host.from_host(parts, template, target, owned=False)
