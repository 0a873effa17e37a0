"""Directories of levanter and eformer, which they have written: see `foreign`."""

import json
import pathlib
import shutil
import struct

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attacks import growth
from support.command import main
from support.helpers import BytesRead, read_unreadable, run_program

import eqx_ckpt as ec


FOREIGN = pathlib.Path(__file__).parents[1] / "foreign"
OLD, FILES, DATABASE = "levanter-1.1", "levanter-1.2.dev1644", "marin-levanter-0.2.20"
LEVANTER = [f"{name}/step-7" for name in (OLD, FILES, DATABASE)]
TREE, RUN = "eformer-0.0.101/tree", "eformer-0.0.101/run/run-6"


@pytest.mark.parametrize("name", LEVANTER)
def test_what_levanter_wrote(name):
    ckpt = ec.open(FOREIGN / name)
    assert ckpt.layout == "levanter"
    assert ckpt.metadata["step"] == 7 and "timestamp" in ckpt.metadata
    tree = ec.materialise(ckpt.tree)
    model = tree["model"]
    linear = model["linear"]
    assert np.array_equal(linear["weight"], np.arange(12.0).reshape(4, 3))
    assert linear["bias"].dtype == jnp.bfloat16 and linear["bias"].tolist() == [2.5] * 3
    assert [x.tolist() for x in model["layers"]] == [[0, 0], [1, 1], [2, 2]]
    assert isinstance(model["layers"], list)
    assert model["zeros"].shape == (2, 3) and not model["zeros"].any()
    assert np.array_equal(model["big"], np.arange(4096).reshape(64, 64))
    for dtype, x in model["dtypes"].items():
        assert x.dtype.name == dtype
        assert np.array_equal(x, np.arange(4).astype(dtype))
    assert isinstance(model["big"], jax.Array)
    if name.startswith(OLD):
        states, key, step, rate = tree["training_state"]
        assert (step.item(), rate.item()) == (7, 0.5)
        assert step.dtype == np.int64  # JAX would have narrowed it.
    else:
        states, key, step = tree["opt_state"], tree["training_key"], tree["step"]
        assert step == 7 and step.shape == ()
    # The state in between has no arrays, so that these are no sequence.
    assert states["0"]["mu"][1].tolist() == [0, 0] and states["2"]["count"] == 0
    assert np.array_equal(key, jax.random.PRNGKey(3))
    assert np.array_equal(ckpt["model.big"][30:33, 5].read(), model["big"][30:33, 5])
    assert np.array_equal(np.asarray(ckpt["model.big"].T[::-5]), model["big"].T[::-5])


@pytest.mark.parametrize("name", [TREE, RUN])
def test_what_eformer_wrote(name):
    ckpt = ec.open(FOREIGN / name)
    assert ckpt.layout == "eformer"
    tree = ec.materialise(ckpt.tree)
    model = tree["model"]
    assert np.array_equal(model["w"], np.arange(12.0).reshape(3, 4))
    assert model["layers"][0].dtype == jnp.bfloat16
    assert model["layers"][0].tolist() == [2.5] * 3 and not model["layers"][1].any()
    assert np.array_equal(model["big"], np.arange(4096).reshape(64, 64))
    if name == TREE:
        # A prefix beside what has none.
        assert tree["tx"][0][0]["mu"][1].tolist() == [0, 0, 0]
        assert tree["step"] == 7 and ckpt.metadata == {"width": 8}
    else:
        assert tree["optimizer"][0]["mu"][1].tolist() == [0, 0, 0]
        assert ckpt.metadata == {"rate": 1e-3, "step": 6}


@pytest.mark.parametrize("name", [*LEVANTER[1:], TREE])
def test_reads_only_what_is_asked_for(name):
    ckpt = ec.open(FOREIGN / name)
    with BytesRead() as few:
        ckpt["model.big"][:8].read()
    with BytesRead() as everything:
        ckpt["model.big"].read()
    assert few.total < everything.total / 4


def _all_but(path, kept):
    """Selects all of a checkpoint but one part of the model."""
    names = [name.split(".") for name in ec.open(path).leaves]
    others = {parts[0] for parts in names} - {"model"}
    parts = {parts[1] for parts in names if parts[0] == "model"} - {kept}
    return lambda c: [*(c[k] for k in others), *(c.model[k] for k in parts)]


