"""The tests themselves: where they are, and what they know of the insides."""

import pathlib
import re
import textwrap

from support import inside


HERE = pathlib.Path(__file__).parents[1]


def test_no_inside_is_lost():
    """The names in `support.inside` are there."""
    assert inside.lost() == []


def test_few_tests_know_the_insides():
    """Others go through the public API, or through `support`."""
    private = re.compile(r"eqx_ckpt(\.| import )_")
    files = [x for x in HERE.rglob("test_*.py") if private.search(x.read_text())]
    assert len(files) <= 20, sorted(x.name for x in files)


def test_the_table_of_features_has_every_test_once():
    text = (HERE.parent / "CONTRIBUTING.md").read_text()
    _, _, table = text.partition("\nFeature | Its tests")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = [
        name
        for row in rows
        for name in re.findall(r"`([\w/]+)`", row[row.index("|") :])
    ]
    tests = {str(x.relative_to(HERE))[:-3] for x in HERE.rglob("test_*.py")}
    whole = {name for name in named if (HERE / name).is_dir()}
    alone = {x for x in tests if pathlib.PurePath(x).parts[0] not in whole}
    assert len(rows) <= 35 and sorted(named) == sorted(alone | whole)


def test_programs_are_files():
    """Linters see no program in a string. The one of `scripts` is run by `-c`, as its
    forks are."""
    begins = re.compile(r'[=(]\s*f?"""\\?\n( *(?:import|from) .*?)"""', re.DOTALL)
    texts = {
        path.name: [textwrap.dedent(x).count("\n") for x in begins.findall(text)]
        for path in HERE.rglob("*.py")
        if (text := path.read_text())
    }
    assert {name for name, sizes in texts.items() if max(sizes, default=0) > 9} == {
        "scripts.py"
    }


def test_names_of_files_of_tests_differ():
    """Pytest imports two files of one name as one module."""
    names = [path.name for path in HERE.rglob("test_*.py")]
    assert sorted(names) == sorted({*names})
