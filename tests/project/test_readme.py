"""The code of README.md runs, and gives what its comments say."""

import ast
import pathlib
import re
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
import safetensors.flax
from jax.sharding import NamedSharding, PartitionSpec
from support.helpers import BytesRead

import eqx_ckpt as ec


root = pathlib.Path(__file__).parents[2]
readme = (root / "README.md").read_text()
fenced = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
python = [text for language, text in fenced if language == "python"]


def _block(words: str, blocks: list[str] = python) -> str:
    (block,) = (text for text in blocks if words in text)
    return block


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, width: int, *, key: jax.Array):
        head, *keys = jr.split(key, 6)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 10, key=head)


@pytest.fixture
def names(getkey, tmp_path, monkeypatch):
    """What the README's lines take for granted."""
    monkeypatch.chdir(tmp_path)
    model = Net(64, key=getkey())
    opt_state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))
    # Not zeros, so that nothing passes for something else.
    opt_state = jax.tree.map(lambda x: x + 3, opt_state)
    return {
        "__name__": "readme",
        "eqx": eqx,
        "ec": ec,
        "jnp": jnp,
        "Net": Net,
        "model": model,
        "opt_state": opt_state,
        "key": getkey(),
        "new_head": eqx.nn.Linear(64, 2, key=getkey()),
    }


def _nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def test_every_python_block_is_tested():
    here = (
        "swapped.eqx",
        "metadata={",
        'layout="zarr"',
        "handle = ",
        "partition_rules",
        "s3://",  # In test_stores.py.
        "ec.CheckpointManager(",
        "ec.verify(",
        "ec.graft(",
        "ec.export_safetensors(",
    )
    assert sorted(python) == sorted(_block(words) for words in here)


