"""Records that say something else: `python -m attacks.records COUNT SEED`.

Every value of every record of an index is changed to one of another kind, out of its
range, too deep, a path, doubled, or out of order, with a digest to match, so that it
gets to the decoders. What comes of each call is a documented error, or an answer that
agrees with those of the other calls.
"""

import collections
import contextlib
import copy
import io
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from support import command, golden
from support.clock import timed

import eqx_ckpt as ec

from . import seal
from .__main__ import documented, limit_memory
from .mutate import at, DOCUMENTED, places


class Net(eqx.Module):
    norm: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP
    tied: list[jax.Array]
    empty: Any
    heads: int = eqx.field(static=True)
    shape: tuple = eqx.field(static=True)

    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.norm = eqx.nn.BatchNorm(3, "batch")
        self.mlp = eqx.nn.MLP(3, 2, 4, 2, key=jr.key(0))
        self.tied = [self.mlp.layers[0].weight] * 2
        self.empty = None
        self.heads, self.shape = 4, (1, range(3), {"a": 1.5})


def _tree() -> Any:
    model, state = eqx.nn.make_with_state(Net)()
    numbers = {"b": 1, "a": 2.5, "big": 2**70, "key": jr.key(1), "c": {7: np.arange(3)}}
    return {"model": model, "state": state, "numbers": numbers}


def _functions() -> Any:
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    call = ec.function(lambda t, x: t["model"].mlp(x), x, platforms=["cpu"])
    return {"f": call, "g": call}


_METADATA = {"width": 8, "nested": [1, None, {"a": True}]}


def _run(path: pathlib.Path) -> None:
    run = path.parent.parent.parent / "made"
    own = {"at": 1, "text": "x"}
    with ec.CheckpointManager(run) as manager:
        made = {"metadata": _METADATA, "functions": _functions(), "own": own}
        manager.save(3, _tree(), metrics={"loss": 0.5}, **made)
    shutil.move(run / "3" / "default", path)
    shutil.rmtree(run)


def _zarr(path: pathlib.Path) -> None:
    ec.tree_serialise_leaves(path, _tree(), layout="zarr", metadata=_METADATA)


def _compressed(path: pathlib.Path) -> None:
    options = {"compression": "lz4", "functions": _functions(), "durable": False}
    ec.tree_serialise_leaves(path, _tree(), **options)


def _copied(name: str) -> Callable[[pathlib.Path], None]:
    return lambda path: shutil.copytree(golden.GOLDEN / name, path)


MADE: dict[str, Callable[[pathlib.Path], None]] = {
    "run": _run,
    "zarr": _zarr,
    "compressed": _compressed,
    **{name: _copied(name) for name in ("1/ocdbt", "1/zarr", "1/zstd", "1/processes")},
    **{name: _copied(name) for name in ("1/files", "1/lz4-files", "1/own")},
    **{name: _copied(name) for name in ("1/part", "1/zarr-lz4", "1/functions-0.10.2")},
}


# ---- What is put in the place of a value.


# What Python would not write: texts stand for it.
_ODD = {"<many digits>": "1" + "0" * 4000, "<fewer than none>": "-1" + "0" * 4000}
_ODD |= {f"<{text}>": text for text in ("1e300", "NaN", "1e999", "-Infinity")}
_ODD |= {f"<{n} lists>": "[" * n + "1" + "]" * n for n in (150, 900)}
_ODD |= {f"<{n} dicts>": '{"a":' * n + "1" + "}" * n for n in (150, 900)}
_NEW: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 2**31, 2**32, 2**53, 2**60]
_NEW += [2**63, -(2**63), 2**64, 2**200, 0.5, -0.0, 1.0, *_ODD]
_NEW += [
    "",
    "%",
    "..",
    "/etc/passwd",
    "../../x",
    "*",
    "a.b",
    "a" * 300,
    "\0",
    "\x1b[2J",
]
_NEW += ["\ud800", "é", "=0", "@0", "#0", "ocdbt", "jax"]
_NEW += [[], {}, [[]], {"": None}, [0], [0, 0], [None], ["a"], {"a": 1}, [-1], [2**64]]


