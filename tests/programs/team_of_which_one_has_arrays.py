"""One of two processes has arrays. Prints the errors of saves and loads."""

import jax
from support.leaves_of_some import check, like, made, same_on_some, tree
from support.member import caught, path

import eqx_ckpt as ec


tree = {name: tree[name] for name in ("all", "some")}
like = {name: like[name] for name in tree}
for how in ("devices", "read"):
    options = {"reshard": how, "processes": ec.Together(how)}
    check(ec.tree_deserialise_leaves(path / "c", like, **options))
check(
    ec.tree_deserialise_leaves(path / "c", {"some": like["some"]}, unexpected="ignore")
)
caught(lambda: ec.tree_serialise_leaves(path / "new", tree))
assert not (path / "new").exists()
caught(
    lambda: ec.tree_serialise_leaves(
        path / "own", {"a": made(lambda: 1.0, same_on_some)}, processes="own"
    )
)
if hasattr(jax.config, "jax_enable_empty_arrays"):
    jax.config.update("jax_enable_empty_arrays", False)
    old = ec.Together("old", 60)
    caught(lambda: ec.tree_deserialise_leaves(path / "c", like, processes=old))
else:
    print("old: its sharding has no device of this process")
