"""`layout="ocdbt"`: the chunks of all leaves in a few files, and a database whose
values lie in them. See FORMAT.md.
"""

import functools as ft
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .._format import _columns, _grid, _index, _ocdbt, _packed, _template
from .._format._index import Placement
from .._format._packed import Runs
from .._runtime import _threads
from .._storage import _arrays
from .._storage._backend import Backend, Sink
from . import _assign, _form, _layout, _payload
from ._form import Form
from ._layout import Destination, Ends, Files, Layout, Save, Stretch, Written
from ._payload import PlannedLeaf


# Small leaves of one template that follow each other are written together, up to so
# many bytes.
_TOGETHER = 2**20


def write(save: Save, into: Destination[Sink]) -> Files:
    """Writes the data files of this process."""
    form, own = save.form, save.own(save.index)
    if form.is_coded:
        files = {number: _batches(form, runs) for number, runs in own}
    else:
        laid = _laid(form, save.deal, save.index)
        files = {number: batches for (number, _), batches in zip(own, laid)}
    return _threads.gather(
        [ft.partial(_write_file, save, into, *file) for file in files.items()],
        save.threads(save.limits.most or 0),
        # While some files are synced, what goes into others is compressed.
        waiting=into.work.is_far or (form.is_coded and into.durable),
    )


# Stretches that follow each other in a file, and are written together.
_Batch = list[Stretch]


@_form.remembered
def _laid(form: Form, deal: _assign.Deal, process: int) -> list[list[_Batch]]:
    """The batches of the files of a process, where nothing is compressed: there they
    are known before anything is written."""
    own = [runs for runs, owner in zip(deal.files, deal.owner) if owner == process]
    return [list(_batches(form, runs)) for runs in own]


