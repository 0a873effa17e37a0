"""Whether all processes of a run are about to save the same tree."""

import json
import zlib
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._format import _index
from .._runtime import _processes
from .._runtime._processes import Processes
from .._tree import _host_copy, _leaf, _sharding
from . import _payload
from ._lazies import LazySource
from ._payload import PlannedLeaf
from ._plan import Plan


_PLAIN = (bool, int, float, complex, np.generic)


def gist(pytree: PyTree, metadata: object) -> str:
    """The plain numbers of a tree, such as that of the step, and the metadata, as a
    digest: they tell one save from the next before anything is looked at, or fails."""
    try:
        plain = [x for x in jtu.tree_leaves(pytree) if isinstance(x, _PLAIN)]
        return _index.digest(repr((plain, metadata)).encode())
    except Exception:  # It fails for what the save will say is wrong.
        return ""


def digest_of_plan(plan: Plan) -> bytes:
    """The digest of all that this process is about to save."""
    return _index.digest(json.dumps(_account(plan)).encode()).encode()


def raise_disagreement(plan: Plan, processes: Processes) -> None:
    """**Raises:** `RuntimeError` that says which process has what else than process 0.

    All processes call this when their accounts differ.
    """
    own = zlib.compress(json.dumps(_account(plan)).encode())

    def compare(words: list[bytes]) -> bytes:
        accounts = [json.loads(zlib.decompress(word)) for word in words]
        for index, other in enumerate(accounts):
            if other != accounts[0]:
                raise RuntimeError(_difference(index, accounts[0], other))
        raise RuntimeError("the processes disagree about what they save.")

    processes.round(own, compare)


def _account(plan: Plan) -> dict[str, Any]:
    """All that has to be the same in each process, by what it is called in errors."""
    account = {
        "the path": plan.root.url,
        "the layout": plan.options.layout,
        "the metadata": plan.options.metadata,
        "the base": plan.options.base,
        "static fields": plan.facts.record.values,
        "the nodes of the tree": plan.facts.record.encoded,
        "whether it has a state of its own (`own`)": len(plan.options.own) > 0,
        "the leaves": [leaf.name for leaf in plan.leaves],
    }
    # Many leaves have the same ones.
    alike = {id(x): x for leaf in plan.leaves for x in (leaf.owners, leaf.template)}
    text = {key: repr(x) for key, x in alike.items()}
    digests = {key: _index.digest(x.encode()) for key, x in text.items()}
    for leaf in plan.leaves:
        is_shared = leaf.owners is not None
        shards = digests[id(leaf.owners)] if is_shared else _digest(leaf)
        count = None if leaf.owners is None else _count(leaf.value)
        account[f"the leaf `{leaf.name}`"] = [
            text[id(leaf.template)],
            leaf.alias,
            [shards, count],
        ]
    return account


def _count(value: object) -> int | None:
    """An integer that all processes have, such as an optimiser's count of its steps. It
    says of what step a tree is; other numbers may differ in their last bits."""
    if not isinstance(value, jax.Array) or _leaf.is_key(value):
        return None
    if value.shape or value.dtype.kind not in "iu" or not value.is_fully_replicated:
        return None
    if len(_sharding.processes(value.sharding)) < _processes.count():
        return None
    return int(_host_copy.as_numpy(value.addressable_data(0)))


def _digest(leaf: PlannedLeaf) -> str:
    """Digest of a leaf that each process has its own of."""
    if leaf.alias is not None:
        return ""
    if isinstance(leaf.value, LazySource):
        return leaf.value.account
    return _index.digest(_payload.whole(leaf))


def _difference(index: int, ours: dict[str, Any], other: dict[str, Any]) -> str:
    names, others = ours["the leaves"], other["the leaves"]
    if names != others:
        known, known_there = set(names), set(others)
        extra = [f"`{n}`" for n in others if n not in known]
        lacks = [f"`{n}`" for n in names if n not in known_there]
        parts = [
            f"{what} {', '.join(some[:5])}{' and more' if len(some) > 5 else ''}"
            for what, some in (("also has", extra), ("lacks", lacks))
            if some
        ]
        return (
            f"process {index} saves other leaves than process 0: it "
            f"{' and '.join(parts) or 'has them in another order'}. All processes have "
            "to save the same tree. Nothing was saved."
        )
    what = next(key for key in ours if ours[key] != other[key])
    if not what.startswith("the leaf"):
        return (
            f"process {index} has something else for {what} than process 0. Nothing "
            "was saved."
        )
    same_kind = ours[what][:2] == other[what][:2]
    return (
        f"{what} differs between process 0 and process {index}"
        + (
            ": each has other values, or its shards lie elsewhere. What is not a "
            "sharded array of several processes has to be the same in each, and an "
            "array on devices of one process is taken for such: shard it over "
            "several, or leave it out with `filter_spec`."
            if same_kind
            else f": {ours[what][0]} and {other[what][0]}."
        )
        + " Nothing was saved."
    )
