"""A run's checkpoints in object stores. The servers are those of `support.servers`."""

import functools as ft
import itertools
import os
import random
import signal
import threading
import time

import jax.numpy as jnp
import pytest
from support import inside, scripts, servers
from support.helpers import fill_run, long, tree_at, until
from support.processes import good, run_team_program
from support.stores import StoredFiles

import eqx_ckpt as ec


_numbers = itertools.count()
_stores = [*servers.BUCKETS, "memory"]


@pytest.fixture(params=_stores)
def root(request):
    """A URL in a store where there is nothing yet."""
    if request.param == "memory":
        yield f"memory://runs/{next(_numbers)}"
        return
    proxy = request.getfixturevalue(request.param)
    with proxy.used():
        yield f"{servers.BUCKETS[request.param]}/managed/{next(_numbers)}"


@pytest.fixture
def far(s3):
    """A proxy, and such a URL behind it."""
    with s3.used():
        yield s3, f"s3://bucket/managed/{next(_numbers)}"


def _await(manager):
    """Until all is done, but what went wrong is not told: the filters of warnings that
    a test changes are those of all threads."""
    manager._saves._running[-1].over.wait()


def _keys(root):
    return sorted(StoredFiles(root))


def _tops(root):
    """The steps of which anything is there."""
    return {key.partition("/")[0] for key in _keys(root)} - {"eqx_ckpt.history"}


def _kv(root):
    return StoredFiles(root).kv


def _put(root, key, data):
    _kv(root).write(key, data).result()


def _find(root, step, part):
    keys = [k for k in _keys(root) if k.startswith(f"{step}/default/{part}")]
    return next(k for k in keys if part != "d/" or k.endswith("/0"))


def _holds(manager, step):
    assert ec.verify(manager.path(step)) == []
    tree, at = manager.restore(tree_at(0), step=step)
    assert at == step == tree["step"] and (tree["x"] == step).all()


@pytest.mark.parametrize("root", ["s3", "memory", *long("gs")], indirect=True)
def test_a_run(root):
    options = dict(keep=2, keep_every=100, best=("accuracy", "max"))
    with ec.CheckpointManager(root, **options) as manager:
        assert manager.steps() == [] and manager.latest() is None
        fill_run(manager, [50, 100, 150, 160, 170], accuracy=[0.9, 0.1, 0.3, 0.2, 0.1])
        manager.wait()
        assert manager.best() == 50 and manager.latest() == 170
        assert manager.steps() == [50, 100, 160, 170]
        manager.pin(160)
        fill_run(manager, [410, 420], accuracy=[0.95, 0.1])
        manager.wait()
        assert manager.best() == 410
        assert manager.steps() == [100, 160, 410, 420]
        with pytest.raises(ValueError, match="Step 160 is pinned"):
            manager.delete(160)
        manager.unpin(160)
        manager.delete(160)
        with pytest.raises(FileNotFoundError, match="no step 160"):
            manager.pin(160)
        with pytest.raises(FileExistsError, match="Step 410 exists already"):
            manager.save(410, tree_at(410))
        assert manager.save(100, tree_at(100), force=True)
        manager.wait()
        for step in manager.steps():
            _holds(manager, step)
        x, step = manager.restore(tree_at(0)["x"], source="x")
        assert step == 420 and x[0] == 420
        part, _ = manager.restore(tree_at(0), where=lambda t: t["x"])
        assert part["step"] == 0 and part["x"][0] == 420
    # Nothing is left of what was deleted, and nothing is half there.
    assert _tops(root) == set(map(str, manager.steps()))
    assert ec.clean(root, remove=False) == []
    # A new process knows all of it.
    manager = ec.CheckpointManager(root, best=("accuracy", "max"))
    assert manager.best() == 410
    assert manager.restore(tree_at(0))[1] == 420


