"""What a save and a load of a large model would take: `python benchmarks/scale.py`.

The plan is the library's own: which chunks there are, which process writes which of
them into which file, which chunks each process has to read. It is computed for a mesh
without devices. Times are the bytes, the chunks and the leaves of that plan at unit
costs, each a range. So they are ranges too. Without options it prints the table of
docs/scale.md; with `--measure` that of the unit costs of this machine.
"""

import argparse
import itertools as it
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _grid, _index
from eqx_ckpt._kernel._format._index import Index
from eqx_ckpt._kernel._format._leaves import Leaves
from eqx_ckpt._kernel._format._template import Template
from eqx_ckpt._kernel._save import _assign, _to_ocdbt, _tree_spec
from eqx_ckpt._kernel._tree import _flatten, _recorder, _sharding
from eqx_ckpt._kernel._tree._sharding import Holders
from eqx_ckpt._reshard import _routes


Mesh = dict[str, int]  # of axes, the processes' devices in row-major order
DEVICES = 8  # of a host
# Assumed of the network and the store behind it, in bytes a second; and of a host's
# devices, as they hand on what they have.
HOST, ALL = 2e9, 200e9
MOVES = 5e9
GIB = 2**30


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    spec: P
    itemsize: int


class Model(NamedTuple):
    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int


# Of the sizes of Llama 3, https://arxiv.org/abs/2407.21783, table 3, with its 128,256
# tokens filled up to what 4096 devices divide.
MODELS = {
    "8B": Model(32, 4096, 14336, 8, 131072),
    "70B": Model(80, 8192, 28672, 8, 131072),
    "405B": Model(126, 16384, 53248, 8, 131072),
}


def leaves(model: Model) -> Iterator[Leaf]:
    """Parameters in bfloat16, and the two moments of Adam in float32."""
    layers, d, hidden, heads, vocabulary = model
    kv = heads * 128
    split, turned = P("hosts", "local"), P("local", "hosts")
    layer = [
        ((d, d), split),
        ((kv, d), split),
        ((kv, d), split),
        ((d, d), turned),
        ((hidden, d), split),
        ((hidden, d), split),
        ((d, hidden), turned),
        ((d,), P()),
        ((d,), P()),
    ]
    ends = [((vocabulary, d), P(("hosts", "local"))), ((vocabulary, d), split)]
    for shape, spec in [*layer * layers, *ends, ((d,), P())]:
        for itemsize in (2, 4, 4):
            yield Leaf(shape, spec, itemsize)


