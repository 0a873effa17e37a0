"""Sequences of edits of checkpoints that have functions, held against what they mean.

An edit takes lazy leaves of a checkpoint and makes another tree of them, in which some
are gone, or have other names, or are replaced by leaves of any kind. What comes of it
is what comes of loading everything, doing the same, and saving that; or one error, and
nothing has changed. Memory of the caller's is overwritten as soon as it may be.
"""

import collections
import itertools as it
import operator
import pathlib
import random
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqx_ckpt as ec
from eqx_ckpt._kernel._load import _lazy
from support.helpers import files_of


# ---- Values.


class Value(NamedTuple):
    """A leaf to be saved, and what has to come back. Leaves of one `token` are one
    array; `of` are the tokens of the stored ones that it is computed of."""

    leaf: Any
    facts: Any
    token: Any
    of: frozenset = frozenset()


def facts(x: Any) -> Any:
    """The kind and the bits of a leaf."""
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return "key", str(x.dtype), np.asarray(jr.key_data(x)).tobytes()
        return "jax", x.dtype.name, x.shape, np.asarray(x).tobytes()
    if isinstance(x, (np.ndarray, np.generic)):
        return type(x).__name__, x.dtype.name, x.shape, x.tobytes()
    return type(x).__name__, repr(x)


class Token:
    """Stands for one array."""


def array_of(x: Value) -> np.ndarray:
    """The elements of a jax.Array in float32."""
    return np.frombuffer(x.facts[3], np.float32).reshape(x.facts[2])


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy that JAX takes over without one."""
    memory = np.empty(x.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64
    out = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


class Makers:
    """Leaves of every kind that are made of memory of the caller's: it is kept, to be
    overwritten once it may be."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.memory: list[np.ndarray] = []

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        numbers = [self.rng.randrange(-8, 8) / 4 for _ in range(int(np.prod(shape)))]
        out = aligned(np.asarray(numbers, np.float32).reshape(shape))
        self.memory.append(out)
        return out

    def overwrite(self) -> None:
        for array in self.memory:
            array[...] = 99
        self.memory.clear()

    def make(self, kind: str, shape: tuple[int, ...]) -> Value:
        x = self.array(shape)
        jitted = lambda fn, *args: jax.jit(fn)(*args)
        if kind == "numpy":
            return Value(x, facts(x), Token())
        if kind == "turned":
            return Value(x.T, facts(x.T.copy()), Token())
        if kind == "strided":
            x = self.array((*shape[:-1], 2 * shape[-1]))[..., ::2]
            return Value(x, facts(x.copy()), Token())
        if kind == "zero":
            x = self.array(())
            return Value(x, facts(x), Token())
        if kind == "scalar":
            x = self.array(())[()]
            return Value(x, facts(x), Token())
        if kind == "jax":
            x = jnp.array(x)
            return Value(x, facts(x), Token())
        if kind == "alias":
            y = jnp.asarray(x)
            return Value(y, facts(y), Token())
        if kind == "lazy":
            return Value(DOUBLE(x), facts(jitted(double, x)), Token())
        if kind == "lazy of jax":
            y = jnp.asarray(x)
            return Value(DOUBLE(y), facts(jitted(double, x)), Token())
        if kind == "lazy of lazy":
            fn = lambda w: w - w.max()
            lazy = ec.lazy(fn)(DOUBLE(x))[::-1]
            return Value(lazy, facts(jitted(fn, 2 * x)[::-1]), Token())
        if kind == "closure":
            fn = lambda w: jax.jit(lambda v: v + x)(w) * x
            zeros = np.zeros(shape, np.float32)
            return Value(ec.lazy(fn)(zeros), facts(jitted(fn, zeros)), Token())
        if kind == "merged":
            y = jnp.asarray(self.array(shape))
            lazy = ec.merge([[y], [x]], ec.merging.slerp(0.5))[0]
            return Value(lazy, facts(lazy.read()), Token())
        if kind == "key":
            key = jr.key(self.rng.randrange(99))
            return Value(key, facts(key), Token())
        number = self.rng.choice([1, 1.0, True, 0.0, -0.0, 2.5, 7, 2**70, 1 + 2j])
        return Value(number, facts(number), Token())


