"""Many processes: real ones, joined by `jax.distributed` on this machine."""

import re
import signal

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import schedules
from support.helpers import long, run_program
from support.processes import (
    expected,
    good,
    LOAD,
    READ,
    run_team,
    run_team_program,
    SAVE,
    X,
)

import eqx_ckpt as ec


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])
def test_a_tree_of_two_processes(tmp_path, layout):
    code = f"""{SAVE}
ec.tree_serialise_leaves(path / "c", tree, layout={layout!r}, metadata={{"n": 1}})
{LOAD}
# Again, over it, and loaded onto other devices.
tree["step"] = 8
again = ec.async_tree_serialise_leaves(path / "c", tree, layout={layout!r}, orbax=True)
again.result()
abstract = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=columns)
like = {{"rows": abstract, "step": 0}}
out = ec.tree_deserialise_leaves(path / "c", like, unexpected="ignore")
assert same(out["rows"], X) and out["step"] == 8
lazy = ec.open(path / "c")["columns"].update(sharding=rows)
print(same(ec.materialise([lazy])[0], 2 * X))
"""
    assert good(run_team(2, code, tmp_path)) == ["True\n"] * 2
    # Without any of the processes that saved it.
    assert ec.verify(tmp_path / "c") == []
    got = ec.materialise(ec.open(tmp_path / "c").tree)
    want = expected() | {"step": 8}
    assert eqx.tree_equal(jnp.asarray(got["rows"]), jnp.asarray(X))
    for name, x in want.items():
        assert eqx.tree_equal(got[name], x) or np.array_equal(
            np.asarray(got[name]), np.asarray(x)
        ), name

    _check_by_others(tmp_path / "c", layout)


def _check_by_others(path, layout):
    """TensorStore by its URL, Orbax v0 and v1, and zarr-python."""
    assert run_program("read_by_others", path, layout).endswith("all equal\n")


def test_other_numbers_of_processes(tmp_path):
    save = """
from support import inside
some = {name: tree[name] for name in ("small", "keys", "empty", "step")}
inside.forget()
for _ in range(3):
    ec.tree_serialise_leaves(path / "some", some)
made = inside.made()
# Where all lie is worked out once, and the files are planned by process 0.
assert made["deal"] == 1 and made["database"] == (rank == 0), made
# They end right after the call, and wait for it.
ec.async_tree_serialise_leaves(path / "c", tree)
"""
    good(run_team(4, SAVE + save, tmp_path, 1))
    assert ec.verify(tmp_path / "some") == []
    assert ec.open(tmp_path / "some")["small"].read().tolist() == list(range(64))
    good(run_team(2, SAVE + LOAD, tmp_path, 1))
    like = {"columns": jnp.zeros((1024, 1024))}
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, unexpected="ignore")
    assert np.array_equal(np.asarray(out["columns"]), 2 * X)


def test_each_byte_is_written_once_and_read_where_it_is_needed(tmp_path):
    code = """
    X = np.arange(2048 * 1024, dtype=np.float32).reshape(2048, 1024)
    tree = {"rows": spread(X, rows), "copies": spread(X, copies)}
    def io(name):
        text = pathlib.Path("/proc/self/io").read_text()
        return int(text.split(name + ": ")[1].split()[0])
    def moved():
        import tensorstore as ts
        found = ts.experimental_collect_matching_metrics("/tensorstore/file/mmap_bytes")
        return io("rchar") + sum(v.get("value", 0) for m in found for v in m["values"])
    ec.tree_serialise_leaves(path / "warm", tree)
    before = io("wchar")
    ec.tree_serialise_leaves(path / "c", tree)
    wrote = io("wchar") - before
    like = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=columns)
    before = moved()
    ec.tree_deserialise_leaves(path / "c", {"rows": like}, unexpected="ignore")
    print(wrote / X.nbytes, (moved() - before) / X.nbytes)
    """
    out = good(run_team(2, code, tmp_path))
    for line in out:
        wrote, read = map(float, line.split())
        # Half of each of two arrays; and half of one array, by its columns.
        assert 1 <= wrote < 1.1
        assert 0.5 <= read < 0.65


CATCH = """
def caught(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except BaseException as e:
        print(f"{type(e).__name__}: {e}".replace("\\n", " "))
    else:
        print("nothing")
"""