def test_exists_and_delete(root):
    path = f"{root}/1"
    assert not ec.exists(path)
    ec.tree_serialise_leaves(path, tree_at(1))
    ec.tree_serialise_leaves(f"{root}/10", tree_at(10))
    assert ec.exists(path)
    _put(root, "1/notes.txt", b"keep me")
    with pytest.raises(ValueError, match="`notes.txt`"):
        ec.delete(path)
    assert ec.exists(path) and ec.verify(path) == []
    _kv(root).write("1/notes.txt", None).result()
    ec.delete(path)
    assert not ec.exists(path) and ec.exists(f"{root}/10")
    assert all(key.startswith("10/") for key in _keys(root))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ec.delete(path)


def test_a_store_with_options(s3, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    root = ec.Store(f"s3://bucket/managed/{next(_numbers)}", endpoint=s3.url)
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [1, 2])
        manager.wait()
        assert manager.steps() == [2] and manager.path(2) == root / "2/default"
        assert manager.restore(tree_at(0))[1] == 2
        manager.delete(2)
        assert manager.latest() is None


def test_what_is_not_ours_stays(root):
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2, 3])
    foreign = ["1/default/notes.txt", "2/plots/loss.png", "02/default/x", "readme"]
    foreign += ["30/default/data/mine", "4", "x/default/eqx_ckpt.json"]
    for key in foreign:
        _put(root, key, b"keep me")
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [5])
        _await(manager)
        with pytest.warns(UserWarning, match="step 1 was not deleted: .*`notes.txt`"):
            manager.wait()
        assert manager.steps() == [1, 5]
        manager.restore(tree_at(0))
    assert ec.verify(manager.path(1)) == []
    assert set(foreign) <= set(_keys(root))


def test_nothing_is_deleted_for_a_save_that_fails(far):
    proxy, root = far
    retries = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    store = ec.Store(root, s3_request_retries=retries)
    with ec.CheckpointManager(store, keep=1) as manager:
        fill_run(manager, [1])
        manager.wait()
        proxy.fault = lambda method, path: (
            503 if method == "PUT" and "/2/default/" in path else None
        )
        with pytest.raises(ConnectionError):
            manager.save(2, tree_at(2))
            manager.wait()
        assert manager.steps() == [1]
        # Where it is not known what a step is, it stays, and that is said.
        fill_run(manager, [3])
        proxy.fault = lambda method, path: (
            503 if method == "HEAD" and "/1/default/" in path else None
        )
        _await(manager)
        with pytest.warns(UserWarning, match="not all done.*\n.*does not answer"):
            manager.wait()
        # What a list says is known.
        assert manager.steps() == [1, 3]
        proxy.fault = lambda *_: 503
        with pytest.raises(ConnectionError):
            manager.restore(tree_at(0))
        with pytest.raises(ConnectionError):
            ec.CheckpointManager(store, best=("loss", "min")).best()
        proxy.fault = lambda *_: None
        assert manager.steps() == [1, 3]
        assert manager.restore(tree_at(0))[1] == 3
        fill_run(manager, [4])
    assert manager.steps() == [4]


def test_the_new_step_is_there_before_an_older_one_goes(far):
    proxy, root = far
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [1])
        manager.wait()
        proxy.requests.clear()
        fill_run(manager, [2])
    done = [(r.method, r.path) for r in proxy.requests if r.status < 300]
    (committed,) = (
        i
        for i, (method, path) in enumerate(done)
        if method == "PUT" and path.endswith("2/default/eqx_ckpt.json")
    )
    gone = [
        i
        for i, (method, path) in enumerate(done)
        if method == "DELETE" and "/1/" in path
    ]
    assert gone and min(gone) > committed
    first, second = (done[i][1] for i in gone[:2])
    assert first.endswith("1/commit_success.txt")
    assert second.endswith("1/default/eqx_ckpt.json")


