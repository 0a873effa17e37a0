"""Functions in checkpoints that mean harm.

Each attack changes a checkpoint with the functions `f`, of the leaf `w` and of an array
of 3, and `g`, which can be differentiated. What is changed has the right digests.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import xxhash

import eqx_ckpt as ec

from . import seal


X = jax.ShapeDtypeStruct((3,), jnp.float32)
ATTACKS: dict[str, Callable[["Held"], None]] = {}


def make(path: pathlib.Path) -> None:
    tree = {"w": jnp.ones(3), "v": jnp.ones(3), "step": 3}
    f = ec.function(lambda t, x: t["w"] * x, X, platforms=["cpu"])
    g = ec.function(lambda t, x: t["w"] * x, X, platforms=["cpu"], vjp_order=1)
    ec.tree_serialise_leaves(path, tree, functions={"f": f, "g": g})


class Held:
    """A checkpoint that is changed: its index, and the files of its functions."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.index = json.loads((path / "eqx_ckpt.json").read_bytes())
        del self.index["digest"]
        self.f, self.g = self.index["functions"].values()

    def file(self, row: dict[str, Any]) -> pathlib.Path:
        save = self.index["save"]
        return self.path / "d" / save / f"function-{row['file']}"

    def put(self, row: dict[str, Any], data: bytes) -> None:
        self.file(row).write_bytes(data)
        row.update(digest=xxhash.xxh3_128_hexdigest(data), nbytes=len(data))

    def export(self, fn: Callable[..., Any], *args: Any, **changes: Any) -> None:
        """Puts another function in the place of `f`, without the checks of JAX."""
        order = changes.pop("order", 0)
        exported = _exported(fn, *args)
        if changes.pop("hides", True):
            changes["disabled_safety_checks"] = ()
        exported = dataclasses.replace(exported, **changes)
        self.put(self.f, bytes(exported.serialize(vjp_order=order)))
        self.f["order"] = order

    def write(self) -> None:
        body = json.dumps(self.index, separators=(",", ":"), ensure_ascii=True)
        text = body.replace('"DEEP"', '{"list":[' * 500 + "null" + "]}" * 500)
        (self.path / "eqx_ckpt.json").write_bytes(seal(text.encode()[:-1]))


def _exported(fn: Callable[..., Any], *args: Any) -> jax.export.Exported:
    checks = [jax.export.DisabledSafetyCheck.custom_call("evil")]
    make = jax.export.export(jax.jit(fn), platforms=["cpu"], disabled_checks=checks)
    return make({"w": X}, *(args or (X,)))


def attack(change: Callable[[Held], None]) -> Callable[[Held], None]:
    ATTACKS[change.__name__] = change
    return change


# ---- The file.


@attack
def truncated(held: Held) -> None:
    held.put(held.f, held.file(held.f).read_bytes()[:-200])


@attack
def nothing(held: Held) -> None:
    held.put(held.f, b"")


@attack
def other_bytes(held: Held) -> None:
    held.put(held.f, bytes(range(256)) * 20)


@attack
def a_pickle(held: Held) -> None:
    held.put(held.f, b"cos\nsystem\n(S'touch evil'\ntR.")


@attack
def longer_than_it_says(held: Held) -> None:
    held.f["nbytes"] -= 1


@attack
def terabytes(held: Held) -> None:
    held.f["nbytes"] = 2**40


@attack
def an_impossible_file(held: Held) -> None:
    held.f["file"] = -1


@attack
def a_file_by_name(held: Held) -> None:
    held.f["file"] = "../../../etc/passwd"


@attack
def two_in_one_file(held: Held) -> None:
    held.f["file"] = held.g["file"]


# ---- What the index says of it.


@attack
def swapped(held: Held) -> None:
    held.f["file"], held.g["file"] = held.g["file"], held.f["file"]


@attack
def swapped_with_its_digest(held: Held) -> None:
    for key in ("file", "digest", "nbytes"):
        held.f[key], held.g[key] = held.g[key], held.f[key]


