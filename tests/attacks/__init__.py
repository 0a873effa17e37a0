"""Checkpoints that mean harm. Each generator turns a good checkpoint into one, and its
docstring says in a sentence what it tries.

`refused` says where it must fail: at `open`; when its leaves are shown or their tree is
made (`touch`); when they are read (`read`); None: it must do no harm, and load right.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xxhash
from support import inside

import eqx_ckpt as ec


class Net(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    width: int = eqx.field(static=True)


def tree() -> Any:
    """What the good checkpoint holds: leaves of all kinds, small and of many chunks."""
    shared = jnp.arange(6.0)
    return {
        "net": Net(jnp.arange(2.0**15).reshape(256, 128), jnp.ones(3), 4),
        "list": [jnp.arange(3), np.arange(4.0), 1, 2.5, True, 1j, 2**70],
        "shared": (shared, shared),
        "key": jr.key(1),
        "text": "héllo",
    }


def skeleton() -> Any:
    out = eqx.filter_eval_shape(tree)
    leave = lambda t: (t["list"][1], t["text"])
    return eqx.tree_at(leave, out, (np.zeros(4), ""))


def everything(_: Any) -> bool:
    return True


# Kinds of good checkpoints: a layout, and how large leaves are compressed.
KINDS = {
    "ocdbt": ("ocdbt", None),
    "zarr": ("zarr", None),
    "ocdbt-lz4": ("ocdbt", "lz4"),
    "zarr-lz4": ("zarr", "lz4"),
    "ocdbt-zstd": ("ocdbt", "zstd"),
}


def save(path: pathlib.Path, kind: str) -> None:
    layout, compression = KINDS[kind]
    ec.tree_serialise_leaves(
        path,
        tree(),
        everything,
        layout=layout,
        compression=compression,
        chunks=lambda name, *_: (32, 128) if name == "net.weight" else None,
        durable=False,
        orbax=True,
    )


@dataclasses.dataclass(frozen=True)
class Attack:
    name: str
    make: Callable[[pathlib.Path, pathlib.Path], None]
    refused: str | None
    kind: str
    match: str


ATTACKS: dict[str, Attack] = {}


def attack(refused: str | None, match: str = "", kind: str = "ocdbt") -> Callable:
    """Registers a generator `(path of a good checkpoint, a directory outside)`.

    `match` is a regular expression for the error.
    """

    def register(make: Callable) -> Callable:
        assert make.__doc__ and make.__name__ not in ATTACKS
        name = make.__name__.removesuffix("_")
        ATTACKS[name] = Attack(name, make, refused, kind, match)
        return make

    return register


# ---- What generators are made of.


def index_of(path: pathlib.Path) -> dict[str, Any]:
    return json.loads((path / "eqx_ckpt.json").read_bytes())


def seal(body: bytes) -> bytes:
    """The bytes of an index, which are right in all but what they say."""
    digest = xxhash.xxh3_128_hexdigest(body)
    return body + f',"digest":"{digest}"}}'.encode()


def forge(path: pathlib.Path, alter: Callable[[dict[str, Any]], Any]) -> None:
    """Replaces the index by one that says something else, with the digest to match."""
    value = index_of(path)
    del value["digest"]
    alter(value)
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    (path / "eqx_ckpt.json").write_bytes(seal(body))


def forge_text(path: pathlib.Path, alter: Callable[[bytes], bytes]) -> None:
    """As `forge`, of the text of the index without its digest."""
    body = (path / "eqx_ckpt.json").read_bytes()[:-45]
    (path / "eqx_ckpt.json").write_bytes(seal(alter(body)))


def place(value: dict[str, Any], name: str) -> int:
    return value["names"].index(name)


def template(value: dict[str, Any], name: str, **changes: Any) -> None:
    """Gives a leaf a template of its own, changed."""
    fields = "keys kind dtype shape stored chunk weak impl codec".split()
    old = value["templates"][value["template"][place(value, name)]]
    new = {**dict(zip(fields, old)), **changes}
    value["template"][place(value, name)] = len(value["templates"])
    value["templates"].append([new[f] for f in fields])


def offset(path: pathlib.Path, name: str) -> int:
    """Where a leaf begins in its data file (`ocdbt`)."""
    return inside.runs_of(path, name)[0][3]


def data(path: pathlib.Path) -> pathlib.Path:
    """The directory of the data files (`ocdbt`)."""
    return path / "d" / index_of(path)["save"]


def redigest(path: pathlib.Path, digests: bytes) -> None:
    """Replaces the file of digests, and what the index says its digest is."""
    in_files = (path / "d").exists()
    file = data(path) / "digests" if in_files else path / "eqx_ckpt.digests"
    file.write_bytes(digests)
    forge(path, lambda v: v.update(digests=xxhash.xxh3_128_hexdigest(digests)))


def move(file: pathlib.Path, outside: pathlib.Path) -> pathlib.Path:
    """Moves a file or directory out of the checkpoint, to link to it from there."""
    target = outside / f"moved-{file.name}"
    shutil.move(file, target)
    return target


from . import _contents, _files, _index, _names, _places, _sizes, _structure  # noqa: E402, F401
