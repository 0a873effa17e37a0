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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import inside, scripts
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


def test_the_command(ckpt, get):
    program = scripts.PROGRAMS / "view_that_is_interrupted.py"
    command = [sys.executable, str(program), "view", str(ckpt), "--no-browser"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    said = [process.stdout.readline() for _ in range(2)]
    url = said[1].strip()
    assert str(ckpt) in said[0] and url.startswith("http://127.0.0.1:")
    assert get(url + "page")[0] == 200
    os.kill(process.pid, signal.SIGINT)
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
    curves = {name: (note, points) for name, note, points in page["curves"]}
    assert curves["loss"] == (
        "last 0.033333",
        [[0, [[10, 0.1], [20, 0.05], [30, 0.033333]]]],
    )
    assert curves["bad"] == ("last nan · 3 not finite", [[0, []]])
    # As long as nothing is new, there is no answer.
    assert _ask(get, server, f"page?known={page['mark']}") == {}
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


def _sweep(root):
    for rate in (1, 2, 3):
        with ec.CheckpointManager(root / f"rate={rate}", keep=1) as manager:
            for step in (10, 20, 30):
                metrics = {"loss": rate / step, "rate": rate, "bad": jnp.nan}
                manager.save(step, {"w": jnp.full(4, float(step * rate))}, metrics)


def test_runs(serve, get, tmp_path):
    """Those of a directory, with steps that are deleted; each has its own pages."""
    _sweep(tmp_path / "sweep")
    server = serve(tmp_path / "sweep")
    page = _ask(get, server, "page")
    names = ["rate=1", "rate=2", "rate=3"]
    assert (page["kind"], page["series"]) == ("runs", names)
    assert page["metrics"] == ["loss", "rate", "bad"]
    row = page["runs"][1]
    assert (row["name"], row["step"], row["saved"], row["nbytes"]) == (
        *("rate=2", "30", "1"),
        16,
    )
    assert row["values"] == [[2 / 30, 2 / 30, 2 / 10], [2, 2, 2], None]
    points = page["curves"][0][2]
    assert points[2] == [2, [[10, 0.3], [20, 0.15], [30, 0.1]]]
    assert page["curves"][2][1] == "9 not finite"
    assert _ask(get, server, "page?run=rate%3D3")["newest"] == 30
    assert _ask(get, server, "leaf?run=rate%3D3&n=0")["figures"][0]["max"] == "90"
    for other in ("x", "..", "rate%3D1/30"):
        assert get(f"{server.url}page?run={other}")[0] == 404
    # A run that is new, and one that goes on, are seen.
    assert _ask(get, server, f"page?known={page['mark']}") == {}
    with ec.CheckpointManager(tmp_path / "sweep" / "rate=4") as manager:
        manager.save(1, {"w": jnp.ones(2)}, {"loss": 1})
    found = _ask(get, server, f"page?known={page['mark']}")
    assert found["series"] == [*names, "rate=4"] and found["mark"] != page["mark"]
    # One that cannot be read hides no other.
    (tmp_path / "sweep" / "rate=2" / "eqx_ckpt.run").write_text("no directory")
    found = _ask(get, server, "page")
    assert found["quiet"] == "3 runs · not read: rate=2"
    assert "rate=2" not in found["series"]
    (tmp_path / "sweep" / "rate=2" / "eqx_ckpt.run").unlink()
    # Runs are given by their paths too.
    some = [tmp_path / "sweep" / name for name in names[:2]]
    assert _ask(get, serve(*some), "page")["series"] == [*map(str, some)]


def test_a_run_that_went_back(serve, get, tmp_path):
    """The line is what the newest attempt goes on from; what was left is beside it."""
    tree = {"w": jnp.ones(2)}
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, tree, {"loss": step})
    with ec.CheckpointManager(tmp_path / "run") as manager:
        with pytest.warns(UserWarning, match="earlier attempt"):
            manager.restore(tree, step=2)
            manager.save(3, tree, {"loss": 30}, force=True)
    page = _ask(get, serve(tmp_path / "run"), "page")
    assert page["series"] == ["newest attempt", "left by attempt 1"]
    assert page["curves"][0][2] == [
        [0, [[1, 1], [2, 2], [3, 30]]],
        [1, [[3, 3], [4, 4]]],
    ]
    assert page["newest"] == 3


def test_what_is_static_and_the_names_of_states(serve, get, save):
    model, state = eqx.nn.make_with_state(_Normed)(jax.random.key(0))
    page = _ask(get, serve(save("c", {"model": model, "state": state})), "page")
    assert ["model", "heads = 8"] in page["static"]
    (folded,) = [text for name, text in page["static"] if "{0..2}" in name]
    assert "in_features = 3, out_features = 3" in folded
    assert page["labels"]["state.1"] == "model.norm.ema_state_index"
    assert "static" not in dict(page["facts"])


class _Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    layers: list[eqx.nn.Linear]
    heads: int = eqx.field(static=True)

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
        self.layers = [eqx.nn.Linear(3, 3, key=key) for _ in range(3)]
        self.heads = 8
