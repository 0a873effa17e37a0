"""The small files with which Orbax and zarr-python read our directories.

A leaf that a reader cannot hold is left out of that reader's files: one such leaf would
fail its whole restore. docs/readers.md has the table of who can hold what.
"""

import binascii
import bisect
import collections
import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._format import _files, _json, _names
from .._format._template import Template
from .._storage import _arrays
from .._tree import _flatten
from .._tree._flatten import Flat
from . import _payload, _tree_spec
from ._options import SaveOptions
from ._payload import PlannedLeaf
from ._tree_spec import TreeSpec


# ---- Orbax: the files of a checkpoint of its own, of which it needs no others.

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
# A list with more items left out than this is not filled up for Orbax.
_MAX_GAP = 10_000


# Holes may take so many bytes, or as many as are stored. Else none is told: a head that
# is saved each minute without its model would be mostly names of what is not there.
_HOLES = 2**12

# The database of so many chunks is made in memory of process 0: about 1 GiB, by an
# estimate.
MOST_CHUNKS = 2**20


def has_database(form: TreeSpec) -> bool:
    """Whether other readers can read a save in few files: of very many chunks it would
    take process 0 too long, and too much memory, to tell them."""
    return form.chunk_count <= MOST_CHUNKS


class Hole(NamedTuple):
    """A place in the tree where nothing is stored, in front of the leaf `before`.

    `kind` is what Orbax restores there: `None`, or an empty `Dict`, `List` or `Tuple`.
    """

    before: int
    name: str
    keys: str
    kind: str


def holes(flat: Flat, numbers: Sequence[int], wholes: Iterable[tuple]) -> list[Hole]:
    """Places where `eqx.filter` of the tree has None, and empty nodes, by their names.

    `numbers` are those of the stored leaves, `wholes` the key paths of the nodes that
    are stored. Orbax restores into a target only if it has an entry for each of these.
    """
    walk = flat.walk
    # An empty node is in front of the leaf whose number it has here.
    found = [
        (before, False, name, keys, _empty_kind(cls))
        for before, name, keys, cls in walk.empty_nodes
    ]
    if len(numbers) < len(flat.leaves):
        rest = {*range(len(flat.leaves))}.difference(numbers)
        found += [(n, True, walk.names[n], walk.letters[n], "None") for n in rest]
        found.sort(key=lambda x: x[:2])
    whole = _names.within(_flatten.module_name(path, "") for path in wholes)
    return [
        Hole(bisect.bisect_left(numbers, number), name, keys, kind)
        for number, _, name, keys, kind in found
        if _names.is_plain(name, len(keys)) and whole(name) is not None
    ]


def _empty_kind(cls: type) -> str:
    if issubclass(cls, Mapping):
        return "Dict"
    if issubclass(cls, list):
        return "List"
    is_tuple = issubclass(cls, tuple) and not hasattr(cls, "_fields")
    return "Tuple" if is_tuple else "None"


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
    """A container in the tree that Orbax restores, and how its entries begin."""

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

    def add(self, name: str, keys: str, kind: str) -> bool:
        """Adds an entry. Returns whether it could: Orbax has lists and dicts only."""
        parent, _, part = name.rpartition(".")
        node = self._nodes.get(parent) or self._node(parent, keys[:-1])
        key = node and self._key(node, part, keys[-1])
        if not (node and key):
            return False
        self._write(node, part, key, kind)
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

    def _key(self, node: _Container, part: str, kind: str) -> str | None:
        """The key of the next child of a node; None if the node cannot have it."""
        if node.is_sequence is None:
            node.is_sequence = kind in "sf" and int(part) <= _MAX_GAP
        if not node.is_sequence:
            return f'{{"key":"{part}","key_type":2}}'
        number = int(part) if kind in "sf" else -1
        if number < 0 or number - node.length > _MAX_GAP:
            return None
        # Restoring a list fails unless all of its items are there.
        while node.length < number:
            key = f'{{"key":"{node.length}","key_type":1}}'
            self._write(node, str(node.length), key, "None")
            node.length += 1
        if node.length == number:
            node.length += 1
        return f'{{"key":"{part}","key_type":1}}'

    def _write(self, node: _Container, part: str, key: str, kind: str) -> None:
        comma = "" if node.key else ","
        self.text.append(
            f'"({node.key}\'{part}\'{comma})":{{"key_metadata":[{node.path}{key}'
            f"{_values[kind]}"
        )


