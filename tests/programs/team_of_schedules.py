"""Plays the schedules of `SEEDS...`, of which one kills a process if `KILLS` is 1."""

import sys

from support import schedules
from support.member import path, rank, size


kills, *seeds = map(int, sys.argv[5:])
player = schedules.start(path, rank, size)
for seed in seeds:
    player.play(seed, bool(kills))
