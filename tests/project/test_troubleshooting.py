"""docs/troubleshooting.md has every error of the library, by its first words.

The words are those of the code: the page has to follow one that changes there.
"""

import ast
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_ckpt as ec


root = pathlib.Path(__file__).parents[2]
page = (root / "docs" / "troubleshooting.md").read_text()

# What is wrong with bytes in a file. It is told as the reason of an error that is on
# the page: "The checkpoint at `...` cannot be read: ".
_WITHIN = (
    "_kernel/_format",
    "_rebuild/_structure",
    "_functions/_index_functions",
    "_formats",
    "_kernel/_storage/_zstd",
    "_kernel/_storage/_codecs",
    "_zips/_zip",
    "_kernel/_load/_nodes",
    "_kernel/_load/_published",
    # Why a tree is saved without its structure.
    "_rebuild/_recorder",
    "_rebuild/_value_codec",
)


def _text(node: ast.AST) -> str:
    """A message in the code: what is filled in is `{}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{}"


def _messages() -> dict[str, str]:
    """What errors and warnings are made with, and where."""
    found: dict[str, str] = {}
    for path in sorted((root / "eqx_ckpt").rglob("*.py")):
        where = str(path.relative_to(root / "eqx_ckpt"))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if not re.search(r"(?<!Peer)(Error|Newer|Problem|warn)$", name):
                continue
            texts = [_text(x) for x in node.args]
            for text in [text for text in texts if re.search(r"[a-z] ", text)][:1]:
                found[text] = f"{where}:{node.lineno}"
    return found


# What `…` stands for: what is filled in, or the name of an argument.
_FILLED = r"(?:\S*\{\}\S*(?: and \{\}| \{\})*|\w+)"


def _patterns() -> dict[str, re.Pattern[str]]:
    """The first words of each error on the page, and what begins with just these."""
    cells = re.findall(r"^\| (``.*?) \| ", page, re.MULTILINE)
    spans = [x for cell in cells for x in re.findall(r"``(.*?)``(?!`)", cell)]
    words = [span.strip().removesuffix("…").rstrip() for span in spans]
    return {x: re.compile(re.escape(x).replace("…", _FILLED)) for x in words}


def test_every_error_is_there():
    patterns = _patterns().values()
    unknown = {
        text: where
        for text, where in _messages().items()
        if not any(pattern.match(text) for pattern in patterns)
        and (text.endswith((".", ":")) or not where.startswith(_WITHIN))
        # Only a copy without the rooms around the kernel says so.
        and not text.startswith("Without ")
    }
    assert not unknown, "\n".join(f"{w}  {t[:100]}" for t, w in unknown.items())


# Errors that are put together of parts, so that they stand nowhere as one text.
_TOGETHER = (
    "The leaf `…` cannot be saved:",
    "The leaf `…` cannot be written:",
    "The graft of `…` does not fit the model",
    "…: another process has failed:",
    "The shapes of these leaves fit, and do not say how they are stored:",
)


def test_nothing_is_there_that_is_not_raised():
    messages, patterns = _messages(), _patterns()
    unused = {x for x, words in patterns.items() if not any(map(words.match, messages))}
    assert unused == set(_TOGETHER)


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
    block = re.search(r"^```\n(RuntimeError.*?)^```$", page, re.M | re.S)[1]
    model = _both(64, 8)
    state = {"model": model, "opt": optax.adam(1e-3).init(model)}
    ec.tree_serialise_leaves(tmp_path / "7", state)
    with pytest.raises(RuntimeError) as caught:
        ec.tree_deserialise_leaves(tmp_path / "7", _both(32, 4), source="model")
    first, rest = f"RuntimeError: {caught.value}\n".split("\n", 1)
    shown, expected = block.split("\n", 1)
    assert first.startswith(shown.removesuffix("..."))
    assert rest.replace(str(tmp_path), "/runs") == expected