def _break(root, step, part):
    key = _find(root, step, part)
    data = bytearray(_kv(root).read(key).result().value)
    data[len(data) // 2] ^= 1
    _put(root, key, bytes(data))


def _remove(root, step, part):
    _kv(root).write(_find(root, step, part), None).result()


_bad = "cannot be read"
DAMAGE = {
    "data": (lambda r, s: _break(r, s, "d/"), "is damaged"),
    "index": (
        lambda r, s: _put(r, f"{s}/default/eqx_ckpt.json", b"{}"),
        "cannot be read",
    ),
    "empty": (
        lambda r, s: _put(r, f"{s}/default/eqx_ckpt.json", b""),
        "cannot be read",
    ),
    "missing": (lambda r, s: _remove(r, s, "d/"), "nothing of it"),
    "incomplete": (lambda r, s: _remove(r, s, "eqx_ckpt.json"), "was not completed"),
}


# The emulator of Google's store takes no empty files.
_quick = [("s3", "index"), ("s3", "incomplete"), *(("memory", d) for d in DAMAGE)]
_damaged = [
    pytest.param(*case, marks=[] if case in _quick else [pytest.mark.long])
    for case in itertools.product(_stores, DAMAGE)
    if case != ("gs", "empty")
]


@pytest.mark.parametrize("root, damage", _damaged, indirect=["root"])
def test_damaged_steps_are_skipped_and_saved_anew(root, damage):
    breaks, says = DAMAGE[damage]
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [10, 20, 30])
    for step in (20, 30):
        breaks(root, step)
    manager = ec.CheckpointManager(root, keep=1)
    with pytest.warns(UserWarning, match="Restored step 10") as caught:
        tree, step = manager.restore(tree_at(0))
    assert len(caught) == 1 and step == 10 and tree["x"][0] == 10
    assert str(caught[0].message).count(says) == 2
    # The run comes by the same steps again.
    fill_run(manager, [20])
    manager.wait()
    assert 20 in manager.steps()
    _holds(manager, 20)
    fill_run(manager, [30, 40])
    manager.wait()
    assert manager.steps() == [40]


def test_a_layout_with_fixed_names(far):
    _, root = far
    with ec.CheckpointManager(root, layout="zarr", keep=2) as manager:
        fill_run(manager, [1, 2, 3])
        manager.wait()
        assert manager.steps() == [2, 3]
        _put(root, "3/default/x/c/0", b"damaged")
        _put(root, "4/default/eqx_ckpt.saving", b"0123456789abcdef")
    manager = ec.CheckpointManager(root, layout="zarr", keep=2)
    with pytest.warns(
        UserWarning, match="step 3: (.*\n)*.*step 4: .*was not completed"
    ):
        assert manager.restore(tree_at(0))[1] == 2
    fill_run(manager, [3])
    manager.wait()
    _holds(manager, 3)
    # What was there before is kept, as it cannot be replaced.
    assert any("3/default.damaged-" in key for key in _keys(root))
    # Whether it is still being saved nobody can tell.
    with pytest.raises(FileExistsError, match="running or was interrupted"):
        manager.save(4, tree_at(4))
        manager.wait()
    fill_run(manager, [5])
    manager.wait()
    assert manager.steps() == [3, 5]


def test_a_run_that_is_killed(far):
    """A process is killed as it commits: its data is there and no index."""
    proxy, root = far
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [1])
    script = scripts.start(scripts.program("run_in_a_store"), root)
    pid = int(script.stdout.readline())

    def fault(method, path):
        if method == "PUT" and path.endswith("3/default/eqx_ckpt.json"):
            os.kill(pid, signal.SIGKILL)
            return "drop"

    proxy.fault = fault
    with script:
        assert script.wait() == -signal.SIGKILL
    proxy.fault = lambda *_: None
    assert any("3/default/d/" in key for key in _keys(root))
    manager = ec.CheckpointManager(root, keep=1)
    assert manager.steps() == [2] and not ec.exists(manager.path(3))
    with pytest.warns(UserWarning, match="step 3: its save was not completed"):
        assert manager.restore(tree_at(0))[1] == 2
    # If the run comes by it again what is left goes; here it does not.
    fill_run(manager, [4])
    manager.wait()
    assert manager.steps() == [4]
    with pytest.raises(ValueError, match="idle=True"):
        ec.clean(root)
    (left,) = ec.clean(root, remove=False)
    assert left.startswith(f"{root}/3/default/d/")
    assert ec.clean(root, idle=True) == [left]
    assert _tops(root) == {"4"}
    _holds(manager, 4)


