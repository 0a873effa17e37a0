"""Each option, at each call that has it: it does what it says, or it is refused.

One table has what each option is given, and what is to be seen then; another has the
calls, with each kind of place that they write to or read from.
"""

import inspect
import io
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec


class Net(eqx.Module):
    weight: jax.Array
    width: int = eqx.field(static=True)


def _tree(width=3):
    net = Net(jnp.full(3, 7.0), width)
    return {"w": jnp.zeros((256, 256)), "v": jnp.ones(3), "net": net}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ec.tree_serialise_leaves("base", {"a": jnp.ones(1)})
    return tmp_path


# ---- Calls that write. Each gives what is then there, opened.


def _save(path, **options):
    ec.tree_serialise_leaves(path, _tree(), **options)
    return ec.open(path)


def _save_later(path, **options):
    ec.async_tree_serialise_leaves(path, _tree(), **options).result()
    return ec.open(path)


def _to_file(path, **options):
    file = io.BytesIO()
    ec.tree_serialise_leaves(file, _tree(), **options)
    file.seek(0)
    return ec.open(file)


def _to_bytes(path, **options):
    return ec.open(io.BytesIO(ec.to_bytes(_tree(), **options)))


def _manage(path, **options):
    with ec.CheckpointManager(path, **options) as manager:
        manager.save(1, _tree(), force=True)
    return ec.open(path)


def _step(path, **options):
    with ec.CheckpointManager(path) as manager:
        manager.save(1, _tree(), **options)
    return ec.open(path)


def _convert(path, **options):
    if not ec.exists("source"):
        ec.tree_serialise_leaves("source", _tree())
    ec.convert("source", path, **options)
    return ec.open(path)


def _export(path, **options):
    ec.export_safetensors(path, _tree(), **options)
    return ec.open(path)


_SAVE = ec.tree_serialise_leaves
WRITES = {
    "to a directory": (_save, _SAVE, "c"),
    "to a zip": (_save, _SAVE, "c.zip"),
    "to memory": (_save, _SAVE, "memory://options"),
    "to a file object": (_to_file, _SAVE, ""),
    "later": (_save_later, ec.async_tree_serialise_leaves, "c"),
    "later to a zip": (_save_later, ec.async_tree_serialise_leaves, "c.zip"),
    "to bytes": (_to_bytes, ec.to_bytes, ""),
    "as a run": (_manage, ec.CheckpointManager.__init__, "c"),
    "as a step": (_step, ec.CheckpointManager.save, "c"),
    "converted": (_convert, ec.convert, "c"),
    "converted to a zip": (_convert, ec.convert, "c.zip"),
    "converted to .safetensors": (_convert, ec.convert, "c.safetensors"),
    "exported": (_export, ec.export_safetensors, "c.safetensors"),
    "exported to several": (_export, ec.export_safetensors, "shards"),
}


def _has(*names):
    return lambda ckpt: {*ckpt} == {*names}


def _stored(ckpt):
    return ckpt["w"].store


def _own(ckpt):
    run = os.path.dirname(os.path.dirname(ckpt.path))
    return ec.CheckpointManager(run).restore(_tree(), own="all")[1]


def _is_for_orbax(ckpt):
    """Whether Orbax, which knows nothing of memory, finds its files."""
    place = str(ckpt.path)
    return "://" in place or os.path.exists(os.path.join(place, "_METADATA"))


class Called:
    """A function that says whether it was called."""

    def __init__(self, result):
        self.result, self.is_called = result, False

    def __call__(self, *_):
        self.is_called = True
        return self.result


def _called(result=False):
    given = Called(result)
    return given, lambda ckpt: given.is_called


