"""One part of the static data of a random tree is altered, anywhere: every call that
loads refuses it, and names the node and the part. What is not altered is never refused.
"""

import collections
import dataclasses
import functools as ft
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.tree_util as jtu
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.experimental.sparse import BCOO
from support.calls import BY_PATH
from support.helpers import facts
from support.values import Attrs, Config, KINDS, Point, Slots, UNCOMPARED

import eqx_ckpt as ec


# ---- Nodes. Each has two children, if it has any, and static data.


class Layer(eqx.Module):
    a: Any
    b: Any
    x: Any = eqx.field(static=True)
    y: Any = eqx.field(static=True)


class Bare(eqx.Module):
    """A Module without static fields, with a function."""

    a: Any
    x: Any


class Sub(Layer):
    """Static fields of two classes, and one that has a default."""

    z: Any = eqx.field(static=True, default=3)


@jtu.register_dataclass
@dataclasses.dataclass
class Registered:
    a: Any
    b: Any
    x: Any = dataclasses.field(metadata={"static": True})


@flax.struct.dataclass
class Flax:
    a: Any
    b: Any
    x: Any = flax.struct.field(pytree_node=False)


@jtu.register_static
@dataclasses.dataclass(eq=False)
class Static:
    """For JAX a node without children."""

    x: Any


class _Custom:
    def __init__(self, a: Any, b: Any, x: Any):
        self.a, self.b, self.x = a, b, x


@jtu.register_pytree_with_keys_class
class Keyed(_Custom):
    def tree_flatten_with_keys(self):
        keys = jtu.GetAttrKey("a"), jtu.GetAttrKey("b")
        return list(zip(keys, (self.a, self.b))), (self.x, 3)

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data[0])


def _release(*order: str) -> type:
    """A class as one of its releases flattens it: without keys, in this order."""

    class Keyless(_Custom):
        pass

    jtu.register_pytree_node(
        Keyless,
        lambda node: ([getattr(node, name) for name in order], {"x": node.x}),
        lambda data, children: Keyless(**dict(zip(order, children)), **data),
    )
    return Keyless


_releases = _release("a", "b"), _release("b", "a")


class Flagged:
    """A node whose leaf may be one object with its static data: small ints and bools
    are one in all of a process."""

    def __init__(self, a: Any, x: Any, y: Any):
        self.a, self.x, self.y = a, x, y


jtu.register_pytree_node(
    Flagged,
    lambda node: ((node.a,), (node.x, node.y)),
    lambda data, children: Flagged(*children, *data),
)


class Norms(eqx.Module):
    """A layer that has entries of a State."""

    a: Any
    norm: eqx.nn.BatchNorm

    def __init__(self, a: Any, eps: Any, momentum: Any):
        self.a = a
        options = {"eps": eps, "momentum": momentum, "channelwise_affine": False}
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema", **options)


# ---- Plans of trees. A plan says all but the numbers, and may be altered.


class Value(NamedTuple):
    """A static value: of a kind, or a container of others."""

    kind: str
    parts: tuple["Value", ...] = ()
    is_altered: bool = False


class Plan(NamedTuple):
    kind: str
    children: tuple["Plan", ...] = ()
    values: tuple[Value, ...] = ()


_CONTAINERS: dict[str, Callable[..., Any]] = {
    "a dict": lambda *x: {f"k{i}": item for i, item in enumerate(x)},
    "a dict of numbers": lambda *x: dict(enumerate(x)),
    "an OrderedDict": lambda *x: collections.OrderedDict(zip("cab", x)),
    "a list": lambda *x: [*x],
    "a tuple": lambda *x: x,
    "a namedtuple": Point,
    "a dataclass": Config,
    "a dataclass with slots": Slots,
    "a class of attrs": Attrs,
}
_OWN = {
    "a shape": (lambda: (2, 3), lambda: (2, 4)),
    "no": (lambda: False, lambda: True),
}
_VALUES = {**KINDS, **UNCOMPARED, **_OWN}
# Functions, and leaves that no save stores.
_FLAGS = ["bool", "no", "None", "ellipsis", "empty text"]
_FUNCTIONS = [
    *("function", "relu", "gelu", "tanh", "ufunc of JAX", "builtin", "custom_jvp"),
    *("jitted function", "closure", "lambda", "bound method", "partial"),
]
_LEAVES = [
    *("text", "unicode", "enum", "str enum", "date", "path", "range", "decimal"),
    *("set", "frozenset", "pattern", "PartitionSpec", "UUID", "dataclass", "slots"),
    *_FUNCTIONS,
]


