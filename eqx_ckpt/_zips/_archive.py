"""A checkpoint as one file: a zip of the files of its directory, not compressed.

Every file in it starts at a multiple of 64, as the leaves do in theirs, so that what is
read in place is aligned.
"""

import functools as ft
import io
import secrets
import struct
import zipfile
from collections.abc import Iterable
from typing import Any

from .._kernel._format import _files
from .._kernel._runtime import _threads
from .._kernel._runtime._progress import Advance
from .._kernel._save import _publish, _write_leaves
from .._kernel._save._plan import Plan
from .._kernel._save._writing import Destination
from .._kernel._storage._backend import Backend
from . import _probe, _publish_file


_ALIGN = 64
# Of the header of a file: what is fixed, and what makes it one of any size.
_HEADER, _LARGE = 30, 20
# Bytes that mean nothing, as Android's zipalign marks them.
_PADDING = 0xD935
# Bytes of a file whose header has 32 bits for them; and the flag of one whose size
# stands after it, as the output could not be changed.
_MOST_SHORT, _HAS_FOOTER = 2**31, 8
_DATE = (1980, 1, 1, 0, 0, 0)


def _padding(count: int) -> bytes:
    return struct.pack("<2H", _PADDING, count) + bytes(count)


class _Zip(zipfile.ZipFile):
    """A zip that gets its list of files when it is closed, and never by itself: the
    file may have another zip by the time that this is collected."""

    def __del__(self):
        pass


class Archive:
    """A zip that is being written, to anything that has a `write`."""

    has_slow_writes = True  # Threads wait for each other.

    def __init__(self, file: Any):
        # What has no buffer may write a part of what it is given.
        self._is_raw = isinstance(file, io.RawIOBase)
        self._file = io.BufferedWriter(file) if self._is_raw else file
        self._zip = _Zip(self._file, "w", zipfile.ZIP_STORED)
        self._lock = _threads.Lock()

    def write(self, key: str, buffers: Iterable[Any], sync: bool = False) -> None:
        """Adds a file. Threads that write at the same time wait for each other."""
        self._lock.run(lambda: self._write_member(key, buffers))

    def _write_member(self, key: str, buffers: Iterable[Any]) -> None:
        info = zipfile.ZipInfo(key, _DATE)
        info.external_attr = 0o644 << 16
        assert self._zip.fp is not None
        start = self._zip.fp.tell() + _HEADER + len(key.encode()) + _LARGE + 4
        info.extra = _padding(-start % _ALIGN)
        with self._zip.open(info, "w", force_zip64=True) as member:
            for buffer in buffers:
                member.write(memoryview(buffer))
        self._shorten(info)

    def _shorten(self, info: zipfile.ZipInfo) -> None:
        """Puts the size of a file that is written into the fixed part of its header, in
        the place of the part for any size: TensorStore reads parts of such files only.
        """
        fp, size = self._zip.fp, info.file_size
        if fp is None or size >= _MOST_SHORT or info.flag_bits & _HAS_FOOTER:
            return
        end = fp.tell()
        parts = struct.pack("<2I", size, size), _padding(_LARGE - 4)
        for part, at in zip(parts, (info.header_offset + 18, end - size - _LARGE)):
            fp.seek(at)
            fp.write(part)
        fp.seek(end)

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Writes the list of the files. Without it none of them is there."""
        try:
            if kind is None:
                self._zip.close()
                # Else the list of a longer zip would be found at the end of the file.
                if getattr(self._file, "seekable", bool)():
                    self._file.truncate()
        finally:
            if self._is_raw:
                self._file.detach()


# Looks at a path, of which all have to find something else than a checkpoint: another
# process may delete it and save it.
_LOOKS = 3


def check_target(root: Backend, overwrite: bool) -> None:
    """**Raises:** `FileExistsError` when a checkpoint of one file may not go there."""
    for _ in range(_LOOKS):
        if _probe.look(root) is None:
            if root.entry() not in (None, "nothing"):
                raise FileExistsError(
                    f"There is something at `{root}` that is no file. It is left as it "
                    "is. Choose another path."
                )
            return
        if _probe.is_archive(root):
            break
    else:
        raise FileExistsError(
            f"There is something else than a checkpoint of one file at `{root}`. It is "
            "left as it is. Choose another path."
        )
    if not overwrite:
        raise FileExistsError(
            f"There is a checkpoint at `{root}`, and `overwrite=False`."
        )


def save(plan: Plan, advance: Advance) -> None:
    """Writes what was planned to an open file, or publishes it as one."""
    root, options = plan.root, plan.options
    pack = ft.partial(_pack, plan, advance)
    if not isinstance(root, Backend):
        pack(root)
        return
    check_target(root, options.overwrite)
    _publish_file.publish(
        root, pack, options.overwrite, options.durable, plan.spec.nbytes
    )


def _pack(plan: Plan, advance: Advance, file: object) -> None:
    """Writes a checkpoint as one file. The index comes last, as ever."""
    with Archive(file) as archive:
        into = Destination(archive, f"d/{secrets.token_hex(8)}", False)
        index, _ = _write_leaves.write_leaves(plan, into, advance)
        archive.write(_files.INDEX, [_publish.encoded(index)])
