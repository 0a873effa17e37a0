"""Stores that answer oddly: a call is right, or says what the store has said, and what
was there before is whole. See `support.odd_answers` and `support.odd_runs`."""

import itertools
import json
import random

import pytest
from support import odd_answers, odd_runs, scripts, servers
from support.helpers import long
from support.odd_answers import Case, World

import eqx_ckpt as ec


@pytest.fixture
def world(request, tmp_path):
    random.seed(0)  # Of the bits that are flipped.
    proxy = request.getfixturevalue(request.param)
    with proxy.used(), odd_answers.hurried():
        yield World(request.param, proxy, str(tmp_path))


def _each_once(world, call, answers, part, method="PUT"):
    """The cases in which a request with `part` in its path is answered so."""
    path = world.path(world.calls[call].before)
    world.proxy.requests.clear()
    world.calls[call].do(path)
    hit = [
        number
        for number, request in enumerate(world.proxy.requests)
        if request.method == method and part in request.path
    ]
    assert hit
    return [Case(call, a, n, "once") for n, a in itertools.product(hit, answers)]


@pytest.mark.parametrize("world", ["s3", "az"], indirect=True)
def test_a_write_that_is_refused(world):
    """TensorStore takes that for a success."""
    for case in _each_once(world, "overwrite", ("304", "412"), "/d/"):
        assert odd_answers.run(world, case) is None, case


@pytest.mark.parametrize("world", ["s3"], indirect=True)
def test_one_wrong_answer_is_no_damage(world):
    answers = ("404", "no etag", "flip")
    some = _each_once(world, "restore and save", answers, "/30/", "GET")
    for case in random.Random(0).sample(some, 8):
        assert odd_answers.run(world, case) is None, case
    keys = _each_once(world, "clean", ["404"], "eqx_ckpt.json", "GET")
    for case in keys[:1]:
        assert odd_answers.run(world, case._replace(mode="there")) is None, case


@pytest.mark.parametrize("world", ["s3", "az"], indirect=True)
def test_some_odd_answers(world):
    rng = random.Random(0)
    for case in odd_answers.cases(world, rng, 16):
        assert odd_answers.run(world, case) is None, case


@pytest.mark.parametrize("world", ["s3"], indirect=True)
def test_a_damaged_step_is_moved_aside_whole(world):
    """One that has been read as damaged twice, and is not, is not replaced."""
    path = world.path("run")
    manager = ec.CheckpointManager(path)
    world.proxy.fault = lambda method, key: (
        "flip" if method == "GET" and "/30/default/d/" in key else None
    )
    with pytest.warns(UserWarning, match="Restored step 20"):
        assert manager.restore(odd_answers.tree(0))[1] == 20
    world.proxy.fault = lambda *_: None
    with pytest.raises(FileExistsError, match="Step 30 .* is whole now"):
        manager.save(30, odd_answers.tree(30))
    assert manager.restore(odd_answers.tree(0))[1] == 30


@pytest.mark.parametrize("seed", [0, 1, 2, *long(*range(3, 40))])
@pytest.mark.parametrize("kind", ["s3", *long("gs", "az")])
def test_some_runs(kind, seed, request):
    proxy = request.getfixturevalue(kind)
    with proxy.used(), odd_answers.hurried():
        odd_runs.run(proxy, kind, seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["s3", "gs", "az", "http"])
def test_every_odd_answer(kind, capsys):
    """At every request of each call, once and for ever."""
    seed = random.SystemRandom().randrange(2**32)
    done = scripts.run_module("support.odd_answers", kind, seed, 0)
    assert done.stdout, done.stderr[-2000:]
    report = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n{kind}, seed {seed}: {report['outcomes']}")
    assert report["failures"] == []


def test_the_proxy_has_odd_answers():
    """A wrong answer is another than the right one."""
    right = 206, b"abcd", [("Content-Range", "bytes 0-3/9"), ("ETag", "x")]
    for name, change in servers.ODD.items():
        assert change(right) != right, name
