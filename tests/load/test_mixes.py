"""`filter_spec`, `where`, `source`, `missing`, `unexpected` and `static` in any mix.

A few lines of Python say of any tree, and of any other that it is loaded into, whether
that is an error, and else what each leaf becomes.
"""

import datetime
import enum
import io
import random
from fractions import Fraction
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import facts, long

import eqx_ckpt as ec


class Pair(NamedTuple):
    x: Any
    y: Any


class Net(eqx.Module):
    a: Any
    b: Any
    width: Any = eqx.field(static=True)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


# What is not stored by default, and is compared instead.
_VALUES = [
    *("one", "two", "", Colour.RED, Colour.BLUE, datetime.date(2020, 1, 1), range(3)),
    *(frozenset([1]), frozenset([2]), Fraction(1, 2), Fraction(1, 3), range(4)),
]
_WIDTHS = [3, 3.0, True, "a", (1, 2), None, -0.0, 0.0, Colour.RED, {"a": 1}]


def _array(rng):
    data = np.frombuffer(rng.randbytes(24), "i4").reshape(rng.choice([(6,), (2, 3)]))
    return jnp.asarray(data) if rng.random() < 0.5 else data


def _make(rng, depth=0):
    if depth > 2 or (depth and rng.random() < 0.5):
        scalar = rng.choice([True, 7, -0.0, 2j, b"", b"ab"])
        chance = [_array(rng), rng.choice(_VALUES), scalar, None]
        return rng.choices(chance, [4, 3, 2, 1])[0]
    some = [_make(rng, depth + 1) for _ in range(rng.randrange(2, 4))]
    kind = rng.randrange(4) if depth else 0
    if kind == 0:
        return dict(zip("pqr", some))
    return (list, lambda x: Pair(*x[:2]), lambda x: Net(*x[:2], rng.choice(_WIDTHS)))[
        kind - 1
    ](some)


def _below(node):
    if isinstance(node, list):
        return {str(i): child for i, child in enumerate(node)}
    if isinstance(node, Net):
        return {"a": node.a, "b": node.b}
    return node._asdict() if isinstance(node, Pair) else node


def _nodes(node, name=""):
    """All nodes and leaves by their names."""
    out = {name: node}
    if isinstance(node, (dict, list, Pair, Net)):
        for key, child in _below(node).items():
            out |= _nodes(child, f"{name}.{key}".lstrip("."))
    return out


def _leaves(nodes):
    inner = (dict, list, Pair, Net, type(None))
    return {name: x for name, x in nodes.items() if not isinstance(x, inner)}


def _like(rng, node, chance):
    """A tree that differs in its numbers, and by chance in other things."""
    if rng.random() < chance:
        return rng.choice([*_VALUES, None, 3, np.zeros(6, "i4")])
    if isinstance(node, (dict, list, Pair, Net)):
        below = {k: _like(rng, x, chance) for k, x in _below(node).items()}
        if isinstance(node, dict):
            return below
        if isinstance(node, Net):
            other = rng.random() < chance
            return Net(*below.values(), rng.choice(_WIDTHS) if other else node.width)
        return list(below.values()) if type(node) is list else Pair(*below.values())
    if isinstance(node, (jax.Array, np.ndarray)):
        abstract = jax.ShapeDtypeStruct(node.shape, node.dtype)
        return rng.choice([np.zeros_like(node), jnp.zeros_like(node), abstract])
    return type(node)(1) if ec.is_storable(node) and type(node) is not bytes else node


def _at(tree, name):
    return _nodes(tree)[name]


def _within(name, picks):
    return any(x in ("", name) or name.startswith(x + ".") for x in picks)


def _fits(saved, here):
    if hasattr(here, "dtype"):
        same = hasattr(saved, "dtype") and saved.dtype == here.dtype
        return same and saved.shape == here.shape
    return type(saved) is type(here)


def _same(a, b):
    """As JSON has them: it does not tell a tuple from a list."""
    return repr(a) == repr(b)


