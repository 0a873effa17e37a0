"""What only a server may see is printed nowhere: headers of a store, and the user and
the password in a URL.
"""

import base64
import http.server
import logging
import threading
import traceback

import numpy as np
import pytest

import eqx_ckpt as ec


SECRET = "s3cr3t"
BASIC = base64.b64encode(f"me:{SECRET}".encode()).decode()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files to who has the right header, or gives an odd answer."""

    status = 200
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        allowed = self.headers.get("Authorization") in (
            f"Bearer {SECRET}",
            f"Basic {BASIC}",
        )
        status = self.status if allowed else 401
        if status != 200:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        try:
            with open(self.translate_path(self.path), "rb") as file:
                data = file.read()
        except OSError:
            self.send_error(404)
            return
        start, _, stop = self.headers.get("Range", "bytes=0-")[6:].partition("-")
        stop = min(int(stop) + 1 if stop else len(data), len(data))
        part = data[int(start) : stop]
        if not part:
            self.send_error(416)
            return
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    handler = lambda *args: _Handler(*args, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tmp_path, f"127.0.0.1:{server.server_port}"
    _Handler.status = 200
    server.shutdown()
    thread.join()
    server.server_close()


def stores(host):
    headers = {"headers": [f"Authorization: Bearer {SECRET}"]}
    once = {"http_request_retries": {"max_retries": 1}}
    yield ec.Store(f"http://{host}/run/1/default", **headers, **once)
    yield ec.Store(f"http://me:{SECRET}@{host}/run/1/default", **once)
    yield f"http://me:{SECRET}@{host}/run/1/default"


@pytest.mark.filterwarnings("ignore")
def test_no_call_prints_a_secret(served, caplog):
    path, host = served
    tree = {"w": np.arange(2.0**16), "s": [np.ones(3)] * 3}
    with ec.CheckpointManager(path / "run") as manager:
        manager.save(1, tree)
    caplog.set_level(logging.DEBUG)
    calls = {
        "open": lambda at: repr(ec.open(at)) + ec.open(at).path,
        "load": lambda at: ec.tree_deserialise_leaves(at, tree),
        "verify": ec.verify,
        "exists": ec.exists,
        "restore": lambda at: manager_of(at).restore(tree, 1),
        "steps": lambda at: manager_of(at).steps(),
        "save": lambda at: ec.tree_serialise_leaves(at, tree),
        "delete": ec.delete,
        "repr": lambda at: repr(at) if isinstance(at, ec.Store) else "",
    }
    some = [("open", calls["open"]), ("restore", calls["restore"])]
    texts, loaded = {}, 0
    for status in (200, 401, 404, 400):
        _Handler.status = status
        for at in stores(host):
            for name, call in calls.items() if status == 200 else some:
                try:
                    texts[status, name, len(texts)] = repr(call(at))
                    loaded += name in ("load", "restore")
                except Exception as e:
                    text = "".join(traceback.format_exception(e))
                    texts[status, name, len(texts)] = text
    texts["log", "log", 0] = caplog.text
    assert loaded == 6
    for what, text in texts.items():
        # The arguments of a test are in tracebacks of the test.
        assert SECRET not in text and BASIC not in text, (what, text)


def manager_of(at):
    url = at.url if isinstance(at, ec.Store) else at
    root = url.removesuffix("/1/default")
    return ec.CheckpointManager(
        ec.Store(root, **at.options) if isinstance(at, ec.Store) else root
    )


def test_what_is_no_store_is_masked_too():
    bad = ec.Store("s3://bucket/x", headers=[f"nothing {SECRET}"])
    for call in (
        lambda: ec.open(f"s3://me:{SECRET}@bucket/x"),
        lambda: ec.open(f"http://me:{SECRET}@host/x?y"),
        lambda: ec.open(ec.Store("http://host/x", headers=[f"bad header {SECRET}"])),
        lambda: ec.open(bad),
        lambda: ec.Store(f"memory://me:{SECRET}@host/x"),
    ):
        with pytest.raises(ValueError) as e:
            call()
        assert SECRET not in "".join(traceback.format_exception(e.value))


def test_a_store_shows_the_names_of_headers():
    store = ec.Store("https://host/x", headers=["X-Key: abc", "plain"], timeout=3)
    shown = "Store('https://host/x', headers=['X-Key: ***', '***'], timeout=3)"
    assert repr(store) == shown
    endpoint = ec.Store("s3://b/x", endpoint="https://me:pw@host:9000")
    assert repr(endpoint) == "Store('s3://b/x', endpoint='https://***@host:9000')"
    assert endpoint.options == {"endpoint": "https://me:pw@host:9000"}
    user = ec.Store("https://me:p%40w@host/x")
    assert user.url == "https://host/x"
    coded = base64.b64encode(b"me:p@w").decode()
    assert user.options == {"headers": [f"Authorization: Basic {coded}"]}
    assert user / "7" == ec.Store("https://host/x/7", **user.options)


@pytest.mark.parametrize(
    "wrong", [3, "X-Key: abc", {"X-Key": "abc"}, [3], [("a", "b")]]
)
def test_headers_that_are_no_list_of_texts(wrong):
    with pytest.raises(TypeError, match="`headers` is a list of texts"):
        ec.Store("https://host/x", headers=wrong)


def test_an_option_that_cannot_be_written(tmp_path):
    with pytest.raises(TypeError, match="option of a store cannot be JSON"):
        ec.Store("s3://bucket/x", endpoint=object())


def test_a_query_is_printed_by_no_error(tmp_path):
    """A signed URL is refused: whoever has it may read the file."""
    url = f"https://host/m.safetensors?X-Amz-Signature={SECRET}"
    like = {"w": np.ones(3)}
    for call in (
        lambda: ec.open(url),
        lambda: ec.open(ec.Store(url)),
        lambda: ec.exists(url),
        lambda: ec.verify(url),
        lambda: ec.tree_deserialise_leaves(url, like),
        lambda: ec.graft(like, url, [(lambda m: m, lambda c: c)]),
        lambda: ec.tree_serialise_leaves(url, like),
        lambda: ec.convert(url, tmp_path / "a"),
        lambda: ec.diff(url, like),
        lambda: ec.CheckpointManager(url).restore(like),
    ):
        with pytest.raises(ValueError, match=r"m.safetensors\?\*\*\*' has a qu") as e:
            call()
        assert SECRET not in "".join(traceback.format_exception(e.value))
