"""What the shell completes, in a process that has not imported JAX."""

import os
import resource
import subprocess
import sys

import equinox as eqx
import jax
import pytest
from support import command, scripts

import eqx_ckpt as ec


# As an installation starts it.
_START = (
    "from eqx_ckpt.__main__ import script; import sys; sys.argv[0] = 'eqx-ckpt'; "
    "script()"
)
_MODULES = "import atexit, sys; atexit.register(lambda: print([*sys.modules]));"


def _environment(*words):
    return {
        "_EQX_CKPT_COMPLETE": "zsh_complete",
        "COMP_WORDS": " ".join(["eqx-ckpt", *words]),
        "COMP_CWORD": str(len(words)),
    }


@pytest.fixture
def complete(monkeypatch, capsys):
    """What the last word may become; None if the shell looks for files."""

    def call(*words):
        for name, value in _environment(*map(str, words)).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        assert command.main([]) == 0
        rows = capsys.readouterr().out.split("\n")
        kinds, values = rows[0:-2:3], rows[1:-1:3]
        return None if kinds == ["file"] else values

    return call


@pytest.fixture
def run_of_steps(tmp_path):
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in (9, 10, 200):
            manager.save(step, {"w": step, "frozen": {"a": 1, "b": 2}})
        manager.wait()
        manager.pin(9)
    return tmp_path / "run"


def test_names_of_leaves_and_nodes(complete, ckpt):
    assert complete("ls", ckpt, "mo") == [
        *("model", "model.layers"),
        *(f"model.layers.{i}" for i in range(4)),
    ]
    assert complete("stats", ckpt, "model.layers.3.b") == ["model.layers.3.bias"]
    assert complete("cat", ckpt, "model.layers.") == [
        f"model.layers.{i}." for i in range(4)
    ]
    assert complete("cat", ckpt, "k") == ["key"]
    assert complete("ls", ckpt, "nothing") == []


@pytest.mark.parametrize(
    "words",
    [
        ("edit", "{}", "to", "--keep"),
        ("edit", "{}", "to", "--drop"),
        ("export", "{}", "to", "--node"),
        ("convert", "{}", "to", "--skip"),
        ("merge", "{}", "{}", "--node"),
        ("average", "{}", "--to", "x", "--node"),
        ("ls", "{}", "--filter"),
    ],
)
def test_options_that_take_names(complete, ckpt, words):
    assert "model" in complete(*(x.format(ckpt) for x in words), "mod")


def test_steps(complete, run_of_steps):
    (run_of_steps / "300").mkdir()
    at = lambda *steps: [f"{run_of_steps}/{x}" for x in steps]
    assert complete("info", f"{run_of_steps}/") == at(200, 10, 9)
    assert complete("diff", run_of_steps, f"{run_of_steps}/1") == at(10)
    assert complete("steps", run_of_steps, "--pin", "") == ["200", "10", "9"]
    assert complete("steps", run_of_steps, "--delete", "2") == ["200"]
    # Names are those of the newest step.
    for path in (run_of_steps, f"{run_of_steps}/9", f"{run_of_steps}/9/default"):
        assert complete("cat", path, "fr") == ["frozen.a", "frozen.b"]


def test_paths_are_completed_by_the_shell(complete, ckpt):
    assert complete("info", ckpt) is None
    assert complete("info", "s3://bucket/") is None


def test_files(complete, tmp_path):
    tree = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    ec.tree_serialise_leaves(tmp_path / "a.zip", tree)
    ec.export_safetensors(tmp_path / "a.safetensors", tree)
    for name in ("a.zip", "a.safetensors"):
        found = complete("cat", tmp_path / name, "layers.1.")
        assert sorted(found) == ["layers.1.bias", "layers.1.weight"]


def test_very_many_leaves(complete, tmp_path):
    many = {f"n{i}": {"w": 0} for i in range(20_001)}
    ec.tree_serialise_leaves(tmp_path / "many", many)
    assert complete("cat", tmp_path / "many", "n1999") == [
        *("n1999.", *(f"n1999{i}." for i in range(10)))
    ]
    assert len(complete("ls", tmp_path / "many", "n")) <= 1000


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"names": 3}', '{"names": [3]}']
    + ["[" * 100_000, '{"names": ["\\u001b[31m", "a b", "a\\nfile,b"]}'],
)
def test_what_cannot_be_read_has_no_names(complete, tmp_path, text):
    (tmp_path / "eqx_ckpt.json").write_text(text)
    assert complete("cat", tmp_path, "") == []
    data = text.encode()
    (tmp_path / "m.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    assert complete("cat", tmp_path / "m.safetensors", "") in (
        [],
        ["names"],
        ["columns", "names"],
    )


def _cpu(code, **environment):
    """The least CPU of some processes, and what the last has printed."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code, *environment.pop("arguments", [])],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        )
    return min(spent), done.stdout


def test_tab_and_help_are_quick(ckpt):
    least, _ = _cpu("import click.shell_completion")
    tab, out = _cpu(_START, **_environment("cat", str(ckpt), "model."))
    assert "model.layers.0." in out
    start = _START.replace("'eqx-ckpt'", "'eqx-ckpt'; sys.argv[1:] = ['merge', '-h']")
    page, text = _cpu(start)
    assert "--density" in text
    # How long Python and `click` alone take is up to the machine.
    assert max(tab, page) < 5 * least, (least, tab, page)


@pytest.mark.parametrize("words", [["cat", "{}", "model."], ["ver"], ["info", ""]])
def test_tab_imports_no_jax(ckpt, words):
    environment = _environment(*(x.format(ckpt) for x in words))
    done = subprocess.run(
        [sys.executable, "-c", _MODULES + _START],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = done.stdout.splitlines()[-1]
    assert "'eqx_ckpt._cli._complete'" in found and len(done.stdout.splitlines()) > 1
    assert "'jax'" not in found and "'numpy'" not in found


@pytest.mark.parametrize(
    "words", [["ls", "{}"], ["ls", "{}", "--json"], ["info", "{}"]]
)
def test_an_index_is_shown_without_jax(ckpt, words):
    arguments = [x.format(ckpt) for x in words]
    start = _START.replace("'eqx-ckpt'", f"'eqx-ckpt'; sys.argv[1:] = {arguments}")
    done = subprocess.run(
        [sys.executable, "-c", _MODULES + start], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    *shown, found = done.stdout.splitlines()
    assert "model" in "".join(shown) and "'numpy'" in found
    assert "'jax'" not in found and "'equinox'" not in found


def test_the_script_runs_commands(ckpt):
    arguments = [sys.executable, "-c", _START, "ls", str(ckpt), "--depth", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "model" in done.stdout


def test_an_interrupt_leaves_no_traceback():
    program = scripts.PROGRAMS / "command_whose_import_is_interrupted.py"
    arguments = [sys.executable, str(program), "ls"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_what_is_no_file_is_not_read(complete, tmp_path):
    """A FIFO that nobody writes to would be read for ever."""
    (tmp_path / "c").mkdir()
    os.mkfifo(tmp_path / "c" / "eqx_ckpt.json")
    os.mkfifo(tmp_path / "c.safetensors")
    for name in ("c", "c.safetensors"):
        assert complete("cat", str(tmp_path / name), "") == []
