"""Static values of a tree: how they are recorded, compared, and let pass.

They are the static fields of Modules, and leaves that are not stored, such as strings.
What JSON holds is recorded as it is. All else is encoded, as FORMAT.md says: so that of
a tuple with a function in it the rest can be compared.
"""

import contextlib
import fnmatch
import itertools as it
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import PyTree

from .._format import _json, _names
from .._format._leaves import Statics
from . import (
    _encoded,
    _filters,
    _flatten,
    _identity,
    _leaf,
    _named,
    _nearest,
    _node,
    _seen,
)
from ._filters import IsLeaf
from ._flatten import Flat
from ._node import Node


Static = str | Sequence[str]


Fields = tuple[dict[str, Any], dict[str, Any]]


def recorded(module: Any, known: dict[Any, Fields]) -> Fields:
    """The static fields of a Module: those that JSON holds, and the others, encoded.
    Modules that are alike have one, which is `known`."""
    cls = type(module)
    if cls is Node:
        return _node.parsed(_node.body_of(module).fields())
    dynamic, static = _seen.module_fields(cls)
    if not static or issubclass(cls, eqx.nn.StateIndex):
        return {}, {}  # The marker of an index is how this process finds an entry.
    values = _flatten.field_values(module, static)
    same = _identity.plain_key(values)
    key = cls, same
    if same is None or key not in known:
        known[key] = {}, {}
        for field, value in zip(static, values):
            if value is not _flatten.ABSENT:
                _add(known[key], field, value)
    plain, encoded = known[key]
    # A leaf that is a function is compared beside static fields, as it stands for one.
    # Alone it makes no node of a Module that has nothing else to be stored.
    if plain or encoded:
        for field, value in zip(dynamic, _flatten.field_values(module, dynamic)):
            if callable(value) and (name := _named.name_of(value)) is not None:
                encoded = {**encoded, field: {"name": list(name)}}
    return plain, encoded


def record(
    tree: PyTree,
    is_leaf: IsLeaf,
    flat: Flat,
    chosen: Sequence[bool] | None = None,
    source: str = "",
) -> Statics:
    """The static values of a tree, by the names of the nodes that have them, of which
    `source` is that of the tree itself. `chosen`: the leaves that are stored; by
    default, those that a save stores by default."""
    if chosen is None:
        chosen = [_filters.by_default(x) for x in flat.leaves]
    stored = it.compress(range(len(flat.leaves)), chosen)
    make = lambda: _record(tree, is_leaf, flat, chosen, source)
    return flat.once(("statics", source), make, stored)


def _record(
    tree: PyTree,
    is_leaf: IsLeaf,
    flat: Flat,
    chosen: Sequence[bool],
    source: str,
) -> Statics:
    nodes: dict[str, Fields] = {}
    if any(map(_flatten.is_module, flat.types)):
        known: dict[Any, Fields] = {}
        for name, module in _flatten.modules(tree, is_leaf, source):
            fields = recorded(module, known)
            if any(fields):
                nodes[name] = fields
    for number in _left_out(flat.leaves, chosen):
        with contextlib.suppress(ValueError):  # What has no name cannot be compared.
            path, value = flat.paths[number], flat.leaves[number]
            name = _names.name_of(path, source)[0]
            node, _, field = name.rpartition(".")
            plain, encoded = nodes.get(node, ({}, {}))
            nodes[node] = fields = {**plain}, {**encoded}
            _add(fields, field, value)
    rows: dict[str, tuple[int, Fields]] = {}
    of: dict[str, int] = {}
    # Many nodes of a checkpoint may have one row, which is made a key once.
    numbers: dict[tuple[int, ...], int] = {}
    for name, fields in nodes.items():
        ids = tuple(map(id, fields))
        if ids not in numbers:
            numbers[ids] = rows.setdefault(repr(fields), (len(rows), fields))[0]
        of[name] = numbers[ids]
    values, others = zip(*(fields for _, fields in rows.values())) if rows else ((), ())
    return Statics(list(values), of, list(others))


def _add(fields: Fields, name: str, value: Any) -> None:
    """Adds a value to those that JSON holds, or to those that are encoded."""
    good, as_json = _json.jsonable(value)
    fields[not good][name] = as_json if good else _encoded.encode(value)


def _left_out(leaves: Sequence[Any], chosen: Sequence[bool]) -> Iterator[int]:
    """The numbers of the leaves that are values, and that no save stores by itself:
    neither arrays and other data, nor functions."""
    odd = {*it.filterfalse(_leaf.is_own_type, {*map(type, leaves)})}
    if not odd:
        return
    for number, leaf in enumerate(leaves):
        if type(leaf) in odd and not chosen[number]:
            if not callable(leaf) and not _filters.by_default(leaf):
                yield number


# ---- Comparing those of a checkpoint with those that are here.


