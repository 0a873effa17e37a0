"""Runs in which Orbax's manager and ours have both saved steps; and runs with links."""

import json
import os
import pathlib
import shutil
import warnings

import orbax.checkpoint as ocp
import pytest
from support import inside
from support.command import main
from support.helpers import files_of, fill_run, tree_at
from support.processes import good, run_team_program

import eqx_ckpt as ec


def orbax_saves(root, steps, items=False, **names):
    """Saves steps with Orbax's own manager."""
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        best_fn=lambda metrics: metrics["loss"],
        best_mode="min",
        **names,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.CheckpointManager(root, options=options) as manager:
            for step in steps:
                args = ocp.args.StandardSave(tree_at(step))
                if items:
                    args = ocp.args.Composite(params=args)
                manager.save(step, args=args, metrics={"loss": abs(step - 20)})
            return manager.all_steps()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


def test_processes_of_which_one_cannot_open_a_step_with_a_prefix(root):
    orbax_saves(root, [10], step_prefix="run")
    program = "team_that_restores_of_orbax"
    out = good(run_team_program(2, program, root, devices=1))
    assert out == ["True\n" * 4] * 2


def test_a_run_that_orbax_began(root):
    orbax_saves(root, [10, 20, 30])
    before = files_of(root)
    options = {"keep": 1, "best": ("loss", "min")}
    with ec.CheckpointManager(root, **options) as manager:
        assert manager.steps() == [10, 20, 30] and manager.latest() == 30
        assert manager.best() == 20
        tree, step = manager.restore(tree_at(0))
        assert step == 30 and tree["step"] == 30 and tree["x"][0] == 30
        with pytest.raises(FileExistsError, match="Step 30 exists"):
            manager.save(30, tree_at(99))
        with pytest.raises(FileExistsError, match="an Orbax checkpoint"):
            manager.save(30, tree_at(99), force=True)
        with pytest.raises(ValueError, match="saved by Orbax"):
            manager.delete(30)
        fill_run(manager, [40, 50], loss=[90.0, 90.0])
        manager.pin(10)
    # Those of Orbax count, and are never deleted.
    assert manager.steps() == [10, 20, 30, 50] and manager.best() == 20
    after = files_of(root)
    assert {name: after[name] for name in before} == before
    assert manager.restore(tree_at(0))[1] == 50
    assert manager.restore(tree_at(0), step=20)[0]["x"][0] == 20


def test_a_run_that_orbax_goes_on_with(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [10, 20])
    assert sorted(orbax_saves(root, [30])) == [10, 20, 30]
    manager = ec.CheckpointManager(root)
    assert manager.latest() == 30 and manager.restore(tree_at(0))[1] == 30
    # It is damaged: then ours is the newest.
    (root / "30" / "default" / "manifest.ocdbt").unlink()
    with pytest.warns(UserWarning, match="Restored step 20"):
        assert manager.restore(tree_at(0))[1] == 20


def test_what_orbax_has_not_finished_is_no_step(root):
    orbax_saves(root, [10, 20])
    shutil.move(root / "20", root / "20.orbax-checkpoint-tmp-7")
    manager = ec.CheckpointManager(root)
    assert manager.steps() == [10] and manager.restore(tree_at(0))[1] == 10


NAMED = {
    "plain": {},
    "padded": {"step_format_fixed_length": 6},
    "with a prefix": {"step_prefix": "ckpt"},
    "both": {"step_prefix": "my_ckpt", "step_format_fixed_length": 6},
}


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("names", NAMED)
def test_steps_of_orbax_by_other_names(root, names, items):
    """Whatever Orbax calls its steps and their one item, they are steps of the run."""
    orbax_saves(root, [10, 20, 30], items, **NAMED[names])
    before = files_of(root)
    manager = ec.CheckpointManager(root, keep=1, best=("loss", "min"))
    assert manager.steps() == [10, 20, 30] and manager.latest() == 30
    assert manager.best() == 20
    for step in (None, 20):
        # Each by a manager that has not listed them.
        tree, at = ec.CheckpointManager(root).restore(tree_at(0), step)
        assert at == (step or 30) and tree["x"][0] == at
    assert ec.open(ec.CheckpointManager(root).path(20))["x"].read()[0] == 20
    assert ec.open(root)["x"].read()[0] == 30
    for force in (False, True):
        with pytest.raises(FileExistsError, match="there is an Orbax checkpoint"):
            manager.save(20, tree_at(99), force=force)
    manager.pin(20)
    manager.unpin(20)
    with pytest.raises(ValueError, match="saved by Orbax"):
        manager.delete(20)
    with manager:
        fill_run(manager, [40, 50], loss=[90.0, 95.0])
    assert manager.steps() == [10, 20, 30, 50]
    after = files_of(root)
    assert {name: after[name] for name in before} == before


