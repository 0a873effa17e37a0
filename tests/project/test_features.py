"""The table of features in README.md is true, cell by cell.

Equinox, Orbax, safetensors and flax are asked here what the table says of them.
"""

import pathlib
import re
import resource

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.flax
from jax.sharding import NamedSharding, PartitionSpec
from support.helpers import new_orbax

import eqx_ckpt as ec


pytestmark = new_orbax

root = pathlib.Path(__file__).parents[2]
_lines = (root / "README.md").read_text().split("## Beside others")[1]
_rows = re.findall(r"^\|(.*)\|$", _lines.split("\n## ")[0], re.MULTILINE)
_header, _, *_rows = [[cell.strip() for cell in row.split("|")] for row in _rows]
table = {what: dict(zip(_header[1:], cells)) for what, *cells in _rows}

OURS, EQX, ORBAX, SAFE, FLAX = _header[1:]


class Orbax:
    """Orbax with its defaults."""

    def save(self, path, tree):
        with ocp.StandardCheckpointer() as saver:
            saver.save(path, tree, force=True)

    def load(self, path, like=None):
        with ocp.StandardCheckpointer() as loader:
            return loader.restore(path, like)


class Flax:
    def save(self, path, tree):
        path.write_bytes(flax.serialization.to_bytes(tree))

    def load(self, path, like=None):
        if like is None:
            return flax.serialization.msgpack_restore(path.read_bytes())
        return flax.serialization.from_bytes(like, path.read_bytes())


class Safetensors:
    def save(self, path, tree):
        safetensors.flax.save_file(tree, path)

    def load(self, path, like=None):
        return safetensors.flax.load_file(path)


class Equinox:
    def save(self, path, tree):
        eqx.tree_serialise_leaves(path, tree)

    def load(self, path, like=None):
        if like is None:
            raise TypeError
        return eqx.tree_deserialise_leaves(path, like)


class Ours:
    def save(self, path, tree):
        ec.tree_serialise_leaves(path, tree)

    def load(self, path, like=None):
        if like is None:
            return ec.materialise(ec.open(path).tree)
        return ec.tree_deserialise_leaves(path, like)


peers = {
    OURS: Ours(),
    EQX: Equinox(),
    ORBAX: Orbax(),
    SAFE: Safetensors(),
    FLAX: Flax(),
}
names = {OURS: "ours", EQX: "x.eqx", ORBAX: "orbax", SAFE: "x.safetensors", FLAX: "x"}


@pytest.fixture(params=list(peers), ids=["ours", "eqx", "orbax", "safetensors", "flax"])
def peer(request):
    return request.param


def _says(row, peer):
    return table[row][peer]


def test_every_row_is_tested():
    text = pathlib.Path(__file__).read_text()
    assert len(table) == 12 and all(f'"{row}"' in text for row in table)


def test_names(peer, tmp_path):
    """Two arrays of one shape, and `like` has them in another order."""
    path = tmp_path / names[peer]
    peers[peer].save(path, {"b": jnp.ones(2), "c": jnp.zeros(2)})
    # A dict is sorted, and so its order is that of its keys.
    like = {"a": jnp.full(2, 5.0), "b": jnp.full(2, 5.0)}
    try:
        out = peers[peer].load(path, like)
        by_position = bool((out["a"] == 1).all()) if "a" in out else False
    except (KeyError, ValueError, RuntimeError):
        by_position = False
    said = _says("leaves are matched by", peer)
    assert said == ("position" if by_position else "name")


