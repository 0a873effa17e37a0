"""`python -m eqx_ckpt demo`: the README's story on a model that is trained here."""

import functools as ft
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

import eqx_ckpt as ec

from .._kernel._format import _layouts, _text


def _net(width: int, depth: int) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 1, width, depth, jax.nn.silu, key=jr.key(0))


def _adam(model: PyTree) -> dict[str, PyTree]:
    """The state of Adam (Kingma & Ba, https://arxiv.org/abs/1412.6980), which needs no
    more packages here."""
    weights = eqx.filter(model, eqx.is_array)
    mu, nu = (jtu.tree_map(jnp.zeros_like, weights) for _ in range(2))
    return {"step": jnp.array(0), "mu": mu, "nu": nu}


@eqx.filter_jit
def train_step(
    model: eqx.nn.MLP, opt: dict[str, PyTree], key: Array
) -> tuple[eqx.nn.MLP, dict[str, PyTree], Array]:
    """A step in which the network learns the product of its two numbers."""
    x = jr.normal(key, (256, 2))

    @eqx.filter_value_and_grad
    def loss(model: eqx.nn.MLP) -> Array:
        return jnp.mean((jax.vmap(model)(x)[:, 0] - x[:, 0] * x[:, 1]) ** 2)

    value, grads = loss(model)
    step = opt["step"] + 1
    mu = jtu.tree_map(lambda m, g: 0.9 * m + 0.1 * g, opt["mu"], grads)
    nu = jtu.tree_map(lambda n, g: 0.999 * n + 0.001 * g * g, opt["nu"], grads)

    def change(m: Array, n: Array) -> Array:
        m, n = m / (1 - 0.9**step), n / (1 - 0.999**step)
        return -3e-3 * m / (jnp.sqrt(n) + 1e-8)

    model = eqx.apply_updates(model, jtu.tree_map(change, mu, nu))
    return model, {"step": step, "mu": mu, "nu": nu}, value


def _title(text: str) -> None:
    print(f"\n--- {text}")


def _listing(path: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    for file in sorted(files):
        indent = "  " * len(file.relative_to(path).parts)
        size = f"  ({_text.size(file.stat().st_size)})" if file.is_file() else "/"
        print(f"{indent}{file.name}{size}")


def _counted(what: str, load: Callable[[], Any]) -> Any:
    with ec.counting() as bytes_read:
        out = load()
    held = sum(x.nbytes for x in jtu.tree_leaves(out) if isinstance(x, jax.Array))
    print(
        f"  {what:<46} {_text.size(held):>9} loaded {_text.size(bytes_read()):>10} read"
    )
    return out


def demo(directory: str | None) -> None:
    """Trains, saves in both layouts, and loads the parts of it."""
    root = pathlib.Path(directory or tempfile.mkdtemp(prefix="eqx_ckpt-demo-"))
    hyperparameters = {"width": 256, "depth": 5}
    model = _net(**hyperparameters)
    opt = _adam(model)
    _title("Training a small network for 60 steps")
    for step, key in enumerate(jr.split(jr.key(1), 60)):
        model, opt, loss = train_step(model, opt, key)
        if step % 20 == 19:
            print(f"  step {step + 1:3d}   loss {float(loss):.4f}")

    state = {"model": model, "opt": opt}
    for layout in get_args(_layouts.Layout):
        ec.tree_serialise_leaves(
            root / layout, state, metadata=hyperparameters, layout=layout
        )
    _title(f'Saved. layout="ocdbt", the default: a few files\n{root / "ocdbt"}')
    _listing(root / "ocdbt", (root / "ocdbt").rglob("*"))
    _title(f'layout="zarr": a directory for each leaf\n{root / "zarr"}')
    _listing(root / "zarr", (root / "zarr").iterdir())

    _title("print(ec.open(path))")
    path = root / "ocdbt"
    ckpt = ec.open(path)
    print(ckpt)

    _title("Loading, and the bytes that were read for it")
    like = eqx.filter_eval_shape(_net, **ckpt.metadata)
    whole = {"model": like, "opt": eqx.filter_eval_shape(_adam, model)}
    load = ft.partial(ec.tree_deserialise_leaves, path)
    everything = _counted("everything", lambda: load(whole))
    params = _counted(
        "the model, without the optimiser", lambda: load(like, source="model")
    )
    layer = _counted(
        "one layer: where=lambda m: m.layers[2]",
        lambda: load(like, source="model", where=lambda m: m.layers[2]).layers[2],
    )
    rows = _counted(
        "one slice: ckpt[...][:8]",
        lambda: ckpt["model.layers.2.weight"][:8].read(verify=False),
    )
    saved = state, model, layer.weight[:8]
    same = bool(eqx.tree_equal((everything, params, rows), saved))
    print(f"\nAll of it equals what was saved, bit for bit: {same}")
    if not same:
        raise SystemExit(1)
