"""Paths that are URLs of servers: the options of their stores, and what goes wrong, in
words."""

import base64
import dataclasses
import functools as ft
import json
import math
import os
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from .._kernel._storage import _root
from .._kernel._storage._objects import ObjectStore


# Seconds that a server is given to answer what opens a checkpoint.
TIMEOUT = 30

# The scheme of a URL.
_url = re.compile(r"([a-z][a-z0-9+.-]*)://")


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Store(os.PathLike[str]):
    """A URL in an object store together with options of that store.

    It is taken wherever a path is. The environment has the usual options already (see
    docs/stores.md); this is for what it does not have, and for more than one store.

    **Arguments:**

    - `url`: such as `s3://bucket/runs`, `gs://bucket/runs` or `https://host/runs`.
    - `**options`: what TensorStore's key-value store driver of that name takes. For
        `s3`: `endpoint`, `aws_region`, `aws_credentials`, `s3_request_retries` and
        others; for `gs`: `gcs_request_retries` and others; for `http`: `headers`. Other
        kinds are on the page of stores. And
        `timeout`: how many seconds a server is given to answer what opens a checkpoint,
        30 by default.

    A user and a password in an `https://` URL become one of the `headers`. What headers
    say is masked wherever a store is printed.

    `store / "7"` is the URL below it, with the same options.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> runs = ec.Store("s3://bucket/runs", endpoint="https://minio.example.org")
        >>> runs / "7"
        Store('s3://bucket/runs/7', endpoint='https://minio.example.org')

        ```
    """

    url: str
    _options: str

    def __init__(self, url: str, **options: Any):
        if scheme(url) in (None, "file", "memory"):
            shown = masked(repr(url))
            raise ValueError(f"{shown} is not the URL of an object store.")
        fixed = sorted({"driver", "bucket", "path", "base_url"} & options.keys())
        if fixed:
            raise ValueError(f"`{fixed[0]}` is in the URL, and cannot be an option.")
        timeout = options.get("timeout", TIMEOUT)
        if type(timeout) not in (int, float) or not 0 < timeout < math.inf:
            raise ValueError(f"`timeout` is a number of seconds, not {timeout!r}.")
        headers = options.get("headers", [])
        is_list = isinstance(headers, list | tuple)
        if not is_list or not all(isinstance(x, str) for x in headers):
            raise TypeError("`headers` is a list of texts, such as `Name: value`.")
        url, options = _without_user(url, options)
        try:
            text = json.dumps(options, sort_keys=True)
        except (TypeError, ValueError) as e:
            raise TypeError(f"An option of a store cannot be JSON: {e}.") from None
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "_options", text)

    @property
    def options(self) -> dict[str, Any]:
        return json.loads(self._options)

    def __truediv__(self, below: str) -> "Store":
        return Store(f"{self.url.rstrip('/')}/{below}", **self.options)

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        """For messages."""
        return masked(self.url, self.options)

    def __repr__(self) -> str:
        options = "".join(f", {k}={v!r}" for k, v in self.options.items())
        return masked(f"Store({self.url!r}{options})", self.options)


# The user and the password in a URL, and options whose texts nobody else is to see.
# Before an `@` others than web servers may have what is no user.
_web = r"(?:(?<=http://)|(?<=https://))[^/?#\s'\"`]*"
_user = re.compile(rf"(?<=://)({_web}|[^/?#\s'\"`:]*:[^/?#\s'\"`]*)@")
_secret = re.compile("header|secret|password|token|key", re.IGNORECASE)


def store_of(path: object) -> Store | None:
    """The store that a path is, or that has the user and the password in a URL."""
    if isinstance(path, Store) or not isinstance(path, str):
        return path if isinstance(path, Store) else None
    return Store(path) if is_web(path) and _user.search(path) else None