_DIFFERENT = {
    "numpy": ('tree["numpy"] = np.arange(10) + rank', "`numpy` differs.*process 1"),
    "scalar": ('tree["step"] = rank', "the leaf `step` differs.*process 1"),
    "more": ('if rank: tree["more"] = 1', "process 1 saves other.*also has `more`"),
    "fewer": ('if rank: del tree["rows"]', "process 1 saves other.*lacks `rows`"),
    "path": (
        "if rank: place = path / 'other'",
        "in 6 seconds: 1.*waited in another|process 0 of 2 has been silent",
    ),
    "bad on 1": ('if rank: tree["b"] = np.array([None])', "`b` cannot be saved"),
    "bad on 0": ('if not rank: tree["b"] = np.array([None])', "`b` cannot be saved"),
    "foreign": ('(path / "foreign").touch()', "is not empty, and not a checkpoint"),
    "function": (
        'if rank: tree["function"] = print',
        "has something else for static",
    ),
}


def test_trees_that_differ(tmp_path):
    code = SAVE + CATCH + "whole = tree\n"
    for name, (change, _) in _DIFFERENT.items():
        (tmp_path / name).mkdir()
        if name != "foreign":
            ec.tree_serialise_leaves(tmp_path / name / "c", {"old": 1})
        code += f"""
path, tree = pathlib.Path(sys.argv[4]) / {name!r}, dict(whole)
place = path if {name!r} == "foreign" else path / "c"
{change}
together = ec.Together(timeout=6 if {name!r} == "path" else 60)
meet({name!r})
caught(ec.tree_serialise_leaves, place, tree, processes=together)
"""
    both = good(run_team(2, code, tmp_path))
    for text in both:
        lines = text.splitlines()
        assert len(lines) == len(_DIFFERENT)
        for line, (name, (_, message)) in zip(lines, _DIFFERENT.items()):
            assert re.search(message, line), (name, line)
    for name in _DIFFERENT:
        if name == "foreign":
            assert [p.name for p in (tmp_path / name).iterdir()] == ["foreign"]
            continue
        saved = ec.open(tmp_path / name / "c").leaves
        assert set(saved) == {"old"}
        assert ec.verify(tmp_path / name / "c") == []
        assert len(list((tmp_path / name / "c" / "d").iterdir())) == 1


@pytest.mark.parametrize(
    "who, when",
    [
        *[(0, "during"), (1, "before")],
        *long((0, "before"), (0, "after"), (1, "during"), (1, "after")),
    ],
)
def test_a_process_dies(tmp_path, who, when):
    """Nothing is published, and the other has an error in time."""
    code = f"""{SAVE}{CATCH}
ec.tree_serialise_leaves(path / "c", {{"old": 1}})
import pytest
from support import inside
def die():
    os.kill(os.getpid(), signal.SIGKILL)
when = {when!r}
def before(change, key):
    if (when, change) == ("during", "write") and key.rpartition("/")[2].isdigit():
        die()
def after(change, key):
    is_last = "part-" in key or key.endswith("tree")
    if (when, change) == ("after", "write") and is_last:
        die()
if when != "before":
    meet("begin")
if rank == {who}:
    if when == "before":
        die()
    inside.watch_store(pytest.MonkeyPatch(), path, before, after)
caught(ec.tree_serialise_leaves, path / "c", tree, processes=ec.Together(timeout=5))
sys.stdout.flush()
os._exit(0)  # The runtime waits for all at the end.
"""
    done = run_team(2, code, tmp_path, 1)
    assert done[who].status == -signal.SIGKILL
    for other in done:
        if other.rank == who:
            continue
        if who == 0:
            # The runtime's coordinator lives in process 0, and JAX may end a process
            # that has lost it before we do.
            assert "nothing" not in other.out
            assert other.status != 0 or "process 0 of 2 has been silent" in other.out
        else:
            assert other.status == 0, other.err
            assert f"in 5 seconds: {who}" in other.out or (
                f"silent for 5 seconds: {who}" in other.out
            ), other.out
    assert set(ec.open(tmp_path / "c").leaves) == {"old"}
    assert ec.verify(tmp_path / "c") == []
    # What they left is deleted by the next save.
    ec.tree_serialise_leaves(tmp_path / "c", {"new": 1})
    assert len(list((tmp_path / "c" / "d").iterdir())) == 1


def test_a_process_that_never_comes(tmp_path):
    code = f"""{SAVE}{CATCH}
if rank == 0:
    caught(ec.tree_serialise_leaves, path / "c", tree, processes=ec.Together(timeout=2))
"""
    done = run_team(2, code, tmp_path, 1)
    assert "of 2 processes these have not come in 2 seconds: 1." in done[0].out
    assert not (tmp_path / "c").exists()


