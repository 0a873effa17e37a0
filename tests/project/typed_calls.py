# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Calls, right and wrong, for pyright alone: it knows all arguments of each."""

from typing import Any

import eqx_ckpt as ec


def right(tree: Any, manager: ec.CheckpointManager) -> None:
    together = ec.Together(tag=3, timeout=300)
    ec.tree_serialise_leaves("c", tree, chunks=2**20, durable=False, processes=together)
    ec.async_tree_serialise_leaves("c", tree, layout="zarr", compression="zstd")
    ec.tree_deserialise_leaves("c", tree, cast=True, missing="keep", reshard="read")
    ec.load_or_init(dict, "c", filter_spec=ec.is_storable, missing="init", source="a")
    ec.from_bytes(ec.to_bytes(tree, dtype="bfloat16"), tree, processes="own")
    ec.rebuild("c", [], reshard="devices", processes=together)
    ec.materialise(tree, verify=False, max_bytes=2**30)
    ec.graft(tree, "c", [], cast=True, processes="own", progress=True)
    ec.open("c").splice(tree, rename=[("a", "b")], unexpected="ignore")
    ec.tree_deserialise_leaves("c", tree, rename=ec.rename([("a", "b")]))
    ec.convert("c", "d", compression="lz4", max_bytes=None)
    ec.CheckpointManager("run", keep=3, filter_spec=True, processes=together)
    _: tuple[Any, int] = manager.restore(tree, missing="keep", is_leaf=callable)


def wrong(tree: Any, manager: ec.CheckpointManager) -> None:
    ec.tree_serialise_leaves("c", tree, layout="hdf5")  # pyright: ignore
    ec.tree_serialise_leaves("c", tree, tag=3)  # pyright: ignore
    ec.async_tree_serialise_leaves("c", tree, max_bytes="1 GiB")  # pyright: ignore
    ec.tree_deserialise_leaves("c", tree, cast="yes")  # pyright: ignore
    ec.tree_deserialise_leaves("c", tree, broadcast=True)  # pyright: ignore
    ec.load_or_init(dict, "c", missing="drop")  # pyright: ignore
    ec.from_bytes(b"", tree, verify="no")  # pyright: ignore
    ec.to_bytes(tree, layout="zarr")  # pyright: ignore
    ec.rebuild("c", [], cast=True)  # pyright: ignore
    ec.materialise(tree, processes="mine")  # pyright: ignore
    ec.graft(tree, "c", [], timeout=3)  # pyright: ignore
    ec.open("c").splice(tree, verify=False)  # pyright: ignore
    ec.convert("c", "d", where=len)  # pyright: ignore
    ec.CheckpointManager("run", max_to_keep=3)  # pyright: ignore
    ec.CheckpointManager("run", overwrite=True)  # pyright: ignore
    manager.restore(tree, sharding=None)  # pyright: ignore
    manager.restore(tree, rename={"a": "b"})  # pyright: ignore
