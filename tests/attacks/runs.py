"""Runs that mean harm: `python -m attacks.runs COUNT SEED`.

Each record of each small file of a run is altered in one place: attempts, the journal,
pins, parts on a near disk, the metadata of steps, and what processes say to each other.
So are names, and links come in the place of files and directories. Then calls are made
that read, save and delete. Each has to end as without the alteration, or with a
documented error; and nothing outside of the run and its near disk may change.
"""

import collections
import contextlib
import copy
import io
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from support import command

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _history, _index, _journal
from eqx_ckpt._kernel._limits import limits
from eqx_ckpt._kernel._run import _attempts
from eqx_ckpt._kernel._run._pins import pinned
from eqx_ckpt._kernel._run._step_journal import Journal
from eqx_ckpt._kernel._run._steps import Steps
from eqx_ckpt._kernel._runtime._conversation import Processes
from eqx_ckpt._kernel._storage import _root

from . import forge, index_of


DOCUMENTED = (ValueError, RuntimeError, OSError)
_HANG = 600
_ID = "0123456789abcdef"
# A number that JSON has and Python refuses to read.
_LONG = "1" + "0" * 5000


class Raw(str):
    """A text of JSON that `json.dumps` would not write."""


def deep(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


def alterations(value: Any, outside: str) -> Iterator[Any]:
    """What one value is altered to."""
    yield from (None, True, False, [], {}, "", "x", [value], {"a": value})
    yield from (0, -1, 1, 0.5, 1.5, -0.0, 1e300, 10**18, 2**63, 2**64, 10**4000)
    yield from map(Raw, (_LONG, "NaN", "-Infinity", "1e999", "1.0"))
    yield from ("../../victim", outside, f"{outside}/run", "..", ".", "a/b", "/", "\0")
    yield from ("*", "?", "**", "[0-9a-f]*", "?" * 16, f"{_ID}/..", f"../{_ID}")
    yield from (_ID, _ID.upper(), _ID + "\n", "٠" * 16, "0" * 15, "0" * 300, "\ud800")
    yield from (deep(90), deep(900), deep(100_000), Raw('{"a":1,"a":1}'))
    if isinstance(value, str):
        yield from (value + "x", value[:-1], f" {value}", value.upper())
        yield from ([*value], value.encode().hex())
    if isinstance(value, (int, float)):
        yield from (float(value), str(value), -value, value + 0.5)


class Altered(NamedTuple):
    """A value that has something else at a path."""

    value: Any
    path: tuple
    new: Any
    how: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.how or _shown(self.new)}"

    def text(self) -> str:
        return _dumped(_replaced(self.value, self.path, self.new))


def altered(value: Any, outside: str, path: tuple = ()) -> Iterator[Altered]:
    """JSON that differs from a value in one place."""
    inner = _at(value, path)
    yield from (Altered(value, path, new) for new in alterations(inner, outside))
    if not isinstance(inner, (list, dict)):
        return
    for i in range(len(inner)) if isinstance(inner, list) else inner:
        if isinstance(inner, list):
            twice, after = inner[: i + 1] + inner[i:], inner[i : i + 2][::-1]
            yield Altered(value, path, inner[:i] + inner[i + 1 :], f"without {i}")
            yield Altered(value, path, twice, f"{i} twice")
            yield Altered(value, path, inner[:i] + after + inner[i + 2 :], f"{i} later")
        yield from altered(value, outside, (*path, i))


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    out = copy.copy(value)
    out[path[0]] = _replaced(value[path[0]], path[1:], new)
    return out


