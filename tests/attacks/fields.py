"""Changes one field of one record of a file: each is a function of a random generator
and the bytes, which keeps what surrounds the record right.

A field becomes one of another type, a number that is huge, negative or fractional, a
path, a pattern or a deep nest; records are doubled, left out, or change places.
"""

import io
import pickletools
import random
import struct
import zipfile
from typing import Any

import msgpack

from eqx_ckpt._kernel._format import _ocdbt


NUMBERS = [0, 1, -1, 2, 3, 7, 63, 64, 2**15, 2**31, 2**32 - 1, 2**38, 2**60, 2**63]
NUMBERS += [2**64, 2**200, -(2**31), -(2**63), 10**30]
TEXTS = ["", ".", "..", "../a", "/etc/passwd", "*", "[a-z]*", "a.b", "\0", "\x1b[2J"]
TEXTS += ["é", "\ud800", "a" * 300, "9" * 30, "object", "float32", "<f8", "w", "net"]
OTHERS = [None, True, 0.5, -0.0, 1e308, float("nan"), [], {}, [[]], {"": None}]


# Stand for nests so deep that no function of Python's would copy or write them.
DEEP = ["DEEP300", "DEEP900"]


def deepened(data: bytes, is_json: bool = True) -> bytes:
    """The bytes, with nests in the place of what stands for them."""
    for text in DEEP:
        count = int(text[4:])
        name = f'"{text}"'.encode() if is_json else msgpack.packb(text)
        nest = b"[" * count + b"]" * count if is_json else b"\x91" * count + b"\xc0"
        data = data.replace(name, nest)
    return data


def other(r: random.Random, value: Any) -> Any:
    """Something in the place of a value: mostly another one of its type."""
    if type(value) is int and r.random() < 0.7:
        near = value + r.choice([-64, -1, 1, 64, value])
        return r.choice([near, near, *NUMBERS])
    if type(value) is str and r.random() < 0.7:
        cut = r.randrange(len(value) + 1)
        return r.choice([r.choice(TEXTS), value[:cut] + r.choice(TEXTS) + value[cut:]])
    if r.random() < 0.05:
        return r.choice(DEEP)
    return r.choice([*NUMBERS, *TEXTS, *OTHERS])


# ---- Pickles.


def _argument(r: random.Random, op: Any, arg: Any, data: bytes) -> bytes:
    """An instruction with another argument."""
    code = op.code.encode("latin1")
    if op.arg is None or not data[1:]:
        return bytes([r.choice(b"(.tRbesu})]N\x88\x85\x86\x87aQ0q")])
    if isinstance(arg, str) and op.name in ("BINUNICODE", "SHORT_BINUNICODE"):
        made = str(other(r, arg)).encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(made)) + made
    if isinstance(arg, str) and op.name == "GLOBAL":
        module, _, name = arg.partition(" ")
        some = [(module, "os"), ("os", "system"), (r.choice(TEXTS), name)]
        some += [("torch", "FloatTensor"), ("collections", "OrderedDict")]
        text = "c" + "\n".join(r.choice(some)) + "\n"
        return text.encode("utf-8", "surrogatepass")
    if isinstance(arg, int):
        number = other(r, arg)
        if type(number) is not int:
            return r.choice(
                [b"N", b"G" + struct.pack(">d", 0.5), b"]", b"}", b"X\0\0\0\0"]
            )
        size = number.bit_length() // 8 + 1
        return b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True)
    made = bytearray(data)
    made[r.randrange(1, len(made))] = r.randrange(256)
    return code + bytes(made[1:])


def in_pickle(r: random.Random, data: bytes) -> bytes:
    """Changes, doubles, leaves out or swaps instructions of a pickle."""
    try:
        found = list(pickletools.genops(data))
    except Exception:
        return data[: r.randrange(len(data) + 1)]
    ends = [at for _, _, at in found[1:]] + [len(data)]
    parts = [data[at:end] for (_, _, at), end in zip(found, ends)]
    place = r.randrange(len(parts))
    kind = r.randrange(8)
    if kind == 0:
        del parts[place]
    elif kind == 1:
        parts.insert(place, r.choice(parts))
    elif kind == 2:
        swap = r.randrange(len(parts))
        parts[place], parts[swap] = parts[swap], parts[place]
    elif kind == 3:
        parts[place] *= r.choice((2, 3, 300))
    else:
        # Those with arguments are most of what means something.
        some = [i for i, part in enumerate(parts) if len(part) > 1] or [place]
        place = r.choice([place, *some])
        op, arg, _ = found[place]
        parts[place] = _argument(r, op, arg, parts[place])
    return b"".join(parts)