def _batches(form: Form, runs: _assign.Runs) -> Iterator[_Batch]:
    """The stretches of a file: small leaves of one template together, others each by
    itself. The ends of one by itself may come only after it was taken, and before the
    next batch is."""
    most = [_TOGETHER // t.full if t.full else 0 for t in form.templates]
    alone = [t.codec is not None or not _payload.is_small(t) for t in form.templates]
    last, batch = -1, []
    for stretch in _lay(form, runs):
        number = form.numbers[stretch.place]
        if batch and (number != last or len(batch) >= most[number]):
            yield batch
            batch = []
        if alone[number] or not most[number]:
            yield [stretch]
            continue
        last = number
        batch.append(stretch)
    if batch:
        yield batch


def _write_file(
    save: Save, into: Destination[Sink], number: int, batches: Iterable[_Batch]
) -> list[Stretch]:
    data = save.data
    written: list[Stretch] = []

    def buffers() -> Iterator[bytes]:
        at = 0
        for batch in batches:
            written.extend(batch)
            place, numbers, offset, own = batch[0]
            if offset != at:
                yield bytes(offset - at)
            if len(batch) > 1:
                yield from data.together([x.place for x in batch], _packed.ALIGN)
            elif own is None:
                yield from data.chunks(place, numbers)
            else:
                end = 0
                for chunk in data.chunks(place, numbers):
                    yield chunk
                    end += len(chunk)
                    own.append(end)
            at = batch[-1].stop(data.grids[place].full)

    into.write(f"{into.own}/{number}", buffers())
    return written


def _lay(form: Form, runs: _assign.Runs, ends: Ends | None = None) -> Iterator[Stretch]:
    """Where the runs of a file lie in it. Those of encoded chunks may be given their
    `ends` only after their stretch was taken, and before the next one is."""
    templates = [(t.full, t.codec is None) for t in form.templates]
    at = 0
    for i, (place, numbers) in enumerate(runs):
        full, is_plain = templates[form.numbers[place]]
        own = None if is_plain else []
        # What has no bytes needs no padding, which nothing might follow.
        offset = -(-at // _packed.ALIGN) * _packed.ALIGN if numbers else at
        stretch = Stretch(place, numbers, offset, own if ends is None else ends[i])
        yield stretch
        at = stretch.stop(full)


def see(save: Save, process: int, ends: Ends, into: Destination[Backend]) -> Files:
    """The files that another process has written.

    **Raises:** `ValueError` unless they are there, and whole.
    """
    files: Files = []
    rest = iter(ends)
    for number, runs in save.own(process):
        own = list(itertools.islice(rest, len(runs)))
        if len(own) < len(runs):
            raise ValueError("it has written something else than was planned")
        files.append(list(_lay(save.form, runs, own)))
        last = files[-1][-1]
        stop = last.stop(save.data.grids[last.place].full)
        into.work.check_range(f"{into.own}/{number}", stop)
    return files


def finish(save: Save, files: Files, into: Destination[Sink]) -> Written:
    """Writes the rest of a save whose data files are all there: the database."""
    base = into.own
    files = [*save.kept.files, *files]
    names = [str(number) for number in range(len(files))]
    fixed = tuple(map(tuple, files))
    # Chunks of a form lie alike in each save, unless they are encoded.
    make = _make_database if save.form.is_coded else _database
    database, top, file, offset = make(save.form, fixed)
    own = {
        f"{base}/tree": database,
        f"{base}/manifest.ocdbt": _ocdbt.manifest(top, "tree"),
    }
    for key, value in own.items():
        into.write(key, [value])
    others = {key: _index.digest(value) for key, value in own.items()}
    if _columns.needed(len(save.leaves), sum(len(g.keys) for g in save.data.grids)):
        pages = [b"".join(save.data.rows(*run[:2]) for run in runs) for runs in files]
        placement = _packed.pack(names, *_runs(save, files))
    else:
        pages = [save.data.digests()]
        placement = _listed(names, list(file), list(offset), files)
    into.write(f"{base}/digests", pages)
    # The same database from the root of the checkpoint.
    side = {"manifest.ocdbt": _ocdbt.manifest(top, "tree", base + "/")}
    digests = "".join(map(_index.digest, pages))
    return Written(placement, digests, others, side)


def _listed(
    names: list[str], file: list[int], offset: list[int], files: Files
) -> Placement:
    """Where the chunks lie, one by one."""
    splits = [
        (stretch.place, stretch.numbers.start, number, stretch.offset)
        for number, stretches in enumerate(files)
        for stretch in stretches
        if stretch.numbers.start > 0
    ]
    sizes: dict[int, list[int]] = {}
    for stretch in sorted(itertools.chain(*files), key=_by_chunk):
        sizes.setdefault(stretch.place, []).extend(_steps(stretch))
    sizes = {place: some for place, some in sizes.items() if some}
    return Placement(names, file, offset, splits, sizes)


def _runs(save: Save, files: Files) -> tuple[Runs, int, np.ndarray]:
    """The runs of chunks in files, how many leaves there are, and the sizes of
    compressed chunks."""
    grids = save.data.grids
    rows = [
        (
            place,
            numbers.start,
            numbers.stop,
            offset,
            stretch.stop(grids[place].full) - offset,
        )
        for stretch in itertools.chain(*files)
        for place, numbers, offset, _ in [stretch]
    ]
    leaf, first, stop, offset, nbytes = np.asarray(rows, np.int64).reshape(-1, 5).T
    counts = np.asarray(list(map(len, files)), np.int64)
    sizes = [n for stretch in itertools.chain(*files) for n in _steps(stretch)]
    runs = Runs(leaf, first, stop, offset, nbytes, counts)
    return runs, len(save.leaves), np.asarray(sizes, np.int64)


def _steps(stretch: Stretch) -> Iterator[int]:
    """The sizes of the chunks of a stretch, if they are compressed."""
    ends = stretch.ends or []
    return (stop - start for stop, start in zip(ends, [0, *ends]))


def _by_chunk(stretch: Stretch) -> tuple[int, int]:
    return stretch.place, stretch.numbers.start


def _make_database(
    form: Form, files: tuple[tuple[Stretch, ...], ...]
) -> tuple[bytes, _ocdbt.Subtree, list[int], list[int]]:
    """The zarr.json files and the nodes of the database, its root, and where each leaf
    starts."""
    entries, blobs, file, offset = _entries(form, files)
    names = [*map(str, range(len(files))), "tree"]
    nodes, top = _ocdbt.tree(entries, names, "tree", len(blobs))
    return blobs + nodes, top, file, offset


_database = _form.remembered(_make_database)


def _entries(
    form: Form, files: Sequence[Sequence[Stretch]]
) -> tuple[_ocdbt.Entries, bytes, list[int], list[int]]:
    """The keys of the database, the zarr.json files, and where each leaf starts."""
    count = len(form.names)
    runs: list[list[tuple[int, Stretch]]] = [[] for _ in range(count)]
    for number, stretches in enumerate(files):
        for stretch in stretches:
            runs[stretch.place].append((number, stretch))
    for run in runs:
        run.sort(key=lambda r: r[1].numbers.start)
    for place, alias in form.aliases:
        runs[place] = runs[alias]
    file = [run[0][0] for run in runs]
    offset = [run[0][1].offset for run in runs]
    blobs = list(map(_arrays.zarr_json, form.templates))
    ends = list(itertools.accumulate(map(len, blobs), initial=0))
    # No name with a slash after it begins another one, so all keys of a leaf follow
    # each other, its chunks ("c...") before its zarr.json.
    names = [name.encode() + b"/" for name in form.names]
    grids = [_grid.lay(t.shape, t.chunk, t.itemsize) for t in form.templates]
    suffixes = [[key.encode() for key in grid.keys] for grid in grids]
    tree = len(files)
    entries = _ocdbt.Entries([], [], [], [])
    keys, numbers, offsets, lengths = entries
    for place in sorted(range(count), key=names.__getitem__):
        name, run, kind = names[place], runs[place], form.numbers[place]
        grid, suffix = grids[kind], suffixes[kind]
        number, stretch = run[0]
        for i in grid.order:
            if i not in stretch.numbers:
                number, stretch = next(r for r in run if i in r[1].numbers)
            start, length = stretch.find(i, grid.full)
            keys.append(name + suffix[i])
            numbers.append(number)
            offsets.append(start)
            lengths.append(length)
        keys.append(name + b"zarr.json")
        numbers.append(tree)
        offsets.append(ends[kind])
        lengths.append(len(blobs[kind]))
    return entries, b"".join(blobs), file, offset


def longest(leaves: Sequence[PlannedLeaf], processes: int) -> Written:
    own = [(i, x.template, x.owners) for i, x in enumerate(leaves) if x.alias is None]
    counts = [t.chunk_count for _, t, _ in own]
    total = sum(count * t.full + _packed.ALIGN for count, (_, t, _) in zip(counts, own))
    most = _assign.most_files(total, processes, _layout.FAR_FILE)
    files = min(most, sum(counts) + len(own))
    # Wherever one file ends and another begins, and one process and another.
    splits = files + sum(len(owners) - 1 for _, _, owners in own if owners)
    last = len(leaves), max(counts, default=0), files, total
    sizes = {
        place: [_template.most_encoded(t.full)] * count
        for count, (place, t, _) in zip(counts, own)
        if t.codec is not None
    }
    names = [str(number) for number in range(files)]
    placement = Placement(
        names,
        [files] * len(leaves),
        [total] * len(leaves),
        [last] * min(splits, sum(counts)),
        sizes,
    )
    return Written(
        placement=placement,
        digests="0" * 32,
        others={f"d/{'0' * 16}/{key}": "0" * 32 for key in ("tree", "manifest.ocdbt")},
        side={"manifest.ocdbt": b""},
    )


LAYOUT = Layout(write, see, finish, longest)
