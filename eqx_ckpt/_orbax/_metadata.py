"""The small files with which Orbax restores a checkpoint of ours.

A leaf that Orbax cannot hold is left out of them: one such leaf would fail its whole
restore. docs/readers.md has the table of who can hold what.
"""

import binascii
import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._kernel._format import _files, _json, _names
from .._kernel._format._record import HOWS, TreeRecord
from .._kernel._format._template import Template
from .._kernel._save import _tree_spec
from .._kernel._save._tree_spec import TreeSpec


# A sharding that Orbax restores on any number of devices: replicated.
_sharding = json.dumps(
    json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": [-1],
            "axis_names": ["devices"],
            "partition_spec": [],
        }
    )
)
_orbax_types = {
    "jax": "jax.Array",
    "key": "jax.Array",
    "numpy": "np.ndarray",
    # Orbax turns a `scalar` into one of Python, and has none that is complex.
    "generic": "np.ndarray",
    "complex": "np.ndarray",
    "bool": "scalar",
    "int": "scalar",
    "float": "scalar",
    "str": "string",
}
# Any other implementation may be unknown to the process that restores.
_key_impls = ("threefry2x32", "rbg", "unsafe_rbg")
# More items than this that a list lacks in a row are not filled up for Orbax. A node
# whose first item comes after as many is a dict.
_MAX_GAP = 10_000


# Holes may take so many bytes, or as many as are stored. Else none is told: a head that
# is saved each minute without its model would be mostly names of what is not there.
_HOLES = 2**12


class Hole(NamedTuple):
    """A place in the tree where nothing is stored, in front of the leaf `before`.

    `keys` are the letters of its path, as in a `Template`. `kind` is what Orbax
    restores there: `None`, or an empty `Dict`, `List` or `Tuple`.
    """

    before: int
    name: str
    keys: str
    kind: str


def holes(spec: TreeSpec, record: TreeRecord, wholes: Sequence[str]) -> Iterator[Hole]:
    """Places where `eqx.filter` of the tree has None, and empty nodes, in the nodes of
    these names. Orbax restores into a target only if it has an entry for each."""
    is_whole, has_holes = _names.within(wholes), _rows_with_holes(record)
    before = 0
    stack = [("", len(record.rows) - 1, "")]
    while stack:
        name, row, keys = stack.pop()
        kind, children = record.kind(row), record.rows[row].children
        if not has_holes[row]:
            before += record.leaf_counts[row]
        elif not children:
            if _names.is_plain(name, len(keys)) and is_whole(name) is not None:
                yield Hole(before, name, keys, _empty_kinds_of.get(kind.how, "None"))
        else:
            depth, at, below = len(keys), before, []
            letter = "s" if kind.how in ("list", "tuple") else "k"
            if record.leaf_counts[row]:
                letter = spec.templates[spec.template_of[before]].keys[depth]
            for place, child in enumerate(children):
                if record.has_unknown_parts(row):  # Each child has leaves.
                    part = _names.parts(spec.names[at])[depth]
                    part = part if depth else _names.below(part, "")
                else:
                    part = kind.parts[place]
                below.append((_names.child(name, part), child, keys + letter))
                at += record.leaf_counts[child]
            stack += reversed(below)


def _rows_with_holes(record: TreeRecord) -> list[bool]:
    """Whether a place at or below each row has nothing stored."""
    out: list[bool] = []
    for number, children, _ in record.rows:
        if children:
            out.append(any(map(out.__getitem__, {*children})))
        else:
            out.append(record.kinds[number].how != "leaf")
    return out


_empty_kinds_of = {name: "Dict" for name, how in HOWS.items() if how.is_dict}
_empty_kinds_of |= {"list": "List", "tuple": "Tuple"}


def _orbax_type(name: str, template: Template, text: str, layout: str) -> str | None:
    """Orbax's name of the type of a leaf; None if it cannot restore it."""
    if "%" in name or (layout == "zarr" and _files.directory(name) != name):
        return None
    if template.kind == "key":
        return "jax.Array" if template.impl in _key_impls else None
    if template.kind == "str":
        return "string" if _json.is_unicode(text) else None
    if template.dtype != template.stored:
        return None
    return _orbax_types.get(template.kind)


@dataclasses.dataclass(slots=True, eq=False)
class _Container:
    """A container in the tree that Orbax restores. `key`, `path`: how the keys of its
    entries begin, and how their `key_metadata` do. `is_sequence` is None before its
    first child."""

    key: str
    path: str
    is_sequence: bool | None = None
    length: int = 0


_empty_kinds = ("None", "Dict", "List", "Tuple")
_values = {
    kind: f'],"value_metadata":{{"value_type":"{kind}","skip_deserialize":'
    + ("true}}" if kind in _empty_kinds else "false}}")
    for kind in {*_orbax_types.values(), *_empty_kinds}
}


