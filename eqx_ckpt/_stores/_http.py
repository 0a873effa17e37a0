"""Files of web servers, even if these redirect, as many do for large files.

TensorStore follows no redirects. The target of a redirect is asked for at each read,
and not kept: such URLs are often signed, and last for minutes.
"""

import contextlib
import time
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import Any, NamedTuple, NoReturn

import tensorstore as ts

from .._kernel._errors import MissingError
from .._kernel._limits import limits
from .._kernel._storage import _context
from . import _remote, _requests
from ._buckets import BucketBackend


# How many redirects are followed, as in most programs a few.
_MOST = 5
_SECONDS = 30
# The stamp of a file of which the server gives no strong tag: TensorStore knows no
# others.
_UNTAGGED = b"\x10".hex()
# Seconds between requests of ours, where a later one may do better.
_PAUSES = (0.25, 1.0, 4.0)
# Servers that have answered with a redirect: they are asked before each read.
_redirecting_servers: set[str] = set()


class HttpBackend(BucketBackend):
    """Files of a web server, which can be read, and neither written nor listed."""

    # A server may refuse to say what it knows of a page, so one byte is asked for.
    _stamp_bytes = 1

    def _top(self) -> str:
        return "/"

    def has_driver(self) -> bool:
        return not is_redirecting(self.url)

    def _place(self, key: str) -> tuple[str, dict[str, Any]]:
        """The URL of a file, and the spec of its server without it."""
        spec = self.spec()
        path = urllib.parse.quote(spec.pop("path") + key, safe="/")
        return spec.pop("base_url") + path, spec

    def start_read(self, key: str, start: int, stop: int | None) -> Any:
        url, spec = self._place(key)
        if is_redirecting(url):
            return _requests.start(read_url, url, spec, start, stop)
        reading = super().start_read(key, start, stop)
        return _requests.start(_follow, reading, url, spec, start, stop)

    def stamp(self, key: str) -> str:
        found = super().stamp(key)
        if found != _UNTAGGED:
            return found
        url, spec = self._place(key)
        asking = _requests.start(_version, url, spec.get("headers", []))
        return self.wait(asking, True)

    def _check_limit(self, key: str, limit: int) -> None:
        try:
            super()._check_limit(key, limit)
        except MissingError:
            # A server that knows no parts of files may have sent the whole file.
            self._is_there(key, self.start_read(key, 0, 1))

    def can_list(self) -> bool:
        return False

    def list_all(self, start: str = "") -> list[str] | None:
        return None

    def check_writable(self) -> NoReturn:
        raise ValueError(
            f"`{self}` can only be read: nothing is saved over HTTP. Save to a "
            "directory, or to an `s3://` or `gs://` URL, and publish that."
        )

    def start_write(
        self, key: str, data: bytes | None, expected: bytes | None = None
    ) -> NoReturn:
        self.check_writable()


def is_redirecting(url: str) -> bool:
    return _origin(url) in _redirecting_servers


def _follow(
    reading: Any, url: str, spec: dict[str, Any], start: int, stop: int | None
) -> Any:
    """The result of a read that TensorStore has started, or of `read_url` if it is
    redirected."""
    try:
        try:
            return reading.result(timeout=limits.redirect_seconds)
        except TimeoutError:
            with contextlib.suppress(OSError):  # The read says what is wrong.
                if _target(url, spec.get("headers", [])) is not None:
                    return read_url(url, spec, start, stop)
            return reading.result()
    except Exception as e:
        if not _remote.is_moved(e):
            raise
    return read_url(url, spec, start, stop)


def read_url(url: str, spec: dict[str, Any], start: int, stop: int | None) -> Any:
    """Reads a range of the file at a URL, wherever its server leads. `spec` is
    that of the store: only the server of the URL is given the headers in it.

    **Raises:** `IsADirectoryError` if that is the directory of the name; `OSError` for
    a redirect that is not followed; what TensorStore raises.
    """
    seen = [url]
    while True:
        url = seen[-1]
        headers = spec.get("headers", []) if _origin(url) == _origin(seen[0]) else []
        given = {**spec, "headers": headers}
        if len(seen) > 1 and not is_redirecting(url):
            try:
                return _read_once(url, given, start, stop)
            except Exception as e:
                if not _remote.is_moved(e):
                    raise
        target = _target(url, headers)
        if target is None:
            return _read_once(url, given, start, stop)
        _check_redirect(seen, target)
        _redirecting_servers.add(_origin(url))
        seen.append(target)


