"""The page as one file."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from support.clock import timed
from test_page import DRAWN, HOSTILE, READY

import eqx_ckpt as ec
from eqx_ckpt._cli import _main


def _answers(path):
    text = path.read_text()
    (found,) = re.findall(r'id="answers">(.*?)</script>', text, re.S)
    return json.loads(found)


@pytest.fixture
def write(tmp_path, capsys):
    def call(*paths):
        to = tmp_path / "report.html"
        arguments = ["view", *map(str, paths), "--to", str(to), "--overwrite"]
        assert _main.main(arguments) == 0
        assert str(to) in capsys.readouterr().out
        return to

    return call


def test_a_thousand_leaves(write, save):
    """In 2 MB at most, with a picture of each."""
    rng = np.random.default_rng(0)
    block = lambda: {
        "weight": rng.normal(size=(64, 64)).astype(np.float32),
        "bias": rng.normal(size=64).astype(np.float32),
    }
    tree = {"model": {"layers": [block() for _ in range(500)]}}
    path = save("many", tree)
    report, seconds = timed(60, lambda: write(path))
    assert seconds <= 60
    assert report.stat().st_size <= 2_000_000
    answers = _answers(report)
    assert len([key for key in answers if key.startswith("leaf?")]) == 1000
    assert len([key for key in answers if key.startswith("picture?")]) == 1000


def test_a_report_in_a_browser(write, save, browser):
    tree = {name: {"x": jnp.ones((3, 4)), "text": jnp.ones(3)} for name in HOSTILE}
    report = write(save("hostile", tree, metadata={"</script><script>x": "<!--"}))
    browser.open(report.as_uri(), 390)
    browser.until(READY)
    assert "</script><script>x" in browser.text()
    for n in range(4):
        browser.run(f"location.hash = 'n={n}'")
        browser.until(f"{DRAWN} >= 1")
    assert browser.run("return document.title") == "hostile · eqx_ckpt"
    fetched = "return performance.getEntriesByType('resource').length"
    assert browser.run(fetched) == 0
    assert browser.run("return document.scripts.length") == 0


def test_the_report_of_two(write, save, browser):
    a = {"w": jnp.ones((8, 8)), "same": jnp.ones(3), "gone": jnp.ones(2)}
    b = {"w": jnp.ones((8, 8)) * 3, "same": jnp.ones(3)}
    report = write(save("a", a), save("b", b))
    browser.open(report.as_uri())
    browser.until("return document.querySelectorAll('.bars li').length === 1")
    browser.run("document.querySelector('.bars a').click()")
    browser.until(f"{DRAWN} >= 2")
    assert "Difference" in browser.text()


def test_the_report_of_a_run(write, tmp_path, browser):
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in range(5):
            manager.save(
                step, {"w": jnp.full((4, 4), float(step))}, {"loss": 1 / (step + 1)}
            )
    report = write(tmp_path / "run")
    norms = [x["norm"] for key, x in _answers(report).items() if "norm?" in key]
    assert norms == [0, 4, 8, 12, 16]
    browser.open(report.as_uri())
    browser.until("return document.querySelectorAll('tbody tr').length === 5")
    assert "loss" in browser.text()
    browser.run("location.hash = 'n=0'")
    browser.until("return document.body.innerText.includes('Norm over steps')")


def test_the_report_of_runs(write, tmp_path, browser):
    for name in "ab":
        with ec.CheckpointManager(tmp_path / "runs" / name) as manager:
            for step in (1, 2):
                manager.save(step, {"w": jnp.ones(2)}, {"loss": step})
    browser.open(write(tmp_path / "runs").as_uri())
    browser.until("return document.querySelectorAll('tbody tr').length === 2")
    browser.until("return document.querySelectorAll('path.line').length === 2")
    assert browser.run("return document.querySelector('tbody a')") is None


def test_no_file_is_replaced_unasked(save, tmp_path, capsys):
    path = save("ckpt", {"w": jnp.ones(3)})
    to = tmp_path / "report.html"
    to.write_text("mine")
    assert _main.main(["view", str(path), "--to", str(to)]) == 2
    assert "--overwrite" in capsys.readouterr().err and to.read_text() == "mine"
    assert (
        _main.main(["view", str(tmp_path / "none"), "--to", str(tmp_path / "x")]) == 2
    )
    assert not (tmp_path / "x").exists()
    assert _main.main(["view", "a", "b", "c"]) == 2


def test_the_page_of_a_zipped_package(tmp_path):
    """As `zipapp` makes one."""
    package = pathlib.Path(ec.__file__).parent
    zipped = shutil.make_archive(
        str(tmp_path / "app"), "zip", package.parent, package.name
    )
    ec.tree_serialise_leaves(tmp_path / "a", {"x": jnp.ones(3)})
    code = (
        f"import sys; sys.path.insert(0, {zipped!r}); import eqx_ckpt._cli._main as m; "
    )
    code += "assert '.zip' in m.__file__; sys.exit(m.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "view", "a", "--to", "a.html"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert "x" in _answers(tmp_path / "a.html").__repr__()
