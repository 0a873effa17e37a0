"""The published checkpoint at a root: its index, and the saves below it."""

from .._errors import DamagedError
from .._format import _files, _index, _json, _text
from .._format._index import Index, is_save_id
from .._storage._backend import Backend
from .._storage._store import Value


def read_index(root: Backend) -> tuple[Index, Value] | None:
    """The index at a root and the file it is in; None where there is none.

    **Raises:** `DamagedError` when it is not one that can be read, `Newer` when a later
    release can.
    """
    try:
        value = root.read(_files.INDEX, limit=_json.MAX_INDEX)
        return None if value is None else (_index.decode(value.data), value)
    except _index.Newer as e:
        why = _text.escape(str(e))
        raise _index.Newer(f"The checkpoint at `{root}` cannot be read: {why}.") from e
    except ValueError as e:
        why = _text.escape(str(e))
        raise DamagedError(f"The checkpoint at `{root}` cannot be read: {why}.") from e


def saves(root: Backend) -> list[str]:
    """The save ids that have a directory below `d/`, whatever has become of them."""
    if root.is_link("d"):
        return []
    inside = root.below("d").list_top() or {}
    return [s for s, is_directory in inside.items() if is_directory and is_save_id(s)]