def _changes(old: Any) -> Iterator[tuple[str, Any]]:
    """What a value may become, and what that is called."""
    for new in _NEW:
        yield f"{str(new)[:20]!r}", new
    if type(old) is int:
        for by in (-64, -1, 1, 64, old):
            yield f"{by} more", old + by
    if type(old) is str:
        yield "a letter more", old + "a"
        yield "a letter less", old[:-1]
    if isinstance(old, list) and old:
        yield "the other way round", old[::-1]
        yield "the last twice", [*old, copy.deepcopy(old[-1])]
        yield "the last less", old[:-1]
        yield "as often again", [*old, *copy.deepcopy(old)]
    if isinstance(old, dict) and old:
        key = next(iter(old))
        yield "one less", {k: v for k, v in old.items() if k != key}
        for new in ("", "a.b.c", "\ud800", "..", "%" * 5000):
            yield f"a key {new[:9]!r}", {new if k == key else k: old[k] for k in old}


def _column_changes(numbers: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """What a list of numbers may become besides."""
    for i in {0, len(numbers) // 2, len(numbers) - 1}:
        for new in (numbers[i] + 1, numbers[i - 1], 2**17, 2**31, 2**32 - 1):
            yield f"{new} at {i}", [*numbers[:i], new, *numbers[i + 1 :]]
        swapped = {i: numbers[i - 1], (i - 1) % len(numbers): numbers[i]}
        yield f"{i} swapped", [swapped.get(n, x) for n, x in enumerate(numbers)]


def _chosen(value: Any) -> list[tuple]:
    """The places of a record: of what there is many, the first, the last and one."""
    return [path for path in places(value)[1:] if _is_chosen(value, path)]


def _is_chosen(value: Any, path: tuple) -> bool:
    for depth, key in enumerate(path):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        some = keys if not depth or len(keys) < 12 else keys[:: max(1, len(keys) // 2)]
        if key not in some:
            return False
        value = value[key]
    return True


def cases(value: dict[str, Any]) -> list[tuple[str, tuple, Any]]:
    """All changes of an index: what it is, where, and what is put there."""
    out: list[tuple[str, tuple, Any]] = []
    for path in _chosen(value):
        old = at(value, path)
        changes = list(_changes(old))
        if isinstance(old, list) and old and {*map(type, old)} == {int}:
            changes += _column_changes(old)
        out += [(f"{'.'.join(map(str, path))}: {what}", path, x) for what, x in changes]
        out.append((f"{path}: left out", path, ...))
    return out


def _write(path: pathlib.Path, value: Any, place: tuple, new: Any) -> None:
    value = copy.deepcopy(value)
    holder = at(value, place[:-1])
    if new is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = copy.deepcopy(new)
    text = json.dumps(value, separators=(",", ":"))
    if type(new) is str and new in _ODD:
        text = text.replace(json.dumps(new), _ODD[new])
    (path / "eqx_ckpt.json").write_bytes(seal(text.encode()[:-1]))


# ---- What is done with it.


class Outcome:
    """What came of each call with a checkpoint."""

    def __init__(self, usual: Collection[str]) -> None:
        self.errors: dict[str, str] = {}
        self.usual = usual
        self.wrong: list[str] = []

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as e:
            self.errors[name] = kind = documented(e)
            lines = str(e).split("\n")
            if name in self.usual:
                return None
            if kind not in (*DOCUMENTED, "KeyError") or type(e) is ValueError:
                last = traceback.extract_tb(e.__traceback__)[-1]
                where = f"{pathlib.Path(last.filename).name}:{last.lineno}"
                self.wrong.append(
                    f"{name}: {type(e).__name__} at {where}: {lines[0]}"[:300]
                )
            elif not all(map(str.isprintable, lines)) or len(str(e)) > 20_000:
                self.wrong.append(f"{name}: a message of {len(str(e))}: {e!s:.200}")
            return None

    def expect(self, name: str, good: bool) -> None:
        if not good:
            self.wrong.append(name)


def _said(*arguments: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        command.main([*arguments])
    shown = text.getvalue()
    assert all(map(str.isprintable, shown.split("\n"))), "an escape"
    return shown


def use(
    path: pathlib.Path, good: pathlib.Path, like: Any, usual: Collection[str]
) -> Outcome:
    """All that a user does with a checkpoint at `run/3/default`."""
    out = Outcome(usual)
    run, target = path.parent.parent, path.parent.parent.parent / "target"
    for name in ("info", "ls", "verify", "stats"):
        out.call(f"cli {name}", lambda: _said(name, str(path)))
    out.call("cli steps", lambda: _said("steps", str(run)))
    ckpt = out.call("open", lambda: ec.open(path))
    if ckpt is None:
        return out
    out.call("repr", lambda: (repr(ckpt), repr(ckpt.leaves), repr(ckpt.saved)))
    out.call("html", ckpt._repr_html_)
    tree = out.call("tree", lambda: ckpt.tree)
    out.call("nodes", lambda: (repr(tree), jax.tree.leaves(tree)))
    names = out.call("names", lambda: list(ckpt.leaves)) or []
    for name in names:
        found = out.call("leaf", lambda: ckpt[name])
        if found is not None:
            out.expect(f"another leaf than {name!r:.60}", found.name == name)
    problems = out.call("verify", lambda: ec.verify(path))
    leaves = out.call("read", lambda: ec.materialise(dict(ckpt.leaves)))
    out.call("read tree", lambda: ec.materialise(ckpt.tree))
    if "read" not in usual:
        found = problems != [] or leaves is not None
        out.expect("nothing is found of what cannot be read", found)
    for f in out.call("functions", lambda: list(ckpt.functions.values())) or []:
        out.call("function", lambda: (repr(f), f.args, f.result, f.read()))
    out.call("diff", lambda: repr(ec.diff(good, path)))
    out.call("diff back", lambda: repr(ec.diff(path, good, values=True)))
    out.call("stats", lambda: ec.stats(path))
    out.call("rebuild", lambda: ec.rebuild(path, _KNOWN))
    out.call("load", lambda: _loaded(ckpt, like))
    out.call("rename", lambda: _loaded(ckpt, {"x": like}, rename=_IN_X))
    out.call("graft", lambda: _grafted(ckpt, like))
    out.call("merge", lambda: _merged(path, good))
    saved = out.call("convert", lambda: _converted(path, target))
    if saved:
        out.expect("what was converted is damaged", not ec.verify(target))
        again = ec.open(target)
        out.expect("converted to other names", list(again.leaves) == names)
    rest = ["--drop", names[0]] if len(names) > 1 else []
    out.call(
        "edit", lambda: _said("edit", str(path), str(target), *rest, "--overwrite")
    )
    out.call("own", lambda: ec.CheckpointManager(run).restore(like, 3, own="all"))
    shutil.rmtree(target, ignore_errors=True)
    return out


def _converted(path: pathlib.Path, target: pathlib.Path) -> bool:
    ec.convert(path, target, durable=False)
    return True


_KNOWN = [sys.modules[__name__], golden, eqx.nn, jax.nn]


_IN_X = ec.rename(lambda name: f"x.{name}")


def _fitted(do: Callable[[], Any]) -> Any:
    """What a call gives, or None: that trees do not fit is said in one report."""
    try:
        return do()
    except ec.DamagedError:
        raise
    except (ValueError, RuntimeError) as e:
        if any(text in str(e) for text in ("The checkpoint", "fit")):
            return None
        raise


def _grafted(ckpt: Any, like: Any) -> Any:
    return _fitted(lambda: ec.graft(like, ckpt, [(lambda m: m, lambda c: c)]))


def _merged(path: pathlib.Path, good: pathlib.Path) -> Any:
    return _fitted(lambda: repr(ec.merge([path, good], ec.merging.average())))


def _loaded(ckpt: Any, like: Any, **options: Any) -> Any:
    load = ec.tree_deserialise_leaves
    return _fitted(lambda: load(ckpt, like, lambda _: True, **options))


_CALLS = "read", "read tree", "diff", "diff back", "stats", "rebuild", "load", "convert"
_CALLS = *_CALLS, "own", "rename", "graft", "merge"


class Bench:
    """Good checkpoints, and one that is changed again and again."""

    def __init__(self, base: pathlib.Path, names: Collection[str] = MADE):
        self.path = base / "run" / "3" / "default"
        self.path.parent.mkdir(parents=True)
        self.copied = ""
        self.good: dict[str, pathlib.Path] = {}
        self.values: dict[str, Any] = {}
        self.likes: dict[str, Any] = {}
        # Calls that fail with the good one too.
        self.usual: dict[str, Collection[str]] = {}
        for name in names:
            self.good[name] = good = base / "good" / name / "x" / "y"
            good.parent.mkdir(parents=True)
            MADE[name](good)
            self.values[name] = json.loads((good / "eqx_ckpt.json").read_bytes())
            del self.values[name]["digest"]
            # What one process has saved alone is not loaded as a whole.
            with contextlib.suppress(ValueError):
                self.likes[name] = ec.materialise(ec.open(good).tree)
            self.usual[name] = self.run(name).errors.keys()

    def run(self, name: str, place: tuple = (), new: Any = None) -> Outcome:
        if self.copied != name:
            shutil.rmtree(self.path, ignore_errors=True)
            shutil.copytree(self.good[name], self.path)
            self.copied = name
        index = (self.good[name] / "eqx_ckpt.json").read_bytes()
        (self.path / "eqx_ckpt.json").write_bytes(index)
        if place:
            _write(self.path, self.values[name], place, new)
        good, like = self.good[name], self.likes.get(name)
        return use(self.path, good, like, self.usual.get(name, _CALLS))


# Seconds of processor time, for some thirty calls.
_LIMIT = 5.0


def _memory() -> str | None:
    """A directory that no disk has, if there is one: thousands of edits are synced."""
    return "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None


def main(count: int, seed: int, names: Collection[str] = MADE) -> None:
    base = pathlib.Path(tempfile.mkdtemp(prefix="records-", dir=_memory()))
    bench = Bench(base, names)
    for name in names:
        out = bench.run(name)
        assert not out.wrong, (name, out.wrong)
    limit_memory()
    r, name = random.Random(seed), ""
    every = {name: cases(value) for name, value in bench.values.items()}
    tally: collections.Counter[str] = collections.Counter()
    wrong: list[list[str]] = []
    for number in range(count):
        if number % 20 == 0:  # What is copied once is changed some times.
            name = r.choice(list(every))
        # A field of an index that has much in it is not chosen more often than others.
        fields = sorted({place[0] for _, place, _ in every[name]})
        field = r.choice(fields)
        what, place, new = r.choice([x for x in every[name] if x[1][0] == field])
        signal.alarm(600)
        out, seconds = timed(_LIMIT, lambda: bench.run(name, place, new))
        signal.alarm(0)
        tally[next(iter(out.errors), "all went well")] += 1
        if seconds > _LIMIT:
            out.wrong.append(f"{seconds:.1f} s")
        wrong += [[name, what[:200], x] for x in out.wrong]
    shutil.rmtree(base)
    total = sum(map(len, every.values()))
    print(json.dumps({"tried": count, "of": total, "ended": tally, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
