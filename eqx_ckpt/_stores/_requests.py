"""Requests to servers: those that Python makes rather than TensorStore, and waits that
tell a server that is slow from one that is not there."""

import json
import math
import socket
import ssl
import threading
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from .._kernel._limits import limits
from .._kernel._runtime import _log
from .._kernel._runtime._threads import Outcome, Worker
from .._kernel._storage import _context
from . import _remote


class ServerAddress(NamedTuple):
    is_encrypted: bool
    host: str
    port: int


# Seconds between two lines of the log about a server.
_AGAIN = 60
_answering: set[ServerAddress] = set()
_said: dict[str, float] = {}


def result(url: str, options: str, future: Any, answers: bool = False) -> Any:
    """The result of a request to the store of a URL.

    TensorStore tries for half a minute in silence where there is no server, and for
    many where one accepts connections and nothing comes. So whatever takes long, the
    server is asked for any answer, beside TensorStore. Where a request is one that a
    server `answers` soon, whatever its connection, it is given the `timeout` of the
    store.

    **Raises:** `ConnectionError` if there is no answer; what the request raises.
    """
    given = json.loads(options)
    server = _server(url, given)
    is_known = server in _answering
    start = time.monotonic()
    timeout = given.get("timeout", _remote.TIMEOUT) if answers else math.inf
    end = start + timeout
    say = start + limits.server_log_seconds if answers else math.inf
    pause = limits.server_look_seconds * (5 if is_known else 1)
    look = math.inf if server is None else start + pause
    failing, why = None, None
    while True:
        try:
            wait = min(end, say, look) - time.monotonic()
            value = future.result(None if wait == math.inf else max(0, wait))
            if server is not None:
                _answering.add(server)
            return value
        except TimeoutError:
            if future.done():
                return future.result()
        now = time.monotonic()
        if now >= end:
            future.cancel()
            raise _silent(url, timeout, why)
        if now >= say:
            _say(url, f"has not answered for {limits.server_log_seconds} s")
            say = math.inf
        if server is None or now < look:
            continue
        # What is to be said is not to come late.
        seconds = max(0.1, min(limits.server_answer_seconds, end - now, say - now))
        why = _failure(server, seconds)
        if why is None:
            failing, pause = None, min(2 * pause, 60)
        elif failing is None:
            failing, pause = now, limits.server_look_seconds
            _say(url, f"does not answer: {why}. It is tried again")
        elif not is_known or time.monotonic() > failing + limits.server_away_seconds:
            future.cancel()
            raise ConnectionError(f"The store of `{url}` does not answer: {why}.")
        look = time.monotonic() + pause


def _silent(url: str, timeout: float, why: str | None) -> ConnectionError:
    return ConnectionError(
        f"The store of `{url}` does not answer: it has been asked {timeout:g} seconds "
        f"ago{why and f', and {why}' or ''}. Try again later, or give it longer: "
        "`timeout` in an `ec.Store`."
    )


def _say(url: str, what: str) -> None:
    """Logs what is wrong with a store, once for its many requests."""
    now = time.monotonic()
    if now >= _said.get(url, -math.inf) + _AGAIN:
        _said[url] = now
        _log.say(_log.WARNING, f"The store of `{url}` {what}", path=url)


def _server(url: str, options: dict[str, Any]) -> ServerAddress | None:
    """The server of a URL; None where it is asked through a proxy, or is one of
    Amazon's, each of which has its own name."""
    bases = {"s3": options.get("endpoint"), "gs": _remote.google()}
    base = bases.get(str(_remote.scheme(url)), url)
    if base is None or _remote.scheme(base) not in ("http", "https"):
        return None
    parts = urllib.parse.urlsplit(base)
    host = parts.hostname or ""
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    proxies = urllib.request.getproxies()
    if parts.scheme in proxies or "all" in proxies:
        if not urllib.request.proxy_bypass(host):
            return None
    return ServerAddress(parts.scheme == "https", host, port)


def _failure(server: ServerAddress, seconds: int | float) -> str | None:
    """The reason why a server does not answer at all; None if it does."""
    is_encrypted, host, port = server
    where = f"`{host}:{port}`"
    connected = False
    try:
        with socket.create_connection((host, port), seconds) as plain:
            connected = True
            s = _encrypted(plain, host) if is_encrypted else plain
            with s:
                s.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                s.recv(1)
    except socket.gaierror as e:
        return f"the name `{host}` cannot be resolved ({e.strerror})"
    except TimeoutError:
        does = "accepts connections, and says nothing" if connected else "is not there"
        return f"{where} {does} for {seconds:.2g} seconds"
    except OSError as e:
        # Whoever breaks off has answered.
        return None if connected else f"{where} cannot be reached ({e.strerror})"
    return None


def _encrypted(plain: socket.socket, host: str) -> socket.socket:
    # Who it is does not matter here: nothing is told to it, and nothing believed.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain, server_hostname=host)


# ---- Requests in threads.

# So many are under way at a time, as of TensorStore's.
_LIMIT = threading.BoundedSemaphore(64)


def stamp(tag: bytes) -> Any:
    """The tag of a version of a file, as TensorStore has it; empty after a write that
    was refused."""
    return types.SimpleNamespace(generation=tag)


def answer(value: bytes, tag: str | None = "", state: str = "value") -> Any:
    """The answer to a read, as TensorStore has it. `state`: "value" or "missing", or
    "unspecified" where the store says neither."""
    known = stamp((tag or "").encode())
    return types.SimpleNamespace(value=value, stamp=known, state=state)


MISSING, UNSPECIFIED = answer(b"", state="missing"), answer(b"", state="unspecified")


def start(call: Callable[..., Any], *args: Any) -> Outcome[Any]:
    """Makes a call in a thread, which does not keep the process alive."""
    _context.check_fork()
    _context.watch_forks()
    outcome: Outcome[Any] = Outcome()

    def run() -> None:
        try:
            outcome.set_result(call(*args))
        except BaseException as e:
            outcome.set_exception(e)

    def run_in_turn() -> None:
        with _LIMIT:  # Nothing interrupts this thread.
            run()

    if not Worker(run_in_turn, daemon=True).start():
        run()
    return outcome
