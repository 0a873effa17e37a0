"""The command line that the programs of this folder have in common."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pages


def run(
    name: str, measure: Callable[[bool, pathlib.Path], Any], tables: list[str]
) -> Any:
    """Calls `measure(short, scratch)`, prints tables of the result, and writes it to
    `NAME.json` where a folder is given. Returns the result."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="little of it, once")
    parser.add_argument("--scratch", type=pathlib.Path, help="where to save; on a disk")
    parser.add_argument("--out", type=pathlib.Path, help=f"folder for {name}.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        done = measure(given.short, pathlib.Path(scratch))
    for table in tables:
        print(pages.TABLES[table]({name: done}), end="\n\n", flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.json").write_text(json.dumps(done, indent=1) + "\n")
    return done


def call(program: str, *arguments: str) -> Any:
    """The JSON that a program prints in a new process, as its last line."""
    command = [sys.executable, program, *arguments]
    # Modules are imported as after any installation: from their bytecode.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    got = subprocess.run(command, env=env, capture_output=True, text=True)
    if got.returncode:
        raise RuntimeError((got.stderr.strip().splitlines() or ["it died"])[-1])
    return json.loads(got.stdout.splitlines()[-1])
