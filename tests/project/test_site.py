"""The pages of the site: their code runs, their links lead somewhere, and every public
name is in the API."""

import importlib.util
import inspect
import pathlib
import re
import runpy

import pytest
from support import inside
from support.helpers import new_orbax

import eqx_ckpt as ec


root = pathlib.Path(__file__).parents[2]
docs = root / "docs"
pages = sorted(docs.rglob("*.md"))
# These have tests of their own.
ELSEWHERE = {"finetuning.md", "processes.md", "resuming.md", "stores.md"}


def _name(page):
    return str(page.relative_to(docs))


def _blocks(page):
    text = page.read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _needs_package(name):
    """A page about another package runs where that is installed: `eqx_ckpt[pages]`."""
    missing = not importlib.util.find_spec(name)
    return [pytest.mark.skipif(missing, reason=f"needs {name}")]


_signs = all(map(importlib.util.find_spec, ("model_signing", "OpenSSL")))
_needs = {
    "orbax.md": [new_orbax],
    "tensorboard.md": _needs_package("tensorboardX"),
    "wandb.md": _needs_package("wandb"),
    "grain.md": _needs_package("grain"),
    "hydra.md": _needs_package("hydra"),
    "signing.md": [pytest.mark.skipif(not _signs, reason="needs model-signing")],
}
programs = [
    pytest.param(page, marks=_needs.get(page.name, []), id=_name(page))
    for page in pages
    if _blocks(page) and _name(page) not in ELSEWHERE
]


@pytest.fixture
def unregistered():
    """The types that a page registers are forgotten."""
    with inside.registered_types_forgotten():
        yield


@pytest.mark.parametrize("page", programs)
def test_a_page_is_a_program(page, tmp_path, monkeypatch, capsys, unregistered):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for block in _blocks(page):
        exec(compile(block, page.name, "exec"), names)
        # What a comment says of a line is so.
        for line, said in re.findall(r"^([^#\n=]+)  # (LazyArray\(.*\))$", block, re.M):
            assert repr(eval(line, names)) == said
        for said in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE):
            assert said in capsys.readouterr().out


def test_the_tour_shows_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (docs / "tour.md").read_text()
    names = {"__name__": "tour"}
    for block in _blocks(docs / "tour.md")[:2]:
        exec(block, names)
    (shown,) = re.findall(
        r"^```text\n(Checkpoint\(.*?)^  \.\.\.\n```", text, re.M | re.S
    )
    lines = str(names["ckpt"]).replace(str(tmp_path), "/home/me").splitlines()
    bare = [re.sub(" +", " ", line) for line in lines]
    expected = [re.sub(" +", " ", line) for line in shown.splitlines()]
    assert bare[: len(expected)] == expected


def test_every_public_name_is_in_the_api():
    text = "".join(page.read_text() for page in (docs / "api").glob("*.md"))
    shown = re.findall(r"^::: eqx_ckpt\.(\w+)$", text, re.MULTILINE)
    public = [name for name in dir(ec) if not name.startswith("_")]
    assert sorted(shown) == sorted(public)
    linked = re.findall(r"\[eqx_ckpt\.([\w.]+)\]", text)
    for name in linked:
        assert name.split(".")[0] in public
    # Each but the classes and the errors that calls return is found by what it does.
    index = (docs / "api" / "index.md").read_text()
    for name in public:
        if inspect.isfunction(getattr(ec, name)):
            assert f"`{name}`" in index, name


@pytest.mark.parametrize("page", [*root.glob("*.md"), *pages], ids=lambda p: p.name)
def test_links_lead_to_files(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_pictures_are_those_of_their_script():
    script = runpy.run_path(str(docs / "_pictures.py"))
    for name, narrow in script["PICTURES"].items():
        assert (docs / "pictures" / name).read_text() == script["draw"](narrow)