def _dumped(value: Any) -> str:
    """As JSON, with what is `Raw` as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_dumped, value)) + "]"
    if isinstance(value, dict):
        items = (f"{json.dumps(k)}: {_dumped(v)}" for k, v in value.items())
        return "{" + ", ".join(items) + "}"
    return json.dumps(value)


def _shown(value: Any) -> str:
    text = _dumped(value)
    return text if len(text) < 60 else f"{text[:50]}... ({len(text)})"


# ---- A run, and what is done to it.


def tree(step: int) -> dict[str, Any]:
    return {"x": np.full(50, float(step)), "step": step}


def manager(path: pathlib.Path, **how: Any) -> ec.CheckpointManager:
    near = {"near": path / "disk", "near_every": 1}
    how = {"every": 5, "keep": 2, "best": ("loss", "min")} | near | how
    return ec.CheckpointManager(path / "run", **how)


def make(path: pathlib.Path) -> None:
    """A run with three steps, one of them pinned, a journal, and a near step."""
    with manager(path, keep=None) as own:
        for step in (5, 10, 15):
            own.save(step, tree(step), {"loss": 1 / step}, own={"at": step})
        own.pin(10)
        own.save(16, tree(16), own={"at": 16})
        own._saves._last.kept = None
    root = _root.resolve(path / "run")
    with mock.patch.object(limits, "stamp_seconds", -1):
        Journal(root, lambda: [5, 10, 15])._record([5, 10, 15], {})
    assert _attempts.last(root) and (path / "run" / _journal.KEY).exists()


def part_of(path: pathlib.Path) -> pathlib.Path:
    (file,) = (path / "disk").glob("*/*/*/*.zip")
    return file


class Hang(Exception):
    """A call did not end."""


def _hang(*_: Any) -> None:
    raise Hang


class Case(NamedTuple):
    """`alter` alters the run at a path. `messages`: instead, what of the messages of a
    call is altered: which one, and how."""

    what: str
    alter: Callable[[pathlib.Path], None] | None = None
    message: tuple[int, Callable[[bytes], bytes]] | None = None


def cases(pattern: pathlib.Path, outside: str) -> list[Case]:
    out = [Case("nothing", lambda path: None)]
    (attempt,) = (pattern / "run/eqx_ckpt.run").iterdir()
    key, last = attempt.relative_to(pattern), pathlib.Path("run/eqx_ckpt.run/2")
    for new in altered(json.loads(attempt.read_bytes()), outside):
        out.append(Case(f"attempt {new}", _writes(key, new.text)))
        # One that would be the last.
        out.append(Case(f"last attempt {new}", _writes(last, new.text)))
    for what, data in _torn(attempt.read_text()):
        out.append(Case(f"attempt {what}", _writes(key, lambda data=data: data)))
    history = min((pattern / "run" / _history.PLACE).iterdir())
    for what, file in (
        ("journal", pattern / "run" / _journal.KEY),
        ("history", history),
    ):
        text = zlib.decompress(file.read_bytes())
        head, key = text[: text.index(b"[")], file.relative_to(pattern)
        for new in altered(json.loads(text)["rows"], outside):
            sealed = lambda head=head, new=new: zlib.compress(
                _index.sealed(head + _encoded(new.text()))
            )
            out.append(Case(f"{what} {new}", _writes(key, sealed)))
    for new in altered(ec.open(part_of(pattern)).metadata, outside):
        out.append(Case(f"part {new}", _reparts(new.text)))
    for new in altered(index_of(pattern / "run/15/default")["metadata"], outside):
        out.append(Case(f"metadata {new}", _remetadata(new.text)))
    out += [*_renamed(pattern), *_linked(pattern)]
    return out


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _torn(text: str) -> Iterator[tuple[str, Any]]:
    for data in (b"", b"[", b"\xff", b"null", b"\0" * 40, b" " * 5000, text.encode()):
        yield f"is {data[:10]}", data
    for stop in range(1, len(text), 7):
        yield f"ends at {stop}", text[:stop]


Text = Callable[[], str]


def _writes(
    key: pathlib.Path, make: Callable[[], str | bytes]
) -> Callable[[pathlib.Path], None]:
    def alter(path: pathlib.Path) -> None:
        data = make()
        (path / key).write_bytes(data if isinstance(data, bytes) else _encoded(data))

    return alter


def _reparts(text: Text) -> Callable[[pathlib.Path], None]:
    def alter(path: pathlib.Path) -> None:
        # In place of what there is, a zip with another index.
        with tempfile.TemporaryDirectory() as away:
            ec.tree_serialise_leaves(f"{away}/c", tree(16))
            _alter_metadata(pathlib.Path(away, "c"), text())
            part_of(path).write_bytes(zipped(pathlib.Path(away, "c")))

    return alter


def zipped(path: pathlib.Path) -> bytes:
    """A checkpoint as one file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(path.rglob("*")):
            if file.is_file():
                # Each begins at a multiple of 64.
                info = zipfile.ZipInfo(str(file.relative_to(path)))
                header = out.tell() + 30 + len(info.filename)
                pad = (-header - 4) % 64
                info.extra = (0xD935).to_bytes(2, "little")
                info.extra += pad.to_bytes(2, "little") + bytes(pad)
                archive.writestr(info, file.read_bytes())
    return out.getvalue()


