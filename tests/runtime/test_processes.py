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
    run_team_program,
    X,
)

import eqx_ckpt as ec


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])
def test_a_tree_of_two_processes(tmp_path, layout):
    assert (
        good(run_team_program(2, "team_of_a_tree", tmp_path, layout)) == ["True\n"] * 2
    )
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
    good(run_team_program(4, "team_that_saves_and_ends", tmp_path, devices=1))
    assert ec.verify(tmp_path / "some") == []
    assert ec.open(tmp_path / "some")["small"].read().tolist() == list(range(64))
    good(run_team_program(2, "team_that_loads", tmp_path, devices=1))
    like = {"columns": jnp.zeros((1024, 1024))}
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, unexpected="ignore")
    assert np.array_equal(np.asarray(out["columns"]), 2 * X)


def test_each_byte_is_written_once_and_read_where_it_is_needed(tmp_path):
    out = good(run_team_program(2, "team_that_counts_bytes", tmp_path))
    for line in out:
        wrote, read = map(float, line.split())
        # Half of each of two arrays; and half of one array, by its columns.
        assert 1 <= wrote < 1.1
        assert 0.5 <= read < 0.65


_DIFFERENT = {
    "numpy": "`numpy` differs.*process 1",
    "scalar": "the leaf `step` differs.*process 1",
    "more": "process 1 saves other.*also has `more`",
    "fewer": "process 1 saves other.*lacks `rows`",
    "path": "in 6 seconds: 1.*waited in another|process 0 of 2 has been silent",
    "bad on 1": "`b` cannot be saved",
    "bad on 0": "`b` cannot be saved",
    "foreign": "is not empty, and not a checkpoint",
    "function": "has something else for static",
}


def test_trees_that_differ(tmp_path):
    for name in _DIFFERENT:
        (tmp_path / name).mkdir()
        if name != "foreign":
            ec.tree_serialise_leaves(tmp_path / name / "c", {"old": 1})
    both = good(run_team_program(2, "team_whose_trees_differ", tmp_path, *_DIFFERENT))
    for text in both:
        lines = text.splitlines()
        assert len(lines) == len(_DIFFERENT)
        for line, (name, message) in zip(lines, _DIFFERENT.items()):
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
    done = run_team_program(2, "team_of_which_one_dies", tmp_path, who, when, devices=1)
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
    done = run_team_program(2, "team_of_which_one_saves", tmp_path, devices=1)
    assert "of 2 processes these have not come in 2 seconds: 1." in done[0].out
    assert not (tmp_path / "c").exists()


def test_a_path_that_is_not_shared(tmp_path):
    out = good(run_team_program(2, "team_without_a_shared_path", tmp_path, devices=1))
    for text in out:
        assert "all processes share" in text, text
    assert not list(tmp_path.glob("*/c/eqx_ckpt.json"))


def test_leaves_without_a_sharding_and_saves_that_differ(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "0", {"w": np.zeros(8, np.float32)})
    ec.tree_serialise_leaves(tmp_path / "1", {"w": np.zeros(8, np.float32)})
    for text in good(run_team_program(2, "team_that_opens_other_saves", tmp_path)):
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
    first, second = good(run_team_program(2, "team_that_finds_damage", tmp_path))
    assert "process 1 has failed" in first and "w: its bytes are not" in first
    assert "w: its bytes are not" in second


def test_replicas_are_read_once_and_sent(tmp_path):
    x = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)
    ec.tree_serialise_leaves(tmp_path / "c", {"w": x, "odd": x[:3, :5]})
    for text in good(run_team_program(2, "team_that_reads_replicas", tmp_path)):
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
    for text in good(run_team_program(2, "team_that_compares_bits", tmp_path, *dtypes)):
        assert text.splitlines()[-1] == "every bit"


def _campaign(path, size, seeds, kills=False):
    path.mkdir()
    name, given = "team_of_schedules", [int(kills), *seeds]
    done = run_team_program(size, name, path, *given, devices=1, timeout=3000)
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
    assert good(run_team_program(2, "team_that_grafts", tmp_path)) == ["good\n"] * 2
