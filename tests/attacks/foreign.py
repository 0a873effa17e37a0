"""Checkpoints of other formats, and random mutations of them.

Most of what is made has right lengths and checksums, and gets past the first check.
"""

import collections
import itertools as it
import json
import pathlib
import pickle
import pickletools
import random
import re
import shutil
import struct
import zipfile
from typing import Any

import equinox as eqx
import flax.serialization
import google_crc32c
import numpy as np
import tensorstore as ts

import eqx_ckpt as ec
from eqx_ckpt._formats._database import Database
from eqx_ckpt._kernel._format import _ocdbt
from eqx_ckpt._kernel._storage import _root

from . import fields, functions, pickles


_written = pathlib.Path(__file__).parent.parent / "foreign"


def arrays() -> dict[str, Any]:
    big = np.arange(2.0**12, dtype=np.float32).reshape(64, 64)
    return {"net": {"weight": big, "bias": np.ones(3, np.float32)}, "step": np.int32(7)}


def _safetensors(path: pathlib.Path) -> None:
    ec.export_safetensors(path, arrays())


def _msgpack(path: pathlib.Path) -> None:
    path.write_bytes(flax.serialization.to_bytes(arrays()))


def _torch(path: pathlib.Path) -> None:
    net, step = arrays()["net"], arrays()["step"]
    storages = [net["weight"], net["bias"], step]
    of = [pickles.storage(str(i), x.size) for i, x in enumerate(storages[:2])]
    of.append(pickles.storage("2", 1, "IntStorage"))
    weight = pickles.tensor((64, 64), (64, 1), of=of[0])
    rows = pickles.text("weight") + weight, pickles.text("bias")
    below = b"}(" + b"".join(rows) + pickles.tensor((3,), of=of[1]) + b"u"
    pickle = pickles.state(net=below, step=pickles.tensor((), (), of=of[2]))
    pickles.write(path, pickle, {str(i): x.tobytes() for i, x in enumerate(storages)})


def _odd(path: pathlib.Path) -> None:
    """Of protocol 5: sets, keys of all kinds, names that clash, items met again."""
    again = [2**300, bytearray(b"x")]
    keys = {0: 1, "0": 2, (1, "a"): 3, 0.5: 4, None: 5}
    value = {"set": {1}, "frozen": frozenset([2]), "keys": keys, "again": again}
    value |= {"a.b": 1, "a": {"b": 2}, "more": collections.OrderedDict({1.5: again})}
    made = pickle.dumps(value, 5)[2:-1]
    pickles.write(path, pickles.state(w=pickles.tensor(), v=made))


def _zip(path: pathlib.Path) -> None:
    ec.tree_serialise_leaves(path, arrays(), durable=False)


def _npy(path: pathlib.Path) -> None:
    np.save(path, np.asfortranarray(arrays()["net"]["weight"]))


def _npz(path: pathlib.Path) -> None:
    net = arrays()["net"]
    np.savez(path, weight=net["weight"].T, bias=net["bias"], step=arrays()["step"])


def entry(keys: list[str]) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }


def _metadata(path: pathlib.Path, is_full: bool) -> None:
    names = ["net.weight", "net.bias", "step"]
    tree = {repr(tuple(n.split("."))): entry(n.split(".")) for n in names}
    value = {"tree_metadata": tree, "use_zarr3": True, "custom_metadata": {"a": 1}}
    value["store_array_data_equal_to_fill_value"] = is_full
    (path / "_METADATA").write_text(json.dumps(value))


_zstd = {"name": "zstd", "configuration": {"level": 1}}
_little = {"name": "bytes", "configuration": {"endian": "little"}}
_shards = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [8, 64],
        "codecs": [_little, _zstd],
        "index_codecs": [_little, {"name": "crc32c"}],
    },
}