# ---- msgpack.


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    out = [path]
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            out += _places(value[key], (*path, key))
    return out


def in_tree(r: random.Random, value: Any) -> Any:
    """Changes one value in nested dicts and lists, or one of their entries."""
    path = r.choice(_places(value))
    if not path:
        return other(r, value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    kind = r.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 1:
        new = other(r, "a") if r.random() < 0.5 else r.choice(NUMBERS[:8])
        holder[new if new.__hash__ else str(new)] = 1
    elif kind == 2 and isinstance(holder, list):
        holder.reverse()
    else:
        holder[key] = other(r, holder[key])
    return value


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def _pack(value: Any) -> bytes:
    return deepened(msgpack.packb(value, unicode_errors="surrogatepass"), False)


def in_msgpack(r: random.Random, data: bytes) -> bytes:
    """Changes a value, or one in an array: its shape, its dtype or its bytes."""
    value = _unpack(data)
    arrays = [p for p in _places(value) if type(_at(value, p)) is msgpack.ExtType]
    try:
        if arrays and r.random() < 0.6:
            path = r.choice(arrays)
            code, body = _at(value, path)
            if r.random() < 0.2:
                code = r.choice((0, 1, 2, 3, 9, 127, -1))
            else:
                body = _pack(in_tree(r, _unpack(body)))
            _at(value, path[:-1])[path[-1]] = msgpack.ExtType(code, body)
        else:
            value = in_tree(r, value)
        made = _pack(value)
    except (ValueError, OverflowError, TypeError):
        return data[: r.randrange(len(data))]
    if r.random() < 0.05:
        # A key twice.
        made = made[:1] + made[1:] * 2 if made[0] >> 4 == 8 else made
        made = bytes([min(0x8F, made[0] + (made[0] & 15))]) + made[1:]
    return made


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


# ---- Zips.

_RECORDS = {
    b"PK\1\2": struct.Struct("<4s6H3I5H2I"),
    b"PK\3\4": struct.Struct("<4s5H3I2H"),
    b"PK\5\6": struct.Struct("<4s4H2IH"),
}


def in_zip(r: random.Random, data: bytes) -> bytes:
    """Changes one number of one record, or the name in it."""
    found = []
    for mark, form in _RECORDS.items():
        at = data.find(mark)
        while at >= 0:
            if at + form.size <= len(data):
                found.append((at, form))
            at = data.find(mark, at + 1)
    at, form = r.choice(found)
    row = list(form.unpack_from(data, at))
    place = r.randrange(1, len(row))
    number = other(r, row[place])
    row[place] = number if type(number) is int else r.randrange(2**16)
    for size in (2**32, 2**16):
        try:
            made = form.pack(row[0], *(n % size for n in row[1:]))
            return data[:at] + made + data[at + form.size :]
        except struct.error:
            pass
    return data


# ---- OCDBT.


def in_entries(r: random.Random, entries: _ocdbt.Entries) -> _ocdbt.Entries:
    """Changes a key, or where a value lies; doubles it, or swaps it with another."""
    rows = [list(row) for row in zip(*entries)]
    place = r.randrange(len(rows))
    kind = r.randrange(6)
    if kind == 0:
        rows.insert(place, list(rows[place]))
    elif kind == 1:
        swap = r.randrange(len(rows))
        rows[place], rows[swap] = rows[swap], rows[place]
    elif kind == 2:
        key = str(other(r, rows[place][0].decode()))
        rows[place][0] = key.encode("utf-8", "surrogatepass")
        if r.random() < 0.7:
            rows.sort()
    else:
        field = r.choice((1, 2, 2, 3, 3))
        number = other(r, rows[place][field])
        number = number if type(number) is int else r.choice(NUMBERS)
        rows[place][field] = abs(number) % 2**64
    return _ocdbt.Entries(*map(list, zip(*rows)))


def rezipped(data: bytes, member: str, made: bytes) -> bytes:
    """A zip with other bytes in one of its files, and the checksum of those."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, made if name == member else old.read(name))
    return out.getvalue()
