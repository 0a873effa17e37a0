"""Facts about the layouts of a checkpoint: where the files of its leaves lie."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from . import _files, _grid


Layout = Literal["ocdbt", "zarr"]


class LayoutFacts(NamedTuple):
    """Facts about a layout: the `chunk_bytes` of its chunks, unless a save asks for
    others. `entry` gives, for the name of a leaf, that of its file or directory at the
    root of a checkpoint. `members` are the names in that directory, and nothing in
    one of these has such a name. Without `entry` the layout is packed: see `PACKED`."""

    chunk_bytes: int
    entry: Callable[[str], str] | None = None
    members: frozenset[str] = frozenset()


LAYOUTS: dict[str, LayoutFacts] = {
    # One block of digests a chunk.
    "ocdbt": LayoutFacts(_grid.BLOCK),
    # Few files.
    "zarr": LayoutFacts(32 * 2**20, _files.directory, frozenset({"zarr.json", "c"})),
}
# Layouts in which chunks of many leaves lie in numbered files in the directory of a
# save, whose name no other save has. In others each leaf has files of its own, which
# have the same names in each save.
PACKED = frozenset(x for x, facts in LAYOUTS.items() if facts.entry is None)
# What the directories of leaves have in them, whatever the layout.
MEMBERS = frozenset[str]().union(*(facts.members for facts in LAYOUTS.values()))


def digests(layout: str, save: str) -> str:
    """The key of the file of digests of a save."""
    return f"d/{save}/digests" if layout in PACKED else _files.DIGESTS
