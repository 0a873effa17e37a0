"""Checkpoints that mean harm end in one clear error, and nothing else happens.

Each attack of `tests/attacks` is done to a copy of a good checkpoint, and a process of
its own does to that all that a user does. It may take a second and 200 MB.
"""

import concurrent.futures as cf
import contextlib
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import threading

import attacks
import equinox as eqx
import numpy as np
import pytest
from attacks import ATTACKS, mutate
from attacks.foreign import FOREIGN
from support.clock import timed
from support.helpers import assert_alike, call_main, files_of, run_python

import eqx_ckpt as ec


# Errors that the docstrings name.
_documented = ("DamagedError", "ValueError", "RuntimeError", "FileNotFoundError")
# Seconds of processor time. Alone on a machine each takes less than 1.
_limit = 2.0
# A process that takes longer hangs.
_hang = 600.0

_traced = "openat|open|creat|mkdir|unlink|rename|socket|connect"


class Watched:
    """A process that is given paths, and says what came of each."""

    def __init__(self, good: list[pathlib.Path], trace: pathlib.Path | None):
        command = [sys.executable, "-m", "attacks", str(_limit)]
        if trace is not None:
            watch = "trace=" + _traced.replace("|", ",")
            options = ["-f", "--seccomp-bpf", "-y", "-o", str(trace), "-e", watch]
            command = ["strace", *options, *command]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
        )
        for path in good:
            self.send(path)
        assert self.answer() == "ready"

    def send(self, path):
        print(path, file=self.process.stdin, flush=True)

    def answer(self, seconds=_hang):
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        _, error = self.process.communicate()
        return {"died": self.process.returncode, "stderr": error[-2000:]}

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


def _snapshot(directory):
    """Everything below a directory that a write would change."""
    out = {}
    for file in sorted([directory, *directory.rglob("*")]):
        s = file.lstat()
        out[str(file)] = (s.st_mode, s.st_ino, s.st_nlink, s.st_size, s.st_mtime_ns)
    return out


