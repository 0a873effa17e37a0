"""The public calls agree: one keyword has one place, one default and one text."""

import inspect

import jax.numpy as jnp
import pytest
from test_docstrings import public

import eqx_ckpt as ec


KEYWORDS = {
    "rename": None,
    "static": "error",
    "cast": False,
    "verify": True,
    "max_bytes": None,
    "progress": False,
    "processes": "all",
}

_WRITES = {
    "rename": "`export_safetensors` has it, and a checkpoint has the tree's names",
    "static": "nothing is compared",
    "cast": "`dtype` is what a save casts to",
    "verify": "nothing is read",
}
_ONE = {"processes": "one process makes it"}
_WHOLE = {
    "rename": "there is no `like` whose names it could have",
    "static": "there is no `like` to compare with",
    "cast": "there is no `like` to cast to",
}
_COMPARED = {
    "rename": "a leaf of another name is another leaf",
    "cast": "a leaf of another dtype is another leaf",
}
_SMALL = {
    "max_bytes": "it reads nothing that is large",
    "progress": "it reads nothing that is large",
}

# What a call lacks, and why.
LACKS = {
    "tree_serialise_leaves": _WRITES,
    "async_tree_serialise_leaves": _WRITES,
    "to_bytes": {
        **_WRITES,
        "processes": "the bytes are of one process",
    },
    "tree_deserialise_leaves": {},
    "load_or_init": {},
    "from_bytes": {},
    "graft": {"rename": "each pair takes its own"},
    "materialise": {
        "rename": "said when the lazy leaves were spliced",
        "static": "compared when the lazy leaves were spliced",
        "cast": "said when the lazy leaves were spliced",
    },
    "Checkpoint.splice": {
        "verify": "nothing is read, and `materialise` has it",
        **_SMALL,
        **_ONE,
    },
    "LazyArray.read": {
        **_WHOLE,
        "max_bytes": "`materialise` of a list of one leaf has it",
        "progress": "`materialise` of a list of one leaf has it",
        "processes": "`materialise` of a list of one leaf has it",
    },
    "export_safetensors": {
        "static": "there is no `like` to compare with",
        "cast": "there is no `like` to cast to",
    },
    "rebuild": {
        "rename": "there is no `like` whose names it could have",
        "static": "static fields are made as they were saved",
        "cast": "there is no `like` to cast to",
    },
    "convert": {**_WHOLE, **_ONE},
    "verify": {**_WHOLE, "verify": "it does nothing else", **_ONE},
    "diff": {"static": "it says which have changed", **_COMPARED, **_ONE},
    "stats": {**_WHOLE, **_ONE},
    "merge": {
        **_COMPARED,
        "verify": "what is merged is read later",
        "max_bytes": "what is merged is read later",
        "progress": "what is merged is read later",
        **_ONE,
    },
    "from_state_dict": {
        "static": "such dicts have no static fields",
        "verify": "such dicts have no digests",
        "max_bytes": "all of it is in memory",
        "progress": "all of it is in memory",
        "processes": "all of it is in memory",
    },
    "open": {**_WHOLE, "verify": "an index is always checked", **_SMALL, **_ONE},
    "exists": {**_WHOLE, "verify": "`verify` says more", **_SMALL, **_ONE},
    "delete": {**_WRITES, **_SMALL, **_ONE},
    "clean": {**_WRITES, **_SMALL, **_ONE},
    "write_orbax": {**_WRITES, **_SMALL, **_ONE},
    "history": {**_WHOLE, "verify": "no array is read", **_SMALL, **_ONE},
    "runs": {**_WHOLE, "verify": "no array is read", **_SMALL, **_ONE},
    "add_metrics": {**_WRITES, **_SMALL, **_ONE},
}

# These read no checkpoint, and write none.
OTHERS = {
    "counting",
    "function",
    "inverse",
    "is_storable",
    "lazy",
    "leaf_names",
    "nest",
    "partition_rules",
    "register_leaf",
    "rename",
    "skeleton",
    "to_state_dict",
    "unloaded",
}


def _call(name):
    owner, _, method = name.rpartition(".")
    return getattr(public[owner], method) if owner else public[name]


def test_each_call_has_the_keywords_or_a_reason():
    functions = {name for name, x in public.items() if inspect.isroutine(x)}
    functions = {name for name in functions if "." not in name}
    assert functions == {x for x in LACKS if "." not in x} | OTHERS
    for name in OTHERS:
        assert not KEYWORDS.keys() & inspect.signature(public[name]).parameters.keys()


@pytest.mark.parametrize("name", LACKS)
def test_keywords_of_a_call(name):
    parameters = inspect.signature(_call(name)).parameters
    has = [x for x in parameters if x in KEYWORDS]
    assert set(has) == KEYWORDS.keys() - LACKS[name].keys()
    for keyword in has:
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[keyword].default == KEYWORDS[keyword], keyword


def test_options_of_a_manager(tmp_path):
    """`restore` takes those of a load, and the manager those of its saves."""
    saves = {x: KEYWORDS[x] for x in ("max_bytes", "progress", "processes")}
    with ec.CheckpointManager(tmp_path / "run", **saves) as manager:
        manager.save(1, {"w": jnp.ones(3)})
        manager.wait()
        tree, step = manager.restore({"w": jnp.zeros(3)}, **KEYWORDS)
    assert step == 1 and tree["w"].tolist() == [1, 1, 1]
