"""A process that saves to an object store is killed at every request that it makes."""

import itertools
import os
import random
import signal

import pytest
from support import servers
from support.killing import CASES, make, Server, what_is_at
from support.stores import ids_of_saves, StoredFiles

import eqx_ckpt as ec


@pytest.fixture(scope="module")
def remote(request):
    """A proxy, the store behind it, and a server that saves there and is killed."""
    proxy = request.getfixturevalue(request.param)
    with Server() as server:
        yield proxy, servers.BUCKETS[request.param], server


def _campaign(remote, tmp_path, case, layout, pick):
    proxy, bucket, server = remote
    old, new = CASES[case]
    pid_file = tmp_path / "pid"
    numbers = itertools.count()

    def prepare():
        path = f"{bucket}/{tmp_path.name}/{next(numbers)}"
        if old is not None:
            ec.tree_serialise_leaves(path, make(old), layout=layout)
        return path

    def kill():
        os.kill(int(pid_file.read_text()), signal.SIGKILL)

    proxy.requests.clear()
    path = prepare()
    before = len(proxy.requests)
    server.save(path, new, layout, trace=False)
    count = len(proxy.requests) - before
    outcomes = []
    for number, passed_on in pick(list(itertools.product(range(count), (False, True)))):
        path = prepare()
        left = itertools.count(-number)

        def fault(method, place):
            if next(left) != 0:
                return None
            if passed_on:
                return kill
            kill()
            return "drop"

        proxy.fault = fault
        server.save(path, new, layout, trace=False, pid_file=str(pid_file))
        proxy.fault = lambda *_: None
        there = what_is_at(path)
        assert there in (old, new), there
        outcomes.append(there)
        if there is not None:
            # The files for other readers follow a commit.
            problems = [p for p in ec.verify(path) if p.leaf or p.file[:2] == "d/"]
            assert problems == []
        if layout == "zarr":
            if there is None and StoredFiles(path):
                with pytest.raises(FileExistsError, match="running or was interrupted"):
                    ec.tree_serialise_leaves(path, make("b"), layout=layout)
            continue
        if number % 2 and StoredFiles(path):
            found = ec.clean(path, remove=False)
            assert ec.clean(path, idle=True) == found
            assert what_is_at(path) == there
            assert there is None or ec.clean(path, remove=False) == []
        ec.tree_serialise_leaves(path, make("b"))
        assert what_is_at(path) == "b" and ec.verify(path) == []
        assert len(ids_of_saves(path)) == 1
    return count, outcomes


_all = [(case, "ocdbt") for case in CASES] + [("first", "zarr")]


@pytest.mark.parametrize(
    "remote, case, layout",
    [("s3", "overwrite", "ocdbt"), ("az", "overwrite", "ocdbt")],
    indirect=["remote"],
)
def test_killed(remote, tmp_path, case, layout):
    pick = lambda points: random.Random(0).sample(points, 2)
    _campaign(remote, tmp_path, case, layout, pick)


@pytest.mark.long
@pytest.mark.parametrize("case, layout", _all)
@pytest.mark.parametrize("remote", servers.BUCKETS, indirect=True, scope="module")
def test_killed_at_every_request(remote, tmp_path, case, layout, capsys):
    count, outcomes = _campaign(remote, tmp_path, case, layout, lambda points: points)
    old, new = CASES[case]
    assert {old, new} <= set(outcomes)
    with capsys.disabled():
        saved = outcomes.count(new)
        print(
            f"\n{remote[1]}, {layout}, {case}: killed before and after each of {count} "
            f"requests; {len(outcomes) - saved} kept, {saved} saved"
        )
