"""Damages the files of a checkpoint in turn, and judges what comes of it.

test_corruption.py runs this in processes of their own, without the type checks of the
tests, which would take ten times as long as what they check.
"""

import collections
import itertools as it
import json
import math
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _files
from support import inside
from support.helpers import facts, files_of


ALL = lambda x: ec.is_storable(x) or isinstance(x, (str, bytes))


class Net(eqx.Module):
    norm: eqx.nn.BatchNorm
    layers: list[eqx.nn.Linear]
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.layers = [eqx.nn.Linear(5, 7, key=k) for k in keys[:2]]
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=keys[2])


def a_tree(seed: int) -> Any:
    """Leaves of every kind: of no chunk, one and many, alone and shared."""
    rng = np.random.default_rng(seed)
    model, state = eqx.nn.make_with_state(Net)(jr.key(seed))
    shared, host = jnp.asarray(rng.random(9)), rng.random((2, 3))
    floats = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return {
        "model": model,
        "state": state,
        "large": jnp.asarray(floats(150, 120).round(1)),
        "rows": jnp.asarray(floats(40, 11)),
        "tiles": floats(7, 11),
        "shared": [shared, {"a.b": shared}, host, host],
        "small": [
            jnp.asarray(floats(6), jnp.bfloat16),
            jnp.asarray(floats(6)).astype(jnp.float8_e4m3fn),
            np.asarray(floats(6)).astype(ml_dtypes.float8_e4m3),
            jnp.asarray(rng.integers(-8, 8, 5), jnp.int4),
            np.asarray(rng.integers(0, 16, 5)).astype(ml_dtypes.uint4),
            rng.integers(0, 2, 5).astype(bool),
            floats(3) + 1j * floats(3),
            rng.integers(-(2**60), 2**60, 4),
            np.zeros((2, 2), jax.dtypes.float0),
            jnp.zeros((0, 3)),
            jnp.full(3, float(seed)) * 1.0,
            jnp.asarray(2.0 + seed),
        ],
        "scalars": [
            np.float32(seed + 0.5),
            np.float64(seed + 0.25),
            bool(seed % 2),
            seed + 12,
            seed + 0.125,
            complex(seed, 3),
            2**100 + seed,
            f"text {seed}",
            bytes([seed, 0, 255]),
        ],
        "keys": [jr.key(seed), jr.split(jr.key(seed, impl="rbg"), 2)],
        "n" * 210: jnp.asarray(floats(2)),
    }


METADATA = {"width": 64, "rate": 0.5, "names": ["a", None, "ü"]}


def save(path: pathlib.Path, tree: Any, layout: str, compression: str | None) -> None:
    """Saves in small chunks, small data files and small nodes: many of each."""
    large = (150, 120) if compression is None else (60, 120)

    def chunks(name, shape, dtype):
        own = {"large": large, "tiles": (3, 4)}.get(name)
        return own or [max(1, min(n, 6) if i == 0 else n) for i, n in enumerate(shape)]

    with pytest.MonkeyPatch.context() as patch:
        inside.limit(patch, min_file_bytes=1500, node_entries=64)
        ec.tree_serialise_leaves(
            path,
            tree,
            ALL,
            metadata=METADATA,
            layout=layout,
            chunks=chunks,
            compression=compression,
        )


class Chunk(NamedTuple):
    """A chunk, by FORMAT.md: its place, and the names of the leaf that it is of."""

    file: str
    start: int
    stop: int
    names: frozenset[str]
    index: tuple[int, ...]
    is_compressed: bool


