"""Kinds of static value, wherever they stand: another process knows them again, and a
load tells each from another of its kind."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any

import equinox as eqx
import flax.struct
import jax.tree_util as jtu
import pytest
from support.calls import BY_PATH
from support.helpers import facts
from support.values import KINDS, Make, square, UNCOMPARED

import eqx_ckpt as ec


class Field(eqx.Module):
    w: Any
    value: Any = eqx.field(static=True)


class Holder(eqx.Module):
    value: Any
    w: Any


@jtu.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    value: Any = dataclasses.field(metadata={"static": True})


@flax.struct.dataclass
class Flax:
    w: Any
    value: Any = flax.struct.field(pytree_node=False)


@jtu.register_static
@dataclasses.dataclass(eq=False)
class Static:
    value: Any


class _Custom:
    def __init__(self, w: Any, value: Any):
        self.w, self.value = w, value


@jtu.register_pytree_node_class
class Keyless(_Custom):
    def tree_flatten(self):
        return (self.w,), self.value

    @classmethod
    def tree_unflatten(cls, value, children):
        return cls(*children, value)


@jtu.register_pytree_with_keys_class
class Keyed(_Custom):
    def tree_flatten_with_keys(self):
        return [(jtu.GetAttrKey("w"), self.w)], (self.value, 3)

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data[0])


# Where a value may stand. In the last ones it is a leaf, if it is no node.
STATIC = {
    "field": lambda value: Field(1.0, value),
    "in a dict of a field": lambda value: Field(1.0, {"a": [value], "b": 3}),
    "register_dataclass": lambda value: Registered(1.0, value),
    "flax.struct": lambda value: Flax(1.0, value),
    "register_static": lambda value: [Static(value), 1.0],
    "keyless node": lambda value: Keyless(1.0, value),
    "node with keys": lambda value: Keyed(1.0, value),
    "function of a Partial": lambda value: (
        jtu.Partial(square, 1.0)
        if not callable(value) or isinstance(value, type)
        else jtu.Partial(value, 1.0)
    ),
}
LEAVES = {
    "leaf": lambda value: {"w": 1.0, "value": value},
    "leaf of a Module": lambda value: Holder(value, 1.0),
}
PLACES = {**STATIC, **LEAVES}
# Data that no save can store are an error, and are never left out.
_NO_LEAVES = [
    *("numpy array of texts", "numpy time", "long double", "ShapeDtypeStruct"),
    "generator of numbers",
]


def _tree(place: str, kinds: dict[str, tuple[Make, Make]], which: int = 0) -> Any:
    with warnings.catch_warnings():  # Equinox warns of arrays in fields.
        warnings.simplefilter("ignore")
        return {kind: PLACES[place](make[which]()) for kind, make in kinds.items()}


def _all(place: str) -> dict[str, tuple[Make, Make]]:
    kinds = KINDS | UNCOMPARED
    return {k: x for k, x in kinds.items() if place in STATIC or k not in _NO_LEAVES}


def save(directory: str) -> None:
    """Saves all kinds at each place. Another process calls this."""
    for number, place in enumerate(PLACES):
        path = pathlib.Path(directory) / str(number)
        ec.tree_serialise_leaves(path, _tree(place, _all(place)), durable=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What a process saved that sorts sets in another order."""
    directory = tmp_path_factory.mktemp("values")
    code = f"import test_values; test_values.save({str(directory)!r})"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    here = str(pathlib.Path(__file__).parent)
    path = os.pathsep.join([here, os.environ["PYTHONPATH"]])
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("place", PLACES)
def test_another_process_knows_each_kind_again(saved, place):
    path = saved / str([*PLACES].index(place))
    like, expected = (_tree(place, _all(place)) for _ in range(2))
    refused = {}
    for call, load in BY_PATH.items():
        try:
            loaded = jtu.tree_leaves(load(path, like))
        except RuntimeError as e:
            refused[call] = str(e)
            continue
        for leaf, was in zip(loaded, jtu.tree_leaves(expected), strict=True):
            assert not ec.is_storable(was) or facts(leaf) == facts(was)
    assert not refused, "\n".join(f"{call}: {text}" for call, text in refused.items())


def _is_compared(place: str, kind: str) -> bool:
    """Whether a value stands there as one that no save stores."""
    values = [make() for make in KINDS[kind]]
    if place == "function of a Partial":
        return all(callable(x) and not isinstance(x, type) for x in values)
    return place in STATIC or all(
        jtu.all_leaves([x]) and x is not None and not ec.is_storable(x) for x in values
    )


def _refusal(place: str, kinds: dict[str, tuple[Make, Make]]) -> str:
    """The error of a load in which all have changed."""
    # Some kinds make a node of themselves, which has no leaf.
    tree, other = ({**_tree(place, kinds, i), "w": 1.0} for i in (0, 1))
    ec.tree_serialise_leaves("memory://test-values", tree)
    try:
        ec.tree_deserialise_leaves("memory://test-values", other)
    except RuntimeError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("place", PLACES)
def test_each_kind_is_told_from_another(place):
    kinds = {k: KINDS[k] for k in _all(place) if k in KINDS and _is_compared(place, k)}
    assert len(kinds) > 20
    short = {f"kind{number}x": kind for number, kind in enumerate(kinds)}
    text = _refusal(place, {name: kinds[kind] for name, kind in short.items()})
    passed = [
        kind
        for name, kind in short.items()
        # The error of very many may not name all.
        if name not in text and name not in _refusal(place, {name: kinds[kind]})
    ]
    assert not passed, f"not refused: {passed}"
