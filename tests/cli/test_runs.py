"""`info` and `steps` of a run, and `verify` of all of it."""

import io
import os
import shutil

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from support import inside

import eqx_ckpt as ec


def _damage(steps, step):
    (file,) = (steps / str(step) / "default" / "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    # A file of its own: others may share it.
    file.unlink()
    file.write_bytes(data)


def test_steps(steps, run, asked):
    (steps / "50" / "default" / "d" / "0123456789abcdef").mkdir(parents=True)
    shutil.copytree(steps / "10", steps / "5")
    (steps / "5" / "default" / "eqx_ckpt.json").write_bytes(b"{}")
    data = asked("steps", steps)
    assert asked("info", steps) == data
    states = {x["step"]: x["state"] for x in data["steps"]}
    complete = dict.fromkeys((10, 20, 30, 40), "complete")
    assert states == {5: "damaged", **complete, 50: "incomplete"}
    by_step = {x["step"]: x for x in data["steps"]}
    assert [step for step, x in by_step.items() if x["pinned"]] == [20]
    assert by_step[30]["metrics"] == {"loss": 1 / 30, "bad": "nan"}
    assert by_step[30]["nbytes"] == 30 * 4 + 36
    code, out, _ = run("steps", steps, "--best", "loss")
    lines = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert code == 0 and lines["40"].endswith("best") and "pinned" in lines["20"]
    assert "damaged:" in lines["5"] and "incomplete:" in lines["50"]
    assert asked("steps", steps, "--best", "loss", "--max")["best"] == 10
    code, _, err = run("steps", steps, "--best", "los")
    assert code == 2 and "`bad`, `loss`" in err


def test_own_bytes_are_those_of_files_with_one_name(steps, asked):
    for x in asked("steps", steps)["steps"]:
        base = steps / str(x["step"]) / "default" / "d"
        here = [f for f in base.rglob("*") if f.name.isdecimal()]
        own = [f.stat().st_size for f in here if f.stat().st_nlink == 1]
        assert x["data"]["nbytes"] == sum(f.stat().st_size for f in here) > 0
        assert x["data"] == {**x["data"], "own": sum(own), "count": len(here)}


def test_pin_and_delete(steps, run, monkeypatch):
    assert run("steps", steps, "--delete", 10, "--yes")[0] == 0
    assert not (steps / "10").exists()
    code, _, err = run("steps", steps, "--delete", 20, "--yes")
    assert code == 2 and "pinned" in err and (steps / "20").exists()
    assert run("steps", steps, "--unpin", 20, "--pin", 30, "--yes")[0] == 0
    assert ec.CheckpointManager(steps).steps() == [20, 30, 40]
    assert run("steps", steps, "--delete", 20, "--delete", 40, "--yes")[0] == 0
    assert os.listdir(steps / "eqx_ckpt.pins") == ["30"]
    code, _, err = run("steps", steps, "--pin", 77, "--yes")
    assert code == 2 and "There is no step 77" in err


@pytest.mark.parametrize("answer", ["n\n", "", "y\n"])
def test_it_asks_first(steps, run, answer, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    code, out, err = run("steps", steps, "--delete", 10)
    is_told = answer == "y\n"
    assert "Delete step 10 of" in err and bool(out.strip()) == is_told
    assert (steps / "10").exists() != is_told
    assert code == (0 if is_told else 2)
    assert ("Nothing was done." in err) != is_told


def test_it_says_that_it_was_interrupted(steps, run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    inside.replace(monkeypatch, "delete what is left", interrupted)
    code, _, err = run("clean", steps)
    assert code == 2 and "It was interrupted." in err
    assert "Nothing was done." not in err


def test_verify(steps, run, asked):
    code, out, err = run("verify", steps)
    assert (code, err) == (0, "") and out.count("undamaged") == 4
    # What a killed save leaves is no damage.
    (steps / "50" / "default" / "d" / "0123456789abcdef").mkdir(parents=True)
    assert run("verify", steps)[0] == 0
    _damage(steps, 30)
    code, out, _ = run("verify", steps)
    assert code == 1 and "its bytes are not those that were saved" in out
    data = asked("verify", steps, status=1)
    bad = {x["step"] for x in data["steps"] if x["problems"]}
    assert bad == {30, 50}
    assert run("verify", steps / "30")[0] == 1
    assert run("verify", steps / "40")[0] == 0


def test_a_step_of_orbax_is_not_verified(steps, run, asked):
    with ocp.StandardCheckpointer() as saver:
        saver.save(steps / "5" / "default", {"w": jnp.ones(2)})
    code, out, err = run("verify", steps)
    assert (code, err) == (1, "") and out.count("undamaged") == 4
    assert "not verified: Orbax has saved it" in out
    data = asked("verify", steps, status=1)
    assert [x["step"] for x in data["steps"] if x["problems"]] == [5]


def test_a_checkpoint_is_no_run(ckpt, run):
    code, _, err = run("steps", ckpt)
    assert code == 2 and "is a checkpoint, not the directory of a run" in err


def test_a_run_in_a_store(run, asked):
    with ec.CheckpointManager("memory://cli-run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": jnp.ones(step)}, {"loss": step})
    data = asked("steps", "memory://cli-run", "--best", "loss")
    assert data["best"] == 1 and [x["step"] for x in data["steps"]] == [1, 2]
    assert run("verify", "memory://cli-run")[0] == 0
    assert run("ls", "memory://cli-run/1")[0] == 0
