"""The kernel passes its own tests in a copy in which the rooms around it are deleted:
`python tests/project/kernel.py [ARGUMENT OF PYTEST...]`.

A test that needs one of those rooms is skipped, by the error that names it. The program
fails if a test fails, or if fewer than three quarters are left to pass.
"""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest


_ROOMS = "format storage tree load save run runtime".split()
# Those of minutes, which ask the system and not the layout of the package.
_SLOW = (
    "save/test_kill save/test_store_kill save/test_power save/test_beside "
    "save/test_faults runtime/test_interrupts "
    "load/test_attacks load/test_records"
).split()
# Those that open files of other libraries in the midst of something else.
_OTHERS = (
    "save/test_lazy_routes.py::test_a_source_that_is_gone_is_named[flax]",
    "tree/test_register.py::test_equinox_files_do_not_have_them",
    "load/test_checkpoint.py::test_nothing_at_the_path",
    "load/test_checkpoint.py::test_a_forked_child_is_told_to_spawn",
    "load/test_messages.py::test_an_eqx_file_does_not_pickle",
    "run/test_mixed_runs.py",
    # Those that call all of these rooms.
    "tree/test_trees.py::test_children_of_one_name",
    "tree/test_states.py::test_one_batch_norm_by_every_route",
    "tree/test_states.py::test_reordered_states_by_every_route",
    "tree/test_states.py::test_layers_that_were_exchanged_by_every_route",
    "tree/test_states.py::test_layers_that_come_and_go_have_their_own_statistics",
    "tree/test_states.py::test_a_state_that_was_saved_again_without_some_leaves",
    "tree/test_states.py::test_new_layers_in_a_graft_take_no_statistics",
    "tree/test_states.py::test_statistics_of_other_layers_are_not_compared_or_merged",
    "save/test_lazy_routes.py::test_every_format_to_every_form",
    "save/test_paged.py",
    "storage/test_macs.py",
    "tree/test_altered.py",
    "tree/test_libraries.py",
    "save/test_repeated.py::test_a_call_gives_what_it_gives_at_first_whatever_was_called_before",
)
# How many of the tests have to pass in the copy.
_SHARE = 0.75

_missing = re.compile(
    r"No module named 'eqx_ckpt\.\w+|Without `eqx_ckpt\._\w+`"
    r"|cannot import name '\w+' from 'eqx_ckpt|module .eqx_ckpt\S*. has no attribute"
)


def main(arguments: list[str]) -> int:
    root = pathlib.Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as copy:
        around = _copy(root, pathlib.Path(copy))
        tests = [f"tests/{room}" for room in _ROOMS]
        tests += [f"--ignore=tests/{name}.py" for name in _SLOW]
        tests += [f"--deselect=tests/{name}" for name in _OTHERS]
        plugin = pathlib.Path(__file__).stem
        print(f"Without {', '.join(around)}:")
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", plugin, *tests, *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": f"{copy}:{copy}/tests/project"},
        ).returncode


def _copy(root: pathlib.Path, copy: pathlib.Path) -> list[str]:
    """Copies the project without the rooms that the kernel must not import."""
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "site", "build")
    shutil.copytree(root, copy, ignore=ignored, dirs_exist_ok=True)
    folders = [x.parent for x in (copy / "eqx_ckpt").glob("*/__init__.py")]
    around = sorted(x.name for x in folders if x.name != "_kernel")
    for room in around:
        shutil.rmtree(copy / "eqx_ckpt" / room)
    init = copy / "eqx_ckpt" / "__init__.py"
    tree = ast.parse(init.read_text())
    tree.body = [x for x in map(lambda x: _without(x, {*around}), tree.body) if x]
    init.write_text(ast.unparse(tree))
    return around


def _without(line: ast.stmt, rooms: set[str]) -> ast.stmt | None:
    """A line of the package's `__init__`, without what it imports from some rooms."""
    if not isinstance(line, ast.ImportFrom) or line.module is not None:
        return line
    line.names = [x for x in line.names if x.name not in rooms]
    return line if line.names else None


# ---- As a plugin of pytest, in the copy.


def _is_missing(error: BaseException | None) -> bool:
    seen = set()  # Causes may go in a circle.
    while error is not None and id(error) not in seen:
        if _missing.search(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed and _is_missing(call.excinfo and call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "needs a room around the kernel")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if report.failed and _missing.search(str(report.longrepr)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, "needs a room around the kernel")
    return report


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if hasattr(config, "workerinput"):
        return
    passed = len(terminalreporter.stats.get("passed", ()))
    skipped = len(terminalreporter.stats.get("skipped", ()))
    text = f"{passed} tests of the kernel pass alone, and {skipped} are skipped."
    terminalreporter.write_line(text)
    if passed < _SHARE * (passed + skipped):
        terminalreporter.write_line("Too few of them pass alone.")
        terminalreporter._session.exitstatus = 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