# What an option is given, and what is then to be seen, or None if it has to be refused.
WRITTEN = {
    "filter_spec": lambda: [
        ({"w": True, "v": False, "net": False}, _has("w")),
        (lambda x: np.ndim(x) == 2, _has("w")),
    ],
    "is_leaf": lambda: [_called()],
    "where": lambda: [(lambda tree: [tree["v"], tree["net"]], _has("v", "net.weight"))],
    "dtype": lambda: [("float16", lambda ckpt: ckpt["w"].dtype == np.float16)],
    "metadata": lambda: [
        ({"key": "value"}, lambda ckpt: ckpt.metadata.get("key") == "value")
    ],
    "metrics": lambda: [
        ({"loss": 2.0}, lambda ckpt: ckpt.metadata["metrics"] == {"loss": 2})
    ],
    "own": lambda: [({"at": 5}, lambda ckpt: _own(ckpt) == [{"at": 5}])],
    "functions": lambda: [
        (
            {"f": ec.function(lambda tree: tree["v"] * 2)},
            lambda ckpt: [*ckpt.functions] == ["f"],
        ),
        ("drop", lambda ckpt: not ckpt.functions),
    ],
    "base": lambda: [("base", lambda ckpt: ckpt.base.path == "base")],
    "layout": lambda: [("zarr", lambda ckpt: ckpt.layout == "zarr")],
    "chunks": lambda: [
        (2**14, lambda ckpt: _stored(ckpt).chunk_layout.write_chunk.shape[0] == 16),
        (
            lambda name, *_: (128, 128) if name == "w" else None,
            lambda ckpt: _stored(ckpt).chunk_layout.write_chunk.shape == (128, 128),
        ),
    ],
    "compression": lambda: [
        (codec, lambda ckpt, codec=codec: codec in str(_stored(ckpt).codec))
        for codec in ("lz4", "zstd")
    ],
    "skip": lambda: [(["w"], _has("v", "net.weight"))],
    "rename": lambda: [
        ([("^v$", "u")], _has("w", "u", "net.weight")),
        (lambda name: f"x.{name}", _has("x.w", "x.v", "x.net.weight")),
        ([("^w$", ec.adapters.transpose())], None),
        (ec.rename([("^v$", "u", ec.adapters.transpose())]), None),
        ([("^nothing$", "u")], None),
    ],
    "orbax": lambda: [(True, _is_for_orbax)],
    "shard_bytes": lambda: [(2**10, lambda ckpt: len(os.listdir(ckpt.path)) == 3)],
}
# Those that nobody sees in what is written, or that another test is about.
_ELSEWHERE = {
    "durable": "test_power",
    "max_bytes": "test_benchmarks",
    "processes": "runtime/test_processes",
    "progress": "test_serialise",
    "verify": "test_convert, for the source",
    "like": "test_convert, for .eqx",
    "reuse": "test_reuse",
    "overwrite": "below",
}
_POSITIONAL = {"self", "path", "pytree", "tree", "step", "root", "source", "target"}


def _options(call):
    return inspect.signature(call).parameters.keys() - _POSITIONAL


_OF_RUNS = _options(ec.CheckpointManager) - _options(ec.tree_serialise_leaves)
_ELSEWHERE |= dict.fromkeys({"force"} | _OF_RUNS, "test_manager")


@pytest.mark.parametrize("door", WRITES)
def test_options_of_calls_that_write(here, door):
    write, call, path = WRITES[door]
    for option in sorted(_options(call) - _ELSEWHERE.keys()):
        for number, (value, is_seen) in enumerate(WRITTEN[option]()):
            place = f"{path}-{option}-{number}{os.path.splitext(path)[1]}"
            given = {option: value}
            if door == "exported to several" and option != "shard_bytes":
                given["shard_bytes"] = 2**20
            is_refused = is_seen is None or (door, option, number) in REFUSED
            try:
                found = write(place, **given)
            except (TypeError, ValueError) as e:
                assert is_refused and f"`{option}" in str(e), (option, e)
                assert not os.path.exists(place)
            else:
                assert not is_refused, (option, value)
                assert is_seen is not None and is_seen(found), (option, value)


# What a kind of place cannot have: of which option which value.
REFUSED = {
    *((door, "layout", 0) for door in WRITES if "zip" in door or "file" in door),
    *((door, "orbax", 0) for door in WRITES if "zip" in door or "file" in door),
    *(("converted to .safetensors", "chunks", number) for number in range(2)),
    *(("converted to .safetensors", "compression", number) for number in range(2)),
    ("converted to .safetensors", "layout", 0),
    ("converted to .safetensors", "orbax", 0),
    ("converted to .safetensors", "functions", 0),
    *((door, "functions", 0) for door in ("exported", "exported to several")),
    ("converted to .safetensors", "base", 0),
}


@pytest.mark.parametrize("door", WRITES)
def test_overwrite(here, door):
    write, call, path = WRITES[door]
    if "overwrite" in _options(call) and path:
        given = {"shard_bytes": 2**20} if door == "exported to several" else {}
        found = write(path, **given)
        with pytest.raises(FileExistsError):
            write(path, overwrite=False, **given)
        assert np.array_equal(found["v"].read(), np.ones(3))


# ---- Calls that read. Each gives the tree that it makes.


def _load(path, like, **options):
    return ec.tree_deserialise_leaves(path, like, **options)


def _load_or_init(path, like, **options):
    return ec.load_or_init(lambda: like, path, **options)


def _from_file(path, like, **options):
    with open(path, "rb") as file:
        return ec.tree_deserialise_leaves(file, like, **options)


def _from_bytes(path, like, **options):
    with open(path, "rb") as file:
        return ec.from_bytes(file.read(), like, **options)


def _splice(path, like, **options):
    return ec.materialise(ec.open(path).splice(like, **options))


def _restore(path, like, **options):
    return ec.CheckpointManager(path).restore(like, **options)[0]


def _from_state_dict(path, like, **options):
    saved = _saved()
    saved["net"] = {"weight": saved["net"].weight}
    return ec.from_state_dict(saved, like, **options)


def _saved():
    return {**_tree(), "inner": {"w": jnp.ones((2, 3))}}


