"""Two of four processes have arrays, which all save and load."""

from support.leaves_of_some import check, like, some, tree
from support.member import path, rank

import eqx_ckpt as ec


ec.tree_serialise_leaves(path / "c", tree)
check(ec.tree_deserialise_leaves(path / "c", like, reshard="devices"))
ec.async_tree_serialise_leaves(path / "c", tree).result()
check(ec.tree_deserialise_leaves(path / "c", tree, processes=ec.Together("real")))
lazy = ec.open(path / "c")["some"].update(sharding=some)
check({"some": ec.materialise([lazy])[0]})
out, _ = ec.graft(
    {"some": like["some"]},
    path / "c",
    [(lambda m: m["some"], lambda c: c.some)],
    drop=lambda c: [c[name] for name in tree if name != "some"],
)
check(out)
# A process alone stores what it has.
own = {name: x for name, x in tree.items() if x.shape}
ec.tree_serialise_leaves(path / f"own{rank}", own, processes="own")
out = ec.tree_deserialise_leaves(
    path / f"own{rank}", {name: like[name] for name in own}, processes="own"
)
check(out)
print("done")
