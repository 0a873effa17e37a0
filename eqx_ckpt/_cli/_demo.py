"""`python -m eqx_ckpt demo`: the README's story on a model that is trained here."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

import eqx_ckpt as ec

from .._format import _text
from .._storage import _root


class Net(eqx.Module):
    """A residual network on two numbers: it learns their product."""

    first: eqx.nn.Linear
    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, *, key: Array):
        first, head, *keys = jr.split(key, depth + 2)
        self.first = eqx.nn.Linear(2, width, key=first)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 1, key=head)

    def __call__(self, x: Float[Array, "2"]) -> Float[Array, "1"]:
        x = self.first(x)
        for layer in self.layers:
            x = x + jax.nn.silu(layer(x))
        return self.head(x)


class Adam(eqx.Module):
    """Adam (Kingma & Ba, https://arxiv.org/abs/1412.6980), to need no more packages."""

    step: Array
    mu: PyTree
    nu: PyTree

    def __init__(self, model: PyTree):
        zeros = jtu.tree_map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
        self.step = jnp.array(0)
        self.mu = zeros
        self.nu = jtu.tree_map(jnp.zeros_like, zeros)

    def update(self, grads: PyTree, rate: float = 3e-3) -> tuple[PyTree, "Adam"]:
        step = self.step + 1
        mu = jtu.tree_map(lambda m, g: 0.9 * m + 0.1 * g, self.mu, grads)
        nu = jtu.tree_map(lambda n, g: 0.999 * n + 0.001 * g * g, self.nu, grads)

        def change(m: Array, n: Array) -> Array:
            m, n = m / (1 - 0.9**step), n / (1 - 0.999**step)
            return -rate * m / (jnp.sqrt(n) + 1e-8)

        where = lambda s: (s.step, s.mu, s.nu)
        return jtu.tree_map(change, mu, nu), eqx.tree_at(where, self, (step, mu, nu))


@eqx.filter_jit
def train_step(model: Net, opt: Adam, key: Array) -> tuple[Net, Adam, Array]:
    x = jr.normal(key, (256, 2))

    @eqx.filter_value_and_grad
    def loss(model: Net) -> Array:
        return jnp.mean((jax.vmap(model)(x)[:, 0] - x[:, 0] * x[:, 1]) ** 2)

    value, grads = loss(model)
    updates, opt = opt.update(grads)
    return eqx.apply_updates(model, updates), opt, value


def _title(text: str) -> None:
    print(f"\n--- {text}")


def _listing(path: pathlib.Path) -> None:
    for file in sorted(path.rglob("*")):
        depth = len(file.relative_to(path).parts)
        if file.is_file():
            size = _text.size(file.stat().st_size)
            print(f"{'  ' * depth}{file.name}  ({size})")
        elif depth == 1 and "." in file.name and not file.name.startswith("model."):
            print(f"{'  ' * depth}{file.name}/ ...")
        else:
            print(f"{'  ' * depth}{file.name}/")


def _listing_zarr(path: pathlib.Path) -> None:
    for entry in sorted(path.iterdir()):
        print(f"  {entry.name}{'/' if entry.is_dir() else ''}")


def _counted(what: str, load: Callable[[], Any]) -> Any:
    with ec.counting() as bytes_read:
        out = load()
    held = sum(x.nbytes for x in jtu.tree_leaves(out) if isinstance(x, jax.Array))
    print(
        f"  {what:<46} {_text.size(held):>9} loaded {_text.size(bytes_read()):>10} read"
    )
    return out


def main(directory: str | None = None) -> None:
    """Trains, saves in both layouts, and loads the parts of it."""
    root = pathlib.Path(directory or tempfile.mkdtemp(prefix="eqx_ckpt-demo-"))
    width, depth = 256, 4
    model = Net(width, depth, key=jr.key(0))
    opt = Adam(model)
    _title("Training a small residual network for 60 steps")
    for step, key in enumerate(jr.split(jr.key(1), 60)):
        model, opt, loss = train_step(model, opt, key)
        if step % 20 == 19:
            print(f"  step {step + 1:3d}   loss {float(loss):.4f}")

    state = {"model": model, "opt": opt}
    hyperparameters = {"width": width, "depth": depth}
    for layout in _root.LAYOUTS:
        ec.tree_serialise_leaves(
            root / layout, state, metadata=hyperparameters, layout=layout
        )
    _title(f'Saved. layout="ocdbt", the default: a few files\n{root / "ocdbt"}')
    _listing(root / "ocdbt")
    _title(f'layout="zarr": a directory for each leaf\n{root / "zarr"}')
    _listing_zarr(root / "zarr")

    _title("print(ec.open(path))")
    path = root / "ocdbt"
    ckpt = ec.open(path)
    print(ckpt)

    _title("Loading, and the bytes that TensorStore read for it")
    sizes = ckpt.metadata["width"], ckpt.metadata["depth"]
    like = eqx.filter_eval_shape(Net, *sizes, key=jr.key(0))
    whole = {"model": like, "opt": eqx.filter_eval_shape(Adam, model)}
    everything = _counted("everything", lambda: ec.tree_deserialise_leaves(path, whole))
    params = _counted(
        "the model, without the optimiser",
        lambda: ec.tree_deserialise_leaves(path, like, source=lambda c: c.model),
    )
    layer = _counted(
        "one layer: where=lambda m: m.layers[2]",
        lambda: ec.tree_deserialise_leaves(
            path, like, source="model", where=lambda m: m.layers[2]
        ).layers[2],
    )
    rows = _counted(
        "one slice: ckpt[...][:8]",
        lambda: ckpt["model.layers.2.weight"][:8].read(verify=False),
    )
    same = bool(eqx.tree_equal(everything, state)) and bool(
        eqx.tree_equal(params, model)
    )
    same = same and bool(jnp.array_equal(rows, layer.weight[:8]))
    print(f"\nAll of it equals what was saved, bit for bit: {same}")
    if not same:
        raise SystemExit(1)