def test_the_mark_of_a_step_that_is_gone(root):
    """A kill leaves it, of who marks a step that another deletes."""
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2])
    ec.delete(manager.path(1))
    assert _tops(root) == {"2"}
    _put(root, "1/commit_success.txt", b"by eqx_ckpt")
    mark = f"{root}/1/commit_success.txt"
    assert ec.clean(root, remove=False) == [mark] == ec.clean(root, idle=True)
    _put(root, "1/commit_success.txt", b"by eqx_ckpt, or not")
    assert ec.clean(root, idle=True) == []
    assert _tops(root) == {"1", "2"}
    _holds(manager, 2)


@pytest.mark.parametrize(
    "path, number", [("/eqx_ckpt.pins/1", 0), ("/1/default/eqx_ckpt.json", 1)]
)
def test_a_pin_outlives_one_wrong_answer(far, path, number):
    """A store says once that the pin, or the step, is not there."""
    proxy, root = far
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [1])
        manager.wait()
        manager.pin(1)
        looks = itertools.count()
        proxy.fault = lambda _, at: (
            "404" if at.endswith(path) and next(looks) == number else None
        )
        if "pins" in path:
            fill_run(manager, [2])
        else:
            manager.pin(1)
    assert next(looks) > number
    assert 1 in manager.steps() and "eqx_ckpt.pins/1" in _keys(root)
    _holds(manager, 1)


def test_a_pinned_step_is_not_replaced_for_one_wrong_answer(far):
    proxy, root = far
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1])
        manager.wait()
        manager.pin(1)
        looks = itertools.count()
        proxy.fault = lambda _, at: (
            "404"
            if at.endswith("/1/default/eqx_ckpt.json") and next(looks) == 0
            else None
        )
        with pytest.raises(FileExistsError, match="is pinned"):
            manager.save(1, tree_at(2), force=True)
    _holds(manager, 1)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_save_to_the_root_that_fails(layout, monkeypatch):
    """It deletes what it has written, and no step that was saved meanwhile."""
    root, numbers = f"memory://runs/{next(_numbers)}", itertools.count()

    def fail(change, key):
        if next(numbers) == 5:
            patch.undo()
            with ec.CheckpointManager(root, layout=layout) as manager:
                fill_run(manager, [1])
            raise OSError("no more")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no more"):
        inside.watch_store(patch, root, before=fail)
        ec.tree_serialise_leaves(root, [tree_at(2)] * 3, layout="zarr")
    _holds(ec.CheckpointManager(root), 1)
    assert _tops(root) == {"1"} and ec.clean(root, remove=False) == []


def test_requests(far):
    """They do not grow with the steps, but for one look at each."""
    proxy, root = far
    options = dict(keep=3, keep_every=1, best=("loss", "min"))
    with ec.CheckpointManager(root, **options) as manager:
        counts = []
        for step in range(1, 9):
            fill_run(manager, [step], loss=[1 / step])
            manager.wait()
            counts.append(len(proxy.requests))
            proxy.requests.clear()
    assert counts[-1] - counts[3] <= 6
    assert proxy.count("GET") == 0


def test_round_trips(far):
    """What is waited for in turn by whoever opens a run that others save."""
    proxy, root = far
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1, 2, 3])
    trips = ft.partial(servers.round_trips, proxy)
    # The journal, and the list.
    assert trips(1, lambda: ec.CheckpointManager(root).latest()) == 1
    # And the index; and the digests, and the leaves.
    restore = lambda: ec.CheckpointManager(root).restore(tree_at(0))
    assert trips(3, restore) == 3
    # There is no index; then no file tells another format, and the run is listed;
    # and the index of a step.
    assert trips(3, lambda: ec.open(root)) == 3
    # The index; small files; large ones; and whether these end there.
    assert trips(4, lambda: ec.verify(manager.path(3))) == 4


