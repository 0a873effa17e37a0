"""What others have saved, in object stores and on servers of files. What is counted
are the requests that reach a proxy before the server."""

import itertools
import json
import pathlib

import equinox as eqx
import flax.serialization as fs
import numpy as np
import pytest
import safetensors.numpy as sn
from attacks import pickles
from support import servers
from support.helpers import files_of, new_orbax, run_program
from support.stores import StoredFiles

import eqx_ckpt as ec


pytestmark = new_orbax

_numbers = itertools.count()


def _tree():
    """4 MiB, of which `w` is most."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(1024, 1000)).astype(np.float32),
        "layers": {str(i): np.full((32, 64), i, np.float32) for i in range(10)},
        "b": np.arange(3, dtype=np.int8),
    }


def _flat(tree):
    layers = {f"layers.{i}": x for i, x in tree["layers"].items()}
    return {"w": tree["w"], **layers, "b": tree["b"]}


def _torch(path, flat):
    """As PyTorch writes it, but for where bytes lie: after each, its size follows."""
    kinds = {"float32": "FloatStorage", "int8": "CharStorage"}
    tensors = {}
    for number, (name, x) in enumerate(flat.items()):
        of = pickles.storage(str(number), x.size, kinds[x.dtype.name])
        strides = tuple(s // x.itemsize for s in x.strides)
        tensors[name] = pickles.tensor(x.shape, strides, of=of)
    storages = {str(i): x.tobytes() for i, x in enumerate(flat.values())}
    pickles.write(path, pickles.state(**tensors), storages)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with `_tree()` in each format, by its own library."""
    base = tmp_path_factory.mktemp("others")
    tree = _tree()
    sn.save_file(_flat(tree), base / "one.safetensors", {"format": "pt"})
    (base / "many").mkdir()
    of = {}
    for number in range(3):
        some = dict(list(_flat(tree).items())[number::3])
        name = f"model-{number}.safetensors"
        sn.save_file(some, base / "many" / name)
        of.update(dict.fromkeys(some, name))
    index = json.dumps({"weight_map": of})
    (base / "many" / "model.safetensors.index.json").write_text(index)
    eqx.tree_serialise_leaves(base / "tree.eqx", tree)
    (base / "tree.msgpack").write_bytes(fs.to_bytes(tree))
    np.savez(base / "tree.npz", **_flat(tree))
    _torch(base / "tree.pt", _flat(tree))
    ec.tree_serialise_leaves(base / "tree.zip", tree)
    run_program("write_others_by_orbax", base, pathlib.Path(__file__).parent)
    return base


@pytest.fixture(scope="module", params=["s3", "http"])
def stored(request, base):
    """A proxy, and the URL of that directory behind it."""
    if request.param == "http":
        with servers.static(base) as port, servers.Proxy(port) as proxy:
            yield proxy, proxy.url
        return
    proxy = request.getfixturevalue("s3")
    url = f"s3://bucket/others/{next(_numbers)}"
    StoredFiles(url).update(files_of(base))
    yield proxy, url


def _holds(ckpt, expected=None):
    tree = ec.materialise(ckpt.tree)
    expected = expected or _tree()
    layers = tree["layers"]
    if isinstance(layers, dict):
        layers = [layers[str(i)] for i in range(10)]
    for i, x in enumerate(layers):
        assert np.array_equal(x, expected["layers"][str(i)])
    for name in ("w", "b"):
        assert np.array_equal(tree[name], expected[name])
        assert tree[name].dtype == expected[name].dtype


def _got(proxy):
    return sum(r.got for r in proxy.requests)


# What to open, the most requests and bytes to open it, and the most requests to read
# an array of 8 KB.
NAMES = {
    # Of a `.safetensors` file, its end and what comes after it are asked for as well.
    # Of a directory a list is begun, as it may be that of a run.
    "one.safetensors": (10, 2_500, 2),
    "many": (46, 11_500, 4),
    # One more since a server is asked whether it knows ranges.
    "many/model.safetensors.index.json": (27, 4_500, 4),
    "tree.eqx": (17, 50_000, 2),
    "tree.msgpack": (19, 50_000, 2),
    "tree.npz": (24, 6_500, 2),
    "tree.pt": (12, 4_500, 2),
    "tree.zip": (10, 4_000, 3),
    "orbax-False": (40, 22_500, 2),
    "orbax-True": (34, 14_000, 4),
    "orbax-v1": (58, 21_500, 4),
    "orbax-run/5": (58, 21_500, 4),
}


@pytest.mark.parametrize("name", NAMES)
def test_reads_what_is_asked_for(stored, base, name):
    proxy, url = stored
    opening, head, reading = NAMES[name]
    # On a busy machine Orbax writes its data in more than six files. A list has some
    # 260 bytes for each.
    head += 300 * max(0, len(list((base / name).rglob("d/*"))) - 6)
    like = _tree() if name.endswith(".eqx") else None
    proxy.requests.clear()
    ckpt = ec.open(f"{url}/{name}", like=like)
    assert len(proxy.requests) <= opening and _got(proxy) <= head
    proxy.requests.clear()
    assert (ckpt["layers.7"].read() == 7).all()
    assert len(proxy.requests) <= reading and _got(proxy) <= 8_500
    proxy.requests.clear()
    part = ckpt["w"][700, 5:9]
    assert np.array_equal(part.read(), _tree()["w"][700, 5:9])
    # What is in chunks, or is verified, is read by chunks and by blocks of 4 MiB.
    is_whole = "orbax" in name or name == "tree.zip"
    assert _got(proxy) <= (4_100_000 if is_whole else 100)
    if name == "tree.zip":
        proxy.requests.clear()
        part.read(verify=False)
        assert _got(proxy) <= 100
    _holds(ckpt)


