"""Checkpoints with zstd, as the first release wrote them and no later one does."""

import itertools
import json
import pathlib

import tensorstore as ts
import xxhash


_zstd = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}


def with_zstd(path: pathlib.Path, name: str) -> None:
    """Compresses a leaf of a checkpoint that is not compressed. Its chunks have no
    padding and are in one file."""
    file = path / "eqx_ckpt.json"
    index = json.loads(file.read_bytes()[:-45] + b"}")
    place = index["names"].index(name)
    template = [*index["templates"][index["template"][place]][:-1], "zstd"]
    index["template"][place] = len(index["templates"])
    index["templates"].append(template)
    in_files = index["layout"] == "ocdbt"
    base = f"file://{path}/|ocdbt:{name}/" if in_files else f"file://{path}/{name}/"
    plain = ts.open(f"{base}|zarr3:").result().read().result()
    metadata = json.loads(ts.KvStore.open(base).result()["zarr.json"])
    metadata["codecs"].append(_zstd)
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    packed = ts.open(spec, create=True, context=ts.Context()).result()
    packed.write(plain).result()
    counts = [range(-(-n // c)) for n, c in zip(template[3], template[5])]
    keys = ["/".join(map(str, ("c", *at))) for at in itertools.product(*counts)]
    values = [packed.kvstore[key] for key in keys]
    if in_files:
        index["sizes"] = [[place, [len(value) for value in values]]]
        data = path / "d" / index["save"] / str(index["file"][place])
        content = bytearray(data.read_bytes())
        start = index["offset"][place]
        body = b"".join(values).ljust(plain.nbytes, b"\0")
        content[start : start + len(body)] = body
        data.write_bytes(content)
    else:
        for key, value in zip(keys, values):
            (path / name / key).write_bytes(value)
        text = json.dumps(metadata, separators=(",", ":"))
        (path / name / "zarr.json").write_text(text + " " * (-len(text) % 64))
    body = json.dumps(index, separators=(",", ":")).encode()[:-1]
    digest = xxhash.xxh3_128_hexdigest(body)
    file.write_bytes(body + f',"digest":"{digest}"}}'.encode())
