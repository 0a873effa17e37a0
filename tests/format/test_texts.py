"""Texts of files and their names never act on a terminal: each message is escaped."""

import contextlib
import io
import json
import os

import pytest
from attacks.foreign import FOREIGN
from support import command

import eqx_ckpt as ec


EVIL = ["\x1b[2J", "a\nINJECTED", "\u202eb", "\x9b31m"]


def _fifo(path, evil):
    os.mkfifo(path / evil)


def _link(path, evil):
    (path / evil).symlink_to("/etc/passwd")


def _texts(path, evil):
    for file in path.rglob("*"):
        with contextlib.suppress(ValueError):
            value = json.loads(file.read_bytes()) if file.is_file() else None
            if not isinstance(value, dict) or not value:
                continue
            first = next(iter(value))
            value[first] = {evil: {evil: evil}}
            file.write_text(json.dumps(value))


def _bytes(path, evil):
    data, text = path.read_bytes(), evil.encode()[:4].ljust(4, b"x")
    path.write_bytes(data.replace(b"bias", text).replace(b"digests", text + b"sts"))


_kinds = [(k, f) for k in ("orbax", "levanter", "eformer") for f in (_fifo, _link)]
_kinds += [(k, _texts) for k in ("orbax", "orbax-ocdbt", "levanter", "eformer")]
_kinds += [(k, _bytes) for k in ("f.safetensors", "f.msgpack", "f.zip")]


@pytest.mark.parametrize("evil", EVIL)
def test_messages_are_escaped(tmp_path, evil):
    for number, (kind, plant) in enumerate(_kinds):
        path = tmp_path / f"{number}-{evil}" / kind
        path.parent.mkdir()
        FOREIGN[kind](path)
        plant(path, evil)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            command.main(["ls", str(path)])
            command.main(["verify", str(path)])
        for call in (ec.open, ec.verify, ec.delete, lambda p: repr(ec.open(p).tree)):
            try:
                print(call(path), file=out)
            except (ValueError, RuntimeError, OSError) as e:
                print(e, file=out)
        lines = out.getvalue().split("\n")
        assert all(line.isprintable() for line in lines), (kind, lines)
        assert not any(line.startswith("INJECTED") for line in lines), (kind, lines)