@attack
def a_signature_of_other_shapes(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", [4]]]}


@attack
def a_signature_of_another_dtype(held: Held) -> None:
    held.f["args"] = {"tuple": [["float16", [3]]]}


@attack
def a_signature_of_another_result(held: Held) -> None:
    held.f["result"] = {"list": [["float32", [3]]]}


@attack
def symbolic_where_it_is_not(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", ["b"]]]}


@attack
def another_platform(held: Held) -> None:
    held.f["platforms"] = ["cpu", "tpu"]


@attack
def derivatives_that_it_lacks(held: Held) -> None:
    held.f["order"] = 1


@attack
def derivatives_that_are_not_told(held: Held) -> None:
    held.f, held.index["functions"]["f"] = held.g, held.g
    del held.index["functions"]["g"]
    held.g["order"] = 0


@attack
def leaves_out_of_the_index(held: Held) -> None:
    held.f["leaves"] = [17]


@attack
def leaves_before_the_index(held: Held) -> None:
    held.f["leaves"] = [-1]


@attack
def a_leaf_that_is_no_array(held: Held) -> None:
    held.f["leaves"] = [held.index["names"].index("step")]


@attack
def other_names(held: Held) -> None:
    held.f["names"] = ["v"]


@attack
def more_names_than_leaves(held: Held) -> None:
    held.f["names"] = ["w", "v"]


@attack
def no_nest(held: Held) -> None:
    held.f["args"] = {"tuple": [{"os": "system"}]}


@attack
def a_dtype_that_is_none(held: Held) -> None:
    held.f["args"] = {"tuple": [["__import__('os')", [3]]]}


@attack
def keys_of_no_implementation(held: Held) -> None:
    held.f["args"] = {"tuple": [["key:evil", []]]}


@attack
def code_as_a_dimension(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", ["__import__('os').system('x')"]]]}


@attack
def a_dimension_of_a_megabyte(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", ["b" * 2**20]]]}


@attack
def a_dimension_that_multiplies_out(held: Held) -> None:
    text = "*".join(f"(a{i}+b{i})" for i in range(24))
    held.f["args"] = {"tuple": [["float32", [text]]]}


@attack
def a_power_that_multiplies_out(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", ["b ^ 123456789"]]]}


@attack
def a_power_in_other_digits(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", ["b^1_0_0_0_0_0_0_0_0_0"]]]}


@attack
def a_power_on_another_line(held: Held) -> None:
    held.f["args"] = {"tuple": [["float32", ["b^\\\n1000000000"]]]}


@attack
def a_deep_signature(held: Held) -> None:
    held.f["result"] = "DEEP"


@attack
def a_gigantic_signature(held: Held) -> None:
    held.f["result"] = {"list": [["float32", [3]]] * 80_000}


# ---- What it does.


def _evil(weights: Any, x: Any) -> Any:
    return jax.ffi.ffi_call("evil", X)(weights["w"]) + x


@attack
def a_custom_call(held: Held) -> None:
    held.export(_evil)


@attack
def a_custom_call_that_is_declared(held: Held) -> None:
    held.export(_evil, hides=False)


@attack
def a_custom_call_in_a_loop(held: Held) -> None:
    def fn(weights: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: _evil(weights, x), x)

    held.export(fn)


@attack
def a_custom_call_in_the_derivative(held: Held) -> None:
    @jax.custom_vjp
    def fn(weights: Any, x: Any) -> Any:
        return weights["w"] * x

    def backwards(residual: Any, g: Any) -> Any:
        return {"w": _evil({"w": g}, g)}, g

    fn.defvjp(lambda weights, x: (fn(weights, x), None), backwards)
    derivative = _exported(fn).vjp()
    hidden = dataclasses.replace(derivative, disabled_safety_checks=())
    held.export(fn, order=1, _get_vjp=lambda _: hidden)


@attack
def other_arguments(held: Held) -> None:
    held.export(lambda weights, x: weights["w"] * x["x"], {"x": X})
