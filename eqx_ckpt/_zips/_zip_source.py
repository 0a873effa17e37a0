"""A checkpoint of ours in one file: a zip of its directory, read in place."""

import dataclasses
from typing import Any

import numpy as np

from .._kernel._errors import DamagedError
from .._kernel._format import _digests, _files, _index, _json, _layouts, _text
from .._kernel._format._index import Index
from .._kernel._load._source import DatabaseSource
from .._kernel._storage import _store
from .._kernel._storage._backend import Backend
from . import _probe, _zip
from ._probe import Probe
from ._zip import Zip


@dataclasses.dataclass(frozen=True, eq=False)
class ZipSource(DatabaseSource):
    """A source in the `archive`. The names of the files of its directory begin with a
    `prefix` there, and `places` are those that are known."""

    archive: Zip
    prefix: str
    places: dict[str, tuple[int, int]]
    # That of the file when it was opened.
    stamp: str

    is_ours = False

    def is_in(self, directory: Backend) -> bool:
        return directory.stamp(self.archive.key) == self.stamp

    def is_unchanged(self) -> bool:
        return self._is_still_in(self.directory)

    def read_beside(self, key: str, start: int, stop: int, size: int) -> bytes | None:
        found = self.places.get(key) or _zip.place(self.archive, self.prefix + key)
        first, last = found
        if last - first != size:
            return b""
        into = np.empty(stop - start, np.uint8)
        count = self.directory.read_into(self.archive.key, first + start, into)
        return into[:count].tobytes()

    def read_other(self, key: str, limit: int) -> bytes | None:
        if self.prefix + key not in self.archive.members:
            return None
        start, stop = _zip.place(self.archive, self.prefix + key)
        if stop - start > limit:
            raise ValueError(f"`{key}` in it is too long")
        return _store.read_bytes(self.directory, self.archive.key, start, stop)

    def spec_of(self, key: str) -> dict[str, Any]:
        own = f"{self.prefix}{key}/"
        for name, member in self.archive.members.items():
            if name.startswith(own) and (member.size >= 2**31 or member.has_footer):
                raise ValueError(
                    f"TensorStore cannot read `{_text.escape(name)}` in `{self.root}`: "
                    "it is larger than 2 GiB, or was written to what cannot be changed "
                    "later, such as a pipe. Use `.store`, or `.read`."
                )
        file = self.directory.unpinned().spec()
        file["path"] += self.archive.key
        return {"driver": "zip", "base": file, "path": own}


def open_archive(probe: Probe) -> tuple[Zip | None, ZipSource | None]:
    """The zip that a file is, and the checkpoint of ours in it.

    **Raises:** `ValueError` for one that is damaged.
    """
    try:
        archive = _zip.open_zip(probe.directory, probe.key, probe.head)
        return archive, None if archive is None else _ours(probe.root, archive)
    except ValueError as e:
        raise _probe.refusal(probe.root, e) from e


def _ours(root: Backend, archive: Zip) -> ZipSource | None:
    """The source of a zip with one index of ours in it."""
    directory, key = archive.directory, archive.key
    members = archive.members
    above = [n for n in members if n == _files.INDEX or n.endswith("/" + _files.INDEX)]
    if not above:
        return None
    if len(above) > 1:
        raise ValueError(f"it is a zip with {len(above)} `{_files.INDEX}` in it")
    prefix = above[0].removesuffix(_files.INDEX)
    start, stop = _zip.place(archive, above[0])
    if stop - start > _json.MAX_INDEX:
        raise ValueError("its index is too long")
    index = _index.decode(_store.read_bytes(directory, key, start, stop))
    if index.layout not in _layouts.PACKED:
        raise ValueError(f"it holds the layout {index.layout!r}: unzip it")
    own = f"d/{index.save}"
    files = [_zip.place(archive, f"{prefix}{own}/{name}") for name in index.files]
    digests = _zip.place(archive, f"{prefix}{own}/digests")
    keys, shift = [key] * len(files), [start for start, _ in files]
    index = dataclasses.replace(index, files=keys, shift=shift)
    if digests[1] - digests[0] != _digests.SIZE * index.extents.pages[-1]:
        raise DamagedError("its file of digests is damaged")
    _zip.check_apart([*files, (start, stop), digests])
    _check_members(index, files)
    # The header before the digests is read once.
    places = {f"{own}/digests": digests}
    stamp = directory.stamp(key)
    return ZipSource(root, index, directory, keys, archive, prefix, places, stamp)


def _check_members(index: Index, files: list[tuple[int, int]]) -> None:
    """**Raises:** `ValueError` unless each file has in it all that the index says."""
    extents = index.extents
    for record in index.leaves.records():
        for first, stop, file, offset in extents.segments(record):
            end = files[file][1]
            if stop and offset + extents.nbytes(record, first, stop) > end:
                raise ValueError(f"the bytes of `{record.name}` are not in it")
