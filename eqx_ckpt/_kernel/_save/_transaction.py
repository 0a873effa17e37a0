"""A transaction: what a save has written, and nobody reads before its commit."""

import abc
import contextlib
import enum
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from .._format import _files, _index, _text
from .._format._json import MAX_INDEX
from .._storage import _store
from .._storage._backend import Backend, Value
from .._storage._local import LocalDirectory
from . import _leftovers
from ._path_state import PathState, replaced_error


class Fate(enum.Enum):
    """What has become of a save whose commit has failed. In a store, what has failed
    may yet be done: it is UNKNOWN."""

    SAVED = enum.auto()
    NOT_SAVED = enum.auto()
    UNKNOWN = enum.auto()


R = TypeVar("R", bound=Backend)


class Transaction(abc.ABC, Generic[R]):
    """A save that is written in `work`, and whose commit puts it at `root`. There is a
    class for each way to publish.

    `data_key` is the directory of the save in `work`. If its `last_file` is not there
    at the commit, another writer has deleted the save. `undo` deletes what is written,
    until the save gets to its commit.
    """

    # Whether an error has come with the commit or after it, so that the save may be
    # there.
    has_failed_late = False
    last_file = ""

    def __init__(self, root: R, found: PathState, undo: contextlib.ExitStack):
        self.root = self.work = root
        self.save_id = secrets.token_hex(8)
        self.found, self.undo = found, undo
        self.data_key = f"d/{self.save_id}"

    @abc.abstractmethod
    def begin(self, held: contextlib.ExitStack) -> None:
        """Makes a place to write in, which is held until the end of `held`."""

    @abc.abstractmethod
    def fate(self, index: bytes) -> Fate:
        """What has become of the save, by what is at the root."""

    def commit(self, put_there: Callable[[], bool | None], index: bytes = b"") -> None:
        """Takes the one step that commits, and undoes the save if that has failed. An
        error says what is at the path now. The step is `put_there`: it returns False,
        or raises an error, if another writer came first."""
        undo = self.undo.pop_all()
        try:
            is_first = put_there() is not False
        except Exception as e:
            fate = Fate.UNKNOWN
            with contextlib.suppress(OSError, ValueError):
                fate = self.fate(index)
            if fate is Fate.NOT_SAVED:
                undo.close()
                with errors_before_commit(self.root):
                    raise
            self.has_failed_late = True
            if fate is Fate.SAVED:
                raise self._noted(e, self._saved())
            raise self._noted(
                e,
                f"What is at `{self.root}`, if anything, is whole: this save, or what "
                "was there before.",
            )
        if not is_first:
            undo.close()
            raise replaced_error(self.root, self.found)

    @contextlib.contextmanager
    def errors_after_commit(self) -> Iterator[None]:
        """Around what follows the commit."""
        try:
            yield
        except Exception as e:
            self.has_failed_late = True
            raise self._noted(e, self._saved())

    def _saved(self) -> str:
        """The note on an error that came after the commit."""
        return (
            f"`{self.root}` is saved and whole all the same. What failed is what "
            "follows: to sync it to the disk, the files for other readers, or the "
            "deletion of what was there before."
        )

    def _noted(self, error: Exception, note: str) -> Exception:
        """An error with a note; one of a file system says at which path, too."""
        if isinstance(error, OSError) and error.errno and not self.root.is_remote:
            error = OSError(
                error.errno,
                f"{_text_of(error)}, while a save was being put in place at "
                f"`{self.root}`.{_advice(error)}",
            )
        error.add_note(note)
        return error


class CheckpointTransaction(Transaction[R]):
    """A save of a checkpoint, whose index is published last."""

    # The stamp of the index, once that is committed.
    stamp = ""

    @abc.abstractmethod
    def publish(self, index: bytes, side: Mapping[str, bytes], durable: bool) -> None:
        """Makes what is written, with this index and these files for other readers, the
        checkpoint at the root: in one step, which goes through `commit`."""

    def accept_added_files(self) -> bool:
        """Takes the index that is there now for the one that was found, if it is of the
        same save: `write_orbax` has added files to that. Returns whether it is."""
        before, now = self.found.index, self.root.read(_files.INDEX, limit=MAX_INDEX)
        if not (before and now and _index.is_of_same_save(before.data, now.data)):
            return False
        self.found = self.found._replace(index=now)
        return True

    def fate(self, index: bytes) -> Fate:
        if self.root.is_remote:
            return Fate.UNKNOWN
        is_there = _store.is_still(self.root, _files.INDEX, Value(index))
        return Fate.SAVED if is_there else Fate.NOT_SAVED