def chunks_of(root: pathlib.Path) -> list[Chunk]:
    index = json.loads((root / "eqx_ckpt.json").read_bytes())
    names, aliases = index["names"], dict(index["aliases"])
    values = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{root}/d/{index['save']}/"}
        if index["layout"] == "ocdbt"
        else {"driver": "file", "path": f"{root}/"}
    ).result()
    shared = collections.defaultdict(set)
    for place, name in enumerate(names):
        shared[aliases.get(place, place)].add(name)
    out = []
    for place, name in enumerate(names):
        if index["layout"] == "ocdbt" and place in aliases:
            continue
        template = index["templates"][index["template"][place]]
        _, _, _, shape, stored, chunk, _, _, codec = template
        full = math.prod(chunk) * jnp.dtype(stored).itemsize
        at = {}
        if index["layout"] == "ocdbt":
            runs = inside.runs_of(root, name)
            at = {first: where for first, _, *where in runs}
        grid = [-(-n // c) for n, c in zip(shape, chunk)]
        file, start = "", 0
        for number, position in enumerate(np.ndindex(*grid)):
            if index["layout"] == "ocdbt":
                if number in at:
                    number, start = at[number]
                    file = f"d/{index['save']}/{index['files'][number]}"
            else:
                parts = ["c", *map(str, position)]
                file, start = "/".join([_files.directory(name), *parts]), 0
            owners = frozenset(shared[aliases.get(place, place)])
            size = full
            if codec is not None:
                key = "/".join([name, "c", *map(str, position)])
                size = len(values.read(key).result().value)
            stop = start + size
            out.append(Chunk(file, start, stop, owners, position, codec is not None))
            start = stop
    return out


# ---- What is done to the files.


class Damage(NamedTuple):
    """The new contents of files; None: the file is not there any more."""

    what: str
    files: dict[str, bytes | None]


def flip(files: dict[str, bytes], file: str, at: int, bit: int) -> Damage:
    data = bytearray(files[file])
    data[at] ^= 1 << bit
    return Damage("flip", {file: bytes(data)})


def flips(files: dict[str, bytes], rng: random.Random, count: int) -> Iterator[Damage]:
    """Half of them anywhere in the bytes, half in each file with the same chance."""
    names = [name for name in files if files[name]]
    sizes = [len(files[name]) for name in names]
    for number in range(count):
        (file,) = rng.choices(names, sizes if number % 2 else None)
        yield flip(files, file, rng.randrange(len(files[file])), rng.randrange(8))


def aimed(
    files: dict[str, bytes], chunks: list[Chunk], rng: random.Random, count: int
) -> Iterator[Damage]:
    """Flips in the index, the metadata, the scalars and the digests."""
    index = files["eqx_ckpt.json"]
    metadata = index.index(b'"metadata"')
    spans = [
        ("eqx_ckpt.json", 0, len(index) - 46),
        ("eqx_ckpt.json", len(index) - 46, len(index)),
        ("eqx_ckpt.json", metadata, index.index(b'"templates"')),
        *((file, 0, len(files[file])) for file in files if file.endswith("digests")),
        *(c[:3] for c in chunks if any(n.startswith("scalars") for n in c.names)),
    ]
    for file, start, stop in it.islice(it.cycle(spans), count):
        yield flip(files, file, rng.randrange(start, stop), rng.randrange(8))


def cuts(files: dict[str, bytes], rng: random.Random) -> Iterator[Damage]:
    for file, data in files.items():
        yield Damage("delete", {file: None})
        yield Damage("extend", {file: data + bytes([rng.randrange(256)])})
        for length in {0, rng.randrange(1 + len(data)), max(0, len(data) - 1)}:
            yield Damage("truncate", {file: data[:length]})
        start = rng.randrange(1 + len(data))
        zeroed = data[:start] + bytes(len(data[start : start + 512]))
        yield Damage("zeros", {file: zeroed + data[start + 512 :]})
    kept = [name for name in files if not name.startswith("d/")]
    yield Damage("delete", dict.fromkeys(set(files) - set(kept)))


def swaps(
    files: dict[str, bytes], chunks: list[Chunk], other: dict[str, bytes]
) -> Iterator[Damage]:
    for a, b in it.combinations(files, 2):
        yield Damage("swap files", {a: files[b], b: files[a]})
    for a, b in it.combinations(chunks, 2):
        if a.stop - a.start == b.stop - b.start:
            new = {name: bytearray(files[name]) for name in (a.file, b.file)}
            new[a.file][a.start : a.stop] = files[b.file][b.start : b.stop]
            new[b.file][b.start : b.stop] = files[a.file][a.start : a.stop]
            yield Damage("swap chunks", {name: bytes(new[name]) for name in new})
    (digests,) = (name for name in files if name.endswith("digests"))
    rows = [files[digests][i : i + 16] for i in range(0, len(files[digests]), 16)]
    for i, j in it.combinations(range(len(rows)), 2):
        swapped = list(rows)
        swapped[i], swapped[j] = rows[j], rows[i]
        yield Damage("swap digests", {digests: b"".join(swapped)})
    # A file of another save of the same tree: of an older step, say.
    for file in files:
        if other.get(file, files[file]) != files[file]:
            yield Damage("stale", {file: other[file]})


# ---- What comes of it.


class Campaign:
    """Damages the files of a checkpoint in turn, and counts what comes of it."""

    def __init__(self, directory: pathlib.Path, layout: str, compression: str | None):
        self.tree = a_tree(1)
        self.root = directory / "0"
        save(self.root, self.tree, layout, compression)
        save(directory / "other", a_tree(2), layout, compression)
        self.files = files_of(self.root)
        mine, other = (ec.open(p).save_id for p in (self.root, directory / "other"))
        self.other = {
            name.replace(other, mine): data
            for name, data in files_of(directory / "other").items()
        }
        self.chunks = chunks_of(self.root)
        self.expected = [facts(x) for x in jtu.tree_leaves(self.tree)]
        self.counts = collections.Counter()
        self.failures: list[str] = []
        self._moves = 0

    def kind(self, file: str) -> str:
        name = file.rpartition("/")[2]
        if file in {chunk.file for chunk in self.chunks}:
            return "data"
        return {"eqx_ckpt.digests": "digests", "process_0": "array_metadatas"}.get(
            name, name
        )

    def owners(self, file: str, new: bytes | None) -> list[Chunk]:
        """The chunks of a file that have changed."""
        old = self.files[file]
        return [
            chunk
            for chunk in self.chunks
            if chunk.file == file
            and (new or b"")[chunk.start : chunk.stop] != old[chunk.start : chunk.stop]
        ]

    def run(self, damage: Damage) -> None:
        changed = {
            file: data
            for file, data in damage.files.items()
            if data != self.files[file]
        }
        if not changed:
            return
        # Under another name nothing is known of it, from any cache.
        self._moves += 1
        self.root = self.root.rename(self.root.with_name(str(self._moves)))
        aside = [self.root.with_name(f"aside{i}") for i in range(len(changed))]
        for place, (file, data) in zip(aside, changed.items()):
            if data is None:
                (self.root / file).rename(place)
            else:
                (self.root / file).write_bytes(data)
        loaded, found = self.load(), self._verify()
        for place, (file, data) in zip(aside, changed.items()):
            if data is None:
                place.rename(self.root / file)
            else:
                (self.root / file).write_bytes(self.files[file])
        self._judge(damage.what, changed, loaded, found)

    def load(self) -> str | None:
        """The error of a load of everything; None if it gives what was saved."""
        try:
            ckpt = ec.open(self.root)
            tree = ec.tree_deserialise_leaves(ckpt, self.tree, ALL)
        except (RuntimeError, ValueError, FileNotFoundError) as e:
            return str(e)
        if jtu.tree_structure(tree) != jtu.tree_structure(self.tree):
            return "SILENT"
        same = [facts(x) for x in jtu.tree_leaves(tree)] == self.expected
        return None if same and ckpt.metadata == METADATA else "SILENT"

    def _verify(self) -> list[ec.Problem] | str:
        try:
            return ec.verify(self.root)
        except (RuntimeError, FileNotFoundError) as e:
            return str(e)

    def _judge(self, what, changed, loaded, found) -> None:
        kinds = "+".join(sorted({self.kind(file) for file in changed}))
        result = "harmless" if loaded is None else "detected"
        self.counts[what, kinds, result] += 1
        case = f"{what} of {sorted(changed)}:"
        if loaded == "SILENT":
            self.failures.append(f"{case} loaded, and wrong")
        touched = [c for file, data in changed.items() for c in self.owners(file, data)]
        names = frozenset().union(*(chunk.names for chunk in touched))
        if loaded is not None and not _names_what(loaded, names or self._all_names()):
            self.failures.append(f"{case} the error does not say where: {loaded}")
        index = "eqx_ckpt.json" in changed
        if isinstance(found, str):
            # There is no checkpoint any more.
            if not (index and "no `eqx_ckpt.json`" in found):
                self.failures.append(f"{case} `verify` raised {found}")
            return
        files = {problem.file for problem in found}
        if not found and loaded is None and self._may_pass(changed, touched):
            self.counts[what, kinds, "of these unnoticed"] += 1
        elif not found or (not index and not files & set(changed)):
            self.failures.append(f"{case} `verify` found {found}")
        if index or any(self.kind(file) == "digests" for file in changed):
            return
        # Every chunk by its name and its index, and no other.
        blamed = {(p.leaf, p.chunk) for p in found if p.chunk is not None}
        for chunk in touched:
            named = blamed & {(name, chunk.index) for name in chunk.names}
            if not named and not chunk.is_compressed:
                self.failures.append(f"{case} `verify` missed {chunk}")
        wrong = blamed - {(name, c.index) for c in touched for name in c.names}
        if wrong:
            self.failures.append(f"{case} `verify` blamed {wrong}")

    def _may_pass(self, changed, touched) -> bool:
        """Whether `verify` may not notice it, as it means nothing to the decoder."""
        compressed = {chunk.file for chunk in self.chunks if chunk.is_compressed}
        in_files = "zarr.json" in self.files
        return set(changed) <= compressed and (
            in_files or (touched != [] and all(c.is_compressed for c in touched))
        )

    def _all_names(self) -> frozenset[str]:
        return frozenset().union(*(chunk.names for chunk in self.chunks))


def _names_what(message: str, names: frozenset[str]) -> bool:
    # The file by its name or by what it is; or a leaf.
    known = ["eqx_ckpt.json", "the index", "file of digests", "is written in format"]
    return any(word in message for word in [*known, *(f"  {n}:" for n in names)])


def _sample(
    damages: Iterable[Damage], count: int, rng: random.Random
) -> Iterator[Damage]:
    """Some of each kind."""
    kinds = collections.defaultdict(list)
    for damage in damages:
        kinds[damage.what].append(damage)
    for of in kinds.values():
        yield from rng.sample(of, min(count, len(of)))


def run(
    directory: str,
    layout: str,
    compression: str | None,
    seed: int,
    count: int,
    each: int,
) -> None:
    """Prints as JSON how often what came of what, and all that should not have."""
    rng = random.Random(seed)
    campaign = Campaign(pathlib.Path(directory), layout, compression)
    files, chunks = campaign.files, campaign.chunks
    if ec.verify(campaign.root) or campaign.load() is not None:
        campaign.failures.append("there is a problem without any damage")
    for damage in it.chain(
        flips(files, rng, count - count // 4),
        aimed(files, chunks, rng, count // 4),
        _sample(cuts(files, rng), each, rng),
        _sample(swaps(files, chunks, campaign.other), each, rng),
    ):
        campaign.run(damage)
    if files_of(campaign.root) != files:
        campaign.failures.append("something was written")
    rows = [[*key, n] for key, n in sorted(campaign.counts.items())]
    print(json.dumps({"counts": rows, "failures": campaign.failures}))


def main(directory: str, *campaigns: tuple) -> None:
    for number, arguments in enumerate(campaigns):
        place = pathlib.Path(directory) / f"campaign{number}"
        place.mkdir()
        run(str(place), *arguments)
