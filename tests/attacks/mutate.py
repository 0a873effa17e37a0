"""Random mutations of good checkpoints: `python -m attacks.mutate COUNT SEED`, or of
those of some other formats: `python -m attacks.mutate COUNT SEED f.pt orbax`.

It knows what a checkpoint is made of, so that most of what it makes has a right digest
and gets past the first check. Every outcome must be a documented error, or the leaves
that `like` asks for. Prints what it tried, and each mutation that ended otherwise.
"""

import base64
import collections
import copy
import faulthandler
import json
import os
import pathlib
import random
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Collection
from typing import Any

import xxhash
from support.clock import timed

from . import fields, KINDS, save, seal, skeleton
from .__main__ import limit_memory, steps
from .foreign import FOREIGN, like_of, mutate_foreign


DOCUMENTED = ("DamagedError", "ValueError", "RuntimeError", "FileNotFoundError")
_limit, _hang, _LONG = 1.0, 600, 2**14 + 2000

_numbers = fields.NUMBERS
_texts = [*fields.TEXTS, "%", "%root", "/"]
_texts += ["jax", "numpy", "generic", "key", "str", "bytes", "int", "float", "complex"]
_texts += ["bool", "float0", "uint4", "uint8", "int4", "float64", "bfloat16", "object"]
_texts += [
    "ocdbt",
    "zarr",
    "0",
    "1",
    "a" * 300,
    "9" * 30,
    "list.7",
    "net",
    "fry",
    "rbg",
]
_others = [*fields.OTHERS, False, [0, 0, 0, 0], *fields.DEEP]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in a JSON value."""
    out = [path]
    if isinstance(value, (dict, list)):
        keys = value.keys() if isinstance(value, dict) else range(len(value))
        for key in keys:
            out += places(value[key], (*path, key))
    return out


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def change_value(r: random.Random, value: dict[str, Any]) -> str:
    """Changes one value of the index, deletes it, doubles it, or has two change places.

    What has many values, as a column, is not chosen more often than what has few.
    """
    if not value:
        return "nothing"
    first = r.choice(list(value))
    path = (first, *r.choice(places(value[first])))
    holder, key = at(value, path[:-1]), path[-1]
    old = holder[key]
    kind = r.randrange(8)
    if path[0] == "columns" and isinstance(old, str) and " " not in old and kind > 2:
        holder[key] = change_column(r, old)
    elif kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(r.randrange(len(holder) + 1), copy.deepcopy(old))
    elif kind == 2 and isinstance(holder, list):
        other = r.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 3 and isinstance(old, int):
        holder[key] = old + r.choice([-64, -1, 1, 64, old, 2**40])
    elif kind == 4 and isinstance(old, str):
        cut = r.randrange(len(old) + 1)
        holder[key] = old[:cut] + r.choice(_texts) + old[cut:]
    elif kind == 5:
        other = r.choice(places(value))
        holder[key] = copy.deepcopy(at(value, other))
    else:
        pool: list[Any] = [_numbers, _texts, _others][r.choice((0, 0, 1, 1, 2))]
        if type(old) is int:
            pool = _numbers
        elif type(old) is str and r.random() < 0.8:
            pool = _texts
        holder[key] = copy.deepcopy(r.choice(pool))
    return f"{path} {kind}"


def change_column(r: random.Random, text: str) -> str:
    """Changes a number of a column, deletes one, or has one more."""
    numbers = list(struct.iter_unpack("<I", base64.b64decode(text)))
    at = r.randrange(len(numbers) + 1)
    near = [n + r.choice([-1, 1, 64]) for (n,) in numbers[at : at + 1]]
    new = [(n % 2**32,) for n in (r.choice([*near, *_numbers]),)]
    kind = r.randrange(4)
    numbers[at : at + (kind > 0)] = [] if kind == 1 else new
    data = b"".join(struct.pack("<I", *n) for n in numbers)
    return base64.b64encode(data).decode()


def change_bytes(r: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(r.randint(1, 3)):
        place = r.randrange(len(out) + 1)
        kind = r.randrange(5)
        if kind == 0:
            del out[place:]
        elif kind == 1:
            del out[place : place + r.randint(1, 9)]
        elif kind == 2:
            out[place:place] = r.choice((r.randbytes(4), b"[", b'"', b"\\", b"0", b","))
        elif kind == 3:
            out += r.randbytes(r.choice((1, 16, 4096)))
        elif place < len(out):
            out[place] ^= 1 << r.randrange(8)
    return bytes(out)


def mutate(r: random.Random, path: pathlib.Path) -> tuple[str, bool]:
    """Mutates a checkpoint. Returns what it did, and whether the index is as it was."""
    index = path / "eqx_ckpt.json"
    kind = r.random()
    if kind < 0.6:
        value = json.loads(index.read_bytes())
        del value["digest"]
        what = [change_value(r, value) for _ in range(r.choice((1, 1, 1, 2, 3)))]
        body = json.dumps(value, separators=(",", ":")).encode()[:-1]
        index.write_bytes(seal(fields.deepened(body)))
        return f"values {what}", False
    if kind < 0.75:
        data = index.read_bytes()
        if r.random() < 0.8:
            index.write_bytes(seal(change_bytes(r, data[:-45])))
        else:
            index.write_bytes(change_bytes(r, data))
        return "the bytes of the index", False
    files = [f for f in sorted(path.rglob("*")) if f.name != "eqx_ckpt.json"]
    if r.random() < 0.5 and (heads := _heads(files)):
        return change_head(r, *r.choice(heads)), True
    file = r.choice(files)
    if r.random() < 0.5 or file.is_dir():
        return change_file(r, file, files), True
    file.write_bytes(change_bytes(r, file.read_bytes()))
    where = f"bytes {file.relative_to(path)}"
    if file.name in ("digests", "eqx_ckpt.digests") and r.random() < 0.7:
        value = json.loads(index.read_bytes())
        del value["digest"]
        if len(value["digests"]) > 32:
            return where, True  # Of pages, of which nothing says how long they are.
        value["digests"] = xxhash.xxh3_128_hexdigest(file.read_bytes())
        index.write_bytes(seal(json.dumps(value, separators=(",", ":")).encode()[:-1]))
        return f"digested {where}", False
    return where, True


# How chunks begin that Blosc or zstd has compressed.
head_of = re.compile(rb"\x02\x01[$\x91].|\x28\xb5\x2f\xfd", re.DOTALL)


def _heads(files: list[pathlib.Path]) -> list[tuple[pathlib.Path, int]]:
    """The places of compressed chunks in the files of a checkpoint."""
    found = [(f, head_of.finditer(f.read_bytes())) for f in files if f.is_file()]
    return [(file, match.start()) for file, heads in found for match in heads]


def change_head(r: random.Random, file: pathlib.Path, start: int) -> str:
    """Changes the beginning of a compressed chunk: decoders believe what it says."""
    data = bytearray(file.read_bytes())
    for _ in range(r.randint(1, 3)):
        if r.random() < 0.5:
            at = start + 4 * r.randrange(8)
            number = r.choice(_numbers) + r.randint(-1, 1)
            data[at : at + 4] = (number % 2**32).to_bytes(4, "little")
        else:
            data[min(start + r.randrange(40), len(data) - 1)] ^= 1 << r.randrange(8)
    file.write_bytes(data)
    return f"head {file.name} {start}"


def change_file(r: random.Random, file: pathlib.Path, files: list[pathlib.Path]) -> str:
    """Puts something else in place of a file or a directory."""
    what = r.choice("delete link fifo directory swap sparse".split())
    if file.is_dir() or what == "delete":
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        if what == "link":
            file.symlink_to(file.parent)
    elif what == "link":
        file.unlink()
        file.symlink_to(r.choice(files))
    elif what == "fifo":
        file.unlink()
        os.mkfifo(file)
    elif what == "directory":
        file.unlink()
        file.mkdir()
    elif what == "swap":
        other = r.choice([f for f in files if f.is_file()])
        a, b = file.read_bytes(), other.read_bytes()
        file.write_bytes(b)
        other.write_bytes(a)
    else:
        os.truncate(file, 2**40)
    return f"{what} {file.name}"


def problem(
    out: dict[str, Any], seconds: float, same_index: bool, good: str | None = None
) -> str:
    """What is wrong with an outcome; "" if nothing is. `good` is the digest of what has
    to be read, if anything is."""
    right = out.pop("right", False)
    value = out.pop("value", None)
    if good is not None and value not in (None, good):
        return "other values than were saved"
    if not all(line.isprintable() for line in out.pop("problems", [])):
        return "verify: characters that act on a terminal"
    for step, error in out.items():
        if error is None:
            continue
        if error[0] not in DOCUMENTED:
            return f"{step}: {error[0]}"
        if not all(line.isprintable() for line in error[1].split("\n")):
            return f"{step}: characters that act on a terminal"
        if len(error[1]) > _LONG:
            return f"{step}: a long text"
    if same_index and out.get("load", 0) is None and not right:
        return "other leaves than were saved"
    return f"{seconds:.1f} s" if seconds > _limit else ""


def _outcome(path: pathlib.Path, like: Any, of: Any) -> dict[str, Any]:
    try:
        return steps(str(path), like, of)
    except BaseException as e:
        return {"all": [type(e).__name__, str(e)]}


def main(
    count: int, seed: int, foreign: float = 0.5, only: Collection[str] = ()
) -> None:
    """`foreign` is the share of those of other formats, of which `only` some."""
    base = pathlib.Path(tempfile.mkdtemp(prefix="mutate-"))
    like = skeleton()
    for kind in KINDS:
        save(base / kind, kind)
        steps(str(base / kind), like)
    values = {}
    chosen = {kind: FOREIGN[kind] for kind in only or FOREIGN}
    for kind, make in chosen.items():
        make(base / kind)
        out = steps(str(base / kind), like, like_of(kind))
        assert not out["read"] and not out["unverified"], (kind, out)
        values[kind] = out["value"]
    limit_memory()
    tally: collections.Counter[str] = collections.Counter()
    wrong = []
    for number in range(count):
        r = random.Random(f"{seed} {number}")
        is_foreign = r.random() < foreign
        kind = r.choice(list(chosen if is_foreign else KINDS))
        path = base / "bad" / kind
        path.parent.mkdir()
        copy = shutil.copytree if (base / kind).is_dir() else shutil.copy
        copy(base / kind, path)
        good, of = None, None
        if is_foreign:
            (what, same), same_index, of = mutate_foreign(r, path), False, like_of(kind)
            what, good = f"{kind}: {what}", values[kind] if same else None
            sizes = [f.lstat().st_size for f in [path, *path.rglob("*")]]
            limit_memory(2**26 + min(sum(sizes), 2**26))
        else:
            what, same_index = mutate(r, path)
            limit_memory()
        # Of a case that hangs: which one it is stays in this file.
        (base / "case").write_text(f"{seed} {number} {what}")
        faulthandler.dump_traceback_later(_hang, exit=True)
        out, seconds = timed(_limit, lambda: _outcome(path, like, of))
        faulthandler.cancel_dump_traceback_later()
        failed = next(
            (name for name, error in out.items() if error and type(error) is list), ""
        )
        tally[f"{kind}: {failed or 'loaded'}" if only else failed or "loaded"] += 1
        text = problem(out, seconds, same_index, good)
        if text:
            wrong.append([number, what, text, str(out)[:600]])
        shutil.rmtree(path.parent)
    shutil.rmtree(base)
    print(json.dumps({"tried": count, "first failed at": tally, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), 1.0 if sys.argv[3:] else 0.5, sys.argv[3:])