def _faults(tree, like, source, stored, picks, options):
    """Why a load is an error."""
    nodes, whole = _nodes(like), lambda name: f"{source}.{name}".strip(".")
    leaves, there = _leaves(nodes), _nodes(tree)
    own = {name for name, x in leaves.items() if options["filter_spec"](x)}
    # A leaf that is not stored is known by what it is, at all of its places.
    for pick in list(picks):
        below = {name for name in leaves if _within(name, [pick])}
        if below and not below & own:
            same = {id(leaves[name]) for name in below}
            picks = [x for x in picks if x != pick]
            picks += [n for n, x in leaves.items() if id(x) in same and n not in own]
    wanted = [name for name in own if _within(name, picks)]
    if not any(whole(name) in stored for name in wanted):
        yield "nothing"
    for name in wanted:
        if whole(name) not in stored:
            is_abstract = isinstance(leaves[name], jax.ShapeDtypeStruct)
            if options["missing"] == "error" or is_abstract:
                yield f"missing {name}"
        elif not _fits(stored[whole(name)], leaves[name]):
            yield f"misfit {name}"
    known = {whole(name) for name, x in leaves.items() if ec.is_storable(x)}
    for name in stored.keys() - known if options["unexpected"] == "error" else ():
        inner = name[len(source) :].lstrip(".") if _within(name, [source]) else None
        if inner is None or not _within(inner, picks):
            continue
        here = leaves.get(inner)
        may_be = here is not None and not isinstance(here, str)
        is_all = options["filter_spec"] is ec.is_storable
        if options["filter_spec"](stored[name]) or (may_be and is_all):
            yield f"unexpected {name}"
    if options["static"] == "ignore":
        return
    for name, x in nodes.items():
        y = there.get(whole(name))
        if isinstance(x, Net) and isinstance(y, Net) and _within(name, picks):
            if not _same(x.width, y.width):
                yield f"static {name}"
        is_value = name in leaves and whole(name) in _leaves(there)
        if is_value and not ec.is_storable(x) and not ec.is_storable(y):
            if _within(name, picks) and not _same(x, y):
                yield f"value {name}"
        is_there = name and whole(name) in there
        if is_there and _within(name, picks) and _is_one_sided(x, y):
            yield f"value where there is none {name}"


def _is_one_sided(x, y):
    """Whether one of two is a value, and the other a node without leaves that are
    stored. None may be what a filter has left of a value."""
    one, two = (_leaves(_nodes(side)) for side in (x, y))
    is_stored = any(map(ec.is_storable, (*one.values(), *two.values())))
    is_none = x is None or y is None
    return ("" in one) != ("" in two) and not is_stored and not is_none


def _case(seed):
    rng = random.Random(seed)
    tree = _make(rng)
    stored = {n: x for n, x in _leaves(_nodes(tree)).items() if ec.is_storable(x)}
    if not stored:
        return 0
    ckpt = ec.open(io.BytesIO(ec.to_bytes(tree)))
    assert sorted(ckpt) == sorted(stored)
    inner = [n for n, x in _nodes(tree).items() if isinstance(x, (dict, Pair, Net))]
    inner = [name for name in inner if any(_within(x, [name]) for x in stored)]
    for _ in range(4):
        source = rng.choice(["", "", rng.choice(inner)])
        like = _like(rng, _at(tree, source), rng.choice([0, 0.05, 0.15]))
        specs = [ec.is_storable, ec.is_storable, eqx.is_array]
        options = {
            "filter_spec": rng.choice(specs),
            "source": source or None,
            "missing": rng.choice(["error", "keep"]),
            "unexpected": rng.choice(["error", "ignore"]),
            "static": rng.choice(["error", "error", "ignore"]),
        }
        if options["filter_spec"] is eqx.is_array:  # Of a skeleton it sees tracers.
            is_array = lambda x: hasattr(x, "dtype")
            options["filter_spec"] = is_array
        names = [n for n, x in _nodes(like).items() if n and x is not None]
        picks = [""]
        if rng.random() < 0.6 and len(names) > 1:
            picks = rng.sample(names, 2)
            # A list could be as a node of the tree.
            options["where"] = lambda t: {f"pick{x}": _at(t, x) for x in picks}
        faults = list(_faults(tree, like, source, stored, picks, options))
        try:
            out = ec.tree_deserialise_leaves(ckpt, like, **options)
        except (RuntimeError, ValueError) as e:
            assert faults, (seed, str(e))
            continue
        assert not faults, seed
        after = _nodes(out)
        for name, x in _leaves(_nodes(like)).items():
            was = stored.get(f"{source}.{name}".strip("."))
            if was is None or not options["filter_spec"](x) or not _within(name, picks):
                assert after[name] is x, (seed, name)
            elif isinstance(x, jax.ShapeDtypeStruct):
                assert facts(after[name]) == facts(jnp.asarray(was)), (seed, name)
            else:
                assert type(after[name]) is type(x), (seed, name)
                same = facts(np.asarray(after[name])) == facts(np.asarray(was))
                assert same, (seed, name)
    return 1


@pytest.mark.parametrize("count", [100, *long(10_000)])
def test_any_mix(count):
    assert sum(map(_case, range(count))) > 0.9 * count
