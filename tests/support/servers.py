"""Servers on loopback that speak HTTP: S3, GCS and static files, and a proxy before
them that counts, delays and spoils what passes. No test is here.

`python -m support.servers static DIRECTORY` serves files; `gcs` instead is Google's
store, and `s3` Amazon's. It says which port it listens on.
"""

import base64
import contextlib
import email.utils
import hmac
import http.client
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Request(NamedTuple):
    """`sent` and `got`: the bytes of the bodies of the request and of the answer.
    `start` and `end`: when it came, and was answered, in seconds."""

    method: str
    path: str
    headers: dict[str, str]
    status: int
    sent: int
    got: int
    start: float
    end: float


def in_a_row(requests: Iterable[Request]) -> list[Request]:
    """The longest chain of requests in which each comes once the one before it has been
    answered: as many round trips as whoever sends them has waited for in turn."""
    chains: list[list[Request]] = []
    for request in sorted(requests, key=lambda r: r.start):
        before = [c for c in chains if c[-1].end <= request.start]
        chains.append([*max(before, key=len, default=[]), request])
    return max(chains, key=len, default=[])


def round_trips(
    proxy: "Proxy",
    most: int,
    call: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
) -> int:
    """The round trips that a call waits for in turn: the fewest of some tries, if they
    are more than `most`. On a busy machine requests that are sent together may come one
    after the other; those that wait for an answer never come together. `before` is
    called before each try."""
    fewest = sys.maxsize
    for delay in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        proxy.delay = 0.0
        before()
        proxy.delay = delay
        proxy.requests.clear()
        call()
        fewest = min(fewest, len(in_a_row(proxy.requests)))
        if fewest <= most:
            break
    return fewest


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a port, and keeps a list of them; but not of looks whether
    it is there, which come when the machine is slow.

    `delay`: seconds that each takes more, in which nothing is computed; and so does the
    word that a large body may come. `fault(method, path)` says what else happens
    to it: None, nothing; a number, that is the status of its answer; `"drop"`, the
    connection is closed; `"lose"`, the same after the request has been passed on; a
    function, that is called in between; `"hang"`, nothing for a long time; one of
    `ODD`, its answer is odd. `without`: headers, and parts of queries, that are not
    passed on.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = port
        self.delay = 0.0
        self.fault: Callable[[str, str], Any] = lambda *_: None
        self.without: set[str] = set()
        self.requests: list[Request] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def count(self, method: str, part: str = "") -> int:
        return sum(r.method == method and part in r.path for r in self.requests)

    @contextlib.contextmanager
    def used(self) -> Iterator["Proxy"]:
        """For one test: nothing is counted before, and all is as it was after."""
        self.requests.clear()
        try:
            yield self
        finally:
            self.delay, self.fault, self.without = 0.0, lambda *_: None, set()

    def handle_error(self, *_) -> None:
        pass  # The client has gone.

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


# A status, a body, and headers.
_Answer = tuple[int, bytes, list[tuple[str, str]]]


def _without(answer: _Answer, *names: str) -> _Answer:
    status, data, headers = answer
    return status, data, [(k, v) for k, v in headers if k.lower() not in names]


def _flipped(answer: _Answer) -> _Answer:
    status, data, headers = answer
    if status >= 300 or not data:
        return answer
    at = random.randrange(len(data))
    flipped = bytes([data[at] ^ 1 << random.randrange(8)])
    return status, data[:at] + flipped + data[at + 1 :], headers


