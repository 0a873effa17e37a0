"""Each check of `.ci/run` fails in a copy of the project in which something is wrong.

`.ci/run` itself is the control: there, the same checks pass.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest


root = pathlib.Path(__file__).parents[2]


def add(text):
    return lambda was: was + text


def swap(old, new):
    def change(was):
        assert old in was
        return was.replace(old, new, 1)

    return change


def cell(source):
    def change(was):
        notebook = json.loads(was)
        code = next(x for x in notebook["cells"] if x["cell_type"] == "code")
        code["source"] = [source]
        return json.dumps(notebook)

    return change


# What is broken in which file, the check, and all that it says.
BREAKS = {
    "an unused import": (
        "eqx_ckpt/_kernel/_errors.py",
        add("import os\n"),
        "lint",
        "F401",
    ),
    "a layout": (
        "eqx_ckpt/_version.py",
        add("x  =  1\n"),
        "lint",
        "eqx_ckpt/_version.py",
    ),
    "a floor": (
        "eqx_ckpt/_kernel/_format/_text.py",
        add("from ..._cli import _main as _main\n"),
        "floors",
        r"_kernel\._format\._text -> eqx_ckpt\._cli\._main",
    ),
    "a room that the kernel needs": (
        "eqx_ckpt/_kernel/_load/_open.py",
        add("__import__('importlib').import_module('eqx_ckpt._show')\n"),
        "kernel -n 0 -k checkpoint",
        "Too few of them pass alone",
    ),
    "a type": (
        "eqx_ckpt/_version.py",
        add('number: int = "text"\n'),
        "types",
        "_version.py:.* is not assignable to declared type",
    ),
    # One build of the site names all that is wrong in it.
    "links, anchors and a name of the API": (
        "docs/faq.md",
        add("\n[a](nowhere.md) [b](saving.md#no) [`nothing`][eqx_ckpt.nothing]\n"),
        "site",
        "'nowhere.md', but the target is not found",
        "does not contain an anchor",
        "eqx_ckpt.nothing",
    ),
    "a docstring without its anchor": (
        "eqx_ckpt/_kernel/_load/_checkpoint.py",
        swap('"""The stored functions by name', '_ = """The stored functions by name'),
        "site",
        "eqx_ckpt.Checkpoint.functions",
    ),
    "an example of a docstring": (
        "eqx_ckpt/_kernel/_tree/_leaf.py",
        swap("(True, True, False)", "(True, True, True)"),
        "python -m pytest -n 0 -q tests/project/test_docstrings.py -k is_storable",
        "1 failed",
    ),
    "a block of a page": (
        "docs/faq.md",
        add("\n```python\nassert False\n```\n"),
        "python -m pytest -n 0 -q tests/project/test_site.py -k faq",
        "1 failed",
    ),
    "a warning in a test": (
        "tests/format/test_view.py",
        add("\n\ndef test_warns():\n    __import__('warnings').warn('hello')\n"),
        "python -m pytest -n 0 -q tests/format/test_view.py -k warns",
        "1 failed",
    ),
    "a command of the README": (
        "README.md",
        swap("python -m pip install -e . && ", "pip install . && "),
        "demo",
        "README.md lacks",
    ),
    "the tests of the README": (
        "README.md",
        swap("&& python -m pytest", "&& pytest"),
        "tests",
        "README.md lacks",
    ),
    "the README as text": (
        "README.md",
        swap(
            "jax.numpy as jnp, eqx_ckpt as ec\n\nclass",
            "jax.numpy as jnp, eqx_ckptt as ec\n\nclass",
        ),
        "package",
        "No module named 'eqx_ckptt'",
    ),
    "a limit of the benchmarks": (
        "benchmarks/limits.py",
        swap("_SLACK = 32 * _MIB", "_SLACK = -(2**40)"),
        "limits S",
        "S, eqx_ckpt",
    ),
    "a notebook": (
        "notebooks/quickstart.ipynb",
        cell("assert 1 == 2"),
        "notebooks notebooks/quickstart.ipynb",
        "AssertionError",
    ),
    "a tag": (
        "eqx_ckpt/_version.py",
        swap('"0.1.0"', '"9.9.9"'),
        "version v0.1.0",
        "The tag is v0.1.0, and the version 9.9.9",
    ),
    "the lowest versions": (
        "pyproject.toml",
        swap('"numpy>=', '"numpy>=9999.'),
        "lowest",
        "ResolutionImpossible",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("what", BREAKS)
def test_a_check_finds(what, tmp_path):
    path, change, check, *said = BREAKS[what]
    # So that it can be installed: not its tests' own environment, nor what is ignored.
    copy = tmp_path / "copy"
    listed = ["git", "-C", root, "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)
    (copy / path).write_text(change((copy / path).read_text()))
    # The copy is what is imported, and what its own tests find.
    env = {**os.environ, "PYTHONPATH": str(copy)}
    env.pop("PYTEST_ADDOPTS", None)
    command = ["bash", ".ci/run", *check.split()]
    run = subprocess.run(
        command, cwd=copy, env=env, capture_output=True, text=True, errors="replace"
    )
    assert run.returncode != 0
    out = run.stdout + run.stderr
    for text in said:
        assert re.search(text, out), out[-4000:]


_CHECK = re.compile(r"^(\w+)\(\)", re.MULTILINE)
# Parts of other checks.
_PARTS = {"step", "readme", "steady", "aside", "await", "environments"}


def test_workflows_make_the_checks_of_the_list():
    script = (root / ".ci/run").read_text()
    checks = set(_CHECK.findall(script)) - _PARTS
    ran = set()
    for workflow in (root / ".github/workflows").glob("*.yml"):
        for step in re.findall(r"run: (.*)", workflow.read_text()):
            assert step.startswith(".ci/run "), step
            ran.add(step.split()[1])
    assert ran == checks
    # All of them are made before a change lands too, but for that of a tag.
    whole = script.partition("# ---- All of them.")[2]
    called = re.findall(r"^\s*(?:steady |aside )?(\w+)", whole, re.MULTILINE)
    assert checks - set(called) == {"version"}


_ONCE = """
import pathlib

def test_{name}():
    path = pathlib.Path(__file__).with_suffix(".ran")
    was = path.exists()
    path.touch()
    assert {holds}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "holds", "code", "said"),
    [
        ("clock", "was", 0, "test_it.py::test_clock\n"),
        ("clock", "False", 1, "test_it.py::test_clock\n"),
        ("kill", "was", 1, "test_kill has failed, which is never by chance"),
        ("clocks", "was", 1, "4 tests have failed: too many"),
        ("import", "was", 2, "1 error during collection"),
    ],
)
def test_a_second_chance(name, holds, code, said, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci/run", tmp_path / ".ci/run")
    names = [f"clock_{i}" for i in range(4)] if name == "clocks" else [name]
    for i, one in enumerate(names):
        file = tmp_path / ("test_it.py" if len(names) == 1 else f"test_{i}.py")
        text = _ONCE.format(name=one, holds=holds)
        if name == "import":  # No test of the module runs then.
            text = text.replace("def test_import()", "if True")
        file.write_text(text)
    env = {**os.environ, "PYTHONPATH": ""}
    env.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(
        ["bash", ".ci/run", "steady", "python", "-m", "pytest", "-p", "xdist"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert said in run.stdout + run.stderr
