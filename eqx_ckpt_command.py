"""The console script `eqx-ckpt`: `--help` and completion without JAX."""

import importlib.util
import sys


def script() -> None:
    if "eqx_ckpt" not in sys.modules:
        # Its modules can be imported now. Its own code, which imports all of them and
        # JAX, is run by the first command: see `_cli/_commands.py`.
        spec = importlib.util.find_spec("eqx_ckpt")
        assert spec is not None
        sys.modules["eqx_ckpt"] = importlib.util.module_from_spec(spec)
    try:
        from eqx_ckpt._cli import _main

        _main.script()
    except KeyboardInterrupt:
        sys.exit(130)
