"""The Hugging Face Hub: `hf://org/name[@revision][/path]`, read by ranges and written
by commits.

A revision is asked for once, and its commit is what is read from then on. What there
is, the library `huggingface_hub` says. Ranges come over HTTP with redirects; what is
wanted whole goes through that library's cache, and what is in the cache is read there.
"""

import dataclasses
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from .._kernel._errors import BeyondError, MissingError
from .._kernel._format import _files, _index, _text
from .._kernel._runtime import _threads
from .._kernel._runtime._threads import Outcome
from .._kernel._storage._local import LocalDirectory
from .._version import __version__
from . import _http, _requests
from ._http import HttpBackend


_hf = re.compile(r"hf://([^/@]+/[^/@]+)(?:@([^/@]+))?(/.*)?")

# One thread asks, and the others have what it is told.
_asking = _threads.Lock()

_CARD = """---
library_name: eqx_ckpt
tags:
- jax
- equinox
---

# {name}

A checkpoint of {files} files and {size}, written by eqx_ckpt {version}.

```python
import eqx_ckpt as ec

ckpt = ec.open("{url}")
print(ckpt)
```
"""


class _HubAddress(NamedTuple):
    """The parts of a URL of the Hub."""

    repo: str
    revision: str | None
    path: str


class _HubFile(NamedTuple):
    """A file of a commit: its bytes, and the digest that it has there."""

    size: int
    tag: str


