"""Trees for Orbax to restore, and a script that has it do so, in a process of its own.

Orbax is imported only there: it warns, and the number of devices is fixed at the start.
"""

import json
import pathlib
import random
import sys

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import eqx_ckpt as ec
from support import command


LAYOUTS = ("ocdbt", "zarr")
DTYPES = (
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn "
    "float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 complex64 "
    "complex128".split()
)


def numbers(dtype, shape=(8, 3)):
    """An array of a dtype, by its name, in which not all numbers are the same."""
    count = np.arange(int(np.prod(shape))).reshape(shape)
    return (count % 2 + 1).astype(getattr(ml_dtypes, dtype, None) or dtype)


def held():
    """Every kind of leaf and of node that Orbax holds, but for strings."""
    with (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True):
        w = jnp.arange(24.0).reshape(8, 3)
        mlp = eqx.nn.MLP(2, 2, 4, 2, use_bias=False, key=jr.key(0))
        linear = eqx.nn.Linear(2, 2, key=jr.key(1))
        layers = [linear, eqx.nn.Lambda(jnp.sin), eqx.nn.Identity(), mlp]
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        return {
            "jax": {dtype: jnp.asarray(numbers(dtype)) for dtype in DTYPES},
            "numpy": {dtype: numbers(dtype) for dtype in DTYPES},
            "shapes": {
                "scalar": jnp.asarray(2.5),
                "empty": jnp.zeros((0, 3), jnp.bfloat16),
                "empty_numpy": np.zeros((2, 0)),
                "rank32": jnp.ones((1,) * 32),
                "fortran": np.asfortranarray(numbers("float32")),
                "big_endian": numbers("float32").astype(">f4"),
                "spread": jax.device_put(w, _spread(w)),
            },
            "generic": [np.float32(1.5), np.bool_(True), ml_dtypes.bfloat16(2.5)],
            "python": (True, -7, 2**63 - 1, 1.5, 1 + 2j),
            "keys": {
                "one": jr.key(3),
                "more": jr.split(jr.key(4, impl="rbg"), 8),
                "none": jr.split(jr.key(5, impl="unsafe_rbg"), 0),
                "raw": jr.PRNGKey(6),
            },
            "tied": [w, {"again": w}],
            "nothing": [None, {}, [], (), optax.EmptyState(), eqx.nn.Identity(), w],
            "model": eqx.nn.Sequential([*layers, eqx.nn.Dropout(0.5)]),
            "norm": eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="batch"),
            "opt": tx.init(eqx.filter(mlp, eqx.is_array)),
            "ints": {0: w, 7: w},
        }


def spoilt():
    """What Orbax cannot hold, beside what it can."""
    w, u = jnp.arange(3, dtype="float32"), jnp.arange(3).astype("uint4")
    return {
        "w": w,
        "str": {"text": 'h\u00e9\n"\0', "empty": "", "half": "\ud800"},
        "u": u,
        "bytes": b"ab",
        "big": 2**70,
        "float8": np.arange(3).astype(ml_dtypes.float8_e4m3),
        "float0": np.zeros(3, jax.dtypes.float0),
        "a.b": w,
        "": {"w": w},
        "_METADATA": w,
        "list": [u, w, {"u": u}, [u, w], w, u],
    }


def held_of_spoilt():
    w = jnp.arange(3, dtype="float32")
    return {
        "w": w,
        "str": {"text": 'h\u00e9\n"\0', "empty": ""},
        "list": [None, w, None, [None, w], w],
    }