@pytest.mark.parametrize("name", [*LEVANTER, RUN])
def test_loads_converts_and_lists(name, tmp_path, capsys):
    path = FOREIGN / name
    like = {"big": jax.ShapeDtypeStruct((64, 64), np.int32)}
    like["layers"] = [np.zeros(2, np.float32)]
    with pytest.raises(RuntimeError, match="layers"):
        ec.tree_deserialise_leaves(path, like, source="model")
    out = ec.tree_deserialise_leaves(
        path, like, source="model", where=lambda m: m["big"]
    )
    assert out["big"][1, 0] == 64
    head = {"weight": jnp.zeros((64, 64), jnp.int32)}
    pairs = [(lambda m: m["weight"], lambda c: c.model.big)]
    head, _ = ec.graft(head, path, pairs, drop=_all_but(path, "big"))
    assert head["weight"][1, 0] == 64
    ec.convert(path, tmp_path / "ours")
    assert ec.verify(tmp_path / "ours") == []
    ours = ec.open(tmp_path / "ours")
    assert ours.metadata == ec.open(path).metadata
    assert eqx.tree_equal(ec.materialise(ours.tree), ec.materialise(ec.open(path).tree))
    assert not main(["ls", str(path)])
    assert "big" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no digests"):
        ec.verify(path)
    with pytest.raises(FileExistsError, match="not a checkpoint of eqx_ckpt"):
        ec.tree_serialise_leaves(_copy(path, tmp_path), {"a": 1})


@pytest.mark.parametrize("name", LEVANTER)
def test_states_of_optimisers_load_by_name(name):
    optimiser = optax.adamw(optax.linear_schedule(1e-3, 0, 10))
    like = optimiser.init([jnp.ones(2), jnp.ones(2)])
    source = "training_state.0" if name.startswith(OLD) else "opt_state"
    states = ec.tree_deserialise_leaves(FOREIGN / name, like, source=source)
    assert jax.tree.structure(states) == jax.tree.structure(like)
    assert states[0].mu[1].tolist() == [0, 0]


class Named:
    """As an array of haliax is in a tree: a node without keys."""

    def __init__(self, array):
        self.array = array


jax.tree_util.register_pytree_node(
    Named, lambda x: ((x.array,), None), lambda _, children: Named(*children)
)


@pytest.mark.parametrize("name", LEVANTER)
def test_arrays_with_named_axes_are_found_by_a_rename(name):
    like = {"weight": Named(jnp.zeros((4, 3))), "bias": Named(jnp.zeros(3, "bfloat16"))}
    names = ec.rename([("$", ".0")])
    pairs = [(lambda m: m, lambda c: c.model.linear, names)]
    path = FOREIGN / name
    out, _ = ec.graft(like, path, pairs, drop=_all_but(path, "linear"))
    assert out["weight"].array[1, 0] == 3 and out["bias"].array[0] == 2.5


