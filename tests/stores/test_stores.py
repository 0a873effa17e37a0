"""Object stores and HTTP, by real servers on loopback. See `support.servers`.

What is counted are the requests that reach a proxy before the server.
"""

import concurrent.futures as futures
import functools as ft
import itertools
import os
import pathlib
import pickle
import re
import threading
import time
import urllib.error
import urllib.request

import jax.random as jr
import numpy as np
import pytest
from support import inside, servers
from support.helpers import long
from support.processes import expected, good, run_team_program
from support.stores import StoredFiles

import eqx_ckpt as ec


_root = pathlib.Path(__file__).parents[2]
_long = pytest.mark.long
_quick = {"max_retries": 2, "initial_delay": "10ms", "max_delay": "50ms"}
_numbers = itertools.count()


@pytest.fixture(params=servers.BUCKETS)
def remote(request):
    """A proxy, and a new URL in the store behind it."""
    proxy = request.getfixturevalue(request.param)
    with proxy.used():
        yield proxy, f"{servers.BUCKETS[request.param]}/{next(_numbers)}"


# Google's as well in the long form only.
_either = pytest.mark.parametrize("remote", ["s3", *long("gs", "az")], indirect=True)


@pytest.fixture
def bucket(s3):
    with s3.used():
        yield s3, f"s3://bucket/{next(_numbers)}"


def _tree(value=1, count=5):
    tree = {f"x{i}": np.full((40, 3), value + i, np.float32) for i in range(count)}
    return {**tree, "value": value}


def _value_at(path):
    """The value of the one tree that is at a path."""
    value = ec.open(path)["value"].read()
    loaded = ec.tree_deserialise_leaves(path, _tree(0))
    for name, leaf in _tree(value).items():
        assert np.all(loaded[name] == leaf)
    return value


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_all_of_it(remote, layout):
    proxy, path = remote
    ec.tree_serialise_leaves(path, _tree(), layout=layout, metadata={"a": 1})
    ckpt = ec.open(path)
    assert ckpt.metadata == {"a": 1} and ckpt.path == path
    assert _value_at(path) == 1
    assert (ckpt["x3"][5:7].read() == 4).all()
    assert (ckpt["x3"][5:7].read(verify=False) == 4).all()
    assert (pickle.loads(pickle.dumps(ckpt))["x0"].read() == 1).all()
    assert ec.verify(path) == []
    with pytest.raises(FileExistsError, match="overwrite=False"):
        ec.tree_serialise_leaves(path, _tree(2), overwrite=False)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ec.open(f"{path}0")
    if layout == "zarr":
        with pytest.raises(ValueError, match="cannot exchange two directories"):
            ec.tree_serialise_leaves(path, _tree(2), layout=layout)
        return
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value_at(path) == 2
    handle = ec.async_tree_serialise_leaves(path, _tree(3))
    handle.result()
    assert _value_at(path) == 3
    with pytest.raises(RuntimeError, match="replaced or deleted"):
        ckpt["x0"].read()
    assert ec.verify(path) == []


@_either
def test_a_deletion_that_cannot_be_finished(remote):
    """It says so, and leaves no files for Orbax without the data that they are of."""
    proxy, path = remote
    ec.tree_serialise_leaves(path, _tree(), orbax=True)
    has_begun = threading.Event()

    def fault(method, at):
        if method in ("DELETE", "POST"):
            has_begun.set()
        is_look = method == "GET" and "eqx_ckpt.json" in at
        return 403 if is_look and has_begun.is_set() else None

    proxy.fault = fault
    with pytest.raises(PermissionError):
        ec.delete(path)
    proxy.fault = lambda *_: None
    assert not ec.exists(path)
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value_at(path) == 2 and ec.verify(path) == []
    ec.delete(path)
    assert len(StoredFiles(path)) == 0