def _write(kvstore: dict[str, Any], context: ts.Context) -> None:
    flat = {"net.weight": arrays()["net"]["weight"], "net.bias": np.ones(3, np.float32)}
    for name, x in {**flat, "step": np.int32(7)}.items():
        metadata: dict[str, Any] = {"codecs": [_little, _zstd]}
        if x.ndim == 2:
            grid = {"name": "regular", "configuration": {"chunk_shape": [32, 64]}}
            metadata = {"codecs": [_shards], "chunk_grid": grid}
        spec = {"driver": "zarr3", "kvstore": {**kvstore, "path": f"{name}/"}}
        options = {"dtype": x.dtype, "shape": x.shape, "create": True}
        store = ts.open({**spec, "metadata": metadata}, context=context, **options)
        store.result().write(x).result()


def _orbax(path: pathlib.Path) -> None:
    path.mkdir()
    context = ts.Context()
    memory = {"driver": "memory"}
    _write(memory, context)
    kv = ts.KvStore.open(memory, context=context).result()
    for key in kv.list().result():
        file = path / key.decode()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(kv.read(key).result().value)
    _metadata(path, True)


def _database(path: pathlib.Path) -> None:
    path.mkdir()
    base = {"driver": "file", "path": f"{path}/"}
    _write({"driver": "ocdbt", "base": base}, ts.Context())
    _metadata(path, False)


def _plain(path: pathlib.Path) -> None:
    """As `_database`, of nodes that are not compressed and have one file."""
    _database(path)
    kv = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    values = {key: kv.read(key).result().value for key in sorted(kv.list().result())}
    shutil.rmtree(path / "d")
    data = b"".join(values.values())
    lengths = list(map(len, values.values()))
    offsets = np.cumsum([0, *lengths[:-1]]).tolist()
    entries = _ocdbt.Entries(list(values), [0] * len(values), offsets, lengths)
    nodes, root = _ocdbt.tree(entries, ["data", "tree"], "tree", 0)
    (path / "data").write_bytes(data)
    (path / "tree").write_bytes(nodes)
    (path / "manifest.ocdbt").write_bytes(_ocdbt.manifest(root, "tree"))


def _v1(path: pathlib.Path) -> None:
    path.mkdir()
    _database(path / "state")
    (path / "orbax.checkpoint").touch()
    value = {"item_handlers": {}, "metrics": {}, "commit_timestamp_nsecs": 17}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(value))


def _eqx(path: pathlib.Path) -> None:
    with open(path, "wb") as f:
        f.write(b'{"width": 3}\n')
        eqx.tree_serialise_leaves(f, arrays())


