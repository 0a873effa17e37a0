import json

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import tensorstore as ts
import xxhash

import eqx_ckpt as ec


# ---- A reader from FORMAT.md alone: no code of the package.
def read_checkpoint(path):
    data = (path / "eqx_ckpt.json").read_bytes()
    body, tail = data[:-45], data[-45:]
    digest = xxhash.xxh3_128_hexdigest(body)
    assert tail == f',"digest":"{digest}"}}'.encode(), "damaged"
    index = json.loads(data)
    assert index["format"] == "eqx_ckpt" and index["version"] in (1, 2)
    ocdbt = index["layout"] == "ocdbt"
    save = path / "d" / index["save"]
    digests = (save / "digests" if ocdbt else path / "eqx_ckpt.digests").read_bytes()
    assert xxhash.xxh3_128_hexdigest(digests) == index["digests"], "damaged"
    aliases = dict(index["aliases"])
    out, rows = {}, iter(range(0, len(digests), 16))
    for place, (name, number) in enumerate(zip(index["names"], index["template"])):
        if place in aliases:
            out[name] = out[index["names"][aliases[place]]]
            continue
        keys, kind, dtype, shape, stored, chunk, *_ = index["templates"][number]
        if ocdbt:
            base = {"driver": "file", "path": f"{save}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": name + "/"}
        else:
            long = len(name) > 200
            end = "%~" + xxhash.xxh3_128_hexdigest(name.encode())
            directory = name[:160] + end if long else name
            kvstore = {"driver": "file", "path": f"{path}/{directory}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        array = ts.open(spec).result().read().result()
        assert list(array.shape) == shape and array.dtype.name == stored
        counts = [-(-n // c) for n, c in zip(shape, chunk)]
        for at in np.ndindex(*counts):
            region = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk))
            data = np.ascontiguousarray(array[region]).tobytes()
            for start in range(0, max(1, len(data)), 4 * 2**20):
                row = next(rows)
                digest = xxhash.xxh3_128_digest(data[start : start + 4 * 2**20])
                assert digest == digests[row : row + 16], f"{name} is damaged"
        if kind in ("str", "bytes"):
            data = array.tobytes()
            out[name] = data.decode() if kind == "str" else data
        elif dtype == "int":
            out[name] = int.from_bytes(array.tobytes(), "little", signed=True)
        else:
            out[name] = array if kind in ("jax", "numpy", "key") else array.item()
    return index["metadata"], out


# ----


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_reader_from_the_page(tmp_path, layout):
    shared = jnp.arange(5.0)
    tree = {
        "a.b": [shared, shared],
        "big": np.arange(6_000_000, dtype=np.float64).reshape(3, 1000, 2000),
        "half": jnp.ones((3, 4), jnp.bfloat16),
        "empty": np.zeros((0, 3)),
        "long" * 60: 2.5,
        "n": 2**100,
        "s": "text",
        "key": jr.key(3),
    }
    ec.tree_serialise_leaves(
        tmp_path / "a", tree, filter_spec=True, metadata=[1, None], layout=layout
    )
    metadata, leaves = read_checkpoint(tmp_path / "a")
    assert metadata == [1, None]
    assert leaves["a%2Eb.0"].tolist() == leaves["a%2Eb.1"].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(leaves["big"], tree["big"])
    assert np.array_equal(leaves["half"], tree["half"])
    assert leaves["empty"].shape == (0, 3)
    assert leaves["long" * 60] == 2.5 and leaves["n"] == 2**100
    assert leaves["s"] == "text"
    assert np.array_equal(leaves["key"], jr.key_data(tree["key"]))


def test_the_index_alone_leads_to_every_byte(tmp_path):
    x = np.random.default_rng(0).standard_normal((5000, 777))
    tree = {"small": np.arange(7), "x": x, "last": np.arange(3)}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    index = json.loads((tmp_path / "a" / "eqx_ckpt.json").read_bytes())
    assert index["splits"] == []
    for name, file, offset in zip(index["names"], index["file"], index["offset"]):
        data = tmp_path / "a" / "d" / index["save"] / index["files"][file]
        found = np.fromfile(data, tree[name].dtype, tree[name].size, offset=offset)
        assert np.array_equal(found, tree[name].ravel())
        assert offset % 64 == 0


def test_a_newer_version_is_refused(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", jnp.ones(3))
    file = tmp_path / "a" / "eqx_ckpt.json"
    body = file.read_bytes()[:-45]
    body = body.replace(b'"version":1', b'"version":3')
    body = body.replace(b'"reader":"0.1.0"', b'"reader":"9.9"')
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    file.write_bytes(body + b',"digest":"' + digest + b'"}')
    install = r"written in format 3, and this release.*pip install 'eqx_ckpt>=9.9'"
    with pytest.raises(ValueError, match=install):
        ec.open(tmp_path / "a")
    with pytest.raises(ValueError, match=install):
        ec.tree_serialise_leaves(tmp_path / "a", jnp.ones(3))
