"""Checkpoints of other formats, and random mutations of them.

Most of what is made has right lengths and checksums, and gets past the first check.
"""

import json
import pathlib
import random
import re
import shutil
import struct
import zipfile
from typing import Any

import flax.serialization
import google_crc32c
import numpy as np
import tensorstore as ts

import eqx_ckpt as ec
from eqx_ckpt._format import _ocdbt

from . import pickles


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


def _copied(name: str) -> Any:
    return lambda path: shutil.copytree(_written / name, path)


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
    "levanter": _copied("levanter-1.2.dev1644/step-7"),
    "levanter-ocdbt": _copied("marin-levanter-0.2.20/step-7"),
    "eformer": _copied("eformer-0.0.101/tree"),
}


def mutate_foreign(r: random.Random, path: pathlib.Path) -> str:
    """Mutates a checkpoint of another format. Returns what it did."""
    from .mutate import change_file

    files = sorted(f for f in path.rglob("*") if f.is_file()) or [path]
    file = r.choice(files)
    name = str(file.relative_to(path.parent))
    if len(files) > 1 and r.random() < 0.15:
        return change_file(r, file, files)
    data = file.read_bytes()
    if data[:1] == b"{":
        file.write_bytes(_json(r, data))
    elif file.suffix == ".safetensors":
        size = struct.unpack_from("<Q", data)[0]
        head = _json(r, data[8 : 8 + size])
        file.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
    elif file.suffix in (".npy", ".npz") and r.random() < 0.6:
        file.write_bytes(_header(r, data))
    elif file.suffix == ".pt" and r.random() < 0.8:
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        pickle = _bytes(r, members.pop("a/data.pkl"))
        storages = {name[len("a/data/") :]: x for name, x in members.items()}
        pickles.write(file, pickle, storages)
    elif file.suffix in (".zip", ".npz", ".pt"):
        at = data.index(b"PK\1\2") if r.random() < 0.8 else 0
        file.write_bytes(data[:at] + _bytes(r, data[at:]))
    elif b"\x0c\xdb" in data and r.random() < 0.9:
        file.write_bytes(_nodes(r, data))
    else:
        file.write_bytes(_bytes(r, data))
    return f"content of {name}"


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
    return json.dumps(value).encode()


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
