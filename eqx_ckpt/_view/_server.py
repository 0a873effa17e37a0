"""The server of a page: on this machine alone, for whoever has its token, to look only.

A web site that makes a browser of this machine ask for an address must not learn what
is in a checkpoint. So the path begins with a token, and the Host header has to name
this machine. What was stored is shown as text: a page may run no script but its own.
"""

import hmac
import json
import secrets
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from ._site import Site


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HOSTS = ("127.0.0.1", "localhost")
_FILES = {
    "": ("view.html", "text/html"),
    "view.css": ("view.css", "text/css"),
    "view.js": ("view.js", "text/javascript"),
}


def shipped(name: str) -> bytes:
    return resources.files(__spec__.parent).joinpath("static", name).read_bytes()


class Server(ThreadingHTTPServer):
    """Serves one page until it is closed. A request that is slow holds up no other."""

    block_on_close = False

    def __init__(self, site: Site, port: int = 0):
        super().__init__(("127.0.0.1", port), _PageHandler)
        self.site = site
        self.token = secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing: whoever has closed the page has seen enough."""


class _PageHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "eqx_ckpt", ""
    timeout = 60

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        host = urllib.parse.urlsplit("//" + self.headers.get("Host", "")).hostname
        url = urllib.parse.urlsplit(self.path)
        token, _, name = url.path.removeprefix("/").partition("/")
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in _HOSTS or not is_known:
            self._send(403, b"This page is for who has its address.", "text/plain")
        elif name in _FILES:
            file, kind = _FILES[name]
            self._send(200, shipped(file), kind)
        else:
            query = dict(urllib.parse.parse_qsl(url.query))
            try:
                found = self.server.site.answer(name, query)
            except KeyError:
                self._send(404, b"There is no such page.", "text/plain")
                return
            text = json.dumps(found, allow_nan=False, separators=(",", ":"))
            self._send(200, text.encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: the terminal is for the address."""


def serve(site: Site, say: Callable[[str], None], port: int = 0) -> None:
    """Serves until Ctrl-C. `say` is told the address, once it answers."""
    with Server(site, port) as server:
        say(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
