"""Roots: directories in a local file system, or in an object store."""

import errno
import functools as ft
import json
import os
import pathlib
import re
import urllib.parse
from typing import Any, NamedTuple

import tensorstore as ts

from .._errors import DamagedError, MissingError
from .._format import _text
from .._runtime._undo import Descriptor
from . import _remote
from ._remote import Store


LAYOUTS = ("ocdbt", "zarr")
# So that nothing reads more than a leaf's own bytes, chunks are not cached.
_context_spec = {
    "cache_pool": {"total_bytes_limit": 0},
    **_remote.CONTEXT,
}
# What file systems take, in bytes.
LONGEST_NAME, _LONGEST_PATH = 255, 4096
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


@ft.cache
def watch_forks() -> None:
    """From now on `check_fork` raises in forked children."""
    os.register_at_fork(after_in_child=_after_fork)


@ft.cache
def context() -> ts.Context:
    watch_forks()
    _remote.bound_waits()
    return ts.Context(_context_spec)


@ft.cache
def mmap_context() -> ts.Context:
    return ts.Context(
        {**_context_spec, "file_io_mode": {"mode": "memmap"}}, parent=context()
    )


def with_nodes(parent: ts.Context) -> ts.Context:
    """A context that keeps the nodes of a database, which is all that it is used for:
    the next one at the same path would be taken for the one that is known."""
    return ts.Context(
        {"cache_pool#nodes": {"total_bytes_limit": 64 * 2**20}}, parent=parent
    )


def is_forked() -> bool:
    return _forked


def check_fork() -> None:
    """**Raises:** `RuntimeError` in a forked child, where TensorStore would abort."""
    if _forked:
        raise RuntimeError(
            "This process was forked from one that has used eqx_ckpt, and TensorStore "
            "does not work in such a process. Start processes with `spawn`: "
            "`multiprocessing.get_context('spawn')`."
        )


# What the system calls the files that a process has open.
_OPEN_FILES = next((p for p in ("/proc/self/fd", "/dev/fd") if os.path.isdir(p)), None)


class Pin:
    """The file `key` of a directory as it was when this was made, whatever has come to
    its name since. It is open for as long as somebody has this."""

    def __init__(self, directory: pathlib.Path, key: str):
        self.key = key
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        self._file = Descriptor(directory / key, flags)
        self.fd = self._file.fileno()


class Root(NamedTuple):
    """A directory, local or in an object store. `url` is absolute, and a path here.

    `follow`: whether what is read below it may be a symbolic link. It itself may be.
    `options`: of the object store, as JSON.
    `archive`: what gets the files that are written, if they all become one.
    `pin`: a file below it that is read from its descriptor.
    """

    url: str
    local: pathlib.Path | None
    follow: bool = False
    options: str = "{}"
    archive: Any = None
    pin: Pin | None = None

    def kvstore(self, key: str = "") -> dict[str, Any]:
        """The TensorStore spec of the directory `key` below the root."""
        prefix = key + "/" if key else ""
        if self.local is not None:
            files = {"driver": "file", "path": f"{self.local}/{prefix}"}
            if self.pin is None or key:
                return files
            pinned = {"driver": "file", "path": f"{_OPEN_FILES}/{self.pin.fd}"}
            layers = [{"base": files}, {"base": pinned, "exact": self.pin.key}]
            return {"driver": "kvstack", "layers": layers}
        spec = ts.KvStore.Spec(self.url + "/").to_json() | json.loads(self.options)
        path = spec.get("path", "")
        if not path.strip("/"):  # The whole of it.
            path = "/" if spec["driver"] == "http" else ""
        spec["path"] = path + prefix
        return spec

    def __str__(self) -> str:
        """For messages: a path may have any characters."""
        return _text.escape(self.url)


def resolve(path: Any, follow: bool = False) -> Root:
    """The root that a path or TensorStore URL means."""
    check_fork()
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise TypeError(
            f"A path must be a string or an `os.PathLike` of one, not a "
            f"`{type(path).__name__}`."
        )
    if text == "" or "\0" in text:
        raise ValueError(f"{text!r} is not a path.")
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        if not text.startswith("file://"):
            return _resolve_url(text, path.options if isinstance(path, Store) else {})
        text = urllib.parse.unquote(text.removeprefix("file://"))
        text = text.removeprefix("localhost")
        if not text.startswith("/"):
            raise ValueError(
                f"{path!r} is not a URL of a file: `file:///` and its path."
            )
    elif re.match(r"(s3|gs|https?|memory|file):/", text, re.IGNORECASE):
        raise ValueError(
            f"{text!r} is not a URL: give one as a string, such as `s3://bucket/run`."
        )
    # POSIX leaves two slashes as they are.
    local = pathlib.Path(re.sub("^//+", "/", os.path.abspath(os.path.expanduser(text))))
    try:
        text.encode()
    except UnicodeError:
        raise ValueError(
            f"{text!r} is not Unicode text. Choose another path."
        ) from None
    if len(os.fsencode(local)) >= _LONGEST_PATH or any(
        len(os.fsencode(part)) > LONGEST_NAME for part in local.parts
    ):
        raise ValueError(
            f"The path `{str(local)[:100]}...` is too long: a name takes at most "
            f"{LONGEST_NAME} bytes, and a path {_LONGEST_PATH}. Choose a shorter one."
        )
    if any(part.endswith(".__lock") for part in local.parts):
        raise ValueError(
            f"`{local}` has a name in it that ends in `.__lock`, which TensorStore "
            "keeps for itself. Choose another path."
        )
    if "\\" in str(local):
        raise ValueError(
            f"`{local}` has a backslash in it, which TensorStore takes for a slash. "
            "Choose another path."
        )
    return Root(str(local), local, follow)


