"""README's "Beside others", cell by cell: `python benchmarks --claims`.

Each row is a function that tries it on one of the peers in an empty directory, and
gives the cell and what was done for it.
"""

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple


# Meshes of eight devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import counters
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import packaging.requirements
import pages
import peers
import safetensors.flax
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt as ec


@contextlib.contextmanager
def _orbax():
    with peers.ocp().StandardCheckpointer() as checkpointer:
        yield checkpointer


def _orbax_save(path: pathlib.Path, tree: Any) -> None:
    with _orbax() as saver:
        saver.save(path, tree, force=True)


def _flax():
    import flax
    from flax.training import checkpoints

    # By itself it calls Orbax.
    flax.config.update("flax_use_orbax_checkpointing", False)
    return checkpoints


def _flax_save(path: pathlib.Path, tree: Any, **options: Any) -> None:
    # The file has the number of the step in its name.
    prefix = path.name.removesuffix("0")
    _flax().save_checkpoint(
        path.parent, tree, 0, prefix=prefix, overwrite=True, **options
    )


def _eqx_load(path: pathlib.Path, like: Any = None) -> Any:
    if like is None:
        raise TypeError("it asks for a tree of the same class")
    return PEERS["Equinox"].load(path, like)


def _ours_load(path: pathlib.Path, like: Any = None) -> Any:
    if like is None:
        return ec.materialise(ec.open(path).tree)
    return ec.tree_deserialise_leaves(path, like)


class Claimant(NamedTuple):
    """One of the columns: with which calls it saves to a path and loads from it."""

    name: str
    package: str
    file: str
    save: Callable[..., None]
    load: Callable[..., Any]


def _of_peer(name: str, package: str, file: str, peer: str, **calls: Any) -> Claimant:
    save = lambda path, tree: PEERS[peer].save(path, tree, False)
    load = lambda path, like=None: PEERS[peer].load(path, like)
    return Claimant(name, package, file, **{"save": save, "load": load, **calls})


PEERS = {peer.name: peer for peer in peers.PEERS}
OURS, EQX, ORBAX, SAFE, FLAX = CLAIMANTS = (
    Claimant("eqx_ckpt", "eqx_ckpt", "x", ec.tree_serialise_leaves, _ours_load),
    _of_peer("Equinox `.eqx`", "equinox", "x.eqx", "Equinox", load=_eqx_load),
    _of_peer("Orbax", "orbax-checkpoint", "x", "Orbax v0", save=_orbax_save),
    _of_peer("safetensors", "safetensors", "x.safetensors", "safetensors.flax"),
    Claimant(
        "flax msgpack",
        "flax",
        "x0",
        _flax_save,
        lambda path, like=None: _flax().restore_checkpoint(path, like),
    ),
)


class Cell(NamedTuple):
    says: str
    done: str


def _yes(does: bool, done: str) -> Cell:
    return Cell("yes" if does else "no", done)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())
    return textwrap.shorten(f"{type(error).__name__}: {text}", 100)


def _names(peer: Claimant, path: pathlib.Path) -> Cell:
    peer.save(path, {"b": jnp.ones(2), "c": jnp.zeros(2)})
    # A dict is sorted, and so its order is that of its keys.
    done = "saved b and c, loaded into a and b of the same shapes: "
    try:
        out = peer.load(path, {"a": jnp.full(2, 5.0), "b": jnp.full(2, 5.0)})
    except (KeyError, ValueError, RuntimeError) as error:
        return Cell("name", done + _why(error))
    if "a" in out:
        assert (out["a"] == 1).all()
        return Cell("position", done + "a has the numbers of b")
    return Cell("name", done + f"what comes has {' and '.join(sorted(out))}")


