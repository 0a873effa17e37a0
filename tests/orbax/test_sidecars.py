import io
import json
import random
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import optax
import pytest
import tensorstore as ts
from support import inside, orbax_reader
from support.helpers import call_main, files_of, run_program
from support.stores import StoredFiles

import eqx_ckpt as ec


LAYOUTS = orbax_reader.LAYOUTS
ALL = lambda x: ec.is_storable(x) or isinstance(x, (str, bytes))


# ---- Orbax.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    for layout in LAYOUTS:
        ec.tree_serialise_leaves(
            root / layout, orbax_reader.held(), layout=layout, orbax=True
        )
        tree = orbax_reader.spoilt()
        ec.tree_serialise_leaves(
            root / f"{layout}-spoilt", tree, ALL, layout=layout, orbax=True
        )
    return root


def _ask_orbax(root, devices, *checks):
    """Runs checks of `support.orbax_reader`, and returns what each case found wrong."""
    lines = call_main(
        "support.orbax_reader",
        str(root),
        *checks,
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
    )
    return json.loads(lines[-1])


def _wrong(report):
    return {case: wrong for case, wrong in report.items() if wrong}


@pytest.mark.long
@pytest.mark.parametrize("devices", [8, 1])
def test_orbax_restores_what_it_holds(saved, devices):
    report = _ask_orbax(saved, devices, "restores", "leaves_out")
    assert not _wrong(report)
    # Layouts, readers, and no target or one of three; two of the readers take `...`.
    assert len(report) == 2 * 3 * 4 + 2 * 3 + 2 * 2


def test_orbax_restores_trees_of_any_form(tmp_path):
    report = _ask_orbax(
        tmp_path, 8, "random_trees", "parts", "other_nodes", "skeletons"
    )
    assert not _wrong(report)
    assert len(report) == 3 * (8 + 2 + 6 + 2)


@pytest.mark.long
def test_orbax_restores_more_trees(tmp_path):
    report = _ask_orbax(tmp_path, 8, "more_random_trees")
    assert not _wrong(report)
    assert len(report) == 3 * 25


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_reader_reads_what_every_door_writes(tmp_path):
    report = _ask_orbax(tmp_path, 8, "doors")
    assert not _wrong(report)
    # Layouts, kinds, doors, readers; the commit file is of one door, and zarr-python
    # reads one layout.
    assert len(report) == 12 * (2 * 6 * 5 + 2 + 6)


def test_orbax_sees_the_last_save(tmp_path):
    report = _ask_orbax(tmp_path, 8, "overwritten", "missing_chunk", "manager")
    assert not _wrong(report)
    assert len(report) == 2 * 2 * 4 * 3 + 3 + 2


def _metadata(path):
    return json.loads((path / "_METADATA").read_text())["tree_metadata"]


def test_orbax_files(tmp_path):
    # What is restored without a target is in orbax_reader.py. This is the text.
    tree = {"a": [jnp.ones(2), None], "b": 1, "c": len}
    ec.tree_serialise_leaves(tmp_path / "a", tree, orbax=True)

    def entry(value, *keys):
        return {
            "key_metadata": [{"key": key, "key_type": type} for key, type in keys],
            "value_metadata": {
                "value_type": value,
                "skip_deserialize": value == "None",
            },
        }

    assert _metadata(tmp_path / "a") == {
        "('a', '0')": entry("jax.Array", ("a", 2), ("0", 1)),
        "('a', '1')": entry("None", ("a", 2), ("1", 1)),
        "('b',)": entry("scalar", ("b", 2)),
        "('c',)": entry("None", ("c", 2)),
    }


def test_what_where_leaves_out_is_not_there_for_orbax(tmp_path):
    tree = {"a": {"w": jnp.ones(2), "n": None, "f": len}, "b": {"n": None, "f": len}}
    ec.tree_serialise_leaves(tmp_path / "a", tree, where=lambda t: t["a"], orbax=True)
    assert set(_metadata(tmp_path / "a")) == {"('a', 'w')", "('a', 'n')", "('a', 'f')"}


def test_what_filter_spec_leaves_out_is_none_for_orbax(tmp_path):
    tree = {"a": jnp.ones(2), "b": jnp.ones(3), "c": 1, "d": {}}
    ec.tree_serialise_leaves(tmp_path / "a", tree, lambda x: x is tree["a"], orbax=True)
    kinds = {
        key: value["value_metadata"]["value_type"]
        for key, value in _metadata(tmp_path / "a").items()
    }
    expected = {"a": "jax.Array", "b": "None", "c": "None", "d": "Dict"}
    assert kinds == {f"('{key}',)": kind for key, kind in expected.items()}


