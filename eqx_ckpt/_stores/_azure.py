"""Azure's Blob Storage, by obstore: `az://container/path`, whose account the
environment names, and `abfss://` with the account in it, as other tools write them.

Requests are made by threads, of which each waits for one. A tag is the ETag.
"""

import datetime
import functools as ft
import json
import os
import re
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._kernel._errors import BeyondError, MissingError
from .._kernel._storage import _store
from .._kernel._storage._objects import ABSENT, DriverlessStore
from . import _remote, _requests
from ._buckets import BucketBackend, WriteConditions


try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore
except ImportError:
    raise ImportError(
        "Azure's stores need obstore: `pip install 'eqx_ckpt[azure]'`."
    ) from None


_abfss = re.compile(r"abfss://([^/@]+)@([^/.]+)\.dfs\.([^/]+)(/.*)?")
_az = re.compile(r"az://([^/@]+)(/.*)?")
# What was asked on a condition that does not hold.
_REFUSED = (
    *(exceptions.AlreadyExistsError, exceptions.NotModifiedError),
    exceptions.PreconditionError,
)


class _BlobAddress(NamedTuple):
    """The parts of a URL of Azure. The domain is "" but for another cloud."""

    account: str
    container: str
    domain: str
    path: str


class AzureBackend(DriverlessStore, BucketBackend):
    """Blobs in a container."""

    def _address(self) -> _BlobAddress:
        if found := _az.fullmatch(self.url):
            return _BlobAddress(self._account(), found[1], "", found[2] or "")
        if found := _abfss.fullmatch(self.url):
            return _BlobAddress(found[2], found[1], found[3], found[4] or "")
        raise ValueError(
            f"`{self}` is not a URL of Azure: it is `az://container/path`, or "
            "`abfss://container@account.dfs.core.windows.net/path`."
        )

    def _account(self) -> str:
        """The account that an `az://` URL does not name; "" if nothing does."""
        given = json.loads(self.options).get("account_name")
        named = [given, *map(os.environ.get, _ACCOUNTS)]
        return next(filter(None, named), _connection(os.environ).get("AccountName", ""))

    def check_url(self) -> None:
        try:
            self._store()
        except ValueError:
            raise
        except Exception as e:
            if not type(e).__module__.startswith("obstore"):
                raise
            raise ValueError(_said(e)) from None

    def _bucket(self) -> str:
        path = self._address().path
        return self.url[: len(self.url) - len(path)]

    def _path(self) -> str:
        path = urllib.parse.unquote(self._address().path).strip("/")
        return path and path + "/"

    def conditions(self) -> WriteConditions:
        server = self._address().account + self._bucket() + self.options
        return WriteConditions(server, "`If-Match`, `If-None-Match`")

    def explain(self, error: Exception) -> Exception:
        if not type(error).__module__.startswith("obstore"):
            return super().explain(error)
        said = _remote.masked(_said(error), json.loads(self.options))
        if "ContainerNotFound" in said:
            return _remote.no_bucket(self.url, "ContainerNotFound")
        if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
            names = "`AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_SAS_TOKEN`"
            cure = f"Set {names} or what else docs/stores.md lists, and check that it"
            return _remote.refused(str(self), said, f"{cure} allows this")
        if "builder error" in said:
            return ValueError(
                f"The endpoint of `{self}` is not encrypted, or no URL. For a server "
                "of your own set `AZURE_STORAGE_ALLOW_HTTP=true`."
            )
        if "error sending request" in said or "after " in said and "retries" in said:
            return _remote.silent(str(self), said, "azure")
        return _remote.wrong(str(self), said)

    # ---- Requests.

    def _store(self) -> Any:
        account, container, domain, _ = self._address()
        if not account:
            raise ValueError(
                f"nothing says which account of Azure `{container}` is in. Set "
                "`AZURE_STORAGE_ACCOUNT_NAME`, give an `ec.Store` its `account_name`, "
                f"or write `abfss://{container}@account.dfs.core.windows.net/path`"
            )
        settings = {k: v for k, v in os.environ.items() if k.startswith("AZURE_")}
        env = json.dumps(settings, sort_keys=True)
        return _open(account, container, domain, self.options, env)

    def start_read(self, key: str, start: int, stop: int | None) -> Any:
        return _requests.start(self._read_blob, self._path() + key, start, stop)

    def start_write(
        self, key: str, data: bytes | None, expected: bytes | None = None
    ) -> Any:
        path = self._path() + key
        if data is None:
            return _requests.start(self._delete_blob, path, expected)
        return _requests.start(self._write_blob, path, data, expected)

    def delete_files(self, keys: Iterable[str]) -> None:
        paths = [self._path() + key for key in keys]
        _store.finish_write(self, "", _requests.start(self._delete_blobs, paths))

    def start_list(self, first: bytes) -> Any:
        return _requests.start(self._list_blobs, first.decode("utf-8", "replace"))

    def _read_blob(self, path: str, start: int, stop: int | None) -> Any:
        store = self._store()
        try:
            if start < 0 or start == stop:  # Azure knows no ranges from the end.
                known = obstore.head(store, path)
                if start == stop:
                    return _requests.answer(b"", known["e_tag"])
                start = max(0, known["size"] + start)
            span = {"offset": start} if stop is None else (start, stop)
            options: Any = {} if (start, stop) == (0, None) else {"range": span}
            got = obstore.get(store, path, options=options)
            first, end = got.range
            data = bytes(got.bytes())
        except FileNotFoundError as e:
            self._check_container(e)
            return _requests.MISSING
        except _REFUSED:
            return _requests.UNSPECIFIED
        except exceptions.GenericError as e:
            # Azurite says so of what is empty.
            if re.search(r"Wanted range starting at|416 |bytes 0--1/0", str(e)):
                raise BeyondError(f"the end of `{path}` is missing")
            raise
        if len(data) != end - first or first != start:
            said = f"{len(data)} bytes, and a range of {end - first}"
            raise _store.odd(self, path, said)
        if stop is not None and end < stop:
            raise MissingError(f"the end of `{path}` is missing")
        return _requests.answer(data, got.meta["e_tag"])

    def _write_blob(self, path: str, data: bytes, expected: bytes | None) -> Any:
        mode: Any = "overwrite"
        if expected is not None:
            tag = {"e_tag": expected.decode("latin-1")}
            mode = "create" if expected == ABSENT else tag
        put = ft.partial(obstore.put, self._store(), path, data, mode=mode)
        try:
            done = _again(lambda: put(use_multipart=False))
        except FileNotFoundError as e:
            self._check_container(e)
            raise _store.odd(self, path, "a write was answered with 404") from e
        except _REFUSED:
            return _requests.stamp(b"")
        return _requests.stamp((done["e_tag"] or "").encode())

    def _delete_blob(self, path: str, expected: bytes | None) -> Any:
        store = self._store()
        try:
            # obstore deletes on no condition: it is looked at right before.
            if expected not in (None, ABSENT):
                if obstore.head(store, path)["e_tag"] != expected.decode("latin-1"):
                    return _requests.stamp(b"")
            _again(lambda: obstore.delete(store, path))
        except FileNotFoundError as e:
            self._check_container(e)
        return _requests.stamp(ABSENT)

    def _check_container(self, error: FileNotFoundError) -> None:
        """**Raises:** `FileNotFoundError` if the container is what was not found."""
        if "ContainerNotFound" in str(error):
            raise _remote.no_bucket(self.url, "ContainerNotFound") from None

    def _delete_blobs(self, paths: list[str]) -> Any:
        """Deletes blobs: all in one request, unless one of them is gone."""
        try:
            _again(lambda: obstore.delete(self._store(), paths))
        except FileNotFoundError:
            for path in paths:
                self._delete_blob(path, None)
        return _requests.stamp(ABSENT)

    def _list_blobs(self, first: str) -> list[bytes]:
        above = first.rpartition("/")[0]
        try:
            listed = obstore.list(self._store(), above or None, chunk_size=1000)
            paths = [blob["path"] for part in listed for blob in part]
        except FileNotFoundError as e:
            raise _remote.no_bucket(self.url, "it cannot be listed") from e
        return [path.encode() for path in paths if path.startswith(first)]


