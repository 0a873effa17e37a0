"""States that each process of a run has for itself, as part of its steps."""

import json

import numpy as np
import pytest
from attacks import seal
from support.helpers import tree_at
from support.processes import good, run_team_program

import eqx_ckpt as ec


OWN = {"epoch": 3, "cursor": np.arange(4), "reader": b"\x00state", "file": "a.txt"}
LIKE = {"epoch": 0, "cursor": np.zeros(4, int), "reader": b"", "file": ""}


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_an_own_state_is_part_of_a_step(tmp_path, layout):
    root = tmp_path / "run"
    with ec.CheckpointManager(root, layout=layout, every=2, keep=2) as manager:
        for step in range(1, 6):
            manager.save(step, tree_at(step), own=OWN | {"epoch": step})
    tree, own, step = manager.restore(tree_at(0), own=LIKE)
    assert step == tree["step"] == own["epoch"] == 5 and own["cursor"].tolist()[-1] == 3
    assert (own["reader"], own["file"]) == (b"\x00state", "a.txt")
    tree, own, step = manager.restore(tree_at(0), step=4, own="all")
    assert step == 4 and [x["epoch"] for x in own] == [4]
    # Who does not ask for it has it not, and older steps take theirs along.
    tree, step = manager.restore(tree_at(0))
    assert step == 5 and len([*root.glob("*/default/d/*/own-0")]) == 2
    assert ec.verify(manager.path(5)) == []


def test_what_is_wrong_with_an_own_state(tmp_path):
    manager = ec.CheckpointManager(tmp_path / "run")
    with pytest.raises(TypeError, match="cannot be saved") as e:
        manager.save(1, tree_at(1), own={"x": np.array([None])})
    assert "It is in `own`, the own state of this process." in e.value.__notes__
    manager.save(1, tree_at(1))
    manager.wait()
    for step in (None, 1):
        with pytest.raises(ValueError, match="was saved without `own`: leave `own` ou"):
            manager.restore(tree_at(0), step, own=LIKE)
    manager.save(2, tree_at(2), own=OWN)
    manager.wait()
    with pytest.raises(RuntimeError, match="`epoch` is not in the checkpoint|other"):
        manager.restore(tree_at(0), own={"other": 1})
    # A step with a damaged own state is not whole.
    (file,) = (tmp_path / "run/2/default/d").glob("*/own-0")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (problem,) = ec.verify(manager.path(2))
    assert "the file of the own state of process 0 is damaged" in problem.what
    with pytest.raises(ec.DamagedError, match="own state of process 0 is damaged"):
        manager.restore(tree_at(0), 2, own=LIKE)
    manager.save(3, tree_at(3), own=OWN)
    manager.wait()
    (file,) = (tmp_path / "run/3/default/d").glob("*/own-0")
    file.unlink()
    manager.delete(1)
    with pytest.raises(ec.DamagedError, match="own state of process 0 is missing"):
        manager.restore(tree_at(0), own=LIKE)


@pytest.mark.parametrize(
    "rows", [7, [[1]], [[-1, "0"]], [[True, "0"]], [[1, 0]], [[2**61, "0"]], ["ab"]]
)
def test_impossible_own_states_are_refused(tmp_path, rows):
    ec.tree_serialise_leaves(tmp_path / "c", {"x": np.zeros(3)})
    file = tmp_path / "c/eqx_ckpt.json"
    value = json.loads(file.read_bytes())
    del value["digest"]
    text = json.dumps(value | {"own": rows}, separators=(",", ":"))
    file.write_bytes(seal(text.encode()[:-1]))
    with pytest.raises(ec.DamagedError):
        ec.open(tmp_path / "c")


def test_own_states_of_two_processes(tmp_path):
    for text in good(run_team_program(2, "team_with_own_states", tmp_path, devices=1)):
        assert "process 1 has something else for whether it has a state of its" in text
    manager = ec.CheckpointManager(tmp_path / "run")
    assert manager.steps() == [2, 3]
    like = {"x": np.zeros(8, np.float32), "step": 0}
    with pytest.raises(
        ValueError, match="of 2 processes, and this run has 1: pass `ow"
    ):
        manager.restore(like, own={"at": 0})
    assert manager.restore(like, own="all")[1] == [{"at": 30}, {"at": 31}]