# Answers that make no sense, or are wrong, of the right ones. `REFUSED`: the request is
# not passed on.
ODD: dict[str, Callable[[_Answer], _Answer]] = {
    "302": lambda _: (302, b"", []),
    "304": lambda _: (304, b"", []),
    "404": lambda _: (404, b"", []),
    "412": lambda _: (412, b"", []),
    "done, 412": lambda _: (412, b"", []),
    "no range": lambda a: (206, *_without(a, "content-range")[1:]),
    "no etag": lambda a: _without(a, "etag", "x-goog-generation"),
    "short": lambda a: (a[0], a[1][: len(a[1]) // 2], a[2]),
    "empty": lambda a: (a[0], b"", a[2]),
    "flip": _flipped,
}
REFUSED = {"302", "304", "404", "412"}

_codes = {301: "PermanentRedirect", 403: "AccessDenied", 503: "SlowDown"}


def _error(status: int) -> bytes:
    code = _codes.get(status, "InternalError")
    return f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()


# A look whether a server is there at all, which comes beside a request that takes long.
_LOOK = ("HEAD", "/")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy
    # A small answer would else wait for the acknowledgement of its own header.
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_) -> None:
        pass

    def handle_expect_100(self) -> bool:
        time.sleep(self.server.delay)
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def parse_request(self) -> bool:
        self._start = time.perf_counter()
        return super().parse_request()

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.delay)
        fault = self.server.fault(self.command, self.path)
        if fault == "hang":
            time.sleep(600)
        if fault == "drop":
            status, data, headers = 0, b"", []
        elif isinstance(fault, int):
            status, data, headers = fault, _error(fault), []
        elif fault in ODD:
            status, data, headers = ODD[fault](
                (0, b"", []) if fault in REFUSED else self._ask(body)
            )
        else:
            status, data, headers = self._ask(body)
        kept = {k.lower(): v for k, v in self.headers.items()}
        request = Request(
            self.command,
            self.path,
            kept,
            status,
            len(body),
            len(data),
            self._start,
            time.perf_counter(),
        )
        if request[:2] != _LOOK:
            self.server.requests.append(request)
        if callable(fault):
            fault()
        if fault in ("drop", "lose") or callable(fault):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response_only(status)
        skipped = {"transfer-encoding", "connection"}
        if not (self.command == "HEAD" and not isinstance(fault, int)):
            skipped.add("content-length")
            self.send_header("Content-Length", str(len(data)))
        # One `Date`, of which some servers send two.
        for name, value in dict(headers).items():
            if name.lower() not in skipped:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def _ask(self, body: bytes) -> tuple[int, bytes, list[tuple[str, str]]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in self.server.without
        }
        path, mark, query = self.path.partition("?")
        parts = [part.partition("=") for part in query.split("&")]
        kept = ["".join(p) for p in parts if p[0] not in self.server.without]
        path += mark + "&".join(kept)
        with contextlib.closing(connection):
            connection.request(self.command, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheaders()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass


@contextlib.contextmanager
def _running(*arguments: str) -> Iterator[int]:
    """A program that says which port it listens on: one that the system has chosen as
    it bound it, and so nobody else's."""
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],  # So that `support` is found.
    ) as process:
        assert process.stdout is not None
        try:
            lines = (_LISTENS.search(line) for line in process.stdout)
            found = next(filter(None, lines), None)
            assert found is not None, f"{arguments} ended"
            yield int(found[1])
        finally:
            process.kill()


_LISTENS = re.compile(r"listens on http://127\.0\.0\.1:(\d+)")


def _own(*arguments: str) -> contextlib.AbstractContextManager[int]:
    return _running(sys.executable, "-m", "support.servers", *arguments)


def _say_port(port: int) -> None:
    print(f"listens on http://127.0.0.1:{port}", flush=True)


def ask(port: int, method: str, path: str, body: bytes = b"") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"} if body else {}
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


@contextlib.contextmanager
def s3() -> Iterator[int]:
    """Moto's server, with the bucket `bucket`."""
    with _own("s3") as port:
        assert ask(port, "PUT", "/bucket") == 200
        yield port


@contextlib.contextmanager
def gcs() -> Iterator[int]:
    """An emulator of Google's store, with the bucket `bucket`."""
    with _own("gcs") as port:
        assert ask(port, "POST", "/storage/v1/b?project=p", b'{"name": "bucket"}') < 300
        yield port


# Azurite's own account, which is the same everywhere.
ACCOUNT = "devstoreaccount1"
KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeks"
    "oGMGw=="
)


@contextlib.contextmanager
def az() -> Iterator[int]:
    """Azurite, Azure's own emulator, with the container `bucket`. Skips the test where
    it is not installed."""
    program = shutil.which("azurite-blob")
    if program is None:
        import pytest

        pytest.skip("Azurite is not here: `npm install --global azurite`")
    options = "--inMemoryPersistence --silent --skipApiVersionCheck --disableTelemetry"
    with _running(program, *options.split(), "--blobPort", "0") as port:
        _make_container(port)
        yield port


def _make_container(port: int) -> None:
    path = f"/{ACCOUNT}/bucket"
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    signed = [
        "PUT" + "\n" * 12 + f"x-ms-date:{date}",
        f"x-ms-version:{version}",
        f"/{ACCOUNT}{path}",
        "restype:container",
    ]
    key, text = base64.b64decode(KEY), "\n".join(signed).encode()
    signature = base64.b64encode(hmac.digest(key, text, "sha256")).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        "Content-Length": "0",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        assert connection.getresponse().status == 201