class Node(NamedTuple):
    make: Callable[..., Any]
    # What children and values are called, as patterns of parts of names. Values
    # that have no name are told by the node's.
    children: Sequence[str] = ()
    values: Sequence[str] = ()
    # Of which kinds its values are, if not of any.
    kinds: Sequence[str] = ()
    weight: float = 1


# Children without keys are called by their places, or by what they are of the node.
_PLACES = ["(0|a)", "(1|b)"]
_ARGS = [r"(0|args)\.0", r"(1|keywords)\.k"]
_NODES = {
    "Module": Node(Layer, "ab", "xy", weight=3),
    "Module with a function": Node(Bare, "a", "x", _FUNCTIONS, 2),
    "Module of two classes": Node(Sub, "ab", "xyz"),
    "Lambda": Node(eqx.nn.Lambda, (), ["fn"], _FUNCTIONS),
    "Norms": Node(Norms, "a", ["norm.eps", "norm.momentum"], ["float"]),
    "register_dataclass": Node(Registered, "ab", "x", weight=2),
    "flax.struct": Node(Flax, "ab", "x"),
    "register_static": Node(Static, (), [""]),
    "with keys": Node(Keyed, "ab", [""]),
    "without keys": Node(_releases[0], _PLACES, [""]),
    "without keys, in another order": Node(_releases[1], _PLACES, [""], weight=0),
    "Partial": Node(lambda a, b, f: jtu.Partial(f, a, k=b), _ARGS, [""], _FUNCTIONS, 2),
    "BCOO": Node(
        lambda a, b, shape: BCOO((a, b), shape=shape), "ab", [""], ["a shape"]
    ),
    "tuple": Node(lambda *x: x, "01"),
    "list": Node(lambda *x: [*x], "01"),
    "dict": Node(lambda *x: dict(zip("pq", x)), "pq"),
    "OrderedDict": Node(lambda *x: collections.OrderedDict(zip("qp", x)), "qp"),
    "FrozenDict": Node(lambda *x: FrozenDict(zip("pq", x)), "pq"),
    "namedtuple": Node(Point, "xy"),
    "leaf": Node(lambda x: x, (), [""], _LEAVES, 2),
    "flags": Node(Flagged, [""], ["", ""], _FLAGS, 2),
    "numbers": Node(lambda: None, weight=0),
}


def _value(rng: random.Random, depth: int = 0) -> Value:
    if depth < 2 and rng.random() < 0.4:
        kind = rng.choice([*_CONTAINERS])
        count = rng.randint(1, 2)  # What they all have room for.
        return Value(kind, tuple(_value(rng, depth + 1) for _ in range(count)))
    return Value(rng.choice([*(KINDS if rng.random() < 0.85 else UNCOMPARED)]))


def _plan(rng: random.Random, depth: int = 0) -> Plan:
    if depth > 4 or depth and rng.random() < 0.4:
        return Plan("numbers")
    kind = rng.choices([*_NODES], [x.weight for x in _NODES.values()])[0]
    node = _NODES[kind]
    if kind in ("BCOO", "flags"):
        children = tuple(Plan("numbers") for _ in node.children)
    else:
        children = tuple(_plan(rng, depth + 1) for _ in node.children)
    pick = lambda: Value(rng.choice(node.kinds)) if node.kinds else _value(rng)
    return Plan(kind, children, tuple(pick() for _ in node.values))


def _of(value: Value) -> Any:
    if value.kind in _CONTAINERS:
        return _CONTAINERS[value.kind](*map(_of, value.parts))
    return _VALUES[value.kind][value.is_altered]()


def _build(plan: Plan, numbers: Iterator[float]) -> Any:
    if plan.kind == "numbers":
        return np.full(2, next(numbers))
    if plan.kind == "flags":
        below = [next(numbers) < 1000]
    elif plan.kind == "BCOO":
        below = [np.full(2, next(numbers)), np.full((2, 2), int(next(numbers)))]
    else:
        below = [_build(child, numbers) for child in plan.children]
    return _NODES[plan.kind].make(*below, *map(_of, plan.values))


def _kinds(plan: Plan) -> Iterator[str]:
    yield plan.kind
    for child in plan.children:
        yield from _kinds(child)


def make(plan: Plan, start: int) -> Any:
    """A tree of a plan, with numbers from `start` on."""
    numbers = itertools.count(start)
    with warnings.catch_warnings():  # Equinox warns of arrays in fields.
        warnings.simplefilter("ignore")
        beside = {"beside": np.full(2, next(numbers))}
        if "Norms" not in _kinds(plan):
            return {"tree": _build(plan, numbers), **beside}
        build = eqx.nn.make_with_state(lambda: _build(plan, numbers))
        return {**dict(zip(("tree", "state"), build())), **beside}