def _one_array(peer: Claimant, path: pathlib.Path) -> Cell:
    tree = {"big": jnp.ones(2**22), "small": jnp.ones(8)}
    peer.save(path, tree)

    case = peers.Case("small", (8,), "float32", 0, None)

    def of(name: str) -> Callable[[], Any]:
        some = PEERS[name].part
        return lambda: some.read(some.open(path), case)

    part = {
        OURS: of("eqx_ckpt"),
        ORBAX: of("Orbax v0"),
        SAFE: of("safetensors.flax"),
        # They have no call for it: the whole is loaded, and the rest thrown away.
        EQX: lambda: peer.load(path, tree)["small"],
        FLAX: lambda: peer.load(path)["small"],
    }[peer]

    part()  # What is imported at a first call is read too.
    before = counters.reads()
    assert (part() == 1).all()
    few = counters.reads_since(before)["read"] < 2**20
    size = "less than 1 MiB" if few else "16 MiB"
    return _yes(few, f"of 16 MiB and 32 bytes, loaded the latter: it read {size}")


def _without_the_class(peer: Claimant, path: pathlib.Path) -> Cell:
    peer.save(path, {"x": jnp.arange(3.0)})
    try:
        out = peer.load(path)
    except TypeError as error:
        return Cell("no", f"loaded without a tree to load into: {error}")
    assert np.array_equal(out["x"], np.arange(3.0))
    return Cell("yes", "loaded without a tree to load into: the array is there")


def _without_loading(peer: Claimant, path: pathlib.Path) -> Cell:
    tree = {"x": jnp.arange(2.0**16)}
    peer.save(path, tree)
    if peer == OURS:
        unread = ec.merge([ec.open(path).tree] * 2, ec.merging.average())
    elif peer == ORBAX:
        with _orbax() as loader:
            unread = {"x": loader.metadata(path).item_metadata.tree["x"]}
    elif peer == SAFE:
        with safetensors.safe_open(path, "np") as file:
            unread = {"x": file.get_slice("x")}
    else:
        unread = {"x": jax.ShapeDtypeStruct((2**16,), "float32")}
    to = path.parent / "to" / peer.file
    to.parent.mkdir()
    done = "saved again from what stands for the unread array: "
    try:
        peer.save(to, unread)
        does = np.array_equal(peer.load(to, tree)["x"], tree["x"])
        return _yes(does, done + ("the same" if does else "it is another"))
    except Exception as error:
        return Cell("no", done + _why(error))


def _without_the_code(peer: Claimant, path: pathlib.Path) -> Cell:
    model, x = eqx.nn.Linear(3, 2, key=jr.key(0)), jnp.ones(3)
    done = "loaded a linear layer without a tree to load into, and called it: "
    if peer == OURS:
        forward = ec.function(lambda model, x: model(x), x, platforms=["cpu"])
        ec.tree_serialise_leaves(path, model, functions={"forward": forward})
        out = ec.rebuild(path, [eqx.nn])(x), ec.open(path).functions["forward"](x)
        assert all(np.array_equal(y, model(x)) for y in out)
        return Cell("yes", "rebuilt a linear layer, and called its stored function")
    parts = {"weight": model.weight, "bias": model.bias}
    peer.save(path, parts if peer in (SAFE, FLAX) else model)
    try:
        peer.load(path)(x)
        raise AssertionError(f"{peer.name} runs it.")
    except TypeError as error:
        done += _why(error)
    if peer != ORBAX:
        return Cell("no", done)
    done += "; its documentation has orbax-export, which stores a SavedModel"
    return Cell("runs, by orbax-export", done)


class Heads(eqx.Module):
    weight: jax.Array
    num_heads: int = eqx.field(static=True)


def _static_fields(peer: Claimant, path: pathlib.Path) -> Cell:
    saved, like = Heads(jnp.ones((8, 8)), 4), Heads(jnp.zeros((8, 8)), 8)
    if peer in (SAFE, FLAX):
        # They take dicts of arrays, in which no static field is.
        saved, like = {"weight": saved.weight}, {"weight": like.weight}
    peer.save(path, saved)
    done = "saved with 4 heads, loaded with 8, all shapes alike: "
    try:
        peer.load(path, like)
    except RuntimeError as error:
        assert "num_heads" in str(error)
        return Cell("yes", done + "refused, and `num_heads` is named")
    return Cell("no", done + "loaded")


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    inside = path.rglob("*") if path.is_dir() else [path]
    return [file for file in inside if file.is_file()]