def _partial_orbax(path):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {"small": jax.ShapeDtypeStruct((8,), "float32", sharding=one)}
    args = ocp.args.PyTreeRestore(
        like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as loader:
        return loader.restore(path, args=args)["small"]


def _partial_safetensors(path):
    with safetensors.safe_open(path, "np") as file:
        return file.get_tensor("small")


_io = pathlib.Path("/proc/self/io")


@pytest.mark.skipif(not _io.exists(), reason="needs Linux's counters of a process")
def test_one_array(peer, tmp_path):
    path = tmp_path / names[peer]
    tree = {"big": jnp.ones(2**22), "small": jnp.ones(8)}
    peers[peer].save(path, tree)
    partial = {
        OURS: lambda: ec.open(path)["small"].read(),
        ORBAX: lambda: _partial_orbax(path),
        SAFE: lambda: _partial_safetensors(path),
        # They have no call for it: the whole is read, and the rest thrown away.
        EQX: lambda: eqx.tree_deserialise_leaves(path, tree)["small"],
        FLAX: lambda: flax.serialization.msgpack_restore(path.read_bytes())["small"],
    }

    def read():
        return int(re.findall(r"rchar: (\d+)", _io.read_text())[0])

    partial[peer]()  # What is imported at a first call is read too.
    before = read()
    assert (partial[peer]() == 1).all()
    is_partial = read() - before < 2**22
    row = "loads one array without reading the others"
    assert _says(row, peer) == ("yes" if is_partial else "no")


def test_without_the_class(peer, tmp_path):
    path = tmp_path / names[peer]
    peers[peer].save(path, {"x": jnp.arange(3.0)})
    try:
        out = peers[peer].load(path)
        can = np.array_equal(out["x"], np.arange(3.0))
    except TypeError:
        can = False
    assert _says("loads without the class", peer) == ("yes" if can else "no")


def _unread(peer, path):
    """The tree at a path with leaves that are not read, as far as a peer has them."""
    if peer == OURS:
        tree = ec.open(path).tree
        return ec.merge([tree, tree], ec.merging.average())
    if peer == ORBAX:
        with ocp.StandardCheckpointer() as loader:
            return {"x": loader.metadata(path).item_metadata.tree["x"]}
    if peer == SAFE:
        with safetensors.safe_open(path, "np") as file:
            return {"x": file.get_slice("x")}
    return {"x": jax.ShapeDtypeStruct((2**16,), "float32")}


def test_without_loading(peer, tmp_path):
    """Leaves that are not read are saved as others are."""
    row = "prunes, casts and averages checkpoints without loading them"
    path, to = tmp_path / "a" / names[peer], tmp_path / "b" / names[peer]
    path.parent.mkdir()
    to.parent.mkdir()
    like = {"x": jnp.arange(2.0**16)}
    peers[peer].save(path, like)
    try:
        peers[peer].save(to, _unread(peer, path))
        can = np.array_equal(peers[peer].load(to, like)["x"], like["x"])
    except Exception:
        can = False
    assert _says(row, peer) == ("yes" if can else "no")


def _runs(peer, path, x):
    """What a model gives without a `like`."""
    if peer != OURS:
        return peers[peer].load(path)(x)
    out = ec.rebuild(path, [eqx.nn])(x)
    assert np.array_equal(out, ec.open(path).functions["forward"](x))
    return out


def test_without_the_code(peer, tmp_path):
    model, x = eqx.nn.Linear(3, 2, key=jr.key(0)), jnp.ones(3)
    path = tmp_path / names[peer]
    if peer == OURS:
        forward = ec.function(lambda model, x: model(x), x, platforms=["cpu"])
        ec.tree_serialise_leaves(path, model, functions={"forward": forward})
    elif peer in (SAFE, FLAX):
        peers[peer].save(path, {"weight": model.weight, "bias": model.bias})
    else:
        peers[peer].save(path, model)
    try:
        can = np.array_equal(_runs(peer, path, x), model(x))
    except Exception:
        can = False
    row = "runs, and is rebuilt, without the code that made it"
    assert _says(row, peer) == ("yes" if can else "no")


class Heads(eqx.Module):
    weight: jax.Array
    num_heads: int = eqx.field(static=True)


def test_static_fields(peer, tmp_path):
    path = tmp_path / names[peer]
    saved, like = Heads(jnp.ones((8, 8)), 4), Heads(jnp.zeros((8, 8)), 8)
    if peer in (SAFE, FLAX):
        # They take dicts of arrays, in which no static field is.
        saved, like = {"weight": saved.weight}, {"weight": like.weight}
    peers[peer].save(path, saved)
    try:
        peers[peer].load(path, like)
        refuses = False
    except RuntimeError as error:
        refuses = "num_heads" in str(error)
    row = "refuses 8 attention heads where 4 were saved"
    assert _says(row, peer) == ("yes" if refuses else "no")


def test_a_flipped_bit(peer, tmp_path):
    path = tmp_path / names[peer]
    # Numbers that do not compress, so that nearly all bytes are theirs.
    tree = {"x": jr.normal(jr.key(0), (2**16,))}
    peers[peer].save(path, tree)
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    found = 0
    for at in (len(data) // 3, len(data) // 2, 2 * len(data) // 3):
        data[at] ^= 2
        largest.write_bytes(data)
        try:
            out = peers[peer].load(path, tree)["x"]
            assert (np.asarray(out) != np.asarray(tree["x"])).any()
        except Exception:
            found += 1
        data[at] ^= 2
    assert _says("finds a flipped bit as it reads", peer) == (
        "yes" if found == 3 else "no"
    )


def test_a_save_that_fails(peer, tmp_path):
    row = "a save that fails leaves what was at the path"
    if peer == FLAX:
        # It makes bytes, and writes none.
        assert _says(row, peer) == "no file of its own"
        return
    path = tmp_path / names[peer]
    peers[peer].save(path, {"x": jnp.ones(2**20)})
    other = {"x": jr.normal(jr.key(0), (2**20,))}
    # No file may be longer than 1 MiB, as on a disk that is full.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(Exception):
            peers[peer].save(path, other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    try:
        kept = bool((peers[peer].load(path, other)["x"] == 1).all())
    except Exception:
        kept = False
    assert _says(row, peer) == ("yes" if kept else "no")


def test_in_the_background(peer):
    calls = {
        OURS: hasattr(ec, "async_tree_serialise_leaves"),
        EQX: any("async" in name for name in dir(eqx)),
        ORBAX: hasattr(ocp, "AsyncCheckpointer"),
        SAFE: any("async" in name for name in dir(safetensors.flax)),
        FLAX: any("async" in name for name in dir(flax.serialization)),
    }
    assert _says("saves in the background", peer) == ("yes" if calls[peer] else "no")


def test_shards(peer, tmp_path):
    row = "saves shards without gathering them, and loads onto another mesh"
    path = tmp_path / names[peer]
    one, other = jax.make_mesh((8,), ("x",)), jax.make_mesh((2, 4), ("a", "b"))
    x = jax.device_put(
        jnp.arange(64.0).reshape(8, 8), NamedSharding(one, PartitionSpec("x"))
    )
    wanted = NamedSharding(other, PartitionSpec("b", "a"))
    like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)}
    if peer in (EQX, FLAX):
        like = {"x": jax.device_put(jnp.zeros_like(x), wanted)}
    peers[peer].save(path, {"x": x})
    out = peers[peer].load(path, like)["x"]
    assert np.array_equal(out, x)
    can = getattr(out, "sharding", None) == wanted
    assert _says(row, peer) == ("yes" if can else "no")


def test_one_file(peer, tmp_path):
    path = tmp_path / (names[peer] + ".zip" * (peer == OURS))
    peers[peer].save(path, {"x": jnp.ones(3)})
    assert _says("one file", peer).startswith("yes" if path.is_file() else "no")


def test_formats_of_others(peer, tmp_path):
    """Whether it opens what each of the others has saved."""
    opened = []
    tree = {"x": jnp.ones(3)}
    for other, saver in peers.items():
        if other == peer:
            continue
        path = tmp_path / names[other]
        saver.save(path, tree)
        try:
            if peer == OURS:
                out = ec.open(path, like=tree if other == EQX else None)["x"].read()
            elif peer == ORBAX and other == SAFE:
                from orbax.checkpoint import v1

                layout = v1.options.CheckpointLayout.SAFETENSORS
                with v1.Context(checkpoint_layout=layout):
                    out = v1.load(path)["x"]
            else:
                out = peers[peer].load(path)["x"]
            assert (np.asarray(out) == 1).all()
            opened.append(other)
        except Exception:
            pass
    said = _says("reads the formats of the others", peer)
    # Orbax opens our directories because we write the files that it needs.
    others = {OURS: 4, ORBAX: 2}.get(peer, 0)
    assert len(opened) == others, opened
    assert said == {OURS: "yes", ORBAX: "safetensors"}.get(peer, "no")