def test_a_path_that_is_not_shared(tmp_path):
    code = f"""{SAVE}{CATCH}
import pytest
from support import inside
patch = pytest.MonkeyPatch()
inside.limit(patch, directory_seconds=1)
# Each has a directory of its own, under one name, as on hosts without a shared disk.
mine = path / str(rank)
mine.mkdir()
os.chdir(mine)
make = lambda lines: lambda *args: lines(*args) | {{"the path": "same"}}
inside.wrap(patch, "lines that processes agree on", make)
inside.replace(patch, "URL of a place", str)
caught(ec.tree_serialise_leaves, "c", tree, processes=ec.Together(timeout=60))
"""
    out = good(run_team(2, code, tmp_path, 1))
    for text in out:
        assert "all processes share" in text, text
    assert not list(tmp_path.glob("*/c/eqx_ckpt.json"))


def test_leaves_without_a_sharding_and_saves_that_differ(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "0", {"w": np.zeros(8, np.float32)})
    ec.tree_serialise_leaves(tmp_path / "1", {"w": np.zeros(8, np.float32)})
    code = f"""{CATCH}
like = {{"w": jax.ShapeDtypeStruct((8,), jnp.float32)}}
caught(ec.tree_deserialise_leaves, path / "0", like)
import pytest
from support import inside
inside.replace(pytest.MonkeyPatch(), "URL of a place", lambda _: "one path")
like = {{"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=rows)}}
together = ec.Together(timeout=60)
caught(ec.tree_deserialise_leaves, path / str(rank), like, processes=together)
"""
    for text in good(run_team(2, code, tmp_path)):
        first, second = text.splitlines()
        assert "`w`" in first and "has no sharding" in first
        assert "has opened another save" in second


def test_damage_that_one_process_finds(tmp_path):
    """The other one does not go on with half of the model."""
    x = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": x})
    (file,) = (tmp_path / "c" / "d").glob("*/0")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    code = f"""{CATCH}
like = {{"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=rows)}}
caught(ec.tree_deserialise_leaves, path / "c", like, processes=ec.Together(timeout=60))
"""
    first, second = good(run_team(2, code, tmp_path))
    assert "process 1 has failed" in first and "w: its bytes are not" in first
    assert "w: its bytes are not" in second


def test_replicas_are_read_once_and_sent(tmp_path):
    x = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": x, "odd": x[:3, :5]})
    code = """
x = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)
like = {
    "w": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=copies),
    "odd": jax.ShapeDtypeStruct((3, 5), x.dtype, sharding=copies),
}
for how in ("auto", "devices"):
    # What is imported for a load is read too.
    odd = lambda tree: tree["odd"]
    ec.tree_deserialise_leaves(path / "c", like, reshard=how, where=odd)
    before = read()
    out = ec.tree_deserialise_leaves(path / "c", like, reshard=how)
    print(f"read={(read() - before) / x.nbytes};")
    assert same(out["w"], x) and same(out["odd"], x[:3, :5])
    assert out["w"].sharding == copies
"""
    for text in good(run_team(2, READ + code, tmp_path)):
        # The runtime prints too.
        each, once = map(float, re.findall("read=([0-9.]+);", text))
        assert 1 <= each < 1.2 and 0.5 <= once < 0.7


_DTYPES = (
    "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 "
    "bfloat16 float16 float32 float64 complex64 complex128 float4_e2m1fn float8_e3m4 "
    "float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu"
).split()


_some_dtypes = ["bool", "int4", "bfloat16", "float32", "complex128", "float8_e4m3fn"]


