"""Which parts of a near step each process reads, by reports of what is in the parts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from .._kernel._format._leaves import Leaves, LocalShards, Region
from .._kernel._load._reads import LeafRead
from .._kernel._tree import _leaf, _sharding
from .._kernel._tree._target import Target


class PartReport(NamedTuple):
    """A report of a part. That of a part that cannot be read is empty.

    - `nbytes`: the size of its file.
    - `shards_digest`: that of the records of the leaves of which it has shards. Parts
      with the same regions have the same digest.
    - `whole_digest`: that of the names of the leaves that it has whole.
    - `readers`: the processes that need some of its shards.
    """

    nbytes: int = 0
    shards_digest: str = ""
    whole_digest: str = ""
    readers: Sequence[int] = ()


def report(
    leaves: Leaves, nbytes: int, wanted: Iterable[LeafRead], count: int
) -> PartReport:
    """The report of a part with these leaves. `wanted`: all that a load by `count`
    processes reads."""
    sharded = []
    for leaf_index, shards in sorted(leaves.parts.items()):
        assert isinstance(shards, LocalShards)
        # The devices of a process have its shards in any order.
        shards = shards._replace(starts=tuple(sorted(shards.starts)))
        record = leaves.record(leaf_index, is_name_checked=True)
        sharded.append(record._replace(part=shards))
    whole = [name for i, name in enumerate(leaves.names) if i not in leaves.parts]
    readers = sorted(_readers(leaves, wanted, count))
    return PartReport(nbytes, _digest(sharded), _digest(whole), readers)


def choose_parts(
    processes_with: Sequence[Sequence[int]],
    count: int,
    reports: Mapping[int, PartReport],
) -> list[list[int]]:
    """Chooses the parts that each of `count` processes reads. `processes_with` says for
    each part on whose disks it is. The number of a part is that of the process that has
    saved it: if as many processes load, each reads its own."""
    has_own = len(reports) == count
    are_alike = len({report.whole_digest for report in reports.values()}) == 1

    def parts_for(process: int) -> list[int]:
        """The parts that a process reads: its own, if it has one, and one of each other
        set of shards that it needs; all, if parts differ in what they have whole."""
        own = process if has_own else None
        # A process's own part comes first, then parts on its disk. Among equal ones
        # each process begins with another, to spread the reads.
        preference = lambda part: (
            part != own,
            process not in processes_with[part],
            (part - process) % len(reports),
        )
        order = sorted(reports, key=preference)
        # A leaf that only some parts have whole may be nowhere else. A part that could
        # not be read for its report differs from others.
        if not are_alike:
            return order
        chosen: dict[str, int] = {}
        for part in order:
            if part == own or process in reports[part].readers:
                chosen.setdefault(reports[part].shards_digest, part)
        # The names of all leaves are in each part: one is needed at least.
        return [*chosen.values()] or order[:1]

    return [parts_for(process) for process in range(count)]


def _readers(leaves: Leaves, wanted: Iterable[LeafRead], count: int) -> set[int]:
    """The processes whose devices need some of the shards that a part has. Leaves that
    it has whole do not count: all parts have them whole, or all are read."""
    found: set[int] = set()
    # Of leaves with the same shards, of one size, for one target, one is looked at.
    seen = set()
    for one in wanted:
        leaf_index = leaves.leaf_indices[one.record.name]
        shards = leaves.parts.get(leaf_index)
        stored = leaves.templates[leaves.template_of[leaf_index]].shape
        key = shards, stored, id(one.target)
        if not isinstance(shards, LocalShards) or key in seen:
            continue
        seen.add(key)
        held = [region for _, region in shards.regions(stored)]
        for region, processes in _needed_regions(one.target, count):
            if not found.issuperset(processes):
                if any(_overlap(region, x) for x in held):
                    found.update(processes)
    return found


def _needed_regions(target: Target, count: int) -> _sharding.Holders:
    """The regions of a leaf that processes need, each with those processes."""
    sharding = target.sharding
    if sharding is None or _leaf.is_local(sharding):
        return (((), tuple(range(count))),)
    return _sharding.holders(sharding, target.shape)


def _overlap(a: Region, b: Region) -> bool:
    return all(x.start < y.stop and y.start < x.stop for x, y in zip(a, b))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())
