"""Checkpoints of one file, read in place over HTTP."""

import email.utils
import http.server
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import traceback

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from support import inside, scripts, servers

import eqx_ckpt as ec


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files, with what all real servers have: ranges of bytes, and another URL for a
    directory."""

    sent = 0
    # What tells versions of a file apart.
    tell = staticmethod(lambda data: ("ETag", f'"{hash(data)}"'))

    def do_GET(self):
        path = self.translate_path(self.path)
        if os.path.isdir(path):
            self.send_response(301)
            self.send_header("Location", self.path + "/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        try:
            with open(path, "rb") as f:
                data = f.read()
        except OSError:
            self.send_error(404)
            return
        given = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        start, stop, status = 0, len(data), 200
        if given:
            status = 206
            if given[1]:
                start = int(given[1])
                stop = min(stop, int(given[2]) + 1 if given[2] else stop)
            else:
                start = max(0, stop - int(given[2]))
            if start >= len(data):
                self.send_error(416)
                return
        self.send_response(status)
        if given:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header(*self.tell(data))
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        # Before whoever asks goes on.
        type(self).sent += stop - start
        self.wfile.write(data[start:stop])

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    handler = lambda *args: _Handler(*args, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_over_http(served):
    path, url = served
    tree = {"w": np.arange(2.0**20).reshape(1024, 1024), "b": np.ones(3)}
    ec.export_safetensors(path / "m.safetensors", tree)
    ec.tree_serialise_leaves(path / "m.zip", tree)
    eqx.tree_serialise_leaves(path / "m.eqx", tree)
    for name in ("m.safetensors", "m.zip", "m.eqx"):
        _Handler.sent = 0
        ckpt = ec.open(f"{url}/{name}", like=tree)
        assert np.array_equal(ckpt["w"][7].read(verify=False), tree["w"][7])
        assert _Handler.sent < 100_000
        got = ec.materialise(ckpt.tree)
        assert np.array_equal(got["w"], tree["w"]) and got["b"].tolist() == [1, 1, 1]
    assert ec.verify(f"{url}/m.zip") == []
    ec.export_safetensors(path / "m.safetensors", {"w": jnp.ones(3)})
    with pytest.raises(FileNotFoundError):
        ec.open(f"{url}/none.safetensors")
    ckpt = ec.open(f"{url}/m.safetensors")
    ec.export_safetensors(path / "m.safetensors", {"w": jnp.zeros(3)})
    with pytest.raises(RuntimeError, match="replaced"):
        ckpt["w"].read()


def _time(data):
    when = email.utils.formatdate(1.7e9 + hash(data) % 10**8, usegmt=True)
    return "Last-Modified", when


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("tell", [lambda data: ("ETag", f'W/"{hash(data)}"'), _time])
def test_what_is_replaced_without_a_strong_tag(
    served, leading, monkeypatch, tell, leads
):
    """As Express and others serve files. TensorStore knows no weak tags, nor times."""
    path, url = served
    handler, start = leading
    handler.lead = staticmethod(lambda place: url + place)
    base = start if leads else url
    monkeypatch.setattr(_Handler, "tell", staticmethod(tell))
    tree = {"w": jnp.ones((64, 32)), "b": jnp.ones(3)}
    saves = {
        "m.safetensors": ec.export_safetensors,
        "m.zip": ec.tree_serialise_leaves,
        "m.eqx": eqx.tree_serialise_leaves,
    }
    for name, save in saves.items():
        save(path / name, tree)
        ckpt = ec.open(f"{base}/{name}", like=tree)
        assert (ckpt["w"][1].read() == 1).all()
        save(path / name, {"w": jnp.zeros((64, 32)), "b": jnp.zeros(3)})
        for verify in (True, False):
            with pytest.raises(RuntimeError, match="replaced"):
                ckpt["w"].read(verify=verify)
        ckpt = ec.open(f"{base}/{name}", like=tree)
        os.remove(path / name)
        with pytest.raises((RuntimeError, FileNotFoundError), match="replaced|no `m"):
            ckpt["w"].read()


@pytest.mark.parametrize("status, count", [(503, 1), (429, 1), (503, 9), (403, 9)])
def test_a_server_that_does_not_tell_versions_at_once(
    served, monkeypatch, status, count
):
    path, url = served
    monkeypatch.setattr(_Handler, "tell", staticmethod(_time))
    inside.limit(monkeypatch, pauses_of_http=(0, 0, 0))
    ec.export_safetensors(path / "m.safetensors", {"w": jnp.ones(3)})
    ckpt = ec.open(f"{url}/m.safetensors")
    get, left = _Handler.do_GET, [status] * count

    def refuse(self):
        if left and self.headers.get("User-Agent", "").startswith("Python"):
            return self.send_error(left.pop())
        return get(self)

    monkeypatch.setattr(_Handler, "do_GET", refuse)
    if count == 1:
        assert (ckpt["w"].read() == 1).all()
        return
    with pytest.raises(OSError, match=rf"m.safetensors.*\(status {status}\)"):
        ckpt["w"].read()


def test_nothing_is_deleted_or_marked(served):
    path, url = served
    with ec.CheckpointManager(path / "run") as manager:
        manager.save(1, {"w": np.ones(3)})
    there = ec.CheckpointManager(f"{url}/run")
    for call in (
        lambda: ec.delete(f"{url}/run/1/default"),
        lambda: there.pin(1),
        lambda: there.add_metrics(1, {"loss": 1.0}),
    ):
        with pytest.raises(ValueError, match="can only be read: .* over HTTP"):
            call()
    assert manager.restore({"w": np.zeros(3)})[0]["w"].all()


@pytest.mark.parametrize("patience", [0, pytest.param(1, marks=pytest.mark.long)])
def test_directories_of_other_formats(served, monkeypatch, patience):
    """Also where the server is asked for its redirect before TensorStore says it."""
    inside.limit(monkeypatch, redirect_seconds=patience)
    path, url = served
    foreign = pathlib.Path(__file__).parents[1] / "foreign"
    for name in ("marin-levanter-0.2.20/step-7", "eformer-0.0.101/tree"):
        shutil.copytree(foreign / name, path / name)
        assert ec.open(f"{url}/{name}")["model.big"][1, 0].read() == 64
    name = "levanter-1.2.dev1644/step-7"
    shutil.copytree(foreign / name, path / name)
    with pytest.raises(ValueError, match="have to be listed"):
        ec.open(f"{url}/{name}")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ec.open(f"{url}/eformer-0.0.101")


def test_a_server_without_ranges(tmp_path):
    """As Python's own is."""
    tree = {"w": np.arange(2.0**16)}
    for name in ("ocdbt", "m.zip", "zarr"):
        layout = "zarr" if name == "zarr" else "ocdbt"
        ec.tree_serialise_leaves(tmp_path / name, tree, layout=layout)
    ec.export_safetensors(tmp_path / "m.safetensors", tree)
    command = [sys.executable, "-u", "-m", "http.server", "0", "-b", "127.0.0.1"]
    server = subprocess.Popen(
        [*command, "-d", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        url = re.search(r"http://[0-9.:]+", server.stdout.readline())
        assert url is not None
        for name in ("ocdbt", "m.zip", "zarr", "m.safetensors"):
            with pytest.raises(OSError, match="ignores .* a part of a file.*download"):
                ec.open(f"{url[0]}/{name}")
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            ec.open(f"{url[0]}/nothing")
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


# ---- Servers that lead elsewhere.


class _Leading(http.server.BaseHTTPRequestHandler):
    """Leads to what `lead(path)` says; None: to nowhere."""

    lead = staticmethod(lambda path: None)
    status = 302
    asked: list[tuple[str, str | None]] = []

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("X-Key")))
        self.send_response(self.status)
        if (to := self.lead(self.path)) is not None:
            self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def leading():
    """A new server on another port, and its handler."""
    handler = type("Leads", (_Leading,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [302, 307, 308])
def test_redirects_are_followed_for_each_read(served, leading, monkeypatch, status):
    """To a signed URL on another port, which is given neither headers nor kept."""
    path, url = served
    handler, start = leading
    handler.status = status
    signed, given = [], []

    def lead(place):
        signed.append(f"{url}{place}?signature={len(signed)}")
        return signed[-1]

    def seen(self):
        given.append((self.path.rpartition("=")[2], self.headers.get("X-Key")))
        return get(self)

    handler.lead = staticmethod(lead)
    get = _Handler.do_GET
    monkeypatch.setattr(_Handler, "do_GET", seen)
    tree = {"w": np.arange(2.0**20).reshape(1024, 1024), "b": np.ones(3)}
    ec.export_safetensors(path / "m.safetensors", tree)
    ec.tree_serialise_leaves(path / "ours", tree)
    for name in ("m.safetensors", "ours"):
        ckpt = ec.open(ec.Store(f"{start}/{name}", headers=["X-Key: s3cr3t"]))
        _Handler.sent = 0
        assert np.array_equal(ckpt["w"][7].read(verify=False), tree["w"][7])
        assert _Handler.sent < 100_000
        got = ec.materialise(ckpt.tree)
        assert np.array_equal(got["w"], tree["w"]) and got["b"].tolist() == [1, 1, 1]
    assert {key for _, key in given} == {None}
    assert {key for _, key in handler.asked} == {"s3cr3t"}
    # Each signature is used once.
    numbers = [number for number, _ in given]
    assert len(numbers) == len(set(numbers)) > 10


def test_arrays_that_tensorstore_decodes_come_by_redirects(served, leading):
    path, url = served
    handler, start = leading
    handler.lead = staticmethod(lambda place: url + place)
    foreign = pathlib.Path(__file__).parents[1] / "foreign"
    for name in ("marin-levanter-0.2.20/step-7", "eformer-0.0.101/tree"):
        shutil.copytree(foreign / name, path / name)
        ckpt = ec.open(f"{start}/{name}")
        assert ckpt["model.big"][1, 0].read() == 64
        here = ec.materialise(ec.open(path / name).tree)
        there = ec.materialise(ckpt.tree)
        assert str(here) == str(there)
        with pytest.raises(ValueError, match="TensorStore has no driver .*`.read`"):
            ckpt["model.big"].store


@pytest.mark.parametrize("count", [5, 6])
def test_so_many_redirects(served, leading, count):
    path, url = served
    handler, start = leading

    def lead(place):
        number, _, name = place[1:].partition("/")
        if int(number) == count:
            return f"{url}/{name}"
        return f"/{int(number) + 1}/{name}"  # Relative ones are as good.

    handler.lead = staticmethod(lead)
    ec.export_safetensors(path / "m.safetensors", {"w": jnp.ones(3)})
    if count == 5:
        assert (ec.open(f"{start}/1/m.safetensors")["w"].read() == 1).all()
        return
    with pytest.raises(OSError, match="on and on: 5 redirects"):
        ec.open(f"{start}/1/m.safetensors")


@pytest.mark.parametrize(
    "to, why",
    [
        ("/elsewhere?token=s3cr3t", "in a circle"),
        (None, "does not say where"),
        ("file:///etc/passwd?token=s3cr3t", "`file:///etc/passwd`, which is on no web"),
        ("ftp://127.0.0.1/x", "is on no web server"),
    ],
)
def test_redirects_that_are_not_followed(leading, to, why):
    handler, start = leading
    handler.lead = staticmethod(lambda _: to)
    with pytest.raises(OSError, match=f"m.safetensors.*{why}") as caught:
        ec.open(f"{start}/m.safetensors")
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))


def test_no_redirect_leads_out_of_encryption(served, tmp_path):
    path, url = served
    ec.export_safetensors(path / "m.safetensors", {"w": jnp.ones(3)})
    pem = tmp_path / "pem"
    pem.write_bytes(servers.certificate())
    program = scripts.PROGRAMS / "server_that_leads_out_of_encryption.py"
    done = subprocess.run(
        [sys.executable, str(program), str(pem), url],
        env={
            **os.environ,
            "SSL_CERT_FILE": str(pem),
            "TENSORSTORE_CA_BUNDLE": str(pem),
        },
        capture_output=True,
        text=True,
    )
    assert f"leads to `{url}/" in done.stdout, done.stderr
    assert "is not encrypted" in done.stdout