@pytest.mark.parametrize(
    "dtypes",
    [_some_dtypes, pytest.param(_DTYPES, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_every_bit_is_sent(tmp_path, dtypes):
    """Random bits, many of them of NaNs, of every dtype, to every sharding."""
    rng = np.random.default_rng(0)
    tree = {"key": np.asarray(jr.key_data(jr.split(jr.key(3), 16)))}
    for name in dtypes:
        dtype = jnp.dtype(name)
        data = rng.integers(0, 256, (16, 8 * dtype.itemsize), np.uint8)
        if dtype.itemsize == 1:
            size = (
                1
                if name == "bool"
                else jnp.iinfo(name).bits
                if "int" in name
                else (jnp.finfo(name).bits)
            )
            data &= 2**size - 1
        elif jnp.issubdtype(dtype, jnp.floating):
            # The exponents of NaNs.
            data[1::2, dtype.itemsize - 1 :: dtype.itemsize] |= 0x7F
            data[1::2, dtype.itemsize - 2 :: dtype.itemsize] |= 0xF0
        tree[name] = data.view(dtype)
    np.savez(tmp_path / "bits.npz", **{n: x.view(np.uint8) for n, x in tree.items()})
    tree["key"] = jr.split(jr.key(3), 16)
    # Chunks of a few numbers, so that each process can read some.
    ec.tree_serialise_leaves(tmp_path / "c", tree, chunks=64)
    code = f"""
    jax.config.update("jax_enable_x64", True)
    want = dict(np.load(path / "bits.npz"))
    names = {dtypes!r}
    grid = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("a", "b"))
    specs = [P(), P("b"), P(None, "a")]
    for spec in specs:
        to = NamedSharding(grid, spec)
        like = {{
            n: jax.ShapeDtypeStruct((16, 8), jnp.dtype(n), sharding=to) for n in names
        }}
        like["key"] = jax.ShapeDtypeStruct(
            (16,), jax.random.key(0).dtype, sharding=NamedSharding(grid, P(*spec[:1])))
        for reshard in ("read", "devices"):
            out = ec.tree_deserialise_leaves(path / "c", like, reshard=reshard)
            out["key"] = jax.random.key_data(out["key"])
            for name, x in out.items():
                for shard in x.addressable_shards:
                    data = np.asarray(shard.data)
                    whole = want[name].view(data.dtype)[shard.index]
                    same = data.tobytes() == np.ascontiguousarray(whole).tobytes()
                    assert same, (name, spec, reshard)
    print("every bit")
    """
    for text in good(run_team(2, code, tmp_path)):
        assert text.splitlines()[-1] == "every bit"


def _campaign(path, size, seeds, kills=False):
    path.mkdir()
    code = f"""
    from support import schedules
    player = schedules.start(path, rank, size)
    for seed in {list(seeds)!r}:
        player.play(seed, {kills})
    """
    done = run_team(size, code, path, 1, timeout=3000)
    if not kills:
        good(done)
    return [f for s in seeds for f in schedules.check(path, s, size, kills)]


def test_schedules_of_calls_that_go_wrong(tmp_path):
    assert _campaign(tmp_path / "2", 2, range(2)) == []


@pytest.mark.long
def test_many_schedules_of_calls_that_go_wrong(tmp_path):
    faults, seed = [], 2
    for number in range(16):
        size = 2 + number % 3
        faults += _campaign(tmp_path / str(seed), size, range(seed, seed + 10))
        seed += 10
    for number in range(40):
        size = 2 + number % 3
        faults += _campaign(tmp_path / str(seed), size, [seed], kills=True)
        seed += 1
    print(f"{seed - 2} schedules, of them 40 with a process that is killed")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.long)])
def test_what_is_interrupted_in_one_process_leaves_nothing_behind(tmp_path, count):
    """Ctrl-C comes at lines of a call in process 1. Process 0 has an error, or is done;
    then both make the call again, with the same path and tag."""
    good(run_team_program(2, "team_that_is_interrupted", tmp_path, count))


def test_a_graft_of_two_processes(tmp_path):
    """What fails in one fails in both, and the next call is met."""
    code = f"""{SAVE}
ec.tree_serialise_leaves(path / "c", {{"model": {{"w": tree["rows"], "n": 3}}}})
model = {{"new": {{"w": spread(0 * X, columns), "n": 0}}, "head": jnp.zeros(2)}}
def graft(how=(), tag=None):
    pairs = [(lambda m: m["new"]["w"], lambda c: c.model.w, *how)]
    pairs += [(lambda m: m["new"]["n"], lambda c: c.model.n)]
    return ec.graft(
        model, path / "c", pairs, fresh=lambda m: m["head"],
        processes=ec.Together(tag, 200))
out, report = graft()
assert same(out["new"]["w"], X) and out["new"]["n"] == 3
assert out["new"]["w"].sharding == columns
assert report.names("fresh") == ["head"]
def broken(saved, like):
    if rank == 1:
        raise OSError("the disk of process 1")
    return saved
def fails(how, tag):
    try:
        graft(how, tag)
    except (RuntimeError, OSError) as e:
        return str(e)
start = time.monotonic()
said = fails([broken], "a")
assert "the disk of process 1" in said, said
assert time.monotonic() - start < 100
out, _ = graft(tag="a")
assert same(out["new"]["w"], X)
print("good")
"""
    assert good(run_team(2, code, tmp_path)) == ["good\n"] * 2