def _read_once(url: str, spec: dict[str, Any], start: int, stop: int | None) -> Any:
    store = ts.KvStore.open({**spec, "base_url": url}, context=_context.context())
    try:
        reading = store.result().read("", byte_range=slice(start, stop))
        return reading.result()
    except Exception as e:
        # The target may be signed: whoever has its URL may read it.
        text = str(e).replace(url, _shown(url))
        query = urllib.parse.urlsplit(url).query
        e.args = (text.replace(query, "***") if query else text,)
        raise


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _version(url: str, headers: list[str]) -> str:
    """The stamp of a file without a strong tag: a weak one, or when it was changed, and
    its size; "" if it is gone. **Raises:** as `read_url`."""
    seen, pauses = [url], [*_PAUSES]
    while True:
        own = headers if _origin(seen[-1]) == _origin(url) else []
        try:
            answer = _ask(seen[-1], own)
        except ConnectionError:
            if not pauses:
                raise
            time.sleep(pauses.pop(0))
            continue
        if answer.target is not None:
            _check_redirect(seen, answer.target)
            seen.append(answer.target)
        elif pauses and (answer.status == 429 or answer.status >= 500):
            time.sleep(pauses.pop(0))
        else:
            break
    if answer.status in (404, 410):
        return ""
    if answer.status not in (200, 206):
        raise OSError(
            f"The server of `{_shown(url)}` does not say whether the file is still the "
            f"same (status {answer.status}). Try again."
        )
    tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
    size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return f"{tag}/{size}".encode().hex()


class _Answer(NamedTuple):
    """What a server says of a file: the status, the headers, and where it leads, if it
    does not answer itself, even with an error."""

    status: int
    headers: Message
    target: str | None = None


def _target(url: str, headers: list[str]) -> str | None:
    return _ask(url, headers).target


def _ask(url: str, headers: list[str]) -> _Answer:
    """Asks for the first byte of a file."""
    given = dict(line.split(":", 1) for line in headers if ":" in line)
    given = {name.strip(): value.strip() for name, value in given.items()}
    request = urllib.request.Request(url, headers={**given, "Range": "bytes=0-0"})
    try:
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=_SECONDS) as got:
            return _Answer(got.status, got.headers)
    except urllib.error.HTTPError as e:
        with e:
            to = e.headers.get("Location")
        if e.code not in _remote.MOVED:
            return _Answer(e.code, e.headers)
        if not to:
            raise OSError(
                f"The server of `{_shown(url)}` sends whoever asks for a file there "
                f"elsewhere (status {e.code}), and does not say where. Try again."
            ) from None
        return _Answer(e.code, e.headers, urllib.parse.urljoin(url, to))
    except OSError as e:
        why = getattr(e, "reason", e)
        raise ConnectionError(
            f"The server of `{_shown(url)}` does not answer: {why}."
        ) from None


def _check_redirect(seen: list[str], target: str) -> None:
    """**Raises:** `OSError` for a redirect from the last URL that is not followed."""
    shown, url = _shown(seen[0]), seen[-1]
    if target in seen:
        raise OSError(
            f"The server of `{shown}` leads in a circle: after {len(seen)} redirects "
            "one leads back. Ask whoever runs it."
        )
    if len(seen) > _MOST:
        raise OSError(
            f"The server of `{shown}` leads on and on: {_MOST} redirects are followed, "
            "and it has more. Give a URL that is nearer to the file."
        )
    if target.rstrip("/") == url.rstrip("/") and target.endswith("/"):
        raise IsADirectoryError(f"`{shown}` is a directory of its server.")
    to = _remote.scheme(target)
    if to not in ("http", "https") or (to == "http" and _remote.scheme(url) == "https"):
        raise OSError(
            f"The server of `{shown}` leads to `{_shown(target)}`, which "
            f"{'is not encrypted' if to == 'http' else 'is on no web server'}: that is "
            "not followed. Give that URL itself, if you trust it."
        )


def _shown(url: str) -> str:
    """A URL without what may be secret in it."""
    return _remote.masked(url.partition("?")[0])


def _origin(url: str) -> str:
    return "/".join(url.split("/")[:3])