def place(path: Any) -> str:
    """What a path means, for comparison; it may be none."""
    try:
        return resolve(path).url
    except Exception:  # Whoever uses it says what is wrong.
        return str(path)


def _resolve_url(url: str, given: dict[str, Any]) -> Root:
    if re.search("[?#]", url):
        raise ValueError(
            f"{url!r} has a query or a fragment, and files below it have names without "
            "one. What a server wants to see can be in `headers` of an `ec.Store`."
        )
    options = json.dumps(_remote.options_of(url, given), sort_keys=True)
    root = Root(url.rstrip("/"), None, options=options)
    try:
        ts.KvStore.Spec(root.kvstore())
    except ValueError as e:
        raise ValueError(f"{url!r} is not a TensorStore URL: {e}") from e
    return root


def check_writable(root: Root) -> None:
    """**Raises:** `ValueError` for a URL from which files can only be read,
    `NotADirectoryError` for a path below a file."""
    for parent in root.local.parents if root.local is not None else ():
        if parent.is_dir():
            break
        if parent.exists():
            raise NotADirectoryError(
                errno.ENOTDIR,
                f"`{parent}` is a file, so that nothing can be saved at `{root}`. "
                "Choose another path.",
            )
    if _remote.is_read_only(root.url):
        raise ValueError(
            f"`{root}` can only be read: nothing is saved over HTTP. Save to a "
            "directory, or to an `s3://` or `gs://` URL, and publish that."
        )


def kv(root: Root) -> ts.KvStore:
    """The open store of a root."""
    # What is kept would keep a file open.
    return _known_kv(root) if root.pin is None else _open_kv(root)


def _open_kv(root: Root) -> ts.KvStore:
    try:
        return ts.KvStore.open(root.kvstore(), context=context()).result()
    except Exception as e:
        raise explain(root, e) from e


_known_kv = ft.lru_cache(maxsize=256)(_open_kv)


def wait(root: Root, future: Any) -> Any:
    """The result of a call to the store of a root.

    **Raises:** as `explain` says.
    """
    try:
        if root.local is not None:
            return future.result()
        return _remote.result(root.url, root.options, future)
    except Exception as e:
        raise explain(root, e) from e


# How TensorStore's errors begin and, where the system has refused a call, end.
_status = re.compile(r"([A-Z_]+): ")
_number = re.compile(r"(.*?) ?\[os_error_code='(\d+)'", re.DOTALL)
_MISSING = frozenset(["NOT_FOUND", "OUT_OF_RANGE"])
_DAMAGED = frozenset(["DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT"])


def explain(root: Root, error: Exception) -> Exception:
    """What TensorStore's error about the store of a root is; any other as it is.

    It is an `OSError` where the system or the store fails, a `MissingError` for what is
    not there, or shorter than was asked for. What TensorStore cannot make sense of
    stays a `ValueError`. So whoever reads tells damage from everything else by types.
    """
    if isinstance(error, (OSError, DamagedError)):
        return error
    text = str(error)
    refused = _number.match(text)
    if refused:
        return OSError(int(refused[2]), _status.sub("", refused[1], 1))
    if root.local is None and (found := _remote.explain(root.url, error)):
        return found
    status = _status.match(text)
    if status is None or status[1] in _DAMAGED:
        return error
    if status[1] in _MISSING:
        return MissingError(text)
    return OSError(f"`{root}` cannot be reached: {text}")


def pinned(root: Root, key: str) -> Root:
    """A local root of which one file is read from its descriptor from now on.

    **Raises:** `OSError` if it cannot be opened.
    """
    if root.local is None or _OPEN_FILES is None:
        return root
    return root._replace(pin=Pin(root.local, key))


def unpinned(root: Root) -> Root:
    return root._replace(pin=None)


def split(root: Root) -> tuple[Root, str]:
    """The directory of a file, and its key there: "" for a whole bucket, which is no
    file. A link is one to the file."""
    if root.local is None:
        if root.url == _remote.bucket(root.url):
            return root, ""
        url, _, key = root.url.rpartition("/")
        return root._replace(url=url), key
    real = pathlib.Path(os.path.realpath(root.local))
    return Root(str(real.parent), real.parent, root.follow), real.name


def below(root: Root, key: str) -> Root:
    """The directory `key` below a root, as a root."""
    if root.local is None:
        # In a URL a `%` begins another character.
        return root._replace(url=f"{root.url}/{urllib.parse.quote(key)}")
    return root._replace(url=f"{root.url}/{key}", local=root.local / key)