def _sharded(path: pathlib.Path) -> None:
    path.mkdir()
    files = {}
    for number, tree in enumerate((arrays()["net"], {"step": arrays()["step"]})):
        file = f"model-0000{number}-of-00002.safetensors"
        ec.export_safetensors(path / file, tree)
        files |= dict.fromkeys(tree, file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _unpacked(file: str, below: str) -> Any:
    """What Orbax wrote, from a zip of it."""

    def make(path: pathlib.Path) -> None:
        with zipfile.ZipFile(_written / "orbax" / file) as archive:
            names = [x for x in archive.namelist() if x.startswith(f"{below}/")]
            for name in (x for x in names if not x.endswith("/")):
                to = path / name.removeprefix(f"{below}/")
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(archive.read(name))

    return make


def _copied(name: str) -> Any:
    copy = shutil.copytree if (_written / name).is_dir() else shutil.copy
    return lambda path: copy(_written / name, path)


# How a good one of each is made. What has a suffix is a file.
FOREIGN = {
    "f.safetensors": _safetensors,
    "f.msgpack": _msgpack,
    "f.pt": _torch,
    "f.zip": _zip,
    "f.npy": _npy,
    "f.npz": _npz,
    "orbax": _orbax,
    "orbax-ocdbt": _database,
    "orbax-plain": _plain,
    "orbax-mixed": _unpacked("0.4.8.zip", "mixed"),
    "orbax-early": _unpacked("0.1.8.zip", "mixed-files"),
    "levanter": _copied("levanter-1.2.dev1644/step-7"),
    "levanter-ocdbt": _copied("marin-levanter-0.2.20/step-7"),
    "eformer": _copied("eformer-0.0.101/tree"),
    "f.eqx": _eqx,
    "v1": _v1,
    "sharded": _sharded,
    "training.pt": _copied("torch/training.pt"),
    "odd.pt": _odd,
    "old.pth": lambda path: path.write_bytes(pickles.old(3)),
    "torch-sharded": _copied("torch/sharded"),
    "functions": functions.make,
}


def like_of(kind: str) -> Any:
    """The tree whose leaves the records of a file are of, which has no names."""
    return arrays() if kind.endswith(".eqx") else None


def mutate_foreign(r: random.Random, path: pathlib.Path) -> tuple[str, bool]:
    """Mutates a checkpoint of another format. Returns what it did, and whether what is
    read can be nothing else than before: the format has a checksum of what changed."""
    from .mutate import change_file

    if path.name == "functions":
        return _function(r, path), False
    files = sorted(f for f in path.rglob("*") if f.is_file()) or [path]
    # Data has the most files, and headers have the most fields.
    heads = [f for f in files if not f.name[0].isdigit()] or files
    file = r.choice(heads if r.random() < 0.7 else files)
    name = str(file.relative_to(path.parent))
    if len(files) > 1 and r.random() < 0.1:
        return change_file(r, file, files), False
    data = file.read_bytes()
    found = [x.start() for x in re.finditer(rb"\x0c\xdb(\x3a\x2a|\x20\xde)", data)]
    if found and r.random() < 0.15:
        start = r.choice(found)
        size = int.from_bytes(data[start + 4 : start + 12], "little")
        if 18 <= size <= len(data) - start:
            at = start + r.randrange(size)
            file.write_bytes(
                data[:at] + bytes([data[at] ^ 1 << r.randrange(8)]) + data[at + 1 :]
            )
            return f"a bit of a node in {name}", True
    how, made = _mutated(r, file, data)
    file.write_bytes(made)
    return f"{how} of {name}", False


def _mutated(r: random.Random, file: pathlib.Path, data: bytes) -> tuple[str, bytes]:
    """What is changed of a file, and its bytes then."""
    suffix = file.suffix
    if r.random() < 0.1:
        return "bytes", _bytes(r, data)
    if data[:1] == b"{" and b"NUMPY" not in data:
        return "json", _json(r, data)
    if suffix == ".safetensors":
        size = struct.unpack_from("<Q", data)[0]
        head = _json(r, data[8 : 8 + size])
        return "header", struct.pack("<Q", len(head)) + head + data[8 + size :]
    if suffix in (".pt", ".bin") and r.random() < 0.85:
        with zipfile.ZipFile(file) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            pickle = archive.read(name)
        for _ in range(r.choice((1, 1, 1, 2))):
            pickle = fields.in_pickle(r, pickle)
        return "pickle", fields.rezipped(data, name, pickle)
    if suffix == ".pth" and r.random() < 0.85:
        return "pickle", _old_torch(r, data)
    if suffix in (".npy", ".npz", ".eqx") and r.random() < 0.7:
        return "array header", _header(r, data)
    if suffix in (".zip", ".npz", ".pt", ".bin"):
        return "zip", fields.in_zip(r, data)
    if suffix == ".msgpack" or file.name == "checkpoint":
        return "msgpack", fields.in_msgpack(r, data)
    if file.name == "tree" and r.random() < 0.7:
        return "entries", _entries(r, file)
    if b"\x0c\xdb" in data:
        return "nodes", _nodes(r, data)
    from .mutate import change_head, head_of

    found = [x.start() for x in head_of.finditer(data)]
    if found and r.random() < 0.8:
        change_head(r, file, r.choice(found))
        return "head of a chunk", file.read_bytes()
    return "bytes", _bytes(r, data)


def _old_torch(r: random.Random, data: bytes) -> bytes:
    """Of the pickles that an old file begins with, one is changed."""
    ends = [0]
    for _ in range(5):
        (*_, (_, _, last)) = pickletools.genops(data[ends[-1] :])
        ends.append(ends[-1] + last + 1)
    parts = [data[i:j] for i, j in it.pairwise(ends)]
    place = r.choice((0, 1, 2, 3, 3, 3, 3, 4))
    parts[place] = fields.in_pickle(r, parts[place])
    return b"".join(parts) + data[ends[-1] :]


def _entries(r: random.Random, file: pathlib.Path) -> bytes:
    """A tree of the entries of a database, one of them changed; and its manifest."""
    database = Database(_root.resolve(file.parent), 2**20)
    entries = fields.in_entries(r, database.entries)
    names = [*database.files, "tree"]
    if r.random() < 0.2:
        names[r.randrange(len(names))] = str(fields.other(r, names[0]))
    try:
        nodes, top = _ocdbt.tree(entries, names, "tree", 0)
    except (ValueError, IndexError, UnicodeError, OverflowError):
        return b""
    (file.parent / "manifest.ocdbt").write_bytes(_ocdbt.manifest(top, "tree"))
    return nodes


def _function(r: random.Random, path: pathlib.Path) -> str:
    """Changes what the index says of a function, or its bytes, with right digests."""
    held = functions.Held(path)
    row = r.choice(list(held.index["functions"].values()))
    if r.random() < 0.5:
        fields.in_tree(r, row)
        held.write()
        return "the index of a function"
    data = held.file(row).read_bytes()
    held.put(row, _bytes(r, data))
    held.write()
    return "the bytes of a function"


def _bytes(r: random.Random, data: bytes) -> bytes:
    from .mutate import change_bytes

    return change_bytes(r, data)


def _json(r: random.Random, data: bytes) -> bytes:
    from .mutate import change_value

    if r.random() < 0.2:
        return _bytes(r, data)
    try:
        value = json.loads(data)
    except ValueError:  # Data that begins like it.
        return _bytes(r, data)
    for _ in range(r.choice((1, 1, 2))):
        change_value(r, value)
    made = json.dumps(value)
    if r.random() < 0.05 and (names := re.findall(r'"[^"]*": ', made)):
        old, new = r.choice(names), r.choice(names)
        made = made.replace(old, new)  # A key twice.
    return fields.deepened(made.encode())


def _header(r: random.Random, data: bytes) -> bytes:
    """Changes the header of one of NumPy's arrays, which stays as long."""
    at = r.choice([x.start() for x in re.finditer(b"\x93NUMPY", data)]) + 10
    stop = data.index(b"\n", at)
    text = bytearray(data[at:stop].rstrip())
    for _ in range(r.choice((1, 1, 2))):
        found = list(re.finditer(rb"[0-9]+|'[^']*'|True|False|[(){}:, ]", text))
        one, other = r.choice(found), r.choice(found)
        many = r.choice((b"1", b"0", b" ", b",", b"1,")) * r.choice((1, 3, 40))
        new = r.choice((other[0], many, b"", b"%d" % 2 ** r.randrange(70), b">i2"))
        text[one.start() : one.end()] = new
    return data[:at] + bytes(text).ljust(stop - at)[: stop - at] + data[stop:]


def _nodes(r: random.Random, data: bytes) -> bytes:
    """Changes the manifest, or a node, and makes its length and checksum right."""
    out, at = b"", 0
    while at < len(data):
        found = data.find(b"\x0c\xdb", at)
        if found < 0 or found + 18 > len(data):
            break
        size = int.from_bytes(data[found + 4 : found + 12], "little")
        if not 18 <= size <= len(data) - found:
            out, at = out + data[at : found + 2], found + 2
            continue
        node = data[found : found + size]
        if r.random() < 0.7:
            node = _node(r, node)
        out, at = out + data[at:found] + node, found + size
    return out + data[at:]


def _node(r: random.Random, node: bytes) -> bytes:
    body = bytearray(node[12:-4])
    if r.random() < 0.3:
        body = bytearray(_bytes(r, bytes(body)))
    else:
        # Of the same length, so that all places stay.
        for _ in range(r.randint(1, 4)):
            at = r.randrange(len(body))
            body[at] = r.choice(
                (0, 1, 0x7F, 0x80, 0xFF, body[at] ^ 1, r.randrange(256))
            )
    head = node[:4] + struct.pack("<Q", len(body) + 16)
    data = head + bytes(body)
    return data + struct.pack("<I", google_crc32c.value(data))