def _remetadata(text: Text) -> Callable[[pathlib.Path], None]:
    return lambda path: _alter_metadata(path / "run/15/default", text())


def _alter_metadata(path: pathlib.Path, text: str) -> None:
    marker = "the metadata goes here"
    forge(path, lambda value: value.update(metadata=marker))
    body = (path / "eqx_ckpt.json").read_bytes()[:-45]
    body = body.replace(json.dumps(marker).encode(), _encoded(text))
    (path / "eqx_ckpt.json").write_bytes(_index.sealed(body))


_NAMES = ["-1", "1.5", "01", "9" * 17, "9" * 18, "9" * 19, "9" * 250, "*", "?", "[0-9]"]
_NAMES += ["...", "~", "\n", "٣", _ID, _ID.upper(), "0.zip", "1.zip", "-1.zip", "*.zip"]
_NAMES += ["default", "3", "20", ".hidden", "x.eqx_ckpt-" + _ID]


def _places(pattern: pathlib.Path) -> list[pathlib.Path]:
    return [
        path.relative_to(pattern)
        for top in ("run", "disk")
        for path in [pattern / top, *sorted((pattern / top).rglob("*"))]
    ]


def _renamed(pattern: pathlib.Path) -> Iterator[Case]:
    """Files and directories that are called otherwise, or are there twice."""
    for place in _places(pattern):
        if place.parts[-2:-1] == ("d",) or len(place.parts) < 2:
            continue  # Of a checkpoint.
        if len(place.parts) > 3 and place.parts[0] == "run":
            continue
        for name in _NAMES:

            def move(path, place=place, name=name):
                with contextlib.suppress(OSError):
                    (path / place).rename(path / place.with_name(name))

            def double(path, place=place, name=name):
                old, new = path / place, path / place.with_name(name)
                with contextlib.suppress(OSError):
                    copy = shutil.copytree if old.is_dir() else shutil.copy
                    copy(old, new)

            yield Case(f"{place} is called {name!r:.40}", move)
            yield Case(f"{place} is there as {name!r:.40} too", double)


def _linked(pattern: pathlib.Path) -> Iterator[Case]:
    """Something else in the place of each file and directory."""
    for place in _places(pattern)[1:]:
        if place == pathlib.Path("disk"):
            continue  # What was named may be a link.
        for kind in ("twin", "top", "above", "nowhere", "fifo", "file", "directory"):

            def alter(path, place=place, kind=kind):
                at = path / place
                twin = path.parent / "victim" / place
                shutil.rmtree(at) if at.is_dir() else at.unlink()
                if kind == "fifo":
                    os.mkfifo(at)
                elif kind == "file":
                    at.write_bytes(b"x")
                elif kind == "directory":
                    (at / _ID).mkdir(parents=True)
                else:
                    target = {"twin": twin, "top": path.parent / "victim"}
                    others = {"above": at.parent, "nowhere": path.parent / "nowhere"}
                    at.symlink_to((target | others)[kind])

            yield Case(f"{kind} for {_plain(place)}", alter)


