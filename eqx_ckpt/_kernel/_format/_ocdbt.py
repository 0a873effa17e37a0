"""Writes an OCDBT database whose values lie in files that are written already.

TensorStore's OCDBT format (https://google.github.io/tensorstore/kvstore/ocdbt) is a
B+tree from keys to byte ranges of files. We write it ourselves, without its driver, so
that every value can start where it is best read from. Several keys can share one range,
and a save is a plain sequence of file writes.
"""

import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from .._limits import limits


MANIFEST = 0x0CDB3A2A
NODE = 0x0CDB20DE
# As TensorStore's driver has them: no value is inlined by us, and no node is this big.
_MAX_INLINE_VALUE_BYTES = 100
_MAX_DECODED_NODE_BYTES = 83951616
_VERSION_TREE_ARITY_LOG2 = 4
MISSING = 2**64 - 1  # The place of the root of a tree without keys.


class Entries(NamedTuple):
    """The keys of a database in their order, and where the value of each lies: columns,
    as there are many."""

    keys: list[bytes]
    files: list[int]
    offsets: list[int]
    lengths: list[int]


class Subtree(NamedTuple):
    """A node of the B+tree: its first key, where it lies, and how much is below it."""

    key: bytes
    offset: int
    length: int
    keys: int
    tree_bytes: int
    value_bytes: int
    height: int


class EncodedTree(NamedTuple):
    """The bytes of nodes of the B+tree, and the uppermost of them."""

    data: bytes
    root: Subtree


# So many numbers are encoded one by one, which takes less time than an array of them.
_FEW = 16


def _varints(numbers: Sequence[int]) -> bytes:
    """Numbers in groups of seven bits, the lowest first, the top bit set in all but the
    last of a number."""
    if len(numbers) <= _FEW:
        out = bytearray()
        for n in numbers:
            while n > 0x7F:
                out.append(n & 0x7F | 0x80)
                n >>= 7
            out.append(n)
        return bytes(out)
    array = np.asarray(numbers, np.uint64)
    count = max(1, -(-int(array.max()).bit_length() // 7))
    groups = array[:, None] >> np.arange(0, 7 * count, 7, dtype=np.uint64)
    more = groups > 0x7F
    data = (groups & np.uint64(0x7F)).astype(np.uint8) | more.astype(np.uint8) << 7
    used = np.ones(data.shape, bool)
    used[:, 1:] = more[:, :-1]
    return data[used].tobytes()


def _frame(magic: int, body: bytes) -> bytes:
    # Magic, length, format version 0, no compression; and a checksum of all of it.
    length = 4 + 8 + 2 + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", length) + b"\0\0" + body
    return data + struct.pack("<I", google_crc32c.value(data))


def _file_table(paths: Sequence[bytes], base: int = 0) -> bytes:
    # No prefix compression; the first `base` bytes of each path also lead to the files
    # that the node it holds refers to.
    count = len(paths)
    lengths = map(len, paths)
    head = _varints([count, *bytes(count - 1), *lengths, *[base] * count])
    return head + b"".join(paths)


def _key_lengths(keys: Sequence[bytes]) -> bytes:
    # No prefix compression: finding the prefixes costs more than they save.
    return _varints([len(keys), *bytes(len(keys) - 1), *map(len, keys)])


def _leaf(entries: Entries, table: bytes, offset: int) -> EncodedTree:
    """A node that has keys, to stand at `offset`."""
    keys, files, offsets, lengths = entries
    head = b"\0", table, _key_lengths(keys)
    in_files = b"\1" * len(keys)  # Each value lies in a file, and not in the node.
    values = _varints(lengths), in_files, _varints(files), _varints(offsets)
    data, size = _frame(NODE, b"".join([*head, *keys, *values])), sum(lengths)
    node = Subtree(keys[0], offset, len(data), len(keys), len(data), size, 0)
    return EncodedTree(data, node)


def _inner(below: Sequence[Subtree], table: bytes, offset: int) -> EncodedTree:
    """A node that has other nodes, to stand at `offset`."""
    keys, *numbers, heights = zip(*below)
    # No key has a prefix that all below it share, and all nodes are in file 0.
    prefixes = file_numbers = bytes(len(below))
    head = bytes([1 + heights[0]]), table, _key_lengths(keys), prefixes
    rest = file_numbers, *map(_varints, numbers)
    data = _frame(NODE, b"".join([*head, *keys, *rest]))
    count, tree_bytes, value_bytes = map(sum, numbers[2:])
    sizes = len(data), count, tree_bytes + len(data), value_bytes
    return EncodedTree(data, Subtree(keys[0], offset, *sizes, 1 + heights[0]))


def tree(entries: Entries, files: Sequence[str], name: str, offset: int) -> EncodedTree:
    """The nodes of the B+tree of `entries`, to stand at `offset` in the file `name`.

    `files` are the paths that the numbers in `entries.files` mean.
    """
    table = _file_table([path.encode() for path in files])
    out: list[bytes] = []
    nodes: list[Subtree] = []
    for start in range(0, len(entries.keys), limits.node_entries):
        part: list[Any] = [c[start : start + limits.node_entries] for c in entries]
        data, node = _leaf(Entries(*part), table, offset)
        out.append(data)
        nodes.append(node)
        offset += len(data)
    table = _file_table([name.encode()])
    while len(nodes) > 1:
        below, nodes = nodes, []
        for start in range(0, len(below), limits.node_entries):
            some = below[start : start + limits.node_entries]
            data, node = _inner(some, table, offset)
            out.append(data)
            nodes.append(node)
            offset += len(data)
    root = nodes[0] if nodes else Subtree(b"", MISSING, MISSING, 0, 0, 0, 0)
    return EncodedTree(b"".join(out), root)


def manifest(root: Subtree, name: str) -> bytes:
    """The manifest of a database in one directory: the file `name` there holds its
    nodes, and the files of its values are there too."""
    table = _file_table([name.encode()])
    counts = root.keys, root.tree_bytes, root.value_bytes
    parts = [
        secrets.token_bytes(16),
        _config,
        table,
        # One version, of generation 1.
        _varints([1, 1, root.height, 0, root.offset, root.length, *counts]),
        struct.pack("<Q", time.time_ns()),
        b"\0",  # None before it.
    ]
    return _frame(MANIFEST, b"".join(parts))


def moved(data: bytes, name: str, base: str) -> bytes:
    """The manifest of the same database, seen from another directory, from which `base`
    leads to its own. `data` is one of `manifest`. **Raises:** `ValueError` for one that
    is not ours."""
    body = data[_FRAME:-4]
    start = len(_config) + 16
    own = _file_table([name.encode()])
    if data != _frame(MANIFEST, body) or not body.startswith(own, start):
        raise ValueError("it is no manifest of a save")
    table = _file_table([(base + name).encode()], len(base.encode()))
    return _frame(MANIFEST, body[:start] + table + body[start + len(own) :])


# The bytes of a frame before its body.
_FRAME = 4 + 8 + 2
# A single manifest; and no compression.
_config = _varints(
    [0, _MAX_INLINE_VALUE_BYTES, _MAX_DECODED_NODE_BYTES, _VERSION_TREE_ARITY_LOG2, 0]
)
