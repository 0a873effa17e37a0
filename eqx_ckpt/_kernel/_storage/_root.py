"""From a path to its backend: the directory, in a file system or an object store, that
the keys of files are relative to.
"""

import os
import pathlib
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from .. import _rooms
from . import _context
from ._backend import Backend
from ._local import LocalDirectory
from ._local_files import LONGEST_NAME, LONGEST_PATH
from ._objects import ObjectStore


_url, _slashes = re.compile(r"[a-z][a-z0-9+.-]*://"), re.compile("^//+")


def resolve(path: Any, follow: bool = False) -> Backend:
    """The root that a path or TensorStore URL means."""
    _context.check_fork()
    text = _text_of(path)
    if text.startswith("file://"):
        text = _path_of_url(text)
    elif _url.match(text):
        return _store_of_url(path, text)
    else:
        _check_no_url(text)
    local = _absolute(text)
    _check_local(local)
    return LocalDirectory(str(local), str(local), follow)


def _path_of_url(url: str) -> str:
    text = urllib.parse.unquote(url.removeprefix("file://")).removeprefix("localhost")
    if not text.startswith("/"):
        raise ValueError(f"{url!r} is not a URL of a file: `file:///` and its path.")
    return text


def _store_of_url(path: Any, url: str) -> Backend:
    kinds = _kinds_of_stores()
    make = kinds.get(url.partition(":/")[0]) or kinds.get("*")
    if make is None:
        raise ValueError(f"Without `eqx_ckpt._stores` {url!r} is no path.")
    return make(path)


def _kinds_of_stores() -> dict[str, Callable[[Any], Backend]]:
    """The makers of stores by the schemes of URLs; "*" is for all other schemes."""
    return {"memory": _in_memory, **_rooms.kinds_of_stores()}


def _check_no_url(text: str) -> None:
    """**Raises:** `ValueError` for a URL that went through `pathlib`, which takes two
    slashes for one, or whose scheme has capitals."""
    scheme, is_url, rest = text.partition(":/")
    if is_url and scheme.lower() in {"file", "gs", "https", "s3", *_kinds_of_stores()}:
        slashes = "/" if rest.startswith("/") else "///" if scheme == "file" else "//"
        url = f"{scheme.lower()}:{slashes}{rest}"
        raise ValueError(
            f"{text!r} is not a URL: give one as a string, such as `{url}`."
        )


def _text_of(path: Any) -> str:
    """The text of a path. **Raises:** `TypeError`, `ValueError` for what is none."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        hint = ": pass its `path`" if hasattr(path, "path") else ""
        if isinstance(path, (dict, list, tuple)):
            hint = ": to read a tree that you have, save it at `memory://tree` first"
        raise TypeError(
            f"A path must be a string or an `os.PathLike` of one, not a "
            f"`{type(path).__name__}`{hint}."
        )
    if text == "" or "\0" in text:
        raise ValueError(f"{text!r} is not a path.")
    return text


def _absolute(text: str) -> pathlib.Path:
    try:
        # POSIX leaves two slashes as they are.
        whole = os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"The path {text!r} leads nowhere, as the directory in which the program "
            "runs is deleted. Pass an absolute path, or go elsewhere by `os.chdir`."
        ) from None
    try:
        text.encode()
    except UnicodeError:
        raise ValueError(
            f"{text!r} is not Unicode text. Choose another path."
        ) from None
    return pathlib.Path(_slashes.sub("/", whole))


def _check_local(local: pathlib.Path) -> None:
    """**Raises:** `ValueError` for a path that no checkpoint can have."""
    longest = max(map(len, map(os.fsencode, local.parts)))
    if len(os.fsencode(local)) >= LONGEST_PATH or longest > LONGEST_NAME:
        raise ValueError(
            f"The path `{str(local)[:100]}...` is too long: a name takes at most "
            f"{LONGEST_NAME} bytes, and a path {LONGEST_PATH - 1}. Choose a shorter "
            "one."
        )
    if ".__lock/" in f"{local}/":
        raise ValueError(
            f"`{local}` has a name in it that ends in `.__lock`, which TensorStore "
            "keeps for itself. Choose another path."
        )
    if "\\" in str(local):
        raise ValueError(
            f"`{local}` has a backslash in it, which TensorStore takes for a slash. "
            "Choose another path."
        )


def place(path: object) -> str:
    """The URL of a path, for comparison; the text itself if it is no path."""
    try:
        return resolve(path).url
    except Exception:  # Whoever uses it says what is wrong.
        return str(path)


def of_url(
    kind: type[ObjectStore],
    url: str,
    options: str = "{}",
    mask: Callable[[str], str] = str,
) -> ObjectStore:
    """The root that a URL of a kind of store means. `mask` takes out of a text what
    nobody else is to see.

    **Raises:** `ValueError` if nothing can be at such a URL.
    """
    if found := re.search("[?#]", url):
        # It may be signed: whoever has it may read.
        shown = mask(repr(f"{url[: found.end()]}***"))
        raise ValueError(
            f"{shown} has a query or a fragment, and files below it have "
            "names without one. What a server wants to see can be in `headers` of an "
            "`ec.Store`."
        )
    root = kind(url.rstrip("/"), options)
    try:
        root.check_url()
    except ValueError as e:
        url, why = mask(repr(url)), mask(str(e))
        raise ValueError(f"{url} is not a URL of a store: {why}") from None
    return root


def _in_memory(path: Any) -> ObjectStore:
    return of_url(ObjectStore, os.fspath(path))
