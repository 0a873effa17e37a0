"""The command line: `python -m eqx_ckpt ls PATH`, `... clean DIR`, `... demo`."""

import argparse
import sys

from . import _checkpoint, _clean, _show


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_ckpt", description="Checkpoints for Equinox."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="print the tree of a checkpoint")
    ls.add_argument("path", help="a directory, or a TensorStore URL")
    clean = commands.add_parser("clean", help="delete what killed saves have left")
    clean.add_argument("path", help="a directory of checkpoints, or a checkpoint")
    clean.add_argument("--list", action="store_true", help="only list it")
    demo = commands.add_parser("demo", help="save and load a small model, and show how")
    demo.add_argument("directory", nargs="?", help="where to save (default: a new one)")
    given = parser.parse_args(arguments)
    if given.command == "demo":
        from . import _demo

        _demo.main(given.directory)
        return 0
    try:
        if given.command == "clean":
            for path in _clean.clean(given.path, remove=not given.list):
                print(_show.escape(path))
        else:
            print(_checkpoint.open(given.path).describe())
    except (OSError, ValueError, RuntimeError) as e:
        print(f"eqx_ckpt: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