def test_what_is_beside_a_checkpoint_stays(remote):
    """A path that begins as another one does, and one below it."""
    _, path = remote
    for other in (f"{path}0", f"{path}.x", path, f"{path}/d0/x"):
        ec.tree_serialise_leaves(other, _tree(1))
    ec.tree_serialise_leaves(path, _tree(2))
    assert _value_at(path) == 2
    assert _value_at(f"{path}0") == _value_at(f"{path}.x") == 1
    assert _value_at(f"{path}/d0/x") == 1


@_either
def test_large_leaves(remote):
    """Of several chunks and files, with padding, compressed and not, and parts."""
    proxy, path = remote
    tree = {
        "a": np.arange(10**6, dtype=np.float32).reshape(500, 2000),
        "b": np.arange(10**6, dtype=np.int16).reshape(1000, 1000),
        "c": np.arange(300, dtype=np.int8),
    }
    for compression in (None, "lz4", "zstd"):
        how = {"compression": compression, "chunks": 2**18, "max_bytes": 2**22}
        ec.tree_serialise_leaves(path, tree, **how)
        loaded = ec.tree_deserialise_leaves(path, tree)
        assert all((loaded[name] == tree[name]).all() for name in tree)
        ckpt = ec.open(path)
        part = ckpt["a"][::70, 5:9]
        assert (part.read() == tree["a"][::70, 5:9]).all()
        assert (part.read(verify=False) == tree["a"][::70, 5:9]).all()
        assert (ckpt["b"].T[3].read() == tree["b"].T[3]).all()
        assert ec.verify(path) == []
    assert max(r.sent for r in proxy.requests) <= 2**20


# 445 leaves, as GPT-2 with Adam has.
_many = {
    f"x{i}": np.full((64, 64) if i % 3 else (64,), i, np.float32) for i in range(445)
}


def _writes(proxy):
    # Azure's deletions are a POST.
    deletions = proxy.count("POST", "comp=batch")
    return proxy.count("PUT") + proxy.count("POST") - deletions


def test_requests(remote):
    proxy, path = remote
    ec.tree_serialise_leaves(path, _many)
    assert _writes(proxy) <= 12
    proxy.requests.clear()
    ec.tree_serialise_leaves(path, _many)
    assert _writes(proxy) <= 8
    proxy.requests.clear()
    ckpt = ec.open(path)
    assert len(proxy.requests) == proxy.count("GET") <= 2
    proxy.requests.clear()
    assert (ckpt["x7"].read() == 7).all()
    assert len(proxy.requests) == proxy.count("GET") <= 2
    assert sum(r.got for r in proxy.requests) < 30_000
    proxy.requests.clear()
    loaded = ec.tree_deserialise_leaves(ckpt, _many)
    assert len(proxy.requests) <= 3
    assert all((loaded[name] == _many[name]).all() for name in _many)


def test_round_trips(bucket):
    """What is waited for in turn: requests that need not be in order are sent together.
    A save of the process before has tried whether the server heeds conditions."""
    proxy, path = bucket
    ec.tree_serialise_leaves(f"{path}-other", _many)
    trips = ft.partial(servers.round_trips, proxy)
    new = (f"{path}-{number}" for number in itertools.count())
    # What is there; the data; and the index, which is the commit.
    assert trips(3, lambda: ec.tree_serialise_leaves(next(new), _many)) == 3
    save = ft.partial(ec.tree_serialise_leaves, path, _many)
    save()
    # And the deletion of what was there before.
    assert trips(4, save) == 4
    later = lambda: ec.async_tree_serialise_leaves(path, _many).result()
    assert trips(4, later) == 4
    assert trips(1, lambda: ec.open(path)) == 1
    ckpt = ec.open(path)
    assert trips(1, ckpt["x7"].read) == 1
    assert trips(2, lambda: ec.tree_deserialise_leaves(path, _many)) == 2
    # S3 is asked whether the index is still what it was.
    assert trips(4, lambda: ec.delete(path), before=save) == 4


