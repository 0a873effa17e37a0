"""Trees of whatever JAX allows as a node or as a leaf, made by a seed. No test is here.

`make(seed)` is what all tests of any tree use; in `twins` names clash. `places` finds
what is in one.
"""

import collections
import dataclasses
import enum
import functools as ft
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import optax
from flax.core import FrozenDict


# ---- Leaves.

# Those of JAX with `jax_enable_x64` off. What an older JAX lacks is left out.
JAX_DTYPES = [
    name
    for name in (
        "bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 bfloat16 "
        "float16 float32 complex64 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e5m2 "
        "float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2fnuz "
        "float8_e8m0fnu"
    ).split()
    if name == "bool" or hasattr(jnp, name)
]
NUMPY_DTYPES = [
    *JAX_DTYPES,
    *"int64 uint64 float64 complex128 >i2 >f4 >c16".split(),
    *(name for name in ("float6_e2m3fn", "float6_e3m2fn") if hasattr(ml_dtypes, name)),
]
_SHAPES = [(), (), (1,), (2,), (3,), (2, 3), (0,), (2, 0, 3), (1, 1, 2, 1), (1,) * 17]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers(rng: random.Random, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits that a dtype has: NaNs of every kind, minus zero, subnormals."""
    data = rng.randbytes(math.prod(shape) * dtype.itemsize)
    if dtype.itemsize > 1 or dtype.name in ("int8", "uint8"):
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    small = np.frombuffer(bytearray(data), np.uint8).reshape(shape)
    if dtype == np.bool_:
        return np.asarray(small % 2 == 1)
    if "int" in dtype.name:
        info = ml_dtypes.iinfo(dtype)
        width = int(info.max) - int(info.min) + 1
        wide = np.asarray(small.astype(np.int16) % width + int(info.min))
        return wide.astype(dtype)
    mask = np.uint8(2 ** ml_dtypes.finfo(dtype).bits - 1)
    return np.asarray(small & mask).view(dtype)


def _jax(rng: random.Random) -> jax.Array:
    dtype = dtype_of(rng.choice(JAX_DTYPES))
    return jnp.array(numbers(rng, dtype, rng.choice(_SHAPES)))


def _weak(rng: random.Random) -> jax.Array:
    value = rng.choice([rng.randrange(-99, 99), rng.random(), -0.0, math.inf, 2.5j])
    return jnp.full(rng.choice(_SHAPES[:6]), value)


def _key(rng: random.Random) -> jax.Array:
    impl, words = rng.choice([("threefry2x32", 2), ("rbg", 4), ("unsafe_rbg", 4)])
    data = numbers(rng, np.dtype(np.uint32), (*rng.choice(_SHAPES[:8]), words))
    return jr.wrap_key_data(data, impl=impl)


def _numpy(rng: random.Random) -> np.ndarray:
    if rng.random() < 0.05:
        return np.zeros(rng.choice(_SHAPES), jax.dtypes.float0)
    array = numbers(rng, dtype_of(rng.choice(NUMPY_DTYPES)), rng.choice(_SHAPES))
    form = rng.randrange(8)
    if form == 0:
        array = array.T
    elif form == 1:
        array = np.repeat(array[..., None], 2, -1)[..., 1]
    elif form == 2:
        array = np.broadcast_to(array[..., None], (*array.shape, 2))
    elif form == 3:
        array.flags.writeable = False
    return array


def _scalar(rng: random.Random) -> Any:
    dtype = dtype_of(rng.choice(NUMPY_DTYPES)).newbyteorder("=")
    return numbers(rng, dtype, ())[()]


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Metres(float):
    pass


def _python(rng: random.Random) -> Any:
    return rng.choice(
        [
            *(True, False, 0, -1, rng.randrange(-9, 9), 2**63, -(2**63), 2**64 - 1),
            *(rng.getrandbits(200), -rng.getrandbits(900), Level.HIGH, Metres(2.5)),
            *(rng.random(), -0.0, math.nan, -math.inf, 5e-324, 1j, complex("nan-infj")),
        ]
    )


class _List(list):
    """For JAX a leaf, as every subclass of a container."""


def _square(x: Any) -> Any:
    return x * x


CONFIGURATION = [
    *("text", "", "\ud800", b"\xff", np.str_("a"), np.bytes_(b"b")),
    *(jax.nn.relu, print, len, _square, ft.partial(_square, 3), jax.jit(_square)),
    *(object(), ..., NotImplemented, range(3), int, jnp.float32, np.dtype("f4")),
    *(Level, collections.Counter, _List([1, 2]), frozenset([1]), math),
]


LEAVES: list[tuple[Callable[[random.Random], Any], float]] = [
    (_jax, 6),
    (_weak, 1),
    (_key, 1),
    (_numpy, 4),
    (_scalar, 2),
    (_python, 3),
    (lambda rng: rng.choice(CONFIGURATION), 1.5),
]


def leaf(rng: random.Random) -> Any:
    makers, weights = zip(*LEAVES)
    return rng.choices(makers, weights)[0](rng)


def another(x: Any, rng: random.Random | None = None) -> Any:
    """A leaf that differs from `x` in its value only: zeros, or any bits."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        if isinstance(x, (np.str_, np.bytes_)) or x.dtype == jax.dtypes.float0:
            return x
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = another(jr.key_data(x), rng)
            return jr.wrap_key_data(data, impl=str(jr.key_impl(x)))
        if isinstance(x, jax.Array) and x.weak_type:
            kind = {"i": 1, "f": 1.5, "c": 0.5j}[x.dtype.kind]
            return jnp.full(x.shape, kind)
        new = np.zeros(x.shape, x.dtype)
        if rng is not None:
            new = numbers(rng, x.dtype.newbyteorder("="), x.shape).astype(x.dtype)
        return (
            jnp.array(new)
            if isinstance(x, jax.Array)
            else new[()]
            if (isinstance(x, np.generic))
            else new
        )
    if isinstance(x, Level):
        return Level.LOW
    return type(x)(0) if isinstance(x, (bool, int, float, complex)) else x


def changed(tree: Any, rng: random.Random | None = None) -> Any:
    """The same tree with other numbers; what is one array stays one."""
    done: dict[int, Any] = {}
    return jtu.tree_map(lambda x: done.setdefault(id(x), another(x, rng)), tree)


# ---- Nodes.


class Point(NamedTuple):
    x: Any
    y: Any


class NoFields(NamedTuple):
    pass


class Node(eqx.Module):
    first: Any
    keys: Any
    _name: Any
    none: None = None
    empty: tuple = ()
    function: Any = jax.nn.relu
    width: int = eqx.field(static=True, default=3)
    mode: str = eqx.field(static=True, default="a")

    def method(self, x):
        return x


class NoLeaves(eqx.Module):
    width: int = eqx.field(static=True, default=3)


@flax.struct.dataclass
class Flax:
    a: Any
    b: Any
    name: str = flax.struct.field(pytree_node=False, default="flax")


@jtu.register_dataclass
@dataclasses.dataclass
class Registered:
    a: Any
    b: Any
    c: str = dataclasses.field(default="c", metadata={"static": True})


@jtu.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """For JAX a node without leaves."""

    a: int = 1


@jtu.register_pytree_node_class
class Keyless:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, len(self.children)

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def without_keys(*order):
    """A class without keys, whose children a release of it has in this order."""

    class Pair:
        def __init__(self, **fields):
            vars(self).update(fields)

    jtu.register_pytree_node(
        Pair,
        lambda pair: ([getattr(pair, name) for name in order], None),
        lambda _, children: Pair(**dict(zip(order, children))),
    )
    return Pair


@jtu.register_pytree_with_keys_class
class Keyed:
    """A node whose children have keys of its own, of any type."""

    def __init__(self, keys, children):
        self.keys = tuple(keys)
        self.children = tuple(children)

    def tree_flatten_with_keys(self):
        return list(zip(self.keys, self.children)), self.keys

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(keys, children)


class Fresh:
    """A node that makes its child anew whenever it is flattened."""

    def __init__(self, *children):
        self.children = children


jtu.register_pytree_node(
    Fresh, lambda x: ((list(x.children),), None), lambda _, below: Fresh(*below[0])
)


class Mode(eqx.Enumeration):
    one = "One."
    two = "Two."


_TEXTS = [
    *("a", "A", "b", "w", "", "0", "1", "00", "-1", "1.5", "a.b", ".", "..", "a/b"),
    *("/", "../../x", "a\\b", "%", "%25", "%=1", "%root", "%~", " ", "\n", "\0"),
    *("\u00fc", "u\u0308", "\U0001f600", "\ud800", "\u202e", "k" * 210, "K" * 210),
    *("eqx_ckpt", "eqx_ckpt.json", "eqx_ckpt-0123456789abcdef", "zarr.json", "zarr"),
    *("manifest.ocdbt", "d", "c", "_METADATA", "_sharding", "_strings.json", "keys"),
    *("array_metadatas", "descriptor", "_CHECKPOINT_METADATA", "__metadata__", "con"),
    *("_get", "_name", "_source", "items", "0123456789abcdef"),
]
_OTHERS = [
    *(0.5, -0.0, 1e300, True, (1, "a.b"), (), b"\xff/.", Level.LOW, 1j),
    # JAX knows None as a key since 0.7.
    *([None] if jax.__version_info__ >= (0, 7) else []),
    *(frozenset(), ((None,),), range(2), int(10**30)),
]


def _text(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return "".join(rng.choices("ab.%/\\ 0\u00fc\U0001f600\x1b", k=rng.randrange(4)))
    return rng.choice(_TEXTS)


class _Maker:
    """Makes nodes until about so many leaves have been made."""

    def __init__(self, rng: random.Random, size: int):
        self.rng = rng
        self.left = size
        self.made: list[Any] = []  # All that may stand at a second place.

    def tree(self, depth: int = 0) -> Any:
        rng = self.rng
        chance = rng.random()
        if self.made and chance < 0.06:
            return rng.choice(self.made)
        if depth and (self.left <= 0 or depth > 12 or chance < 0.4):
            self.left -= 1
            out = rng.choice(EMPTY)() if rng.random() < 0.3 else leaf(rng)
        elif depth and chance < 0.55:
            self.left -= 4
            out = changed(rng.choice(_stamps()), rng)
        else:
            out = rng.choice(INNER)(self, depth + 1)
        self.made.append(out)
        return out

    def some(self, depth: int, least: int = 0) -> list[Any]:
        count = self.rng.choice([0, 1, 1, 2, 2, 3, 4])
        return [self.tree(depth) for _ in range(max(least, count))]

    def two(self, depth: int) -> tuple[Any, Any]:
        return self.tree(depth), self.tree(depth)


# Each place where a tree may have no leaf has each of these.
EMPTY: list[Callable[[], Any]] = [
    *(tuple, list, dict, lambda: None, NoFields, FrozenDict, Keyless, NoLeaves, Static),
    *(collections.OrderedDict, lambda: collections.defaultdict(list), Fresh),
    *(lambda: eqx.nn.Sequential([]), lambda: eqx.nn.Lambda(abs), eqx.nn.Identity),
    *(lambda: jtu.Partial(_square), optax.EmptyState, optax.MaskedNode),
    *(lambda: Keyed((), ()), lambda: [(), {}, None], lambda: Point((), None)),
]


def _dict(maker: _Maker, depth: int) -> dict:
    values = maker.some(depth)
    if maker.rng.random() < 0.3:
        return {maker.rng.randrange(-3, 12): x for x in values}
    return {_text(maker.rng): x for x in values}


def _ordered(maker: _Maker, depth: int) -> Any:
    rng = maker.rng
    key = lambda: rng.choice([_text(rng), rng.choice(_OTHERS), rng.randrange(-2, 9)])
    return collections.OrderedDict((key(), x) for x in maker.some(depth))


def _default(maker: _Maker, depth: int) -> Any:
    return collections.defaultdict(list, _dict(maker, depth))


def _keyed(maker: _Maker, depth: int) -> Keyed:
    rng = maker.rng
    values = maker.some(depth)
    kinds = [
        # JAX cannot print one that is not Unicode.
        lambda: jtu.GetAttrKey(_text(rng).replace("\ud800", "u")),
        lambda: jtu.SequenceKey(rng.randrange(5)),
        lambda: jtu.DictKey(_text(rng)),
        lambda: jtu.FlattenedIndexKey(rng.randrange(5)),
        # In a checkpoint's tree a `DictKey` of the same text would be before it.
        lambda: "plain " + _text(rng),
        # JAX's own keys raise an error when they are compared with None.
        lambda: rng.choice([key for key in _OTHERS if key is not None]),
    ]
    keys = {repr(key): key for key in (rng.choice(kinds)() for _ in values)}
    return Keyed(keys.values(), values[: len(keys)])


def _module(maker: _Maker, depth: int) -> Node:
    rng = maker.rng
    children = [maker.tree(depth) for _ in range(3)]
    return Node(*children, width=rng.randrange(3), mode=rng.choice("ab"))


def _partial(maker: _Maker, depth: int) -> jtu.Partial:
    keywords = {f"k{i}": x for i, x in enumerate(maker.some(depth))}
    return jtu.Partial(_square, *maker.some(depth), **keywords)


INNER: list[Callable[[_Maker, int], Any]] = [
    lambda m, depth: tuple(m.some(depth)),
    lambda m, depth: m.some(depth),
    *(_dict, _dict, _ordered, _default, _keyed, _module, _module, _partial),
    lambda m, depth: Point(*m.two(depth)),
    lambda m, depth: Flax(*m.two(depth)),
    lambda m, depth: Registered(*m.two(depth)),
    lambda m, depth: Keyless(*m.some(depth)),
    lambda m, depth: Fresh(*m.some(depth)),
    # It would make all dicts in it its own.
    lambda m, depth: FrozenDict({_text(m.rng): [x] for x in m.some(depth)}),
    lambda m, depth: _module(m, depth).method,
    lambda m, depth: eqx.nn.Sequential([eqx.nn.Lambda(abs), eqx.nn.Lambda(m.tree())]),
    lambda m, depth: optax.MultiStepsState(*m.some(depth, 4)[:4], ()),
]


class _Net(eqx.Module):
    first: eqx.nn.BatchNorm
    layers: list
    second: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm

    def __init__(self, key):
        self.first = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.layers = [eqx.nn.Linear(2, 2, key=key), (), eqx.nn.Dropout(0.5)]
        self.second = eqx.nn.BatchNorm(2, "batch", mode="batch")
        linear = eqx.nn.Linear(2, 2, key=key)
        self.spectral = eqx.nn.SpectralNorm(linear, "weight", key=key)


def _source(pair: Any) -> Any:
    return pair[0]


def _target(pair: Any) -> Any:
    return pair[1]["w"]


@ft.cache
def _stamps() -> list[Any]:
    """Models, States and optimiser states of the libraries. They take long to make."""
    key = jr.key(0)
    nn = eqx.nn
    model, state = nn.make_with_state(_Net)(key)
    raw = _Net(key)
    params = {"w": jnp.ones((2, 2)), "none": None, "empty": (), "b": [jnp.ones(2)]}
    ones = jtu.tree_map(lambda x: x.ndim > 1, params)
    labels = jtu.tree_map(lambda x: "big" if x.ndim > 1 else "small", params)
    adam = optax.adam(1e-3)
    optimisers = [
        optax.MultiSteps(adam, 2),
        optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
        optax.chain(optax.clip(1.0), optax.sgd(0.1), optax.add_noise(0.1, 0.5, 3)),
        optax.multi_transform({"big": adam, "small": optax.sgd(0.1)}, labels),
        optax.inject_hyperparams(optax.adamw)(1e-3),
        optax.masked(adam, ones),
        optax.apply_if_finite(adam, 3),
        optax.scale_by_lbfgs(memory_size=2),
    ]
    return [
        (model, state),
        {"state": state, "model": model},
        state,
        (raw, nn.State(raw)),
        {"model": nn.delete_init_state(raw), "state": [nn.State(raw)]},
        # Of one entry: more, without the model, could not be told apart.
        nn.State(nn.StateIndex(jnp.ones(2))),
        nn.StateIndex(jnp.ones(2)),
        nn.MLP(2, 2, 3, 1, key=key),
        nn.MLP("scalar", 1, 2, 2, use_bias=False, key=key),
        eqx.filter_vmap(lambda k: nn.Linear(2, 3, key=k))(jr.split(key, 2)),
        nn.Sequential([nn.Linear(1, 1, key=key), nn.Lambda(abs), nn.Sequential([])]),
        nn.Conv1d(1, 2, 1, key=key),
        nn.LayerNorm(2),
        nn.GroupNorm(1, 2),
        nn.GRUCell(1, 2, use_bias=False, key=key),
        nn.MultiheadAttention(1, 2, key=key),
        nn.Embedding(2, 2, key=key),
        nn.PReLU(),
        nn.Shared((jnp.ones(2), {"w": jnp.ones(2), "empty": ()}), _source, _target),
        {"item": Mode.two, "chosen": Mode.where(jnp.array(True), Mode.one, Mode.two)},
        *(optimiser.init(params) for optimiser in optimisers),
        *(optimiser.init(()) for optimiser in optimisers[:2]),
    ]


def make(seed: int, size: int = 12) -> Any:
    """A tree of about `size` leaves, which may have none at all."""
    rng = random.Random(seed)
    return _Maker(rng, rng.randrange(1, 2 * size)).tree()


def twins(seed: int) -> Keyed:
    """A tree of children whose keys give one name. They may be alike, or one."""
    rng = random.Random(seed)
    keys = [jtu.DictKey("1"), jtu.SequenceKey(1), jtu.GetAttrKey("1")]
    first = make(seed, 3)
    second = rng.choice([first, changed(first), make(seed + 1, 3)])
    return Keyed(rng.sample(keys, 2), [first, second])


# ---- Places in a tree, known without any code of ours.


def below(node: Any) -> list[Any] | None:
    """The children of a node; None for a leaf."""
    children, structure = jtu.tree_flatten(node, is_leaf=lambda x: x is not node)
    return None if structure.num_nodes == structure.num_leaves else children


def places(tree: Any, at: tuple[int, ...] = ()) -> tuple[list, list]:
    """The places of all nodes of a tree, and those of its leaves, in their order."""
    children = below(tree)
    if children is None:
        return [], [at]
    nodes, leaves = [at], []
    for number, child in enumerate(children):
        more = places(child, (*at, number))
        nodes += more[0]
        leaves += more[1]
    return nodes, leaves


def at(tree: Any, place: Sequence[int]) -> Any:
    """The node or leaf at a place."""
    for number in place:
        children = below(tree)
        assert children is not None
        tree = children[number]
    return tree