@dataclasses.dataclass(frozen=True)
class HubBackend(HttpBackend):
    """Files of one commit of a repository of models. `_commit`: what is known of it,
    which all directories in it share."""

    _commit: dict[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def _address(self) -> _HubAddress:
        found = _hf.fullmatch(self.url)
        if found is None:
            raise ValueError(
                f"`{self}` is not a URL of the Hub: it is `hf://org/name`, with "
                "`@revision` and `/path` if need be."
            )
        unquote = urllib.parse.unquote
        revision = found[2] and unquote(found[2])
        return _HubAddress(found[1], revision, unquote(found[3] or ""))

    def check_url(self) -> None:
        self._address()
        _library()

    def _bucket(self) -> str:
        path = (_hf.fullmatch(self.url) or [""] * 4)[3] or ""
        return self.url[: len(self.url) - len(path)]

    def _path(self) -> str:
        path = self._address().path.strip("/")
        return path and path + "/"

    def _api(self) -> Any:
        return _library().HfApi(endpoint=_endpoint())

    def explain(self, error: Exception) -> Exception:
        name, response = type(error).__name__, getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        repo, revision, _ = self._address()
        if name == "GatedRepoError" or status == 403:
            return self._refused("it is gated, or your token may not do this")
        if name == "RepositoryNotFoundError":
            if _library().get_token() is None:
                return self._refused("there is none, or it is private")
            return FileNotFoundError(
                f"There is no repository for `{self}` on the Hub. Correct the URL."
            )
        if status == 401:
            return self._refused("your token is not valid")
        if name == "RevisionNotFoundError":
            return FileNotFoundError(
                f"The repository of `{self}` has no revision `{revision}`. Correct "
                "what is behind the `@`: a branch, a tag or a commit."
            )
        if not type(error).__module__.startswith(("huggingface_hub", "httpx")):
            found = super().explain(error)
            is_new = isinstance(found, PermissionError) and found is not error
            return self._refused("it is private or gated") if is_new else found
        said = re.sub(r"https?://\S*", "its URL", str(error).strip())
        said = f"{name}: {said.splitlines()[0] if said else 'nothing'}"
        if status == 412:
            said += ": somebody else has made a commit meanwhile"
        kind = ConnectionError if status is None or status >= 500 else OSError
        return kind(f"The Hub does not do what was asked for `{self}` ({said}).")

    def _refused(self, why: str) -> PermissionError:
        return PermissionError(
            f"The Hub refuses access to the repository of `{self}`: {why}. Log in with "
            f"`hf auth login`, or set `HF_TOKEN`, and ask for access on the page "
            f"{_endpoint()}/{self._address().repo}."
        )

    # ---- What there is, asked once.

    def _known(self, what: str, ask: Callable[[], Any]) -> Any:
        """The answer of `ask`, which is asked once for each commit; `what` it is."""

        def know() -> Any:
            if what not in self._commit:
                try:
                    self._commit[what] = ask()
                except Exception as e:
                    raise self.explain(e) from None
            return self._commit[what]

        return _asking.run(know)

    def _sha(self) -> str:
        """The commit that the revision stood for when it was first asked for."""
        repo, revision, _ = self._address()
        ask = lambda: self._api().repo_info(repo, revision=revision).sha
        return self._known("sha", ask)

    def _listing(self) -> dict[str, _HubFile]:
        """The files of the commit, by their paths."""
        repo, sha = self._address().repo, self._sha()

        def ask() -> dict[str, _HubFile]:
            tree = self._api().list_repo_tree(repo, recursive=True, revision=sha)
            files = (x for x in tree if hasattr(x, "blob_id"))
            return {x.path: _HubFile(x.size, x.blob_id) for x in files}

        return self._known("files", ask)

    def _file(self, key: str) -> _HubFile | None:
        return self._listing().get(self._path() + key)

    def has(self, key: str) -> bool:
        return self._file(key) is not None

    def stamp(self, key: str) -> str:
        found = self._file(key)
        return found.tag if found else ""

    def size(self, key: str) -> int | None:
        found = self._file(key)
        return found and found.size

    def check_range(self, key: str, stop: int) -> int | None:
        size = self.size(key)
        if size is None or size < stop:
            raise MissingError(f"`{key}`, or the end of it, is missing")
        return size

    def _check_limit(self, key: str, limit: int) -> None:
        if (self.size(key) or 0) > limit:
            raise ValueError(f"`{key}` is longer than {limit} bytes")

    def can_list(self) -> bool:
        return True

    def list_all(self, start: str = "") -> list[str] | None:
        return self.ask_all(start).wait()

    def start_list(self, first: bytes) -> Outcome[list[bytes]]:
        listing: Outcome[list[bytes]] = Outcome()
        keys = map(str.encode, self._listing())
        listing.set_result([key for key in keys if key.startswith(first)])
        return listing

    # ---- Reads.

    def has_driver(self) -> bool:
        return False

    def spec(self, key: str = "") -> dict[str, Any]:
        repo = self._address().repo
        token = _library().get_token()
        path = f"/{repo}/resolve/{self._sha()}/{self._path()}"
        headers = [f"authorization: Bearer {token}"] if token else []
        spec = {"driver": "http", "base_url": _endpoint(), "headers": headers}
        return {**spec, "path": path + (key and key + "/")}

    def kv(self) -> Any:
        return self.open_kv()  # One that is kept would be of another commit.

    def start_read(self, key: str, start: int, stop: int | None) -> Any:
        return _requests.start(self._read_file, key, start, stop)

    def _read_file(self, key: str, start: int, stop: int | None) -> Any:
        found = self._file(key)
        if found is None:
            return _requests.MISSING
        size, tag = found
        start = max(0, size + start) if start < 0 else start
        if start > size or stop is not None and stop > size:
            error = BeyondError if start >= size else MissingError
            raise error(f"the end of `{key}` is missing")
        local = self._cached(key)
        if local is None and (start, stop or size) == (0, size):
            local = self._download(key)
        if local is not None:
            with open(local, "rb") as file:
                file.seek(start)
                data = file.read((size if stop is None else stop) - start)
            return _requests.answer(data, tag)
        if start == size or start == stop:
            return _requests.answer(b"", tag)
        got = _http.read_url(*self._place(key), start, stop)
        if got.state != "value":
            return got
        return _requests.answer(got.value, tag)

    def _cached(self, key: str) -> str | None:
        """The path of a file that is in the library's cache already."""
        known = self._commit.setdefault("cached", {})
        name = self._path() + key
        if known.get(name) is None:
            find = _library().try_to_load_from_cache
            path = find(self._address().repo, name, revision=self._sha())
            known[name] = path if isinstance(path, str) else None
        return known[name]

    def _download(self, key: str) -> str:
        return _library().hf_hub_download(
            self._address().repo,
            self._path() + key,
            revision=self._sha(),
            endpoint=_endpoint(),
        )

    # ---- Writes.

    def check_writable(self) -> NoReturn:
        raise ValueError(
            f"`{self}` can only be read: the Hub takes whole checkpoints. Save to a "
            "directory, and upload that: `ec.convert(path, url)` or `eqx-ckpt push`."
        )

    def upload(self, path: str, overwrite: bool) -> None:
        """Puts the checkpoint at a local path here, all of it or nothing.

        **Raises:** `FileExistsError` if there is one, and not `overwrite`.
        """
        hub, api = _library(), self._api()
        repo, revision, inside = self._address()
        inside = inside.strip("/")
        fresh = dataclasses.replace(self, _commit={})
        try:
            there = fresh._listing()
        except (FileNotFoundError, PermissionError):
            there = {}
        old = {key for key in there if _is_part(key, inside)}
        if old and not overwrite:
            raise FileExistsError(
                f"There is a checkpoint at `{self}`, and `overwrite=False`."
            )
        new = dict(_files_of(path, inside))
        operations = [hub.CommitOperationAdd(k, v) for k, v in new.items()]
        if "README.md" not in there:
            card = _CARD.format(
                name=repo.partition("/")[2],
                files=len(new),
                size=_text.size(sum(os.path.getsize(x) for x in new.values())),
                version=__version__,
                url=self.url,
            )
            operations.append(hub.CommitOperationAdd("README.md", card.encode()))
        operations += [hub.CommitOperationDelete(k) for k in sorted(old - new.keys())]
        try:
            if not there:
                api.create_repo(repo, exist_ok=True)
            api.create_commit(
                repo,
                operations,
                commit_message=f"Upload {inside or 'a checkpoint'} with eqx_ckpt",
                revision=revision,
                parent_commit=fresh._commit.get("sha"),
            )
        except Exception as e:
            # The library wraps what went wrong with a file.
            cause = e.__cause__
            error = self.explain(cause if isinstance(cause, Exception) else e)
            error.add_note("A commit is there whole or not at all: look on the Hub.")
            raise error from None
        self._commit.clear()


def _files_of(path: str, inside: str) -> Iterator[tuple[str, str]]:
    """The files of a checkpoint, each with its key in the repository."""
    top = LocalDirectory(path, path)
    if top.entry() == "file":
        yield inside, path
        return
    # What the system refuses is raised. `pathlib` leaves it out.
    for key in sorted(top.list_all()):
        yield f"{inside}/{key}" if inside else key, f"{path}/{key}"


def _is_part(key: str, inside: str) -> bool:
    """Whether a file is of the checkpoint at a path."""
    if key == inside:
        return True
    if inside and not key.startswith(f"{inside}/"):
        return False
    top, _, below = key[len(inside) :].lstrip("/").partition("/")
    if top == "d":
        return bool(_index.is_save_id(below.partition("/")[0]))
    return top in {_files.INDEX, _files.SIGNATURE, *_files.SIDE}


def _endpoint() -> str:
    found = os.environ.get("HF_ENDPOINT") or _library().constants.ENDPOINT
    return found.rstrip("/")


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            "`hf://` paths need huggingface_hub: `pip install 'eqx_ckpt[hub]'`."
        ) from None
    return huggingface_hub
