"""The code of README.md runs, and gives what its comments say."""

import pathlib
import re

import equinox as eqx
import jax
import pytest
from support.helpers import BytesRead

import eqx_ckpt as ec


root = pathlib.Path(__file__).parents[2]
readme = (root / "README.md").read_text()
fenced = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
python = [text for language, text in fenced if language == "python"]


def _block(words: str, blocks: list[str] = python) -> str:
    (block,) = (text for text in blocks if words in text)
    return block


def _nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def test_every_python_block_is_tested():
    here = ("swapped.eqx", "metadata={", "ec.CheckpointManager(")
    assert sorted(python) == sorted(_block(words) for words in here)


def test_it_is_short():
    lines = readme.splitlines()
    assert len(lines) <= 150
    assert all(len(line) <= 100 for line in lines if not line.startswith("|"))


def test_silent_swap(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = _block("swapped.eqx")
    exec(block, {"__name__": "readme"})
    comments = re.findall(r"^print\(.*\) +# (.*)$", block, re.MULTILINE)
    # What comes after two spaces is a remark on what is printed.
    said = [comment.split("  ")[0] for comment in comments]
    assert capsys.readouterr().out.splitlines() == said == ["[0. 0.]", "[1. 1.]"]


def test_ten_lines(tmp_path, monkeypatch, capsys):
    """In a fresh interpreter: they import all that they need."""
    monkeypatch.chdir(tmp_path)
    block = _block("metadata={")
    lines = [line for line in block.splitlines() if line]
    imports, net, state, save, open_, skeleton, load, part, rows = lines
    names: dict = {"__name__": "readme"}

    def run(*lines: str) -> int:
        with BytesRead() as read:
            exec("\n".join(lines), names)
        return read.total

    run(imports, net, state, save)
    state, model = names["state"], names["state"]["model"]
    assert eqx.tree_equal(ec.tree_deserialise_leaves("ckpt", state), state)

    run(open_)
    ckpt = names["ckpt"]
    assert ckpt.metadata == {"width": 64}
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert shown.startswith("Checkpoint(") and "layers\n" in shown
    _, comment = open_.split("# its tree:")
    assert re.sub(" +", " ", comment.strip(" .")) in shown

    assert run(skeleton) == 0
    abstract = eqx.filter(names["skeleton"], lambda x: x is not None)
    leaves = [x for x in jax.tree.leaves(abstract) if not callable(x)]
    assert all(type(x) is jax.ShapeDtypeStruct for x in leaves) and len(leaves) == 8

    slack = 10_000  # The index, the digests and the nodes that lead to the data.
    assert run(load) < _nbytes(model) + slack
    assert eqx.tree_equal(names["model"], model, typematch=True)

    assert run(part) < _nbytes(model.layers[1]) + slack
    assert eqx.tree_equal(names["part"].layers[1], model.layers[1])
    rest = eqx.tree_at(lambda m: m.layers[1], names["part"], None)
    rest = [x for x in jax.tree.leaves(rest) if not callable(x)]
    assert all(type(x) is jax.ShapeDtypeStruct for x in rest)

    assert run(rows) < model.layers[1].weight.nbytes + slack
    assert eqx.tree_equal(names["rows"], model.layers[1].weight[:8])


def test_a_run_of_checkpoints(tmp_path, monkeypatch):
    """As it is pasted: it trains, and goes on where it was."""
    block = _block("ec.CheckpointManager(")

    def run(directory, steps):
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        names: dict = {"__name__": "readme"}
        exec(block.replace("0, 500\n", f"0, {steps}\n"), names)
        return names["state"], names["manager"], names

    _, manager, names = run(tmp_path / "a", 500)
    assert manager.steps() == [300, 400, 500]
    state, manager, _ = run(tmp_path / "a", 600)
    assert manager.steps() == [400, 500, 600]
    whole, _, _ = run(tmp_path / "b", 600)
    assert eqx.tree_equal(state, whole) and float(names["loss"]) < 0.01


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
