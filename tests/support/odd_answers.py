"""Calls whose stores answer oddly, at each of their requests. No test is here.

`python -m support.odd_answers KIND SEED COUNT` runs some cases, or all with COUNT 0, of
the kind "s3", "gs", "az" or "http", and prints what came of them.

A call gives the right result, or an `OSError` that names the path. What was there
before is whole and loads. Nothing is called damaged for one odd answer.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import secrets
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _files
from eqx_ckpt._kernel._limits import limits
from eqx_ckpt._stores import _buckets, _remote
from eqx_ckpt._verify import _verify
from support import servers
from support.stores import StoredFiles


# Once; for ever where it was first; for ever from then on.
MODES = ("once", "there", "on")
# What a store that says it again and again is believed.
_BELIEVED = {"404", "short", "empty", "flip"}


def tree(value: int) -> Any:
    large = np.arange(200_000, dtype=np.float32).reshape(400, 500) + value
    small = {f"s{i}": np.full(9, value + i, np.int32) for i in range(3)}
    return {"x": large, **small, "value": value}


def _is(loaded: Any, value: int) -> bool:
    wanted = tree(value)
    return all(np.array_equal(loaded[name], wanted[name]) for name in wanted)


def _fill(path: str, layout: str) -> None:
    ec.tree_serialise_leaves(path, tree(1), layout=layout, metadata={"v": 1})


def _fill_run(path: str) -> None:
    with ec.CheckpointManager(path) as manager:
        for step in (10, 20, 30):
            manager.save(step, tree(step), metrics={"loss": float(step)})
        manager.pin(10)


def _manager(path: str, **options: Any) -> ec.CheckpointManager:
    return ec.CheckpointManager(path, best=("loss", "min"), **options)


def _save(path: str, **options: Any) -> bool:
    ec.tree_serialise_leaves(path, tree(2), **options)
    return True


def _save_async(path: str) -> bool:
    ec.async_tree_serialise_leaves(path, tree(2)).result()
    return True


def _step(path: str, step: int, **options: Any) -> bool:
    with _manager(path, keep=2, **options) as manager:
        manager.save(step, tree(step), metrics={"loss": float(step)})
    return True


def _act(path: str, do: Callable[[Any], Any]) -> bool:
    do(_manager(path))
    return True


def _restored(path: str, step: int | None = None) -> int:
    loaded, at = _manager(path).restore(tree(0), step=step)
    assert _is(loaded, at)
    return at


def _restore_and_save(path: str) -> bool:
    """As a run that has begun anew comes by the steps that it had."""
    manager = _manager(path)
    at = manager.restore(tree(0))[1]
    if at < 30:
        manager.save(30, tree(30), metrics={"loss": 30.0})
        manager.wait()
    return True


def _load(path: str, **options: Any) -> bool:
    return _is(ec.tree_deserialise_leaves(path, tree(0), **options), 1)


def _part(path: str, verify: bool = True) -> bool:
    part = ec.open(path)["x"][7:300:9, ::4].read(verify=verify)
    return np.array_equal(part, tree(1)["x"][7:300:9, ::4])


class Call(NamedTuple):
    """What is at the path before it, what is done, and what is right."""

    before: str
    do: Callable[[str], Any]
    right: Any = True


READS = {
    "open": Call("ocdbt", lambda p: ec.open(p).metadata, {"v": 1}),
    "load": Call("ocdbt", _load),
    "load unverified": Call("ocdbt", lambda p: _load(p, verify=False)),
    "part": Call("ocdbt", _part),
    "part unverified": Call("ocdbt", lambda p: _part(p, False)),
    "verify": Call("ocdbt", ec.verify, []),
    "exists": Call("ocdbt", ec.exists),
    "load zarr": Call("zarr", _load),
    "part of zarr": Call("zarr", _part),
    "part of zarr unverified": Call("zarr", lambda p: _part(p, False)),
    "verify zarr": Call("zarr", ec.verify, []),
    "restore": Call("run", _restored, 30),
    "restore 20": Call("run", lambda p: _restored(p, 20), 20),
}
WRITES = {
    "first save": Call("", _save),
    "first zarr": Call("", lambda p: _save(p, layout="zarr")),
    "overwrite": Call("ocdbt", _save),
    "async": Call("ocdbt", _save_async),
    "delete": Call("ocdbt", lambda p: ec.delete(p) is None),
    "steps": Call("run", lambda p: _manager(p).steps(), [10, 20, 30]),
    "latest": Call("run", lambda p: _manager(p).latest(), 30),
    "best": Call("run", lambda p: _manager(p).best(), 10),
    "save a step": Call("run", lambda p: _step(p, 40)),
    "save a step again": Call("run", lambda p: _step(p, 30, layout="ocdbt") and False),
    "restore and save": Call("run", _restore_and_save),
    "pin": Call("run", lambda p: _act(p, lambda m: m.pin(20))),
    "unpin": Call("run", lambda p: _act(p, lambda m: m.unpin(10))),
    "delete a step": Call("run", lambda p: _act(p, lambda m: m.delete(20))),
    "clean": Call("run", lambda p: ec.clean(p, idle=True), []),
}


class World:
    """A store behind a proxy, and what is at paths before calls."""

    def __init__(self, kind: str, proxy: servers.Proxy, directory: str):
        self.kind, self.proxy = kind, proxy
        self.base = proxy.url if kind == "http" else servers.BUCKETS[kind]
        self._own, self._number = secrets.token_hex(4), itertools.count()
        self._files: dict[str, dict[str, bytes]] = {"": {}}
        fills = {
            "ocdbt": lambda p: _fill(p, "ocdbt"),
            "zarr": lambda p: _fill(p, "zarr"),
            "run": _fill_run,
        }
        for name, fill in fills.items():
            place = pathlib.Path(directory, name)
            fill(str(place))
            self._files[name] = {
                str(file.relative_to(place)): file.read_bytes()
                for file in place.rglob("*")
                if file.is_file()
            }
        self.calls = READS | ({} if kind == "http" else WRITES)
        if kind == "http":  # Nothing is listed there.
            del self.calls["restore"]

    def path(self, before: str) -> str:
        """A path with what is to be there."""
        if self.kind == "http":
            return f"{self.base}/{before}"
        url = f"{self.base}/{self._own}/{next(self._number)}"
        StoredFiles(url).update(self._files[before])
        return url

    def odd(self, answer: str, number: int, mode: str) -> Callable[[str, str], Any]:
        counts, where = itertools.count(), []

        def fault(method: str, path: str) -> str | None:
            at = next(counts)
            key = method, path
            if at == number:
                where.append(key)
            hit = at == number or mode == "on" and at > number
            if not (hit or mode == "there" and key in where):
                return None
            # TensorStore ends the process.
            is_object = method == "POST" or "/o/" in path
            if self.kind == "gs" and answer == "304":
                return None if method == "DELETE" or not is_object else answer
            return None if self.kind == "gs" and answer == "302" else answer

        return fault


class Case(NamedTuple):
    call: str
    answer: str
    number: int
    mode: str


def cases(world: World, rng: random.Random, count: int) -> list[Case]:
    """All; or `count` of them, of a few calls."""
    found = []
    names = sorted(world.calls)
    for name in rng.sample(names, 6) if count else names:
        call = world.calls[name]
        path = world.path(call.before)
        world.proxy.requests.clear()
        _buckets._heeding.clear()
        with contextlib.suppress(FileExistsError):
            assert call.do(path) == call.right, name
        requests = range(len(world.proxy.requests))
        found += map(
            Case._make, itertools.product([name], servers.ODD, requests, MODES)
        )
    rng.shuffle(found)
    return found[: count or None]


def run(world: World, case: Case) -> str | None:
    """What is wrong with what came of a case; None if nothing is."""
    call = world.calls[case.call]
    path = world.path(call.before)
    _buckets._heeding.clear()
    result, error = None, None
    world.proxy.fault = world.odd(case.answer, case.number, case.mode)
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            result = call.do(path)
    except AssertionError:
        raise
    except Exception as e:
        error = e
    finally:
        world.proxy.fault = lambda *_: None
    wrong = _judge(case, call, path, result, error)
    return wrong or _state(world, case, call, path, error)


def _judge(case: Case, call: Call, path: str, result: Any, error: Any) -> str | None:
    persists = case.mode != "once"
    if error is None:
        if isinstance(result, list) and result and "verify" in case.call:
            believed = persists and case.answer in _BELIEVED
            return None if believed else f"verify says {result}"
        if "unverified" in case.call and case.answer == "flip":
            return None
        if result != call.right:
            # What a store says for ever is so.
            if persists and case.call in (
                "exists",
                "steps",
                "latest",
                "best",
                "restore",
            ):
                if case.answer in _BELIEVED:
                    return None
            return f"the result is {result!r}"
        return None
    says = f"{type(error).__name__}: {error}"
    if case.call == "save a step again" and "exists already" in says:
        return None
    if not isinstance(error, OSError):
        believed = persists and case.answer in _BELIEVED
        if not (believed and isinstance(error, (ec.DamagedError, RuntimeError))):
            return f"raises {says}"
    place = re.sub("^(s3://|gs://|az://)bucket/", "", path)
    said = " ".join([says, *getattr(error, "__notes__", [])])
    return None if place in said else f"the error names no path: {said}"


def _value(path: str, error: Any = None) -> int | None:
    """The value of what is at a path, all of which is whole; None of nothing. After an
    `error` files for other readers need not have followed the commit."""
    if not ec.exists(path):
        return None
    loaded = ec.tree_deserialise_leaves(path, tree(0))
    value = loaded["value"]
    assert _is(loaded, value), "it is mixed"
    problems = ec.verify(path)
    if error is not None and value != 1:
        problems = [p for p in problems if p.file not in _files.OTHERS]
    assert problems == [], problems
    return value


def _state(world: World, case: Case, call: Call, path: str, error: Any) -> str | None:
    """What is wrong with what is there afterwards."""
    if world.kind == "http" or case.call in READS:
        writes = [r for r in world.proxy.requests if r.method not in ("GET", "HEAD")]
        return "it wrote" if writes and world.kind == "http" else None
    notes = " ".join(getattr(error, "__notes__", []))
    try:
        if call.before == "run":
            return _state_of_run(case, path, error)
        found = _value(path, error)
    except Exception as e:
        if case.call == "delete" and (error is not None or _is_believed_gone(case)):
            return None
        return f"afterwards: {type(e).__name__}: {e} (the call: {error!r})"
    if case.call == "delete":
        is_left = error is None and found and not _is_believed_gone(case)
        return f"is not deleted: {found}" if is_left else None
    new = {2} if error is None else {2, 1 if call.before else None}
    if found not in new:
        return f"{found} is there, after {error!r}"
    if error is not None and found == 2 and not re.search("is saved|is whole", notes):
        return f"the new one is there, and the error does not say so: {error!r}"
    return None


def _is_believed_gone(case: Case) -> bool:
    """TensorStore does not tell a deletion from one that is answered with 404."""
    return case.answer == "404"


def _state_of_run(case: Case, path: str, error: Any) -> str | None:
    manager = _manager(path)
    there = manager.steps()
    for step in there:
        if step == 20 and "a step" in case.call and _is_believed_gone(case):
            continue
        if _value(str(manager.path(step)), error if step == 40 else None) != step:
            return f"step {step} is not what it was"
    gone = {10, 20, 30} - set(there)
    allowed: set[int] = set()
    if case.call == "save a step" and 40 in there:
        allowed = {20}
    if case.call == "delete a step":
        allowed = {20}
    if case.call == "unpin":
        allowed = set()
    if gone - allowed:
        return f"steps {gone} are gone, after {error!r}"
    if case.call == "save a step" and error is None and 40 not in there:
        return "the step is not there"
    keys = list(StoredFiles(path))
    moved = sorted({key.split("/")[1] for key in keys if ".damaged-" in key})
    if moved and case.mode == "once":
        return f"moved aside: {moved}"
    if case.call == "pin" and error is None:
        if "eqx_ckpt.pins/20" not in keys:
            return "it is not pinned"
    return None


@contextlib.contextmanager
def hurried():
    """With short waits for what does not come."""
    waits = limits.reopen_seconds, _verify._LAG
    limits.reopen_seconds, _verify._LAG = 0.1, 0.1
    try:
        yield
    finally:
        limits.reopen_seconds, _verify._LAG = waits


@contextlib.contextmanager
def world_of(kind: str):
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        directory = enter(tempfile.TemporaryDirectory())
        start = {"s3": servers.s3, "gs": servers.gcs, "az": servers.az}.get(kind)
        port = enter(start() if start else servers.static(directory))
        proxy = enter(servers.Proxy(port))
        if kind == "s3":
            os.environ["AWS_ENDPOINT_URL"] = proxy.url
            os.environ.update(AWS_ACCESS_KEY_ID="me", AWS_SECRET_ACCESS_KEY="secret")
            os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        if kind == "az":
            os.environ.update(servers.azure_settings(proxy.url))
        if kind == "gs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = proxy.url
        enter(hurried())
        # In the context that is made when it is first used.
        _remote.RETRIES.update(max_retries=3, initial_delay="1ms", max_delay="1ms")
        yield World(kind, proxy, directory)


def main(kind: str, seed: str, count: str) -> None:
    random.seed(int(seed))
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    with world_of(kind) as world:
        for case in cases(world, random.Random(int(seed)), int(count)):
            try:
                wrong = run(world, case)
            except Exception:
                wrong = traceback.format_exc()
            outcomes["wrong" if wrong else "right"] += 1
            if not sum(outcomes.values()) % 500:
                print(outcomes, file=sys.stderr, flush=True)
            if wrong:
                failures.append(f"{case}: {wrong}")
                print(failures[-1], file=sys.stderr, flush=True)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