def test_a_loop_waits_for_no_request(far):
    """A save asks for nothing before it returns, once the run is known."""
    proxy, root = far
    numbers = itertools.count(1)
    with ec.CheckpointManager(root, keep=2) as manager:
        fill_run(manager, [0, next(numbers)])
        manager.wait()

        def asked():
            at = threading.Event()
            proxy.requests.clear()
            # Nothing is answered before the call has returned.
            proxy.fault = lambda *_: at.wait(60) and None
            assert manager.save(next(numbers), tree_at(1))
            at.set()
            proxy.fault = lambda *_: None
            manager.wait()

        asked()
        proxy.delay = 0.0
        fill_run(manager, [next(numbers)])
        manager.wait()
        save = lambda: (fill_run(manager, [next(numbers)]), manager.wait())
        # What is there; the data; the index; whether the older step may go; its mark;
        # pins; whether its index is still that; its index; its data. And together with
        # these the mark, and whether the step is still there; and the history.
        assert servers.round_trips(proxy, 9, save) == 9
    with ec.CheckpointManager(root) as manager:
        manager.restore(tree_at(0))
        fill_run(manager, [1000])
        manager.wait()
        step = itertools.count(1001)
        save = lambda: (fill_run(manager, [next(step)]), manager.wait())
        assert servers.round_trips(proxy, 5, save) == 5


def test_an_older_step_stays_until_the_new_one_is_marked(far):
    """Or a manager of Orbax would find neither."""
    proxy, root = far
    is_mark = lambda method, path, step: (
        method == "PUT" and path.endswith(f"/{step}/commit_success.txt")
    )
    with ec.CheckpointManager(root, keep=1) as manager:
        fill_run(manager, [0])
        manager.wait()
        proxy.fault = lambda *of: 403 if is_mark(*of, 1) else None
        with pytest.warns(UserWarning, match="not all done:\n  after step 1: "):
            fill_run(manager, [1])
            manager.wait()
        assert manager.steps() == [0, 1]
        at = threading.Event()
        proxy.requests.clear()
        proxy.fault = lambda *of: at.wait(60) and None if is_mark(*of, 2) else None
        fill_run(manager, [2])
        until(lambda: proxy.count("HEAD", "/2/default/eqx_ckpt.json"))
        time.sleep(0.05)
        assert proxy.count("DELETE") == 0
        at.set()
        manager.wait()
        assert proxy.count("DELETE") > 0 and manager.steps() == [2]


def test_a_step_that_another_has_saved_since(far):
    """Is refused in the background, and stays."""
    _, root = far
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, [1])
        manager.wait()
        with ec.CheckpointManager(root) as other:
            fill_run(other, [2])
        assert manager.save(2, tree_at(7))
        with pytest.raises(FileExistsError, match="There is a checkpoint at"):
            manager.wait()
        _holds(manager, 2)
        with pytest.raises(FileExistsError, match="Step 1 exists already"):
            manager.save(1, tree_at(1))
        manager.save(2, tree_at(8), force=True)
        manager.wait()
        assert manager.restore(tree_at(0))[0]["x"][0] == 8


BEST = {"best": ("loss", "min")}


def test_a_run_is_listed_in_parts(far, monkeypatch):
    """And what the journal says of a step is not read again: a list shows that it is
    the same save."""
    proxy, root = far
    inside.limit(monkeypatch, unlisted_steps=5, listed_keys=10)
    steps = [1, 2, 9, 10, 11, 12, 19, 100]
    with ec.CheckpointManager(root) as manager:
        fill_run(manager, steps, loss=[1 / (1 + step % 10) for step in steps])
    inside.write_journal(root, 0)

    def count(trips, call):
        results = []
        ask = lambda: results.append(call(ec.CheckpointManager(root, **BEST)))
        trips = servers.round_trips(proxy, trips, ask)
        return results[-1], trips

    # The journal; the list, in eleven parts or more; and the best step once more.
    assert count(2, lambda m: m.latest()) == (100, 2)
    assert proxy.count("GET", "list-type") > 9 and proxy.count("HEAD") == 0
    assert count(2, lambda m: m.steps()) == (steps, 2)
    assert count(3, lambda m: m.best()) == (19, 3)
    assert proxy.count("HEAD") == 1 and proxy.count("GET", "default/eqx_ckpt.json") == 0


