"""Keys in a bucket of a server: `s3://` and `gs://`, by TensorStore."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from .._kernel._format import _files
from .._kernel._storage import _store
from .._kernel._storage._objects import ABSENT, ObjectStore
from . import _remote, _requests


# Stores of which it is known that they heed the conditions of a write, which the commit
# of a save is.
_heeding: set[str] = set()


class WriteConditions(NamedTuple):
    """A text that is the same for one server, and the names of its conditions of a
    write; "" where writes have none."""

    server: str
    names: str


class BucketBackend(ObjectStore):
    """An object store on a server."""

    def _bucket(self) -> str:
        return "/".join(self.url.split("/")[:3])

    def check_bucket(self) -> None:
        """**Raises:** `FileNotFoundError` if there is no bucket of the name in a
        `gs://` URL. TensorStore takes that for one without files; Google tells
        anyone."""
        if _remote.scheme(self.url) != "gs":
            return
        name = urllib.parse.quote(self._bucket().removeprefix("gs://"), safe="")
        try:
            url = f"{_remote.google()}/storage/v1/b/{name}"
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.HTTPError as e:
            e.close()
            if e.code == 404:
                raise _remote.no_bucket(self.url, e.reason) from None
        except (OSError, http.client.HTTPException):
            pass  # It may be known to those only who may see it.

    def wait(self, future: object, soon: bool = False) -> Any:
        try:
            return _requests.result(self.url, self.options, future, soon)
        except Exception as e:
            raise self.explain(e) from e

    def explain(self, error: Exception, said: OSError | None = None) -> Exception:
        options = json.loads(self.options)
        # What it comes of is printed too.
        error.args = tuple(
            _remote.masked(arg, options) if isinstance(arg, str) else arg
            for arg in error.args
        )
        return super().explain(error, _remote.explain(self.url, error))

    def _listed(self, listing: object) -> list[bytes]:
        try:
            return super()._listed(listing)
        except OSError as e:
            # TensorStore before 0.1.86 takes a refusal for a list that it cannot parse.
            if "ListBucketResult" not in str(e):
                raise
            if self.read(_files.INDEX) is None:  # Or it raises why that is refused.
                raise _remote.no_bucket(self.url, "it cannot be listed") from e
            raise OSError(f"The store of `{self}` refuses to list what it has.") from e

    def conditions(self) -> WriteConditions:
        """The conditions that writes to this server have."""
        options = self.spec()
        del options["path"]
        heeded = {"s3": "`If-Match`, `If-None-Match`", "gcs": "`ifGenerationMatch`"}
        is_asked = options.get("use_conditional_write", options["driver"] == "gcs")
        name = heeded.get(options["driver"], "") if is_asked else ""
        return WriteConditions(json.dumps(options, sort_keys=True), name)

    def check_conditions(self, key: str) -> None:
        # Not all servers of S3 heed them: of two saves at the same instant one would
        # delete what the other has written.
        server, names = self.conditions()
        if not names or server in _heeding:
            return
        found = _store.finish_write(self, key, self.start_write(key, b"1"))
        # Again, on conditions that do not hold: another generation of the same form.
        at = len(found) // 2
        other = found[:at] + bytes([found[at] ^ 1]) + found[at + 1 :]
        tries = [self.start_write(key, b"2", wrong) for wrong in (ABSENT, other)]
        if any(_store.answer(self, key, stamp).generation for stamp in tries):
            is_s3 = self.url.startswith("s3:")
            without = (
                "; or, if never more than one process saves to a path, `ec.Store(url, "
                "use_conditional_write=False)`"
            )
            raise RuntimeError(
                f"The server of `{self}` ignores the conditions of a write ({names}), "
                "which keep two saves to one path apart. Use a server that heeds them"
                f"{without if is_s3 else ''}."
            )
        _heeding.add(server)
