"""The files of a store as TensorStore itself has them, whatever wrote them."""

import os
import types
from collections.abc import Iterator, MutableMapping

import tensorstore as ts

from eqx_ckpt._kernel._storage import _context


class _Blobs:
    """Azure's container, of which TensorStore knows nothing, by obstore itself."""

    def __init__(self, url: str):
        from obstore.store import AzureStore

        _, _, container, *path = url.split("/")
        # The account, the endpoint and the key it finds in the environment.
        self._store = AzureStore(
            container,
            prefix="/".join(path),
            client_options={"allow_http": True},
        )

    def read(self, key):
        try:
            return _done(state="value", value=bytes(self._store.get(key).bytes()))
        except FileNotFoundError:
            return _done(state="missing")

    def write(self, key, data):
        if data is None:
            return _done(self._store.delete(key))
        return _done(self._store.put(key, data))

    def list(self):
        keys = [blob["path"] for part in self._store.list() for blob in part]
        return _done([key.encode() for key in keys])


def _done(result=None, **fields):
    result = types.SimpleNamespace(**fields) if fields else result
    return types.SimpleNamespace(done=lambda: True, result=lambda: result)


class StoredFiles(MutableMapping[str, bytes]):
    """The bytes of all files below a URL or a directory, by their keys.

    The context is that of the package: in another one `memory://` is another store.
    """

    def __init__(self, url: str | os.PathLike[str]):
        text = os.fspath(url)
        if text.startswith("az://"):
            self.kv = _Blobs(text)
            return
        is_url = "://" in text
        spec = ts.KvStore.Spec(
            f"{text}/" if is_url else f"file://{os.path.abspath(text)}/"
        ).to_json()
        if text.startswith("s3://") and "AWS_ENDPOINT_URL" in os.environ:
            spec |= {
                "endpoint": os.environ["AWS_ENDPOINT_URL"],
                "aws_region": "us-east-1",
            }
        self.kv = ts.KvStore.open(spec, context=_context.context()).result()

    def __getitem__(self, key: str) -> bytes:
        found = self.kv.read(key).result()
        if found.state != "value":
            raise KeyError(key)
        return found.value

    def __setitem__(self, key: str, data: bytes) -> None:
        self.kv.write(key, data).result()

    def __delitem__(self, key: str) -> None:
        self.kv.write(key, None).result()

    def __iter__(self) -> Iterator[str]:
        return iter([key.decode() for key in self.kv.list().result()])

    def __len__(self) -> int:
        return len(list(iter(self)))


def ids_of_saves(url: str | os.PathLike[str]) -> set[str]:
    """The saves of which there is data in a checkpoint."""
    return {key.split("/")[1] for key in StoredFiles(url) if key.startswith("d/")}
