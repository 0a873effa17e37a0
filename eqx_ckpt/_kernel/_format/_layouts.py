"""Facts about the layouts of a checkpoint: where the files of its leaves lie."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from . import _files, _grid, _template
from ._template import Template


Layout = Literal["ocdbt", "zarr"]


class LayoutFacts(NamedTuple):
    """Facts about a layout: the `chunk_bytes` of its chunks, unless a save asks for
    others. `entry` gives, for the name of a leaf, that of its file or directory at the
    root of a checkpoint. `members` are the names in that directory, and nothing in
    one of these has such a name. Without `entry` the layout is packed: see `PACKED`.
    `is_zarr`: whether its chunks are of Zarr arrays, which other libraries open."""

    chunk_bytes: int
    entry: Callable[[str], str] | None = None
    members: frozenset[str] = frozenset()
    is_zarr: bool = False


LAYOUTS: dict[str, LayoutFacts] = {
    # One block of digests a chunk.
    "ocdbt": LayoutFacts(_grid.BLOCK, is_zarr=True),
    # Few files.
    "zarr": LayoutFacts(
        32 * 2**20, _files.directory, frozenset({"zarr.json", "c"}), is_zarr=True
    ),
}
# Layouts in which chunks of many leaves lie in numbered files in the directory of a
# save, whose name no other save has. In others each leaf has files of its own, which
# have the same names in each save.
PACKED = frozenset(x for x, facts in LAYOUTS.items() if facts.entry is None)
# What the directories of leaves have in them, whatever the layout.
MEMBERS = frozenset[str]().union(*(facts.members for facts in LAYOUTS.values()))


def unopened_by_others(layout: str, templates: Iterable[Template]) -> str:
    """Why TensorStore, and so Orbax, cannot open some of the arrays of a save by
    itself; "" if it can."""
    if not LAYOUTS[layout].is_zarr:
        return f'it does not know `layout="{layout}"`'
    return next(filter(None, map(_template.lacks_codec, templates)), "")


def digests(layout: str, save: str) -> str:
    """The key of the file of digests of a save."""
    return f"d/{save}/digests" if layout in PACKED else _files.DIGESTS
