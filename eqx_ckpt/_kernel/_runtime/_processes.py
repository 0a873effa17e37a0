"""The processes of this run, and the calls that they make together."""

import hashlib
import json
from collections.abc import Callable

# `jax.process_index` would start the devices; this only says how `jax.distributed` was
# initialised.
from jax._src import distributed

from ._arguments import Together
from ._conversation import conversation, Processes
from ._messages import Channel


def of_run(
    kind: str,
    path: object,
    together: Together,
    what: str,
    make_gist: Callable[[], str] = str,
) -> Processes:
    """The processes of this run, for one call that all make. It meets calls of the same
    `kind`, path and tag; `what` tells people of it, and its gist tells apart calls
    without a tag."""
    tag = together.tag
    state = distributed.global_state
    if state.client is None or count() == 1:
        return Processes()
    line = json.dumps([kind, str(path), "" if tag is None else str(tag)])
    key = f"eqx_ckpt/{hashlib.sha256(line.encode()).hexdigest()[:32]}"
    where = f"{kind}, `{path}`{tagged(tag)}"
    index = state.process_id or 0
    channel = Channel(index, count(), key, where, together.timeout, state.client)
    gist = make_gist() if tag is None else ""
    return conversation(what, gist, tag is not None, channel)


def tagged(tag: object) -> str:
    return "" if tag is None else f" (`tag={tag!r}`)"


def leads() -> bool:
    """Whether this is process 0 of the run."""
    return count() == 1 or not distributed.global_state.process_id


def count() -> int:
    """Number of processes of this run."""
    return distributed.global_state.num_processes or 1
