"""A program that PyInstaller packs does what it does otherwise."""

import importlib.metadata
import subprocess
import sys

import pytest
from support.scripts import PROGRAMS


pytestmark = pytest.mark.long


def test_a_program_that_pyinstaller_packs(tmp_path):
    pytest.importorskip("PyInstaller")
    found = importlib.metadata.entry_points(group="pyinstaller40", name="hook-dirs")
    if not any(x.value.startswith("eqx_ckpt.") for x in found):
        pytest.skip("PyInstaller sees only packages that are installed")
    pack = ["--distpath", tmp_path, "--workpath", tmp_path / "work"]
    pack += ["--specpath", tmp_path, PROGRAMS / "packed.py"]
    subprocess.run([sys.executable, "-m", "PyInstaller", *pack], check=True)
    (tmp_path / "made").mkdir()
    packed = [tmp_path / "packed" / "packed", tmp_path / "made"]
    done = subprocess.run(packed, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert "unknown" not in done.stdout
    assert (tmp_path / "made" / "a.html").stat().st_size > 10_000
