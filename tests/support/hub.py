"""A server that speaks what `huggingface_hub` asks of the Hub, and beside it, on
another port, the one that large files come from. No test is here.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import NamedTuple


# Larger files lie on the other port.
_LARGE = 1000
TOKEN = "hf_s3cr3t"


class Asked(NamedTuple):
    port: int
    method: str
    path: str
    range: str | None
    token: str | None
    got: int


class Hub:
    """Repositories: of each its commits, the newest last, with their files. `refused`:
    those that are gated, and the status that says so. `drop(path)`: whether the
    connection is closed amid an upload."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refused: dict[str, int] = {}
        self.drop: Callable[[str], bool] = lambda path: False
        self.large: dict[str, bytes] = {}
        self.signed: set[str] = set()
        self.asked: list[Asked] = []
        self.url = self.other = ""

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        commits = self.repos.setdefault(repo, {})
        sha = hashlib.sha1(f"{repo} {len(commits)}".encode()).hexdigest()
        commits[sha] = files
        return sha

    def files(self, repo: str) -> dict[str, bytes]:
        return list(self.repos[repo].values())[-1]


def _id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_) -> None:
        pass

    def _answer(self, status: int, body: object = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = self.headers.get("Authorization")
        token = token and token.removeprefix("Bearer ")
        port, span = self.server.server_address[1], self.headers.get("Range")
        size = len(data) if self.command != "HEAD" else 0
        asked = Asked(port, self.command, self.path, span, token, size)
        self.hub.asked.append(asked)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send(self, data: bytes, **headers: str) -> None:
        """A file, or a range of it."""
        tag = f'"{_id(data)}"'
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if found is None or self.command == "HEAD":
            self._answer(200, data, ETag=tag, **headers)
            return
        start = int(found[1])
        stop = min(len(data), int(found[2]) + 1) if found[2] else len(data)
        if start >= len(data):
            self._answer(416)
            return
        span = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, data[start:stop], ETag=tag, Content_Range=span, **headers)

    def _wrong(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, X_Error_Code=code)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


class _Other(_Handler):
    def do_GET(self) -> None:
        path, _, signature = self.path.partition("?")
        if signature not in self.hub.signed:
            self._answer(403)
            return
        self._send(self.hub.large[path.removeprefix("/")])

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self.hub.drop(self.path):
            self.rfile.read(1)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        data = self._body()
        self.hub.large[_id(data)] = data
        self._answer(200)


class _Main(_Handler):
    def _repo(self, name: str) -> bool:
        """Whether a repository may be read."""
        if (status := self.hub.refused.get(name)) is not None:
            self._wrong(status, "GatedRepo")
            return False
        if name not in self.hub.repos:
            self._wrong(404, "RepoNotFound")
            return False
        return True

    def _sha(self, repo: str, revision: str) -> str | None:
        commits = self.hub.repos[repo]
        sha = list(commits)[-1] if revision == "main" else revision
        if sha in commits:
            return sha
        self._wrong(404, "RevisionNotFound")
        return None

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        at = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if at:
            if self._repo(at[1]) and (sha := self._sha(at[1], at[2] or "main")):
                self._answer(200, {"id": at[1], "sha": sha, "siblings": []})
            return
        at = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        if at:
            if self._repo(at[1]) and (sha := self._sha(at[1], at[2])):
                files = self.hub.repos[at[1]][sha].items()
                tree = [
                    {"type": "file", "path": k, "size": len(v), "oid": _id(v)[:40]}
                    for k, v in files
                ]
                self._answer(200, tree)
            return
        at = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if at and self._repo(at[1]) and (sha := self._sha(at[1], at[2])):
            data = self.hub.repos[at[1]][sha].get(at[3])
            if data is None:
                self._wrong(404, "EntryNotFound")
            elif len(data) < _LARGE:
                self._send(data, X_Repo_Commit=sha)
            else:
                self._lead(data, sha)

    def _lead(self, data: bytes, sha: str) -> None:
        key, signature = _id(data), f"signature={len(self.hub.signed)}"
        self.hub.large[key] = data
        self.hub.signed.add(signature)
        self._answer(
            302,
            Location=f"{self.hub.other}/{key}?{signature}",
            X_Repo_Commit=sha,
            X_Linked_Etag=f'"{key}"',
            X_Linked_Size=str(len(data)),
        )

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = urllib.parse.unquote(self.path.partition("?")[0]), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            said = json.loads(body)
            repo = "/".join(filter(None, [said.get("organization"), said["name"]]))
            if repo in self.hub.repos:
                self._answer(409, {"error": "exists"})
                return
            self.hub.commit(repo, {})
            self._answer(200, {"url": f"{self.hub.url}/{repo}"})
        elif "/preupload/" in path:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["size"] >= _LARGE else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **one,
                    "actions": {"upload": {"href": f"{self.hub.other}/{one['oid']}"}},
                }
                for one in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            self._commit(path, body)

    def _commit(self, path: str, body: bytes) -> None:
        at = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path)
        assert at is not None, path
        lines = [json.loads(line) for line in body.splitlines()]
        head = list(self.hub.repos[at[1]])[-1]
        if lines[0]["value"].get("parentCommit", head) != head:
            self._answer(412, {"error": "A commit has happened since."})
            return
        files = dict(self.hub.files(at[1]))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                del files[value["path"]]
        sha = self.hub.commit(at[1], files)
        self._answer(
            200, {"commitUrl": f"{self.hub.url}/{at[1]}/commit/{sha}", "commitOid": sha}
        )


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    servers = [
        http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (kind,), {"hub": hub})
        )
        for kind in (_Main, _Other)
    ]
    hub.url, hub.other = (f"http://127.0.0.1:{s.server_port}" for s in servers)
    for server in servers:
        run = lambda server=server: server.serve_forever(poll_interval=0.05)
        threading.Thread(target=run, daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
