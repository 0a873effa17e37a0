"""Several `.safetensors` files with an index, as on Hugging Face: `export_safetensors`
with `shard_bytes`. All files are written beside their names; then the index is deleted,
and they get their names, the new index last. So a reader finds all of one export, or
that there is none; and what fails before that leaves the one that was there."""

import contextlib
import itertools as it
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, BinaryIO, NamedTuple

import jax

from .._formats import _pieces
from .._kernel._format import _digests, _files, _grid, _index
from .._kernel._load import _published
from .._kernel._runtime._batching import batched
from .._kernel._runtime._processes import Processes
from .._kernel._save._payload import PlannedLeaf
from .._kernel._save._transaction import errors_before_commit
from .._kernel._save._writing import Destination, Sink
from .._kernel._storage import _local_files
from .._kernel._storage._backend import Backend
from .._kernel._storage._local import LocalDirectory
from .._kernel._tree import _host_copy, _sharding


INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_shard = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
# A file of which leaves may be read, and which an export may replace.
_replaced = re.compile(r"[^/]*\.safetensors(\.index\.json)?")


class TensorFile(NamedTuple):
    """A file of tensors: its key, its header, and how many it has."""

    key: str
    head: bytes
    count: int


WriteFiles = Callable[[Destination[Sink], Sequence[TensorFile]], None]


def check_target(root: Backend, overwrite: bool, sources: Set[str]) -> None:
    """**Raises:** `FileExistsError` for a place that no shards may go to, `ValueError`
    for one that leaves are read from."""
    if root.entry() not in (None, "directory", "nothing"):
        raise FileExistsError(
            f"There is a file at `{root}`, and `shard_bytes` makes several files, in a "
            "directory. It is left as it is. Choose another path."
        )
    place = root.target()
    below = (x.removeprefix(f"{place}/") for x in sources if x.startswith(f"{place}/"))
    if place in sources or any(map(_replaced.fullmatch, below)):
        raise ValueError(
            f"The tree reads leaves of what is at `{root}`, whose files would be "
            "replaced meanwhile. Choose another path."
        )
    for key in (_WHOLE, _files.INDEX):
        if root.has(key):
            raise FileExistsError(
                f"There is a `{key}` in `{root}`, which readers would take for what is "
                "there. It is left as it is. Choose another path."
            )
    if not overwrite:
        _check_free(root)


def _check_free(root: Backend) -> None:
    """**Raises:** `FileExistsError` for a place with the files of an export."""
    names = filter(_shard.fullmatch, root.list_top() or ())
    there = INDEX if root.has(INDEX) else min(names, default=None)
    if there is not None:
        raise FileExistsError(
            f"There is a `{there}` in `{root}`, and `overwrite=False`."
        )


def deal(tensors: Sequence[PlannedLeaf], most: int) -> dict[str, list[PlannedLeaf]]:
    """The tensors of each file, of at most so many bytes or of one tensor."""
    files = list(batched(tensors, lambda tensor: tensor.template.nbytes, most))
    of = f"of-{len(files):05}.safetensors"
    return {f"model-{i:05}-{of}": some for i, some in enumerate(files, 1)}


