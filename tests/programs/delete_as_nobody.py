"""Deletions by the user nobody, of checkpoints that have a directory of root's:
`DIRECTORY LAYOUT`. Prints what each call has warned of, and what stays."""

import json
import os
import sys
import tempfile
import warnings
from typing import Any

import numpy as np

import eqx_ckpt as ec


directory = sys.argv[1]
layout: Any = sys.argv[2]
names = "deleted", "replaced", "run"


def save(path, value=0):
    ec.tree_serialise_leaves(path, {"a": {"w": np.full(3, value)}}, layout=layout)


def run(path, steps):
    with ec.CheckpointManager(path, keep=1, layout=layout) as manager:
        for step in steps:
            manager.save(step, {"a": {"w": np.full(3, step)}})
    return manager


def fill(above):
    for name in names[:2]:
        save(f"{above}/{name}")
    run(f"{above}/run", [1])


# Nobody may not read the libraries: they are imported before.
with tempfile.TemporaryDirectory() as own:
    fill(own)
    save(f"{own}/replaced")
    run(f"{own}/run", [2])
    ec.delete(f"{own}/deleted")
    ec.clean(own)
fill(directory)
for place, _, _ in os.walk(directory):
    owner = 0 if os.path.basename(os.path.dirname(place)) in ("d", "a.w") else 65534
    os.chown(place, owner, owner)
    os.chmod(place, 0o755)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
found = {}
for name, call in {
    "deleted": lambda: ec.delete(f"{directory}/deleted"),
    "replaced": lambda: save(f"{directory}/replaced", 1),
    "run": lambda: run(f"{directory}/run", [2]).steps(),
    "clean": lambda: [*ec.clean(directory), *ec.clean(f"{directory}/run")],
}.items():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = call()
    found[name] = result, [str(warning.message) for warning in heard]
print(json.dumps(found))