class Alteration(NamedTuple):
    plan: Plan
    # What is altered: the kind of the node, and of the value.
    kind: str
    value: str
    # The name of what is altered, as a pattern.
    name: str


def alterations(plan: Plan, name: str = "tree") -> Iterator[Alteration]:
    """Each plan that differs from one in one part."""
    node = _NODES[plan.kind]
    join = lambda part: f"{name}.{part}" if part else name
    for i, (value, part) in enumerate(zip(plan.values, node.values)):
        for changed, kind in _changed(value):
            values = (*plan.values[:i], changed, *plan.values[i + 1 :])
            new = plan._replace(values=values)
            yield Alteration(new, plan.kind, kind, join(part))
    if plan.kind == "without keys":
        new = plan._replace(kind="without keys, in another order")
        yield Alteration(new, plan.kind, "order of children", name)
    for i, (child, part) in enumerate(zip(plan.children, node.children)):
        for x in alterations(child, join(part)):
            children = (*plan.children[:i], x.plan, *plan.children[i + 1 :])
            yield x._replace(plan=plan._replace(children=children))


def _changed(value: Value) -> Iterator[tuple[Value, str]]:
    """Each value that differs from one in one part, and the kind of that part."""
    if value.kind not in _CONTAINERS:
        yield value._replace(is_altered=True), value.kind
    elif len(value.parts) == 1:
        yield value._replace(parts=(*value.parts, Value("int"))), "one part more"
    for i, part in enumerate(value.parts):
        for changed, kind in _changed(part):
            parts = (*value.parts[:i], changed, *value.parts[i + 1 :])
            yield value._replace(parts=parts), kind


# ---- What is saved, and the calls that load it.


class Saved:
    """A tree, saved in memory as far as calls need it."""

    def __init__(self, tree: Any):
        self.tree = tree

    @ft.cached_property
    def path(self) -> str:
        ec.tree_serialise_leaves("memory://test-altered", self.tree)
        return "memory://test-altered"

    @ft.cached_property
    def again(self) -> str:
        """What is saved of the tree of the checkpoint, once it has been mapped."""
        tree = jax.tree.map(lambda x: x, ec.open(self.path).tree)
        ec.tree_serialise_leaves("memory://test-altered-again", tree)
        return "memory://test-altered-again"

    @ft.cached_property
    def data(self) -> bytes:
        return ec.to_bytes(self.tree)

    @ft.cached_property
    def run(self) -> str:
        with ec.CheckpointManager("memory://test-altered-run") as run:
            run.save(1, self.tree, force=True)
        return "memory://test-altered-run"


def _restore(saved: Saved, like: Any) -> Any:
    with ec.CheckpointManager(saved.run) as run:
        return run.restore(like)[0]


CALLS: dict[str, Callable[[Saved, Any], Any]] = {
    **{
        name: lambda saved, like, load=load: load(saved.path, like)
        for name, load in BY_PATH.items()
    },
    "nodes": lambda saved, like: ec.tree_deserialise_leaves(saved.again, like),
    "from_bytes": lambda saved, like: ec.from_bytes(saved.data, like),
    "restore": _restore,
}


def _is_as_saved(plan: Plan, loaded: Any) -> bool:
    """Whether all is where it was, by the attributes of nodes."""
    values = lambda tree: [facts(x) for x in _numbers(tree)]
    return values(loaded) == values(make(plan, 1))


def _numbers(tree: Any) -> Iterator[Any]:
    """Arrays, in an order that no class has a say in."""
    if isinstance(tree, _Custom):
        tree = tree.a, tree.b
    one = lambda x: x is not tree
    for leaf in jtu.tree_leaves(tree, is_leaf=one):
        if leaf is not tree and not jtu.all_leaves([leaf]):
            yield from _numbers(leaf)
        elif isinstance(leaf, (bool, np.ndarray, jax.Array)):
            yield leaf


class Failure(NamedTuple):
    """What a call did wrong with a tree."""

    seed: int
    call: str
    node: str
    value: str
    what: str
    text: str = ""


def _judged(
    plan: Plan, x: Alteration | None, saved: Saved, like: Any, call: str
) -> tuple[str, str]:
    """What is wrong with a load into a tree as it was saved, or into an altered one."""
    try:
        loaded = CALLS[call](saved, like)
    except RuntimeError as e:
        if x is None:
            return "refused as it was", str(e)
        named = re.search(rf"(?<![\w.]){x.name}(?!\w)", str(e))
        if call == "graft" and x.value == "order of children":
            # An exchanged StateIndex is told by the entry that it leads to.
            named = named or re.search(r"(?<![\w.])state\.\d", str(e))
        return ("", "") if named else (f"does not name `{x.name}`", str(e))
    except Exception as e:
        return f"raises {type(e).__name__}", str(e)
    if x is None or x.value == "order of children":
        return "" if _is_as_saved(plan, loaded) else "exchanged", ""
    return "" if x.value in UNCOMPARED else "not refused", f"`{x.name}`"


