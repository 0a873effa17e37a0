"""The server: for whom it is, and what it reads."""

import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from support import inside
from support.clock import timed

import eqx_ckpt as ec


def _ask(get, server, what):
    status, _, body = get(server.url + what)
    assert status == 200
    return json.loads(body)


@pytest.fixture
def ckpt(save):
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(1024, 1024)).astype(np.float32), "b": jnp.ones(3)}
    return save("ckpt", tree, metadata={"note": "a"})


def test_who_is_served(serve, get, ckpt):
    server = serve(ckpt)
    host, port = server.server_address[:2]
    assert host == "127.0.0.1"
    status, headers, body = get(server.url)
    assert status == 200 and b"<script defer src=" in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    top = f"http://127.0.0.1:{port}/"
    wrong = [
        top,
        top + "page",
        top + "x" * len(server.token) + "/page",
        top + "%C3%A9/",
    ]
    wrong.append(server.url[:-2] + "/page")
    for url in wrong:
        assert get(url)[0] == 403, url
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert get(server.url, Host=host)[0] == 403
    for host in ("localhost:9999", "127.0.0.1", f"LOCALHOST:{port}"):
        assert get(server.url, Host=host)[0] == 200
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
        assert get(server.url + "page", method)[0] == 501
    for name in ("../view.js", "_server.py", "static/view.js", "answer", "page/x"):
        assert get(server.url + name)[0] == 404


def test_requests_that_make_no_sense(serve, get, ckpt):
    server = serve(ckpt)
    for query in ("leaf", "leaf?n=99", "leaf?n=x", "picture?n=0&index=a", "change?n=0"):
        assert _ask(get, server, query)["error"], query
    # Each is one answer, after which the next one is served. Of a line that is too long
    # the server reads so much: what comes after that would close the connection.
    with socket.create_connection(server.server_address[:2]) as connection:
        connection.sendall(b"GET /".ljust(2**16 + 1, b"a"))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 414
        answer.close()
    assert _ask(get, server, "page")["kind"] == "checkpoint"


def test_only_what_is_chosen_is_read(serve, get, ckpt):
    server = serve(ckpt)
    with ec.counting() as bytes_read:
        page = _ask(get, server, "page")
        assert bytes_read() < 10_000
        assert page["rows"] == [
            ["a", "f32[1024,1024](numpy)", 2**22],
            ["b", "f32[3]", 12],
        ]
        found = _ask(get, server, "leaf?n=0")
        assert 2**22 <= bytes_read() < 2**22 + 70_000
        for what in ("picture?n=0", "spectrum?n=0", "leaf?n=0"):
            _ask(get, server, what)
        assert bytes_read() < 2**22 + 70_000  # It is read once.
    assert (
        sum(found["histogram"]["counts"][0]) + found["histogram"]["outside"][0] == 2**20
    )


def test_an_answer_is_quick(serve, get, ckpt):
    _ask(get, serve(ckpt), "leaf?n=1")
    assert timed(0.4, lambda: _ask(get, serve(ckpt), "leaf?n=0"))[1] <= 0.4


def test_ten_thousand_leaves(serve, get, save):
    tree = {f"layer{i}": {"w": np.zeros(2), "b": np.zeros(1)} for i in range(5000)}
    path = save("many", tree)
    page, seconds = timed(2, lambda: _ask(get, serve(path), "page"))
    assert len(page["rows"]) == 10_000 and seconds <= 2


def test_a_request_beside_a_slow_one(serve, get, ckpt, monkeypatch):
    server = serve(ckpt)
    began, end = threading.Event(), threading.Event()

    def slow(lazy, like=None):
        if lazy.name == "a":
            began.set()
            assert end.wait(600)

    inside.watch(monkeypatch, "read a leaf to draw", slow)
    thread = threading.Thread(target=get, args=(server.url + "leaf?n=0",))
    thread.start()
    assert began.wait(600)
    assert _ask(get, server, "leaf?n=1")["figures"][0]["max"] == "1"
    assert _ask(get, server, "page")["rows"]
    end.set()
    thread.join()


def test_damage_is_said(serve, get, save, tmp_path):
    path = save("damaged", {"w": jnp.arange(4000.0)})
    (data,) = (x for x in path.glob("d/*/0"))
    whole = bytearray(data.read_bytes())
    whole[100] ^= 1
    data.write_bytes(whole)
    assert "damaged" in _ask(get, serve(path), "leaf?n=0")["error"]


def test_a_slice(serve, get, save):
    server = serve(save("cube", {"x": jnp.arange(24.0).reshape(2, 3, 4)}))
    found = _ask(get, server, "picture?n=0")
    assert (found["index"], found["shape"], found["hi"]) == ("0, :, :", [3, 4], 11)
    found = _ask(get, server, "picture?n=0&index=1,0")
    assert found["curve"] == [[12, 13, 14, 15]]
    assert "no picture" in _ask(get, server, "picture?n=0&index=0,0,0")["error"]
    assert "out of" in _ask(get, server, "picture?n=0&index=7")["error"]


def test_a_slice_of_a_large_leaf(serve, get, save):
    path = save("large", {"x": np.zeros((20, 1024, 1024), np.float32)})
    server = serve(path)
    with ec.counting() as bytes_read:
        found = _ask(get, server, "picture?n=0")
        assert found["shape"] == [512, 512] and bytes_read() < 8 * 2**20
        assert found["index"] == "0, 0:512, 0:512"
    assert "at most 64.0 MiB" in _ask(get, server, "picture?n=0&index=:")["error"]


