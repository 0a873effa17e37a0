"""The parts of a near step as one tree.

A *part* is the checkpoint of one file that one process has saved: each has the names of
all leaves, that process's shards of the sharded ones, and the others whole.
(`Leaves.parts` are others: what there is of single leaves.)

For each part, the first process that has it on its disk reports what is in it. By the
reports, `_part_choice` says which parts each process reads, however many have saved
them. `Parts` loads its leaves from these: each leaf once all of its pieces have come
(`_parted_leaf`).
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from jaxtyping import PyTree

from .._kernel._errors import DamagedError, ReplacedError
from .._kernel._format._leaves import Leaves, LocalShards, Unreadable
from .._kernel._format._template import Template
from .._kernel._load import _checkpoint, _load_options
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._load_options import LoadOptions
from .._kernel._load._match import Match
from .._kernel._load._read_arrays import BUDGET, read_arrays
from .._kernel._load._read_leaves import LeafBuilder
from .._kernel._load._source import Source
from .._kernel._run import _own
from .._kernel._run._near_interface import LoadRequest
from .._kernel._runtime import _progress
from .._kernel._runtime._batching import batched
from .._kernel._storage import _backend
from . import _part_choice, _parted_leaf
from ._part_choice import PartReport
from ._parted_leaf import PartedLeaf


class Parts:
    """The parts of a near step, and what this process loads of them. `file_of` gives
    the file of a part on this disk. A part is opened when it is first needed.

    If a part cannot be opened or read, a method raises `DamagedError`, but `report`
    gives an empty report. Either way the part's number is in `unreadable`, until
    something of the part has been read. An error that only says that this process is
    out of memory or files is raised as it is, and blames no part.
    """

    def __init__(self, request: LoadRequest, file_of: Callable[[int], pathlib.Path]):
        # Each process loads alone, and "devices" is refused with that.
        options: Any = {**request.options, "processes": "own", "reshard": "auto"}
        self._like, self._file_of = request.like, file_of
        self._options = _load_options.check(LoadOptions(**options))
        self._sources: dict[int, Source] = {}
        self._matches: dict[int, Match] = {}
        self.unreadable: set[int] = set()

    @contextlib.contextmanager
    def _reading(self, part: int) -> Iterator[None]:
        """**Raises:** `DamagedError` for an error of the part that is read inside."""
        try:
            yield
        except (OSError, ReplacedError, DamagedError) as e:
            if _backend.is_exhausted(e):
                raise
            self.unreadable.add(part)
            raise DamagedError(str(e)) from e
        self.unreadable.discard(part)

    def _source(self, part: int) -> Source:
        if part not in self._sources:
            with self._reading(part):
                self._sources[part] = _opened(self._file_of(part))
        return self._sources[part]

    def _match(self, part: int) -> Match:
        """Matches `like` with the whole tree. One part is enough for that: each has the
        names of all leaves, and the shapes of the whole ones."""
        if part not in self._matches:
            source = self._source(part)
            leaves = _as_whole(source.index.leaves)
            index = dataclasses.replace(source.index, leaves=leaves)
            whole = Checkpoint(dataclasses.replace(source, index=index))
            try:
                found = _checkpoint.match_leaves(whole, self._like, self._options)
            except DamagedError:
                # Not by `_reading`: an `OSError` may be that of the caller's `source=`.
                self.unreadable.add(part)
                raise
            self._matches[part] = found
        return self._matches[part]

    def report(self, part: int, count: int) -> PartReport:
        """The report of a part, for `count` processes."""
        try:
            leaves = self._source(part).index.leaves
            with self._reading(part):
                nbytes = self._file_of(part).stat().st_size
        except DamagedError:
            return PartReport()
        try:
            wanted = self._match(part).reads.values()
        except DamagedError:
            return PartReport()
        except (KeyError, RuntimeError, TypeError, ValueError):
            wanted = ()  # `like` does not fit: the load raises that error.
        return _part_choice.report(leaves, nbytes, wanted, count)

    def own_state(self, part: int) -> bytes:
        """The own state in a part (`own=` of `CheckpointManager.save`), as it is
        stored."""
        source = self._source(part)
        with self._reading(part):
            return _own.bytes_of(Checkpoint(source), 0)

    def load(self, parts: Sequence[int]) -> PyTree:
        """The tree, read from these parts: what one lacks, another may have. The first
        says what leaves there are.

        **Raises:** also `Apart` if they lack what this process needs.
        """
        leaves_of = {part: self._source(part).index.leaves for part in parts}
        matched, options = self._match(parts[0]), self._options
        wanted = [*matched.reads.values()]
        budget = BUDGET if options.max_bytes is None else options.max_bytes
        leaves = [
            _parted_leaf.plan_leaf(i, leaf_read, leaves_of)
            for i, leaf_read in enumerate(wanted)
        ]
        builder = LeafBuilder(wanted, budget)
        nbytes = sum(leaf.read.nbytes for leaf in leaves)
        # If pieces wait in memory for those in other parts, leaves come in batches.
        batch_bytes = budget if len(parts) > 1 else nbytes
        batches = batched(leaves, lambda leaf: leaf.read.nbytes, batch_bytes)
        with _progress.bar("load", nbytes, len(leaves), options.progress) as advance:
            for batch in batches:
                with contextlib.closing(self._completed(batch, parts)) as completed:
                    for leaf in completed:
                        builder.add(leaf.read, leaf.result())
                        advance(leaf.read.nbytes, 1)
        return matched.tree(builder.finish("the near step"))

    def _completed(
        self, leaves: Sequence[PartedLeaf], parts: Sequence[int]
    ) -> Generator[PartedLeaf, None, None]:
        """Reads some leaves, part by part. Gives each leaf once all of it has come."""
        # Leaves without elements, and those of which this process needs no region.
        yield from [leaf for leaf in leaves if leaf.is_complete]
        leaf_of = {i: leaf for leaf in leaves for i in leaf.read.leaves}
        verify, max_bytes = self._options.verify, self._options.max_bytes
        for part in parts:
            reads = [leaf.to_come[part].read for leaf in leaves if part in leaf.to_come]
            if not reads:
                continue
            found = read_arrays(self._source(part), reads, verify, max_bytes)
            with self._reading(part), contextlib.closing(found) as results:
                for read, result in results:
                    leaf = leaf_of[read.leaves[0]]
                    leaf.take(part, result)
                    if leaf.is_complete:
                        # An error in the caller's loop is not raised here, so no
                        # part is blamed for it.
                        yield leaf


def _opened(file: pathlib.Path) -> Source:
    """Opens the file of a part. **Raises:** `DamagedError` if it is no checkpoint of
    ours, or if its index describes leaves that cannot exist."""
    try:
        source = _checkpoint.source_of(_checkpoint.open(file))
        source.index.check_leaves()
        _ = source.index.leaves.leaf_indices  # It raises for two leaves of one name.
    except ValueError as e:
        raise DamagedError(str(e)) from e
    if any(isinstance(x, Unreadable) for x in source.index.leaves.parts.values()):
        why = "it is of another library"
        raise DamagedError(f"The checkpoint at `{file}` cannot be read: {why}.")
    return source


def _as_whole(leaves: Leaves) -> Leaves:
    """The leaves of a part, as if it had all of each."""
    template_of, count = [*leaves.template_of], len(leaves.templates)
    added: dict[Template, int] = {}
    for leaf_index, shards in leaves.parts.items():
        assert isinstance(shards, LocalShards)
        chunk = tuple(max(1, n) for n in shards.shape)
        stored = leaves.templates[template_of[leaf_index]]
        whole = stored._replace(shape=shards.shape, chunk=chunk, codec=None)
        template_of[leaf_index] = added.setdefault(whole, count + len(added))
    templates = [*leaves.templates, *added]
    return dataclasses.replace(
        leaves, templates=templates, template_of=template_of, parts={}
    )
