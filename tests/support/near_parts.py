"""Parts of a near step, and a leaf that is read of them, without files or processes."""

from unittest import mock

import jax
import numpy as np

from eqx_ckpt._kernel._format._leaves import Leaves, LocalShards
from eqx_ckpt._kernel._format._template import Template
from eqx_ckpt._kernel._load import _match
from eqx_ckpt._kernel._load._reads import LeafRead, ReadResult
from eqx_ckpt._kernel._run._near_interface import LoadRequest
from eqx_ckpt._near import _part_choice, _parted_leaf
from eqx_ckpt._near._near_parts import Parts
from eqx_ckpt._near._part_choice import PartReport


X = np.arange(24, dtype=np.float32).reshape(8, 3)


def part(rows=(), dtype="float32", chunk=2):
    """The leaves of a part that has rows of X, in twos from each of these; or all."""
    shape = (2 * len(rows) or 8, 3)
    template = Template("a", "jax", dtype, shape, dtype, (chunk, 3))
    shards = {0: LocalShards(X.shape, tuple((row, 0) for row in rows))} if rows else {}
    return Leaves(["w"], [template], [0], parts=shards)


def parted(leaves_of):
    """X as a leaf that is read of parts, by the dtype that the first of them has."""
    whole = part(dtype=next(iter(leaves_of.values())).templates[0].dtype)
    target = _match.target_of("w", jax.ShapeDtypeStruct(X.shape, np.float32))
    wanted = LeafRead(whole.record(0), None, target)
    return _parted_leaf.plan_leaf(0, wanted, leaves_of)


def read_into(leaf, number, rows):
    """Gives the leaf what a part has of these rows. Returns how many it has read."""
    stored = np.concatenate([X[row : row + 2] for row in rows] or [X])
    views = leaf.to_come[number].read.all_views
    arrays = [stored[np.ix_(*view.picks)] for view in views]
    leaf.take(number, ReadResult(arrays, True))
    return sum(map(len, arrays))


def parts(like, file, **options):
    return Parts(LoadRequest(like, None, options), lambda number: file)


def choose(shards, readers, whole="aaaa", disks=None, count=4):
    """What is chosen of parts with these shards, a letter for each, for their readers:
    each is on the disk of its process, or on these disks."""
    rows = zip(shards, whole, readers)
    reports = {i: PartReport(1, *row) for i, row in enumerate(rows)}
    disks = disks or [[i] for i in reports]
    return _part_choice.choose_parts(disks, count, reports)


def shards_digest(rows):
    return _part_choice.report(part(rows), 1, (), 1).shards_digest


def readers(stored):
    """The processes that need a part, of two that restore arrays of (8, 8) by halves of
    the rows. The part has the first shard of each array: of these shapes."""
    names, shard = [str(i) for i in range(len(stored))], LocalShards((8, 8), ((0, 0),))
    templates = [Template("a", "jax", "int32", x, "int32", x) for x in stored]
    numbers = [*range(len(stored))]
    leaves = Leaves(names, templates, numbers, parts=dict.fromkeys(numbers, shard))
    target = _match.target_of("0", jax.ShapeDtypeStruct((8, 8), np.int32))
    wanted = [
        LeafRead(leaves.record(i, is_name_checked=True), None, target) for i in numbers
    ]
    halves = [((slice(at, at + 4), slice(0, 8)), (i,)) for i, at in enumerate((0, 4))]
    with mock.patch.object(_part_choice, "_needed_regions", lambda *args: halves):
        return _part_choice.report(leaves, 1, wanted, 2).readers
