"""What lies in the directory: links, files that are none, and files for others."""

import json
import os
import struct

import google_crc32c

from . import attack, data, forge, index_of, move


# Where a link stands, and what for. It leads to a copy of what was there, so that
# whoever follows it finds all that he expects.
_linked = {
    "index": lambda path: path / "eqx_ckpt.json",
    "data": lambda path: path / "d",
    "save": data,
    "data_file": lambda path: data(path) / "0",
    "digests": lambda path: data(path) / "digests",
}


def _links():
    for name, file in _linked.items():

        def make(path, outside, file=file):
            file(path).symlink_to(move(file(path), outside))

        make.__name__ = f"link_{name}"
        make.__doc__ = f"A symbolic link in place of the {name.replace('_', ' ')}."
        refused = "open" if name == "index" else "read"
        attack(refused, "symbolic link")(make)
        if name in ("data", "save"):
            continue

        def special(path, outside, file=file):
            file(path).unlink()
            os.mkfifo(file(path))

        special.__name__ = f"fifo_{name}"
        special.__doc__ = f"A FIFO as the {name.replace('_', ' ')}: a reader waits."
        attack(refused, "is not a file")(special)

        def directory(path, outside, file=file):
            file(path).unlink()
            file(path).mkdir()

        directory.__name__ = f"directory_{name}"
        directory.__doc__ = f"A directory as the {name.replace('_', ' ')}."
        attack(refused, "is not a file")(directory)


_links()


@attack("open", "not a file|symbolic link")
def device(path, outside):
    """A link to a device that never ends; making one itself needs root."""
    (path / "eqx_ckpt.json").unlink()
    try:
        os.mknod(path / "eqx_ckpt.json", 0o20666, os.makedev(1, 5))
    except OSError:
        (path / "eqx_ckpt.json").symlink_to("/dev/zero")


@attack("read", "not a directory")
def file_as_directory(path, outside):
    """A file in place of the directory of the data."""
    move(path / "d", outside)
    (path / "d").write_bytes(b"")


@attack("read", "symbolic link", kind="zarr")
def link_chunk(path, outside):
    """A symbolic link in place of a chunk."""
    chunk = path / "net.weight" / "c" / "1" / "0"
    chunk.symlink_to(move(chunk, outside))


@attack("read", "symbolic link", kind="zarr")
def link_small_chunk(path, outside):
    """A symbolic link in place of the chunk of a small leaf."""
    chunk = path / "net.bias" / "c" / "0"
    chunk.symlink_to(move(chunk, outside))


@attack("read", "symbolic link", kind="zarr")
def link_leaf(path, outside):
    """A symbolic link in place of the directory of a leaf."""
    (path / "net.weight").symlink_to(move(path / "net.weight", outside))


@attack("read", "is not a file", kind="zarr")
def fifo_chunk(path, outside):
    """A FIFO as a chunk: a reader waits for ever."""
    chunk = path / "net.weight" / "c" / "1" / "0"
    chunk.unlink()
    os.mkfifo(chunk)


@attack("read", "missing", kind="zarr")
def missing_chunk(path, outside):
    """A chunk that is not there, which TensorStore would read as zeros."""
    (path / "net.weight" / "c" / "1" / "0").unlink()


@attack(None)
def hard_link(path, outside):
    """A data file that is also a file outside: it is read, and never written to."""
    os.link(data(path) / "0", outside / "linked")


# ---- Files for other readers. Nothing is read from them.


def _frame(magic, body):
    data = struct.pack(">IQ", magic, 0)[:4] + struct.pack("<Q", len(body) + 18)
    data += b"\0\0" + body
    return data + struct.pack("<I", google_crc32c.value(data))


@attack(None)
def manifest_outside(path, outside):
    """The OCDBT manifests place the data in a directory outside of the checkpoint."""
    for directory in (path, data(path)):
        manifest = bytearray((directory / "manifest.ocdbt").read_bytes()[:-4])
        at = manifest.rindex(b"tree")
        manifest[at : at + 4] = b"../c"
        checksum = struct.pack("<I", google_crc32c.value(bytes(manifest)))
        (directory / "manifest.ocdbt").write_bytes(bytes(manifest) + checksum)


@attack(None)
def manifest_fifo(path, outside):
    """FIFOs as the OCDBT manifests and nodes: a reader waits for ever."""
    for file in (path / "manifest.ocdbt", *(data(path) / n for n in _database)):
        file.unlink()
        os.mkfifo(file)


_database = ("manifest.ocdbt", "tree")


@attack(None)
def manifest_link(path, outside):
    """The OCDBT manifest and nodes are links that lead outside."""
    for name in _database:
        file = data(path) / name
        file.symlink_to(move(file, outside))


@attack(None)
def node_of_a_terabyte(path, outside):
    """The file of the OCDBT nodes is a terabyte of zeros."""
    os.truncate(data(path) / "tree", 2**40)


@attack(None)
def node_of_garbage(path, outside):
    """OCDBT nodes of random bytes with a right checksum."""
    size = (data(path) / "tree").stat().st_size
    (data(path) / "tree").write_bytes(_frame(0x0CDB20DE, os.urandom(size)))


def _zarr_jsons():
    def changed(**changes):
        def make(path, outside):
            file = path / "net.weight" / "zarr.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

        return make

    index = [{"name": "bytes", "configuration": {"endian": "little"}}]
    inner = [{"name": "zstd", "configuration": {"level": 1}}]
    sharding = index
    for _ in range(20):
        sharding = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, 1],
                    "codecs": sharding,
                    "index_codecs": index,
                    "index_location": "end",
                },
            }
        ]
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}
    for name, what, make in (
        ("disagrees", "is of another shape", changed(shape=[2**20, 2**20])),
        ("driver", "names another driver", changed(zarr_format=2, driver="http")),
        (
            "bomb",
            "has a codec that expands its bytes",
            changed(codecs=inner),
        ),
        ("sharding", "nests a sharding codec twenty times", changed(codecs=sharding)),
        ("chunks", "has a trillion chunks", changed(shape=[2**40, 1], chunk_grid=grid)),
        ("fill", "fills what is missing with a value", changed(fill_value=666.0)),
    ):
        make.__name__, make.__doc__ = f"zarr_json_{name}", f"A zarr.json that {what}."
        attack(None, kind="zarr")(make)


_zarr_jsons()


@attack(None)
def orbax_metadata(path, outside):
    """`_METADATA` and `_sharding` that say something else than the index, and bombs."""
    (path / "_METADATA").write_bytes(b"[" * 10**6)
    (path / "_sharding").unlink(missing_ok=True)
    os.mkfifo(path / "_sharding")


@attack("read", "missing")
def another_save(path, outside):
    """An index of a save whose data is not there, beside data of another."""
    forge(path, lambda v: v.update(save="0" * 16, others={}))
    assert index_of(path)["save"] == "0" * 16


@attack("open", "files that are not of this format")
def data_file_twice(path, outside):
    """A file named twice, so that it counts twice."""
    forge(path, lambda v: v.update(files=2 * v["files"], digests=2 * v["digests"]))
