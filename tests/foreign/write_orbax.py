"""Writes `orbax/VERSION.zip`: `python write_orbax.py`, where a release of Orbax is
installed, and the releases of flax, JAX and NumPy of its time.

In each zip are directories that Orbax wrote, in the ways of that release, all of the
same tree. Releases before 0.2 need what JAX called `gda_serialization` then, which is
`jax.experimental.array_serialization` today.
"""

import importlib.metadata
import pathlib
import shutil
import tempfile
import warnings
import zipfile


warnings.simplefilter("ignore")

import flax  # noqa: E402
import flax.training.checkpoints  # noqa: E402
import flax.training.orbax_utils  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402


here = pathlib.Path(__file__).parent / "orbax"
release = importlib.metadata.version("orbax-checkpoint")


def tree():
    return {
        "params": {
            "dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": np.arange(3)},
            "nothing": {},
        },
        "opt": [jnp.full(2, 0.5, jnp.bfloat16), {"mu": jnp.ones((1, 2))}],
        "step": 7,
        "rate": 0.25,
    }


def is_small(x):
    return not hasattr(x, "shape") or x.shape != (2, 3)


def ways(base):
    """Writers of directories, by what these are called."""
    args = lambda when: jax.tree_util.tree_map(
        lambda x: ocp.SaveArgs(aggregate=when(x)), tree()
    )
    save = lambda name, **more: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(
        base / name, tree(), **more
    )

    def files(name, **more):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
        is_by_type = release == "0.4.4"  # Its handlers of types are asked.
        if is_by_type:
            register = ocp.type_handlers.register_standard_handlers_with_options
            register(use_ocdbt=False)
        ocp.Checkpointer(handler).save(base / name, tree(), **more)
        if is_by_type:
            register(use_ocdbt=True)

    def manager(name, *steps):
        (base / name).mkdir()
        made = ocp.CheckpointManager(
            base / name,
            {"state": ocp.PyTreeCheckpointer(), "more": ocp.PyTreeCheckpointer()},
        )
        for step in steps:
            made.save(step, {"state": tree(), "more": {"width": 8}})

    def by_flax(name, **more):
        flax.training.checkpoints.save_checkpoint(
            str(base / name), tree(), 5, keep=3, **more
        )

    def legacy(name):
        flax.config.update("flax_use_orbax_checkpointing", False)
        by_flax(name)

    def with_orbax(name):
        flax.config.update("flax_use_orbax_checkpointing", True)
        by_flax(name)

    return {
        "tree": save,
        "files": files,
        "aggregate": lambda name: save(name, save_args=args(lambda x: True)),
        "mixed": lambda name: save(name, save_args=args(is_small)),
        "mixed-files": lambda name: files(name, save_args=args(is_small)),
        "flax": with_orbax,
        "flax-legacy": legacy,
        "manager": lambda name: manager(name, 3),
    }


def main():
    here.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as above:
        base = pathlib.Path(above)
        for name, write in ways(base).items():
            try:
                write(name)
            except (TypeError, ValueError, AttributeError, NotImplementedError) as e:
                print(f"{release} does not write `{name}`: {e!r:.150}")
                shutil.rmtree(base / name, ignore_errors=True)
        with zipfile.ZipFile(here / f"{release}.zip", "w", 8) as made:
            for path in sorted(base.rglob("*")):
                made.write(path, path.relative_to(base))


if __name__ == "__main__":
    main()