class ShardedExport(NamedTuple):
    """An export to several files: the tensors and the header of each, by its name."""

    root: Backend
    files: dict[str, list[PlannedLeaf]]
    heads: dict[str, bytes]
    overwrite: bool
    durable: bool

    def write(self, write: WriteFiles) -> None:
        """Lets all files be written, and publishes them."""
        root, number = self.root.real(), secrets.token_hex(8)
        is_new, names = root.entry() == "nothing", [*self.files]
        is_local = isinstance(root, LocalDirectory)
        # In a store, where a new name is a copy, only those that are there.
        apart = [*names, INDEX] if is_local else [*filter(root.has, names)]
        part = lambda name: f"{name}.{number}.part" if name in apart else name
        is_whole = False
        try:
            with errors_before_commit(root):
                root.make_directories([""])
                counts = {name: len(some) for name, some in self.files.items()}
                parts = [TensorFile(part(x), self.heads[x], counts[x]) for x in names]
                write(Destination(root, "", self.durable), parts)
                if is_local:
                    root.write(part(INDEX), [self._encoded_index()], self.durable)
            is_whole = True
            self._publish(root, part)
        finally:
            _drop(root, map(part, apart if is_whole else names))
            if is_new and not is_whole:
                root.drop_directory()

    def write_together(self, run: Processes, max_bytes: int) -> None:
        """Writes as `write` does, by many processes into files that they share: each
        writes what its own devices hold, and process 0 all that is not spread. No sink
        can take that, as it gets each file once and whole, from one process."""
        if not isinstance(self.root, LocalDirectory):
            raise ValueError(
                f"`{self.root}` is no directory, and many processes write parts of one "
                "file there. Export to a local path, or in one process of a checkpoint."
            )
        root, number = self.root.real(), secrets.token_hex(8)
        assert isinstance(root, LocalDirectory)
        path, part = root.path, lambda name: f"{name}.{number}.part"

        def begin(digests: list[bytes]) -> bytes:
            if len(set(digests)) > 1:
                raise RuntimeError(
                    "the processes disagree about the tensors that they export."
                )
            os.makedirs(path, exist_ok=True)
            for name, tensors in self.files.items():
                size = sum(x.template.nbytes for x in tensors)
                with open(os.path.join(path, part(name)), "xb") as file:
                    file.write(self.heads[name])
                    file.truncate(file.tell() + size)
            return number.encode()

        def publish(_: list[bytes]) -> bytes:
            root.write(part(INDEX), [self._encoded_index()], self.durable)
            self._publish(root, part)
            return b""

        try:
            digest = _index.digest(b"".join(self.heads.values())).encode()
            number = run.round(digest, begin).decode()
            for name, tensors in self.files.items():
                with open(os.path.join(path, part(name)), "r+b", buffering=0) as file:
                    at = len(self.heads[name])
                    for tensor in tensors:
                        _write_own(file, at, tensor, max_bytes, run.leads)
                        at += tensor.template.nbytes
                    if self.durable:
                        _local_files.fsync(file.fileno())
            run.round(choose=publish)
        finally:
            if run.leads:
                _drop(root, map(part, [*self.files, INDEX]))

    def _publish(self, root: Backend, part: Callable[[str], str]) -> None:
        """Puts files that are whole in the place of those that were there. Where there
        are locks, other exports to the directory wait meanwhile.

        **Raises:** `FileExistsError` for one that has come since, and not `overwrite`.
        """
        with root.lock(wait=True):
            if not self.overwrite and isinstance(root, LocalDirectory):
                _check_free(root)
            old = _named(root)
            if root.has(INDEX):
                root.delete(INDEX)
            try:
                self._put(root, part)
            except OSError as e:
                if not root.has(INDEX):
                    e.add_note(f"There is no whole export at `{root}` now. Try again.")
                raise
            for name in sorted(old - self.files.keys()):
                if root.has(name):
                    root.delete(name)
            if self.durable:
                root.sync_directories([""])
                root.sync_above()

    def _put(self, root: Backend, part: Callable[[str], str]) -> None:
        """Gives all files their names, the index last."""
        if isinstance(root, LocalDirectory):
            for name in [*self.files, INDEX]:
                root.rename_over(part(name), name)
            return
        for name in self.files:
            if part(name) != name:
                root.copy(part(name), name, self.durable)
        root.write(INDEX, [self._encoded_index()])

    def _encoded_index(self) -> bytes:
        total = sum(x.template.nbytes for some in self.files.values() for x in some)
        names = {x.name: file for file, some in self.files.items() for x in some}
        value = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(names.items())),
        }
        return (json.dumps(value, indent=2) + "\n").encode()


def _named(root: Backend) -> set[str]:
    """The files that the index there names. Others were not of its export."""
    try:
        _, index = _published.read_json(root, INDEX)
    except ValueError:
        return set()
    of = index.get("weight_map")
    names = of.values() if type(of) is dict else ()
    return {x for x in names if type(x) is str and _shard.fullmatch(x)}


def _drop(root: Backend, parts: Iterable[str]) -> None:
    """Deletes what an export had not put in its place."""
    for part in filter(root.has, parts):
        with contextlib.suppress(OSError):
            root.delete(part)


def _write_own(
    file: BinaryIO, at: int, leaf: PlannedLeaf, max_bytes: int, leads: bool
) -> None:
    """Writes what this process has of a tensor that begins at a byte of a file."""
    value, t = leaf.value, leaf.template
    parts = [(_sharding.whole(t.shape), value)] * leads
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        shards = (s for s in value.addressable_shards if s.replica_id == 0)
        parts = [(_region(s.index, t.shape), s.data) for s in shards]
    for outer, data in parts:
        shape = tuple(s.stop - s.start for s in outer)
        inner = t._replace(shape=shape, chunk=tuple(max(1, n) for n in shape))
        # Elements that follow each other, of which some are in memory together.
        size = max(1, max_bytes // (4 * _host_copy.PREFETCH))
        regions = _grid.lay(
            shape, _grid.choose(shape, t.itemsize, size), t.itemsize
        ).regions
        arrays = _host_copy.to_host_by_regions(data, inner, regions)
        for region, array in zip(regions, arrays):
            starts = [o.start + r.start for o, r in zip(outer, region)]
            _put(file, at, t.shape, starts, array)


def _region(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape))


def _put(
    file: BinaryIO, at: int, shape: Sequence[int], starts: Sequence[int], part: Any
) -> None:
    """Writes a region of an array that begins at a byte of a file: the elements of its
    last axes that follow each other together."""
    if not part.size:
        return
    every = range(len(shape) + 1)
    axis = next(k for k in every if part.shape[k:] == tuple(shape[k:]))
    axis = max(0, axis - 1)
    rows = part.reshape(-1, *part.shape[axis:])
    strides = [part.dtype.itemsize * n for n in _pieces.strides_of(shape)]
    leading = it.product(*map(range, part.shape[:axis]))
    for row, place in zip(rows, leading):
        first = [a + b for a, b in it.zip_longest(starts, place, fillvalue=0)]
        offset = at + sum(a * stride for a, stride in zip(first, strides))
        data = memoryview(_digests.as_bytes(row).data)
        while data:
            done = os.pwrite(file.fileno(), data, offset)
            data, offset = data[done:], offset + done
