"""`verify`: reads every byte of a save, and says what is not as it was written."""

import contextlib
import functools as ft
import itertools as it
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .._kernel._errors import DamagedError, ReplacedError
from .._kernel._format import _digests, _files, _index, _text
from .._kernel._format._leaves import LeafRecord
from .._kernel._load import _checkpoint, _extra_files, _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._reads import CHANGED, unreadable
from .._kernel._load._source import Source, ZarrSource
from .._kernel._runtime import _arguments, _log, _progress
from .._kernel._storage import _arrays, _root, _store
from . import _scan
from ._scan import Problem


# The least memory with which it makes sense to read.
_LEAST = 2**20
_ROOM = 256 * 2**20

# Of a file other than the data: that of the largest index has some MiB.
_MOST = 128 * 2**20

# Seconds that a call may take between the files for other readers and the index that
# has their digests. It counts where no lock says whether somebody is at it.
_LAG = 5


@_arguments.checked()
@_open.retried_if_replaced(0, "path")
def verify(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    max_bytes: int | None = None,
    progress: bool = False,
) -> list[Problem]:
    """Reads every byte of a checkpoint, and returns what is not as it was saved.

    It needs no model, and initialises no JAX backend. All leaves are checked against
    their digests, and so are functions, and the files that only other readers use. What
    is in the directory and no part of the save is ignored.

    **Arguments:**

    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `max_bytes`: how much memory to use for what is read, 256 MiB by default, at least
        1 MiB. The index, the digests and the files for other readers, which are small,
        come on top; and compressed chunks are decoded whole.
    - `progress`: as in [`tree_deserialise_leaves`][].

    **Returns:** a list of [`Problem`][]s, which is empty if all is well. If the index
    is damaged, nothing else can be checked, and it is the only problem. After 1000
    of them no other read is begun.

    **Raises:** `FileNotFoundError` if there is no checkpoint; `RuntimeError` if it was
    replaced or deleted meanwhile (a path is verified again then, at least twice and
    for half a minute); `ValueError` for another format, as those have no digests: a
    list without problems would say what nobody knows; `OSError` where the system or the
    store does not let it read, which says nothing about the bytes.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, pathlib
        >>> ec.tree_serialise_leaves("run", {"w": jnp.ones(3)}, layout="zarr")
        >>> ec.verify("run")
        []
        >>> _ = pathlib.Path("run/w/c/0").write_bytes(bytes(12))
        >>> print(*ec.verify("run"))
        `w`, chunk [0]: its bytes are not those that were saved (in `w/c/0`)

        ```
    """
    max_bytes = _ROOM if max_bytes is None else max_bytes
    if max_bytes < _LEAST:
        raise ValueError(f"`max_bytes` must be at least 1 MiB, not {max_bytes}.")
    if isinstance(path, Checkpoint):
        pinned = _checkpoint.source_of(path)
        root = pinned.root
    else:
        pinned, root = None, _root.resolve(path)
    if pinned and not pinned.has_digests:
        raise _unverifiable(pinned)
    try:
        # A path may stand for another one.
        is_open = isinstance(path, Checkpoint)
        source = _open.open_source(root) if is_open else _open.open_path(path)
        records = list(source.index.leaves.records())
        list(source.index.leaves.leaf_indices)
        if source.has_digests:
            source.index.extents.pages
    except ValueError as e:
        is_file = root.entry() not in (None, "directory")
        file = root.url.rpartition("/")[2] if is_file else _files.INDEX
        return [Problem(None, None, file, str(e))]
    if not source.has_digests:
        raise _unverifiable(source)
    if pinned and source.index.save != pinned.index.save:
        raise pinned.error_for("")
    looks = [_check_digests, _check_extras]
    if source.is_ours:
        looks += [_settled_files, ft.partial(_zarr_json, records=records)]
    else:
        looks += [_check_files]  # Nobody adds any to a zip.
    small = _store.each(source.root, lambda look: look(source), looks)
    problems = list(it.chain.from_iterable(small))
    has_digests = source.digests.are_loaded
    stored = [r for r in records if _has_bytes(source, r)]
    nbytes = sum(r.template.chunk_count * r.template.full for r in stored)
    bar = _progress.bar("verify", nbytes, len(stored), progress)
    with _log.timed("verify") as timer, bar as advance:
        problems += _scan.scan(source, stored, has_digests, max_bytes, advance)
    how = f"{_text.rate(nbytes, timer.seconds)}: {len(problems)} problems"
    level = _log.WARNING if problems else _log.DEBUG
    _log.say(level, f"Verified `{root}`: {how}", path=root.url)
    if problems and not source.is_current():
        raise source.error_for("")
    return problems