def test_a_small_head_costs_kilobytes(tmp_path):
    layers = [eqx.nn.MLP(2, 2, 2, 3, key=jr.key(i)) for i in range(30)]
    tree = {"backbone": layers, "head": jnp.ones(300)}
    is_head = {"backbone": False, "head": True}
    with ec.CheckpointManager(
        tmp_path / "run", filter_spec=is_head, orbax=True
    ) as manager:
        for step in range(3):
            manager.save(step, tree)
    for step in range(3):
        files = [x for x in (tmp_path / f"run/{step}").rglob("*") if x.is_file()]
        assert sum(x.stat().st_size for x in files) < 12_000
        assert set(_metadata(tmp_path / f"run/{step}/default")) == {"('head',)"}
    assert ec.verify(tmp_path / "run/2/default") == []
    said = run_program("restore_by_orbax", tmp_path / "run/2/default")
    assert said.splitlines()[-1] == "dict_keys(['head']) 300.0"
    # Beside more than that, Orbax is told of each of them.
    ec.tree_serialise_leaves(
        tmp_path / "large", tree | {"head": jnp.ones(2**16)}, is_head, orbax=True
    )
    assert len(_metadata(tmp_path / "large")) > 200


def test_nothing_without_a_name_is_an_error(tmp_path):
    # A key that has no name is refused only where something is stored under it.
    tree = {"a": jnp.ones(2), "b": {object(): None}}
    ec.tree_serialise_leaves(tmp_path / "a", tree, orbax=True)
    assert set(_metadata(tmp_path / "a")) == {"('a',)", "('b',)"}


def test_is_leaf_and_orbax(tmp_path):
    # One of the two empty dicts is a leaf here, and so is the pair: neither is stored.
    tree = {"a": {}, "b": {}, "c": 1, "d": len, "e": (1, 2), "f": np.ones(2)}
    is_leaf = lambda x: x is tree["a"] or type(x) is tuple
    ec.tree_serialise_leaves(tmp_path / "a", tree, is_leaf=is_leaf, orbax=True)
    values = [x["value_metadata"] for x in _metadata(tmp_path / "a").values()]
    kinds = ["None", "Dict", "scalar", "None", "None", "np.ndarray"]
    assert [value["value_type"] for value in values] == kinds


def test_long_names_and_orbax(tmp_path):
    tree = {"a": 1, "x" * 201: 2}
    for layout, count in ("ocdbt", 2), ("zarr", 1):
        ec.tree_serialise_leaves(tmp_path / layout, tree, layout=layout, orbax=True)
        assert len(_metadata(tmp_path / layout)) == count
    report = _ask_orbax(tmp_path, 1, "long_names")
    assert len(report) == 2 * 3 and not _wrong(report)


def test_unknown_prng_implementations_are_left_out(tmp_path, monkeypatch):
    inside.limit(monkeypatch, prng_kinds_of_orbax=("threefry2x32",))
    tree = {"a": jr.key(0), "b": jr.key(0, impl="rbg")}
    ec.tree_serialise_leaves(tmp_path / "a", tree, orbax=True)
    assert set(_metadata(tmp_path / "a")) == {"('a',)"}


_KEYS_AND_STRINGS = {"k": jr.key(0), "s": "text", "w": np.ones(2)}
_ORBAX = {"_METADATA", "_sharding"}
_OF_LAYOUT = {
    "ocdbt": {"eqx_ckpt.json", "manifest.ocdbt", "d"},
    "zarr": {"eqx_ckpt.json", "eqx_ckpt.digests", "zarr.json"},
}


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stale_files_are_deleted(tmp_path, before, layout):
    path = tmp_path / "a"
    for tree, to, more in [
        (_KEYS_AND_STRINGS, before, _ORBAX | {"_strings.json", "array_metadatas"}),
        ({"w": np.ones(2)}, layout, _ORBAX),
        (_KEYS_AND_STRINGS, layout, _ORBAX | {"_strings.json", "array_metadatas"}),
        (_KEYS_AND_STRINGS, layout, _ORBAX | {"_strings.json", "array_metadatas"}),
        ({"u": jnp.zeros(2, "uint4")}, layout, set()),
    ]:
        ec.tree_serialise_leaves(path, tree, ALL, layout=to, orbax=True)
        leaves = set(tree) if to == "zarr" else set()
        assert {p.name for p in path.iterdir()} == _OF_LAYOUT[to] | more | leaves
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_files_for_orbax_in_a_store():
    """They have fixed names, so a path takes one save with them."""
    path = "memory://others-stale"
    ec.tree_serialise_leaves(path, _KEYS_AND_STRINGS, ALL, orbax=True)
    more = _ORBAX | {"_strings.json", "array_metadatas"}
    tops = lambda: {key.partition("/")[0] for key in StoredFiles(path)}
    assert tops() - {"eqx_ckpt.saving"} == _OF_LAYOUT["ocdbt"] | more
    with pytest.raises(ValueError, match="cannot exchange.*`orbax=True`"):
        ec.tree_serialise_leaves(path, {"w": 1}, orbax=True)
    ec.tree_serialise_leaves(path, {"w": 1})
    assert tops() == {"eqx_ckpt.json", "d"}


