"""What a save and a load of a large model would take: `python benchmarks/scale.py`.

The plan is the library's own: which chunks there are, which process writes which of
them into which file, which chunks each process has to read. It is computed for a mesh
without devices. Times are the bytes, the chunks and the leaves of that plan at unit
costs, which are given, each as a range. So they are ranges too. Without options it
prints the table of docs/scale.md; `--measure` prints the unit costs of this machine.
`--real 4 8` makes real runs of 4 and of 8 processes of 8 devices on this machine, and
prints what they do beside what is planned.
"""

import argparse
import gc
import itertools as it
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import counters
import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt as ec
from eqx_ckpt._format import _files, _grid, _index
from eqx_ckpt._format._index import Index
from eqx_ckpt._format._leaves import Leaves
from eqx_ckpt._format._template import Template
from eqx_ckpt._reshard import _routes
from eqx_ckpt._save import _assign, _to_ocdbt, _tree_spec
from eqx_ckpt._tree import _flatten, _recorder, _sharding
from eqx_ckpt._tree._sharding import Holders


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
    works, templates, chunks, total = [], [], 0, 0
    read = resharded = shared = moved = 0.0
    known: dict[Leaf, tuple] = {}
    alike: _assign.Known = {}
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
        works.append((count, size, owners))
        chunks += count
        total += math.prod(shape) * itemsize
        read += same
        resharded += other
        shared += share
        moved += move
        templates.append(_template_of(leaf, chunk))
    deal = _assign.deal(works, hosts)
    index = len(index_of(templates, deal))
    reads = read, resharded, shared, moved
    return Plan(len(works), total, chunks, len(deal), loads, *reads, index)


def _template_of(leaf: Leaf, chunk: tuple[int, ...]) -> Template:
    dtype = {2: "bfloat16", 4: "float32"}[leaf.itemsize]
    return Template("kkak", "jax", dtype, leaf.shape, dtype, chunk)


def index_of(templates: list[Template], deal: _assign.Assignment) -> bytes:
    """The index of a save of leaves with these templates, as the library writes it."""
    parts = it.cycle(("params", "mu", "nu"))
    names = [
        f"{next(parts)}.layers.{i // 27}.weight{i % 27}" for i in range(len(templates))
    ]
    distinct = {t: number for number, t in enumerate(dict.fromkeys(templates))}
    numbers = [distinct[t] for t in templates]
    form = _tree_spec.TreeSpec(tuple(names), tuple(numbers), tuple(distinct), ())
    files = [_to_ocdbt.PlainStretches(form, runs) for _, runs in deal]
    where = _to_ocdbt.packed if form.has_columns else _to_ocdbt.listed
    digests = "0" * 32 * (len(files) if form.has_columns else 1)
    # The record of a tree of dicts and lists, as these names have it.
    flat = _flatten.flatten(ec.nest(dict.fromkeys(names, 0)), None)
    record = _recorder.record(flat.walk, flat.leaves, [True] * len(names))
    leaves = Leaves(names, list(distinct), numbers, recorded=record)
    names, placement = list(map(str, range(len(files)))), where(form, files)
    index = Index("0" * 16, "ocdbt", None, leaves, names, placement, digests)
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
    """What is least, and what is most."""

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


def measure() -> dict[str, float]:
    """The unit costs of this machine, in the units of the options."""
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
    nbytes, more = 8 * 2**26, took["cut"] - took["whole"]
    return {
        "save": nbytes / took["save"] / 1e9,
        "load": nbytes / took["load"] / 1e9,
        "device": 1e6 * took["spread"] / len(spread) / DEVICES,
        "leaf": 1e6 * took["many"] / len(many),
        # Which may be less than what a time differs by.
        "chunk": max(0, 1e6 * more / 2**15),
    }


# ---- Real runs, of processes that share this machine.

SMALL = Model(2, 1024, 4096, 8, 8192)
MAX_BYTES = 64 * 2**20
_ROUNDS = 3
_CALLS = ("save", "load", "resharded", "on the devices")


