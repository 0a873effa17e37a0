"""The base of a save: the checkpoint that an adapter was trained on."""

import json
import os

from .._kernel._format import _index, _text
from .._kernel._format._index import BaseFacts
from .._kernel._load import _checkpoint
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._source import Source
from .._kernel._storage import _open_files, _root, _store


# In files without digests, at most so many leaves are looked at, and so many bytes of
# each.
_LEAVES, _BYTES = 1024, 1024


def facts(base: str | os.PathLike[str] | Checkpoint) -> BaseFacts:
    """The facts about the `base=` of a save.

    **Raises:** as `open`; `TypeError` for what is no path; `ValueError` for a base that
    has no path, or nothing to know it by.
    """
    if not isinstance(base, str | os.PathLike | Checkpoint):
        raise TypeError(
            "`base` must be the path of a checkpoint, one that is open, or the `base` "
            f"of one, not {base!r:.80}."
        )
    ckpt = _checkpoint.open(base)
    source, path = _checkpoint.source_of(ckpt), ckpt.path
    if isinstance(base, str | os.PathLike):
        # If it is the path of a run, the step that was meant is recorded.
        given, at = os.fspath(base).rstrip("/"), _root.resolve(base).url
        path = given + path.removeprefix(at) if path.startswith(at) else path
    if _open_files.is_copy(source.root):
        raise ValueError(
            "`base` was opened from a file object, and an index records the path of a "
            "base. Give the path of that file."
        )
    if "://" in path:
        path = str(source.root)  # It leaves out what only its owner may know.
    return BaseFacts(path, source.index.save, digest(source))


def digest(source: Source) -> str:
    """The digest of an index but for its `others`. It stands for all that is saved: an
    index has the digests of all data.

    Files of other formats have none. For them this is a digest of the metadata, of the
    names, dtypes and shapes of all leaves, and of the first bytes of up to 1024, as
    they are stored.

    **Raises:** `ValueError` for such files without a byte of any leaf.
    """
    index = source.index
    if index.seal:
        return index.seal
    records = list(index.leaves.records())
    rows = [[r.name, r.template.dtype, r.template.logical_shape] for r in records]
    some = [r for r in records if r.part is None and r.template.nbytes]
    if not some:
        raise ValueError(
            f"`{source.root}` cannot be a base: it has no leaf whose values could be "
            "compared."
        )

    looked_at = some[:: 1 + (len(some) - 1) // _LEAVES]
    head = lambda record: source.head_of(record, _BYTES)
    heads = _store.each(source.directory, head, looked_at)
    text = json.dumps([rows, index.metadata]).encode()
    return _index.digest(b"".join([text, *heads]))


def check_base(source: Source, other: Source) -> None:
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
