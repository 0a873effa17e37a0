"""Where the chunks of leaves lie, one by one."""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Sequence
from typing import Any

from . import _leaves, _packed
from ._leaves import Leaves
from ._packed import Packed
from ._schema import field, NUMBER, POSITIVE


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where leaves lie: the chunks of leaf `i` one after the other, from `offset[i]` of
    `files[file[i]]` on. A `(leaf, chunk, file, offset)` of `splits` says from which
    chunk on they lie elsewhere. `sizes` has those of the chunks of compressed leaves.
    With `layout="zarr"` there are no files of this kind, and the columns say nothing.
    """

    files: list[str]
    file: list[int]
    offset: list[int]
    splits: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    sizes: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def shifted(self, by: Sequence[int]) -> "Placement":
        """The same where what is in a file lies so far further on."""
        return dataclasses.replace(
            self,
            offset=[by[file] + at for file, at in zip(self.file, self.offset)],
            splits=[(x, c, file, by[file] + at) for x, c, file, at in self.splits],
        )

    @ft.cached_property
    def rest(self) -> dict[int, list[tuple[int, int, int]]]:
        """Of leaves that are split, the runs but the first: `(chunk, file, offset)`."""
        out: dict[int, list[tuple[int, int, int]]] = {}
        for leaf, *rest in sorted(self.splits):
            out.setdefault(leaf, []).append((rest[0], rest[1], rest[2]))
        return out

    @ft.cached_property
    def ends(self) -> dict[int, list[int]]:
        """The starts of the chunks of compressed leaves, and their ends, if all of a
        leaf followed each other."""
        sizes = self.sizes.items()
        return {leaf: [0, *it.accumulate(some)] for leaf, some in sizes}


def parse(value: dict[str, Any], leaves: Leaves, layout: str) -> Placement | Packed:
    """Where the JSON of an index says that leaves lie.

    **Raises:** `ValueError` for columns of other types, or that do not fit together.
    """
    count = len(leaves.names)
    files = field(value, "files", [str])
    if files != [str(number) for number in range(len(files))]:
        raise ValueError("the index names files that are not of this format")
    if "columns" in value:
        columns = field(value, "columns", {...: Any})
        texts = {name: _leaves.text(columns, name) for name in _packed.TEXTS}
        return _packed.parse(texts, columns, files)
    file, offset = field(value, "file", [int]), field(value, "offset", [int])
    if layout == "ocdbt":
        if not len(file) == len(offset) == count:
            raise ValueError("the columns of the index differ in length")
        pairs = leaves.aliases.items()
        if any((file[a], offset[a]) != (file[b], offset[b]) for a, b in pairs):
            raise ValueError("the index has an impossible alias")
    row = range(count), NUMBER, range(len(files)), NUMBER
    splits = list(map(tuple, field(value, "splits", [row])))
    sizes = _leaves.pairs(value, "sizes", count, [POSITIVE])
    return Placement(files, file, offset, splits, sizes)