KINDS = [
    *("numpy", "turned", "strided", "zero", "scalar", "jax", "alias", "lazy", "key"),
    *("lazy of jax", "lazy of lazy", "closure", "merged", "number"),
]


def double(w: Any) -> Any:
    return w * 2


def scale(w: Any, s: Any) -> Any:
    return (w * s).astype(jnp.float32)


DOUBLE = ec.lazy(double, elementwise=True)
ADD = ec.lazy(operator.add, elementwise=True)
SCALE = ec.lazy(scale)


# ---- The checkpoints.

NAMES = [
    *("enc.w", "enc.b", "dec.w", "dec.b", "host", "step", "enc.rate", "flag", "key"),
    *("net.w", "net.b", "old.w", "old.b", "w", "b", "x.enc.w", "x.dec.b", "spare"),
]
SHAPES = {"w": (2, 3), "b": (3,)}


def _forward(t, x):
    out = (x @ t["enc"]["w"] + t["enc"]["b"]) * t["enc"]["rate"]
    return out @ t["dec"]["w"].T + (1 if t["flag"] is True else 0)


def _bias(t, x):
    return x * t["dec"]["b"]


FUNCTIONS = {
    "forward": ec.function(_forward, jnp.ones((4, 2)), platforms=["cpu"]),
    "bias": ec.function(_bias, jnp.ones(3), platforms=["cpu"]),
}
ARGS = {"forward": (jnp.arange(8.0).reshape(4, 2),), "bias": (jnp.arange(3.0),)}


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        node = out
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return out


def first(is_tied: bool) -> dict[str, Value]:
    w = jnp.arange(6.0).reshape(2, 3) / 4
    leaves = {
        "enc.w": w,
        "enc.b": jnp.arange(3.0) - 1,
        "dec.w": w if is_tied else w + 1,
        "dec.b": jnp.full(3, 0.5),
        "host": np.arange(4.0),
        "step": 7,
        "enc.rate": 0.25,
        "flag": True,
        "key": jr.key(3),
    }
    tokens = {id(leaf): Token() for leaf in leaves.values()}
    return {n: Value(x, facts(x), tokens[id(x)]) for n, x in leaves.items()}


class State(NamedTuple):
    """A checkpoint: what its leaves are, and which of them each argument of each of its
    functions is."""

    path: pathlib.Path
    leaves: dict[str, Value]
    functions: dict[str, dict[str, str]]


def begin(directory: pathlib.Path, rng: random.Random) -> State:
    """A copy of one that was saved once."""
    is_tied, layout = rng.random() < 0.5, rng.choice(["ocdbt", "zarr", "zip"])
    origin = directory.parent / f"first-{layout}-{is_tied}"
    if layout == "zip":
        origin = origin.with_suffix(".zip")
    leaves = first(is_tied)
    if not origin.exists():
        tree = nested({name: x.leaf for name, x in leaves.items()})
        options = {} if layout == "zip" else {"layout": layout}
        ec.tree_serialise_leaves(origin, tree, functions=FUNCTIONS, **options)
    path = directory / origin.name
    (shutil.copy if layout == "zip" else shutil.copytree)(origin, path)
    stored = ec.open(path).functions
    uses = {name: dict(zip(f.names, f.leaves)) for name, f in stored.items()}
    assert uses["forward"].keys() == {"enc.w", "enc.b", "dec.w"}
    return State(path, leaves, uses)


# ---- Edits.


