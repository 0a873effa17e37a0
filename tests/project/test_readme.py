"""The code of README.md runs, and gives what its comments say."""

import pathlib
import re

import equinox as eqx
import jax
import pytest
from support.helpers import BytesRead


root = pathlib.Path(__file__).parents[2]
readme = (root / "README.md").read_text()
fenced = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
prose = re.sub(r"^```.*?^```$", "", readme, flags=re.MULTILINE | re.DOTALL)
python = [text for language, text in fenced if language == "python"]


def _block(words: str, blocks: list[str] = python) -> str:
    (block,) = (text for text in blocks if words in text)
    return block


def _nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def test_every_python_block_is_tested():
    here = ("ckpt.eqx", "ec.CheckpointManager(")
    assert sorted(python) == sorted(_block(words) for words in here)


def test_it_is_short():
    lines = readme.splitlines()
    assert len(lines) <= 150
    assert all(len(line) <= 100 for line in lines if not line.startswith("|"))


def test_the_order_of_the_first_screen():
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    assert titles[:4] == ["eqx_ckpt", "Why not `.eqx`?", "One program", "Install"]
    assert (
        readme.index(python[0]) < readme.index("<picture>") < readme.index("## Install")
    )


@pytest.mark.parametrize(
    ("words", "row", "ours", "theirs"),
    [
        ("matched by name", "leaves are matched by", "name", "position"),
        ("the part that you need", "loads one array without", "yes", "no"),
        ("without your class", "loads without the class", "yes", "no"),
        ("a flipped bit", "finds a flipped bit", "yes", "no"),
        ("8 attention heads where 4", "refuses 8 attention heads where 4", "yes", "no"),
        (
            "fails or is killed leaves",
            "a save that fails or is killed leaves",
            "yes",
            "no",
        ),
        ("run in the background", "saves in the background", "yes", "no"),
        ("want no more packages", "packages that come with it", "8", "3"),
    ],
)
def test_why_not_eqx_is_what_the_table_says(words, row, ours, theirs):
    """`test_features` tries each cell."""
    why = readme.split("## Why not")[1].split("\n## ")[0]
    assert words in " ".join(why.split())
    (cells,) = (line.split("|") for line in readme.splitlines() if f"| {row}" in line)
    assert [cell.strip() for cell in cells[2:4]] == [ours, theirs]


def test_the_program(tmp_path, monkeypatch, capsys):
    """In a fresh interpreter: it imports all that it needs."""
    monkeypatch.chdir(tmp_path)
    *saves, swap, rest = _block("ckpt.eqx").split("\n\n")
    names: dict = {"__name__": "readme"}

    def run(text: str) -> int:
        with BytesRead() as read:
            exec(text, names)
        return read.total

    run("\n\n".join(saves[:-1]))
    model = names["state"]["model"]
    run("\n\n".join([saves[-1], swap]))
    comments = re.findall(r"^print\(.*\) +# (.*)$", swap, re.MULTILINE)
    # What comes after two spaces is a remark on what is printed.
    said = [comment.split("  ")[0] for comment in comments]
    assert capsys.readouterr().out.splitlines() == said == ["[0. 0.]", "[1. 1.]"]
    abstract = [x for x in jax.tree.leaves(names["like"]["model"]) if not callable(x)]
    assert all(type(x) is jax.ShapeDtypeStruct for x in abstract) and len(abstract) == 6

    show, rows, *part = rest.splitlines()
    slack = 10_000  # The index, the digests and the nodes that lead to the data.
    assert run(show) < slack
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert shown.startswith("Checkpoint(") and "layers\n" in shown
    _, comment = show.split("# Its tree:")
    assert re.sub(" +", " ", comment.strip(" .")) in shown

    layer = model.mlp.layers[1]
    assert run(rows) < layer.weight.nbytes + slack
    assert eqx.tree_equal(names["rows"], layer.weight[:8])
    assert run("\n".join(part)) < _nbytes(layer) + slack
    assert eqx.tree_equal(names["part"].mlp.layers[1], layer)
    others = eqx.tree_at(lambda m: m.mlp.layers[1], names["part"], None)
    others = [x for x in jax.tree.leaves(others) if not callable(x)]
    assert all(type(x) is jax.ShapeDtypeStruct for x in others)


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
    (block,) = (text for language, text in fenced if not language)
    assert command in block.splitlines()
    assert readme.splitlines().count(command) == 1
