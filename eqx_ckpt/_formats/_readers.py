"""The readers of all formats, in the order in which they are asked."""

from jaxtyping import PyTree

from .._kernel._format import _files
from .._kernel._load._source import Source
from .._zips import _probe, _zip_source
from .._zips._probe import Probe
from .._zips._zip import Zip
from . import _eqx, _levanter, _magic, _msgpack, _numpy, _orbax, _safetensors, _torch


_FORMATS = (_numpy, _safetensors, _torch, _eqx, _orbax, _levanter, _msgpack)
_ZIPS = (_torch, _numpy)


def open_foreign(probe: Probe, like: PyTree) -> Source | None:
    """The source of a checkpoint of another library, or of ours in a zip; None for what
    is none.

    **Raises:** `ValueError` for one that is damaged, or is not read here.
    """
    archive, ours = _zip_source.open_archive(probe)
    if ours is not None:
        return ours
    # A file that begins like one of an unread format is one. A directory may be of a
    # format that is read all the same.
    other = _magic.unread_format(probe) if archive is None else None
    if other is None or probe.key is None:
        try:
            source = _first_source(probe, archive, like)
        except ValueError as e:
            raise _probe.refusal(probe.root, e) from e
        if source is not None:
            return source
    if other is not None:
        raise ValueError(
            f"`{probe.root}` is no checkpoint that is read here. It is {other}."
        )
    return None


def _first_source(probe: Probe, archive: Zip | None, like: PyTree) -> Source | None:
    if archive is None:
        sources = (format.open_source(probe, like) for format in _FORMATS)
    else:
        sources = (format.open_zip(probe, archive) for format in _ZIPS)
    source = next((source for source in sources if source is not None), None)
    if source is None and archive is not None:
        other = _magic.unread_zip(archive.members)
        what = f"no checkpoint of ours, but {other}"
        if other is None:
            what = f"a zip with no `{_files.INDEX}` in it"
        raise ValueError(f"it is {what}")
    return source