def random_tree(rng, depth=0):
    """A tree of nested containers, of leaves, and of nothing."""
    kinds = ["dict", "list", "tuple", *["leaf", "none", "function"] * bool(depth)]
    kind = rng.choice(kinds[-3:] if depth == 4 else kinds)
    if kind not in ("dict", "list", "tuple"):
        leaf = rng.choice([np.arange(rng.randrange(9)), rng.randrange(9)])
        return {"leaf": leaf, "none": None, "function": len}[kind]
    children = [random_tree(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == "dict":
        return dict(zip(rng.sample(["a", "b", "x1", "7", "B-_"], 4), children))
    return children if kind == "list" else tuple(children)


# ---- Comparison.


def _is_empty(x):
    structure = jtu.tree_structure(x)
    return structure.num_nodes == 1 and structure.num_leaves == 0


def _entries(tree):
    """The leaves by name; and the empty nodes, as Orbax has them without a target."""
    pairs, _ = jtu.tree_flatten_with_path(tree, is_leaf=_is_empty)
    return {
        jtu.keystr(path, simple=True, separator="."): (
            type(x)() if type(x) in (dict, list, tuple) else None
        )
        if _is_empty(x)
        else x
        for path, x in pairs
    }


def _is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_same(got, x):
    """Whether Orbax gives `x` back, bit for bit and as the kind of leaf that it is.

    NumPy's scalars and complex numbers come back as arrays without axes.
    """
    if _is_key(x):
        return got.dtype == x.dtype and _is_same(jr.key_data(got), jr.key_data(x))
    if isinstance(x, (np.generic, complex)):
        x = np.asarray(x)
    if not isinstance(x, (jax.Array, np.ndarray)):
        return type(got) is type(x) and got == x
    if not isinstance(got, jax.Array if isinstance(x, jax.Array) else np.ndarray):
        return False
    a, b = np.asarray(got), np.asarray(x)
    b = b.astype(b.dtype.newbyteorder("="))
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _differences(got, expected):
    a, b = _entries(got), _entries(expected)
    wrong = [f"{name} is only in one" for name in sorted(a.keys() ^ b.keys())]
    both = a.keys() & b.keys()
    return wrong + [f"{n} is {a[n]!r}" for n in both if not _is_same(a[n], b[n])]


# ---- Orbax. Each of these yields what it tried and what was wrong.


def _readers():
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    def by_pytree(path, target=None):
        args = None
        if any(getattr(x, "sharding", None) for x in jax.tree.leaves(target)):
            args = ocp.checkpoint_utils.construct_restore_args(target)
        return ocp.PyTreeCheckpointer().restore(path, item=target, restore_args=args)

    return {
        "v0 standard": ocp.StandardCheckpointer().restore,
        "v0 pytree": by_pytree,
        "v1": getattr(v1, "load", v1.load_pytree),
    }


def _spread(x):
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    divides = x.ndim and x.shape[0] and x.shape[0] % jax.device_count() == 0
    return jax.sharding.NamedSharding(mesh, P("x") if divides else P())


def _targets(tree):
    """Trees that say how Orbax is to restore `tree`."""

    def target(x, sharding=None):
        if isinstance(x, jax.Array):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        # Orbax refuses targets with NumPy's scalars or complex numbers in them.
        return np.asarray(x) if isinstance(x, (np.generic, complex)) else x

    def spread(x):
        return target(x, _spread(x)) if isinstance(x, jax.Array) else target(x)

    def real(x):
        return x if isinstance(x, jax.Array) else target(x)

    return {
        "abstract": jax.tree.map(target, tree),
        "spread": jax.tree.map(spread, tree),
        "real": jax.tree.map(real, tree),
    }


def restores(root):
    expected = eqx.filter(held(), ec.is_storable)
    targets = _targets(expected)
    for layout in LAYOUTS:
        for name, restore in _readers().items():
            path = root / layout
            yield (layout, name), _differences(restore(path), expected)
            for kind, target in targets.items():
                got = restore(path, target)
                wrong = _differences(got, expected)
                if jtu.tree_structure(got) != jtu.tree_structure(expected):
                    wrong.append("the structure")
                for x, array in zip(jax.tree.leaves(target), jax.tree.leaves(got)):
                    sharding = getattr(x, "sharding", None)
                    if sharding and not array.sharding.is_equivalent_to(
                        sharding, x.ndim
                    ):
                        wrong.append(f"{array.sharding} instead of {sharding}")
                yield (layout, name, kind), wrong


def leaves_out(root):
    """A leaf that Orbax cannot hold does not keep it from the others."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    expected = held_of_spoilt()
    # Its own word for what is not to be restored.
    target = {key: ... for key in spoilt()} | expected
    target["str"] = {**expected["str"], "half": ...}
    for layout in LAYOUTS:
        path = root / f"{layout}-spoilt"
        for name, restore in _readers().items():
            yield (layout, name), _differences(restore(path), expected)
        for name, restore in {
            "v0 pytree": lambda p, t: ocp.PyTreeCheckpointer().restore(p, item=t),
            "v1": getattr(v1, "load", v1.load_pytree),
        }.items():
            got = restore(path, target)
            left = {key: got.pop(key) for key in target.keys() - expected.keys()}
            wrong = [key for key, x in left.items() if x is not ...]
            wrong += ["half"] * (got["str"].pop("half") is not ...)
            yield (layout, name, "target"), wrong + _differences(got, expected)


def random_trees(root, count=8):
    rng = random.Random(0)
    for number in range(count):
        tree = expected = None
        while not jax.tree.leaves(expected):
            tree = random_tree(rng)
            expected = eqx.filter(tree, ec.is_storable)
        path = root / f"random{number}"
        ec.tree_serialise_leaves(path, tree, durable=False, orbax=True)
        for name, restore in _readers().items():
            wrong = _differences(restore(path), expected)
            got = restore(path, expected)
            wrong += _differences(got, expected)
            if jtu.tree_structure(got) != jtu.tree_structure(expected):
                wrong.append(f"{got} instead of {expected}")
            yield (str(number), name), wrong


def more_random_trees(root):
    yield from random_trees(root, 25)


def long_names(root):
    """A long name is the name of a directory only as far as it fits."""
    for layout, expected in {"ocdbt": {"a": 1, "x" * 201: 2}, "zarr": {"a": 1}}.items():
        for name, restore in _readers().items():
            yield (layout, name), _differences(restore(root / layout), expected)


def parts(root):
    """A part of a tree: lists keep their places, and nothing else is there."""
    w = np.arange(3)
    tree = {"m": [w, [w], {"a": w, "b": None, "c": len}], "o": (None, {"d": w}, None)}
    for layout in LAYOUTS:
        path = root / f"part-{layout}"
        where = lambda t: (t["m"][2], t["o"][1]["d"])
        ec.tree_serialise_leaves(path, tree, where=where, layout=layout, orbax=True)
        expected = {
            "m": [None, None, {"a": w, "b": None, "c": None}],
            "o": [None, {"d": w}],
        }
        for name, restore in _readers().items():
            yield (layout, name), _differences(restore(path), expected)


def other_nodes(root):
    """Nodes that are neither lists nor dicts."""
    w = np.arange(3)
    a, x = jtu.GetAttrKey("a"), jtu.DictKey("x")
    zero, one, far = map(jtu.SequenceKey, (0, 1, 10**9))
    cases = [
        (Node({a: w, one: [w], x: w}), {"a": w, "1": [w], "x": w}),
        (Node({zero: w, a: w, one: w}), [w, w]),
        (Node({one: w, zero: [w]}), [[w], w]),
        (Node({far: w}), {str(10**9): w}),
        (Node({zero: w, far: w}), [w]),
        ([Node({far: {"y": w}}), w], [{str(10**9): {"y": w}}, w]),
    ]
    for number, (tree, expected) in enumerate(cases):
        path = root / f"node{number}"
        ec.tree_serialise_leaves(path, {"n": tree}, durable=False, orbax=True)
        for name, restore in _readers().items():
            wrong = _differences(restore(path), {"n": expected})
            yield (str(number), name), wrong


@jtu.register_pytree_with_keys_class
class Node:
    def __init__(self, children):
        self.children = children

    def tree_flatten_with_keys(self):
        return list(self.children.items()), tuple(self.children)

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(dict(zip(keys, children)))


def overwritten(root):
    """After an overwrite Orbax sees the new leaves and values, and no old ones."""
    first = {"a": jnp.zeros(3), "key": jr.key(0), "old": [jnp.zeros(2), 1]}
    second = {"a": jnp.ones(5), "new": {"b": jnp.ones(2), "n": None}}
    for before in LAYOUTS:
        for layout in LAYOUTS:
            path = root / f"overwritten-{before}-{layout}"
            readers = _readers()
            saves = [(first, before), (second, layout), (first, layout)]
            for number, (tree, to) in enumerate(saves):
                ec.tree_serialise_leaves(path, tree, layout=to, orbax=True)
                for name, restore in readers.items():
                    wrong = _differences(restore(path), tree)
                    yield (before, layout, str(number), name), wrong
            ec.tree_serialise_leaves(
                path, {"u": b"ab"}, lambda x: True, layout=layout, orbax=True
            )
            for name, restore in readers.items():
                try:
                    wrong = [repr(restore(path))]
                except Exception as e:
                    good = isinstance(e, (FileNotFoundError, ValueError))
                    wrong = [] if good else [repr(e)]
                yield (before, layout, "unheld", name), wrong


def missing_chunk(root):
    """A chunk that is lost is an error, and not zeros."""
    path = root / "missing"
    ec.tree_serialise_leaves(path, {"w": jnp.ones(3)}, layout="zarr", orbax=True)
    (path / "w" / "c" / "0").unlink()
    for name, restore in _readers().items():
        try:
            wrong = [repr(restore(path))]
        except Exception as e:
            wrong = [] if "array index" in str(e) else [repr(e)]
        yield (name,), wrong


def skeletons(root):
    """A model comes back into its skeleton."""
    model = eqx.nn.MLP(2, 2, 4, 2, key=jr.key(0))
    skeleton = eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 4, 2, key=jr.key(0))
    for layout in LAYOUTS:
        ec.tree_serialise_leaves(
            root / f"model-{layout}", model, layout=layout, orbax=True
        )
        for name, restore in _readers().items():
            target = eqx.filter(skeleton, ec.is_storable)
            got = restore(root / f"model-{layout}", target)
            whole = eqx.combine(got, skeleton)
            yield (layout, name), [] if eqx.tree_equal(whole, model) else [repr(got)]


def manager(root):
    """A CheckpointManager finds our directories as `default` in its steps."""
    import orbax.checkpoint as ocp

    tree = {"w": jnp.ones(3), "n": None}
    for layout in LAYOUTS:
        ec.tree_serialise_leaves(
            root / f"steps-{layout}" / "7" / "default",
            tree,
            layout=layout,
            orbax=True,
        )
        with ocp.CheckpointManager(root / f"steps-{layout}") as manager:
            step = manager.latest_step()
            got = manager.restore(step, args=ocp.args.StandardRestore())
        yield (layout,), ["step"] * (step != 7) + _differences(got, tree)


def doors(root):
    """Files for Orbax from every door that writes them, for all of their readers."""
    for layout in LAYOUTS:
        for kind, part in held().items():
            tree, expected = {kind: part}, eqx.filter({kind: part}, ec.is_storable)
            for door, write in _DOORS.items():
                base = root / f"{layout}-{kind}-{door}"
                path = base / "7" / "default"
                write(path, tree, layout)
                for name, restore in _readers().items():
                    case = layout, kind, door, name
                    yield case, _differences(restore(path), expected)
                for commit in ("rename", "COMMIT_FILE")[: 1 + (door == "manager")]:
                    got = _by_manager(base, commit)
                    case = layout, kind, door, f"manager, {commit}"
                    yield case, _differences(got, expected)
                yield (layout, kind, door, "TensorStore"), _unread(path, expected)
                if layout == "zarr":
                    wrong = _unlisted(path, expected)
                    yield (layout, kind, door, "zarr-python"), wrong


def _by_save(path, tree, layout):
    ec.tree_serialise_leaves(path, tree, layout=layout, orbax=True)


def _by_async_save(path, tree, layout):
    ec.async_tree_serialise_leaves(path, tree, layout=layout, orbax=True).result()


def _by_own_manager(path, tree, layout):
    run = path.parent.parent
    with ec.CheckpointManager(run, layout=layout, orbax=True) as manager:
        manager.save(7, tree)


def _by_write_orbax(path, tree, layout):
    ec.tree_serialise_leaves(path, tree, layout=layout)
    ec.write_orbax(path)


def _by_convert(path, tree, layout):
    source = path.parent.parent.with_suffix(".zip")
    ec.tree_serialise_leaves(source, tree)
    ec.convert(source, path, layout=layout, orbax=True)


def _by_command(path, tree, layout):
    ec.tree_serialise_leaves(path, tree, layout=layout)
    assert command.main(["convert", "--orbax", path]) == 0


_DOORS = {
    "save": _by_save,
    "async save": _by_async_save,
    "manager": _by_own_manager,
    "write_orbax": _by_write_orbax,
    "convert": _by_convert,
    "command": _by_command,
}


def _by_manager(base, commit):
    import orbax.checkpoint as ocp

    mode = {"rename": None, "COMMIT_FILE": ocp.options.AtomicityMode.COMMIT_FILE}
    atomicity = mode[commit] and ocp.options.AtomicityOptions(mode=mode[commit])
    options = ocp.CheckpointManagerOptions(atomicity_options=atomicity)
    with ocp.CheckpointManager(base, options=options) as manager:
        return manager.restore(7, args=ocp.args.StandardRestore())


def _stored_of(tree):
    """The arrays of leaves by name, as other readers than Orbax see them."""
    names = jax.tree.leaves(ec.leaf_names(tree))
    leaves = [jr.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(tree)]
    arrays = map(np.asarray, leaves)
    return {
        name: x.astype(x.dtype.newbyteorder("="))
        for name, x in zip(names, arrays, strict=True)
    }


def _are_bits(got, x):
    return (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())


def _unread(path, tree):
    import tensorstore as ts

    ckpt = ec.open(path)
    return [
        name
        for name, x in _stored_of(tree).items()
        for way in (ckpt[name].url, ckpt.spec(name))
        if not _are_bits(ts.open(way, read=True).result().read().result(), x)
    ]


def _unlisted(path, tree):
    import zarr

    lacking = ("int2", "int4", "float4", "float8", "bfloat16")
    stored = _stored_of(tree).items()
    own = {name: x for name, x in stored if not x.dtype.name.startswith(lacking)}
    arrays = dict(zarr.open_group(path, mode="r").arrays())
    both = own.keys() & arrays.keys()
    wrong = [n for n in both if not _are_bits(np.asarray(arrays[n][...]), own[n])]
    return sorted(own.keys() ^ arrays.keys()) + wrong


def main(root, *checks):
    jax.config.update("jax_enable_x64", True)
    report = {}
    for check in checks:
        for case, wrong in globals()[check](pathlib.Path(root)):
            report[", ".join((check, *case))] = wrong
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
