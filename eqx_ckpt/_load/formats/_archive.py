"""A checkpoint of ours in one file: a zip of its directory, read in place."""

import dataclasses

from ..._errors import DamagedError
from ..._format import _files, _index, _json
from ..._format._index import Index
from .._source import Foreign, Source
from . import _found, _zip
from ._found import Candidate
from ._zip import Zip


def read_zip(found: Candidate, archive: Zip) -> Source | None:
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
    index = _index.decode(_found.read(directory, key, start, stop))
    if index.layout != "ocdbt":
        raise ValueError(f"it holds the layout {index.layout!r}: unzip it")
    placement = index.placement
    base = f"{prefix}d/{index.save}/"
    files = [_zip.place(archive, base + name) for name in placement.files]
    digests = _zip.place(archive, base + "digests")
    if digests[1] - digests[0] != 16 * index.pages[-1]:
        raise DamagedError("its file of digests is damaged")
    _check(index, files, [(start, stop), digests])
    shifted = dataclasses.replace(
        index,
        placement=placement.shifted([start for start, _ in files]),
        others={},
    )
    stamp = lambda directory: directory.stamp(key)
    place = lambda name: _zip.place(archive, prefix + name)
    stamped = stamp(directory)
    keys = [key] * max(1, len(files))
    foreign = Foreign(directory, keys, stamp, stamped, {}, digests, place=place)
    return Source(found.root, shifted, foreign)


def _check(
    index: Index, files: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    """**Raises:** `ValueError` unless each file has bytes of its own, and in them all
    that the index says."""
    spans = sorted([*files, *others])
    if any(a[1] > b[0] for a, b in zip(spans, spans[1:])):
        raise ValueError("two files of the zip lie at one place")
    for record in index.leaves.records():
        for first, stop, file, offset in index.segments(record):
            start, end = files[file]
            if stop and offset + index.extent(record, first, stop) > end - start:
                raise ValueError(f"the bytes of `{record.name}` are not in it")
