"""The loop of the README, run until something happens at one of its lines: a signal or
an exception. No test is here.

`python -m support.loops DIRECTORY` prints what it found as JSON.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import sys
import warnings

import jax
import jax.numpy as jnp

import eqx_ckpt as ec


STEPS, EVERY = 250, 100
_readme = pathlib.Path(__file__).parents[2] / "README.md"
_pattern = r"^(with ec\.CheckpointManager\(.*?)^```$"
(LOOP,) = re.findall(_pattern, _readme.read_text(), re.MULTILINE | re.DOTALL)


class Stop(Exception):
    pass


def run(directory, at=None, do=None, donate=False):
    """Runs the loop, and does something when it comes to a line for the n-th time.

    Returns the steps at which a state was whole: made, given to `save`, on disk at the
    end; and how often each line was come by.
    """
    update = jax.jit(lambda x: x + 1, donate_argnums=0 if donate else ())
    given = []
    real = ec.CheckpointManager.save

    def save(manager, step, *args, **kwargs):
        out = real(manager, step, *args, **kwargs)
        given.append(step)
        return out

    def train(state):
        return {"x": update(state["x"])}, 0.5

    names = {
        "ec": ec,
        "signal": signal,
        "train": train,
        "state": {"x": jnp.zeros(3)},
        "step": 0,
        "steps": STEPS,
    }
    counts = {}

    def trace(frame, event, _):
        if frame.f_code.co_filename != "<loop>":
            return None
        if event == "line":
            line = frame.f_lineno
            counts[line] = counts.get(line, 0) + 1
            if (line, counts[line]) == at:
                do()
        return trace

    code = compile(LOOP.replace("runs/7", str(directory)), "<loop>", "exec")
    ec.CheckpointManager.save = save
    error = None
    sys.settrace(trace)
    try:
        exec(code, names)
    except Stop as e:
        error = e
    finally:
        sys.settrace(None)
        ec.CheckpointManager.save = real
    return given, counts, error


def latest(directory):
    """The newest step, and that it holds what the loop made of it."""
    manager = ec.CheckpointManager(directory)
    step = manager.latest()
    if step is not None:
        state, _ = manager.restore({"x": jnp.zeros(3)})
        assert state["x"].tolist() == [float(step)] * 3, (step, state)
    return step


def tell():
    os.kill(os.getpid(), signal.SIGTERM)


def fail():
    raise Stop


def cases(counts, is_long):
    """Where what is to happen: at each line the last time and one in between, or each
    time; with a state whose arrays `train` donates, and without."""
    for line, most in counts.items():
        for number in range(1, most + 1) if is_long else {min(149, most), most}:
            for do in (tell, fail):
                # Before the `with` has begun nobody has said what a signal means, and
                # Python lets none interrupt it where it calls `__exit__`.
                if line > 1 or (do is tell and number > 1):
                    yield (line, number), do, (line + number) % 2 == 0


def main(root, is_long):
    warnings.simplefilter("error")
    directory = pathlib.Path(root, "run")
    given, counts, error = run(directory)
    assert given[-1] == STEPS and latest(directory) == STEPS and not error
    count, faults = 0, []
    for at, do, donate in cases(counts, is_long):
        count += 1
        shutil.rmtree(directory)
        given, _, error = run(directory, at, do, donate)
        assert (error is None) == (do is tell)
        found, last = latest(directory), given[-1] if given else None
        # What is promised: the last state that was given to `save`. If it was donated,
        # the exception says that it is lost.
        if found != last:
            notes = " ".join(getattr(error, "__notes__", []))
            is_told = f"state of step {last}," in notes
            if not (donate and is_told and found == (last // EVERY * EVERY or None)):
                faults.append([*at, do.__name__, donate, last, found])
                continue
        # It goes on from there, and comes to its end.
        more, _, _ = run(directory)
        assert not more or more[0] == (found or 0) + 1
        assert latest(directory) == STEPS
    print(json.dumps({"count": count, "faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1], "long" in sys.argv)