def regions(
    mesh: Mesh, spec: Sequence, shape: tuple[int, ...]
) -> list[tuple[tuple[slice, ...], list[int]]]:
    """The distinct regions of a sharding, each with the numbers of its devices."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axes = [e if isinstance(e, tuple) else (e,) if e else () for e in entries]
    cuts = [math.prod(mesh[a] for a in entry) for entry in axes]
    found: dict[tuple[int, ...], list[int]] = {}
    for device, where in enumerate(it.product(*map(range, mesh.values()))):
        at = dict(zip(mesh, where))
        block = []
        for entry in axes:
            number = 0
            for a in entry:
                number = number * mesh[a] + at[a]
            block.append(number)
        found.setdefault(tuple(block), []).append(device)
    out = []
    for block, devices in found.items():
        lengths = [n // cut for n, cut in zip(shape, cuts)]
        region = tuple(slice(b * n, (b + 1) * n) for b, n in zip(block, lengths))
        out.append((region, devices))
    return out


def holders(
    mesh: Mesh, spec: Sequence, shape: tuple[int, ...], process: Callable[[int], int]
) -> Holders:
    """As `_sharding.holders`, of a mesh that has no devices."""
    found = {
        tuple((s.start, s.stop) for s in region): set(map(process, devices))
        for region, devices in regions(mesh, spec, shape)
    }
    return _sharding.joined(found, shape)


class Plan(NamedTuple):
    leaves: int
    total: int  # bytes
    chunks: int
    files: int
    written: list[int]  # bytes by process
    read: float  # bytes by process, as it was saved
    resharded: float  # the same with all specs turned
    shared: float  # the same where each process reads a share, with `reshard="devices"`
    moved: float  # bytes that a process's devices then send and get
    index: int  # bytes


def plan(model: Model, hosts: int) -> Plan:
    mesh = {"hosts": hosts, "local": DEVICES}
    loads = [0] * hosts
    jobs, templates, chunks, total = [], [], 0, 0
    read = resharded = shared = moved = 0.0
    known: dict[Leaf, tuple] = {}
    alike: dict[tuple[Any, ...], tuple[Any, _assign.Owners, dict[int, int]]] = {}
    for leaf in leaves(model):
        shape, spec, itemsize = leaf
        if leaf not in known:
            found = holders(mesh, spec, shape, lambda d: d // DEVICES)
            one, _ = regions(mesh, spec, shape)[0]
            if math.prod(s.stop - s.start for s in one) * itemsize < _grid.LEAST:
                one = found[0][0]
            shard = tuple(s.stop - s.start for s in one)
            if shard == shape:
                chunk = _grid.choose(shape, itemsize, _grid.BLOCK)
            else:
                chunk = _grid.choose_sharded(shape, shard, itemsize, _grid.BLOCK)
            turned = tuple(spec)[::-1] if len(spec) > 1 else tuple(spec)
            known[leaf] = (
                found,
                chunk,
                _reads(mesh, spec, shape, chunk) * itemsize,
                _reads(mesh, turned, shape, chunk) * itemsize,
                *(n * itemsize for n in _shares(mesh, turned, shape, chunk)),
            )
        found, chunk, same, other, share, move = known[leaf]
        size = math.prod(chunk) * itemsize
        count = math.prod(_grid.grid(shape, chunk))
        owners = _assign.owners(found, shape, chunk, size, loads, alike)
        jobs.append(_assign.DealtLeaf(count, size, owners))
        chunks += count
        total += math.prod(shape) * itemsize
        read += same
        resharded += other
        shared += share
        moved += move
        templates.append(_template_of(leaf, chunk))
    deal = _assign.deal(jobs, hosts)
    index = len(index_of(templates, deal))
    reads = read, resharded, shared, moved
    return Plan(len(jobs), total, chunks, len(deal), loads, *reads, index)


def _template_of(leaf: Leaf, chunk: tuple[int, ...]) -> Template:
    dtype = {2: "bfloat16", 4: "float32"}[leaf.itemsize]
    return Template("kkak", "jax", dtype, leaf.shape, dtype, chunk)


def index_of(templates: list[Template], deal: list[tuple[int, _assign.Runs]]) -> bytes:
    """The index of a save of leaves with these templates, as the library writes it."""
    parts = it.cycle(("params", "mu", "nu"))
    names = [
        f"{next(parts)}.layers.{i // 27}.weight{i % 27}" for i in range(len(templates))
    ]
    distinct = {t: number for number, t in enumerate(dict.fromkeys(templates))}
    numbers = [distinct[t] for t in templates]
    spec = _tree_spec.TreeSpec(tuple(names), tuple(numbers), tuple(distinct), ())
    files = [_to_ocdbt.PlainRuns(spec, runs) for _, runs in deal]
    digests = "0" * 32 * len(files)
    # The record of a tree of dicts and lists, as these names have it.
    flat = _flatten.flatten(ec.nest(dict.fromkeys(names, 0)), None)
    record = _recorder.record(flat.walk, flat.leaves, [True] * len(names))
    leaves = Leaves(names, list(distinct), numbers, recorded=record)
    placement, names = _to_ocdbt.placement_of(spec, files), map(str, range(len(files)))
    index = Index("0" * 16, "ocdbt", None, leaves, [*names], placement, digests)
    return _index.encode(index)


def _reads(
    mesh: Mesh, spec: Sequence, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> float:
    """The elements of the chunks that the first process has to read."""
    touched: set[tuple[int, ...]] = set()
    for region, devices in regions(mesh, spec, shape):
        if devices[0] // DEVICES == 0 or any(d < DEVICES for d in devices):
            axes = [range(s.start // c, -(-s.stop // c)) for s, c in zip(region, chunk)]
            touched.update(it.product(*axes))
    return len(touched) * math.prod(chunk)


def _shares(
    mesh: Mesh, spec: Sequence, shape: tuple[int, ...], chunk: tuple[int, ...]
) -> tuple[float, float]:
    """The elements that a process reads of an array that is moved over the devices, and
    those that its devices send and get. One that is not moved is read."""
    hosts = mesh["hosts"]
    processes = tuple(i // DEVICES for i in range(hosts * DEVICES))
    digits = _routes.digits(tuple(mesh.values()), processes)
    assert digits is not None
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axes = [e if isinstance(e, tuple) else (e,) if e else () for e in entries]
    own = dict(zip(mesh, digits.axes))
    target = tuple(tuple(d for a in entry for d in own[a]) for entry in axes)
    route = _routes.plan(digits, shape, chunk, target)
    if route is None or route.read >= route.wanted:
        return _reads(mesh, spec, shape, chunk), 0
    parts = [digits.count(sum(layout, ())) for layout in (route.first, route.target)]
    return route.read / hosts, DEVICES * sum(math.prod(shape) / n for n in parts)


class Range(NamedTuple):
    low: float
    high: float

    def __str__(self) -> str:
        digits = 1 if self.high < 10 else 0
        low, high = f"{self.low:,.{digits}f}", f"{self.high:,.{digits}f}"
        return f"{low} s" if low == high else f"{low} to {high} s"


class Costs(NamedTuple):
    """Unit costs: bytes a second of a durable save and of a verified load of one host;
    seconds a leaf and device of a load; and seconds a leaf and a chunk of what process
    0 does alone in a save."""

    save: Range
    load: Range
    device: Range
    leaf: Range
    chunk: Range


# From an idle machine of our own to a busy virtual one: see docs/scale.md.
COSTS = Costs(
    Range(0.2e9, 2e9),
    Range(0.28e9, 4.6e9),
    Range(60e-6, 140e-6),
    Range(20e-6, 45e-6),
    Range(5e-6, 11e-6),
)


def _least_to_most(rate: Range, most: float) -> list[float]:
    """Seconds a byte where the network does not carry more than `most`."""
    return [1 / min(rate.high, most), 1 / min(rate.low, most)]


def save_time(p: Plan, hosts: int, costs: Costs) -> Range:
    """That of the host that writes most, and then of process 0 alone."""
    each = _least_to_most(costs.save, min(HOST, ALL / hosts))
    alone = zip(each, costs.leaf, costs.chunk)
    return Range(
        *(max(p.written) * x + p.leaves * y + p.chunks * z for x, y, z in alone)
    )


def load_time(p: Plan, nbytes: float, hosts: int, costs: Costs) -> Range:
    """That of a host which reads so many bytes, and puts a part of each leaf on each of
    its devices."""
    each = _least_to_most(costs.load, min(HOST, ALL / hosts))
    parts = p.leaves * DEVICES
    return Range(*(nbytes * x + parts * y for x, y in zip(each, costs.device)))


def measure() -> Costs:
    """The unit costs of this machine."""
    big = {str(i): jnp.ones((4096, 4096), jnp.float32) for i in range(8)}
    many = {str(i): jnp.ones(16, jnp.float32) for i in range(10_000)}
    cut = jnp.ones(2**24, jnp.float32)
    mesh = jax.make_mesh((DEVICES,), ("local",))
    sharding = NamedSharding(mesh, P("local"))
    spread = {str(i): jax.device_put(jnp.ones(16), sharding) for i in range(1000)}
    times: dict[str, list[float]] = {}

    def timed(what: str, fn: Callable, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        jax.block_until_ready(fn(*args, **kwargs))
        times.setdefault(what, []).append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as path:
        ec.tree_serialise_leaves(path + "/spread", spread)
        for _ in range(3):
            timed("save", ec.tree_serialise_leaves, path + "/big", big)
            timed("load", ec.tree_deserialise_leaves, path + "/big", big)
            timed("many", ec.tree_serialise_leaves, path + "/many", many)
            timed("whole", ec.tree_serialise_leaves, path + "/cut", cut)
            timed("cut", ec.tree_serialise_leaves, path + "/cut", cut, chunks=2048)
            timed("spread", ec.tree_deserialise_leaves, path + "/spread", spread)
    took = {what: float(np.median(t)) for what, t in times.items()}
    # May be less than what a time differs by.
    more = max(0, took["cut"] - took["whole"])
    costs = (
        8 * 2**26 / took["save"],
        8 * 2**26 / took["load"],
        took["spread"] / len(spread) / DEVICES,
        took["many"] / len(many),
        more / 2**15,
    )
    return Costs(*(Range(x, x) for x in costs))


_HEAD = """\
| model | hosts | in all | leaves | chunks | files | a host writes | save | index | \
a host reads | load | resharded, reads | load | on the devices, reads | load |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--hosts", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--measure", action="store_true", help="of this machine")
    given = parser.parse_args()
    costs = measure() if given.measure else COSTS
    rates = [f"{x.low / 1e9:.3g} to {x.high / 1e9:.3g} GB/s" for x in costs[:2]]
    each = [f"{x.low * 1e6:.3g} to {x.high * 1e6:.3g} µs" for x in costs[2:]]
    print(
        f"Of one host: a durable save of {rates[0]}, a verified load of {rates[1]}, "
        f"{each[0]} a leaf and device of a load, {each[1]} a leaf and {each[2]} a "
        f"chunk in process 0. Assumed: {HOST / 1e9:g} GB/s a host, {ALL / 1e9:g} GB/s "
        f"in all, {MOVES / 1e9:g} GB/s over the devices of a host.\n"
    )
    print(_HEAD)
    print("|" + "---|" * (_HEAD.count("|") - 1))
    for name in given.models:
        for hosts in given.hosts:
            cells = [name, str(hosts), *_cells(plan(MODELS[name], hosts), hosts, costs)]
            print(f"| {' | '.join(cells)} |", flush=True)


def _cells(p: Plan, hosts: int, costs: Costs) -> list[str]:
    assert sum(p.written) >= p.total
    reads = p.read, p.resharded, p.shared
    loads = [load_time(p, nbytes, hosts, costs) for nbytes in reads]
    loads[2] = Range(*(x + p.moved / MOVES for x in loads[2]))
    share = max(p.written) / (sum(p.written) / hosts)
    cells = [
        f"{p.total / GIB:,.0f} GiB",
        f"{p.leaves:,}",
        f"{p.chunks:,}",
        f"{p.files:,}",
        f"{max(p.written) / GIB:.2f} GiB ({share:.3f} of the mean)",
        str(save_time(p, hosts, costs)),
        f"{p.index / 2**20:.1f} MiB",
    ]
    for nbytes, load in zip(reads, loads):
        cells += [f"{nbytes / GIB:.2f} GiB", str(load)]
    return cells


if __name__ == "__main__":
    main()
