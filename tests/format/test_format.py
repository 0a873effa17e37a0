import json
import math

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import tensorstore as ts
import xxhash

import eqx_ckpt as ec


# ---- A reader from FORMAT.md alone: no code of the package.
def read_checkpoint(path):
    index = json.loads(data := (path / "eqx_ckpt.json").read_bytes())
    assert index["digest"] == xxhash.xxh3_128_hexdigest(data[:-45]), "damaged"
    assert index["format"] == "eqx_ckpt" and index["version"] == 1
    ocdbt, save = index["layout"] == "ocdbt", path / "d" / index["save"]
    out, arrays = {}, []
    for name, number in zip(index["names"], index["template"]):
        _, kind, dtype, shape, stored, *_ = index["templates"][number]
        end = "%~" + xxhash.xxh3_128_hexdigest(name.encode())
        directory = name[:160] + end if len(name) > 200 else name
        kvstore = {"driver": "file", "path": f"{path}/{directory}/"}
        if ocdbt:
            kvstore = {"driver": "ocdbt", "base": f"file://{save}/", "path": f"{name}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        arrays.append(array := ts.open(spec).result().read().result())
        assert list(array.shape) == shape and array.dtype.name == stored
        if kind in ("str", "bytes"):
            out[name] = array.tobytes().decode() if kind == "str" else array.tobytes()
        elif dtype == "int":
            out[name] = int.from_bytes(array.tobytes(), "little", signed=True)
        else:
            out[name] = array if kind in ("jax", "numpy", "key") else array.item()
    digests = (save / "digests" if ocdbt else path / "eqx_ckpt.digests").read_bytes()
    for number, rows in enumerate(chunks_of(index)):
        page, good = b"", index["digests"][32 * number : 32 * number + 32]
        for leaf, region, _, _ in rows:
            data = np.ascontiguousarray(arrays[leaf][region]).tobytes()
            for start in range(0, max(1, len(data)), 4 * 2**20):
                page += xxhash.xxh3_128_digest(data[start : start + 4 * 2**20])
        assert xxhash.xxh3_128_hexdigest(page) == good and digests.startswith(page)
        digests = digests[len(page) :]
    return index["metadata"], out


def chunks_of(index):
    """Rows `(leaf, region, offset, bytes)` of the chunks in each file."""
    ends = [i + 1 for i, (count, _) in enumerate(index["patterns"]) if not count]
    patterns = [index["patterns"][i:j] for i, j in zip([0, *ends], ends)] or [[[0, 0]]]
    begins = {(leaf, chunk): tuple(at) for _, leaf, chunk, *at in index["begins"]}
    aliases, sizes, lanes, runs = dict(index["aliases"]), iter(index["sizes"]), {}, {}
    for leaf, number in enumerate(index["template"]):
        _, _, _, shape, stored, chunk, *_, codec = index["templates"][number]
        counts, first = [-(-n // c) for n, c in zip(shape, chunk)], 0
        size = math.prod(chunk) * ts.dtype(stored).numpy_dtype.itemsize
        for count, lane in patterns[(index["pattern"] or [0] * (leaf + 1))[leaf]]:
            stop = first + count if count else math.prod(counts)
            for i in range(first, max(stop, first + 1)) if leaf not in aliases else ():
                lanes[lane] = begins.get((leaf, i)) or lanes.get(lane, (0, 0))
                run = runs.setdefault(lanes[lane], [])
                if i < stop:
                    at = np.unravel_index(i, counts) if counts else ()
                    region = tuple(slice(k * c, k * c + c) for k, c in zip(at, chunk))
                    run.append((leaf, region, None if codec else size, i == first))
            first = stop
    out = [[] for _ in index["files"] or [0]]
    for (file, offset), run in sorted(runs.items()):
        for leaf, region, size, is_first in run:
            offset = -(-offset // 64) * 64 if is_first else offset
            out[file].append((leaf, region, offset, size or next(sizes, 0)))
            offset += out[file][-1][-1]
    return out


def read_tree(path):
    """What each node and leaf is, and its static values, by names."""
    index = json.loads((path / "eqx_ckpt.json").read_bytes())
    tree, names, done, out = index["tree"], index["names"], 0, {}
    known = {"default": ["default_factory"], "partial": ["func"], "index": ["marker"]}
    known |= dict.fromkeys(("value", "left", "static"), [""]) | {"state": ["markers"]}

    def walk(row, name):
        nonlocal done
        number, *rest = tree["rows"][row]
        kind = tree["kinds"][number]
        how, _, _, parts, data, *_ = [*kind, *["", "", 0, [], []][len(kind) - 1 :]]
        data = data or known.get(how, [])
        out[name] = how, {x: tree["values"][n] for x, n in zip(data, rest)}
        if how == "leaf":
            assert names[done] == (name or "%root")
            done += 1
        children = []
        for x in rest[len(data) :]:
            children += [x] if x >= 0 else children[-1:] * -x
        has_parts = type(parts) is list
        assert len(children) == (len(parts) if has_parts else parts)
        for place, child in enumerate(children):
            part = parts[place] if has_parts else str(place)
            if how in ("dict", "ordered", "default") and not has_parts:
                part = names[done][len(name) + 1 if name else 0 :].partition(".")[0]
            walk(child, f"{name}.{part}" if name else part)

    walk(len(tree["rows"]) - 1, "")
    assert done == len(names)
    return out


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
    rows = [(file, *row) for file, rows in enumerate(chunks_of(index)) for row in rows]
    places = {leaf: (file, at) for file, leaf, _, at, _ in reversed(rows)}
    for leaf, name in enumerate(index["names"]):
        file, offset = places[leaf]
        data = tmp_path / "a" / "d" / index["save"] / index["files"][file]
        found = np.fromfile(data, tree[name].dtype, tree[name].size, offset=offset)
        assert np.array_equal(found, tree[name].ravel())
        assert offset % 64 == 0


def test_the_tree_by_the_page(tmp_path):
    norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
    tree = {"norms": [norm, norm], "empty": None, "n": {4: 1.5, 5: {"a.b": 2}}}
    tree |= {"state": eqx.nn.State(norm), "rate": {"f": jnp.tanh, "x": 3}}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    found = read_tree(tmp_path / "a")
    assert found[""] == ("dict", {}) and found["empty"] == ("none", {})
    assert found["n.5.a%2Eb"] == ("leaf", {}) == found["n.4"]
    how, values = found["norms.1"]
    assert how == "module" and values["input_size"] == 3 and values["mode"] == "ema"
    markers = [found[f"norms.0.{x}"][1]["marker"]["markers"] for x in _INDICES]
    assert found["state"] == ("state", {"markers": {"markers": sum(markers, [])}})
    how, values = found["rate.f"]
    assert how == "value" and list(values) == [""]


_INDICES = "ema_first_time_index", "ema_state_index"


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