def _said(error: Exception) -> str:
    """The text of an error of obstore, in a line, without what may be signed."""
    text = str(error).partition("\n\nDebug")[0]
    found = re.search("<Code>(.*?)</Code>.*?<Message>(.*?)(\n|</Message>)", text, re.S)
    if found:
        text = f"{text.partition(': <?xml')[0]}: {found[1]}, {found[2]}"
    text = re.sub(r"https?://[^\s`]*\?[^\s`]*", "its URL", text)
    text = re.sub(r"^Generic \w+ error: |Object at location .*? not found: ", "", text)
    return " ".join(text.split()).rstrip(".")


_CREDENTIALS = {
    "account_key": "access_key",
    "sas_key": "sas_token",
    "token": "bearer_token",
    "client_secret": "client_secret",
}


def _again(call: Any) -> Any:
    """Makes a call once more if its answer was lost. obstore does so for reads; to
    write the same once more changes nothing."""
    try:
        return call()
    except exceptions.GenericError as e:
        if "HTTP error" not in str(e):
            raise
    time.sleep(0.1)
    return call()


@ft.lru_cache(maxsize=64)
def _open(account: str, container: str, domain: str, options: str, env: str) -> Any:
    given = json.loads(options)
    config = _settings(account, json.loads(env)) | given
    for name, kind in _CREDENTIALS.items():
        if name in given:  # Else what the environment has may come first.
            config.setdefault("credential_type", kind)
    for name in ("timeout", "account_name"):
        config.pop(name, None)
    if domain not in ("", "core.windows.net"):
        config.setdefault("endpoint", f"https://{account}.blob.{domain}")
    is_open = str(config.pop("allow_http", "")).lower() in ("1", "true", "yes", "on")
    retries = {**_remote.RETRIES, **config.pop("azure_request_retries", {})}
    client: Any = {"allow_http": is_open, **config.pop("client_options", {})}
    return AzureStore(
        container,
        account_name=account,
        config=config,
        client_options=client,
        retry_config={
            "max_retries": retries["max_retries"],
            "retry_timeout": _duration("30s"),
            "backoff": {
                "init_backoff": _duration(retries["initial_delay"]),
                "max_backoff": _duration(retries["max_delay"]),
                "base": 2,
            },
        },
    )


