"""The base of a save: the checkpoint that an adapter was trained on."""

import json

from .._format import _index, _text
from .._format._index import BaseFacts
from .._format._leaves import Record
from .._storage import _store
from .._storage._backend import Backend
from ._source import Source


# Of files without digests so many leaves are looked at, and so many bytes of each.
_LEAVES, _BYTES = 256, 1024


def facts(source: Source, path: str) -> BaseFacts:
    """The facts about a source that was opened as `path`."""
    if "://" in path:
        path = str(source.root)  # Without what only its owner may know.
    return BaseFacts(path, source.index.save, digest(source))


def digest(source: Source) -> str:
    """The digest of an index, in which the digests of all data are.

    Files of other formats have none. Theirs is of the metadata, of the names, dtypes
    and shapes of all leaves, and of the first bytes of some.
    """
    index = source.index
    if index.seal:
        return index.seal
    records = list(index.leaves.records())
    rows = [[r.name, r.template.dtype, r.template.logical_shape] for r in records]
    runs = [r for r in records if source.files and source.is_run(r)]
    runs = [r for r in runs if r.part is None and r.template.nbytes]
    some = runs[:: 1 + (len(runs) - 1) // _LEAVES] if runs else []

    def first(directory: Backend, record: Record) -> bytes:
        key, start, _ = source.where(record, 0)
        stop = start + min(_BYTES, record.template.nbytes)
        return _store.read_bytes(directory, key, start, stop)

    heads = _store.each(source.directory, first, some)
    text = json.dumps([rows, index.metadata]).encode()
    return _index.digest(b"".join([text, *heads]))


def check(source: Source, other: Source) -> None:
    """**Raises:** `ValueError` unless `other` is the base of a source."""
    base = source.index.base
    if base is None:
        raise ValueError(
            f"The checkpoint at `{source.root}` has no base: it was saved without "
            "`base=`, so nothing says which checkpoint it belongs to."
        )
    if digest(other) != base.digest:
        raise ValueError(
            f"The checkpoint at `{source.root}` was made on the save {base.save_id} of "
            f"`{_text.bounded(base.path)}`, and `{other.root}` has another one, "
            f"{other.index.save}. Give the path of that base, or of a copy of its "
            "files. What `convert` or another save makes of it is another one."
        )