def test_elements_that_lie_apart(tmp_path):
    x = np.asfortranarray(np.arange(60.0).reshape(3, 4, 5))
    np.savez(tmp_path / "a.npz", x=x)
    with servers.static(tmp_path) as port:
        lazy = ec.open(f"http://localhost:{port}/a.npz")["x"]
        assert np.array_equal(lazy.read(), x)
        assert np.array_equal(lazy[::-2, 1:, 3].read(), x[::-2, 1:, 3])
        assert np.array_equal(lazy.store[1].read().result(), x[1])
        ec.convert(f"http://localhost:{port}/a.npz", tmp_path / "c")
    assert np.array_equal(ec.open(tmp_path / "c")["x"].read(), x)


def test_round_trips(stored):
    """Files and probes are asked for side by side."""
    proxy, url = stored
    with proxy.used():
        trips = servers.round_trips(proxy, 19, lambda: ec.open(f"{url}/many"))
        assert trips < 20 < len(proxy.requests)


def test_convert(base, s3, tmp_path):
    """From a store, into one, and between two places in one."""
    url = f"s3://bucket/converted/{next(_numbers)}"
    tree = _tree()
    ec.convert(base / "one.safetensors", f"{url}/ours", metadata={"from": "there"})
    assert ec.open(f"{url}/ours").metadata == {"from": "there"}
    ec.convert(f"{url}/ours", f"{url}/back.safetensors", metadata={"format": "pt"})
    ec.convert(f"{url}/back.safetensors", tmp_path / "back.safetensors")
    expected = (base / "one.safetensors").read_bytes()
    assert (tmp_path / "back.safetensors").read_bytes() == expected
    ec.convert(base / "tree.eqx", f"{url}/file.zip", like=tree, metadata={})
    ec.convert(f"{url}/file.zip", tmp_path / "local")
    for path in (f"{url}/ours", f"{url}/file.zip", tmp_path / "local"):
        _holds(ec.open(path))
        assert ec.verify(path) == []


@pytest.mark.parametrize("suffix", ["", ".zip", ".safetensors"])
def test_parts_of_a_copy_are_read_together(s3, tmp_path, suffix):
    """As in a load: the index, and then digests and all leaves."""
    url = f"s3://bucket/copied/{next(_numbers)}"
    tree = {f"x{i}": np.full((2**9, 2**9), i, np.float32) for i in range(12)}
    tree["large"] = np.arange(6 * 2**20, dtype=np.float32).reshape(-1, 2**10)
    ec.tree_serialise_leaves(url, tree)
    copies = (tmp_path / f"{number}{suffix}" for number in itertools.count())
    copy = lambda: ec.convert(url, next(copies), metadata={}, overwrite=False)
    with s3.used():
        assert servers.round_trips(s3, 2, copy) == 2
    copied = ec.open(tmp_path / f"0{suffix}")
    assert all(np.array_equal(copied[name].read(), tree[name]) for name in tree)


def test_export_to_a_store(s3):
    url = f"s3://bucket/exported/{next(_numbers)}"
    path = f"{url}/model.safetensors"
    tree = _flat(_tree())
    s3.requests.clear()
    ec.export_safetensors(path, tree, metadata={"format": "pt"})
    assert s3.count("PUT") == 1
    loaded = sn.load(StoredFiles(url)["model.safetensors"])
    assert all(np.array_equal(loaded[name], tree[name]) for name in tree)
    # At once, or not at all; and nothing else is replaced.
    s3.fault = lambda method, _: 403 if method == "PUT" else None
    try:
        with pytest.raises(PermissionError):
            ec.export_safetensors(path, {"w": tree["w"] + 1})
    finally:
        s3.fault = lambda *_: None
    assert np.array_equal(ec.open(path)["w"].read(), tree["w"])
    with pytest.raises(FileExistsError, match="overwrite=False"):
        ec.export_safetensors(path, tree, overwrite=False)
    ckpt = ec.open(path)
    ec.export_safetensors(path, {"w": tree["w"] + 1})
    assert np.array_equal(ec.open(path)["w"].read(), tree["w"] + 1)
    with pytest.raises(RuntimeError, match="replaced"):
        ckpt["w"].read()
    ec.tree_serialise_leaves(f"{url}/ours.zip", tree)
    ec.tree_serialise_leaves(f"{url}/ours", tree)
    for other in ("ours.zip", "ours"):
        with pytest.raises(FileExistsError, match="no `.safetensors` file|a directory"):
            ec.export_safetensors(f"{url}/{other}", tree)
        with pytest.raises(ValueError, match="export_safetensors"):
            ec.tree_serialise_leaves(path, tree)
        assert ec.verify(f"{url}/{other}") == []


def test_saves_do_not_replace_what_others_have_saved(stored):
    proxy, url = stored
    if url[:2] != "s3":
        pytest.skip("nothing is saved over HTTP")
    for name in ("many", "tree.eqx", "orbax-True", "orbax-run"):
        with pytest.raises(FileExistsError, match="left as it is"):
            ec.tree_serialise_leaves(f"{url}/{name}", {"x": np.ones(3)})
    with pytest.raises(ValueError, match="export_safetensors"):
        ec.tree_serialise_leaves(f"{url}/one.safetensors", {"x": np.ones(3)})
    _holds(ec.open(f"{url}/one.safetensors"))
    _holds(ec.open(f"{url}/orbax-True"))