def _process(rank: int, count: int, port: str, path: pathlib.Path) -> None:
    """One process: of each call and round the seconds, the bytes that it writes and
    reads, its highest memory beyond that at the begin, and what of that are arrays."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank)
    client: Any = distributed.global_state.client
    devices = np.asarray(jax.devices()).reshape(count, DEVICES)
    mesh = jax.sharding.Mesh(devices, ("hosts", "local"))
    block = np.random.default_rng(0).standard_normal(2**16, np.float32)
    tree, turned = [], []
    for shape, spec, itemsize in leaves(SMALL):
        dtype = jnp.bfloat16 if itemsize == 2 else jnp.float32
        own = NamedSharding(mesh, spec)
        some = np.resize(block, own.shard_shape(shape)).astype(dtype)
        make = lambda index, some=some: some
        tree.append(jax.make_array_from_callback(shape, own, make))
        other = NamedSharding(mesh, P(*spec[::-1]) if len(spec) > 1 else spec)
        turned.append(jax.ShapeDtypeStruct(shape, dtype, sharding=other))
    load = ec.tree_deserialise_leaves
    calls: dict[str, Callable[[str], Any]] = {
        "save": lambda p: ec.tree_serialise_leaves(p, tree, max_bytes=MAX_BYTES),
        "load": lambda p: load(p, tree, max_bytes=MAX_BYTES, reshard="read"),
        "resharded": lambda p: load(p, turned, max_bytes=MAX_BYTES, reshard="read"),
        "on the devices": lambda p: load(
            p, turned, max_bytes=MAX_BYTES, reshard="devices"
        ),
    }
    found: dict[str, list] = {name: [] for name in calls}
    # The first round imports, connects and compiles.
    for number, name in it.product(range(_ROUNDS + 1), calls):
        client.wait_at_barrier(f"{number} {name}", 60_000)
        gc.collect()
        before, resident = counters.reads(), counters.reset_peak()
        written = counters.written()
        start = time.perf_counter()
        got = jax.block_until_ready(calls[name](str(path / str(number))))
        seconds = time.perf_counter() - start
        shards = [x.addressable_shards for x in jax.tree.leaves(got)]
        row = (
            seconds,
            counters.written() - written,
            counters.reads_since(before)["read"],
            counters.peak() - resident,
            sum(shard.data.nbytes for some in shards for shard in some),
        )
        del got, shards
        found[name] += [row] * (number > 0)
    (path / f"{rank}.json").write_text(json.dumps(found))


def _shared(costs: dict[str, float], count: int) -> Costs:
    """Unit costs for each of the processes that share this machine. What one alone has
    done, all do together: or more, by the cores that it did not use."""
    cores = os.cpu_count() or 1
    shares = count / min(count, cores), count
    rates = [
        Range(*sorted(costs[name] * 1e9 / x for x in shares))
        for name in ("save", "load")
    ]
    device = Range(*(costs["device"] * 1e-6 * x for x in shares))
    alone = [
        Range(*(costs[name] * 1e-6 * x for x in (1, shares[0])))
        for name in ("leaf", "chunk")
    ]
    return Costs(*rates, device, *alone)


def real(count: int, costs: dict[str, float]) -> Iterator[str]:
    """Rows of a table: real runs of some processes beside the plan."""
    with socket.socket() as s, tempfile.TemporaryDirectory() as directory:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
        s.close()
        given = [str(count), port, directory]
        command = lambda rank: [sys.executable, __file__, "--process", str(rank)]
        team = [subprocess.Popen(command(rank) + given) for rank in range(count)]
        assert not any([process.wait() for process in team])
        path = pathlib.Path(directory)
        found = [json.loads((path / f"{i}.json").read_text()) for i in range(count)]
        index = _index.decode((path / "1" / _files.INDEX).read_bytes())
        nbytes = (path / "1" / _files.INDEX).stat().st_size
    p, each = plan(SMALL, count), _shared(costs, count)
    chunks = sum(record.template.chunk_count for record in index.leaves.records())
    yield (
        f"{count} processes: {p.total / 2**20:.0f} MiB, {p.leaves} leaves. Planned "
        f"{p.chunks:,} chunks, {p.files} files, an index of {p.index / 1024:.0f} KiB; "
        f"real {chunks:,}, {len(index.files)}, {nbytes / 1024:.0f} KiB."
    )
    yield ""
    head = "call | bytes of a process | real | seconds | real | memory | real |"
    yield f"| processes | {head}"
    yield "|" + "---|" * 8
    planned = [
        (max(p.written), save_time(p, count, each)),
        *((x, load_time(p, x, count, each)) for x in (p.read, p.resharded)),
        # The rate of the CPU's collectives is no unit cost.
        (p.shared, "not planned"),
    ]
    for name, (least, range_) in zip(_CALLS, planned):
        # Of the slowest process in each round, and of the one that has most.
        rounds = list(zip(*(one[name] for one in found)))
        seconds = statistics.median(max(row[0] for row in rows) for rows in rounds)
        every = [row for rows in rounds for row in rows]
        moved = max(row[1 if name == "save" else 2] for row in every)
        *_, most, arrays = max(every, key=lambda row: row[3])
        mib = [f"{x / 2**20:.0f} MiB" for x in (least, moved, arrays + MAX_BYTES, most)]
        cells = [
            str(count),
            name,
            mib[0],
            mib[1],
            str(range_),
            f"{seconds:.2f} s",
            *mib[2:],
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["--process"]:
        rank, count, port, path = sys.argv[2:]
        return _process(int(rank), int(count), port, pathlib.Path(path))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--hosts", nargs="+", type=int, default=[8, 64, 512])
    units = {
        "save": (1e9, "GB/s of a durable save"),
        "load": (1e9, "GB/s of a verified load"),
        "device": (1e-6, "µs a leaf and device of a load"),
        "leaf": (1e-6, "µs a leaf in process 0"),
        "chunk": (1e-6, "µs a chunk in process 0"),
    }
    for name, (unit, text) in units.items():
        parser.add_argument(
            f"--{name}",
            nargs=2,
            type=float,
            metavar=("LEAST", "MOST"),
            default=[x / unit for x in getattr(COSTS, name)],
            help=f"{text}, of one host",
        )
    parser.add_argument("--measure", action="store_true", help="only that")
    parser.add_argument(
        "--real", nargs="+", type=int, metavar="PROCESSES", help="only real runs"
    )
    given = parser.parse_args()
    if given.measure or given.real:
        costs = measure()
        words = [f"{costs[name]:.3g} {text}" for name, (_, text) in units.items()]
        print(f"Measured, of one process: {', '.join(words)}.")
        for count in given.real or ():
            print("", *real(count, costs), sep="\n", flush=True)
        return
    pairs = [(getattr(given, name), unit) for name, (unit, _) in units.items()]
    costs = Costs(*(Range(*(x * unit for x in sorted(pair))) for pair, unit in pairs))
    words = [
        f"{pair[0]:.3g} to {pair[1]:.3g} {text}"
        for (pair, _), (_, text) in zip(pairs, units.values())
    ]
    print(
        f"Given, of one host: {', '.join(words)}. Assumed: {HOST / 1e9:g} "
        f"GB/s a host, {ALL / 1e9:g} GB/s in all, {MOVES / 1e9:g} GB/s over the "
        "devices of a host.\n"
    )
    print(
        "| model | hosts | in all | leaves | chunks | files | a host writes | save | "
        "index | a host reads | load | resharded, reads | load | on the devices, reads "
        "| load |"
    )
    print("|" + "---|" * 15)
    for name in given.models:
        for hosts in given.hosts:
            p = plan(MODELS[name], hosts)
            assert sum(p.written) >= p.total
            times = [
                load_time(p, nbytes, hosts, costs)
                for nbytes in (p.read, p.resharded, p.shared)
            ]
            moved = Range(*(x + p.moved / MOVES for x in times[2]))
            cells = [
                name,
                str(hosts),
                f"{p.total / GIB:,.0f} GiB",
                f"{p.leaves:,}",
                f"{p.chunks:,}",
                f"{p.files:,}",
                f"{max(p.written) / GIB:.2f} GiB "
                f"({max(p.written) / (sum(p.written) / hosts):.3f} of the mean)",
                str(save_time(p, hosts, costs)),
                f"{p.index / 2**20:.1f} MiB",
                f"{p.read / GIB:.2f} GiB",
                str(times[0]),
                f"{p.resharded / GIB:.2f} GiB",
                str(times[1]),
                f"{p.shared / GIB:.2f} GiB",
                str(moved),
            ]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