def test_silent_swap(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = _block("swapped.eqx")
    exec(block, {"__name__": "readme"})
    comments = re.findall(r"^print\(.*\) +# (.*)$", block, re.MULTILINE)
    # What comes after two spaces is a remark on what is printed.
    said = [comment.split("  ")[0] for comment in comments]
    assert capsys.readouterr().out.splitlines() == said == ["[0. 0.]", "[1. 1.]"]


def test_ten_lines(names, capsys):
    block = _block("metadata={")
    lines = block.splitlines()
    assert len(lines) <= 10
    save, open_, skeleton, load, part, splice, graft = lines
    model, opt_state, new_head = (names[n] for n in ("model", "opt_state", "new_head"))

    def run(line: str) -> int:
        with BytesRead() as read:
            exec(line, names)
        return read.total

    run(save)
    like = {"model": model, "opt": opt_state}
    assert eqx.tree_equal(ec.tree_deserialise_leaves("ckpt", like), like)

    run(open_)
    ckpt = names["ckpt"]
    assert ckpt.metadata == {"width": 64}
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert shown.startswith("Checkpoint(") and "layers\n" in shown
    _, comment = open_.split("# its tree:")
    assert re.sub(" +", " ", comment.strip(" .")) in shown

    assert run(skeleton) == 0
    abstract = jax.tree.leaves(names["skeleton"])
    assert all(type(x) is jax.ShapeDtypeStruct for x in abstract) and len(abstract) > 9

    slack = 10_000  # The index, the digests and the nodes that lead to the data.
    assert _nbytes(opt_state) > 2 * slack + _nbytes(model)
    del names["model"]
    assert run(load) < _nbytes(model) + slack
    assert eqx.tree_equal(names["model"], model, typematch=True)

    assert run(part) < _nbytes(model.layers[3]) + slack
    assert eqx.tree_equal(names["part"].layers[3], model.layers[3])
    rest = eqx.tree_at(lambda m: m.layers[3], names["part"], None)
    assert all(type(x) is jax.ShapeDtypeStruct for x in jax.tree.leaves(rest))

    assert run(splice) == 0
    leaves = jax.tree.leaves(names["lazy"])
    assert all(isinstance(x, ec.LazyArray) for x in leaves)
    assert len(leaves) == len(abstract)

    run(graft)
    expected = eqx.tree_at(lambda m: m.head, model, new_head)
    assert eqx.tree_equal(names["model"], expected, typematch=True)


def test_saving(names, tmp_path):
    tree = {"model": names["model"], "step": 3}
    names |= {"path": tmp_path / "saved", "tree": tree}
    default, cast, zarr = ast.parse(_block('layout="zarr"')).body

    def run(line: ast.stmt) -> ec.Checkpoint:
        exec(compile(ast.Module([line], []), "README.md", "exec"), names)
        return ec.open(names["path"])

    ec.tree_serialise_leaves(names["path"], {"old": 1})
    ckpt = run(default)
    assert eqx.tree_equal(ec.materialise(ckpt.splice(tree)), tree)
    assert "old" not in ckpt and ckpt.layout == "ocdbt"

    ckpt = run(cast)
    assert set(ckpt.leaves) == {n for n in ckpt.leaves if n.startswith("model.")}
    assert {x.dtype for x in ckpt.leaves.values()} == {np.dtype(jnp.bfloat16)}

    ckpt = run(zarr)
    assert eqx.tree_equal(ec.materialise(ckpt.splice(tree)), tree)
    arrays = {file.parent.name for file in (tmp_path / "saved").glob("*/zarr.json")}
    assert arrays == set(ckpt.leaves)


def test_in_the_background(names, tmp_path):
    names |= {"path": tmp_path / "saved", "tree": names["model"]}
    exec(_block("handle = "), names)
    ckpt = ec.open(names["path"])
    assert eqx.tree_equal(ec.materialise(ckpt.splice(names["tree"])), names["tree"])


def test_many_devices(names):
    ec.tree_serialise_leaves("ckpt", {"model": names["model"]})
    mesh = jax.make_mesh((8,), ("model",))
    names |= {"mesh": mesh, "PartitionSpec": PartitionSpec}
    exec(_block("partition_rules"), names)
    weight = names["model"].layers[0].weight
    assert weight.sharding == NamedSharding(mesh, PartitionSpec("model"))


def test_other_formats(names):
    flat = {f"encoder.layer.{i}.weight": jnp.full(2, i) for i in range(4)}
    safetensors.flax.save_file(flat, "model.safetensors")
    exec(_block("ec.export_safetensors("), names)
    arrays, named = names["model"], ec.leaf_names(names["model"])
    flat = dict(zip(jax.tree.leaves(named), jax.tree.leaves(arrays)))
    flat = {name: x for name, x in flat.items() if eqx.is_array(x)}
    safetensors.flax.save_file(flat, "theirs.safetensors")
    ours = pathlib.Path("out.safetensors").read_bytes()
    assert ours == pathlib.Path("theirs.safetensors").read_bytes()


class Classifier(eqx.Module):
    backbone: list[eqx.nn.Linear]
    classify: eqx.nn.Linear


def test_grafting(names, capsys):
    model, opt_state = names["model"], names["opt_state"]
    ec.tree_serialise_leaves("ckpt", {"model": model, "opt": opt_state})
    other = Net(64, key=jr.key(7))
    names["classifier"] = Classifier(other.layers, other.head)
    with BytesRead() as read:
        exec(_block("ec.graft("), names)
    # Neither the head nor the optimiser's state.
    assert read.total < _nbytes(model.layers) + 10_000
    assert eqx.tree_equal(names["model"], Classifier(model.layers, other.head))
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    for status, count in [("loaded", 10), ("fresh", 2), ("dropped", 27)]:
        assert [status, str(count)] in rows


class Layer(eqx.Module):
    weight: jax.Array


class Attention(eqx.Module):
    projections: list[jax.Array]
    num_heads: int = eqx.field(static=True)


class Both(eqx.Module):
    layers: list[Layer]
    attention: Attention


def _both(width: int, heads: int) -> Both:
    layers = [Layer(jnp.zeros((width, 64))) for _ in range(4)]
    return Both(layers, Attention([jnp.zeros((64, 64))] * 4, heads))


def test_the_report(tmp_path):
    block = _block("RuntimeError", [text for _, text in fenced])
    model = _both(64, 8)
    state = {"model": model, "opt": optax.adam(1e-3).init(model)}
    ec.tree_serialise_leaves(tmp_path / "7", state)
    with pytest.raises(RuntimeError) as caught:
        ec.tree_deserialise_leaves(tmp_path / "7", _both(32, 4), source="model")
    first, rest = f"RuntimeError: {caught.value}\n".split("\n", 1)
    shown, expected = block.split("\n", 1)
    assert first.startswith(shown.removesuffix("..."))
    assert rest.replace(str(tmp_path), "/runs") == expected


def test_a_run_of_checkpoints(names):
    names |= {"signal": signal, "state": {"x": jnp.zeros(3)}, "step": 0, "steps": 500}
    names["train"] = lambda state: ({"x": state["x"] + 1}, 1 / (1 + state["x"][0]))
    exec(_block("ec.CheckpointManager("), names)
    assert names["manager"].steps() == [300, 400, 500]
    # It goes on where it was.
    names |= {"state": {"x": jnp.zeros(3)}, "step": 0, "steps": 600}
    names["train"] = lambda state: ({"x": state["x"] + 1}, 2.0)
    exec(_block("ec.CheckpointManager("), names)
    assert names["state"]["x"][0] == 600
    assert names["manager"].steps() == [400, 500, 600]
    assert names["manager"].best() == 500


def test_checking(names, capsys):
    ec.tree_serialise_leaves("ckpt", names["model"])
    exec(_block("ec.verify("), names)
    assert names["problems"] == [] and "leaves]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "python -m pip install -e . && python -m eqx_ckpt demo",
        "python -m pip install -e '.[test]' && python -m pytest",
    ],
)
def test_commands_stand_alone(command):
    assert ("", command + "\n") in fenced
    assert readme.splitlines().count(command) == 1


@pytest.mark.parametrize("page", [*root.glob("*.md"), *root.glob("docs/*.md")])
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
