"""Directories of Orbax, v0 and v1, written by Orbax on devices that are not here."""

import json
import shutil

import jax
import jax.random as jr
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from attacks import foreign
from support.helpers import BytesRead, new_orbax, read_unreadable, run_program

import eqx_ckpt as ec


pytestmark = new_orbax


_DEVICES = "--xla_force_host_platform_device_count=16"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax")
    run_program("write_orbax", path, XLA_FLAGS=_DEVICES)
    return path


_V0 = [f"v0-{kind}-{zarr}" for kind in ("files", "ocdbt") for zarr in (2, 3)]


@pytest.mark.parametrize(
    "name", [*_V0, "v1", "v1/state", "manager/5", "manager/5/default", "items/7"]
)
def test_what_orbax_wrote(base, name):
    ckpt = ec.open(base / name)
    assert ckpt.layout == "orbax"
    tree = ec.materialise(ckpt.tree)
    w = np.arange(64 * 32.0).reshape(64, 32)
    assert np.array_equal(tree["model"]["w"], w) and tree["model"]["w"].committed is (
        False
    )
    assert tree["model"]["layers"][0].tolist() == [1, 1, 1]
    assert tree["model"]["layers"][1].dtype.name == "bfloat16"
    big = jr.normal(jr.key(0), (512, 1024))
    assert np.array_equal(tree["big"], big)
    assert np.array_equal(ckpt["big"][100:103, 7].read(), big[100:103, 7])
    assert np.array_equal(np.asarray(ckpt["big"].T[::-5]), big.T[::-5])
    for dtype, x in tree["dtypes"].items():
        assert x.dtype.name == dtype
        assert np.array_equal(x, np.arange(4).astype(x.dtype))
    assert isinstance(tree["numpy"], np.ndarray) and tree["numpy"].tolist()[3] == 3
    assert not tree["zeros"].any()
    assert jr.key_impl(tree["key"]) == "threefry2x32"
    assert np.array_equal(jr.key_data(tree["key"]), jr.key_data(jr.key(3)))
    assert (tree["step"], tree["rate"], tree["flag"]) == (3, 1e-3, True)
    assert type(tree["flag"]) is bool
    assert tree.get("text") == ("héllo" if name in _V0 else None)
    assert ckpt.metadata == ({"width": 8} if name in ("v1", "manager/5") else None)
    store = ckpt["model.w"].store
    assert np.array_equal(store[3].read().result(), w[3])


def test_loads_into_a_model(base):
    like = {"w": jax.ShapeDtypeStruct((64, 32), np.float32), "layers": [np.zeros(3)]}
    path = base / "v1"
    with pytest.raises(RuntimeError, match="model.layers.0  saved f32"):
        ec.tree_deserialise_leaves(path, like, source="model")
    like["layers"] = [np.zeros(3, np.float32), jax.ShapeDtypeStruct((2,), "bfloat16")]
    out = ec.tree_deserialise_leaves(path, like, source=lambda c: c.model)
    assert out["w"][1, 0] == 32
    picked, report = ec.graft(
        {"head": jax.numpy.zeros((64, 32))},
        path,
        [(lambda m: m["head"], lambda c: c.model.w)],
        drop=lambda c: [
            *(c[k] for k in ("big", "dtypes", "numpy", "zeros", "key")),
            *(c[k] for k in ("step", "rate", "flag")),
            c.model.layers,
        ],
    )
    assert picked["head"][1, 0] == 32


@pytest.mark.parametrize("name", [*_V0, "v1"])
def test_reads_only_what_is_asked_for(base, name):
    ckpt = ec.open(base / name)
    with BytesRead() as few:
        ckpt["big"][:32].read()
    with BytesRead() as everything:
        ckpt["big"].read()
    assert few.total < everything.total / 8 < 512 * 1024


def test_a_run_of_orbax_is_its_newest_step(base):
    for path in ("manager", "manager/5"):
        ckpt = ec.open(base / path)
        assert ckpt.path == f"{base}/manager/5"
        # Orbax has it beside the tree.
        assert ckpt.metadata == {"width": 8}
    # So is one whose steps have other items, one of which is a tree.
    assert ec.open(base / "items").path == f"{base}/items/7"


def test_of_several_trees_in_a_step_the_one_called_default(base, tmp_path):
    shutil.copytree(base / "manager/5", tmp_path / "5")
    shutil.copytree(tmp_path / "5/default", tmp_path / "5/another")
    for path in (tmp_path, tmp_path / "5"):
        assert len(ec.open(path)["big"].read()) > 0
    shutil.move(tmp_path / "5/default", tmp_path / "5/one")
    with pytest.raises(ValueError, match="several trees"):
        ec.open(tmp_path / "5")


def test_verify_and_saves_refuse(base):
    with pytest.raises(ValueError, match="orbax has no digests"):
        ec.verify(base / "v1")
    with pytest.raises(FileExistsError, match="not a checkpoint of eqx_ckpt"):
        ec.tree_serialise_leaves(base / "v0-files-2", {"a": 1})


