"""The planner of large models: its index is one that is read."""

import pathlib

import pytest

from eqx_ckpt._format import _columns, _index, _json
from eqx_ckpt._format._packed import Packed
from eqx_ckpt._save import _assign


@pytest.fixture
def scale(monkeypatch):
    path = pathlib.Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(path))
    import scale

    return scale


@pytest.mark.parametrize("has_columns", [False, True])
def test_the_index_that_is_planned_is_read(scale, monkeypatch, has_columns):
    if has_columns:
        monkeypatch.setattr(_columns, "MOST_LEAVES", 0)
    monkeypatch.setattr(_assign, "_MIN_FILE", 2**22)
    kept = {}
    index_of = scale.index_of
    keep = lambda *args: kept.setdefault("index", index_of(*args))
    monkeypatch.setattr(scale, "index_of", keep)
    # A file has parts of many leaves, and a leaf is in the files of all hosts.
    plan = scale.plan(scale.Model(3, 2048, 4096, 2, 8192), 4)
    index = _index.decode(kept["index"])
    assert isinstance(index.placement, Packed) is has_columns
    assert len(index.leaves.names) == plan.leaves and plan.index == len(kept["index"])
    assert len(index.placement.files) == plan.files > 4
    places = set()
    for record in index.leaves.records():
        stops = [s.stop for s in index.segments(record)]
        assert stops == sorted(stops) and stops[-1] == record.template.chunk_count
        places.update(index.locate(record, n) for n in range(stops[-1]))
    assert len(places) == plan.chunks == index.pages[-1]
    assert sum(length for *_, length in places) == sum(plan.written)
    # What is planned of the largest is far from what is refused.
    assert plan.index < _json.MAX_INDEX
