"""The shards of a spread array that this process has, as it saves them alone."""

from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np

from .._format import _grid
from .._format._leaves import LocalShards
from .._format._template import Template
from .._tree import _host_copy, _leaf, _sharding
from .._tree._sharding import Shards


class StoredShards(NamedTuple):
    """Shards as they are stored, one after the other along the first axis: their
    `value`, its template, and where they lie in the array. `shard` is the shape of one,
    if each is to be in chunks of its own."""

    value: Shards
    template: Template
    local: LocalShards
    shard: tuple[int, ...] | None


def is_spread(value: object) -> bool:
    """Whether other processes have shards of a leaf."""
    return isinstance(value, jax.Array) and not _leaf.is_local(value.sharding)


def local_shards(value: Any, template: Template) -> StoredShards | None:
    """The shards of a leaf that this process has; None if it has all of it."""
    if not is_spread(value):
        return None
    shards = _sharding.shards_of(value)
    rest = template.shape[value.ndim :]  # The words of a key.
    if not shards.parts:
        return _nothing(value, template)
    size = [s.stop - s.start for s in shards.regions[0]]
    if tuple(size) == value.shape:
        return None
    shape = (*size, *rest)
    starts = [
        tuple(s.start for s in region) + (0,) * len(rest) for region in shards.regions
    ]
    regions = [
        (slice(i * size[0], (i + 1) * size[0]), *_sharding.whole(shape[1:]))
        for i in range(len(starts))
    ]
    # Each shard alone: a computation with all of the array takes all processes.
    parts = [jr.key_data(x) if template.kind == "key" else x for x in shards.parts]
    if not _host_copy.on_device(value):
        parts = list(map(_host_copy.as_numpy, parts))
    stored = template._replace(shape=(len(parts) * shape[0], *shape[1:]))
    is_large = stored.nbytes // len(parts) >= _grid.LEAST
    local = LocalShards(template.shape, tuple(starts))
    shard = shape if is_large and len(parts) > 1 else None
    return StoredShards(Shards(regions, parts), stored, local, shard)


def _nothing(value: jax.Array, template: Template) -> StoredShards:
    """A region that has no elements: a process without a shard stores that.

    **Raises:** `ValueError` for a scalar, of which there is no such region.
    """
    if not value.shape:
        raise ValueError(
            "this process has no part of it, as it is a scalar on devices of other "
            "processes. Leave it out with `filter_spec`."
        )
    stored = template._replace(shape=(0, *template.shape[1:]))
    regions = [_sharding.whole(stored.shape)]
    shards = Shards(regions, [np.zeros(stored.shape, np.uint8)])
    start = (0,) * len(template.shape)
    return StoredShards(shards, stored, LocalShards(template.shape, (start,)), None)