def _canaries(directory):
    """A directory beside a checkpoint, which nobody has to do with."""
    directory.mkdir()
    for name in ("canary", "manifest.ocdbt", "tree", "0", "digests"):
        (directory / name).write_bytes(b"secret" * 10)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came of each attack, and what the process did meanwhile."""
    base = tmp_path_factory.mktemp("attacks")
    good = [base / kind for kind in attacks.KINDS]
    for path in good:
        attacks.save(path, path.name)
    trace = base / "trace" if shutil.which("strace") else None
    watched = Watched(good, trace)
    out = {}
    for name, attack in ATTACKS.items():
        place = base / name
        place.mkdir()
        shutil.copytree(base / attack.kind, place / "a")
        _canaries(place / "outside")
        attack.make(place / "a", place / "outside")
        before = _snapshot(place)
        watched.send(place / "a")
        out[name] = watched.answer()
        out[name]["changed"] = _snapshot(place) != before
        if "died" in out[name]:
            # The trace is of the first process: what it saw then is not lost.
            watched = Watched(good, None)
    watched.close()
    return base, out, trace.read_text(errors="replace") if trace else None


_steps = "open touch show tree read unverified views store verify load rebuild".split()


# What somebody may have saved: `verify` finds nothing wrong with it.
_sound = ("text_that_is_not_utf_8", "key_of_other_words", "unknown_implementation")


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(results, name):
    attack, out = ATTACKS[name], results[1][name]
    assert "died" not in out, out
    assert not out["changed"]
    assert out["seconds"] <= _limit
    assert out["ls"] is None
    errors = {step: out[step] for step in _steps if out.get(step)}
    for step, (kind, text) in errors.items():
        assert kind in _documented, (step, kind, text)
        assert len(text) < 5000
        assert all(line.isprintable() for line in text.split("\n")), text
    problems = out.get("problems", [])
    assert all(line.isprintable() for line in problems)
    if attack.refused is None:
        assert not errors and out["right"]
        return
    by_index = "open", "tree", "load", "rebuild"
    assert problems or attack.refused in by_index or name in _sound
    assert attack.refused in errors, out
    assert re.search(attack.match, errors[attack.refused][1]), errors[attack.refused]
    # What is made again otherwise has often changed a static field.
    first = "load" if attack.refused == "rebuild" else attack.refused
    assert set(errors) <= set(_steps[_steps.index(first) :])
    before = attack.refused in ("open", "touch", "tree")
    kinds = ("DamagedError", "ValueError" if before else "RuntimeError")
    assert errors[attack.refused][0] in kinds
    # What is refused as a whole is refused by the load too.
    assert attack.refused in ("open", "rebuild") or "load" in errors


_call = re.compile(rf"\b({_traced})\((.*)")
_own = (sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/usr/", "/lib", "/etc/ld.so")


def test_nothing_outside_is_opened(results):
    """Every path that the process opens is inside the checkpoint that it was given."""
    base, out, trace = results
    if trace is None:
        pytest.skip("there is no strace")
    here = str(pathlib.Path(__file__).parents[2])
    current = None
    seen = set()
    for line in trace.splitlines():
        found = _call.search(line)
        if found is None:
            continue
        call, rest = found.groups()
        marker = re.search(r'"/attack/(.*)"', rest)
        if marker is not None:
            current = marker[1]
            seen.add(pathlib.Path(current).parent.name)
            continue
        if current is None:
            continue
        assert call not in ("creat", "mkdir", "unlink", "rename"), line
        assert call not in ("socket", "connect") or "AF_INET" not in rest, line
        if call in ("socket", "connect"):
            continue
        assert "O_CREAT" not in rest and "O_WRONLY" not in rest, line
        path = re.search(r'"([^"]*)"', rest)
        assert path is not None, line
        # Of one that is opened in a directory, which is open.
        above = re.match(r"\d+<(.*?)>, ", rest)
        asked = os.path.normpath(os.path.join(above[1] if above else "/", path[1]))
        # What was opened, as the system has it, if it was.
        opened = re.search(r"= \d+<(.*)>$", line)
        for one in {asked, opened[1] if opened else asked}:
            inside = one == current or one.startswith(current + "/")
            assert inside or one.startswith((*_own, here)), line
    alive = {name for name in ATTACKS if "died" not in out[name]}
    assert seen == alive


# ---- What comes between two calls, and the way out.


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("swap", ["link", "fifo", "directory", "short"])
def test_files_swapped_between_open_and_read(tmp_path, layout, swap):
    path = tmp_path / "a"
    attacks.save(path, layout)
    ckpt = ec.open(path)
    lazy = ckpt.splice(attacks.skeleton(), attacks.everything)
    file = path / "net.weight" / "c" / "0" / "0"
    if layout == "ocdbt":
        file = attacks.data(path) / "0"
    (tmp_path / "outside").mkdir()
    moved = attacks.move(file, tmp_path / "outside")
    if swap == "link":
        file.symlink_to(moved)
    elif swap == "fifo":
        os.mkfifo(file)
    elif swap == "directory":
        file.mkdir()
    else:
        file.write_bytes(moved.read_bytes()[:100])
    for verify in (True, False):
        with pytest.raises(RuntimeError, match="nothing of it was loaded"):
            ec.materialise(lazy, verify=verify)
        with pytest.raises(RuntimeError, match="nothing of it was loaded"):
            ckpt["net.weight"][3:5].read(verify=verify)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_the_path_may_be_a_link_and_the_files_if_asked(tmp_path, layout):
    attacks.save(tmp_path / "a", layout)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    like = attacks.skeleton()
    load = lambda path: ec.tree_deserialise_leaves(path, like, attacks.everything)
    good = load(tmp_path / "link")
    # As a tool that downloads has it: files are links to where their bytes are kept.
    cache, blobs = tmp_path / "cache", tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted((tmp_path / "a").rglob("*"))):
        if file.is_file():
            target = cache / file.relative_to(tmp_path / "a")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, blobs / str(number))
            target.symlink_to(blobs / str(number))
    with pytest.raises(ValueError, match="symbolic link.*`follow_symlinks=True`"):
        load(cache)
    ckpt = ec.open(cache, follow_symlinks=True)
    assert_alike(load(ckpt), good)
    again = pickle.loads(pickle.dumps(ckpt))
    assert again["net.weight"].read().shape == (256, 128)
    # A FIFO at the end of a link is one.
    file = cache / "eqx_ckpt.json"
    file.unlink()
    os.mkfifo(tmp_path / "fifo")
    file.symlink_to(tmp_path / "fifo")
    with pytest.raises(ValueError, match="is not a file"):
        ec.open(cache, follow_symlinks=True)


@pytest.mark.parametrize("name", ["d", "array_metadatas"])
def test_a_save_writes_through_no_link(tmp_path, name):
    path, outside = tmp_path / "a", tmp_path / "outside"
    attacks.save(path, "ocdbt")
    outside.mkdir()
    (path / name).symlink_to(attacks.move(path / name, outside))
    before = _snapshot(tmp_path)
    with pytest.raises(FileExistsError, match="nothing is written through a link"):
        attacks.save(path, "ocdbt")
    assert _snapshot(tmp_path) == before


def test_a_save_over_hard_links_leaves_the_other_names(tmp_path):
    path, outside = tmp_path / "a", tmp_path / "outside"
    attacks.save(path, "ocdbt")
    shutil.copytree(path, outside, copy_function=os.link)
    before = files_of(outside)
    attacks.save(path, "ocdbt")
    assert files_of(outside) == before
    assert files_of(path) != before


def test_a_save_leaves_what_it_cannot_read(tmp_path):
    attacks.save(tmp_path / "a", "ocdbt")
    attacks.forge(tmp_path / "a", lambda v: v.update(layout="other"))
    before = _snapshot(tmp_path)
    with pytest.raises(ValueError, match="unknown layout"):
        attacks.save(tmp_path / "a", "ocdbt")
    assert _snapshot(tmp_path) == before


def test_what_cannot_be_read_is_not_saved(tmp_path):
    deep = 1.0
    for _ in range(257):
        deep = [deep]
    with pytest.raises(ValueError, match="at most 256 can be stored"):
        ec.tree_serialise_leaves(tmp_path / "a", deep)
    many = np.zeros(2**16 + 1, np.int8)
    with pytest.raises(ValueError, match="65537 chunks.*Pass larger `chunks`"):
        ec.tree_serialise_leaves(tmp_path / "a", many, chunks=1)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="longer than 32 MiB"):
        ec.tree_serialise_leaves(tmp_path / "a", 1.0, metadata="a" * 2**25)
    with pytest.raises(ValueError, match="more values than are read"):
        ec.tree_serialise_leaves(tmp_path / "a", 1.0, metadata="," * 3 * 2**20)
    with pytest.raises(FileNotFoundError):
        ec.open(tmp_path / "a")


def test_labels_of_a_state_that_take_long_to_compare(tmp_path):
    """A million pairs of labels, none of which fits."""

    class Model(eqx.Module):
        norms: list

        def __init__(self):
            make = lambda _: eqx.nn.BatchNorm(2, axis_name="b", mode="ema")
            self.norms = list(map(make, range(100)))

    model, state = eqx.nn.make_with_state(Model)()
    ec.tree_serialise_leaves(tmp_path / "a", state, durable=False)

    def alter(v):
        for value in v["tree"]["values"]:
            count = len(value["markers"])
            value["markers"] = ["=" + "x." * 500 + str(i) for i in range(count)]

    attacks.forge(tmp_path / "a", alter)

    def load():
        with pytest.raises(RuntimeError, match="does not fit `like`"):
            ec.tree_deserialise_leaves(tmp_path / "a", state)

    assert timed(5, load)[1] <= 5


# ---- Random mutations.


def _mutations(count, seed):
    return json.loads(call_main("attacks.mutate", count, seed)[-1])


def test_mutations():
    out = _mutations(40, 0)
    assert out["tried"] == 40 and not out["wrong"], out["wrong"]
    # Some get as far as the data, and some are refused early.
    assert {"open", "read", "loaded"} <= set(out["first failed at"])


def test_no_number_in_metadata_of_others_is_too_large(tmp_path):
    """Each of them in turn is one that no C++ type holds, or hardly."""
    for kind, files in (("orbax", "*/zarr.json"), ("levanter", "model/big/.zarray")):
        FOREIGN[kind](tmp_path / kind)
        for file in (tmp_path / kind).glob(files):
            good = file.read_bytes()
            for place in mutate.places(json.loads(good)):
                for number in (2**200, 2**64 - 1, -(2**63) - 1):
                    value = json.loads(good)
                    if type(mutate.at(value, place)) is not int:
                        continue
                    mutate.at(value, place[:-1])[place[-1]] = number
                    file.write_text(json.dumps(value))
                    with contextlib.suppress(ValueError, RuntimeError):
                        ec.materialise(ec.open(tmp_path / kind).tree)
            file.write_bytes(good)


@pytest.mark.long
def test_a_hundred_thousand_mutations():
    with cf.ThreadPoolExecutor(os.cpu_count()) as pool:
        for out in pool.map(lambda seed: _mutations(2000, seed), range(1, 51)):
            assert not out["wrong"], out["wrong"]


@pytest.mark.long
@pytest.mark.parametrize("kind", FOREIGN)
def test_ten_thousand_mutations_of_each_format(kind):
    code = "from attacks import mutate; mutate.main(2000, {seed}, 1.0, [{kind!r}])"
    run = lambda seed: json.loads(run_python(code.format(seed=seed, kind=kind)))
    with cf.ThreadPoolExecutor(os.cpu_count()) as pool:
        for out in pool.map(run, range(5)):
            assert out["tried"] == 2000 and not out["wrong"], out["wrong"]
