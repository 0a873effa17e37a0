"""What the process of `test_reading.py` does: each read of each call fails, once and
for ever. No test is here.

`python -m support.reading DIRECTORY LAYOUT ERRORS [long]` prints what it found as JSON.
"""

import functools as ft
import itertools
import json
import pathlib
import shutil
import sys
import warnings

from support import refusing


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
        for number in itertools.count(1, 1 if is_long else 3):
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
    if layout != "zip":
        more, bad = _keeping(directory, layout, tree, errors, is_long, refuse)
        count, faults = count + more, faults + bad
    print(json.dumps({"count": count, "faults": faults}))


def _keeping(directory, layout, tree, errors, is_long, refuse):
    """Each read of a save and of the deletion of older steps fails. The best step and
    the newest stay, and the next save deletes what this one could not."""
    import eqx_ckpt as ec

    options = dict(keep=1, best=("loss", "min"), layout=layout)
    begun, root = directory / "begun", directory / "kept"
    with ec.CheckpointManager(begun, layout=layout) as manager:
        for step in (10, 20, 30):
            manager.save(step, {"v": step}, {"loss": abs(step - 20)})
    count, faults = 0, []
    for number in itertools.count(1, 1 if is_long else 4):
        error = errors[number % len(errors)]
        for forever in (False, True) if is_long else [number % 8 == 1]:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(begun, root)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                manager = ec.CheckpointManager(root, **options)
                saved = True
                with refuse.at(number, error, forever) as fault:
                    try:
                        manager.save(40, {"v": 40}, {"loss": 50})
                        manager.wait()
                    except OSError as e:
                        saved = e.errno != error
                if fault.hit is None:
                    return count, faults
                count += 1
                newest = 40 if manager.latest() == 40 else 30
                if not {20, newest} <= set(manager.steps()) or (saved and newest < 40):
                    faults.append(["save", number, error, fault.hit, manager.steps()])
                manager.save(50, {"v": 50}, {"loss": 50})
                manager.wait()
                if manager.steps() != [20, 50] or manager.best() != 20:
                    faults.append(["next", number, error, fault.hit, manager.steps()])
    raise AssertionError


if __name__ == "__main__":
    directory, layout, errors, *more = sys.argv[1:]
    path = pathlib.Path(directory).resolve()
    numbers = [int(n) for n in errors.split(",")]
    work = ft.partial(sweep, path, layout, numbers, "long" in more)
    refusing.run(path, work)