def _flipped_bit(peer: Claimant, path: pathlib.Path) -> Cell:
    # Numbers that do not compress, so that nearly all bytes are theirs.
    tree = {"x": jr.normal(jr.key(0), (2**16,))}
    peer.save(path, tree)
    largest = max(_files(path), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    found = 0
    for at in (len(data) // 3, len(data) // 2, 2 * len(data) // 3):
        data[at] ^= 2
        largest.write_bytes(data)
        try:
            out = peer.load(path, tree)["x"]
            assert not np.array_equal(out, tree["x"])
        except Exception:
            found += 1
        data[at] ^= 2
    done = "flipped a bit at three places of the largest file, and loaded: "
    return _yes(found == 3, f"{done}{found} of 3 are refused")


_MIB = 2**20


def _half(path: pathlib.Path, peer: Claimant) -> None:
    """A save over what is at the path; no file of it becomes longer than 1 MiB."""
    import resource

    tree = {"x": jax.block_until_ready(jr.normal(jr.key(0), (_MIB,)))}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MIB, _MIB))
    try:
        peer.save(path, tree)
    except Exception:
        # With the signal of that limit it would have been killed.
        print("failed", flush=True)


def _fails(peer: Claimant, path: pathlib.Path) -> Cell:
    other, kept = {"x": jnp.zeros(_MIB)}, []
    for kills in (False, True):
        peer.save(path, {"x": jnp.ones(_MIB)})
        number = CLAIMANTS.index(peer)
        code = "import sys, signal; sys.path.insert(0, sys.argv[1]); import claims; "
        # Python ignores it. Its default kills as -9 does: nothing can be cleaned up.
        code += "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); " * kills
        code += f"claims.main(['--half', sys.argv[2], '{number}'])"
        here = str(pathlib.Path(__file__).parent)
        command = [sys.executable, "-c", code, here, str(path)]
        run = subprocess.run(command, capture_output=True, text=True)
        expected = (-signal.SIGXFSZ, "") if kills else (0, "failed\n")
        assert (run.returncode, run.stdout) == expected, run.stderr
        try:
            kept.append(bool((peer.load(path, other)["x"] == 1).all()))
        except Exception:
            kept.append(False)
    words = ["is there" if x else "is lost" for x in kept]
    done = (
        "saved 4 MiB, and again, on a disk that was full after 1 MiB: the old one "
        f"{words[0]}; the same, killed there: the old one {words[1]}"
    )
    if peer == ORBAX:
        assert not any(kept)
        return Cell("no: `force=True` deletes first", done)
    return _yes(all(kept), done)


def _background(peer: Claimant, path: pathlib.Path) -> Cell:
    x = jnp.ones(2**20)
    if peer == OURS:
        wait = ec.async_tree_serialise_leaves(path, {"x": x}).result
    elif peer == ORBAX:
        wait = peers.ASYNCHRONOUS["Orbax v0"](path, {"x": x}, True)
    elif peer == FLAX:
        manager = _flax().AsyncManager()
        _flax_save(path, {"x": x}, async_manager=manager)
        wait = manager.wait_previous_save
    else:
        module = {EQX: eqx, SAFE: safetensors.flax}[peer]
        calls = [name for name in dir(module) if "async" in name.lower()]
        return _yes(bool(calls), "looked for `async` in the names of its calls: none")
    x.delete()  # As a step of training that has it donated.
    wait()
    assert (np.asarray(peer.load(path, {"x": jnp.zeros(2**20)})["x"]) == 1).all()
    done = "freed the array once the call had returned, waited, loaded: it is whole"
    return Cell("yes", done)


