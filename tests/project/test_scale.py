"""The planner of large models: its index is one that is read."""

import pathlib

import pytest

from eqx_ckpt._kernel._format import _index, _json
from eqx_ckpt._kernel._limits import limits


@pytest.fixture
def scale(monkeypatch):
    path = pathlib.Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(path))
    import scale

    return scale


def test_the_index_that_is_planned_is_read(scale, monkeypatch):
    monkeypatch.setattr(limits, "min_file_bytes", 2**22)
    kept = {}
    index_of = scale.index_of
    keep = lambda *args: kept.setdefault("index", index_of(*args))
    monkeypatch.setattr(scale, "index_of", keep)
    # A file has parts of many leaves, and a leaf is in the files of all hosts.
    plan = scale.plan(scale.Model(3, 2048, 4096, 2, 8192), 4)
    index = _index.decode(kept["index"])
    assert len(index.leaves.names) == plan.leaves and plan.index == len(kept["index"])
    assert len(index.files) == plan.files > 4
    places = set()
    for record in index.leaves.records():
        stops = [stop for _, stop, *_ in index.extents.segments(record)]
        assert stops == sorted(stops) and stops[-1] == record.template.chunk_count
        places.update(index.extents.locate(record, n) for n in range(stops[-1]))
    assert len(places) == plan.chunks == index.extents.pages[-1]
    assert sum(length for *_, length in places) == sum(plan.written)
    # What is planned of the largest is far from what is refused.
    assert plan.index < _json.MAX_INDEX


def test_times_are_ranges_of_bytes_and_leaves(scale):
    plan = scale.plan(scale.Model(1, 2048, 4096, 2, 8192), 4)
    costs = scale.COSTS
    time = scale.load_time(plan, plan.read, 4, costs)
    assert 0 < time.low < time.high and str(time).count(" to ") == 1
    # Each leaf has a part on each device.
    free = costs._replace(device=scale.Range(0, 0))
    more = time.high - scale.load_time(plan, plan.read, 4, free).high
    assert more == pytest.approx(plan.leaves * 8 * costs.device.high)
    # A rate that is given is what counts, up to what the network carries.
    slow = costs._replace(load=scale.Range(1e6, 1e12), device=scale.Range(0, 0))
    time = scale.load_time(plan, 1e9, 4, slow)
    assert time == pytest.approx((1e9 / scale.HOST, 1000))
    assert scale.save_time(plan, 4, costs).low < scale.save_time(plan, 4, costs).high