def test_round_trips_of_the_first_save_of_a_process(bucket):
    """It asks two more times, whether the server heeds conditions."""
    proxy, path = bucket
    # Others than those of other tests: of their stores nothing is known yet.
    regions = iter(
        "us-west-2 us-west-1 us-east-2 sa-east-1 ap-south-1 eu-west-3".split()
    )

    def save():
        store = ec.Store(path, aws_region=next(regions))
        ec.tree_serialise_leaves(store, _tree())

    delete = lambda: ec.exists(path) and ec.delete(path)
    assert servers.round_trips(proxy, 5, save, before=delete) == 5


def test_the_proxy_waits_without_computing(bucket):
    """Or what is measured with a delay would be this machine."""
    proxy, _ = bucket
    # To compute takes as long whatever the delay is.
    for proxy.delay in (0.5, 1, 2, 4):
        proxy.requests.clear()
        start = time.perf_counter()
        with futures.ThreadPoolExecutor(32) as pool:
            ask = ft.partial(servers.ask, proxy.server_port, "GET", "/bucket/nothing")
            answers = [pool.submit(ask) for _ in range(32)]
            assert {answer.result() for answer in answers} == {404}
        took = time.perf_counter() - start
        trips = len(servers.in_a_row(proxy.requests))
        if took < 8 * proxy.delay and trips < 8:
            break
    assert took < 8 * proxy.delay and trips < 8


def test_runs_of_chunks_are_one_request(bucket):
    proxy, path = bucket
    tree = {"x": np.arange(10 * 2**20, dtype=np.float32).reshape(-1, 1024)}
    ec.tree_serialise_leaves(path, tree)
    ckpt = ec.open(path)
    proxy.requests.clear()
    assert (ckpt["x"].read() == tree["x"]).all()
    # The digests, and 40 MiB in parts of 16 MiB at most.
    assert len(proxy.requests) == 4


@pytest.mark.parametrize("layout", ["ocdbt", pytest.param("zarr", marks=_long)])
def test_two_processes(bucket, tmp_path, layout):
    """Of one run: each writes its shards."""
    _, path = bucket
    good(run_team_program(2, "team_in_a_store", tmp_path, path, layout))
    saved = ec.materialise(ec.open(f"{path}/c").tree)
    for name, leaf in expected().items():
        assert np.array_equal(_plain(saved[name]), _plain(leaf))
    assert ec.verify(f"{path}/c") == []


def _plain(x):
    return jr.key_data(x) if getattr(x, "dtype", None) == jr.key(0).dtype else x


# ---- What goes wrong.


_more = [pytest.param(status, marks=_long) for status in (429, 500)]


@_either
@pytest.mark.parametrize("fault", [503, "drop", "lose", *_more])
def test_faults_that_pass(remote, fault):
    """Every request fails now and then, also after it has been done."""
    proxy, path = remote
    names = {"s3": "s3", "gs": "gcs", "az": "azure"}
    # One of several at a time may be the third again and again.
    retries = {**_quick, "max_retries": 20}
    options = {f"{names[path[:2]]}_request_retries": retries}
    path = ec.Store(path, **options)
    for value in (1, 2):
        counts = itertools.count()
        proxy.fault = lambda *_: fault if next(counts) % 3 == 1 else None
        ec.tree_serialise_leaves(path, _tree(value))
        assert _value_at(path) == value
        assert ec.verify(path) == []


@pytest.mark.parametrize("fault", [503, "drop", *_more])
def test_faults_that_stay(remote, fault):
    proxy, path = remote
    ec.tree_serialise_leaves(path, _tree(1))
    names = {"s3": "s3", "gs": "gcs", "az": "azure"}
    options = {f"{names[path[:2]]}_request_retries": _quick}
    store = ec.Store(path, **options)
    ckpt = ec.open(store)
    proxy.fault = lambda *_: fault
    for call in (
        lambda: ec.open(store),
        lambda: ec.tree_deserialise_leaves(ckpt, _tree(0)),
        lambda: ckpt["x0"].read(verify=False),
        lambda: ec.verify(store),
        lambda: ec.tree_serialise_leaves(store, _tree(2)),
        lambda: ec.async_tree_serialise_leaves(store, _tree(2)).result(),
    ):
        start = time.perf_counter()
        with pytest.raises(ConnectionError, match=f"`{path}` does not answer"):
            call()
        # Without the option it takes TensorStore half a minute.
        assert time.perf_counter() - start < 20
    proxy.fault = lambda *_: None
    assert _value_at(path) == 1