_STEPS = [0, 1, 9, 10, 11, 19, 100]


def _scan(root):
    """What there is, by a look at each step and at nothing else."""
    found = {}
    for step in _STEPS:
        try:
            metadata = ec.open(f"{root}/{step}/default").metadata
        except (FileNotFoundError, ValueError):
            continue
        found[step] = metadata["metrics"]["loss"]
    best = min(found, key=lambda step: (found[step], -step), default=None)
    return sorted(found), max(found, default=None), best


def _save(root, step, loss):
    metadata = {"step": step, "metrics": {"loss": loss}}
    ec.tree_serialise_leaves(
        f"{root}/{step}/default", {"x": step}, metadata=metadata, filter_spec=True
    )


_seeds = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 60))]


@pytest.mark.parametrize("seed", _seeds)
def test_any_history_in_a_store(seed, monkeypatch):
    """Steps that are saved, again, by whomever, or killed or deleted, after they came
    into the journal, which may be lost or an older one."""
    inside.limit(monkeypatch, unlisted_steps=2, listed_keys=5)
    rng = random.Random(seed)
    root = f"memory://histories/{next(_numbers)}"
    old = b""
    for _ in range(15):
        step = rng.choice(_STEPS)
        at = f"{step}/default"
        act = rng.choice(["save", "save", "delete", "half", "left", "journal", "put"])
        if act == "save":
            _save(root, step, rng.randrange(9))
        elif act == "delete":
            StoredFiles(f"{root}/{step}").clear()
        elif act == "half":
            _kv(root).write(f"{at}/eqx_ckpt.json", None).result()
        elif act == "left":
            _put(
                root, f"{at}/d/{rng.randbytes(8).hex()}/0", b"of a save that is killed"
            )
        elif act == "journal":
            old = _kv(root).read("eqx_ckpt.journal").result().value
            inside.write_journal(root, step)
        else:
            _put(root, "eqx_ckpt.journal", rng.choice([old, b"", b"{}"]))
        manager = ec.CheckpointManager(root, **BEST)
        assert (manager.steps(), manager.latest(), manager.best()) == _scan(root)


def test_what_has_not_changed_is_written_again(far):
    """There are no links: `reuse` does nothing, and asks nothing."""
    proxy, root = far
    counts = []
    for reuse in (True, False):
        with ec.CheckpointManager(f"{root}/{reuse}", reuse=reuse) as manager:
            for step in (1, 2):
                proxy.requests.clear()
                manager.save(step, {"base": jnp.ones(10**5), "step": step})
                manager.wait()
        counts.append(
            [len(proxy.requests), sum(r.sent for r in proxy.requests) // 1000]
        )
        assert ec.verify(manager.path(2)) == []
    assert counts[0] == counts[1] and counts[0][1] >= 400


def test_over_http(tmp_path):
    with ec.CheckpointManager(tmp_path) as manager:
        fill_run(manager, [1])
    with servers.static(tmp_path) as port:
        manager = ec.CheckpointManager(f"http://127.0.0.1:{port}")
        tree, step = manager.restore(tree_at(0), step=1)
        assert step == 1 and tree["x"][0] == 1
        for call in (
            lambda: manager.restore(tree_at(0)),
            manager.latest,
            manager.steps,
        ):
            with pytest.raises(ValueError, match="over HTTP nothing is listed"):
                call()
        with pytest.raises(ValueError, match="nothing is saved over HTTP"):
            manager.save(2, tree_at(2))


def test_several_processes(far, tmp_path):
    _, root = far
    good(run_team_program(2, "team_of_a_manager_in_a_store", tmp_path, root))
