"""What the process of `test_near.py` does whose reads are refused, as a process is that
has no files or no memory left. No test is here.

`python -m support.near_reading DIRECTORY` prints how many reads were refused.
"""

import errno
import functools as ft
import itertools
import pathlib
import sys
import warnings

from support import refusing


ERRORS = errno.EMFILE, errno.ENFILE, errno.ENOMEM


def sweep(directory, begin):
    """Each read of a restore fails, once or for ever: that is its error, and nothing
    older is restored."""
    import numpy as np

    import eqx_ckpt as ec

    # Before TensorStore has threads.
    refuse = begin()
    tree = lambda value: {"x": np.full((3, 100_000), value, "float32"), "v": value}
    how = {"every": 5, "near": directory / "disk", "near_every": 2}
    with ec.CheckpointManager(directory / "run", **how) as manager:
        for step in range(1, 7):
            manager.save(step, tree(step))
        manager._saves._last.kept = None  # As if it was killed.
    for number in itertools.count(1):
        for forever in (False, True):
            error = ERRORS[(number + forever) % len(ERRORS)]
            manager = ec.CheckpointManager(directory / "run", **how)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with refuse.at(number, error, forever) as fault:
                    try:
                        assert manager.restore(tree(0))[1] == 6, number
                    except OSError as e:
                        assert e.errno == error, (number, e)
            if fault.hit is None:
                print(number - 1)
                return
            assert manager.restore(tree(0))[1] == 6


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1]).resolve()
    refusing.run(path, ft.partial(sweep, path))
