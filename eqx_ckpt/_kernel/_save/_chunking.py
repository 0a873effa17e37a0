"""The shape of the chunks of a leaf, and their codec."""

import operator

from .._format import _blosc, _grid, _layouts, _template
from .._format._template import Template
from ._options import SaveOptions


# Leaves of up to so many bytes are not compressed: they are read in runs, as they lie.
_MAX_UNCOMPRESSED = 1 << 16


def chunk_shape(
    name: str,
    template: Template,
    options: SaveOptions,
    shard: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The chunks of a leaf: those that `chunks` gives, if it is a function and gives
    some; else by size, and within its shards if it has some."""
    shape, itemsize = template.shape, template.itemsize
    chunks, given = options.chunks, None
    if callable(chunks):
        given = chunks(name, shape, _template.dtype_of(template.stored))
        chunks = None
    if given is None:
        least = -(-template.nbytes * 2 // _template.MAX_CHUNKS)
        usual = _layouts.LAYOUTS[options.layout].chunk_bytes
        target = max(usual, least) if chunks is None else int(chunks)
        if shard is None:
            chunk = _grid.choose(shape, itemsize, target)
        else:
            chunk = _grid.choose_sharded(shape, shard, itemsize, target)
    else:
        try:
            out = tuple(map(operator.index, given))
        except TypeError:
            out = (0,)
        if len(out) != len(shape) or any(n < 1 for n in out):
            raise ValueError(
                f"`chunks` gave {given!r} for the leaf `{name}` of shape {shape}: it "
                "must give one positive length for each axis, or None."
            )
        chunk = tuple(min(n, max(1, length)) for n, length in zip(out, shape))
    count = template._replace(chunk=chunk).chunk_count
    if count > _template.MAX_CHUNKS:
        raise ValueError(
            f"The leaf `{name}` would have {count} chunks of shape {chunk}, and at "
            f"most {_template.MAX_CHUNKS} can be read. Pass larger `chunks`."
        )
    return chunk


def codec_of(name: str, template: Template, options: SaveOptions) -> str | None:
    """The codec of a leaf with its chunks, as the `compression` keyword says."""
    if options.compression is None or template.nbytes <= _MAX_UNCOMPRESSED:
        return None
    if template.full > _blosc.MAX_BYTES:
        raise ValueError(
            f"The leaf `{name}` would have chunks of {template.full} bytes, and what "
            "is compressed can have 2 GiB. Pass smaller `chunks`, or no `compression`."
        )
    return f"blosc-{options.compression}"