# ---- Files for Orbax, added to what is there.

# They have what is new each time: an id and the time.
_DATED = {"manifest.ocdbt"}


def _files_for_orbax(path):
    others = json.loads((path / "eqx_ckpt.json").read_text())["others"]
    names = [name for name in others if not name.startswith("d/")]
    return {name: (path / name).read_bytes() for name in names if name not in _DATED}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_the_same_if_they_are_added_later(tmp_path, layout):
    """So Orbax restores what it restores of a save with them."""
    rng = random.Random(0)
    trees = [orbax_reader.held(), orbax_reader.spoilt()]
    trees += [{"w": 1, "t": orbax_reader.random_tree(rng)} for _ in range(20)]
    for number, tree in enumerate(trees):
        paths = [tmp_path / f"{number}-{when}" for when in ("with", "later")]
        for path, orbax in zip(paths, (True, False)):
            ec.tree_serialise_leaves(
                path, tree, ALL, layout=layout, orbax=orbax, durable=False
            )
        save_id = ec.open(paths[1]).save_id
        for _ in range(2):
            ec.write_orbax(paths[1])
            assert _files_for_orbax(paths[0]) == _files_for_orbax(paths[1])
            assert ec.verify(paths[1]) == []
        assert ec.open(paths[1]).save_id == save_id
        names = [{x.name for x in path.iterdir()} for path in paths]
        assert names[0] == names[1]


def test_orbax_restores_what_was_told_later(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "later", {"w": np.ones(3), "n": None})
    ec.write_orbax(tmp_path / "later")
    said = run_program("restore_a_none_by_orbax", tmp_path / "later")
    assert said.splitlines()[-1] == "None 3.0"
    ec.tree_serialise_leaves(tmp_path / "later", {"w": 1})
    assert {x.name for x in (tmp_path / "later").iterdir()} == {"d", "eqx_ckpt.json"}


def test_a_base_stays_the_base_with_files_for_orbax(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "base", {"w": np.ones(3)})
    ec.tree_serialise_leaves(tmp_path / "lora", {"a": 1}, base=tmp_path / "base")
    ec.write_orbax(tmp_path / "base")
    ec.open(tmp_path / "lora").check_base(tmp_path / "base")


def test_files_for_orbax_are_added_in_a_store():
    path = "memory://added-later"
    ec.tree_serialise_leaves(path, _KEYS_AND_STRINGS, ALL)
    ec.write_orbax(path)
    more = _ORBAX | {"_strings.json", "array_metadatas"}
    tops = {key.partition("/")[0] for key in StoredFiles(path)}
    assert tops == _OF_LAYOUT["ocdbt"] | more and ec.verify(path) == []
    ec.tree_serialise_leaves(path, {"w": 1})
    tops = {key.partition("/")[0] for key in StoredFiles(path)}
    assert tops == {"eqx_ckpt.json", "d"}


def test_what_gets_no_files_for_orbax(tmp_path, monkeypatch):
    tree = {"w": np.ones(3)}
    ec.tree_serialise_leaves(tmp_path / "a.zip", tree)
    ec.export_safetensors(tmp_path / "a.safetensors", tree)
    for name, why in [
        ("a.zip", "in one file.*`ec.convert` with `orbax=True`"),
        ("a.safetensors", "of safetensors"),
    ]:
        with pytest.raises(ValueError, match=f"without files for Orbax: .* {why}"):
            ec.write_orbax(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        ec.write_orbax(tmp_path / "none")
    inside.limit(monkeypatch, database_chunks=1)
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.ones(3), "x": np.ones(4)})
    with pytest.raises(ValueError, match="it has very many chunks"):
        ec.write_orbax(tmp_path / "a")
    with pytest.raises(ValueError, match="no spec for `w` .* too many chunks"):
        ec.open(tmp_path / "a").spec("w")
    assert {x.name for x in (tmp_path / "a").iterdir()} == {"d", "eqx_ckpt.json"}


