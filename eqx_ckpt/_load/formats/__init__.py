"""Other formats behind `open`. Each module here recognises one, and makes an index of
what its files say, which is checked as strictly as our own: see SECURITY.md.
"""

from typing import Any

from ..._errors import DamagedError
from ..._format import _files, _index, _text
from ..._runtime import _gc
from ..._storage import _store
from ..._storage._backend import Backend
from .._source import Source
from . import (
    _archive,
    _eqx,
    _levanter,
    _magic,
    _msgpack,
    _numpy,
    _orbax,
    _safetensors,
    _torch,
    _zip,
)
from ._found import Candidate, flat_name as flat_name, look as look
from ._orbax import DONE as DONE, is_finished as is_finished
from ._safetensors import (
    DTYPES as DTYPES,
    is_safetensors as is_safetensors,
    is_texts as is_texts,
    LABELS as LABELS,
    METADATA as METADATA,
    SUFFIX as SUFFIX,
)


_FORMATS = (_numpy, _safetensors, _torch, _eqx, _orbax, _levanter, _msgpack)
_ZIPS = (_archive, _torch, _numpy)


@_gc.paused()
def find(root: Backend, like: Any) -> Source | None:
    """The checkpoint of another format that is at a path; None if there is none.

    **Raises:** `ValueError` for one that is damaged, or cannot be read here.
    """

    def read() -> Source | None:
        found = look(root)
        return None if found is None else _read(found, like)

    return _store.look_twice(root, read)


def _read(found: Candidate, like: Any) -> Source | None:
    root = found.root
    # Files have numbers that say what they are; a directory may be one of ours as well.
    other = _magic.name(found)
    if other is not None and found.key is not None:
        raise ValueError(f"`{root}` is no checkpoint that is read here. It is {other}.")
    for read in (_read_zip, *(format.read for format in _FORMATS)):
        try:
            source = read(found, like)
        except ValueError as e:
            # What is not supported is not damaged.
            kinds = (DamagedError, _index.Newer, ValueError)
            kind = next(kind for kind in kinds if isinstance(e, kind))
            why = _text.escape(str(e))  # It may name anything that is in a file.
            raise kind(f"The checkpoint at `{root}` cannot be read: {why}.") from e
        if source is not None:
            return source
    if other is not None:
        raise ValueError(f"`{root}` is no checkpoint that is read here. It is {other}.")
    return None


def _read_zip(found: Candidate, like: Any) -> Source | None:
    archive = _zip.read(found)
    if archive is None:
        return None
    for format in _ZIPS:
        source = format.read_zip(found, archive)
        if source is not None:
            return source
    other = _magic.name_of_zip(archive.members)
    if other is None:
        raise ValueError(f"it is a zip with no `{_files.INDEX}` in it")
    raise ValueError(f"it is no checkpoint of ours, but {other}")


def is_archive(found: Candidate | None) -> bool:
    """Whether what is at a path is a checkpoint of ours, in one file."""
    try:
        source = None if found is None else _read(found, None)
    except ValueError:
        return False
    return source is not None and source.is_archive