def test_the_answer_to_a_commit_is_lost(remote):
    """It was written all the same, and the second attempt is refused."""
    proxy, path = remote
    for value in (1, 2):
        lost = []

        def fault(method, place):
            if "eqx_ckpt.json" in place and method in ("PUT", "POST") and not lost:
                lost.append(place)
                return "lose"

        proxy.fault = fault
        ec.tree_serialise_leaves(path, _tree(value))
        assert lost
        assert _value_at(path) == value


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=_long)])
def test_every_request_of_a_save_fails(bucket, step):
    """Each in turn, for good; and each answer is lost. The path is old or new."""
    proxy, path = bucket
    outcomes = set()
    for fault in (503, "lose"):
        for number in range(0, 80, step):
            url = f"{path}/{fault}/{number}"
            ec.tree_serialise_leaves(url, _tree(1, 1))
            store = ec.Store(url, s3_request_retries={**_quick, "max_retries": 1})
            counts = itertools.count()
            proxy.fault = lambda *_: fault if next(counts) >= number else None
            error = None
            try:
                ec.tree_serialise_leaves(store, _tree(2, 1))
            except OSError as e:
                error = e
            reached = next(counts) > number
            proxy.fault = lambda *_: None
            there = ec.open(url)["value"].read()
            assert error is not None or there == 2
            if error is not None and there == 2:
                assert "is saved" in str(error.__notes__) or "is whole" in str(
                    error.__notes__
                )
            outcomes.add((there, error is None))
            assert ec.verify(url) == [] or there == 2
            if not reached:
                break
        assert not reached
    assert outcomes == {(1, False), (2, False), (2, True)}


def test_a_server_that_ignores_conditions(bucket):
    proxy, path = bucket
    proxy.without = {"if-match", "if-none-match"}
    # Another store, of which nothing is known yet.
    with pytest.raises(RuntimeError, match="ignores the conditions of a write"):
        ec.tree_serialise_leaves(ec.Store(path, aws_region="eu-west-1"), _tree(1))
    assert not ec.tree_serialise_leaves(
        ec.Store(path, use_conditional_write=False), _tree(1)
    )
    assert _value_at(path) == 1


def test_another_server_that_ignores_conditions(gs):
    with gs.used() as proxy:
        proxy.without = {"ifGenerationMatch"}
        # Another store, of which nothing is known yet.
        options = {"gcs_request_retries": {**_quick, "max_retries": 3}}
        path = ec.Store("gs://bucket/conditions", **options)
        with pytest.raises(RuntimeError, match="`ifGenerationMatch`") as e:
            ec.tree_serialise_leaves(path, _tree(1))
        # There is no option without them.
        assert "If-Match" not in str(e.value) and "Store(" not in str(e.value)


