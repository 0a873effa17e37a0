"""Files of others whose cost grows faster than they do: `python -m attacks.growth`.

Each generator makes a file or a directory of a size `n`, of the shape that is worst for
a reader which does something for each pair, or for each of what a few bytes stand for.
Every size is opened and shown; what that takes has to double with `n`, or stop there.
"""

import contextlib
import io
import json
import pathlib
import struct
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Collection
from typing import Any

import google_crc32c
import jax.numpy as jnp
import numpy as np
from support import command

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _ocdbt

from . import forge, pickles, save, template
from .__main__ import limit_memory
from .foreign import entry


# How much more may be taken of twice as much, and what is too little to tell.
MORE, SECONDS, BYTES = 2.3, 0.1, 3 * 2**20

GROWTHS: dict[str, tuple[int, Callable[[pathlib.Path, int], None]]] = {}


def growth(n: int) -> Callable:
    def register(make: Callable) -> Callable:
        assert make.__doc__
        GROWTHS[make.__name__] = n, make
        return make

    return register


def _safetensors(path: pathlib.Path, header: Any) -> None:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head)


def _tensor(*shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape or (0,), "data_offsets": [0, 0]}


@growth(200)
def safetensors_lengths(path, n):
    """Lengths of thousands of digits, whose product is quadratic."""
    digits = ",".join(["1" + "0" * 4000] * n)
    one = f'{{"dtype":"F32","shape":[0,{digits}],"data_offsets":[0,0]}}'
    _safetensors(path, f'{{"a":{one}}}'.encode())


@growth(1000)
def safetensors_names(path, n):
    """Many tensors, one of which has a long name: each line as long as the longest."""
    names = {f"a{i}": _tensor() for i in range(n)}
    _safetensors(path, {**names, "b" * min(n, 10_000): _tensor()})


@growth(5)
def safetensors_parts(path, n):
    """Names of many parts, which share all but the last."""
    _safetensors(path, {"a." * 200 + f"b{i}": _tensor() for i in range(n * 10)})


@growth(100_000)
def safetensors_numbers(path, n):
    """A name of digits."""
    _safetensors(path, {"1" * n: _tensor()})


def _text(data: bytes) -> bytes:
    return b"\xdb" + struct.pack(">I", len(data)) + data