def test_a_save_meanwhile_goes_before_files_for_orbax(tmp_path, monkeypatch):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, {"w": 1})
    save = lambda *_: ec.tree_serialise_leaves(path, {"w": 2})
    inside.watch(monkeypatch, "files of Orbax", save)
    with pytest.raises(RuntimeError, match="was replaced or deleted"):
        ec.write_orbax(path)
    assert {x.name for x in path.iterdir()} == {"d", "eqx_ckpt.json"}
    assert ec.open(path)["w"].read() == 2


# ---- TensorStore.

# A name of a directory with what URLs and file systems give a meaning.
_ODD = "a b%41\u00fc#?|:@&+~'\"(x)$;=,"


def _names():
    w = jnp.arange(6.0).reshape(2, 3)
    return {
        "plain": {"w": w, "tied": w},
        "a.b": w + 1,
        "a/b": w + 2,
        "": w + 3,
        "h\u00e9 \u4e16%41": [w + 4, {"|:#?": w + 5}],
        "keys": {("a", 1): w + 6, (): w},
        "x" * 300: w + 7,
        "zero": jnp.zeros((0, 3)),
        "scalar": jnp.asarray(2.5),
        "big": np.arange(3_000_000, dtype=np.uint8),
        "python": (True, 3, 1.5, 1j, 2**70, "text", b"ab"),
        "key": jr.key(0),
        "dtypes": {
            dtype: orbax_reader.numbers(dtype)
            for dtype in ("int4", "uint4", "bfloat16", "float8_e4m3", "float8_e5m2")
        },
    }