class Campaign:
    """Edits of checkpoints, and all that should not have come of them."""

    def __init__(self, directory: pathlib.Path, seed: int):
        self.directory = directory
        self.rng = random.Random(seed)
        self.makers = Makers(self.rng)
        self.counts: collections.Counter = collections.Counter()
        self.failures: list[str] = []
        self.done: list[str] = []

    def run(self, count: int) -> None:
        """So many saves, in sequences of a few."""
        steps = 0
        for number in it.count():
            place = self.directory / str(number)
            place.mkdir()
            state, self.done = begin(place, self.rng), []
            for _ in range(self.rng.randrange(1, 5)):
                state = self.step(state)
                steps += 1
                if steps == count:
                    return
            shutil.rmtree(place)

    def fail(self, what: str) -> None:
        self.failures.append(f"{what}; after {self.done}")

    # ---- One save.

    def step(self, state: State) -> State:
        rng = self.rng
        stored = ec.open(state.path)
        old = {
            n: x._replace(leaf=stored[n], of=frozenset())
            for n, x in state.leaves.items()
        }
        new = dict(old)
        for _ in range(rng.randrange(4)):
            getattr(self, rng.choice(self.edits))(new, old)
        if not new:
            new = dict(old)
        options: dict[str, Any] = {"durable": False}
        if rng.random() < 0.1:
            options["metadata"] = {"note": rng.random()}
        path = state.path
        if rng.random() < 0.4:
            name = rng.choice(["to", "to.zip"])
            path = path.with_name(f"{len(self.done)}-{name}")
        if path.suffix != ".zip":
            options["layout"] = rng.choice(["ocdbt", "ocdbt", "zarr"])
        if rng.random() < 0.4 and options.get("layout") != "zarr":
            options["reuse"] = state.path
        if rng.random() < 0.05:
            options["functions"] = "drop"
        how = rng.choice(["blocking", "background"])
        self.done.append(f"{how} to {path.name} {options}: {sorted(new)}")
        before = self.contents(path)
        tree = nested({name: x.leaf for name, x in new.items()})
        must, may = self.expected(state, old, new)
        try:
            if how == "blocking":
                ec.tree_serialise_leaves(path, tree, **options)
            else:
                handle = ec.async_tree_serialise_leaves(path, tree, **options)
                handle.staged()
                self.makers.overwrite()
                handle.result()
        except ValueError as e:
            self.counts["refused"] += 1
            known = "cannot be kept" in str(e) and "Nothing was saved" in str(e)
            if not known or must or options.get("functions") == "drop":
                self.fail(f"refused with {e}")
            if self.contents(path) != before:
                self.fail(f"an error, and something has changed: {e}")
            self.makers.overwrite()
            return state
        except Exception as e:
            self.fail(f"{type(e).__name__}: {e}")
            return state
        self.makers.overwrite()
        self.counts["saved"] += 1
        if not may and options.get("functions") != "drop":
            self.fail("saved, with a function of other leaves than those meant")
        return self.check(path, state, old, new, options)

    def contents(self, path: pathlib.Path) -> Any:
        return path.read_bytes() if path.is_file() else files_of(path)

    # ---- What should come of it.

    def expected(self, state: State, old: Any, new: Any) -> tuple[bool, bool]:
        """Whether the functions have to be kept, and whether they may be."""
        is_lazy = [x for x in new.values() if isinstance(x.leaf, ec.LazyArray)]
        if not _lazy.sources_of(x.leaf for x in is_lazy):
            return True, True
        must = may = True
        for uses in state.functions.values():
            for name in uses.values():
                at, token = new.get(name), old[name].token
                places = [n for n, x in new.items() if x.token is token]
                away = [n for n in places if n not in old or old[n].token is not token]
                if at is not None and at.token is token:
                    continue
                must = False
                if at is not None and away:
                    may = False
        for name in ("enc.rate", "flag"):
            if name not in new or new[name].token is not old.get(name, new[name]).token:
                must = False
        return must, may

    def check(
        self, path: pathlib.Path, state: State, old: Any, new: Any, options: Any
    ) -> State:
        ckpt = ec.open(path)
        if {*ckpt} != {*new}:
            self.fail(f"it has {sorted(ckpt)}")
            return State(path, {n: x for n, x in new.items() if n in ckpt}, {})
        for name, x in new.items():
            got = facts(ckpt[name].read())
            if got != x.facts:
                self.fail(f"{name} is {got}, and not {x.facts}")
        if self.rng.random() < 0.1 and ec.verify(path):
            self.fail(f"`verify` found {ec.verify(path)}")
        leaves = ckpt._source.index.leaves
        for a, b in it.combinations(new, 2):
            places = [leaves.leaf_indices[n] for n in (a, b)]
            one, two = (leaves.aliases.get(p, p) for p in places)
            if one == two and new[a].facts != new[b].facts:
                self.fail(f"{a} and {b} are one array")
            is_one = new[a].token is new[b].token
            if one != two and is_one and new[a].facts[0] in ("jax", "ndarray"):
                self.fail(f"{a} and {b} are not one array")
        is_lazy = [x for x in new.values() if isinstance(x.leaf, ec.LazyArray)]
        has_source = bool(_lazy.sources_of(x.leaf for x in is_lazy))
        if options.get("functions") == "drop" or not has_source:
            if ckpt.functions:
                self.fail("it has functions")
            return State(path, new, {})
        if {*ckpt.functions} != {*state.functions}:
            self.fail(f"it has the functions {ckpt.functions}")
        functions = {}
        for name, function in ckpt.functions.items():
            uses = dict(zip(function.names, function.leaves))
            functions[name] = uses
            self.counts["functions kept"] += 1
            weights = function.read()
            for argument, leaf in uses.items():
                self.judge(state.functions[name][argument], leaf, old, new)
                if facts(weights[argument]) != new[leaf].facts:
                    self.fail(f"{name} reads another {argument}")
            if len({*uses.values()}) < len(uses):
                self.fail(f"{name} takes one leaf twice")
            if self.rng.random() < 0.03:
                self.call(name, function, weights)
        return State(path, new, functions)

    def judge(self, was: str, now: str, old: Any, new: Any) -> None:
        """Whether a function may use this leaf now in the place of the one it had."""
        token = old[was].token
        if was in new:
            good = now == was
        elif any(x.token is token for x in new.values()):
            good = new[now].token is token
        else:
            last = [n.rpartition(".")[2] for n in (was, now)]
            leaf = new[now].leaf
            good = isinstance(leaf, ec.LazyArray) and new[now].of == {token}
            good = good and _lazy.stored_leaf(leaf) is None and last[0] == last[1]
        if not good:
            self.fail(f"`{now}` stands for `{was}`")

    def call(self, name: str, function: Any, weights: Any) -> None:
        def fn(weights, x):
            leaves = {**weights, "enc.rate": 0.25, "flag": True}
            return FUNCTIONS[name].fn(nested(leaves), x)

        self.counts["functions called"] += 1
        expected = jax.jit(fn)(weights, *ARGS[name])
        got = function(*ARGS[name])
        if facts(got) != facts(expected):
            self.fail(f"{name} gives {got}, and not {expected}")

    # ---- Kinds of edits.

    edits = [
        *("drop", "rename", "rename", "tie", "swap", "replace", "replace", "compute"),
        *("compute", "move", "several", "view", "cast", "average"),
    ]

    def pick(self, new: dict[str, Value]) -> str | None:
        return self.rng.choice(sorted(new)) if new else None

    def put(self, new: dict[str, Value], name: str, value: Value) -> None:
        """Puts a leaf there, and takes away what cannot be beside it."""
        for other in [*new]:
            if other.startswith(name + ".") or name.startswith(other + "."):
                del new[other]
        new[name] = value

    def drop(self, new: Any, old: Any) -> None:
        name = self.pick(new)
        new.pop(name, None)

    def rename(self, new: Any, old: Any) -> None:
        name = self.pick(new)
        if name is not None:
            self.put(new, self.rng.choice(NAMES), new.pop(name))

    def tie(self, new: Any, old: Any) -> None:
        name = self.pick(new)
        if name is not None:
            self.put(new, self.rng.choice(NAMES), new[name])

    def swap(self, new: Any, old: Any) -> None:
        a, b = self.pick(new), self.pick(new)
        if a is not None and b is not None:
            new[a], new[b] = new[b], new[a]

    def replace(self, new: Any, old: Any) -> None:
        name = self.rng.choice(NAMES)
        shape = SHAPES.get(name.rpartition(".")[2], (2, 2))
        kind = self.rng.choice([*KINDS, "jax", "lazy", "alias"])
        self.counts[kind] += 1
        value = self.makers.make(kind, shape)
        self.put(new, name, value)
        if self.rng.random() < 0.2:
            self.put(new, self.rng.choice(NAMES), value)

    def move(self, new: Any, old: Any) -> None:
        """A node under another name, as it is or computed."""
        node, to = (
            self.rng.choice(["enc", "dec"]),
            self.rng.choice(["net", "x.dec", ""]),
        )
        fn = self.rng.choice([lambda x: x, self.doubled])
        for name in [n for n in new if n.startswith(node + ".")]:
            last = name.rpartition(".")[2]
            self.put(new, f"{to}.{last}" if to else last, fn(new.pop(name)))

    def doubled(self, x: Value) -> Value:
        if x.facts[:2] != ("jax", "float32") or not isinstance(x.leaf, ec.LazyArray):
            return x
        made = facts(jnp.asarray(2 * array_of(x)))
        return Value(DOUBLE(x.leaf), made, Token(), self.of(x))

    def of(self, *values: Value) -> frozenset:
        return frozenset().union(*(x.of or {x.token} for x in values))

    def floats(self, new: Any) -> list[str]:
        return sorted(
            n
            for n, x in new.items()
            if x.facts[:2] == ("jax", "float32") and isinstance(x.leaf, ec.LazyArray)
        )

    def compute(self, new: Any, old: Any) -> None:
        if not self.floats(new):
            return
        name = self.rng.choice(self.floats(new))
        number = self.rng.choice([1, 1.0, True, -0.0, 0.0, 2])
        x = new[name]
        made = jax.jit(lambda w: scale(w, number))(array_of(x))
        value = Value(SCALE(x.leaf, number), facts(made), Token(), self.of(x))
        to = self.rng.choice([name, name, self.rng.choice(NAMES)])
        if self.rng.random() < 0.5:
            new.pop(name)
        self.put(new, to, value)

    def several(self, new: Any, old: Any) -> None:
        pairs = [
            (a, b)
            for a, b in it.product(self.floats(new), repeat=2)
            if new[a].facts[2] == new[b].facts[2]
        ]
        if pairs:
            a, b = self.rng.choice(pairs)
            x, y = array_of(new[a]), array_of(new[b])
            lazy = ADD(new[a].leaf, new[b].leaf)
            of = self.of(new[a], new[b])
            value = Value(lazy, facts(jnp.asarray(x + y)), Token(), of)
            if self.rng.random() < 0.5:
                new.pop(a)
            self.put(new, self.rng.choice([a, self.rng.choice(NAMES)]), value)

    def average(self, new: Any, old: Any) -> None:
        """With an array in memory."""
        if not self.floats(new):
            return
        name = self.rng.choice(self.floats(new))
        x, y = new[name], self.makers.array(new[name].facts[2])
        lazy = ec.merge([[x.leaf], [y]], ec.merging.average())[0]
        expected = facts(jnp.asarray((array_of(x) + y) / np.float32(2)))
        new[name] = Value(lazy, expected, Token(), self.of(x))

    def view(self, new: Any, old: Any) -> None:
        name = self.pick(self.floats(new))
        if name is not None:
            x = new[name]
            made = facts(jnp.asarray(array_of(x)[::-1]))
            value = Value(x.leaf[::-1], made, Token(), self.of(x))
            self.put(new, self.rng.choice([name, "old.w"]), value)

    def cast(self, new: Any, old: Any) -> None:
        name = self.pick(self.floats(new))
        if name is not None:
            x = new[name]
            made = facts(jnp.asarray(array_of(x), jnp.bfloat16))
            new[name] = Value(x.leaf.astype(jnp.bfloat16), made, Token(), self.of(x))


def campaign(directory: pathlib.Path, seed: int, count: int) -> Campaign:
    place = directory / "edits"
    place.mkdir()
    out = Campaign(place, seed)
    out.run(count)
    return out
