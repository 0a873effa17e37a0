"""What other libraries have under other names, for the errors about unknown names.

One table for attributes and one for arguments. Each row has the name of a thing here,
and the names that Orbax, PyTorch, safetensors, Lightning, flax and Hugging Face have
for it.
"""

import difflib
import functools as ft
import itertools as it
from collections.abc import Iterable
from typing import Any


# By the module or class whose attributes they would be.
_ATTRIBUTES = {
    "eqx_ckpt": {
        "`tree_serialise_leaves`": "save save_pytree save_model save_checkpointables "
        "tree_serialize_leaves tree_save serialise serialize dump PyTreeSave "
        "StandardSave",
        "`async_tree_serialise_leaves`": "async_save save_async save_pytree_async "
        "AsyncCheckpointer async_tree_serialize_leaves",
        "`tree_deserialise_leaves`": "load load_pytree load_model load_checkpointables "
        "tree_deserialize_leaves tree_load deserialise deserialize PyTreeRestore "
        "StandardRestore",
        "`CheckpointManager`": "restore save_checkpoint load_checkpoint Checkpointer "
        "restore_checkpoint PyTreeCheckpointer StandardCheckpointer ModelCheckpoint "
        "CheckpointManagerOptions CheckpointHandler",
        "`CheckpointManager(run).latest()`": "latest latest_step latest_checkpoint",
        "`open`": "load_file safe_open open_checkpoint inspect info ls",
        "`open(path).metadata`": "metadata pytree_metadata load_metadata",
        '`open("hf://org/name")`': "from_pretrained hf_hub_download",
        '`convert(path, "hf://org/name")`': "push_to_hub save_pretrained",
        "`export_safetensors`": "save_file export",
        "`from_state_dict`": "load_state_dict restore_state_dict",
        "`to_state_dict`": "state_dict get_state_dict",
        "`to_bytes`": "dumps msgpack_serialize",
        "`from_bytes`": "loads msgpack_restore",
        "`materialise`": "materialize",
        "`merge`": "average ema",
        "`delete`": "remove",
    },
    "CheckpointManager": {
        "`latest()`": "latest_step last last_step latest_checkpoint",
        "`steps()`": "all_steps checkpoints",
        "`best()`": "best_step best_model_path",
        "`history()`": "metrics",
        "`restore(like)`": "load load_checkpoint restore_latest load_pytree",
        "`save(step, tree)`": "save_checkpoint save_pytree save_pytree_async",
        "`wait()`": "wait_until_finished check_for_errors block_until_ready",
        "`should_stop()`": "reached_preemption",
        "the argument `every`, which `save` goes by": "should_save",
        "`path(step)`": "directory step_path",
        "`ec.open(manager.path(step))`": "item_metadata metadata pytree_metadata",
        "the end of the `with`": "close finish",
        "`steps()`, which looks each time": "reload",
    },
    "Checkpoint": {
        "`ec.tree_deserialise_leaves(ckpt, like)`": "load restore load_state_dict",
        "`ec.materialise(ckpt.tree)`": "read state_dict",
        "`ckpt[name].read()`": "get_tensor tensor array leaf",
        "`ckpt[name]`, which you can slice": "get_slice",
        "`ckpt.keys()`": "names tensors leaf_names",
        '`ckpt.metadata["step"]`': "step",
        '`ckpt.metadata["metrics"]`': "metrics",
    },
    "LazyArray": {
        "`.read()`": "load compute get value numpy to_numpy copy block_until_ready",
        "a method of what `.read()` gives, or a function by `ec.lazy`": "reshape ravel "
        "flatten squeeze sum mean std var max min dot item tolist",
    },
}