class DirectoryTransaction(Transaction[LocalDirectory]):
    """A transaction that is written in a directory, whose lock tells others that its
    writer lives. `made_above` are the directories on the way to it that were not there
    before."""

    def make(self, directory: LocalDirectory, held: contextlib.ExitStack) -> None:
        """Makes the directory to write in, and holds its lock until `held` ends."""
        for leftover in _leftovers.beside(self.root):
            _leftovers.delete_abandoned(leftover)
        self.made_above = directory.missing()
        for missing in reversed(self.made_above):
            self.undo.callback(missing.drop_directory)
        self.undo.callback(take_back, directory)
        self.directory = directory
        locked = directory.make_locked(is_aside=self.work != self.root)
        self.stat = held.enter_context(locked)

        # If another writer deletes the directory, each write in it fails so.
        def explain(_: object, error: BaseException | None, *traceback: Any) -> None:
            if isinstance(error, FileNotFoundError) and not self.has_failed_late:
                if directory.entry() == "nothing":
                    raise replaced_error(self.root, self.found) from error

        held.push(explain)

    def lock(self, locks: contextlib.ExitStack) -> None:
        """Holds the lock of writers at the root until the end of `locks`, around the
        commit and what follows."""
        with errors_before_commit(self.root):
            try:
                locks.enter_context(self.root.lock(wait=True))
            except FileNotFoundError:
                raise replaced_error(self.root, self.found) from None
            self.check_there()

    def check_there(self) -> None:
        """**Raises:** `RuntimeError` unless what was written is there: before the
        commit, and under the lock of writers where there is one."""
        if not self.directory.is_same(self.stat) or not self.work.has(self.last_file):
            raise replaced_error(self.root, self.found)


class BesideTransaction(DirectoryTransaction):
    """A transaction that is written in a directory beside its path."""

    def __init__(self, root: Any, found: PathState, undo: contextlib.ExitStack):
        super().__init__(root, found, undo)
        self.work = _leftovers.directory_of(root, self.save_id)

    def begin(self, held: contextlib.ExitStack) -> None:
        self.make(self.work, held)


def take_back(root: Backend, key: str = "") -> None:
    """Deletes what a save has written that comes to nothing, if that can be done. Its
    error says what went wrong."""
    with contextlib.suppress(OSError, ValueError):
        root.delete(key)


def stamps_of(root: Backend, keys: Iterable[str]) -> dict[str, str]:
    """The stamps of the files among `keys` that are for other readers. `drop_unlisted`
    takes them."""
    side = sorted(_files.OTHERS.intersection(keys), reverse=True)  # `_METADATA` last.
    return dict(zip(side, _store.each(root, root.stamp, side)))


def drop_unlisted(root: Backend, stamps: dict[str, str]) -> None:
    """Deletes files for other readers in a store, the last of them first. One stays
    that has another stamp by now, or that the index lists: others have written it."""
    if not stamps:
        return
    index = root.read(_files.INDEX, limit=MAX_INDEX)
    listed = _index.others_in(index.data) if index else ()
    for key in reversed(stamps):
        if key not in listed:
            root.delete_as(key, stamps[key])


@contextlib.contextmanager
def errors_before_commit(root: Backend, nbytes: int = 0) -> Iterator[None]:
    """Around what a save of so many bytes does before its commit.

    **Raises:** an error of the system as one that names the path, and says that nothing
    is lost.
    """
    try:
        yield
    except OSError as e:
        # What is not there was deleted by another writer. A store says itself what it
        # refuses.
        if e.errno is None or e.errno == errno.ENOENT or root.is_remote:
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
    if error.errno == errno.EFBIG:
        return " Raise the limit of sizes of files (`ulimit -f`), or save elsewhere."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Choose a path that you may write to."
    if error.errno == errno.EIO:
        return " The disk may be failing or full: see the system's log (`dmesg`)."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return " Too many files are open: raise the limit (`ulimit -n`)."
    return ""
