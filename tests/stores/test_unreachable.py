"""Servers that are not there, or say nothing: an error soon, which says so."""

import contextlib
import json
import os
import socket
import time

import numpy as np
import pytest
from support import helpers, inside, servers

import eqx_ckpt as ec


_long = pytest.mark.long


@contextlib.contextmanager
def _silent():
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def _closed():
    """A port that nobody else gets, and at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def _unnamed():
    """Whatever the servers are that know names, and however long they take."""
    resolve = socket.getaddrinfo

    def resolved(host, *rest, **how):
        if host == "nobody.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *rest, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolved)
        yield None


_places = {
    "silent": (_silent, "accepts connections, and says nothing"),
    "closed": (_closed, "cannot be reached .*refused"),
    "unnamed": (_unnamed, "the name `nobody.invalid` cannot be resolved"),
}


_QUICK = {
    "server_look_seconds": 0.05,
    "server_answer_seconds": 0.3,
}


def _calls(server):
    """What opens something there, or saves it."""
    s3 = ec.Store(
        "s3://bucket/x",
        endpoint=server,
        aws_credentials={"type": "anonymous"},
    )
    yield lambda: ec.open(f"{server}/x")
    yield lambda: ec.open(f"{server}/x.safetensors")
    yield lambda: ec.exists(f"{server}/x.zip")
    yield lambda: ec.open(s3)
    yield lambda: ec.tree_serialise_leaves(s3, {"w": 1})
    yield lambda: ec.CheckpointManager(s3).restore({"w": 1})


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=_long)])
@pytest.mark.parametrize("kind", _places)
def test_a_server_that_was_never_there(kind, is_quick, monkeypatch):
    if is_quick:
        inside.limit(monkeypatch, **_QUICK)
    place, said = _places[kind]
    # By itself TensorStore takes half a minute where nobody is, and many of silence.
    most = 60 if kind == "silent" else 20
    with place() as port:
        server = f"http://127.0.0.1:{port}" if port else "http://nobody.invalid"
        for call in _calls(server):
            start = time.monotonic()
            with pytest.raises(ConnectionError, match=said) as e:
                call()
            assert str(e.value).startswith("The store of `")
            assert time.monotonic() - start < most
            if not is_quick:
                break


def test_google(monkeypatch):
    """Where it is asked is known to TensorStore once for a process."""
    with _silent() as port:
        helpers.run_program(
            "open_at_google",
            json.dumps(_QUICK),
            TENSORSTORE_GCS_HTTP_URL=f"http://127.0.0.1:{port}",
        )


def test_a_server_that_goes_away(tmp_path, monkeypatch):
    """One that has answered is waited for longer: it may come back."""
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.ones(3)})
    with servers.static(tmp_path) as port, servers.Proxy(port) as proxy:
        ckpt = ec.open(f"{proxy.url}/a")
        inside.limit(monkeypatch, **_QUICK, server_away_seconds=1)
        proxy.fault = lambda *_: "hang"
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="says nothing"):
            ckpt["w"].read()
        assert 1 < time.monotonic() - start < 60
        # What takes long is no matter, as long as it answers.
        inside.limit(monkeypatch, server_away_seconds=60)
        proxy.fault = lambda method, _: "hang" if method == "HEAD" else None
        assert ckpt["w"].read().tolist() == [1, 1, 1]
        proxy.fault, proxy.delay = lambda *_: None, 1.0
        inside.limit(monkeypatch, server_answer_seconds=60)
        assert ec.open(f"{proxy.url}/a")["w"].read().tolist() == [1, 1, 1]


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_server_that_does_not_answer_what_opens(
    tmp_path, monkeypatch, caplog, is_looked_at
):
    """It answers others, or nobody knows: there may be a proxy before it."""
    if not is_looked_at:
        inside.replace(monkeypatch, "where a server is", lambda *_: None)
    # After it is told: what is found before is told instead, and how soon the server
    # answers is up to the machine.
    inside.limit(monkeypatch, server_look_seconds=0.3)
    inside.limit(monkeypatch, server_log_seconds=0.2)
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.ones(3)})
    with servers.static(tmp_path) as port, servers.Proxy(port) as proxy:
        proxy.fault = lambda method, _: "hang" if method == "GET" else None
        store = ec.Store(f"{proxy.url}/a", timeout=1.5)
        for call in (lambda: ec.open(store), lambda: ec.exists(store / "x.zip")):
            start = time.monotonic()
            with pytest.raises(ConnectionError, match="1.5 seconds ago.*`timeout` in"):
                call()
            assert 1.4 < time.monotonic() - start < 60
        said = [r.getMessage() for r in caplog.records if "/a` has not" in r.message]
        assert said == [f"The store of `{store.url}` has not answered for 0.2 s"]
        proxy.fault = lambda *_: None
        assert ec.open(store.url)["w"].read().tolist() == [1, 1, 1]
    for wrong in (0, -1, "30", float("inf"), True, None):
        with pytest.raises(ValueError, match="`timeout` is a number of seconds"):
            ec.Store("s3://bucket/x", timeout=wrong)


def test_through_a_proxy_nothing_is_asked(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    assert inside.server_of("http://host/x") == (False, "host", 80)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "near")
    assert inside.server_of("http://host/x") is None
    assert inside.server_of("http://near:1/x") == (False, "near", 1)
    assert inside.server_of("https://host/x") == (True, "host", 443)
    assert inside.server_of("s3://bucket/x") is None