@_either
def test_two_writers(remote):
    """Of those that save at once at most one gets its checkpoint published last, and
    others an error; what is there is whole."""
    _, path = remote
    ec.tree_serialise_leaves(path, _tree(0))
    saved, errors = [], []

    def save(first):
        for value in range(first, first + 5):
            try:
                ec.tree_serialise_leaves(path, _tree(value))
                saved.append(value)
            except RuntimeError as e:
                assert "replaced by another writer" in str(e)
                errors.append(value)

    threads = [threading.Thread(target=save, args=[n]) for n in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(saved) + len(errors) == 10
    assert _value_at(path) in saved
    assert ec.verify(path) == []


def test_refusals(remote, monkeypatch):
    proxy, path = remote
    bucket = servers.BUCKETS[path.partition(":")[0]]
    nobody = bucket.replace("/bucket", "/nobody-has-it/x")
    answers, ask = [], urllib.request.urlopen

    def asked(*args, **how):
        try:
            answers.append(ask(*args, **how))
        except urllib.error.HTTPError as e:
            answers.append(e)
            raise
        return answers[-1]

    monkeypatch.setattr(urllib.request, "urlopen", asked)
    with pytest.raises(FileNotFoundError, match="no bucket of the name.*Create it"):
        ec.open(nobody)
    for there in (path, bucket):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint at `{there}`.$"):
            ec.open(there)
    with pytest.raises(FileNotFoundError, match="no bucket of .*nobody-has-it/x"):
        ec.tree_serialise_leaves(nobody, _tree())
    # None is left open until it is collected.
    assert all(answer.closed for answer in answers)
    assert len({answer.status for answer in answers}) == 2 * path.startswith("gs:")
    ec.tree_serialise_leaves(path, _tree())
    proxy.fault = lambda *_: 403
    with pytest.raises(PermissionError, match=f"refuses access to `{path}`.*docs"):
        ec.open(path)


def test_another_region(bucket):
    proxy, path = bucket
    proxy.fault = lambda *_: 301
    with pytest.raises(OSError, match=f"`{path}` is in another region.*`AWS_REGION`"):
        ec.open(path)
    with pytest.raises(OSError, match="another region"):
        ec.tree_serialise_leaves(path, _tree())


def test_no_credentials(bucket):
    _, path = bucket
    store = ec.Store(path, aws_credentials={"type": "profile", "profile": "nobody"})
    with pytest.raises(PermissionError, match="credentials"):
        ec.open(store)
    with pytest.raises(PermissionError, match="credentials"):
        ec.tree_serialise_leaves(store, _tree())


def test_options(bucket, monkeypatch):
    proxy, path = bucket
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    runs = ec.Store("s3://bucket", endpoint=proxy.url)
    store = runs / path.removeprefix("s3://bucket/")
    ec.tree_serialise_leaves(store, _tree())
    ckpt = ec.open(store)
    assert ckpt.path == path
    signed = [r.headers["authorization"] for r in proxy.requests]
    assert all("/us-east-1/s3/" in header for header in signed)
    # What was given by keyword is kept.
    assert (pickle.loads(pickle.dumps(ckpt))["x0"].read() == 1).all()
    assert pickle.loads(pickle.dumps(store)) == store and hash(store)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    proxy.requests.clear()
    ec.open(store)
    assert all(
        "/eu-central-1/s3/" in r.headers["authorization"] for r in proxy.requests
    )
    assert repr(store) == f"Store({path!r}, endpoint={proxy.url!r})"
    assert f"Saving to {store}" == f"Saving to {path}"
    with pytest.raises(ValueError, match="not a URL of a store.*nothing_like_it"):
        ec.open(ec.Store(path, nothing_like_it=1))
    with pytest.raises(ValueError, match="`bucket` is in the URL"):
        ec.Store(path, bucket="other")
    for local in ("/tmp/x", "file:///tmp/x", "x"):
        with pytest.raises(ValueError, match="not the URL of an object store"):
            ec.Store(local)


def test_an_index_that_is_too_long(bucket, monkeypatch):
    proxy, path = bucket
    ec.tree_serialise_leaves(path, _tree())
    inside.limit(monkeypatch, index_bytes=100)
    with pytest.raises(ValueError, match="longer than"):
        ec.open(path)


# ---- HTTP.


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory of checkpoints, and a server of it."""
    directory = tmp_path_factory.mktemp("published")
    for layout in ("ocdbt", "zarr"):
        ec.tree_serialise_leaves(directory / layout, _many, layout=layout)
    with servers.static(directory) as port, servers.Proxy(port) as proxy:
        yield directory, proxy


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_http(published, layout):
    _, proxy = published
    with proxy.used():
        url = f"{proxy.url}/{layout}"
        ckpt = ec.open(url)
        assert len(proxy.requests) <= 2
        proxy.requests.clear()
        assert (ckpt["x7"].read() == 7).all()
        assert len(proxy.requests) <= 3
        assert sum(r.got for r in proxy.requests) < 30_000
        loaded = ec.tree_deserialise_leaves(url, _many)
        assert all((loaded[name] == _many[name]).all() for name in _many)
        assert {r.method for r in proxy.requests} == {"GET"}
        if layout == "ocdbt":
            assert ec.verify(url) == []
        proxy.requests.clear()
        for save in (ec.tree_serialise_leaves, ec.async_tree_serialise_leaves):
            with pytest.raises(ValueError, match="nothing is saved over HTTP"):
                save(url, _many)
        assert proxy.requests == []


def test_http_that_is_damaged(published):
    directory, proxy = published
    ec.tree_serialise_leaves(directory / "bad", _tree())
    (data,) = (directory / "bad").glob("d/*/0")
    data.write_bytes(data.read_bytes()[:100] + b"?" + data.read_bytes()[101:])
    with pytest.raises(RuntimeError, match="not those that were saved"):
        ec.tree_deserialise_leaves(f"{proxy.url}/bad", _tree())
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(RuntimeError, match="a chunk of it is missing"):
        ec.tree_deserialise_leaves(f"{proxy.url}/bad", _tree())
    assert ec.verify(f"{proxy.url}/bad")


def test_http_headers_and_queries(published):
    _, proxy = published
    with proxy.used():
        ec.open(ec.Store(f"{proxy.url}/ocdbt", headers=["Authorization: Bearer x"]))
        assert all(r.headers["authorization"] == "Bearer x" for r in proxy.requests)
        with pytest.raises(ValueError, match="has a query"):
            ec.open(f"{proxy.url}/ocdbt?token=x")


def test_documentation(s3, published):
    """The examples run, but for the names of hosts."""
    directory, proxy = published
    weights = [{"weight": np.full((4, 4), i, np.float32)} for i in range(4)]
    tree = {"model": {"layers": weights}}
    ec.tree_serialise_leaves(directory / "runs" / "7", tree)
    names = {"ec": ec, "tree": tree}
    hosts = {"https://minio.example.org": s3.url, "https://host": proxy.url}
    blocks = re.findall(
        "```python\n(.*?)```", (_root / "docs/stores.md").read_text(), re.DOTALL
    )
    for block in blocks:
        if "://" not in block:
            continue
        for host, url in hosts.items():
            block = block.replace(host, url)
        # Profiles are in a file of the user's.
        block = re.sub("    aws_credentials=.*\n", "", block)
        exec(block, names)
    assert (names["layer"] == weights[3]["weight"]).all()
    path = "s3://bucket/runs/7"
    assert (
        ec.open(path).leaves.keys() == ec.open(directory / "runs" / "7").leaves.keys()
    )


@pytest.mark.parametrize(
    "path, url",
    [
        ("S3://bucket/run", "s3://bucket/run"),
        (pathlib.Path("s3://bucket/run"), "s3://bucket/run"),
        ("https:/host/run", "https://host/run"),
        ("FILE:///tmp/run", "file:///tmp/run"),
        (pathlib.Path("file:///tmp/run"), "file:///tmp/run"),
    ],
    ids=repr,
)
def test_paths_that_are_nearly_urls(tmp_path, monkeypatch, path, url):
    monkeypatch.chdir(tmp_path)
    match = f"is not a URL: give one as a string, such as `{url}`"
    with pytest.raises(ValueError, match=match):
        ec.tree_serialise_leaves(path, {"w": 1})
    with pytest.raises(ValueError, match=match):
        ec.open(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["s3", "file", "memory", "hf", "S3", "*", "gs:1"])
def test_directories_that_are_called_as_the_scheme_of_a_url(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    ec.tree_serialise_leaves(name, {"w": 1})
    assert ec.open(name)["w"].read() == 1
    assert os.listdir(tmp_path) == [name]