def _plain(place: pathlib.Path) -> str:
    return re.sub("[0-9a-f]{16}", "ID", str(place))


# ---- Calls.


# Managers, of which saves may go on after an error.
_managers: list[ec.CheckpointManager] = []


def _own(path: pathlib.Path) -> ec.CheckpointManager:
    _managers.append(manager(path))
    return _managers[-1]


def _saves(path: pathlib.Path, force: bool = False) -> Any:
    own = _own(path)
    own.save(17, tree(17), own={"at": 17})
    own.save(20, tree(20), {"loss": 0.5}, own={"at": 20}, force=force)
    own.wait()
    return own.steps()


def _goes_on(path: pathlib.Path) -> Any:
    own = _own(path)
    found = own.restore(tree(0), own={"at": 0})
    own.save(18, tree(18), own={"at": 18})
    own.wait()
    return found


def _looks(path: pathlib.Path) -> Any:
    own = _own(path)
    own._repr_html_()
    return [own.steps(), own.latest(), own.best()]


def _tells(path: pathlib.Path) -> Any:
    for argument in ("--json", "--long"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            command.main(["ls", str(path / "run"), *[argument][: argument == "--json"]])
    return out.getvalue() and None


def _cleans(path: pathlib.Path) -> Any:
    ec.clean(path / "run")
    ec.clean(path / "disk")
    ec.clean(path / "disk/eqx_ckpt.near")
    ec.clean(path / "disk", idle=True)
    with contextlib.redirect_stdout(io.StringIO()):
        command.main(["clean", "--list", str(path / "disk")])


def _pins(path: pathlib.Path) -> Any:
    own = _own(path)
    own.unpin(10)
    own.pin(15)
    own.delete(5)
    return pinned(Steps(path / "run"))


CALLS: dict[str, Callable[[pathlib.Path], Any]] = {
    "restore": lambda path: _own(path).restore(tree(0)),
    "restore with own states": lambda path: _own(path).restore(tree(0), own="all"),
    "restore a step": lambda path: _own(path).restore(tree(0), 10),
    "go on": _goes_on,
    "save": _saves,
    "force": lambda path: _saves(path, True),
    "look": _looks,
    "tell": _tells,
    "clean": _cleans,
    "pin": _pins,
}
# What is said in these, once they are made by many processes.
_SAID = ("restore", "restore with own states", "go on", "save", "look")


class Words:
    """What the processes of a call say, of which one word may be altered."""

    def __init__(self, number: int = -1, alter: Callable[[bytes], bytes] = bytes):
        self.heard: list[bytes] = []
        self._number, self._alter = number, alter

    def pass_on(self, word: bytes) -> bytes:
        self.heard.append(word)
        return self._alter(word) if len(self.heard) - 1 == self._number else word

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def say(_: Any, word: bytes = b"", choose: Any = None, *args: Any) -> bytes:
            answer = choose([self.pass_on(word)]) if choose else b""
            return self.pass_on(answer)

        with mock.patch.object(Processes, "round", say):
            yield


def message_cases(base: pathlib.Path, outside: str) -> list[tuple[Case, str]]:
    """Each word of each call, altered in each place."""
    out = []
    for call in _SAID:
        words = Words()
        path = fresh(base)
        with words.listening():
            outcome(path, call)
        for number, word in enumerate(words.heard):
            with contextlib.suppress(ValueError):
                for new in altered(json.loads(word), outside):
                    alter = lambda _, new=new: _encoded(new.text())
                    case = Case(
                        f"word {number} of {call}: {new}", None, (number, alter)
                    )
                    out.append((case, call))
    return out


# ---- What comes of it.


def fresh(base: pathlib.Path) -> pathlib.Path:
    """A copy of the run, and of what may not change."""
    shutil.rmtree(base / "case", ignore_errors=True)
    shutil.copytree(base / "pattern", base / "case", symlinks=True)
    return base / "case"


def snapshot(base: pathlib.Path) -> list[Any]:
    """All that is outside, as it is."""
    out: list[Any] = [sorted(name for name in os.listdir(base) if name != "case")]
    for path in [base / "victim", *sorted((base / "victim").rglob("*"))]:
        found = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        out.append((path, found.st_mode, found.st_mtime_ns, found.st_ino, data))
    return out


def outcome(path: pathlib.Path, call: str) -> tuple[str, Any]:
    """What a call gives, or its error."""
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(_HANG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "returned", CALLS[call](path)
    except DOCUMENTED as e:
        return type(e).__name__, e
    except (Exception, SystemExit) as e:
        return f"UNDOCUMENTED {type(e).__name__}", e
    finally:
        while _managers:
            with contextlib.suppress(Exception):
                _managers.pop().wait()
        signal.alarm(0)


def problem(call: str, kind: str, got: Any) -> str:
    """What is wrong with an outcome; "" if nothing is."""
    if kind.startswith("UNDOCUMENTED"):
        return f"{kind}: {got!r:.300}"
    if kind != "returned":
        text = str(got)
        if not all(line.isprintable() for line in text.split("\n")):
            return "characters that act on a terminal"
        return "a long text" if len(text) > 5000 else ""
    if call.startswith("restore") or call == "go on":
        found, step = got[0], got[-1]
        if found["step"] not in (5, 10, 15, 16) or set(found["x"]) != {found["step"]}:
            return f"other values: {found}"
        if step != found["step"] and step in (5, 10, 15):
            return f"step {step} has the values of {found['step']}"
    return ""


def run(
    base: pathlib.Path, case: Case, call: str, before: list[Any]
) -> tuple[str, str]:
    """Makes a call after an alteration. Returns its kind, and what is wrong."""
    path = fresh(base)
    if case.alter is not None:
        case.alter(path)
    listening = Words(*case.message).listening() if case.message else None
    with listening or contextlib.nullcontext():
        kind, got = outcome(path, call)
    wrong = problem(call, kind, got)
    if snapshot(base) != before:
        wrong = f"something outside has changed ({wrong})"
    if extra := set(os.listdir(path)) - {"run", "disk"}:
        wrong = f"there is something new: {extra}"
    return kind, wrong


def main(count: int, seed: int) -> dict[str, Any]:
    """Makes so many cases, or all, and says what came of them."""
    base = pathlib.Path(tempfile.mkdtemp(prefix="runs-"))
    r = random.Random(seed)
    try:
        make(base / "pattern")
        # At the same places there is something of the same kind.
        shutil.copytree(base / "pattern", base / "victim")
        (base / "victim" / _ID / _ID).mkdir(parents=True)
        (base / "victim" / _ID / _ID / "0.zip").write_bytes(b"thesis")
        before, outside = snapshot(base), str(base / "victim")
        made = [
            (case, call) for case in cases(base / "pattern", outside) for call in CALLS
        ]
        made += message_cases(base, outside)
        todo = made if count >= len(made) else r.sample(made, count)
        tally: collections.Counter[str] = collections.Counter()
        wrong = []
        for case, call in todo:
            kind, text = run(base, case, call, before)
            tally[f"{case.what.split()[0]}, {kind}"] += 1
            if text:
                wrong.append([case.what, call, text])
                print(json.dumps(wrong[-1]), file=sys.stderr, flush=True)
                # Else all that follow would be wrong too.
                assert "has changed" not in text, wrong[-1]
        return {
            "there are": len(made),
            "tried": len(todo),
            "outcomes": tally,
            "wrong": wrong,
        }
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=1))