def failures(
    seed: int, calls: Sequence[str], most: int
) -> tuple[int, Iterator[Failure]]:
    """Loads a tree as it is, and with up to `most` alterations: how many those are, and
    what goes wrong."""
    rng = random.Random(seed)
    plan = _plan(rng)
    found = [*alterations(plan)]
    some = rng.sample(found, min(most, len(found)))

    def loads() -> Iterator[Failure]:
        saved = Saved(make(plan, 1))
        for x in (None, *some):
            like = make(x.plan if x else plan, 1000)
            node, value = (x.kind, x.value) if x else ("", "")
            for call in calls:
                what, text = _judged(plan, x, saved, like, call)
                if what:
                    yield Failure(seed, call, node, value, what, text)

    return len(some), loads()


def campaign(seeds: Sequence[int], calls: int, most: int) -> int:
    """Takes a tree of each seed through some calls, in turns. Returns how many
    alterations were made."""
    count, wrong = 0, []
    for seed in seeds:
        first = seed % len(CALLS)
        turn = [*CALLS][first:] + [*CALLS][:first]
        some, bad = failures(seed, turn[:calls], most)
        count += some
        wrong += bad
    kinds = collections.Counter((x.what, x.node, x.value) for x in wrong)
    told = [f"{n} times: {': '.join(kind)}" for kind, n in kinds.most_common()]
    assert not wrong, "\n".join([f"of {count}:", *told, "", *map(str, wrong[:5])])
    return count


@pytest.mark.parametrize("part", range(2))
def test_what_is_altered_is_refused(part):
    assert campaign(range(70 * part, 70 * part + 70), 2, 2) > 90


def test_a_child_without_a_key_is_compared_with_what_it_is_of_the_node(tmp_path):
    """Whichever part is loaded, and however deep it is."""
    first, second = _releases
    layers = lambda x: [Layer(np.ones(2), np.ones(2), i, x) for i in range(3)]
    make = lambda cls, x: {"p": cls(layers(0)[0], cls(*layers(x)[1:], "x"), "x")}
    ec.tree_serialise_leaves(tmp_path / "x", make(first, 0))
    parts = [
        *(lambda t: t, lambda t: t["p"], lambda t: t["p"].b, lambda t: t["p"].b.a),
        lambda t: t["p"].b.b,
    ]
    for cls, where in itertools.product(_releases, parts):
        ec.tree_deserialise_leaves(tmp_path / "x", make(cls, 0), where=where)
        with pytest.raises(RuntimeError, match=r"`p\.\w\.\w\.y` was 0 .* is 1"):
            ec.tree_deserialise_leaves(tmp_path / "x", make(cls, 1), where=where)
    for where in parts:
        loaded = ec.tree_deserialise_leaves(
            tmp_path / "x", make(second, 0), where=where, static="ignore"
        )
        assert loaded["p"].b.b.x == 2


def test_a_class_without_keys_that_has_got_a_child(tmp_path):
    """No function there is compared with the one that was at its place."""

    def release(*fields):
        cls = type("Grown", (_Custom,), {"__init__": lambda self: None})
        jtu.register_pytree_node(
            cls,
            lambda node: ([getattr(node, x) for x in fields], None),
            lambda _, children: _with(cls(), fields, children),
        )
        return lambda **values: _with(cls(), values, values.values())

    def _with(node, fields, values):
        vars(node).update(zip(fields, values))
        return node

    old, new = release("act", "w"), release("norm", "act", "w")
    saved = {"p": old(act=jax.nn.relu, w=np.ones(2))}
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    like = {"p": new(norm=jax.nn.tanh, act=jax.nn.relu, w=np.zeros(2))}
    assert ec.tree_deserialise_leaves(tmp_path / "x", like)["p"].w.tolist() == [1, 1]
    like["p"].act = jax.nn.gelu
    with pytest.raises(RuntimeError, match="saved jax.nn.relu, `like` has jax.nn.gelu"):
        ec.tree_deserialise_leaves(tmp_path / "x", like)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_what_is_altered_is_refused_long(part, capsys):
    first = random.SystemRandom().randrange(2**31)
    count = campaign(range(first, first + 1000), 3, 2)
    with capsys.disabled():
        print(f"\n1,000 trees from the seed {first}: {count} alterations")
