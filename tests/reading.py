"""What the process of `test_reading.py` does: each read of each call fails, once and
for ever. No test is here.

`python reading.py DIRECTORY LAYOUT ERRORS [long]` prints what it found as JSON.
"""

import functools as ft
import itertools
import json
import pathlib
import sys
import warnings

import refusing


def sweep(directory, layout, errors, is_long, begin):
    import numpy as np

    import eqx_ckpt as ec

    # Before TensorStore has threads.
    refuse = begin()

    def tree(value):
        # A small leaf, a large one of several chunks, and one that has a codec.
        return {"x": np.full((3, 100_000), value, "float32"), "v": value}

    options = {"layout": "ocdbt" if layout == "zip" else layout}
    if layout != "zip":
        options["chunks"] = lambda name, shape, dtype: (1, 100_000) if shape else None
    root = directory / "run"
    steps = [10, 20, 30]
    with ec.CheckpointManager(root, **options) as manager:
        for step in steps:
            manager.save(step, tree(step), {"loss": abs(step - 20)})
    single = directory / "7.zip" if layout == "zip" else root / "30" / "default"
    if layout == "zip":
        ec.tree_serialise_leaves(single, tree(30))

    def manager():
        return ec.CheckpointManager(root, best=("loss", "min"), **options)

    def load(**options):
        loaded = ec.tree_deserialise_leaves(single, tree(0), **options)
        return loaded["v"], float(loaded["x"].min()), float(loaded["x"].max())

    def restore(manager):
        loaded, step = manager.restore(tree(0))
        return step, loaded["v"], float(loaded["x"].max())

    # Of a manager, which keeps what it has learned; or of a path.
    calls = {
        "open": lambda _: ec.open(single)["v"].shape,
        "load": lambda _: load(),
        "load without digests": lambda _: load(verify=False),
        "splice": lambda _: ec.materialise(ec.open(single).splice(tree(0)))["v"],
        "slice": lambda _: ec.open(single)["x"][1, 5:9].read().tolist(),
        "verify": lambda _: ec.verify(single),
        "exists": lambda _: ec.exists(single),
    }
    if layout != "zip":
        calls |= {
            "restore": restore,
            "restore a step": lambda m: m.restore(tree(0), 20)[0]["v"],
            "best": lambda m: m.best(),
            "latest": lambda m: m.latest(),
            "steps": lambda m: m.steps(),
        }
    right = {name: call(manager()) for name, call in calls.items()}
    count, faults = 0, []
    for name, call in calls.items():
        for number in itertools.count(1):
            # All errnos at each read; or the next one at the next.
            ways = list(itertools.product(errors, (False, True)))
            ways = ways if is_long else [ways[5 * number % len(ways)]]
            hits = []
            for error, forever in ways:
                one = manager()
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    with refuse.at(number, error, forever) as fault:
                        try:
                            found = None
                            got = call(one)
                            if got != right[name]:
                                found = f"gave {got!r}"
                        except OSError as e:
                            if e.errno != error:
                                found = f"{type(e).__name__}: {e}"
                        except Exception as e:
                            found = f"{type(e).__name__}: {e}"
                if fault.hit is None:
                    break
                count += 1
                hits.append(fault.hit)
                if not found and said:
                    found = f"warned {said[0].message}"
                try:
                    if call(one) != right[name]:
                        found = f"{found}; then gave something else"
                    if layout != "zip":
                        one.save(30, tree(99))
                        found = f"{found}; then replaced the step"
                except FileExistsError:
                    pass
                except Exception as e:
                    found = f"{found}; then {type(e).__name__}: {e}"
                if found:
                    faults.append([name, error, forever, fault.hit, found])
            if not hits:
                break
    assert ec.verify(single) == []
    print(json.dumps({"count": count, "faults": faults}))


if __name__ == "__main__":
    directory, layout, errors, *more = sys.argv[1:]
    path = pathlib.Path(directory).resolve()
    numbers = [int(n) for n in errors.split(",")]
    work = ft.partial(sweep, path, layout, numbers, "long" in more)
    refusing.run(path, work)
