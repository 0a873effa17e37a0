"""Arrays on devices of only some of the processes of a run."""

import jax
import numpy as np
from support.processes import good, run_team

import eqx_ckpt as ec


X = np.arange(2**16, dtype=np.float32).reshape(256, 256)

TREE = """
X = np.arange(2**16, dtype=np.float32).reshape(256, 256)
# JAX 0.6 has no arrays without a shard unless it is asked.
if hasattr(jax.config, "jax_enable_empty_arrays"):
    jax.config.update("jax_enable_empty_arrays", True)
late = Mesh(np.asarray(jax.devices()[size:]), ("x",))
some, same_on_some = NamedSharding(late, P("x")), NamedSharding(late, P())
def made(make, sharding):
    return jax.jit(make, out_shardings=sharding)()
def array(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i], x.dtype)
tree = {
    "all": array(X, rows),
    "some": array(X + 1, some),
    "copies": array(X.astype(jnp.bfloat16), same_on_some),
    "small": array(X[:8], some),
    "keys": made(lambda: jax.random.split(jax.random.key(0), 8), some),
    "weak": made(lambda: 2.5, same_on_some),
    "count": made(lambda: jnp.asarray(3), same_on_some),
}
like = {
    name: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=x.sharding, weak_type=getattr(x, "weak_type", False))
    for name, x in tree.items()
}
def data(shard):
    x = shard.data
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)
def check(out):
    for name, y in out.items():
        x = tree[name]
        assert (y.shape, y.dtype, y.sharding) == (x.shape, x.dtype, x.sharding), name
        assert name != "weak" or y.weak_type
        both = zip(y.addressable_shards, x.addressable_shards, strict=True)
        assert all(np.array_equal(data(a), data(b)) for a, b in both), name
"""


def test_two_of_four(tmp_path):
    """They are saved by those that have them, and each loads what it needs."""
    code = f"""{TREE}
ec.tree_serialise_leaves(path / "c", tree)
check(ec.tree_deserialise_leaves(path / "c", like, reshard="devices"))
ec.async_tree_serialise_leaves(path / "c", tree).result()
check(ec.tree_deserialise_leaves(path / "c", tree, processes=ec.Together("real")))
lazy = ec.open(path / "c")["some"].update(sharding=some)
check({{"some": ec.materialise([lazy])[0]}})
out, _ = ec.graft(
    {{"some": like["some"]}}, path / "c", [(lambda m: m["some"], lambda c: c.some)],
    drop=lambda c: [c[name] for name in tree if name != "some"],
)
check(out)
# A process alone stores what it has.
own = {{name: x for name, x in tree.items() if x.shape}}
ec.tree_serialise_leaves(path / f"own{{rank}}", own, processes="own")
out = ec.tree_deserialise_leaves(
    path / f"own{{rank}}", {{name: like[name] for name in own}}, processes="own")
check(out)
print("done")
"""
    assert good(run_team(4, code, tmp_path)) == ["done\n"] * 4
    assert ec.verify(tmp_path / "c") == []
    got = ec.materialise(ec.open(tmp_path / "c").tree)
    assert np.array_equal(got["all"], X) and np.array_equal(got["some"], X + 1)
    assert got["count"] == 3 and got["weak"] == 2.5
    words = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
    assert np.array_equal(jax.random.key_data(got["keys"]), words)
    assert ec.open(tmp_path / "own0")["some"].shape == X.shape
    assert ec.verify(tmp_path / "own0") == ec.verify(tmp_path / "own3") == []


def test_one_of_two(tmp_path):
    """It loads with the other, and alone; the save of both is one error."""
    tree = {"all": X, "some": X + 1}
    ec.tree_serialise_leaves(tmp_path / "c", tree)
    code = f"""{TREE}
tree = {{name: tree[name] for name in ("all", "some")}}
like = {{name: like[name] for name in tree}}
for how in ("devices", "read"):
    options = {{"reshard": how, "processes": ec.Together(how)}}
    check(ec.tree_deserialise_leaves(path / "c", like, **options))
check(ec.tree_deserialise_leaves(
    path / "c", {{"some": like["some"]}}, unexpected="ignore"))
def caught(call):
    try:
        call()
    except Exception as e:
        print(type(e).__name__, str(e).replace(chr(10), " "))
caught(lambda: ec.tree_serialise_leaves(path / "new", tree))
assert not (path / "new").exists()
caught(lambda: ec.tree_serialise_leaves(
    path / "own", {{"a": made(lambda: 1.0, same_on_some)}}, processes="own"))
if hasattr(jax.config, "jax_enable_empty_arrays"):
    jax.config.update("jax_enable_empty_arrays", False)
    old = ec.Together("old", 60)
    caught(lambda: ec.tree_deserialise_leaves(path / "c", like, processes=old))
else:
    print("old: its sharding has no device of this process")
"""
    first, second = good(run_team(2, code, tmp_path))
    for text in (first, second):
        assert "the leaf `some` differs between process 0 and process 1" in text
        assert "devices of one process" in text
        assert "ts sharding has no device of this process" in text
    assert "The leaf `a` cannot be saved: this process has no part of it" in first
    assert "cannot be saved" not in second