# By an argument that the call has, or by the call itself.
_ARGUMENTS = {
    # Loads.
    "unexpected": {
        '`unexpected="ignore"`, with `missing="keep"` for what is not there': "strict "
        "partial partial_restore allow_partial allow_missing ignore_missing",
    },
    "like": {
        "that of each leaf of `like`, as `ec.skeleton(..., sharding=...)` sets it": (
            "sharding shardings mesh partition_specs rules"
        ),
        "the device of each leaf of `like`; without one, it is JAX's default device": (
            "map_location device devices device_map"
        ),
        "`like`": "target template abstract_tree abstract_pytree abstract_state item "
        "items args restore_args tree pytree state",
        "what every load does: no code of a file is run": "weights_only",
        "`ec.open`, whose leaves are lazy": "mmap mmap_mode lazy",
    },
    "pairs": {
        "`fresh` for what the checkpoint lacks, and `drop` for what the model lacks": (
            "strict partial partial_restore allow_partial allow_missing ignore_missing"
        ),
        "that of each leaf of `model`, as `ec.skeleton(..., sharding=...)` sets it": (
            "sharding shardings mesh partition_specs rules"
        ),
    },
    "cast": {
        "the dtype of each leaf of `like`, with `cast=True`": "dtype dtypes cast_dtype "
        "cast_to restore_dtype torch_dtype param_dtype",
    },
    "rename": {"`rename`": "transforms key_mapping name_map fallback"},
    "reshard": {'`reshard="devices"`': "broadcast"},
    # Saves.
    "overwrite": {"`overwrite`": "force exist_ok"},
    "force": {"`force`": "overwrite exist_ok"},
    "pytree": {"`pytree`": "tree item items target state args save_args model"},
    "tree": {"`tree`": "pytree item items target state args save_args model"},
    "dtype": {"`dtype`": "cast cast_dtype cast_to save_dtype param_dtype"},
    "metadata": {"`metadata`": "custom_metadata meta extra hyperparameters config"},
    "chunks": {"`chunks`": "chunk_size chunk_shape chunk_byte_size"},
    "layout": {"`layout`": "use_ocdbt use_zarr3 ocdbt zarr zarr3 format"},
    "shard_bytes": {"`shard_bytes`": "max_shard_size"},
    "tree_serialise_leaves": {
        "another call, `ec.async_tree_serialise_leaves`": "async_ async_save "
        "asynchronous blocking block",
    },
    "CheckpointManager.save": {"`wait()` after it": "blocking block wait"},
    # Both, in runs of many processes.
    "processes": {
        "`processes=ec.Together(tag=...)`": "tag",
        "`processes=ec.Together(timeout=...)`": "timeout async_options",
        "`processes`": "multiprocessing_options",
    },
    # Managers.
    "root": {
        "`root`": "ckpt_dir directory dirpath path",
        "an argument for each option": "options",
        "`save(..., force=True)`": "overwrite force",
        "what it does by itself, at the first save": "create",
        "what every save of it does: it runs in the background": (
            "enable_async_checkpointing async_save asynchronous "
            "enable_background_delete"
        ),
        "the keys of the dict that you save": "item_names item_handlers checkpointers",
    },
    "where": {"`where=lambda tree: tree.model`": "save_weights_only"},
    "keep": {
        "`keep`": "max_to_keep preservation_policy save_top_k save_total_limit "
        "keep_last",
    },
    "keep_every": {"`keep_every`": "keep_period keep_every_n_steps"},
    "keep_if": {"`keep_if`": "should_keep_fn"},
    "every": {
        "`every`": "save_interval_steps save_decision_policy save_on_steps "
        "should_save_fn every_n_epochs every_n_train_steps save_steps save_freq",
    },
    "every_seconds": {"`every_seconds`": "train_time_interval save_interval_seconds"},
    "best": {
        '`best=(metric, "max")`': "best_fn best_mode",
        '`best=(metric, "min")`': "monitor mode metric_for_best_model",
    },
    "signals": {
        "the end of the `with`, which saves the last state, after an exception too": (
            "save_last save_on_exception save_on_train_end"
        ),
    },
}


@ft.cache
def _attributes(owner: str) -> dict[str, str]:
    rows = _ATTRIBUTES[owner].items()
    return {name: here for here, theirs in rows for name in theirs.split()}


def unknown_attribute(
    owner: Any, kind: str, name: str, here: str = ""
) -> AttributeError:
    """The error for a name that an object of a public class does not have. `here`: what
    has that name in this object."""
    said = _said(here or _attributes(kind).get(name))
    # From `obj` Python itself finds names that are near, when the error is shown.
    near = None if said else owner
    return AttributeError(
        f"`{kind}` has no attribute `{name}`{said}", name=name, obj=near
    )


def unknown_name(module: str, names: Iterable[str], name: str) -> AttributeError:
    """The error for a name that a module does not have. It has `names`."""
    here = _attributes(module).get(name) if module in _ATTRIBUTES else None
    said = _said(here) + ("" if here else _guess(name, names, 1))
    # With a name and without an object, Python itself guesses nothing.
    return AttributeError(
        f"module `{module}` has no attribute `{name}`{said}", name=name, obj=None
    )


def unknown_argument(call: str, names: Iterable[str], name: str) -> TypeError:
    """The error for an argument that a call does not have. It has `names`."""
    names = [x for x in names if x != "self"]
    tables = [_ARGUMENTS[x] for x in _ARGUMENTS if x in names or x == call]
    rows = it.chain.from_iterable(table.items() for table in tables)
    here = next((here for here, theirs in rows if name in theirs.split()), None)
    said = _said(here)
    if here is None:
        said += f"{_guess(name, names, 3)} It has {', '.join(names)}."
    return TypeError(f"`{call}` has no argument `{name}`{said}")


def _said(here: str | None) -> str:
    return f": here it is {here}." if here else "."


def _guess(name: str, names: Iterable[str], most: int) -> str:
    near = difflib.get_close_matches(name, names, most, 0.6)
    return f" Is it {' or '.join(f'`{x}`' for x in near)}?" if near else ""