def _shards(peer: Claimant, path: pathlib.Path) -> Cell:
    one, other = jax.make_mesh((8,), ("x",)), jax.make_mesh((2, 4), ("a", "b"))
    data = np.arange(64.0, dtype="float32").reshape(8, 8)
    x = jax.device_put(data, NamedSharding(one, PartitionSpec("x")))
    wanted = NamedSharding(other, PartitionSpec("b", "a"))
    like = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)}
    if peer in (EQX, FLAX):
        like = {"x": jax.device_put(jnp.zeros_like(x), wanted)}
    peer.save(path, {"x": x})
    out = peer.load(path, like)["x"]
    assert np.array_equal(out, x)
    does = getattr(out, "sharding", None) == wanted
    done = "saved from a mesh of 8 devices, loaded onto one of 2 x 4: "
    done += "so it came" if does else "it came as one array on one device"
    if peer != FLAX:
        return _yes(does, done)
    assert not does
    done += "; its documentation has `save_checkpoint_multiprocess` for processes"
    return Cell("between processes", done)


def _one_file(peer: Claimant, path: pathlib.Path) -> Cell:
    path = path.with_name(path.name + ".zip" * (peer == OURS))
    peer.save(path, {"x": jnp.ones(3)})
    count = len(_files(path))
    if peer == OURS:
        assert path.is_file()
        return Cell("yes, `.zip`", f"saved to a path that ends with .zip: {count} file")
    return _yes(path.is_file(), f"saved: {count} file" + "s" * (count > 1))


def _formats(peer: Claimant, path: pathlib.Path) -> Cell:
    opened, tree = [], {"x": jnp.ones(3)}
    for other in CLAIMANTS:
        if other == peer:
            continue
        at = path.parent / str(CLAIMANTS.index(other)) / other.file
        at.parent.mkdir()
        other.save(at, tree)
        try:
            if peer == OURS:
                out = ec.open(at, like=tree if other == EQX else None)["x"].read()
            elif (peer, other) == (ORBAX, SAFE):
                layout = peers.v1().options.CheckpointLayout.SAFETENSORS
                with peers.v1().Context(checkpoint_layout=layout):
                    out = peers.v1().load(at)["x"]
            else:
                out = peer.load(at)["x"]
            assert (np.asarray(out) == 1).all()
        except Exception:
            continue
        opened.append(other)
    done = "opened what the others had saved: "
    done += ", ".join(other.name for other in opened) or "none"
    if peer == OURS:
        return _yes(len(opened) == 4, done)
    if OURS in opened:
        done += " (we write the files that it needs)"
    others = [other.name for other in opened if other != OURS]
    return Cell(", ".join(others) or "no", done)


# What there is to know of the format that it reads is in it.
_READER = """
def read(path, name):
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))[name]
        start, stop = entry["data_offsets"]
        file.seek(8 + size + start)
        return struct.unpack(f"<{(stop - start) // 4}f", file.read(stop - start))
"""


def _standard_library(peer: Claimant, path: pathlib.Path) -> Cell:
    peer.save(path, {"x": jnp.arange(3.0), "y": jnp.ones(1)})
    if peer == SAFE:
        names: dict[str, Any] = {"json": json, "struct": struct}
        exec(_READER, names)
        assert names["read"](path, "x") == (0, 1, 2)
        return Cell("yes", f"read by {len(_READER.strip().splitlines())} lines")
    parts = {
        OURS: "the parts are in a database of TensorStore",
        ORBAX: "the arrays are in a database of TensorStore",
        EQX: "NumPy arrays in a row, without names",
        FLAX: "msgpack, which the standard library lacks",
    }
    return Cell("no", f"looked at its files: {parts[peer]}")


