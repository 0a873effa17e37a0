"""What `import eqx_ckpt` imports, and how its names are found."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest
from support import scripts

import eqx_ckpt as ec


INIT = pathlib.Path(ec.__file__)


def _printed(*arguments: object) -> str:
    """What a new process of Python prints."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _program(name: str, *arguments: str) -> str:
    return _printed(scripts.PROGRAMS / f"{name}.py", *arguments)


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """The modules that a new process has after the import, after it has asked for two
    names, and after it has asked for all."""
    asked = ["eqx_ckpt", "eqx_ckpt.tree_serialise_leaves, eqx_ckpt.open"]
    asked.append("[getattr(eqx_ckpt, name) for name in dir(eqx_ckpt)]")
    code = "import json, sys; import eqx_ckpt\n"
    code += "".join(f"{x}\nprint(json.dumps([*sys.modules]))\n" for x in asked)
    return [{*json.loads(line)} for line in _printed("-c", code).splitlines()]


def test_the_import_is_of_no_library_and_no_more_than_hooks(imported):
    found = imported[0]
    assert not {"jax", "numpy", "equinox", "tensorstore", "click"} & found
    ours = {x.replace("._kernel", "") for x in found if x.startswith("eqx_ckpt.")}
    deep = {x for x in ours if x.count(".") > 1}
    # Rooms provide hooks, and import nothing more: there are threads and locks below.
    assert {x for x in deep if not x.startswith("eqx_ckpt._runtime._")} == set()


def test_a_name_imports_what_it_needs(imported):
    _, saves, whole = imported
    assert "eqx_ckpt._kernel._save._serialise" in saves
    rooms = {x.split(".")[1] for x in saves if x.startswith("eqx_ckpt.") and "._" in x}
    assert not {"_graft", "_interop", "_edit", "merging", "_cli"} & rooms
    assert {"eqx_ckpt._graft._graft", "eqx_ckpt.merging"} <= whole


def test_type_checkers_see_the_names_that_are_there():
    typed = {}
    for block in ast.parse(INIT.read_text()).body:
        for line in block.body if isinstance(block, ast.If) else []:
            if isinstance(line, ast.ImportFrom):
                for x in line.names:
                    assert x.asname == x.name  # As what is given on is marked.
                    typed[x.name] = line.module or x.name
    assert typed == ec._MODULES and sorted(typed) == ec.__all__
    assert dir(ec) == sorted([*typed, "__version__"])
    for name, module in typed.items():
        value = getattr(ec, name)
        home = value.__name__ if name == module else value.__module__
        assert home == f"eqx_ckpt.{module}"


def test_all_names_are_imported_and_helped_with():
    code = "from eqx_ckpt import *; assert graft and adapters.stack and open"
    assert "keep_every" in _printed("-c", f"{code}; import eqx_ckpt; help(eqx_ckpt)")


def test_names_that_threads_ask_for_at_once():
    assert _program("names_that_threads_ask_for") == "[]\n"


@pytest.mark.parametrize(
    ("error", "text", "told"),
    [
        ("ImportError", "no tensorstore", "ImportError: no tensorstore"),
        ("AttributeError", "no jax.x", "`eqx_ckpt.open` cannot be imported: no jax.x"),
    ],
)
@pytest.mark.parametrize("way", ["from", "attribute"])
def test_errors_of_an_import_are_told(error, text, told, way):
    assert told in _program("import_that_fails", way, error, text)
