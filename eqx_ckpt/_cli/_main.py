"""The command line: `python -m eqx_ckpt ls`, `verify`, `clean` and `demo`."""

import argparse
import io
import os
import sys

from .._format import _text
from .._load import _checkpoint, _verify
from .._run import _clean
from . import _demo


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_ckpt", description="Checkpoints for Equinox."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="print the tree of a checkpoint")
    ls.add_argument("path", help="a directory, or a URL")
    verify = commands.add_parser("verify", help="check every byte of a checkpoint")
    verify.add_argument("path", help="a directory, or a URL")
    verify.add_argument("--progress", action="store_true", help="show a progress bar")
    clean = commands.add_parser("clean", help="delete what killed saves have left")
    clean.add_argument("path", help="a directory of checkpoints, or a checkpoint")
    clean.add_argument("--list", action="store_true", help="only list it")
    clean.add_argument(
        "--idle", action="store_true", help="nothing is being saved there (for a URL)"
    )
    demo = commands.add_parser("demo", help="save and load a small model, and show how")
    demo.add_argument("directory", nargs="?", help="where to save (default: a new one)")
    given = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would say so once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, RuntimeError, ImportError) as e:
        lines = map(_text.escape, str(e).split("\n"))
        print("eqx_ckpt:", "\n".join(lines), file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> int:
    if given.command == "demo":
        _demo.main(given.directory)
        return 0
    lines: list[str] = []
    if given.command == "verify":
        lines = list(map(str, _verify.verify(given.path, progress=given.progress)))
    elif given.command == "clean":
        found = _clean.clean(given.path, remove=not given.list, idle=given.idle)
        lines = list(map(_text.escape, found))
    else:
        lines = [_checkpoint.open(given.path).describe()]
    for line in lines:
        print(line)
    return 1 if lines and given.command == "verify" else 0