def test_ours_is_never_taken_for_one(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "1" / "default", {"w": np.ones(3)})
    assert ec.open(tmp_path / "1").layout == "ocdbt"
    assert ec.verify(tmp_path / "1" / "default") == []
    for layout in ("ocdbt", "zarr"):
        path = tmp_path / layout
        ec.tree_serialise_leaves(path, {"w": np.ones(3)}, layout=layout)
        (path / "eqx_ckpt.json").unlink()
        with pytest.raises(FileNotFoundError, match="it has no `eqx_ckpt.json`"):
            ec.open(path)


def test_unfinished(base, tmp_path):
    shutil.copytree(base / "v1", tmp_path / "5.orbax-checkpoint-tmp")
    with pytest.raises(ValueError, match="has not finished"):
        ec.open(tmp_path / "5.orbax-checkpoint-tmp")


def test_without_the_metadata_at_its_top(base, tmp_path):
    """What Orbax does not take for a checkpoint any more is none here."""
    shutil.copytree(base / "v1", tmp_path / "c")
    (tmp_path / "c/_CHECKPOINT_METADATA").unlink()
    assert "refused" in run_program("load_by_orbax", tmp_path / "c", XLA_FLAGS=_DEVICES)
    with pytest.raises(ValueError, match="has not finished"):
        ec.open(tmp_path / "c")


def test_an_item_that_is_unfinished(base, tmp_path):
    shutil.copytree(base / "v1", tmp_path / "v1")
    (tmp_path / "v1/state").rename(tmp_path / "v1/state.orbax-checkpoint-tmp-12")
    with pytest.raises(ValueError, match="has not finished"):
        ec.open(tmp_path / "v1")


def test_one_that_is_replaced(tmp_path):
    """TensorStore keeps the nodes of a database that it has read."""
    lazy = None
    for value in range(3):
        with ocp.StandardCheckpointer() as saver:
            saver.save(tmp_path / "c", {"w": np.full((4, 4), value)}, force=True)
        if lazy is not None:
            with pytest.raises(RuntimeError, match="was replaced"):
                lazy.read()
        lazy = ec.open(tmp_path / "c")["w"]
        assert lazy.read()[0, 0] == value


@pytest.mark.parametrize("is_ocdbt", [False, True])
def test_slashes_in_keys(tmp_path, is_ocdbt):
    """As haiku has them."""
    tree = {"mlp/~/linear_0": {"w": np.arange(3.0), "b": np.ones(2)}, "x": np.ones(1)}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=is_ocdbt)
    with ocp.Checkpointer(handler) as saver:
        saver.save(tmp_path / "c", args=ocp.args.PyTreeSave(tree))
    got = ec.tree_deserialise_leaves(tmp_path / "c", jax.tree.map(np.zeros_like, tree))
    jax.tree.map(np.testing.assert_array_equal, got, tree)


# ---- Directories that mean harm.


def _metadata(path, alter):
    value = json.loads((path / "_METADATA").read_text())
    alter(value)
    (path / "_METADATA").write_text(json.dumps(value))


def _leaf(value, name, **changes):
    entry = value["tree_metadata"][f"('{name}',)"]
    entry.update(changes)


def _array(path, alter, name="zeros"):
    file = path / name / ("zarr.json" if (path / name / "zarr.json").exists() else "")
    file = file if file.is_file() else path / name / ".zarray"
    value = json.loads(file.read_text())
    alter(value)
    file.write_text(json.dumps(value))


def _key(text):
    return [{"key": text, "key_type": 2}]


def _huge(value):
    value["shape"] = [2**40]
    if "chunks" in value:
        value["chunks"] = [2**40]
    else:
        value["chunk_grid"]["configuration"]["chunk_shape"] = [2**40]
        value["codecs"][0]["configuration"]["chunk_shape"] = [2**40]