class _Entries:
    """The entries of `tree_metadata`, added in the order of the tree.

    This is text and not a dict of dicts because a save of many leaves waits for it: it
    takes half the time. Names have no characters that JSON escapes.
    """

    def __init__(self):
        self.text: list[str] = []
        self._nodes: dict[str, _Container | None] = {"": _Container("", "")}

    def add(self, name: str, keys: str, orbax_type: str) -> bool:
        """Adds an entry. Returns whether it could: Orbax has lists and dicts only."""
        parent, _, part = name.rpartition(".")
        node = self._nodes.get(parent) or self._node(parent, keys[:-1])
        key = node and self._key(node, part, keys[-1])
        if not (node and key):
            return False
        self._add_entry(node, part, key, orbax_type)
        return True

    def _node(self, name: str, keys: str) -> _Container | None:
        if name not in self._nodes:
            parent, _, part = name.rpartition(".")
            above = self._node(parent, keys[:-1])
            key = above and self._key(above, part, keys[-1])
            self._nodes[name] = (
                _Container(f"{above.key}'{part}', ", f"{above.path}{key},")
                if above and key
                else None
            )
        return self._nodes[name]

    def _key(self, node: _Container, part: str, letter: str) -> str | None:
        """The key of the next child of a node; None if the node cannot have it."""
        if node.is_sequence is None:
            node.is_sequence = letter in "sf" and int(part) <= _MAX_GAP
        if not node.is_sequence:
            return f'{{"key":"{part}","key_type":2}}'
        number = int(part) if letter in "sf" else -1
        if number < 0 or number - node.length > _MAX_GAP:
            return None
        # Restoring a list fails unless all of its items are there.
        while node.length < number:
            key = f'{{"key":"{node.length}","key_type":1}}'
            self._add_entry(node, str(node.length), key, "None")
            node.length += 1
        if node.length == number:
            node.length += 1
        return f'{{"key":"{part}","key_type":1}}'

    def _add_entry(
        self, node: _Container, part: str, key: str, orbax_type: str
    ) -> None:
        comma = "" if node.key else ","
        self.text.append(
            f'"({node.key}\'{part}\'{comma})":{{"key_metadata":[{node.path}{key}'
            f"{_values[orbax_type]}"
        )


# Where Orbax finds this file it finds a checkpoint.
LAST = "_METADATA"


@_tree_spec.remembered
def files(
    spec: TreeSpec,
    texts: tuple[tuple[int, str], ...],
    record: TreeRecord,
    wholes: tuple[str, ...],
    layout: str,
) -> dict[str, bytes]:
    """The files at the root that Orbax needs, and that say the same in each save of a
    tree; none if it can hold no leaf. `texts` are those of leaves that are one, and
    `wholes` the names of the nodes that are stored."""
    return _files_with(spec, dict(texts), holes(spec, record, wholes), layout)


def _files_with(
    spec: TreeSpec, text_of: Mapping[int, str], found: Iterator[Hole], layout: str
) -> dict[str, bytes]:
    entries = _Entries()
    sharding: list[str] = []
    strings: dict[str, str] = {}
    keys: list[Any] = []
    rest = collections.deque(found)
    # The bytes that holes may take: what is stored, or little.
    room = max(
        _HOLES, sum(spec.templates[number].nbytes for number in spec.template_of)
    )

    def fill(leaf_index: int) -> None:
        """Adds the holes in front of a leaf."""
        nonlocal room
        before = len(entries.text)
        while rest and rest[0].before <= leaf_index and room >= 0:
            hole = rest.popleft()
            entries.add(hole.name, hole.keys, hole.kind)
        room -= sum(map(len, entries.text[before:]))

    held = 0
    for leaf_index, (name, number) in enumerate(zip(spec.names, spec.template_of)):
        template = spec.templates[number]
        fill(leaf_index)
        kind = _orbax_type(name, template, text_of.get(leaf_index, ""), layout)
        if kind is None or not entries.add(name, template.keys, kind):
            continue
        held += 1
        if kind == "string":
            strings[name] = text_of[leaf_index]
            continue
        # The same in the alphabet for URLs, as a name has only some of ASCII.
        text = binascii.b2a_base64(name.encode(), newline=False).decode()
        sharding.append(f'"{text}":{_sharding}')
        if template.kind == "key":
            metadata = {
                "param_name": name,
                "write_shape": template.shape,
                "chunk_shape": template.chunk,
                "ext_metadata": {"random_key_impl": template.impl},
            }
            keys.append({"array_metadata": metadata})
    fill(len(spec.names))
    if room < 0:
        return _files_with(spec, text_of, iter(()), layout)
    if not held:
        return {}
    is_ocdbt = "true" if layout == "ocdbt" else "false"
    files = {
        LAST: f'{{"tree_metadata":{{{",".join(entries.text)}}},'
        f'"use_ocdbt":{is_ocdbt},"use_zarr3":true,'
        # A chunk that is missing must not read as zeros.
        '"store_array_data_equal_to_fill_value":true,"custom_metadata":null}',
        "_sharding": f"{{{','.join(sharding)}}}",
    }
    if strings:
        files["_strings.json"] = json.dumps(strings)
    if keys:
        files["array_metadatas/process_0"] = json.dumps({"array_metadatas": keys})
    return {key: text.encode() for key, text in files.items()}
