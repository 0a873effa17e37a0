"""Bodies of lazy arrays: which array one is, what part of it, and read as what."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .._format import _template
from .._format._leaves import LeafRecord, Unreadable
from .._format._template import Template
from .._format._view import View
from .._storage import _arrays
from .._storage._backend import Backend
from .._tree._target import Target
from . import _open, _source, _wording
from ._reads import LeafRead
from ._source import Source


class LeafBody(abc.ABC):
    """The content of a `LazyArray`: all that a room may ask of one, by
    `_lazy.body_of`. Nobody changes one: another view of it is another body.

    `view` is the part of its array that it is (None: all of it), and `target` what it
    is read as. `StoredLeaf` is the body of a leaf of a checkpoint; a room that has
    another kind of array derives its own class.
    """

    __slots__ = ()

    view: View | None
    target: Target

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The dotted name of the leaf."""

    @property
    @abc.abstractmethod
    def template(self) -> Template:
        """The template of the whole array, without the view."""

    @property
    def unreadable(self) -> str | None:
        """Says why the leaf cannot be read, and what it is; None if it can be read."""
        return None

    def check_whole(self) -> None:
        """**Raises:** `ValueError` if parts of the leaf are missing, or it cannot be
        read."""

    @property
    @abc.abstractmethod
    def chunk(self) -> tuple[int, ...]:
        """The shape of the chunks, or blocks, that are read whole; () for none."""

    @property
    def chunk_size(self) -> int:
        """The number of elements that are read together, whichever are wanted."""
        return math.prod(self.chunk)

    @property
    @abc.abstractmethod
    def stored(self) -> "Sequence[StoredLeaf]":
        """The leaves of checkpoints that it is, or is computed of."""

    @property
    @abc.abstractmethod
    def identity(self) -> Any:
        """Equal for bodies that are one array when they are read, and for no others."""

    @abc.abstractmethod
    def changed(self, view: View | None, target: Target) -> "LeafBody":
        """The same array with another view, read as another target."""

    @property
    def likeness(self) -> Any:
        """Equal for leaves that a save of them stores alike; None if that is not
        known."""
        return None

    @abc.abstractmethod
    def store(self) -> Any:
        """Opens what `LazyArray.store` gives."""

    @abc.abstractmethod
    def url(self) -> str:
        """The URL that `LazyArray.url` gives."""

    @staticmethod
    def read_all(
        wanted: Sequence[Any], verify: bool, max_bytes: int | None
    ) -> list[Any]:
        """Reads arrays of a class of which no checkpoint has the bytes."""
        raise NotImplementedError


@dataclasses.dataclass(eq=False, slots=True)
class StoredLeaf(LeafBody):
    """A leaf of a checkpoint: its source, and its record there."""

    source: Source
    record: LeafRecord
    view: View | None
    target: Target

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def template(self) -> Template:
        return self.record.template

    @property
    def leaf_index(self) -> int:
        """The index of the leaf in the checkpoint."""
        return self.record.leaf_index

    @property
    def array_index(self) -> int:
        """The index of the first leaf there that is one array with it."""
        return self.source.array_index(self.record)

    @property
    def unreadable(self) -> str | None:
        part = self.record.part
        if not isinstance(part, Unreadable):
            return None
        return f"{part.what} (unreadable): {part.why}"

    def check_whole(self) -> None:
        if self.record.part is not None:
            raise _wording.error(self.record)

    @property
    def is_contiguous(self) -> bool:
        """Whether the array is one run of bytes, in no chunks."""
        return self.source.is_contiguous(self.record)

    @property
    def chunk(self) -> tuple[int, ...]:
        return () if self.is_contiguous else self.template.chunk

    @property
    def stored(self) -> "Sequence[StoredLeaf]":
        return [self]

    @property
    def identity(self) -> Any:
        array = self.source.root.url, self.source.index.save, self.array_index
        return array, self.view, self.target

    def changed(self, view: View | None, target: Target) -> "StoredLeaf":
        return StoredLeaf(self.source, self.record, view, target)

    @property
    def likeness(self) -> Any:
        if self.view is not None or self.record.part is not None:
            return None
        ids = map(id, (self.source, self.template, self.target))
        return *ids, self.is_contiguous

    def read_as(self, target: Target | None = None) -> LeafRead:
        """The read of the leaf, as another target if one is given."""
        return LeafRead(self.record, self.view, target or self.target)

    def store(self) -> Any:
        store = self.source.array(self.record)
        if (view := self.view) is not None:
            store = _arrays.view(store, view.slices(), view.arrays)
            store = _arrays.transposed(store, view.order)
        template, dtype = self.template, self.target.dtype
        if template.stored == template.dtype and dtype is not None:
            if dtype.name != template.stored and dtype.name in _template.STORED:
                store = _arrays.cast(store, dtype)
        return store

    def url(self) -> str:
        return self.source.url(self.record)

    def __reduce__(self) -> Any:
        _source.check_pickles(self.source)
        save = self.source.index.save
        return _reopen, (self.source.root, save, self.name, self.view, self.target)


def _reopen(
    root: Backend, save: str, name: str, view: View | None, target: Target
) -> StoredLeaf:
    source = _open.reopen(root, save)
    leaves = source.index.leaves
    return StoredLeaf(source, leaves.record(leaves.leaf_indices[name]), view, target)
