"""Trees without a `like`: what comes back is what a load with one gives."""

import ast
import functools as ft
import re
from typing import Any

import equinox as eqx
import flax
import jax
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from support import trees
from support.helpers import assert_alike

import eqx_ckpt as ec
from eqx_ckpt._format import _names


KNOWN = [trees, eqx, optax, jax, np, flax, print, len, abs]


def unmarked(tree: Any) -> Any:
    """The tree with numbers for the markers of States, of which each tree may have its
    own, and without other values that are equal to themselves only. A `like` alone says
    the order of bytes."""
    numbers: dict[Any, int] = {}

    def number(marker):
        is_text = isinstance(marker, str)
        return marker if is_text else numbers.setdefault(marker, len(numbers))

    def plain(x):
        if isinstance(x, eqx.nn.StateIndex):
            return ["index", number(x.marker), unmarked(x.init)]
        if isinstance(x, eqx.nn.State):
            children, markers = x.tree_flatten()
            return ["state", list(map(number, markers)), unmarked(list(children))]
        if isinstance(x, ft.partial) and not isinstance(x, jtu.Partial):
            return ["partial", x.func, list(x.args), x.keywords]
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            return x.astype(x.dtype.newbyteorder("="))
        return x

    stop = lambda x: isinstance(x, (eqx.nn.State, eqx.nn.StateIndex))
    return jtu.tree_map(plain, tree, is_leaf=stop)


def value_at(tree: Any, name: str, here: str = "") -> Any:
    """The node, leaf or attribute of a name."""
    if name in (here, "%root"):
        return tree
    children = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    for path, child in children:
        below = _names.join(here, [_names.component(key)[1] for key in path])
        if path and _names.is_under(name, below):
            return value_at(child, name, below)
    return getattr(tree, name[len(here) + 1 :] if here else name)


def asked(error: Exception) -> list[str]:
    """The keys that `replace` is to have."""
    rows = re.findall(r"^    ('.*?'): a", str(error), re.M)
    return [ast.literal_eval(row) for row in rows]


def rebuilt(path: Any, like: Any, known: Any = KNOWN, **options: Any) -> Any:
    """With what the error asks for, taken from a tree with other numbers."""
    try:
        return ec.rebuild(path, known, **options)
    except RuntimeError as e:
        assert "nothing was loaded" in str(e) and "`known` lacks" not in str(e), e
        replace = {name: value_at(like, name) for name in asked(e)}
        assert replace, e
    return ec.rebuild(path, known, replace=replace, **options)


def check(tree: Any, tmp_path: Any) -> None:
    like = trees.changed(tree)
    try:
        ec.tree_serialise_leaves(tmp_path, tree, durable=False)
    except ValueError:  # Two leaves of one name, or none at all.
        return
    out = rebuilt(tmp_path, like)
    assert_alike(unmarked(out), unmarked(ec.tree_deserialise_leaves(tmp_path, like)))
    assert_alike(unmarked(out), unmarked(tree))


@pytest.mark.parametrize("seed", range(12))
def test_trees(seed, tmp_path):
    check(trees.make(seed), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 3000))
def test_many_trees(seed, tmp_path):
    check(trees.make(seed), tmp_path)