def azure_settings(url: str) -> dict[str, str]:
    """What the environment says of Azurite behind a URL."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}",
        "AZURE_STORAGE_ALLOW_HTTP": "true",
    }


# Where the tests of a kind of store write.
BUCKETS = {
    "s3": "s3://bucket",
    "gs": "gs://bucket",
    "az": "az://bucket",
}


@contextlib.contextmanager
def static(directory: str | os.PathLike[str]) -> Iterator[int]:
    """The files of a directory."""
    with _own("static", os.fspath(directory)) as port:
        yield port


def _serve(app: Any, **how: Any) -> None:
    import werkzeug.serving

    server = werkzeug.serving.make_server("127.0.0.1", 0, app, threaded=True, **how)
    _say_port(server.server_port)
    server.serve_forever()


def serve_s3() -> None:
    from moto.moto_server import werkzeug_app

    # Before a server of all services, Moto looks at each request for which of them it
    # is, through all of its own directories: that takes longer than the answer.
    app = werkzeug_app.create_backend_app("s3")
    _serve(app, request_handler=werkzeug_app.MotoRequestHandler)


def serve_static(directory: str) -> None:
    import flask

    app = flask.Flask(__name__, static_folder=None)
    send = lambda name: flask.send_from_directory(directory, name, conditional=True)
    app.add_url_rule("/<path:name>", view_func=send, endpoint="file")

    @app.after_request
    def without_date(response: flask.Response) -> flask.Response:
        del response.headers["Date"]  # The server gives one too, of another second.
        return response

    _serve(app)


def serve_gcs() -> None:
    """The emulator, with what it lacks and TensorStore relies on: conditional writes
    and deletions, the bounds of a listing and its errors, generations and the end of an
    object in answers."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    lock = threading.Lock()
    insert, ls, download = objects.insert, objects.ls, objects.download
    delete = objects.delete

    def generation(request, storage, name):
        try:
            return storage.get_file_obj(request.params["bucket_name"], name)
        except NotFound:
            return {"generation": "0"}

    def conditional(call, name_of):
        def called(request, response, storage, *args, **kwargs):
            with lock:
                (wanted,) = request.query.get("ifGenerationMatch", [None])
                found = generation(request, storage, name_of(request))["generation"]
                if wanted not in (None, found):
                    response.status = http.HTTPStatus.PRECONDITION_FAILED
                    return
                call(request, response, storage, *args, **kwargs)

        return called

    def bounded_ls(request, response, storage, *args, **kwargs):
        ls(request, response, storage, *args, **kwargs)
        if response.status != http.HTTPStatus.OK:
            response.json({"error": {"code": int(response.status)}})
            return
        answer = json.loads(response._content)
        (first,), (stop,) = (
            request.query.get(key, [""]) for key in ("startOffset", "endOffset")
        )
        answer["items"] = [
            item
            for item in answer["items"]
            if first <= item["name"] and (not stop or item["name"] < stop)
        ]
        response.json(answer)

    def download_with_generation(request, response, storage, *args, **kwargs):
        found = generation(request, storage, request.params["object_id"])
        range = request.get_header("range", None)
        if range and "size" in found:
            if int(range.split("=")[1].split("-")[0]) >= int(found["size"]):
                response.status = http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                return
        response["x-goog-generation"] = found["generation"]
        download(request, response, storage, *args, **kwargs)

    objects.insert = conditional(insert, lambda request: request.query["name"][0])
    objects.delete = conditional(delete, lambda request: request.params["object_id"])
    objects.ls = bounded_ls
    objects.download = download_with_generation
    from gcp_storage_emulator.__main__ import main

    # In this mode it is made, and not run.
    start = ["start", "--host=127.0.0.1", "--port=0", "--in-memory"]
    server = main(start, test_mode=True)
    server.start()
    _say_port(server._api._httpd.server_port)


def certificate() -> bytes:
    """A new key, and the certificate of `localhost` that it has signed itself."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    return private + signed.public_bytes(pem)


if __name__ == "__main__":
    {"s3": serve_s3, "static": serve_static, "gcs": serve_gcs}[sys.argv[1]](
        *sys.argv[2:]
    )
