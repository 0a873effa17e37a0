"""The script `eqx-ckpt ARGUMENTS...`, interrupted as it imports its command line."""

import sys


class Interrupting:
    def find_spec(self, name, *_):
        if name == "click":
            raise KeyboardInterrupt


sys.meta_path.insert(0, Interrupting())
from eqx_ckpt.__main__ import script


sys.argv[0] = "eqx-ckpt"
script()
