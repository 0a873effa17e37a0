"""Files of PyTorch whose pickles mean harm: each is refused, and nothing is called.

`python -m pickletools` shows what they are. `write` makes the file of one, with an
honest storage of 64 bytes in it.
"""

import io
import pathlib
import pickle
import struct
import zipfile


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name(module: str, of: str) -> bytes:
    return f"c{module}\n{of}\n".encode()


def integers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(key: str = "0", count: int = 16, kind: str = "FloatStorage") -> bytes:
    items = text("storage"), name("torch", kind), text(key), text("cpu"), integer(count)
    return b"(" + b"".join(items) + b"tQ"


def tensor(
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    offset: int = 0,
    of: bytes | None = None,
) -> bytes:
    args = [of or storage(), integer(offset), integers(shape), integers(strides)]
    args += [b"\x89", name("collections", "OrderedDict") + b")R"]
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return rebuild + b"(" + b"".join(args) + b"tR"


def state(**items: bytes) -> bytes:
    rows = b"".join(text(key) + value for key, value in items.items())
    return b"\x80\x02}(" + rows + b"u."


def archive(pickle: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a/data.pkl", pickle)
        for key, data in (storages or {"0": bytes(64)}).items():
            made.writestr(f"a/data/{key}", data)
    return file.getvalue()


def write(
    path: pathlib.Path, pickle: bytes, storages: dict[str, bytes] | None = None
) -> None:
    path.write_bytes(archive(pickle, storages))


def old(
    count: int, shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,)
) -> bytes:
    """A file of before version 1.6, of so many tensors of four stored elements."""
    keys = [str(i) for i in range(count)]
    of = {x: storage(x, 4)[:-2] + b"NtQ" for x in keys}
    tensors = {x: tensor(shape, strides, of=of[x]) for x in keys}
    stored = {x: struct.pack("<Q4f", 4, *[int(x)] * 4) for x in keys}
    return old_file(state(**tensors), stored)


def old_file(pickle_of_all: bytes, stored: dict[str, bytes]) -> bytes:
    """A file of before version 1.6, of a pickle and of storages, each with its length
    in elements before it."""
    head = 0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}
    parts = [*(pickle.dumps(x, 2) for x in head), pickle_of_all]
    return b"".join([*parts, pickle.dumps([*stored], 2), *stored.values()])


_DO = b"(" + text("touch canary") + b"tR"
_BAD_ID = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + b"tQ"


def bomb(size: int) -> bytes:
    """A list of two references to the one before, so many times."""
    rows = b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
        for i in range(size)
    )
    return b"\x80\x02](]q\x00(K\x01K\x01e" + rows + b"e."


def _tuples(size: int) -> bytes:
    """The same of tuples, as the key of a dict: its hash takes forever."""
    rows = b"".join(
        b"h%ch%c\x86q%c" % (bytes([i]), bytes([i]), bytes([i + 1])) for i in range(size)
    )
    return b"\x80\x02](K\x01q\x00" + rows + b"}h" + bytes([size]) + b"K\x01se."


_entry = name("torch._utils", "_rebuild_tensor_v2")