def _duration(text: str) -> datetime.timedelta:
    """Parses a duration as TensorStore writes it, such as `250ms`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if found is None:
        raise ValueError(f"`{text}` is no duration, such as `250ms` or `6s`.")
    unit = {"ms": "milliseconds", "s": "seconds", "m": "minutes"}[found[2]]
    return datetime.timedelta(**{unit: float(found[1])})


# These name the account: for obstore and fsspec, and for Azure's own tools.
_ACCOUNTS = "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"


def _connection(env: Mapping[str, str]) -> dict[str, str]:
    """The parts of a connection string."""
    parts = env.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def _settings(account: str, env: dict[str, str]) -> dict[str, Any]:
    """Settings from the environment, under the names that obstore does not look at
    itself: those of `az storage`."""
    out: dict[str, Any] = {}
    if key := env.get("AZURE_STORAGE_KEY"):
        out["account_key"] = key
    if endpoint := env.get("AZURE_STORAGE_SERVICE_ENDPOINT"):
        out["endpoint"] = endpoint
    said = _connection(env)
    if said.get("AccountName", account) == account:
        names = {
            "AccountKey": "account_key",
            "BlobEndpoint": "endpoint",
            "SharedAccessSignature": "sas_key",
        }
        out |= {names[k]: v for k, v in said.items() if k in names}
    if "AZURE_STORAGE_ALLOW_HTTP" in env:
        out["allow_http"] = env["AZURE_STORAGE_ALLOW_HTTP"]
    return out
