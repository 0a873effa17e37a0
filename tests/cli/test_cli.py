"""The command line as a whole: real processes, exit status, help, pages."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys
from subprocess import PIPE

import click
import jax.numpy as jnp
import pytest

import eqx_ckpt as ec
from eqx_ckpt._cli import _main, _output


_page = pathlib.Path(__file__).parents[2].joinpath("docs", "cli.md").read_text()


def test_exit_status(ckpt, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "b", {"w": jnp.ones(2)})
    calls = [
        (("info", ckpt), 0),
        (("diff", ckpt, tmp_path / "b"), 1),
        (("ls", tmp_path / "none"), 2),
    ]
    start = [sys.executable, "-m", "eqx_ckpt"]
    processes = [
        subprocess.Popen([*start, *map(str, call)], stdout=PIPE, stderr=PIPE, text=True)
        for call, _ in calls
    ]
    for process, (call, status) in zip(processes, calls):
        out, err = process.communicate()
        assert process.returncode == status, (call, out, err)
        assert bool(out) == (status < 2) and bool(err) == (status == 2)
        assert len(err.splitlines()) <= 1 and "\x1b" not in out + err


def test_usage_that_is_wrong(run):
    for call in (
        ["ls"],
        ["nonsense"],
        ["ls", "a", "b", "c"],
        ["ls", "a", "--depth", "0"],
    ):
        code, out, err = run(*call)
        assert (code, out) == (2, "") and "Usage: " in err
    code, out, err = run()
    assert (code, err) == (2, "") and "Commands:" in out
    assert run("--version") == (0, f"{ec.__version__}\n", "")


def test_who_reads_may_stop(ckpt):
    code = f"{sys.executable} -m eqx_ckpt ls {ckpt} --json | head -1"
    done = subprocess.run(code, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_no_accelerator_is_started(ckpt):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    code = """
import atexit, jax, sys
from eqx_ckpt._cli._main import script
atexit.register(lambda: print(jax.config.jax_platforms))
script()
"""
    command = [sys.executable, "-c", code, "info", str(ckpt)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "cpu", done.stderr


@pytest.mark.parametrize("name", list(_main.commands.commands))
def test_every_command_is_on_the_page(name):
    command = _main.commands.commands[name]
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", _page, re.M | re.S)
    assert section is not None, f"docs/cli.md has no section `{name}`"
    assert f"`{name} " in section[1]
    for option in command.params:
        if not isinstance(option, click.Option) or option.name == "as_json":
            continue
        for spelling in [*option.opts, *option.secondary_opts]:
            assert f"`{spelling}" in section[1], f"{name} {spelling}"
    if name != "demo":
        assert any(option.name == "as_json" for option in command.params), name


def test_the_page_has_no_more():
    named = set(re.findall(r"^### (.*)$", _page, re.M))
    assert named == set(_main.commands.commands)


def test_help_is_one_line_a_command(capsys):
    assert _main.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "..." not in out.partition("Commands:")[2]
    assert all(f"  {name} " in out for name in _main.commands.commands)
    assert max(map(len, out.splitlines())) <= 80


def test_completion(capsys, monkeypatch):
    monkeypatch.setenv("_EQX_CKPT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "eqx-ckpt ver")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setattr(sys, "argv", ["eqx-ckpt"])
    with pytest.raises(SystemExit):
        _main.main()
    assert capsys.readouterr().out.split() == ["plain,verify"]


def test_numbers_that_json_lacks():
    data = {"a": [float("nan"), float("inf"), 1 + 2j], 3: {1.5}}
    text = json.dumps(_output.jsonable(data), allow_nan=False)
    assert json.loads(text) == {"a": ["nan", "inf", [1.0, 2.0]], "3": "{1.5}"}


def test_colour_is_for_terminals(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert _output.is_coloured(Terminal()) and not _output.is_coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _output.is_coloured(Terminal())


def test_columns_that_are_empty_are_left_out():
    columns = [_output.Column("a"), _output.Column("b"), _output.Column("c", True)]
    lines = _output.table(columns, [("x\x1b", "", "1"), ("y", "", "22")])
    shown = [_output.drawn(line, False) for line in lines]
    assert shown == ["  a       c", "  x\\x1b   1", "  y      22"]
    assert _output.table(columns, []) == []
