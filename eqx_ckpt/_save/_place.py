"""Where a save is written before it is published, and what goes wrong until then."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from .._format import _files, _index, _text
from .._format._index import Outline
from .._storage import _store
from .._storage._backend import Backend, Renames, Value
from . import _leftovers


class Found(NamedTuple):
    """The state of a path before a save. The `outline` of the checkpoint there is None
    if there is none; `keys` are those of all files, in an object store."""

    outline: Outline | None
    file: Value | None
    entries: frozenset[str]
    keys: tuple[str, ...] = ()


R = TypeVar("R", bound=Backend)


@dataclasses.dataclass
class Place(Generic[R]):
    """Where a save is written, `work`, and where it goes, `root`.

    `undo` deletes what is written, until the save gets to its commit. `made` are the
    directories that were not there before; `last` is a file that was written last.
    """

    root: R
    work: R
    save: str
    found: Found
    undo: contextlib.ExitStack
    made: list[Renames] = dataclasses.field(default_factory=list)
    last: str = ""
    # Of a directory that is written beside its path: the mode it is to have there.
    mode: int | None = None
    # Whether what has failed came with the commit, or after it.
    is_committed: bool = False
    # Whether its directory is the one that it has made.
    _is_there: Callable[[], bool] = lambda: True

    @property
    def own(self) -> str:
        """The directory of the save in `work`."""
        return f"d/{self.save}"

    def publish(self, index: bytes, side: Mapping[str, bytes], sync: bool) -> None:
        """Makes what is written, with this index and these files for other readers, the
        checkpoint at the root. See the modules of the strategies."""
        raise NotImplementedError

    @contextlib.contextmanager
    def alone(self, root: Renames, own: Renames) -> Iterator[None]:
        """Makes the directory `own` to write in, and holds its lock, which tells others
        that its writer lives."""
        for leftover in _leftovers.beside(root):
            _leftovers.delete_abandoned(leftover)
        self.made = own.missing()
        self.undo.callback(drop_empty, self.made)
        self.undo.callback(discard, own)
        with own.made(is_aside=self.work != root) as (self.mode, self._is_there):
            try:
                yield
            except FileNotFoundError as e:
                if self.is_committed or own.entry() != "nothing":
                    raise
                raise replaced(root, self.found) from e

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of writers at the root, around the commit and what follows."""
        with contextlib.ExitStack() as locked:
            with unpublished(self.root):
                try:
                    locked.enter_context(self.root.writers_lock())
                except FileNotFoundError:
                    raise replaced(self.root, self.found) from None
                self.check_there()
            yield

    def check_there(self) -> None:
        """**Raises:** `RuntimeError` unless what was written is there: before the
        commit, and under the lock of writers where there is one."""
        if not self._is_there() or self.last and not self.work.has(self.last):
            raise replaced(self.root, self.found)

    @contextlib.contextmanager
    def commit(self, index: bytes = b"") -> Iterator[contextlib.ExitStack]:
        """Around the one step that commits; yields what undoes the save, which it does
        if that step has failed. An error says what is at the path now."""
        undo = self.undo.pop_all()
        try:
            yield undo
        except Exception as e:
            is_saved = None
            with contextlib.suppress(OSError, ValueError):
                is_saved = self.is_saved(index)
            if is_saved is False:
                undo.close()
                with unpublished(self.root):
                    raise
            self.is_committed = True
            if is_saved:
                raise self._noted(e, self._saved()) from e
            there = f"What is at `{self.root}`"
            if self.found.entries:
                raise self._noted(e, f"{there} is whole: this save, or what was there.")
            raise self._noted(e, f"{there}, if anything, is whole: this save.")

    def is_saved(self, index: bytes) -> bool | None:
        """Whether the save is what is at the root. None: nobody knows."""
        if self.root.is_far:
            return None  # What has failed may yet be done.
        return _store.is_still(self.root, _files.INDEX, Value(index))

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Around what follows the commit."""
        try:
            yield
        except Exception as e:
            self.is_committed = True
            raise self._noted(e, self._saved()) from e

    def _saved(self) -> str:
        return (
            f"The checkpoint at `{self.root}` is saved and whole all the same. What "
            "failed is what follows: to sync it to the disk, the files for other "
            "readers, or the deletion of the checkpoint that was there before."
        )

    def _noted(self, error: Exception, note: str) -> Exception:
        if isinstance(error, OSError) and error.errno and not self.root.is_far:
            error = OSError(
                error.errno,
                f"{_text_of(error)}, while a save was being put in place at "
                f"`{self.root}`.{_advice(error)}",
            )
        error.add_note(note)
        return error


def drop_empty(directories: Iterable[Backend]) -> None:
    for directory in directories:
        directory.drop_directory()


def discard(root: Backend, key: str = "") -> None:
    """Deletes what is of no use any more, if that can be done."""
    with contextlib.suppress(OSError, ValueError):
        root.delete(key)


def replaced(root: Backend, found: Found) -> RuntimeError:
    now = root.read(_files.INDEX)
    if (now and now.data) == (found.file and found.file.data):
        return RuntimeError(
            f"What this save had written to `{root}` was deleted while it was being "
            "written. Nothing was saved, and the path is as it was before: save again."
        )
    if now is None:
        return RuntimeError(
            f"What was at `{root}` was deleted while this save was being written, and "
            "so was this save. Nothing is there now: save again."
        )
    return RuntimeError(
        f"The checkpoint at `{root}` was replaced by another writer while this save "
        "was being written. The other one stands; this one is discarded."
    )


def not_part(root: Backend, name: str) -> ValueError:
    return ValueError(
        f"`{root}` has `{_text.escape(name)}` in it, which is not part of the "
        "checkpoint. Nothing was deleted. Move it elsewhere."
    )


@contextlib.contextmanager
def unpublished(root: Backend, nbytes: int = 0) -> Iterator[None]:
    """Around what a save of so many bytes does before its commit.

    **Raises:** an error of the system as one that names the path, and says that nothing
    is lost.
    """
    try:
        yield
    except OSError as e:
        # What is not there was deleted by another writer. A store says itself what it
        # refuses.
        if e.errno is None or e.errno == errno.ENOENT or root.is_far:
            raise
        of = f" of {_text.size(nbytes)}" if nbytes else ""
        raise OSError(
            e.errno,
            f"{_text_of(e)}, while a save{of} was being written to `{root}`. "
            f"Nothing was saved, and the path is as it was before.{_advice(e)}",
        ) from e


def _text_of(error: OSError) -> str:
    return error.strerror or os.strerror(error.errno or 0)


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return " Make room there, or save elsewhere."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Choose a path that you may write to."
    if error.errno == errno.EIO:
        return " The disk may be failing or full: see the system's log (`dmesg`)."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return " Too many files are open: raise the limit (`ulimit -n`)."
    return ""


def own_entries(found: Found) -> set[str]:
    """The names that a checkpoint has at its path."""
    own = {*_files.SIDE, _files.SIGNATURE, "d", _files.INDEX}
    if found.outline is not None:
        own.update(map(_files.directory, found.outline.names))
    return own


def foreign(root: Renames, found: Found, entries: Mapping[str, bool]) -> list[str]:
    """The names in a directory that are no part of the checkpoint there."""

    def inside(name: str) -> Iterable[str]:
        return (root.below(name).list_top() if entries.get(name) else None) or ()

    return foreign_among(found, entries, inside)


def foreign_among(
    found: Found, entries: Iterable[str], inside: Callable[[str], Iterable[str]]
) -> list[str]:
    """As `foreign`, of names and of what is in the directories of these names."""
    out = set(entries) - own_entries(found)
    leaves: set[str] = set()
    if found.outline is not None:
        leaves.update(map(_files.directory, found.outline.names))
    for name in {"d", _files.SIGNATURE} | leaves:
        for entry in inside(name):
            of_leaf = name in leaves and entry in ("zarr.json", "c")
            if not of_leaf and not (name == "d" and _index.is_save_id(entry)):
                out.add(f"{name}/{entry}")
    return sorted(out)