def files(
    leaves: Sequence[PlannedLeaf],
    form: TreeSpec,
    holes: Sequence[Hole],
    options: SaveOptions,
) -> dict[str, bytes]:
    """All files for other readers that go into the root of a checkpoint."""
    out = _zarr_files(form) if options.layout == "zarr" else {}
    if not options.orbax or options.layout == "ocdbt" and not has_database(form):
        return out
    texts: list[tuple[int, str]] = []
    if "str" in map(operator.attrgetter("kind"), form.templates):
        texts = [
            (i, _text(x)) for i, x in enumerate(leaves) if x.template.kind == "str"
        ]
    return out | _orbax_files(form, tuple(texts), tuple(holes), options.layout)


def _text(leaf: PlannedLeaf) -> str:
    return bytes(_payload.whole(leaf)).decode("utf-8", "surrogatepass")


@_tree_spec.remembered
def _orbax_files(
    form: TreeSpec,
    texts: tuple[tuple[int, str], ...],
    gaps: tuple[Hole, ...],
    layout: str,
) -> dict[str, bytes]:
    """The files at the root that Orbax needs; none if it can hold no leaf."""
    entries = _Entries()
    sharding: list[str] = []
    strings: dict[str, str] = {}
    keys: list[Any] = []
    text_of = dict(texts)
    rest = collections.deque(gaps)
    # The bytes that holes may take: what is stored, or little.
    room = max(_HOLES, sum(form.templates[number].nbytes for number in form.numbers))

    def fill(place: int) -> None:
        """Adds the holes in front of a leaf."""
        nonlocal room
        before = len(entries.text)
        while rest and rest[0].before <= place and room >= 0:
            gap = rest.popleft()
            entries.add(gap.name, gap.keys, gap.kind)
        room -= sum(map(len, entries.text[before:]))

    held = 0
    for place, (name, number) in enumerate(zip(form.names, form.numbers)):
        template = form.templates[number]
        fill(place)
        kind = _orbax_type(name, template, text_of.get(place, ""), layout)
        if kind is None or not entries.add(name, template.keys, kind):
            continue
        held += 1
        if kind == "string":
            strings[name] = text_of[place]
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
    fill(len(form.names))
    if room < 0:
        return _orbax_files(form, texts, (), layout)
    if not held:
        return {}
    is_ocdbt = "true" if layout == "ocdbt" else "false"
    files = {
        "_METADATA": f'{{"tree_metadata":{{{",".join(entries.text)}}},'
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


# ---- zarr-python.

# Of the stored arrays that zarr-python can decode.
_zarr_dtypes = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128".split()
)


@_tree_spec.remembered
def _zarr_files(form: TreeSpec) -> dict[str, bytes]:
    """The root group, whose consolidated metadata lists what zarr-python can decode."""
    blobs = {
        number: _arrays.zarr_json(template._replace(keys="")).rstrip()
        for number, template in enumerate(form.templates)
        if template.stored in _zarr_dtypes
    }
    members = [
        b'"%b":%b' % (_files.directory(name).encode(), blobs[number])
        for name, number in zip(form.names, form.numbers)
        if number in blobs
    ]
    group = (
        b'{"zarr_format":3,"node_type":"group","attributes":{},'
        b'"consolidated_metadata":{"kind":"inline","must_understand":false,'
        b'"metadata":{%b}}}' % b",".join(members)
    )
    return {"zarr.json": group}
