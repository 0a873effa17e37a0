import base64
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
    data = (path / "eqx_ckpt.json").read_bytes()
    body, tail = data[:-45], data[-45:]
    digest = xxhash.xxh3_128_hexdigest(body)
    assert tail == f',"digest":"{digest}"}}'.encode(), "damaged"
    index = json.loads(data)
    assert index["format"] == "eqx_ckpt" and index["version"] == 1
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


def read_columns(path):
    """The names of a checkpoint with columns, and where its chunks lie: rows of a file,
    a leaf, a chunk, and the bytes from where to where. All of them are verified."""
    index = json.loads((path / "eqx_ckpt.json").read_bytes())
    columns, save = index["columns"], path / "d" / index["save"]

    def numbers(name):
        return np.frombuffer(base64.b64decode(columns[name]), "<u4").tolist()

    names = columns["names"].split(" ")
    assert [names[i] for i in numbers("order")] == sorted(names)
    templates = [index["templates"][n] for n in numbers("template")]
    patterns, pairs = [[]], iter(numbers("patterns"))
    for count, lane in zip(pairs, pairs):
        patterns[-1].append((count, lane))
        patterns += [] if count else [[]]
    pattern = numbers("pattern") or [0] * len(names)
    begins = {(row[1], row[2]): tuple(row[3:]) for row in columns["begins"]}
    lanes, runs = {}, {}
    for leaf, t in enumerate(templates):
        at, total = 0, math.prod(-(-n // c) for n, c in zip(t[3], t[5]))
        for count, lane in patterns[pattern[leaf]]:
            stop = at + count if count else total
            cuts = sorted(c for x, c in begins if x == leaf and at < c < stop)
            cuts = [at, *cuts, stop]
            if leaf not in dict(index["aliases"]):
                own = [(leaf, a, b) for a, b in zip(cuts, cuts[1:])]
                lanes.setdefault(lane, []).extend(own)
            at = stop
    for own in lanes.values():
        place = ()
        for leaf, first, stop in own:
            place = begins.get((leaf, first)) or place
            runs.setdefault(place, []).append((leaf, first, stop))
    sizes, out = iter(numbers("sizes")), []
    for (file, at), own in sorted(runs.items()):
        for leaf, first, stop in own:
            at = -(-at // 64) * 64
            for chunk in range(first, stop):
                t = templates[leaf]
                size = math.prod(t[5]) * ts.dtype(t[4]).numpy_dtype.itemsize
                size = next(sizes) if t[8] else size
                out.append((file, leaf, chunk, at, at + size))
                at += size
    digests, start = (save / "digests").read_bytes(), 0
    for file, good in enumerate(index["files"]):
        data = (save / good).read_bytes()
        rows = [row for row in out if row[0] == file]
        page = digests[start : start + 16 * len(rows)]
        start += len(page)
        good = index["digests"][32 * file : 32 * file + 32]
        assert xxhash.xxh3_128_hexdigest(page) == good
        for number, (_, leaf, chunk, a, b) in enumerate(rows):
            t = templates[leaf]
            if t[8]:
                # Blosc says itself how long it is.
                assert int.from_bytes(data[a + 12 : a + 16], "little") == b - a
                continue
            array = np.frombuffer(data[a:b], ts.dtype(t[4]).numpy_dtype).reshape(t[5])
            counts = [-(-n // c) for n, c in zip(t[3], t[5])]
            at = np.unravel_index(chunk, counts) if counts else ()
            kept = tuple(slice(n - i * c) for n, c, i in zip(t[3], t[5], at))
            found = np.ascontiguousarray(array[kept]).tobytes()
            row = page[16 * number : 16 * number + 16]
            assert xxhash.xxh3_128_digest(found) == row, names[leaf]
    assert start == len(digests)
    return names, out


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
    assert index["splits"] == []
    for name, file, offset in zip(index["names"], index["file"], index["offset"]):
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