HOSTILE = {
    "a name that leads out": (
        lambda p: _metadata(p, lambda v: _leaf(v, "step", key_metadata=_key("../x"))),
        "impossible name",
    ),
    "a name that is the directory above": (
        lambda p: _metadata(p, lambda v: _leaf(v, "step", key_metadata=_key(".."))),
        "impossible name",
    ),
    "two leaves at one place": (
        lambda p: _metadata(p, lambda v: _leaf(v, "step", key_metadata=_key("zeros"))),
        "one place|one name",
    ),
    "a type to import": (
        lambda p: _metadata(
            p, lambda v: _leaf(v, "step", value_metadata={"value_type": "os.system"})
        ),
        "unknown type",
    ),
    "no tree": (lambda p: (p / "_METADATA").write_text("{}"), "no `tree_metadata`"),
    "no JSON": (lambda p: (p / "_METADATA").write_text("x"), "not JSON"),
    "a malformed leaf": (
        lambda p: _metadata(p, lambda v: v["tree_metadata"].update(x=[])),
        "malformed leaf",
    ),
    "an array of 2^40 elements": (lambda p: _array(p, _huge), "larger than"),
    "an array that is not there": (
        lambda p: shutil.rmtree(p / "zeros"),
        "metadata of the array `zeros` are missing",
    ),
    "an unknown codec": (
        lambda p: _array(
            p, lambda v: v.update(codecs=[{"name": "pickle"}], compressor={"id": "x"})
        ),
        "unknown",
    ),
    "a filter": (
        lambda p: _array(
            p, lambda v: v.update(filters=[{"id": "py"}], storage_transformers=[1])
        ),
        "unknown",
    ),
    "an unknown dtype": (
        lambda p: _array(p, lambda v: v.update(dtype="|O8", data_type="object")),
        "unknown dtype",
    ),
    "chunks of no length": (
        lambda p: _array(
            p,
            lambda v: (
                v.update(chunks=[0, 0]),
                v.get("chunk_grid", {}).update(configuration={"chunk_shape": [0, 0]}),
            ),
        ),
        "impossible shape or chunks",
    ),
    "chunks of another rank": (
        lambda p: _array(
            p,
            lambda v: (
                v.update(chunks=[2]),
                v.get("chunk_grid", {}).update(configuration={"chunk_shape": [2]}),
            ),
        ),
        "impossible chunks",
    ),
    "a fill value that is none": (
        lambda p: _array(p, lambda v: v.update(fill_value="x")),
        "unknown fill",
    ),
    "a fill value of 2000 bits": (
        lambda p: _array(p, lambda v: v.update(fill_value=2**2000)),
        "unknown fill",
    ),
    "chunks that lie nowhere": (
        lambda p: _array(
            p, lambda v: v.update(chunk_key_encoding={}, dimension_separator="x")
        ),
        "unknown",
    ),
    "a link for a chunk": (
        lambda p: (p / "zeros" / "link").symlink_to("/etc/passwd"),
        "symbolic link",
    ),
}


@pytest.mark.parametrize("kind", ["v0-files-2", "v0-files-3"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_directories_are_refused_whole_or_by_leaf(base, tmp_path, name, kind):
    make, match = HOSTILE[name]
    path = tmp_path / "a"
    shutil.copytree(base / kind, path)
    make(path)
    with pytest.raises(ValueError, match=match):
        read_unreadable(path)


@pytest.mark.parametrize("rows", [1, [1], [{"array_metadata": 1}], {"a": 1}])
def test_metadata_of_keys_that_are_none(base, tmp_path, rows):
    path = tmp_path / "a"
    shutil.copytree(base / "v0-ocdbt-3", path)
    for name in ("a", [1], {}):
        row = {"array_metadata": {"param_name": name}}
        row["array_metadata"]["ext_metadata"] = {"random_key_impl": "fry"}
        for value in (rows, [row]):
            text = json.dumps({"array_metadatas": value})
            (path / "array_metadatas/process_0").write_text(text)
            assert ec.open(path)["step"].read() == 3


@pytest.mark.parametrize("kind", _V0)
def test_damage_is_an_error(base, tmp_path, kind):
    path = tmp_path / "a"
    shutil.copytree(base / kind, path)
    ckpt = ec.open(path)
    for file in path.rglob("*"):
        if file.is_file() and "METADATA" not in file.name and "zarr" not in file.name:
            if file.name != "manifest.ocdbt":
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(RuntimeError, match="big: "):
        ckpt["big"].read()


def test_in_an_object_store(base):
    """What TensorStore is given for a URL; the store itself is its own."""
    assert run_program("open_orbax_in_memory", base) == "good\n"


@pytest.mark.parametrize("is_ocdbt", [False, True])
def test_many_chunks_in_few_shards(tmp_path, is_ocdbt):
    """More chunks than zeros may have that are not there: a shard has all of them."""
    x = np.arange(1, 40_001, dtype=np.float32)[:, None]
    path, base = tmp_path / "c", {"driver": "file", "path": f"{tmp_path}/c/"}
    shards = {**foreign._shards["configuration"], "chunk_shape": [1, 1]}
    grid = {"name": "regular", "configuration": {"chunk_shape": [40_000, 1]}}
    codecs = [{"name": "sharding_indexed", "configuration": shards}]
    for name in "vw":
        where = {"path": f"{name}/"} if is_ocdbt else {"path": f"{path}/{name}/"}
        kind = {"driver": "ocdbt", "base": base} if is_ocdbt else {"driver": "file"}
        spec: dict = {"driver": "zarr3", "kvstore": {**kind, **where}, "create": True}
        spec["metadata"] = {"codecs": codecs, "chunk_grid": grid}
        store = ts.open(spec, dtype=x.dtype, shape=x.shape)
        store.result().write(x).result()
    tree = {f"('{name}',)": foreign.entry([name]) for name in "vw"}
    value = {"tree_metadata": tree, "use_zarr3": True}
    value["store_array_data_equal_to_fill_value"] = not is_ocdbt
    (path / "_METADATA").write_text(json.dumps(value))
    for y in ec.materialise(ec.open(path).tree).values():
        assert np.array_equal(y, x)
    if not is_ocdbt:
        for name in "vw":
            shutil.rmtree(path / name / "c")
        with pytest.raises(ValueError, match="80000 chunks, most of which are none"):
            ec.open(path)