PICKLES: dict[str, bytes] = {
    # Calls.
    "system": b"\x80\x02" + name("os", "system") + _DO + b".",
    "posix": b"\x80\x02" + name("posix", "system") + _DO + b".",
    "eval": b"\x80\x02" + name("builtins", "eval") + _DO + b".",
    "exec": b"\x80\x02" + name("__builtin__", "exec") + _DO + b".",
    "getattr": b"\x80\x02" + name("builtins", "getattr") + _DO + b".",
    "import": b"\x80\x02" + name("importlib", "import_module") + _DO + b".",
    "torch": b"\x80\x02" + name("torch", "load") + _DO + b".",
    "storage": b"\x80\x02" + name("torch.storage", "_load_from_bytes") + _DO + b".",
    "dotted": b"\x80\x02" + name("collections", "OrderedDict.__init__") + b")R.",
    "dotted module": b"\x80\x02" + name("torch._utils.os", "system") + _DO + b".",
    "spaces": b"\x80\x02" + name("collections OrderedDict", "") + b")R.",
    "stack global": b"\x80\x04" + text("os") + text("system") + b"\x93" + _DO + b".",
    "stack global of no text": b"\x80\x04K\x01K\x02\x93)R.",
    "inst": b"\x80\x02(" + text("x") + b"ios\nsystem\n.",
    "obj": b"\x80\x02(" + name("os", "system") + text("x") + b"o.",
    "newobj": b"\x80\x02" + name("os", "system") + b")\x81.",
    "newobj_ex": b"\x80\x04" + name("os", "system") + b")}\x92.",
    "ext1": b"\x80\x02\x82\x01)R.",
    "ext2": b"\x80\x02\x83\x01\x00)R.",
    "ext4": b"\x80\x02\x84\x01\x00\x00\x00)R.",
    "persid": b"\x80\x02P0\n.",
    "call a text": b"\x80\x02" + text("os.system") + _DO + b".",
    "call a tensor": b"\x80\x02" + tensor() + b")R.",
    "call a class": b"\x80\x02" + name("torch", "FloatStorage") + b")R.",
    "call with a list": b"\x80\x02" + name("collections", "OrderedDict") + b"]R.",
    "builtin dict": b"\x80\x02" + name("builtins", "dict") + b"]\x85R.",
    "default that is called": b"\x80\x02"
    + name("collections", "defaultdict")
    + text("x")
    + b"\x85R.",
    "a class of others": b"\x80\x02"
    + name("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + _entry
    + name("torch", "FloatStorage")
    + b")}tR.",
    "from a type, by another function": b"\x80\x02"
    + name("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + name("torch._tensor", "_rebuild_from_type_v2")
    + name("torch", "Tensor")
    + b")}tR.",
    # Attributes.
    "build a dict": b"\x80\x02}}" + text("__class__") + text("x") + b"sb.",
    "build a list": b"\x80\x02]}b.",
    "build a tensor": state(w=tensor() + b"}" + text("data") + b"K\x01sb"),
    "build a function": b"\x80\x02" + _entry + b"}b.",
    "build with a tuple": b"\x80\x02"
    + name("collections", "OrderedDict")
    + b")R}}\x86b.",
    # Storages.
    "id of nothing": state(w=b"NQ"),
    "short id": state(w=tensor(of=_BAD_ID)),
    "id of a class of tensors": state(w=tensor(of=storage(kind="Tensor"))),
    "missing storage": state(w=tensor(of=storage(key="1"))),
    "storage outside": state(w=tensor(of=storage(key="../data.pkl"))),
    "storage is the pickle": state(w=tensor(of=storage(key="../../a/data.pkl"))),
    "longer storage": state(w=tensor(of=storage(count=17))),
    "shorter storage": state(w=tensor(of=storage(count=15))),
    "huge storage": state(w=tensor(of=storage(count=2**61))),
    "negative storage": state(w=tensor(of=storage(count=-1))),
    "two sizes": state(a=tensor(), b=tensor(of=storage(kind="LongStorage"))),
    "a storage as a leaf": state(w=storage()),
    "a function as a leaf": state(w=_entry),
    # Tensors.
    "over the end": state(w=tensor((17,))),
    "offset over the end": state(w=tensor((4,), offset=13)),
    "steps over the end": state(w=tensor((4, 4), (5, 1))),
    "negative offset": state(w=tensor(offset=-1)),
    "negative strides": state(w=tensor((4,), (-1,), offset=3)),
    "negative shape": state(w=tensor((-4,))),
    "huge shape": state(w=tensor((2**62,), (0,))),
    "huge product": state(w=tensor((2**40, 2**40), (0, 0))),
    "many of one": state(w=tensor((2**26,), (0,))),
    "ranks": state(w=tensor((1,) * 33, (1,) * 33)),
    "no strides": state(w=tensor((2, 2), (1,))),
    "bool as a shape": state(
        w=_entry + b"(" + storage() + b"K\x00\x88\x85K\x01\x85\x89NtR"
    ),
    "shape of no tuple": state(w=_entry + b"(" + storage() + b"K\x00]K\x01\x85\x89NtR"),
    "few arguments": state(w=_entry + b"(" + storage() + b"tR"),
    "many arguments": state(w=_entry + b"(" + storage() + b"N" * 9 + b"tR"),
    "parameter of nothing": state(
        w=name("torch._utils", "_rebuild_parameter") + b"N\x88N\x87R"
    ),
    # Values.
    "long4": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b".",
    "negative long4": b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
    "decimal": b"\x80\x02I" + b"9" * 10**5 + b"\n.",
    "long decimal": b"\x80\x02L" + b"9" * 10**5 + b"L\n.",
    "huge text": b"\x80\x02X\xff\xff\xff\xff.",
    "huge text8": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "huge bytes8": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "integer of no end": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "only an integer that is too long": b"\x80\x02\x8b\0\1\0\0" + b"\1" * 256 + b".",
    "pop of nothing": b"\x80\x020.",
    "pop of a mark that is none": b"\x80\x02K\x0101.",
    "items of no set": b"\x80\x04)(K\x01\x90.",
    "a set without a mark": b"\x80\x04K\x01\x91.",
    "set in itself": b"\x80\x04\x8f\x94(h\x00\x90.",
    "items of a tensor": state(w=tensor() + b"(K\x01\x90"),
    "pairs of three": b"\x80\x02" + name("collections", "OrderedDict")
    + b"](K\x01K\x02K\x03ta\x85R.",
    "bytearray8": b"\x80\x05\x96" + b"\xff" * 8 + b".",
    "not utf-8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    # Shapes of pickles.
    "list in itself": b"\x80\x02]q\x00h\x00a.",
    "dict in itself": b"\x80\x02}q\x00" + text("a") + b"h\x00s.",
    "deep": b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 10**5 + b".",
    "laughs": bomb(60),
    "laughs of tuples": _tuples(60),
    "empty": b"",
    "only a mark": b"\x80\x02(",
    "no mark": b"\x80\x02tK\x01.",
    "empty stack": b"\x80\x02.",
    "two values": b"\x80\x02K\x01K\x02.",
    "open mark": b"\x80\x02(K\x01.",
    "odd items": b"\x80\x02}(K\x01u.",
    "append to a tuple": b"\x80\x02)K\x01a.",
    "set in a list": b"\x80\x02]K\x01K\x01s.",
    "memo": b"\x80\x02h\x07.",
    "dup": b"\x80\x0220.",
    "protocol": b"\x80\x06N.",
    "no stop": b"\x80\x02K\x01",
    "text pickle": b"(dp0\nS'a'\np1\nI1\ns.",
}  # fmt: skip