def _list(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


@growth(4000)
def msgpack_keys(path, n):
    """A long key above many leaves, each of which has it in its name."""
    path.write_bytes(b"\x81" + _text(b"k" * n) + _list(n) + b"\1" * n)


@growth(100)
def msgpack_depth(path, n):
    """Many leaves below many nodes, each of which is in all of their names."""
    path.write_bytes(b"\x81\xa1a" + b"\x91" * 200 + _list(n) + b"\1" * n)


@growth(20000)
def msgpack_nothing(path, n):
    """Many empty nodes."""
    path.write_bytes(b"\x81\xa1a" + b"\x91" * 200 + _list(n) + b"\x80" * n)


@growth(2000)
def zip_members(path, n):
    """Many files in a zip, the list of which is read again and again."""
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(n):
            archive.writestr(f"{i:030}", b"")


@growth(1000)
def npz_members(path, n):
    """Many arrays in a zip."""
    file = io.BytesIO()
    np.save(file, np.ones(3))
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(n):
            archive.writestr(f"{i:05}.npy", file.getvalue())


@growth(1000)
def torch_tensors(path, n):
    """Many tensors, each of its own storage."""
    keys = [f"k{i}" for i in range(n)]
    items = {k: pickles.tensor(of=pickles.storage(k)) for k in keys}
    pickles.write(path, pickles.state(**items), dict.fromkeys(keys, bytes(64)))


@growth(1000)
def torch_views(path, n):
    """Many views of one storage, each a little further."""
    items = {f"k{i}": pickles.tensor((16,), offset=i) for i in range(n)}
    count = 16 + n
    pickle = pickles.state(**items).replace(
        pickles.integer(16) + b"tQ", pickles.integer(count) + b"tQ"
    )
    pickles.write(path, pickle, {"0": bytes(4 * count)})


@growth(12)
def torch_laughs(path, n):
    """Lists of two references to the list before: `2**n` leaves."""
    pickles.write(path, pickles.bomb(n))


@growth(2000)
def torch_references(path, n):
    """One list of many values in many places."""
    row = b"](" + b"K\1" * n + b"eq\0"
    pickles.write(path, b"\x80\2](" + row + b"h\0" * n + b"e.")


@growth(2000)
def torch_keys(path, n):
    """A long key above many leaves, each of which has it in its name."""
    row = b"](" + b"K\1" * n + b"e"
    pickles.write(path, pickles.state(**{"k" * n: row}))


@growth(5000)
def torch_tuples(path, n):
    """A tuple in a tuple in a tuple."""
    pickles.write(path, b"\x80\2)" + b"\x85" * n + b".")


@growth(5000)
def torch_memo(path, n):
    """Values that are kept under large numbers."""
    rows = b"".join(b"Nr" + struct.pack("<I", 2**32 - i - 1) + b"a" for i in range(n))
    pickles.write(path, b"\x80\2]" + rows + b".")


def _npy(path: pathlib.Path, shape: str, size: int) -> None:
    head = f"{{'descr': '<f4', 'fortran_order': True, 'shape': ({shape}), }}\n".encode()
    head = b"\x93NUMPY\2\0" + struct.pack("<I", len(head)) + head
    path.write_bytes(head + bytes(size))


@growth(10_000)
def npy_spaces(path, n):
    """A shape that a regular expression could match in many ways."""
    _npy(path, "1" * n + " " * n + "," + " " * n + "x", 0)


@growth(2**18)
def npy_columns(path, n):
    """An array in the order of Fortran, each row of which lies all over the file."""
    _npy(path, f"{n}, 2", 8 * n)


@growth(1500)
def npy_axes(path, n):
    """Axes, along each of which a step has as many digits as all before it."""
    _npy(path, ", ".join(["9" * 18] * n), 0)


def _ours(path: pathlib.Path, names: list[str], keys: str) -> None:
    save(path, "ocdbt")

    def alter(v: dict[str, Any]) -> None:
        template(v, "net.bias", keys=keys, dtype="bool", stored="bool", shape=[1])
        v["templates"][-1][5] = [1]
        count = len(names)
        v.update(names=names, template=[len(v["templates"]) - 1] * count)
        v.update(file=[0] * count, offset=list(range(count)))
        v.update(splits=[], sizes=[], aliases=[])
        del v["tree"]

    forge(path, alter)


@growth(1000)
def ours_names(path, n):
    """Many leaves, one of which has a long name."""
    names = [f"a{i}" for i in range(n)]
    _ours(path, [*names, "b" * n], "k")


@growth(40)
def ours_parts(path, n):
    """Names of many parts, which share all but the last."""
    _ours(path, ["a." * 200 + f"b{i}" for i in range(n)], "k" * 201)


@growth(500)
def ours_shards(path, n):
    """As many leaves as the shards that each has: they share what says where these
    are."""
    ec.tree_serialise_leaves(path, {"a": jnp.zeros(n)}, durable=False)
    names, starts = [f"a{i}" for i in range(n)], [[i] for i in range(n)]
    of = [[i, 0] for i in range(n)]

    def alter(v: dict[str, Any]) -> None:
        v.update(names=names, template=[0] * n, parts=[[[n], starts]], part=of)
        del v["tree"]

    forge(path, alter)


def _with(path: pathlib.Path, alter: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint of one leaf, and of None, with another index."""
    ec.tree_serialise_leaves(path, {"a": np.ones(3), "z": None}, durable=False)
    forge(path, alter)


def _instead(
    path: pathlib.Path, kinds: list[Any], *rows: list[Any], values: list[Any] = []
) -> None:
    """Other kinds and rows where None is in the tree: both count from 2 on."""
    kinds = [["leaf"], ["dict", "", "", ["a", "z"]], *kinds]
    made = {"kinds": kinds, "values": values}
    made["rows"] = [[0], *rows, [1, 0, len(rows)]]
    _with(path, lambda value: value.update(tree=made))


@growth(40_000)
def ours_nodes(path, n):
    """Nodes without leaves, which are a row and a number."""
    _instead(path, [["none"], ["tuple", "", "", n]], [2], [3, 1, 1 - n])


@growth(150)
def ours_fields(path, n):
    """As many Modules as they have fields, each with a name."""
    kind = ["dataclass", "a", "B", [f"field{i}" for i in range(n)]]
    kinds = [["none"], kind, ["tuple", "", "", n]]
    _instead(path, kinds, [2], [3, 1, 1 - n], [4, 2, 1 - n])


@growth(1000)
def ours_sets(path, n):
    """Integers of one hash in a set."""
    value = {"set": [i * (2**61 - 1) for i in range(n)]}
    _instead(path, [["value"]], [2, 0], values=[value])


@growth(5000)
def ours_keys(path, n):
    """Integers of one hash as the keys of a dict."""
    keys = [i * (2**61 - 1) for i in range(n)]
    parts = [f"%={i}" for i in range(n)]
    kinds = [["none"], ["dict", "", "", parts, [], [], keys]]
    _instead(path, kinds, [2], [3, 1, 1 - n])


@growth(1000)
def ours_unknown(path, n):
    """Values that were not saved, each with a long text."""
    values = [{"unknown": ["", f"{i}" + "x" * 900]} for i in range(n)]
    rows = [[2, i] for i in range(n)]
    kinds = [["value"], ["tuple", "", "", n]]
    _instead(path, kinds, *rows, [3, *range(1, n + 1)], values=values)


@growth(300)
def ours_statics(path, n):
    """As many Modules as there are static fields in the one row that all of them are,
    and as there are nodes that they are in."""
    kind = ["module", "a", "B", [], [f"field{i}" for i in range(n)]]
    kinds = [kind, ["tuple", "", "", 10]]
    _instead(path, kinds, [2, *[0] * n], [3, 1, -9], values=[7])


@growth(300)
def ours_deep(path, n):
    """Nodes in each other, each with a name."""
    kinds = [["none"], ["tuple", "", "", 1]]
    _instead(path, kinds, [2], *([3, i + 1] for i in range(n)))


@growth(100)
def ours_markers(path, n):
    """As many States as there are indices, all of which are of each entry."""
    kinds = [["none"], ["index", "", "", ["init"]], ["tuple", "", "", n]]
    kinds += [["state", "", "", 1], ["tuple", "", "", 2]]
    rows = [[2], [3, 0, 1], [4, 2, 1 - n], [5, 0, 1], [4, 4, 1 - n], [6, 3, 5]]
    _instead(path, kinds, *rows, values=[{"markers": [7]}])


@growth(1000)
def ours_entries(path, n):
    """A State of many entries, whose markers are those of no index."""
    kinds = [["none"], ["state", "", "", n]]
    markers = {"markers": list(range(n))}
    _instead(path, kinds, [2], [3, 0, 1, 1 - n], values=[markers])


def _orbax(path: pathlib.Path, tree: dict[str, Any], **more: Any) -> None:
    path.mkdir()
    value = {"tree_metadata": tree, "use_zarr3": True, **more}
    (path / "_METADATA").write_text(json.dumps(value))


@growth(5000)
def orbax_deep_key(path, n):
    """One leaf, below so many nodes."""
    _orbax(path, {"('a',)": entry(["a" * 250] * n)})


@growth(200)
def orbax_empty_chunks(path, n):
    """Arrays of zeros that are not there, in chunks of one element."""
    _orbax(path, {f"('a{i}',)": entry([f"a{i}"]) for i in range(n)})
    for i in range(n):
        (path / f"a{i}").mkdir()
        _zarr_json(path / f"a{i}" / "zarr.json", [200], [1])


def _zarr_json(file: pathlib.Path, shape: list[int], chunk: list[int]) -> None:
    value = {"zarr_format": 3, "node_type": "array", "shape": shape}
    value |= {"data_type": "uint8", "fill_value": 0, "codecs": [{"name": "bytes"}]}
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    encoding = {"name": "default", "configuration": {"separator": "/"}}
    value |= {"chunk_grid": grid, "chunk_key_encoding": encoding}
    file.write_text(json.dumps(value))


def frame(parts: list[tuple[bytes, int]]) -> bytes:
    """A frame of zstd of runs: a byte so many times, in blocks of 4 bytes each."""
    blocks = []
    for byte, count in parts:
        while count:
            size = min(count, 2**17)
            blocks.append((1 << 1 | size << 3, byte))
            count -= size
    out = b"\x28\xb5\x2f\xfd\0\x38"
    for number, (head, byte) in enumerate(blocks, 1):
        out += (head | (number == len(blocks))).to_bytes(3, "little") + byte
    return out


def database(path: pathlib.Path, body: bytes, compressed: bool = False) -> None:
    """A database of one node. Its checksum is right."""
    _orbax(path, {"('a',)": entry(["a"])})
    node = _ocdbt._frame(_ocdbt.NODE, body)
    if compressed:
        node = _ocdbt._frame(_ocdbt.NODE, b"")[:13] + b"\1" + body + bytes(4)
        node = _checked(node)
    top = _ocdbt.Subtree(b"", 0, len(node), 1, len(node), 0, 0)
    (path / "tree").write_bytes(node)
    (path / "manifest.ocdbt").write_bytes(_ocdbt.manifest(top, "tree"))


def _checked(node: bytes) -> bytes:
    node = node[:4] + struct.pack("<Q", len(node)) + node[12:-4]
    return node + struct.pack("<I", google_crc32c.value(node))


def shared_prefixes(n: int) -> bytes:
    """A node of `n` keys that share a prefix of `n` bytes: `n * n` bytes of keys."""
    own = [n, *[2] * (n - 1)]
    suffixes = b"a" * n + b"".join(struct.pack(">H", i) for i in range(1, n))
    fields = [_ocdbt._varints([n]), _ocdbt._varints([n] * (n - 1))]
    fields += [_ocdbt._varints(own), suffixes, _ocdbt._varints([0] * n), bytes(n)]
    return b"\0" + _ocdbt._file_table([b"tree"]) + b"".join(fields)


def doubled(path: pathlib.Path, height: int) -> None:
    """A database of `2**height` keys: each node leads to the one below by two ways."""
    entries = _ocdbt.Entries([b"zarr.json"], [0], [0], [9])
    nodes, top = _ocdbt.tree(entries, ["data"], "tree", 0)
    keys = [b"a", b"b"]
    for _ in range(height):
        fields = [[getattr(top, f)] * 2 for f in ("offset", "length", "keys")]
        body = [bytes([top.height + 1]), _ocdbt._file_table([b"tree"])]
        body += [_ocdbt._key_lengths(keys), bytes(2), *keys, bytes(2)]
        body += map(_ocdbt._varints, [*fields, [1, 1], [1, 1]])
        node = _ocdbt._frame(_ocdbt.NODE, b"".join(body))
        top = _ocdbt.Subtree(b"a", len(nodes), len(node), 2, 1, 1, top.height + 1)
        nodes += node
    (path / "tree").write_bytes(nodes)
    (path / "data").write_bytes(bytes(9))
    (path / "manifest.ocdbt").write_bytes(_ocdbt.manifest(top, "tree"))


@growth(4000)
def database_prefixes(path, n):
    """A node whose keys share a prefix that is as long as they are many."""
    database(path, shared_prefixes(n))


@growth(2000)
def database_frames(path, n):
    """A node in a frame of zstd that makes 128 KiB of every four bytes."""
    database(path, frame([(b"\0", 2**17 * n)]), compressed=True)


@growth(2000)
def database_metadata(path, n):
    """Many keys whose values are one range of a file."""
    keys = [f"a{i:08}/zarr.json".encode() for i in range(n)]
    count = len(keys)
    entries = _ocdbt.Entries(keys, [0] * count, [0] * count, [60_000] * count)
    path_tree = {f"('a{i:08}',)": entry([f"a{i:08}"]) for i in range(n)}
    _orbax(path, path_tree)
    nodes, top = _ocdbt.tree(entries, ["data", "tree"], "tree", 0)
    (path / "data").write_bytes(b" " * 60_000)
    (path / "tree").write_bytes(nodes)
    (path / "manifest.ocdbt").write_bytes(_ocdbt.manifest(top, "tree"))


@growth(50000)
def eqx_line(path, n):
    """A line of JSON before no records."""
    path.write_bytes(b'{"a":[' + b"1," * n + b"1]}\n")


_suffixes = {"safetensors": ".safetensors", "msgpack": ".msgpack", "zip": ".zip"}
_suffixes |= {"npz": ".npz", "npy": ".npy", "torch": ".pt"}


def path_of(base: pathlib.Path, name: str, n: int) -> pathlib.Path:
    suffix = {**_suffixes, "eqx": ".eqx"}.get(name.partition("_")[0], "")
    return base / f"{name}-{n}{suffix}"


def show(path: pathlib.Path) -> str:
    """Opens and shows a checkpoint. Returns the type of the error."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        command.main(["ls", str(path)])
    try:
        ckpt = ec.open(path)
        repr(ckpt), repr(ckpt.leaves), repr(ckpt.tree), list(ckpt.leaves)
        ckpt._repr_html_()
        for leaf in list(ckpt.leaves.values())[:20]:
            leaf.read()
        if ckpt._source.has_digests:
            repr(ec.diff(path, path))
            ec.rebuild(path, [])
    except (ValueError, RuntimeError) as e:
        assert len(str(e)) < 20_000, str(e)[:200]
        return type(e).__name__
    return ""


def cost(path: pathlib.Path) -> tuple[float, int, str]:
    """The seconds of processor time and the bytes of memory that it takes to show."""
    begin = time.process_time()
    error = show(path)
    seconds = time.process_time() - begin
    tracemalloc.start()
    show(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak, error


def main(scale: int = 1, names: Collection[str] = GROWTHS) -> None:
    base = pathlib.Path(tempfile.mkdtemp(prefix="growth-"))
    save(base / "good", "ocdbt")
    show(base / "good")
    out = {}
    made = {}
    chosen = {name: GROWTHS[name] for name in names}
    for name, (n, make) in chosen.items():
        for size in (n * scale, 2 * n * scale):
            made[name, size] = path_of(base, name, size)
            make(made[name, size], size)
    limit_memory()
    for name, (n, _) in chosen.items():
        paths = [made[name, size * scale] for size in (n, 2 * n)]
        # What other processes do to the caches comes and goes; growth stays.
        for _ in range(8):
            one, two = map(cost, paths)
            is_good = two[0] <= MORE * one[0] + SECONDS
            is_good = is_good and two[1] <= MORE * one[1] + BYTES
            if is_good:
                break
        out[name] = [is_good, one, two]
        print(name, out[name], file=sys.stderr, flush=True)
    print(json.dumps(out))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