def _stored(leaf):
    """The array of a leaf that other readers see: of bytes or words, if need be."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jr.key_data(leaf))
    if isinstance(leaf, (str, bytes)):
        data = leaf.encode() if isinstance(leaf, str) else leaf
        return np.frombuffer(data, np.uint8)
    if type(leaf) is int and leaf >= 2**63:
        return np.frombuffer(leaf.to_bytes(9, "little"), np.uint8)
    array = np.asarray(leaf)
    array = array.astype(array.dtype.newbyteorder("="))
    lacking = array.dtype in (ml_dtypes.uint4, ml_dtypes.float8_e4m3)
    return array.view(np.uint8) if lacking else array


def _is_same(got, leaf):
    x = _stored(leaf)
    return (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())


def _leaves(tree):
    names = jax.tree.leaves(ec.leaf_names(tree, ALL))
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("directory", ["plain", _ODD])
def test_tensorstore_opens_every_url(tmp_path, layout, directory):
    tree = _names() if layout == "ocdbt" or directory == "plain" else {"a.b": [1.5]}
    path = tmp_path / directory / "b"
    ec.tree_serialise_leaves(path, tree, ALL, layout=layout, chunks=1 << 20, orbax=True)
    ckpt = ec.open(path)
    leaves = _leaves(tree)
    assert set(ckpt.leaves) == set(leaves) and any("%" in name for name in leaves)
    for name, leaf in leaves.items():
        for way in (ckpt[name].url, ckpt.spec(name)):
            store = ts.open(way, read=True).result()
            assert _is_same(store.read().result(), leaf), name
    first = next(iter(leaves))
    assert (
        ckpt[first].store.read().result().tobytes() == _stored(leaves[first]).tobytes()
    )


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_spec_leads_into_a_zip(tmp_path, compression):
    path, tree = tmp_path / _ODD / "b.zip", _names()
    ec.tree_serialise_leaves(path, tree, ALL, compression=compression)
    above = tmp_path / "above.zip"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(above, "w") as new:
        for name in old.namelist():
            new.writestr(f"in/it/{name}", old.read(name))
    for file in (path, above):
        ckpt = ec.open(file)
        for name, leaf in _leaves(tree).items():
            spec = json.loads(json.dumps(ckpt.spec(name)))
            assert _is_same(ts.open(spec).result().read().result(), leaf), name


def test_what_has_no_spec(tmp_path):
    tree = {"w": np.ones(3)}
    ec.export_safetensors(tmp_path / "a.safetensors", tree)
    ec.tree_serialise_leaves("memory://spec", tree)
    with pytest.raises(ValueError, match="no URL for `w` of .*: its store is in the m"):
        ec.open("memory://spec")["w"].url
    for what, why in [
        (tmp_path / "a.safetensors", "it is of another format, safetensors"),
        ("memory://spec", "its store is in the memory of eqx_ckpt"),
        (io.BytesIO(ec.to_bytes(tree)), "its store is in the memory of eqx_ckpt"),
    ]:
        with pytest.raises(ValueError, match=f"no spec for `w` of .*: {why}"):
            ec.open(what).spec("w")
    with pytest.raises(KeyError, match="no leaf 'x'"):
        ec.open("memory://spec").spec("x")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("why", ["no codec 'blosc-lz4'", "does not know `layout="])
def test_what_only_we_read(tmp_path, monkeypatch, layout, why):
    path, tree = tmp_path / "a", {"w": jnp.zeros(2**12)}
    options = {"layout": layout, "compression": "lz4"}
    inside.limit(monkeypatch, min_compressed_bytes=0)
    ec.tree_serialise_leaves(path, tree, **options)
    if "codec" in why:
        inside.limit(monkeypatch, codecs_of_tensorstore=(None,))
    else:
        inside.close_layout_to_others(monkeypatch, layout)
    before, leaf = files_of(tmp_path), ec.open(path)["w"]
    with pytest.raises(ValueError, match=f"no spec for `w` of .*: it .*{why}"):
        ec.open(path).spec("w")
    with pytest.raises(ValueError, match=f"no URL for `w` of .*: it .*{why}"):
        leaf.url
    if "codec" in why:
        with pytest.raises(ValueError, match=f"cannot decode `w` of .*: it .*{why}"):
            leaf.store
    else:
        assert leaf.store.read().result().shape == (2**12,)
    with pytest.raises(ValueError, match=f"left without files for Orbax: .*{why}"):
        ec.write_orbax(path)
    with pytest.raises(ValueError, match=f"Nothing was saved: `orbax` .*{why}"):
        ec.tree_serialise_leaves(path, tree, orbax=True, **options)
    assert files_of(tmp_path) == before
    assert eqx.tree_equal(ec.tree_deserialise_leaves(path, tree), tree)


def test_urls_stay_with_the_save_that_was_opened(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.arange(3)}, orbax=True)
    url = ec.open(tmp_path / "a")["w"].url
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.arange(3) + 1}, orbax=True)
    with pytest.raises(ValueError):
        ts.open(url).result()
    new = ts.open(ec.open(tmp_path / "a")["w"].url).result().read().result()
    assert new.tolist() == [1, 2, 3]


# ---- zarr-python.


@pytest.mark.filterwarnings("ignore")
def test_zarr_opens_the_group(tmp_path):
    import zarr

    tree = {**orbax_reader.held(), **_names()}
    ec.tree_serialise_leaves(
        tmp_path / "a", tree, ALL, layout="zarr", chunks=1 << 20, orbax=True
    )
    leaves = _leaves(eqx.filter(tree, ALL))
    lacking = ("int2", "int4", "float4", "float8", "bfloat16")
    expected = {
        ckpt_name: leaf
        for ckpt_name, leaf in leaves.items()
        if not _stored(leaf).dtype.name.startswith(lacking)
    }
    long = [name for name in expected if len(name) > 200]
    assert len(long) == 1 and len(leaves) - len(expected) > 20
    group = zarr.open_group(tmp_path / "a", mode="r")
    arrays = dict(group.arrays())
    assert set(group.keys()) == set(arrays)
    assert len(arrays) == len(expected)
    for name, leaf in expected.items():
        if name in long:
            (directory,) = (key for key in arrays if key.startswith(name[:160]))
        else:
            directory = name
        assert _is_same(np.asarray(arrays[directory][...]), leaf), name
    assert group["plain.w"][0].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")
def test_zarr_reads_a_leaf_that_it_does_not_list(tmp_path):
    import zarr

    ec.tree_serialise_leaves(
        tmp_path / "a", {"u": b"ab", "w": 1}, ALL, layout="zarr", orbax=True
    )
    array = zarr.open_array(tmp_path / "a" / "u", mode="r")
    assert bytes(np.asarray(array[...])) == b"ab"


def test_ocdbt_has_no_group(tmp_path):
    ec.tree_serialise_leaves(
        tmp_path / "a", {"w": optax.EmptyState(), "v": 1}, orbax=True
    )
    assert not (tmp_path / "a" / "zarr.json").exists()
