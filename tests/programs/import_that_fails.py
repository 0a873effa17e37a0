"""Asks for `open` as `WAY` says, `from` or `attribute`, while the import of its module
raises `ERROR` with the text `TEXT`. Prints the traceback."""

import builtins
import sys
import traceback

import eqx_ckpt as ec


way, error, text = sys.argv[1:]


class Broken:
    def find_spec(self, name, *_):
        if name == "eqx_ckpt._kernel._load._checkpoint":
            raise getattr(builtins, error)(text)


sys.meta_path.insert(0, Broken())
try:
    if way == "from":
        from eqx_ckpt import open  # noqa: F401
    else:
        ec.open
except ImportError:
    print(traceback.format_exc())