class FieldChange(NamedTuple):
    """A static field that has changed, or a part of one that is an object or a dict."""

    name: str
    saved: str
    here: str
    may_differ: bool


def changes(
    saved: Statics,
    saved_name: str,
    here: Statics,
    name: str,
    passes: Callable[[str], bool],
) -> Iterator[FieldChange]:
    """The values that have changed, and that both sides have, of the node that was
    saved as `saved_name`, and is called `name` here. `passes` says of a name of either
    side whether it may differ."""
    plain, encoded = saved.row(saved_name)
    plain_here, encoded_here = here.row(name)
    for field in (*plain_here, *encoded_here):
        are_json = field in plain and field in plain_here
        if are_json:
            if _identity.is_same(plain[field], plain_here[field]):
                continue
        elif saved.encoded is None or not (field in plain or field in encoded):
            continue  # A checkpoint with nothing encoded is compared as it always was.
        was = _encoded.encode(plain[field]) if field in plain else encoded[field]
        now = encoded_here.get(field)
        if field in plain_here:
            now = _encoded.encode(plain_here[field])
        if are_json or not _encoded.is_alike(was, now):
            names = [f"{x}.{field}" if x else field for x in (saved_name, name)]
            yield from _changes(list(dict.fromkeys(names)), was, now, passes)


def _changes(
    names: list[str],
    saved: Any,
    here: Any,
    passes: Callable[[str], bool],
    may_differ: bool = False,
) -> Iterator[FieldChange]:
    """`names`: in the checkpoint, and here if that is another; the last is shown."""
    may_differ = may_differ or any(map(passes, names))
    old, new = _encoded.members(saved), _encoded.members(here)
    nothing = _encoded.NOTHING
    some = []
    if old is not None and new is not None:
        both = [
            (part, old.get(part, nothing), new.get(part, nothing))
            for part in dict.fromkeys([*old, *new])
        ]
        some = [x for x in both if nothing in x[1:] or not _encoded.is_alike(*x[1:])]
    if not some:
        yield FieldChange(
            names[-1], _encoded.show(saved), _encoded.show(here), may_differ
        )
    for part, a, b in some:
        yield from _changes([f"{x}.{part}" for x in names], a, b, passes, may_differ)


# ---- What may differ.


def check(static: Any) -> None:
    """**Raises:** `ValueError` or `TypeError` for what `static=` does not take."""
    wanted = '`static` must be "error", "ignore" or a list of names of static fields'
    if isinstance(static, str):
        if static not in ("error", "ignore"):
            raise ValueError(
                f"{wanted}, not {static!r}. If it names a field, put it into a list: "
                f"`static=[{static!r}]`."
            )
    elif not all(isinstance(x, str) and x for x in static):
        raise TypeError(f'{wanted} that may differ, such as ["*.vocab_size"].')


def how_to_pass(names: Sequence[str]) -> str:
    """The argument that lets changed fields pass, as code."""
    last = names[0].rpartition(".")[2] if names else ""
    return f'`static="ignore"` lets them pass, `static=["*.{last}"]` those of that name'


def passing(
    static: Static, statics: Statics, what: str, more: Iterable[str] = ()
) -> Callable[[str], bool]:
    """Whether the static field of a name may differ. `more`: names of fields besides
    those that are stored.

    **Raises:** `ValueError` for a pattern that is the name of none. It says `what` the
    fields are in.
    """
    check(static)
    if isinstance(static, str):
        return lambda name: static == "ignore"
    patterns = list(static)
    names = [*all_names(statics), *more] if patterns else []
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            near = _nearest.NameIndex(names).nearest(pattern, 3)
            some = ", ".join(f"`{x}`" for x in near or names[:3])
            head = "The nearest there are" if near else "It has"
            raise ValueError(
                f"`static` has {pattern!r}, which names no static field of the {what}. "
                f"{head} {some or 'none'}."
            )
    return lambda name: any(matches(x, name) for x in patterns)


def all_names(statics: Statics) -> Iterator[str]:
    """The names of static values, and of parts of those."""
    for module in statics.of:
        plain, encoded = statics.row(module)
        plain = {name: _encoded.encode(x) for name, x in plain.items()}
        todo = [(name, x) for name, x in (plain | encoded).items()]
        prefix = module + "." if module else ""
        while todo:
            name, x = todo.pop()
            yield prefix + name
            todo += [(f"{name}.{k}", y) for k, y in (_encoded.members(x) or {}).items()]


def matches(pattern: str, name: str) -> bool:
    """Whether a name is as a pattern says, in which `*` stands for any text. A leading
    `*.` may stand for nothing: what it is before is at the root then."""
    # Nothing but `*` is special, and `fnmatch` takes time that grows with the name.
    pattern = re.sub(r"[?[]", r"[\g<0>]", pattern)
    return fnmatch.fnmatchcase(name, pattern) or (
        pattern.startswith("*.") and fnmatch.fnmatchcase(name, pattern[2:])
    )
