"""Python's cyclic garbage collector, and how not to wait for it."""

import gc

from ._settings import Setting


# Objects. A number that no program sets.
_RARELY = 1_000_003

# The collector is not switched off, so that `gc.disable` and `gc.enable` of the program
# hold, whichever thread calls them meanwhile.
_thresholds = Setting(
    get=gc.get_threshold,
    put=lambda found: gc.set_threshold(*found),
    change=lambda found: (_RARELY, *found[1:]),
    is_changed=lambda now: now[0] == _RARELY,
)


# Lets the collector run rarely for a while. A call that makes several objects for each
# of 10,000 leaves sets it off again and again, each time over all that the process has:
# a third of the time of a save.
paused = _thresholds.changed
