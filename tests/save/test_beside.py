"""Saves beside `clean`, `delete` and other saves: no call fails because of something
that was not so, and what a save that returned has saved is there, whole."""

import collections
import os

import pytest
from support.beside import false_errors, running, threads
from support.faulty import value_at
from support.helpers import long, run_program

import eqx_ckpt as ec


_SETS = ["ocdbt", "zarr", "ocdbt,ocdbt,zarr,zarr"]
_FOREVER = 10**9


def _count(of):
    return collections.Counter(done.error for done in of)


@pytest.mark.parametrize(
    "name, layouts, count",
    [
        ("ck", "ocdbt,ocdbt,zarr,zarr", 40),
        *long(*[("ck", layouts, 1000) for layouts in _SETS], ("ck.zip", "ocdbt", 1000)),
    ],
)
def test_beside_clean_and_delete(tmp_path, name, layouts, count):
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    with (running if count > 100 else threads)(
        ("save", path, count, layouts, 0, "alone"),
        ("save", other, count, layouts, 0, ""),
        ("delete", other, _FOREVER),
        ("clean", path, _FOREVER),
    ) as result:
        alone, saved = result(0), result(1)
        deleted, cleaned = result(2, wait=False), result(3, wait=False)
    assert not _count(alone).keys() - {None}
    assert false_errors(saved, [deleted]) == []
    for error in _count(saved):
        assert error is None or "deleted while" in error
    gone = "FileNotFoundError: There is no checkpoint of eqx_ckpt at `PATH`, and"
    assert all(x is None or x.startswith(gone) for x in _count(deleted))
    assert any(x.error is None for x in cleaned)
    assert any(x.error is None for x in deleted)
    assert not ec.clean(tmp_path) and ec.verify(path) == []
    assert set(os.listdir(tmp_path)) - {other.name} == {name}


@pytest.mark.parametrize(
    "name, layouts, count",
    [
        ("ck", "ocdbt,zarr", 4),
        *long(*[("ck", layouts, 500) for layouts in _SETS], ("ck.zip", "ocdbt", 500)),
    ],
)
def test_functions_beside_clean(tmp_path, name, layouts, count):
    """Each that is read is of the weights that are saved with it."""
    pytest.importorskip("flatbuffers")
    path = tmp_path / name
    with (running if count > 100 else threads)(
        ("save", path, count, layouts, 0, "alone", "functions"),
        ("call", path, _FOREVER),
        ("clean", path, _FOREVER),
    ) as result:
        saved, called, cleaned = result(0), result(1, wait=False), result(2, wait=False)
    assert not _count(saved).keys() - {None}
    for error in _count(called):
        known = ("ReplacedError", "There is no checkpoint")
        assert error is None or any(x in error for x in known), error
    assert any(x.error is None for x in called) and any(not x.error for x in cleaned)
    assert not ec.clean(tmp_path) and os.listdir(tmp_path) == [name]
    assert ec.verify(path) == []


@pytest.mark.long
def test_a_run_beside_clean(tmp_path):
    pytest.importorskip("flatbuffers")
    path = tmp_path / "run"
    with running(
        ("manage", path, 300, 0), ("follow", path, _FOREVER), ("clean", path, _FOREVER)
    ) as result:
        saved, followed = result(0), result(1, wait=False)
    assert not _count(saved).keys() - {None}
    for error in _count(followed):
        known = ("ReplacedError", "There is no checkpoint")
        assert error is None or any(x in error for x in known), error
    assert {x.value for x in followed if x.error is None} <= {-1, 0}
    assert not ec.clean(path) and 3 <= len(ec.CheckpointManager(path).steps()) <= 4


@pytest.mark.long
@pytest.mark.parametrize("layouts", _SETS)
def test_several_writers(tmp_path, layouts):
    path = tmp_path / "ck"
    with running(
        *(("save", path, 700, layouts, first, "") for first in (0, 1000, 2000)),
        ("clean", path, _FOREVER),
        ("read", path, _FOREVER),
    ) as result:
        writers = [result(place) for place in range(3)]
        read = result(4, wait=False)
    for place, of in enumerate(writers):
        others = writers[:place] + writers[place + 1 :]
        assert false_errors(of, others) == []
        known = ("by another", "deleted while")
        assert all(x is None or any(y in x for y in known) for x in _count(of))
        print(place, _count(of))
    for error in _count(read):
        known = ("replaced", "There is no checkpoint")
        assert error is None or any(x in error for x in known), error
    assert value_at(path) in {done.value for of in writers for done in of}
    assert not ec.clean(tmp_path) and os.listdir(tmp_path) == ["ck"]


@pytest.mark.parametrize("kind", ["thread", "fork"])
def test_a_lock_is_not_let_go_of_while_its_call_runs(tmp_path, kind):
    run_program("saves_in_turns", tmp_path / "ck", kind)
    turns = (tmp_path / "ck.turns").read_text().split()
    assert turns == ["first", "first", "second"]
    assert ec.open(tmp_path / "ck")["x"].read().tolist() == [2, 2, 2]