_LOAD = ec.tree_deserialise_leaves
_WRITE = {
    "c": lambda path: ec.tree_serialise_leaves(path, _saved()),
    "zarr": lambda path: ec.tree_serialise_leaves(path, _saved(), layout="zarr"),
    "c.zip": lambda path: ec.tree_serialise_leaves(path, _saved()),
    "c.safetensors": lambda path: ec.export_safetensors(path, _saved()),
    "c.npz": lambda path: np.savez(path, **_flat(_saved())),  # pyright: ignore
    "run/1/default": lambda path: ec.tree_serialise_leaves(path, _saved()),
    "": lambda path: None,
}
READS = {
    "a directory": (_load, _LOAD, "c"),
    "zarr": (_load, _LOAD, "zarr"),
    "a zip": (_load, _LOAD, "c.zip"),
    "a file object": (_from_file, _LOAD, "c.zip"),
    ".safetensors": (_load, _LOAD, "c.safetensors"),
    ".npz": (_load, _LOAD, "c.npz"),
    "bytes": (_from_bytes, ec.from_bytes, "c.zip"),
    "or init": (_load_or_init, ec.load_or_init, "c"),
    "spliced": (_splice, ec.Checkpoint.splice, "c"),
    "a run": (_restore, ec.CheckpointManager.restore, "run/1/default"),
    "a state dict": (_from_state_dict, ec.from_state_dict, ""),
}


def _flat(tree):
    return {name: np.asarray(x) for name, x in zip(_names(tree), jax.tree.leaves(tree))}


def _names(tree):
    return jax.tree.leaves(ec.leaf_names(tree))


def _like(**more):
    """A tree as was saved, of other values: those that it keeps are -1."""
    return jax.tree.map(lambda x: jnp.full_like(x, -1), {**_saved(), **more})


def _without(*names):
    return {name: x for name, x in _like().items() if name not in names}


def _kept(*names):
    """Whether just these leaves are as they were, and those that were saved are not."""
    return lambda out: (
        {name for name, x in _flat(out).items() if np.all(x == -1)} == {*names}
    )


_ALL = ["w", "v", "net.weight", "inner.w"]
_WIDER = {**_like(), "net": Net(jnp.full(3, -1.0), 4)}
# The `like`, what the option is given, and what is to be seen, or None.
READ = {
    "filter_spec": lambda: [
        (_like(), lambda x: np.ndim(x) == 2, _kept("v", "net.weight")),
    ],
    "is_leaf": lambda: [(_like(), *_called())],
    "where": lambda: [(_like(), lambda tree: tree["v"], _kept(*{*_ALL} - {"v"}))],
    "source": lambda: [
        (_like()["inner"], "inner", _kept()),
        (_like()["inner"], lambda tree: tree.inner, _kept()),
    ],
    "rename": lambda: [
        ({**_without("v"), "u": _like()["v"]}, [("^v$", "u")], _kept()),
        (_like(), [("^w$", ec.adapters.transpose())], None),
        (_like(), [("^nothing$", "u")], None),
    ],
    "missing": lambda: [(_like(x=jnp.ones(2)), "keep", _kept("x"))],
    "unexpected": lambda: [(_without("v"), "ignore", _kept())],
    "static": lambda: [
        (_WIDER, "ignore", _kept()),
        (_WIDER, ["net.width"], _kept()),
        (_WIDER, ["net.depth"], None),
    ],
    "cast": lambda: [
        (
            {**_like(), "w": jnp.full((256, 256), -1, jnp.float16)},
            True,
            lambda out: out["w"].dtype == np.float16 and _kept()(out),
        )
    ],
    "sharding": lambda: [
        (
            _like(),
            jax.sharding.SingleDeviceSharding(jax.devices()[1]),
            lambda out: out["w"].devices() == {jax.devices()[1]},
        )
    ],
}
_ELSEWHERE_READ = {
    "args": "test_init",
    "kwargs": "test_init",
    "max_bytes": "test_benchmarks",
    "own": "run/test_own",
    "processes": "runtime/test_processes",
    "progress": "test_checkpoint",
    "reshard": "reshard",
    "verify": "test_corruption",
}
_GIVEN = {"self", "path", "like", "init_fn", "data", "state_dict", "step", "tree"}
# Files of other libraries have no static fields, which are then not compared.
_NO_STATIC = {(door, "static", 2) for door in (".safetensors", ".npz")}


@pytest.mark.parametrize("door", READS)
def test_options_of_calls_that_read(here, door):
    read, call, path = READS[door]
    _WRITE[path](path)
    path = "run" if door == "a run" else path
    options = inspect.signature(call).parameters.keys() - _GIVEN
    for option in sorted(options - _ELSEWHERE_READ.keys()):
        for number, (like, value, is_seen) in enumerate(READ[option]()):
            if (door, option) == ("or init", "missing"):
                value = "init"
            try:
                out = read(path, like, **{option: value})
            except (TypeError, ValueError, RuntimeError) as e:
                assert is_seen is None and f"`{option}" in str(e), (option, e)
            else:
                is_refused = (
                    is_seen is None and (door, option, number) not in _NO_STATIC
                )
                assert not is_refused and (is_seen or _kept())(out), (option, value)