@pytest.mark.parametrize("name", [signal.SIGINT])
def test_the_command(ckpt, get, name):
    # A job that a shell runs in the background ignores SIGINT, and so do its children.
    code = f"""import runpy, signal
signal.signal({name:d}, signal.default_int_handler)
runpy.run_module('eqx_ckpt', run_name='__main__')"""
    command = [sys.executable, "-c", code, "view", str(ckpt), "--no-browser"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    said = [process.stdout.readline() for _ in range(2)]
    url = said[1].strip()
    assert str(ckpt) in said[0] and url.startswith("http://127.0.0.1:")
    assert get(url + "page")[0] == 200
    os.kill(process.pid, name)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err.strip(), out.strip()) == (0, "", "")


def test_what_is_shipped_names_no_other_place():
    folder = pathlib.Path(ec.__file__).parent / "_view" / "static"
    files = list(folder.iterdir())
    assert files
    for file in files:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "") and "@import" not in text, file.name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "document.write",
        ):
            assert word not in text


def test_two_checkpoints(serve, get, save):
    x = jnp.arange(8.0)
    a = {"same": x, "moved": x, "gone": x, "shape": x, "step": 1}
    b = {"same": x, "moved": x + 1, "new": x, "shape": x[:4], "step": 2}
    server = serve(save("a", a), save("b", b))
    with ec.counting() as bytes_read:
        page = _ask(get, server, "page")
        assert bytes_read() < 20_000
    states = {name: state for name, _, _, state in page["rows"]}
    assert states == {
        "gone": "a",
        "moved": "changed",
        "new": "b",
        "same": "same",
        "shape": "changed",
        "step": "changed",
    }
    numbers = {row[0]: n for n, row in enumerate(page["rows"])}
    found = _ask(get, server, f"change?n={numbers['moved']}")
    norm = float(np.linalg.norm(np.arange(8)))
    assert found["largest"] == 1 and np.isclose(found["relative"], 8**0.5 / norm)
    assert _ask(get, server, f"change?n={numbers['shape']}")["relative"] is None
    assert _ask(get, server, f"change?n={numbers['gone']}") == {}
    found = _ask(get, server, f"leaf?n={numbers['moved']}")
    assert [x["max"] for x in found["figures"]] == ["7", "8"]
    assert [sum(row) for row in found["histogram"]["counts"]] == [8, 8]
    assert _ask(get, server, f"picture?n={numbers['moved']}")["curve"] == [[1] * 8]
    assert "shapes" in _ask(get, server, f"picture?n={numbers['shape']}")["error"]
    assert len(_ask(get, server, f"leaf?n={numbers['new']}")["figures"]) == 2


def test_two_without_digests(serve, get, tmp_path):
    """They are compared when they are chosen."""
    for name, value in (("a", 0.0), ("b", 3.0)):
        path = tmp_path / f"{name}.safetensors"
        ec.export_safetensors(path, {"w": jnp.full(4, value)})
    server = serve(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert _ask(get, server, "page")["rows"][0][3] == "unknown"
    assert _ask(get, server, "change?n=0") == {
        "relative": "inf",
        "largest": 3.0,
        "is_sample": False,
    }


@pytest.fixture
def run(tmp_path):
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in (10, 20, 30):
            metrics = {"loss": 1 / step, "bad": jnp.nan}
            manager.save(step, {"w": jnp.full(4, float(step)), "n": step}, metrics)
        manager.wait()
        manager.pin(20)
    return tmp_path / "run"


def test_a_run(serve, get, run):
    server = serve(run)
    page = _ask(get, server, "page")
    assert (page["kind"], page["newest"], len(page["rows"])) == ("run", 30, 2)
    assert page["norm_steps"] == [10, 20, 30]
    assert page["steps"] == [[30, True], [20, True], [10, True]]  # The newest first.
    columns, rows = page["table"]
    titles = [title for title, *_ in columns]
    assert titles == ["step", "time", "size", "loss", "bad", ""]
    assert [row[titles.index("")][0] for row in rows] == ["", "pinned", ""]
    assert [rows[2][titles.index(x)][0] for x in ("loss", "bad")] == ["0.1", "nan"]
    assert page["curves"]["loss"] == [[10, 0.1], [20, 0.05], [30, 1 / 30]]
    assert list(page["curves"]) == ["loss"]  # A NaN is no number to draw.
    norms = [_ask(get, server, f"norm?name=w&step={x}")["norm"] for x in (10, 30)]
    assert norms == [20.0, 60.0]
    assert _ask(get, server, "norm?name=x&step=10") == {"norm": None}
    assert _ask(get, server, "norm?name=w&step=11")["error"]
    # The page of one of its steps, and of two.
    assert _ask(get, server, "page?at=20")["kind"] == "checkpoint"
    assert _ask(get, server, "leaf?at=20&n=1")["figures"][0]["max"] == "20"
    rows = _ask(get, server, "page?at=10,30")["rows"]
    assert [row[3] for row in rows] == ["changed", "changed"]
    for at in ("..", "10,", "-1", "10,20,30,40", "x"):
        found = _ask(get, server, f"page?at={at}")
        assert "error" in found or at.startswith("10,20"), at
