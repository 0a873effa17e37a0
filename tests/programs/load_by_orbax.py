"""Orbax refuses a checkpoint: `PATH`."""

import sys
import warnings


warnings.simplefilter("ignore")
from orbax.checkpoint import v1


try:
    v1.load(sys.argv[1])
except ValueError:
    print("refused")
