"""What `import eqx_ckpt` imports, and how its names are found."""

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest

import eqx_ckpt as ec


INIT = pathlib.Path(ec.__file__)


def _printed(code: str) -> str:
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _imported(line: str) -> set[str]:
    """The modules that a new process has after a line."""
    code = f"import json, sys; before = {{*sys.modules}}; {line}"
    return {*json.loads(_printed(f"{code}; print(json.dumps([*sys.modules]))"))}


def test_the_import_is_of_no_library_and_no_more_than_hooks():
    found = _imported("import eqx_ckpt")
    assert not {"jax", "numpy", "equinox", "tensorstore", "click"} & found
    ours = {x.replace("._kernel", "") for x in found if x.startswith("eqx_ckpt.")}
    deep = {x for x in ours if x.count(".") > 1}
    # Rooms provide hooks, and import nothing more: there are threads and locks below.
    assert {x for x in deep if not x.startswith("eqx_ckpt._runtime._")} == set()


def test_a_name_imports_what_it_needs():
    whole = _imported("import eqx_ckpt as ec; [getattr(ec, name) for name in dir(ec)]")
    saves = _imported("import eqx_ckpt as ec; ec.tree_serialise_leaves; ec.open")
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
    assert "keep_every" in _printed(f"{code}; import eqx_ckpt; help(eqx_ckpt)")


def test_names_that_threads_ask_for_at_once():
    code = """
import sys, threading
import eqx_ckpt as ec
sys.setswitchinterval(1e-5)
names, wrong = [x for x in reversed(dir(ec))], []
barrier = threading.Barrier(len(names))
def ask(name):
    barrier.wait()
    try:
        getattr(ec, name)
    except BaseException as e:
        wrong.append(repr(e))
threads = [threading.Thread(target=ask, args=(x,)) for x in names]
[x.start() for x in threads]
[x.join() for x in threads]
print(wrong)
"""
    assert _printed(code) == "[]\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("ImportError('no tensorstore')", "ImportError: no tensorstore"),
        ("AttributeError('no jax.x')", "`eqx_ckpt.open` cannot be imported: no jax.x"),
    ],
)
@pytest.mark.parametrize("line", ["from eqx_ckpt import open", "ec.open"])
def test_errors_of_an_import_are_told(error, told, line):
    code = f"""
import sys, traceback
import eqx_ckpt as ec
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "eqx_ckpt._kernel._load._checkpoint":
            raise {error}
sys.meta_path.insert(0, Broken())
try:
    {line}
except ImportError:
    print(traceback.format_exc())
"""
    assert re.search(re.escape(told), _printed(code))