def _unverifiable(source: Source) -> ValueError:
    return ValueError(
        f"The checkpoint at `{source.root}` cannot be verified: {source.index.layout} "
        "has no digests, so that nothing says what bytes were saved. `open` has "
        "checked that it is whole. What `ec.tree_serialise_leaves` saves can be "
        "verified."
    )


def _has_bytes(source: Source, record: LeafRecord) -> bool:
    """Whether a leaf has chunks, of its own: in a database, aliases lead to others'."""
    if source.database is not None and record.leaf_index in source.index.leaves.aliases:
        return False
    return record.template.chunk_count > 0


# ---- Small files.


def _settled_files(source: Source) -> list[Problem]:
    """The faults of the files for other readers. As `write_orbax` adds some, it waits
    for whoever writes there.

    **Raises:** `ReplacedError` if another save was committed meanwhile.
    """
    problems = _check_files(source)
    end = time.monotonic() + _LAG
    while problems and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            with source.root.lock(wait=True) as is_locked:
                problems = _check_files(source)
            if is_locked:
                break  # Nobody is at it any more.
        time.sleep(_LAG / 50)
        if not source.is_current():
            raise source.error_for("")
    if problems and not source.is_current():
        raise source.error_for("")
    return problems


def _check_files(source: Source) -> list[Problem]:
    """The faults of the files that are there for other readers."""
    others, root = source.index.others, source.root
    looks = [ft.partial(_check_file, source, *other) for other in others.items()]
    list_top = root.list_top if source.is_ours else dict
    *found, there = _store.gather(root, [*looks, list_top])
    tops = {key.partition("/")[0] for key in [source.digests_key, *others]}
    besides = _files.SIDE & (there or {}).keys() - {_files.CLAIM, *tops}
    what = "it is of another save, and other readers may take it for one of this"
    found += [Problem(None, None, top, what) for top in sorted(besides)]
    return list(filter(None, found))


def _check_file(source: Source, key: str, digest: str) -> Problem | None:
    try:
        data = source.read_other(key, _MOST)
    except (OSError, ValueError) as e:
        return Problem(None, None, key, unreadable(source.root, e))
    if data is None:
        return Problem(None, None, key, "it is missing")
    if _index.digest(data) != digest:
        return Problem(None, None, key, CHANGED)
    return None


def _check_digests(source: Source) -> list[Problem]:
    """Reads the file of digests. **Raises:** `ReplacedError`."""
    key = source.digests_key
    try:
        source.digests.load()
        size = source.root.size(key) if source.is_ours else None
        if size is not None and size > _digests.SIZE * source.index.extents.pages[-1]:
            return [Problem(None, None, key, "it has more bytes than it had")]
    except ReplacedError:
        raise
    except RuntimeError as e:
        # What else there is can still be looked at.
        return [Problem(None, None, key, str(e))]
    return []


def _check_extras(source: Source) -> list[Problem]:
    """The faults of the files of functions, and of the processes' own states."""
    reads: list[tuple[str, Callable[[], Any]]] = []
    for name, stored in source.index.functions.items():
        read = ft.partial(_extra_files.read_function, source, name)
        reads.append((_extra_files.function_key(source, stored), read))
    for process in range(len(source.index.own)):
        read = ft.partial(_extra_files.read_own, source, process)
        reads.append((_extra_files.own_key(source, process), read))

    def check_extra(key: str, read: Callable[[], Any]) -> Problem | None:
        try:
            read()
        except DamagedError as e:
            return Problem(None, None, key, str(e))
        return None

    return list(filter(None, _store.each(source.root, check_extra, *zip(*reads))))


def _zarr_json(source: Source, records: Iterable[LeafRecord]) -> list[Problem]:
    if not isinstance(source, ZarrSource):
        return []

    def check_json(record: LeafRecord) -> Problem | None:
        key = f"{source.key(record)}/zarr.json"
        good = _arrays.zarr_json(record.template)
        found = np.empty(len(good) + 1, np.uint8)
        try:
            count = source.root.read_into(key, 0, found)
            if found[:count].tobytes() != good:
                return Problem(record.name, None, key, CHANGED)
        except (OSError, ValueError) as e:
            return Problem(record.name, None, key, unreadable(source.root, e))
        return None

    look = lambda record: _store.look_twice(
        source.root, ft.partial(check_json, record), lambda problem: problem is None
    )
    return list(filter(None, _store.each(source.root, look, records)))