def test_a_step_of_orbax_that_is_gone_is_saved_anew(root):
    orbax_saves(root, [10], items=True, step_prefix="ckpt")
    manager = ec.CheckpointManager(root)
    assert manager.steps() == [10]
    shutil.rmtree(root / "ckpt_10")
    with manager:
        manager.save(10, tree_at(10))
    assert manager.steps() == [10] and [x.name for x in root.glob("1*")] == ["10"]
    assert ec.open(manager.path(10)).metadata["step"] == 10


@pytest.mark.parametrize("names", NAMED)
def test_nothing_begins_beside_steps_of_orbax_that_are_not_read(root, names, capsys):
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, **NAMED[names]
    )
    args = {name: ocp.args.StandardSave(tree_at(7)) for name in ("model", "opt")}
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(7, args=ocp.args.Composite(**args))
    (name,) = (path.name for path in root.iterdir())
    before = files_of(root)
    calls = {
        "latest": lambda m: m.latest(),
        "restore": lambda m: m.restore(tree_at(0)),
        "restore it": lambda m: m.restore(tree_at(0), step=7),
        "save": lambda m: m.save(1, tree_at(1)),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=f"`{name}`|step 7.* `model` and `opt`"):
            call(ec.CheckpointManager(root))
    # The command line names them too.
    main(["info", str(root), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["steps"]
    assert row["state"] == "unread" and "`model` and `opt`" in row["why"]
    assert files_of(root) == before
    # Beside steps of ours they are left alone.
    ec.tree_serialise_leaves(root / "5/default", tree_at(5))
    with ec.CheckpointManager(root, keep=1) as manager:
        assert manager.latest() == 5
        with pytest.raises(FileExistsError, match="Orbax"):
            manager.save(7, tree_at(7), force=True)
        fill_run(manager, [8])
    after = files_of(root)
    assert {name: after[name] for name in before} == before
    assert manager.steps() == [8]


def test_our_step_without_its_index_is_none_of_orbax(root):
    """Orbax reads it, but nobody knows whether it is whole."""
    with ec.CheckpointManager(root, orbax=True) as manager:
        fill_run(manager, [10, 20])
    (root / "20" / "default" / "eqx_ckpt.json").unlink()
    manager = ec.CheckpointManager(root)
    assert manager.steps() == [10]
    shutil.rmtree(root / "10")
    with pytest.raises(ec.DamagedError, match="step 20: .*index was deleted"):
        manager.restore(tree_at(0))


def test_a_first_save_that_was_killed_is_an_empty_run(root):
    (root / "10" / "default" / "d" / "0123456789abcdef").mkdir(parents=True)
    manager = ec.CheckpointManager(root)
    with pytest.raises(FileNotFoundError, match="step 10: its save was not completed"):
        manager.restore(tree_at(0))
    fill_run(manager, [10])
    manager.wait()
    assert manager.steps() == [10]


# ---- Links.

CALLS = {
    "steps": lambda m: m.steps(),
    "latest": lambda m: m.latest(),
    "best": lambda m: m.best(),
    "restore": lambda m: m.restore(tree_at(0)),
    "restore a step": lambda m: m.restore(tree_at(0), 2),
    "pin": lambda m: m.pin(2),
    "unpin": lambda m: m.unpin(2),
    "delete": lambda m: m.delete(2),
    "save": lambda m: (m.save(2, tree_at(77)), m.wait()),
    "force": lambda m: (m.save(2, tree_at(77), force=True), m.wait()),
    "save a new one": lambda m: (m.save(3, tree_at(77)), m.wait()),
    "clean": lambda m: ec.clean(m._steps.root.url),
}
# What is ours, of which nothing was moved away.
_FINE = (OSError, ValueError, RuntimeError, UserWarning)


def _places(layout, directory):
    """All files and directories of a run, and some that are not there."""
    root = directory / "run"
    with ec.CheckpointManager(root, layout=layout) as manager:
        fill_run(manager, [1, 2], loss=[2.0, 1.0])
        manager.pin(2)
    below = [str(path.relative_to(root)) for path in sorted(root.rglob("*"))]
    return [*below, "3", "3/default", "2/default/eqx_ckpt.saving"]


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_no_link_is_followed(tmp_path, layout):
    _links(tmp_path, layout, every=8)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_no_link_is_followed_by_any_call(tmp_path, layout):
    print(layout, _links(tmp_path, layout), "calls over links")


def _links(tmp_path, layout, every=1):
    """Makes each place a link, and calls one of `every` calls for each."""
    count = 0
    places = _places(layout, tmp_path / "pattern")
    # What the links lead to: the same run, with values of its own.
    with ec.CheckpointManager(tmp_path / "other", layout=layout) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree_at(666), {"loss": -1.0})
        for step in (1, 2, 7):
            (tmp_path / "other" / "eqx_ckpt.pins").mkdir(exist_ok=True)
            (tmp_path / "other" / "eqx_ckpt.pins" / str(step)).write_text("")
    root, out = tmp_path / "run", tmp_path / "other"
    before = files_of(out), _times(out)
    for i, place in enumerate(places):
        for name, call in list(CALLS.items())[i % every :: every]:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(tmp_path / "pattern" / "run", root)
            link = root / place
            target = _twin(out, place)
            if link.is_dir():
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            if not link.parent.is_dir():
                link.parent.mkdir()
            link.symlink_to(target)
            options = {"layout": layout, "keep": 1, "best": ("loss", "min")}
            manager = ec.CheckpointManager(root, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    got = call(manager)
                except _FINE as e:
                    got = e
            count += 1
            what = place, name, repr(got)[:300]
            assert (files_of(out), _times(out)) == before, what
            assert "666" not in repr(got).replace(str(tmp_path), ""), what
            if name in ("steps", "latest", "best"):
                linked = {int(n) for n in place.split("/")[:1] if n.isdecimal()}
                is_step = place.count("/") < 2 or place.endswith("eqx_ckpt.json")
                is_step = is_step and not place.endswith(".txt")
                shown = set(got if isinstance(got, list) else [got])
                assert not (is_step and linked & shown), what
    return count


def _times(out):
    return {str(p): p.lstat().st_mtime_ns for p in [out, *out.rglob("*")]}


def _twin(out, place):
    """What is at the same place in the other run, under whatever id of a save."""
    parts = []
    for part in pathlib.PurePath(place).parts:
        below = out.joinpath(*parts)
        if len(part) == 16 and below.is_dir() and not (below / part).exists():
            part = next(iter(os.listdir(below)), part)
        parts.append(part)
    return out.joinpath(*parts)


# ---- Orbax's commits in place, which are its default where nothing can be renamed.


def _in_place(root, **options):
    atomicity = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, atomicity_options=atomicity, **options
    )
    return ocp.CheckpointManager(root, options=options)


def test_a_save_in_place_of_orbax_that_was_killed_is_no_step(root):
    with _in_place(root) as manager:
        for step in (10, 20):
            manager.save(step, args=ocp.args.StandardSave(tree_at(step)))
    assert ec.CheckpointManager(root).steps() == [10, 20]
    # As it is before the last two things that Orbax writes.
    top = root / "20" / "_CHECKPOINT_METADATA"
    value = {**json.loads(top.read_text()), "commit_timestamp_nsecs": None}
    top.write_text(json.dumps(value))
    (root / "20" / "commit_success.txt").unlink()
    with _in_place(root) as manager:
        assert manager.all_steps() == [10]
    shutil.copytree(root / "10", root / "20", dirs_exist_ok=True)
    top.write_text(json.dumps(value))
    (root / "20" / "commit_success.txt").unlink()
    manager = ec.CheckpointManager(root)
    assert manager.steps() == [10]
    with pytest.warns(UserWarning, match="step 20: its save was not completed"):
        assert manager.restore(tree_at(0))[1] == 10
    with pytest.raises(ValueError, match="Orbax has not finished it"):
        ec.open(root / "20")
    (root / "20" / "commit_success.txt").write_text("")
    assert manager.steps() == [10, 20] and manager.restore(tree_at(0))[1] == 20


def test_orbax_sees_our_steps_where_it_writes_in_place(root, monkeypatch):
    with ec.CheckpointManager(root, keep=2, orbax=True) as manager:
        fill_run(manager, [10, 20, 30])
        manager.wait()
        assert not (root / "10").exists()
        with _in_place(root, cleanup_tmp_directories=True) as other:
            assert sorted(other.all_steps()) == [20, 30]
            args = ocp.args.StandardRestore(tree_at(0))
            assert other.restore(20, args=args)["step"] == 20
            other.save(40, args=ocp.args.StandardSave(tree_at(40)))
        assert manager.steps() == [20, 30, 40]
        # Not while a step is replaced, and not once it is deleted.
        file = root / "30" / "commit_success.txt"
        gone = tree_at(0)["x"]
        gone.delete()
        with pytest.raises(ValueError, match="deleted"):
            manager.save(30, {"x": gone}, force=True)
        assert file.exists()
        seen = []
        inside.watch(monkeypatch, "publish", lambda *_: seen.append(file.exists()))
        manager.save(30, tree_at(31), force=True)
        manager.wait()
        assert seen == [False] and file.exists()
        manager.delete(30)
        assert not (root / "30").exists() and manager.steps() == [40]
