"""The command line as a whole: real processes, exit status, help, pages."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
from subprocess import PIPE

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from support import inside, scripts
from support.command import main

import eqx_ckpt as ec


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


def test_near_names_of_commands_and_options(run, ckpt):
    code, out, err = run("verfy", ckpt)
    assert (code, out) == (
        2,
        "",
    ) and "There is no command `verfy`. Is it `verify`" in err
    assert "no command `xyz`.\n" in run("xyz")[2]
    assert "--values" in run("diff", ckpt, ckpt, "--vales")[2]


def test_errors_are_in_words_of_the_command_line(run, ckpt, steps, tmp_path):
    tree = {"w": jnp.ones(3), "act": jnp.tanh}
    function = ec.function(lambda tree, x: tree["w"] * x, jnp.ones(3))
    ec.tree_serialise_leaves(tmp_path / "f", tree, functions={"f": function})
    other = eqx.nn.MLP(2, 2, 64, 3, activation=jnp.tanh, key=jax.random.key(0))
    ec.tree_serialise_leaves(tmp_path / "b", {"model": other, "step": 4})
    ec.tree_serialise_leaves(tmp_path / "m", {"w": jnp.ones(3), "step": 4})
    ec.tree_serialise_leaves(tmp_path / "n", {"w": jnp.ones(3), "step": 5})
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", tree["w"])
    f, b, m, n = (tmp_path / x for x in "fbmn")
    two = ("merge", m, m, "--to", tmp_path / "c", "--method")
    for call, text in [
        (("convert", ckpt, b), "Pass `--overwrite`."),
        (("convert", f, tmp_path / "x.zip", "--chunks", 0), "'--chunks'"),
        (("convert", f, tmp_path / "x.safetensors"), "with `--drop-functions`"),
        (("convert", m, tmp_path / "x.safetensors", "--compression", "lz4"), "`--comp"),
        (("edit", f, tmp_path / "c", "--cast", "bfloat16"), "with `--drop-functions`."),
        (("edit", f, tmp_path / "c", "--cast", "int8"), "`--cast` must be a floating"),
        (("edit", f, tmp_path / "c", "--cast", "no"), "such as `bfloat16`"),
        (
            ("export", ckpt, tmp_path / "x.safetensors"),
            "--skip key --skip lr --skip step`",
        ),
        (("average", m, n, "--to", "c"), "`--node` takes a node without them"),
        (("average", b, ckpt, "--node", "model", "--to", "c"), "`--static '*'` lets"),
        (("average", b, b, "--to", "c", "--weights", "1"), "1 weights for 2 trees"),
        ((*two, "ties"), "takes a `--base`"),
        ((*two, "slerp", "--t", "3"), "`--t` must be in [0, 1]"),
        ((*two, "dare", "--base", ckpt, "--seed", 2**32), "is not in the range"),
        (("steps", steps, "--delete", 20, "--yes"), "Pass `--unpin 20`."),
        (("cat", ckpt, "model"), "see `ls`."),
        (("info", tmp_path / "m.eqx"), "Python reads it, given a tree"),
    ]:
        code, out, err = run(*call)
        assert (code, out) == (2, "") and text in err, (call, err)
        assert not re.search(r"`(ec\.|jnp\.|\w+=|\w+\(|\.tree)", err), err


def test_who_reads_may_stop(ckpt):
    code = f"{sys.executable} -m eqx_ckpt ls {ckpt} --json | head -1"
    done = subprocess.run(code, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(("path", "status"), [("ckpt", 0), ("none", 2)])
def test_nobody_reads(ckpt, path, status):
    command = f"{sys.executable} -m eqx_ckpt info {ckpt.parent / path} >&- 2>&-"
    assert subprocess.run(command, shell=True).returncode == status


def test_no_accelerator_is_started(ckpt):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    program = scripts.PROGRAMS / "command_that_says_its_platforms.py"
    command = [sys.executable, str(program), "stats", str(ckpt)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "cpu", done.stderr


def _help(*command):
    """The words that begin the lines of a help, and the options among them."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--help"]) == 0
    rows = re.findall(r"^  (\S.*?)(?:  |$)", out.getvalue(), re.MULTILINE)
    return out.getvalue(), [row for row in rows if row[0] == "-"]


def _commands():
    text, _ = _help()
    return re.findall(r"^  (\w+)  ", text.partition("Commands:")[2], re.MULTILINE)


@pytest.mark.parametrize("name", _commands())
def test_every_command_is_on_the_page(name):
    _, options = _help(name)
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", _page, re.M | re.S)
    assert section is not None, f"docs/cli.md has no section `{name}`"
    assert f"`{name} " in section[1]
    spellings = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(options)))
    assert {"-h", "--help"} <= spellings
    for spelling in spellings - {"-h", "--help", "--json"}:
        assert f"`{spelling}" in section[1], f"{name} {spelling}"
    assert ("--json" in spellings) == (name not in ("demo", "view")), name


def test_the_page_has_no_more():
    named = set(re.findall(r"^### (.*)$", _page, re.M))
    assert named == set(_commands()) and len(named) > 10


def test_help_is_one_line_a_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "..." not in out.partition("Commands:")[2]
    assert all(f"  {name} " in out for name in _commands())
    assert max(map(len, out.splitlines())) <= 80


def test_completion(capsys, monkeypatch):
    monkeypatch.setenv("_EQX_CKPT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "eqx-ckpt ver")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["plain,verify"]


def test_numbers_that_json_lacks():
    data = {"a": [float("nan"), float("inf"), 1 + 2j], 3: {1.5}}
    text = json.dumps(inside.jsonable(data), allow_nan=False)
    assert json.loads(text) == {"a": ["nan", "inf", [1.0, 2.0]], "3": "{1.5}"}


def test_colour_is_for_terminals(ckpt, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)

    def is_coloured(out):
        with contextlib.redirect_stdout(out):
            assert main(["ls", ckpt]) == 0
        return "\x1b[" in out.getvalue()

    assert is_coloured(Terminal()) and not is_coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_coloured(Terminal())


def test_columns_that_are_empty_are_left_out():
    columns = [("a", False), ("b", False), ("c", True)]
    shown = inside.table(columns, [("x\x1b", "", "1"), ("y", "", "22")])
    assert shown == ["  a       c", "  x\\x1b   1", "  y      22"]
    assert inside.table(columns, []) == []
