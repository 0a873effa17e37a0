"""Checkpoints of one file, read in place over HTTP."""

import http.server
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files, with what all real servers have: ranges of bytes, and another URL for a
    directory."""

    sent = 0

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
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(data[start:stop])
        type(self).sent += stop - start

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


def test_directories_of_other_formats(served):
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


@pytest.mark.parametrize("status", [302, 303, 307])
def test_a_server_that_leads_elsewhere(served, monkeypatch, status):
    def answer(self):
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    monkeypatch.setattr(_Handler, "do_GET", answer)
    monkeypatch.setattr(_Handler, "do_HEAD", answer, raising=False)
    with pytest.raises(OSError, match=rf"elsewhere \(status {status}\).*give the URL"):
        ec.open(f"{served[1]}/a.safetensors")