def test_steps_are_named_and_not_guessed(tmp_path):
    for step in (9, 10):
        shutil.copytree(FOREIGN / LEVANTER[2], tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()
    with pytest.raises(ValueError, match="directory of steps.*`step-10`"):
        ec.open(tmp_path)
    with pytest.raises(ValueError, match="directory of steps.*`run-6`"):
        ec.open(FOREIGN / "eformer-0.0.101" / "run")


def _copy(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    return tmp_path / "copy"


def test_what_is_not_finished_or_a_part_is_refused(tmp_path):
    path = _copy(FOREIGN / LEVANTER[1], tmp_path)
    with pytest.raises(ValueError, match="not finished, or a part"):
        ec.open(path / "model")
    (path / "metadata.json").unlink()
    with pytest.raises(ValueError, match="not finished, or a part"):
        ec.open(path)
    database = _copy(FOREIGN / LEVANTER[2], tmp_path / "b")
    (database / "metadata.json").unlink()
    with pytest.raises(FileNotFoundError, match="nothing that tells another format"):
        ec.open(database)


def test_other_files_of_that_name_are_nothing(tmp_path):
    (tmp_path / "metadata.json").write_text('{"step": 3, "timestamp": "now"}')
    with pytest.raises(FileNotFoundError):
        ec.open(tmp_path)
    (tmp_path / "metadata.json").write_text('{"name": "x"}')
    with pytest.raises(FileNotFoundError):
        ec.open(tmp_path)


def test_in_an_object_store():
    assert (
        run_program("open_levanter_in_memory", FOREIGN, *LEVANTER, TREE, RUN)
        == "good\n"
    )


# ---- Directories that mean harm.


def _json(file, alter):
    value = json.loads(file.read_text())
    alter(value)
    file.write_text(json.dumps(value))


def _index(alter):
    return lambda path: _json(path / "tensorstore_index.json", alter)


def _array(**changes):
    return lambda path: _json(path / "model/w/.zarray", lambda v: v.update(changes))


def _row(**changes):
    return _index(lambda v: v["arrays"][-1].update(changes))


def _link(path):
    shutil.rmtree(path / "model" / "w")
    (path / "model" / "w").symlink_to("/etc")


HOSTILE = {
    "another format": (
        _index(lambda v: v.update(format="zarr")),
        "of the format 'zarr'",
    ),
    "no list": (_index(lambda v: v.update(arrays=3)), "malformed list"),
    "no prefixes": (_index(lambda v: v.update(prefixes=[])), "malformed list"),
    "no row": (_index(lambda v: v.update(arrays=[3])), "malformed list"),
    "no JSON": (lambda p: (p / "tensorstore_index.json").write_text("["), "not JSON"),
    "a path that leads out": (_row(path="model/../../x"), "impossible name"),
    "a path from the top": (_row(path="/etc"), "impossible name"),
    "a path with a backslash": (_row(path="..\\x"), "impossible name"),
    "a path that is long": (_row(path="a/" * 300), "impossible name|too long"),
    "an array that is not there": (_row(path="gone"), "metadata .* are missing"),
    "an array twice": (_row(path="model/w"), "twice"),
    "another shape than in the index": (_row(shape=[3]), "has it as"),
    "another dtype than in the index": (_row(dtype="float64"), "has it as"),
    "2^40 elements": (_array(shape=[2**40, 4], chunks=[2**40, 4]), "has it as|larger"),
    "a codec to import": (_array(compressor={"id": "pickle"}), "unknown id"),
    "a filter": (_array(filters=[{"id": "py"}]), "unknown filters"),
    "objects": (_array(dtype="|O8"), "unknown dtype"),
    "a value for what is missing": (_array(fill_value=7), "unknown fill_value"),
    "zeros for what is missing": (_array(fill_value=0), "unknown fill_value"),
    "a link": (_link, "symbolic link"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_directories_are_refused_whole_or_by_leaf(tmp_path, name):
    make, match = HOSTILE[name]
    path = _copy(FOREIGN / TREE, tmp_path)
    make(path)
    with pytest.raises(ValueError, match=match):
        read_unreadable(path)


def test_an_array_that_is_larger_than_its_files(tmp_path):
    path = _copy(FOREIGN / LEVANTER[1], tmp_path)
    alter = lambda v: v.update(shape=[2**40], chunks=[2**40])
    _json(path / "model/layers/0/.zarray", alter)
    with pytest.raises(ValueError, match="larger than"):
        read_unreadable(path)


@pytest.mark.parametrize("name", [*LEVANTER[:2], TREE])
@pytest.mark.parametrize("how", ["missing", "cut", "longer"])
def test_damage_is_an_error(tmp_path, name, how):
    path = _copy(FOREIGN / name, tmp_path)
    ckpt = ec.open(path)
    chunk = path / "model/big/0.0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[: len(data) // 2] if how == "cut" else data * 2)
    if how == "missing":
        chunk.unlink()
    with pytest.raises(RuntimeError, match="model.big: "):
        ckpt["model.big"].read()


def test_a_chunk_of_blosc_that_would_be_large(tmp_path):
    path = _copy(FOREIGN / LEVANTER[0], tmp_path)
    chunk = path / "model/big/0.0"
    data = bytearray(chunk.read_bytes())
    data[4:8] = struct.pack("<I", 2**31 - 17)
    chunk.write_bytes(data)
    with pytest.raises(RuntimeError, match="is not a chunk of it"):
        ec.open(path)["model.big"].read()


def test_a_damaged_database(tmp_path):
    path = _copy(FOREIGN / LEVANTER[2], tmp_path)
    for file in (path / "d").iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match="cannot be read"):
        ec.open(path)


def test_a_database_of_2_to_the_40_keys(tmp_path):
    growth.doubled(tmp_path, 40)
    shutil.copy(FOREIGN / LEVANTER[2] / "metadata.json", tmp_path)
    with pytest.raises(ValueError, match="a node twice"):
        ec.open(tmp_path)
