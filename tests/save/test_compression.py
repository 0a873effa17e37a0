"""Leaves that Blosc has compressed: read by all readers, and compressed anew."""

import json
import warnings

import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support import golden, inside
from support.helpers import assert_alike

import eqx_ckpt as ec


CODECS = ("lz4", "zstd")


def _index_of(path):
    return json.loads((path / "eqx_ckpt.json").read_bytes())


def _noisy(seed, shape, dtype):
    """Numbers of which a codec makes less: whatever dtype, their low bits are noise."""
    numbers = np.random.default_rng(seed).normal(size=shape) * 7
    with np.errstate(all="ignore"):
        return numbers.astype(dtype)


_long = pytest.mark.long
_rest = [pytest.param(*p, marks=_long) for p in (("ocdbt", "zstd"), ("zarr", "lz4"))]


@pytest.mark.parametrize("layout, codec", [("ocdbt", "lz4"), ("zarr", "zstd"), *_rest])
@pytest.mark.filterwarnings("ignore")
def test_four_readers(tmp_path, layout, codec):
    tree = {
        "w": jnp.asarray(_noisy(0, (300, 201), "float32")),
        "steps": np.arange(40_000).reshape(200, 200) ** 2,
        "small": jnp.ones(3),
    }
    path = tmp_path / "a"
    chunks = lambda name, shape, dtype: (70, 201) if name == "w" else None
    options = {"layout": layout, "compression": codec, "chunks": chunks, "orbax": True}
    ec.tree_serialise_leaves(path, tree, **options)
    assert_alike(ec.tree_deserialise_leaves(path, tree), tree)
    assert ec.verify(path) == []
    for name, lazy in ec.open(path).leaves.items():
        assert np.array_equal(ts.open(lazy.url).result().read().result(), tree[name])
    import orbax.checkpoint as ocp

    with warnings.catch_warnings(), ocp.StandardCheckpointer() as reader:
        warnings.simplefilter("ignore")
        restored = reader.restore(path)
    assert all(np.array_equal(restored[name], tree[name]) for name in tree)
    if layout == "zarr":
        import zarr

        group = zarr.open_group(path, mode="r")
        assert all(np.array_equal(group[name][...], tree[name]) for name in tree)


@pytest.mark.parametrize("codec", ["lz4", pytest.param("zstd", marks=_long)])
def test_every_dtype(tmp_path, codec):
    more = [x for x in vars(ml_dtypes).values() if isinstance(x, type)]
    more = [x for x in more if issubclass(x, np.generic)]
    more = [x for x in more if "complex32" not in x.__name__]  # Not stored.
    all_dtypes = [np.dtype(x) for x in (*np.typecodes["AllInteger"], *"efdFD", *more)]
    dtypes = {x.name: x for x in all_dtypes if ec.is_storable(np.zeros(1, x))}
    names = sorted(dtypes)
    assert len(names) > 25
    # The last chunk is padded, and all are of more than one of Blosc's own blocks.
    tree = {n: _noisy(i, (75_000,), dtypes[n]) for i, n in enumerate(names)}
    tree |= {
        "bool": np.arange(75_000) % 3 == 0,
        "uint4": np.arange(75_000).astype(ml_dtypes.uint4),
        "keys": jr.split(jr.key(0), 10_000),
        "tiles": _noisy(0, (300, 301), "float64"),
    }
    chunks = lambda name, shape, dtype: (
        (77, 100) if name == "tiles" else (40_000, *shape[1:])
    )
    save = {"compression": codec, "chunks": chunks, "durable": False}
    ec.tree_serialise_leaves(tmp_path / "a", tree, **save)
    ckpt = ec.open(tmp_path / "a")
    for verify in (True, False):
        loaded = ec.tree_deserialise_leaves(ckpt, tree, verify=verify)
        for name, leaf in tree.items():
            if name != "keys":
                assert loaded[name].tobytes() == leaf.tobytes(), name
                part = slice(39_000, 74_999, 7)
                assert ckpt[name][part].read().tobytes() == leaf[part].tobytes(), name
        assert (jr.key_data(loaded["keys"]) == jr.key_data(tree["keys"])).all()
        column = ckpt["tiles"][::-2, 99:101].read(verify=verify)
        assert np.array_equal(column, tree["tiles"][::-2, 99:101])
    assert ec.verify(ckpt) == []


def _codecs(path):
    return {template[-1] for template in _index_of(path)["templates"]}


def test_what_is_stored_is_compressed_anew(tmp_path):
    source = golden.GOLDEN / "1" / "zstd"
    weights = golden.compressible()
    for codec in (*CODECS, None):
        ec.convert(source, tmp_path / f"{codec}", compression=codec)
        source = tmp_path / f"{codec}"
        assert _codecs(source) == {None, codec and f"blosc-{codec}"}
        assert ec.verify(source) == []
        assert np.array_equal(ec.open(source)["weights"].read(), weights)
    # In place, by a save of its lazy leaves; and with files of the one before.
    tree = ec.open(source).tree
    ec.tree_serialise_leaves(source, tree, compression="lz4", reuse=source)
    assert _codecs(source) == {None, "blosc-lz4"}
    again = ec.open(source).tree
    ec.tree_serialise_leaves(source, again, compression="lz4", reuse=source)
    assert np.array_equal(ec.open(source)["weights"].read(), weights)
    assert ec.verify(source) == []


def test_damage_is_not_compressed(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones(2**15)}, layout="zarr")
    file = tmp_path / "a" / "w" / "c" / "0"
    file.write_bytes(bytes(4) + file.read_bytes()[4:])
    with pytest.raises(RuntimeError, match="(?s)`w`.*not those that were saved"):
        ec.convert(tmp_path / "a", tmp_path / "b", compression="lz4")
    assert not (tmp_path / "b").exists()


def test_chunks_that_blosc_cannot_hold(tmp_path):
    large = np.broadcast_to(np.float32(1), (2**29,))
    with pytest.raises(ValueError, match="`w` would have chunks of 2147483648 bytes"):
        ec.tree_serialise_leaves(
            tmp_path / "a", {"w": large}, compression="lz4", chunks=2**31
        )
    assert not (tmp_path / "a").exists()


def test_headers():
    good = bytes.fromhex("02012404 00004000 00001000 10000000".replace(" ", ""))
    check = lambda data, full=2**22, size=4: inside.check_blosc_header(
        data, "blosc-lz4", full, size
    )
    check(good)
    for place in range(16):
        # What differs in any bit but those that say how it is shuffled is refused, or
        # says smaller blocks.
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            is_free = (place == 2 and bit < 5) or (8 <= place < 12 and bad[11] == 0)
            block = int.from_bytes(bad[8:12], "little")
            if is_free and 0 < block <= 2**20:
                check(bad)
            else:
                with pytest.raises(ValueError, match="Blosc header"):
                    check(bad)
    for data, full, size in ((good[:15], 2**22, 4), (good, 2**21, 4), (good, 2**22, 2)):
        with pytest.raises(ValueError, match="Blosc header"):
            check(data, full, size)


def test_many_threads(tmp_path):
    """Leaves of many sizes, more than one chunk in a part, loaded in turn and anew."""
    tree = {
        f"x{i}": jnp.asarray(_noisy(i, (50 + 37 * i, 128), "float32")) for i in range(4)
    }
    options = {"compression": "lz4", "chunks": 2**15, "durable": False}
    ec.tree_serialise_leaves(tmp_path / "a", tree, **options)
    for max_bytes in (None, 2**17):
        out = ec.tree_deserialise_leaves(tmp_path / "a", tree, max_bytes=max_bytes)
        assert_alike(out, tree)
