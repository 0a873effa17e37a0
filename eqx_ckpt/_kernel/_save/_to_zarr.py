"""`layout="zarr"`: a Zarr v3 array of its own for each leaf, in a directory of its
name.
"""

import functools as ft
from collections.abc import Iterable, Sequence

from .._format import _files, _index, _placement
from .._runtime import _threads
from .._storage import _arrays
from .._storage._backend import Backend
from . import _tree_spec
from ._payload import PlannedLeaf
from ._tree_spec import TreeSpec
from ._writing import DataFiles, Destination, Ends, RunsOfFiles, WriteTask, Written


def write(task: WriteTask, into: Destination[Backend]) -> RunsOfFiles:
    """Writes the chunks of this process, each as a file: there are no files of runs."""
    data, root, sync = task.data, into.work, into.sync

    def write_run(leaf_index: int, numbers: range) -> None:
        parent = _files.directory(task.leaves[leaf_index].name)
        keys_below = data.grids[leaf_index].keys[numbers.start : numbers.stop]
        keys = [f"{parent}/{key}" for key in keys_below]
        parents = {key.rpartition("/")[0] for key in keys}
        root.make_directories(parents or [parent])
        for key, pieces in zip(keys, data.chunks(leaf_index, numbers)):
            root.write(key, pieces, sync)
        if sync:
            # The directory of the leaf itself has more to come.
            root.sync_directories(_with_those_above(parents) - {parent})

    runs = [run for _, runs in task.files_of(task.process) for run in runs]
    jobs = [ft.partial(write_run, *run) for run in runs]
    # A system that syncs several files at a time writes its journal once for them.
    waiting = root.is_remote or sync or task.requests > 1
    _threads.gather(jobs, task.threads(), waiting=waiting)
    return []


def files_of_process(
    task: WriteTask, process: int, ends: Ends, into: Destination[Backend]
) -> RunsOfFiles:
    """Checks that the chunks of another process are there, as there are no files of
    runs. **Raises:** `ValueError` unless they are."""
    for _, runs in task.files_of(process):
        for leaf_index, numbers in runs:
            parent = _files.directory(task.leaves[leaf_index].name)
            for key in task.data.grids[leaf_index].keys[numbers.start : numbers.stop]:
                into.work.check_range(f"{parent}/{key}", 1)
    return []


def finish(task: WriteTask, files: RunsOfFiles, into: Destination[Backend]) -> Written:
    """Writes the rest of a save whose chunks are all there."""
    root, sync = into.work, into.sync
    if task.count > 1:
        root.delete("d")  # It had the notes of what processes have written.

    def write_metadata(leaf: PlannedLeaf) -> None:
        parent = _files.directory(leaf.name)
        root.make_directories([parent])
        blob = _arrays.zarr_json(leaf.template)
        root.write(f"{parent}/zarr.json", [blob], sync)
        parents: set[str] = set()
        if leaf.alias is not None:
            origin = _files.directory(task.leaves[leaf.alias].name)
            keys = task.data.grids[leaf.alias].keys
            parents = {f"{parent}/{key}".rpartition("/")[0] for key in keys}
            root.make_directories(parents)
            for key in keys:
                root.copy(f"{origin}/{key}", f"{parent}/{key}", sync)
        if sync:
            root.sync_directories(_with_those_above(parents) | {parent})

    jobs = [ft.partial(write_metadata, leaf) for leaf in task.leaves]
    _threads.gather(jobs, waiting=root.is_remote or sync)
    digests = bytes(task.data.digests)
    root.write(_files.DIGESTS, [digests], sync)
    side = {"zarr.json": _group(task.spec)}
    page_digest = _index.digest(digests)
    return Written(_NOWHERE, page_digest, {}, side=side, has_planned_places=True)


# The dtypes of stored arrays that zarr-python can decode.
_zarr_dtypes = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128".split()
)


@_tree_spec.remembered
def _group(spec: TreeSpec) -> bytes:
    """The JSON of the root group, whose consolidated metadata lists what zarr-python
    can decode."""
    blobs = {
        number: _arrays.zarr_json(template._replace(keys="")).rstrip()
        for number, template in enumerate(spec.templates)
        if template.stored in _zarr_dtypes
    }
    members = [
        b'"%b":%b' % (_files.directory(name).encode(), blobs[number])
        for name, number in zip(spec.names, spec.template_of)
        if number in blobs
    ]
    return (
        b'{"zarr_format":3,"node_type":"group","attributes":{},'
        b'"consolidated_metadata":{"kind":"inline","must_understand":false,'
        b'"metadata":{%b}}}' % b",".join(members)
    )


def upper_bound(
    leaves: Sequence[PlannedLeaf], spec: TreeSpec, processes: int, is_linked: bool
) -> Written:
    return Written(_NOWHERE, "0" * 32, {})


_NOWHERE = DataFiles([], _placement.NOWHERE)


def _with_those_above(keys: Iterable[str]) -> set[str]:
    """Directories, and those that lead to them."""
    return {key[:i] for key in keys for i, c in enumerate(f"{key}/") if c == "/"}
