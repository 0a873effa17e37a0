"""The command `eqx-ckpt`, or `python -m eqx_ckpt`: see `_cli`."""

import sys


def script() -> None:
    """The console script."""
    try:
        from ._cli import _main

        _main.script()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    script()
