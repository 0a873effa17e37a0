"""Whatever the records of a checkpoint say, each call ends in one clear error, or in an
answer that agrees with those of the other calls. See `attacks.records`.
"""

import concurrent.futures as cf
import json
import os
import sys

import numpy as np
import pytest
from attacks import forge
from attacks.records import MADE
from support import command
from support.clock import timed
from support.helpers import call_main

import eqx_ckpt as ec


def _records(count, seed, names):
    out = json.loads(call_main("attacks.records", count, seed, names)[-1])
    assert out["tried"] == count and not out["wrong"], out["wrong"]
    return out["ended"]


def test_records():
    ended = _records(60, 0, ["run", "1/processes"])
    # Some get as far as the data, and some are refused early.
    assert {"open", "repr"} <= set(ended)


@pytest.mark.long
def test_thirty_thousand_records():
    with cf.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda seed: _records(2000, seed, list(MADE)), range(1, 16)))


@pytest.mark.parametrize("way", ["forwards", "from the end", "slices", "in"])
def test_a_loop_over_a_node_does_not_look_at_all_children_again(tmp_path, way):
    one, two = (_calls_of_a_loop(tmp_path / str(n), n, way) for n in (200, 400))
    assert two < 2.3 * one


def _calls_of_a_loop(path, count, way):
    ec.tree_serialise_leaves(path, {"l": [np.ones(1)] * count}, durable=False)
    node = ec.open(path).tree.l
    events = []
    sys.setprofile(lambda *event: events.append(event[1]))
    try:
        for i in range(count):
            if way == "in":
                assert i in node
            elif way == "slices":
                assert node[i : i + 1][0].name == f"l.{i}"
            else:
                assert node[i if way == "forwards" else i - count].name == f"l.{i}"
    finally:
        sys.setprofile(None)
    return len(events)


def test_many_nodes_without_leaves(tmp_path):
    """So many as are read are saved, and no record has more."""
    few, many = {"a": 1.5, "z": [None] * 100_000}, {"a": 1.5, "z": [None] * 10**6}
    ec.tree_serialise_leaves(tmp_path / "few", few, durable=False)
    assert ec.rebuild(tmp_path / "few", []) == few
    with pytest.raises(ValueError, match="more nodes and static values than are read"):
        ec.tree_serialise_leaves(tmp_path / "many", many, durable=False)

    def alter(value):
        kinds, rows = value["tree"]["kinds"], value["tree"]["rows"]
        next(kind for kind in kinds if kind[0] == "list")[3] = 4_000_000
        next(row for row in rows if row[-1] == -99_999)[-1] = -3_999_999

    forge(tmp_path / "few", alter)
    with pytest.raises(ec.DamagedError, match="more nodes and static values than are"):
        ec.rebuild(tmp_path / "few", [])


def test_a_kind_of_many_fields_that_many_modules_have(tmp_path, capsys):
    """It is shown, and compared, at the cost of the file and not of what it stands for.
    What is left out is counted."""
    count = 300

    def make(path, number):
        ec.tree_serialise_leaves(path, {"a": np.ones(1)}, durable=False)
        names = [f"f{i}" for i in range(count)]
        kinds = [["leaf"], ["module", "m", "M", [], names], ["list", "", "", count]]
        kinds.append(["dict", "", "", ["a", "b"]])
        rows = [[0], [1, *[0] * count], [2, 1, 1 - count], [3, 0, 2]]
        tree = {"kinds": kinds, "values": [number], "rows": rows}
        forge(path, lambda value: value.update(tree=tree))

    make(tmp_path / "a", 0), make(tmp_path / "b", 1)
    ckpt = ec.open(tmp_path / "a")
    assert ckpt.tree.b[count - 1].f299 == 0

    def look():
        found = ec.diff(ckpt, tmp_path / "b")
        assert not ec.diff(ckpt, tmp_path / "a").static
        assert len(ckpt._repr_html_()) + len(repr(ckpt.tree)) < 400_000
        assert command.main(["ls", ckpt.path]) == 0
        assert len(capsys.readouterr().out) < 500_000
        return found

    found, seconds = timed(5, look)
    assert seconds <= 5
    assert found.static["b.0.f7"] == ("0", "1") and len(found.static) < 10_000
    assert found.static["b.299.*"] == ("300 static fields", "others")


def test_a_node_of_many_children_and_many_values(tmp_path):
    count = 50_000
    ec.tree_serialise_leaves(tmp_path / "a", {"a": np.ones(1)}, durable=False)
    parts, data = ([f"{x}{i}" for i in range(count)] for x in "cd")
    kinds = [["leaf"], ["none"], ["custom", "m", "M", parts, data]]
    kinds.append(["dict", "", "", ["a", "b"]])
    rows = [[0], [1], [2, *[0] * count, 1, 1 - count], [3, 0, 2]]
    tree = {"kinds": kinds, "values": [7], "rows": rows}
    forge(tmp_path / "a", lambda value: value.update(tree=tree))
    found, seconds = timed(5, lambda: ec.open(tmp_path / "a").tree.b.d49999)
    assert seconds <= 5 and found == 7


def test_deep_modules_that_have_moved(tmp_path):
    """The names of their StateIndices are compared with the markers once."""
    depth, count = 1000, 3000
    ec.tree_serialise_leaves(tmp_path / "a", {"s": [np.ones(1)]}, durable=False)
    kinds = [["leaf"], ["none"], ["index", "", "", ["init"]], ["list", "", "", count]]
    kinds += [["dict", "", "", ["m"]], ["state", "", "", 1]]
    kinds.append(["dict", "", "", ["m", "s"]])
    # Each node has the one before it as its child `m`.
    nodes = [[4, row] for row in range(3, 3 + depth)]
    rows = [[0], [1], [2, 0, 1], [3, 2, 1 - count], *nodes, [5, 0, 0]]
    rows.append([6, len(rows) - 2, len(rows) - 1])
    tree = {"kinds": kinds, "values": [{"markers": ["=.x.y"]}], "rows": rows}
    forge(tmp_path / "a", lambda value: value.update(tree=tree))
    read = lambda: ec.materialise(ec.open(tmp_path / "a").tree.s)
    found, seconds = timed(3, read)
    assert seconds <= 3 and found[0] == 1
