"""What ARCHITECTURE.md and CONTRIBUTING.md name is there."""

import ast
import collections
import pathlib
import re

import pytest


ROOT = pathlib.Path(__file__).parents[2]
_module = re.compile(
    r"`((?:_\w+/)+_\w+\.py|(?:tests|benchmarks|docs|examples)/[\w/.]+)`"
)
# What a line of the picture of the rooms begins with: their names.
_NAMES = 28


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_are_there(name):
    found = _module.findall((ROOT / name).read_text())
    assert found
    places = [ROOT, ROOT / "eqx_ckpt", ROOT / "eqx_ckpt/_kernel"]
    missing = [x for x in found if not any((place / x).exists() for place in places)]
    assert not missing


def test_the_architecture_is_one_screen_and_has_every_room():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 90
    package = ROOT / "eqx_ckpt"
    folders = [*package.iterdir(), *(package / "_kernel").iterdir()]
    rooms = {x.name for x in folders if (x / "__init__.py").exists()}
    rooms -= {"_kernel", "__pyinstaller"}
    drawn = "".join(text.partition("## Rooms")[2].split("```")[1::2])
    names = [x for line in drawn.splitlines() for x in line[:_NAMES].split()]
    assert sorted(names) == sorted(rooms)


def test_locks_and_threads_are_made_in_one_place():
    """Ctrl-C leaves those of Python locked, or half started: see the module."""
    found = re.compile(
        r"threading\.(R?Lock|Event|Condition|Thread|Timer)\(|import concurrent"
    )
    package = ROOT / "eqx_ckpt"
    makers = [x for x in package.rglob("*.py") if found.search(x.read_text())]
    assert makers == [package / "_kernel/_runtime/_threads.py"]


def test_the_format_is_short():
    assert len((ROOT / "FORMAT.md").read_bytes()) <= 24_000


def test_no_two_classes_have_one_name():
    """Whoever reads a name has to look in one place."""
    found = collections.defaultdict(list)
    for path in sorted((ROOT / "eqx_ckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


# Methods of NamedTuples.
_OPEN = {"_replace", "_asdict", "_fields"}


def test_no_room_reads_what_is_private_to_another():
    """A room asks for a `Source` or a `LeafBody`, and not for attributes of others."""
    defined, read = collections.defaultdict(set), []
    for path in sorted((ROOT / "eqx_ckpt").rglob("*.py")):
        room, tree = path.parent.name, ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        imports = [x for x in nodes if isinstance(x, ast.Import | ast.ImportFrom)]
        known = {"self", "cls", *(a.asname or a.name for x in imports for a in x.names)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                defined[node.name].add(room)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined[node.target.id].add(room)
            elif isinstance(node, ast.Attribute):
                of = node.value.id if isinstance(node.value, ast.Name) else ""
                if of == "self" and isinstance(node.ctx, ast.Store):
                    defined[node.attr].add(room)
                if node.attr[:1] == "_" and node.attr[:2] != "__" and of not in known:
                    read.append((node.attr, room, f"{path.name}:{node.lineno}"))
    others = [x for x in read if defined[x[0]] and x[1] not in defined[x[0]]]
    assert not [x for x in others if x[0] not in _OPEN]