def _policies(peer: Claimant, path: pathlib.Path) -> Cell:
    even = lambda step: step % 2 == 0
    done = "gave the manager a function that keeps even steps, saved 1 to 5: "
    if peer == OURS:
        with ec.CheckpointManager(path, keep=1, keep_if=lambda x: even(x.number)) as m:
            for step in range(1, 6):
                m.save(step, {"x": jnp.ones(2)})
            m.wait()
            assert (steps := m.steps()) == [2, 4, 5], steps
        return Cell("yes", done + "2, 4 and the newest are there")
    elif peer == ORBAX:
        ocp = peers.ocp()

        class Even:
            def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
                return [even(info.step) for info in checkpoints]

        options = ocp.CheckpointManagerOptions(preservation_policy=Even())
        with ocp.CheckpointManager(path, options=options) as manager:
            for step in range(1, 6):
                manager.save(step, args=ocp.args.StandardSave({"x": jnp.ones(2)}))
            manager.wait_until_finished()
            steps = list(manager.all_steps())
        assert steps == [2, 4], steps
        return Cell("yes", done + "2 and 4 are there")
    elif peer == FLAX:
        try:
            _flax_save(path, {"x": jnp.ones(2)}, keep=even)
            _flax_save(path, {"x": jnp.ones(2)}, keep=even)
        except TypeError as error:
            return Cell("no", done + _why(error))
    return Cell("no", "it has no call for the steps of a run")


def _packages(peer: Claimant, path: pathlib.Path) -> Cell:
    def names(package: str, extras: frozenset[str], seen: set[Any]) -> set[str]:
        if (package, extras) in seen:
            return set()
        seen.add((package, extras))
        out = {package.lower().replace("_", "-")}
        for text in importlib.metadata.requires(package) or []:
            need = packaging.requirements.Requirement(text)
            marker = need.marker
            if not marker or any(marker.evaluate({"extra": x}) for x in ("", *extras)):
                out |= names(need.name, frozenset(need.extras), seen)
        return out

    own = names(peer.package, frozenset(), set())
    own -= names("jax", frozenset(), set()) | {peer.package.lower().replace("_", "-")}
    listed = ", ".join(sorted(own)) or "none"
    return Cell(str(len(own)), f"asked the metadata of what is installed: {listed}")


def _small(peer: Claimant, path: pathlib.Path) -> Cell:
    peer.save(path, {"x": jnp.arange(256.0)})
    size = sum(file.stat().st_size for file in _files(path))
    done = f"saved it, and added up its files: {size:,} bytes"
    return Cell(f"{size / 1024:.0f} KiB", done)


ROWS: dict[str, Callable[[Claimant, pathlib.Path], Cell]] = {
    "leaves are matched by": _names,
    "loads one array without reading the others": _one_array,
    "loads without the class": _without_the_class,
    "prunes, casts and averages checkpoints without loading them": _without_loading,
    "runs, and is rebuilt, without the code that made it": _without_the_code,
    "refuses 8 attention heads where 4 were saved": _static_fields,
    "finds a flipped bit as it reads": _flipped_bit,
    "a save that fails or is killed leaves what was at the path": _fails,
    "saves in the background": _background,
    "saves shards without gathering them, and loads onto another mesh": _shards,
    "one file": _one_file,
    "reads the formats of the others": _formats,
    "a function of yours says which steps stay": _policies,
    "ten lines of Python's standard library read it": _standard_library,
    "an array of 1 KiB takes": _small,
    "packages that come with it, beside JAX's": _packages,
}


def table(cells: dict[str, list[Cell]]) -> str:
    """The table of README.md."""
    lines = [[what, *(x.says for x in row)] for what, row in cells.items()]
    return pages.table(["", *(peer.name for peer in CLAIMANTS)], lines, 6)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", nargs=2, metavar=("PATH", "PEER"))
    args = parser.parse_args(given)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if args.half:
        return _half(pathlib.Path(args.half[0]), CLAIMANTS[int(args.half[1])])
    cells: dict[str, list[Cell]] = {}
    with tempfile.TemporaryDirectory(prefix="eqx_ckpt-") as scratch:
        for what, check in ROWS.items():
            cells[what] = []
            for peer in CLAIMANTS:
                empty = pathlib.Path(tempfile.mkdtemp(dir=scratch))
                cells[what].append(check(peer, empty / peer.file))
    print(table(cells))
    for what, row in cells.items():
        print(f"\n{what}:")
        for peer, cell in zip(CLAIMANTS, row):
            done = cell.done[0].upper() + cell.done[1:].rstrip(".")
            print(f"  {peer.name}: {cell.says}. {done}.")


if __name__ == "__main__":
    main()