def _without_user(url: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A URL without user and password, which go into a header."""
    found = _user.search(url)
    if found is None or not is_web(url):
        return url, options
    coded = base64.b64encode(urllib.parse.unquote_to_bytes(found[1])).decode()
    headers = [*options.get("headers", ()), f"Authorization: Basic {coded}"]
    return _user.sub("", url), {**options, "headers": headers}


def masked(text: str, options: object = None, url: str = "") -> str:
    """A text for people, without what only the server may see."""
    for secret in sorted(_secrets(options, False), key=len, reverse=True):
        for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            text = text.replace(form, "***")
    # TensorStore says it once more, as the name of a bucket.
    for user in filter(None, _user.findall(f"{url} {text}")):
        text = text.replace(f"{user}@", "***@")
    return text


def _secrets(value: object, is_secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secrets(inner, is_secret or bool(_secret.search(str(name))))
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets(inner, is_secret)
    elif isinstance(value, str) and is_secret:
        # The name of a header is none.
        secret = value.partition(":")[2].strip() or value
        if secret:
            yield secret


def resolve(kind: type[ObjectStore], path: Any) -> ObjectStore:
    """The root that a URL of a kind of store means, or a `Store`."""
    store = store_of(path)
    url, given = (store.url, store.options) if store else (os.fspath(path), {})
    options = json.dumps(options_of(url, given), sort_keys=True)
    _bound_waits()
    return _root.of_url(kind, url, options, ft.partial(masked, options=given, url=url))


def scheme(path: str) -> str | None:
    """The scheme of a URL; None for a path."""
    found = _url.match(path)
    return found and found[1]


def is_web(url: str) -> bool:
    """Whether a URL is of a web server: files can be read, not written or listed."""
    return scheme(url) in ("http", "https")


def options_of(url: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of the store of a URL: those that are given, or of the environment.

    Credentials TensorStore finds by itself, where Amazon's own tools do.
    """
    if scheme(url) != "s3":
        return given
    out = {}
    endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    region = _first("AWS_REGION", "AWS_DEFAULT_REGION")
    if endpoint:
        out["endpoint"] = endpoint
    if region or endpoint or "endpoint" in given:
        # Other servers than Amazon's seldom have regions, and then take this one.
        out["aws_region"] = region or "us-east-1"
    # TensorStore compares and writes in one step only on Amazon's own servers, unless
    # it is told to. Elsewhere it looks first and writes then, and that can lose a save.
    return {**out, "use_conditional_write": True, **given}


def _first(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


# How long to go on trying: about half a minute altogether. TensorStore's own are
# a quarter of an hour.
RETRIES = {"max_retries": 8, "initial_delay": "250ms", "max_delay": "6s"}
_concurrency = {"limit": 64}
_DRIVERS = {"s3": "s3", "gs": "gcs", "http": "http", "https": "http"}
CONTEXT: dict[str, Any] = {
    f"{driver}_request_{what}": value
    for driver in sorted({*_DRIVERS.values()})
    for what, value in (("retries", RETRIES), ("concurrency", _concurrency))
}


MOVED = (301, 302, 303, 307, 308)
_status = re.compile(r"(?:http_response_code='|HTTP code )(\d+)")
_detail = re.compile(r" \[(HTTP|http_|x-|curl_code|source)[^]]*\]|^[A-Z_]+: ")
# An answer that says that it has a range, and has less.
_cut = re.compile(r"range \[\d+, (\d+)\) was not satisfied .* total size (\d+)")
_region = ("PermanentRedirect", "AuthorizationHeaderMalformed", "resolve aws_region")
_away = ("retry attempts failed", "UNAVAILABLE", "DEADLINE_EXCEEDED", "curl_code")


def explain(url: str, error: Exception) -> OSError | None:
    """The error of a store in words of ours; None if TensorStore's says no more."""
    text = str(error)
    found = _status.search(text)
    status = int(found[1]) if found else None
    if is_web(url) and "ignored by server" in text:
        return OSError(
            f"The server of `{url}` ignores requests for a part of a file, as `python "
            "-m http.server` does, so that to read any leaf would take a whole file. "
            "Publish it on a server that heeds them, such as nginx, or download it and "
            "open the copy."
        )
    cut = _cut.search(text)
    is_cut = cut is not None and int(cut[1]) <= int(cut[2])
    if "OUT_OF_RANGE" in text and not is_cut:
        return None  # The file is shorter.
    said = _detail.sub("", text.splitlines()[0]).strip() if text else "nothing"
    if status and said.lower() in ("unknown", ""):
        said = f"status {status}"
    if status == 404:
        return no_bucket(url, said)
    is_s3 = scheme(url) == "s3"
    if is_s3 and (status == 301 or any(word in text for word in _region)):
        return OSError(
            f"The bucket of `{url}` is in another region than was asked for ({said}). "
            "Set `AWS_REGION` to its region, or leave it unset: on Amazon's servers it "
            "is then found out."
        )
    if status in (401, 403) or "credentials" in text:
        cure = "Check that there are credentials and that they allow this"
        return refused(
            url, said, f"{cure}: docs/stores.md says where they are looked for"
        )
    if any(word in text for word in _away):
        return silent(url, said, _DRIVERS.get(str(scheme(url)), "http"))
    is_wrong = is_cut or "in response headers" in text
    if status or is_wrong or text.startswith("INTERNAL"):
        return wrong(url, said)
    return None


def refused(url: str, said: str, cure: str) -> PermissionError:
    return PermissionError(f"The store refuses access to `{url}` ({said}). {cure}.")


def silent(url: str, said: str, driver: str) -> ConnectionError:
    return ConnectionError(
        f"The store of `{url}` does not answer as it should ({said}). Try again later, "
        f"or for longer: with other `{driver}_request_retries` in an `ec.Store`."
    )


def wrong(url: str, said: str) -> OSError:
    return OSError(
        f"The store of `{url}` says: {said}. Try again; if this stays, ask whoever "
        "runs it, or what is between."
    )


def is_moved(error: Exception) -> bool:
    """Whether a server has answered with a redirect."""
    found = _status.search(str(error))
    return found is not None and int(found[1]) in MOVED


def google() -> str:
    given = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
    return given or "https://storage.googleapis.com"


def no_bucket(url: str, said: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"There is no bucket of the name in `{url}` ({said}). Create it, or correct "
        "the URL."
    )


def _bound_waits() -> None:
    """Lets TensorStore give up a request of which nothing has come for a minute, and
    try again. By itself it waits for ever."""
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
