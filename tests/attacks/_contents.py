"""The bytes of leaves and their digests."""

import os

import xxhash

from . import attack, data, forge, offset, place, redigest, template


@attack("read", "digests is missing")
def no_digests(path, outside):
    """No file of digests: bytes that nothing vouches for."""
    (data(path) / "digests").unlink()


@attack("read", "digests is damaged")
def malformed_digests(path, outside):
    """A file of digests that ends within one."""
    redigest(path, (data(path) / "digests").read_bytes()[:-1])


@attack("read", "digests is damaged")
def other_digests(path, outside):
    """A file of digests that is not the one the index names."""
    digests = (data(path) / "digests").read_bytes()
    (data(path) / "digests").write_bytes(digests[::-1])


@attack("read", "not those that were saved")
def digests_of_other_chunks(path, outside):
    """Right digests, of other chunks than those that stand at their place."""
    digests = (data(path) / "digests").read_bytes()
    redigest(path, digests[-16:] + digests[:-16])


@attack("read", "not those that were saved")
def chunks_that_change_places(path, outside):
    """Two chunks of one leaf change places, each as it was saved."""
    start = offset(path, "net.weight")
    file = data(path) / "0"
    content = bytearray(file.read_bytes())
    size = 32 * 128 * 4
    one, two = (slice(start + n * size, start + (n + 1) * size) for n in (0, 1))
    content[one], content[two] = content[two], content[one]
    file.write_bytes(content)


@attack("read", "not those that were saved")
def one_bit(path, outside):
    """One bit of the data."""
    file = data(path) / "0"
    content = bytearray(file.read_bytes())
    content[offset(path, "net.bias")] ^= 1
    file.write_bytes(content)


def _digested(path, name, new):
    """Gives a small leaf other bytes, with a digest to match."""
    file = data(path) / "0"
    content = bytearray(file.read_bytes())
    start = offset(path, name)
    old = bytes(content[start : start + len(new)])
    content[start : start + len(new)] = new
    file.write_bytes(content)
    digests = (data(path) / "digests").read_bytes()
    before, after = map(xxhash.xxh3_128_digest, (old, new))
    assert digests.count(before) == 1
    redigest(path, digests.replace(before, after))


@attack("read", "do not survive")
def text_that_is_not_utf_8(path, outside):
    """A str leaf whose bytes are no text."""
    _digested(path, "text", b"\xff\xfe\xfd\xfc\xfb\xfa")


@attack("read", "key")
def key_of_other_words(path, outside):
    """A PRNG key of more words than its implementation has."""
    forge(path, lambda v: template(v, "key", impl="rbg"))


@attack("load", "")
def other_kinds(path, outside):
    """A str where `like` has an array."""

    def alter(v):
        a, b = place(v, "text"), place(v, "key")
        v["names"][a], v["names"][b] = "key", "text"

    forge(path, alter)


# ---- Compressed leaves.


@attack("read", "impossible sizes", kind="ocdbt-lz4")
def compressed_terabyte(path, outside):
    """A terabyte in compressed chunks of a few bytes, which no codec makes of it."""

    def alter(v):
        template(v, "net.weight", keys="ka", shape=[2**38], chunk=[2**28])
        v["sizes"] = [64] * 1024

    forge(path, alter)


@attack("read", "lacks the sizes", kind="ocdbt-lz4")
def compressed_without_sizes(path, outside):
    """Compressed chunks of no length."""
    forge(path, lambda v: v.update(sizes=[]))


# ---- Blosc, whose header says how much is allocated.


def _header(path, place, value):
    """Changes the header of a chunk of a leaf with a file of its own: of its four
    numbers, from the byte `place` on."""
    file = path / "net.weight" / "c" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[place : place + 4] = value.to_bytes(4, "little")
    file.write_bytes(content)


_chunk = 32 * 128 * 4


def _lie(name, what, place, value):
    def make(path, outside):
        _header(path, place, value)

    make.__doc__, make.__name__ = what, name
    attack("read", "the Blosc header", kind="zarr-lz4")(make)


_lie("blosc_of_gigabytes", "A chunk that says that it makes 2 GB.", 4, 2**31 - 17)
_lie("blosc_of_too_much", "One that says that it makes twice a chunk.", 4, 2 * _chunk)
_lie("blosc_of_too_little", "One that says that it makes less.", 4, 16)
_lie("blosc_of_nothing", "One that says that it makes nothing.", 4, 0)
_lie("blosc_in_large_blocks", "Blocks of 2 GB, for which there are buffers.", 8, 2**31)
_lie("blosc_in_no_blocks", "Blocks of no bytes, which one divides by.", 8, 0)
_lie("blosc_of_another_length", "A length that is not that of the file.", 12, 2**31)
_lie(
    "blosc_of_items",
    "Items of 255 bytes, and a version that there is not.",
    0,
    -1 % 2**32,
)


@attack("read", "it cannot be read|not those that were saved", kind="zarr-lz4")
def blosc_of_offsets_outside(path, outside):
    """The places of its blocks are outside of it."""
    for at in range(16, 48, 4):
        _header(path, at, 2**31 - 1)


@attack("read", "the Blosc header", kind="zarr-lz4")
def compressed_garbage(path, outside):
    """A chunk of another codec."""
    (path / "net.weight" / "c" / "0" / "0").write_bytes(b"\x28\xb5\x2f\xfd" * 20)


@attack("read", "is not a chunk", kind="zarr-lz4")
def compressed_file_too_long(path, outside):
    """The file of a compressed chunk is a terabyte long, and sparse."""
    os.truncate(path / "net.weight" / "c" / "0" / "0", 2**40)


@attack("read", "within its Blosc header", kind="zarr-lz4")
def blosc_without_a_header(path, outside):
    """A chunk that ends within its header."""
    os.truncate(path / "net.weight" / "c" / "0" / "0", 15)


@attack("read", "the Blosc header", kind="zarr-lz4")
def blosc_with_more_after_it(path, outside):
    """Bytes after the end of a chunk, which nothing vouches for."""
    file = path / "net.weight" / "c" / "0" / "0"
    file.write_bytes(file.read_bytes() + b"more")


@attack("read", "the Blosc header", kind="zarr-lz4")
def blosc_of_another_compressor(path, outside):
    """A chunk of another compressor, of which there are more to attack."""
    file = path / "net.weight" / "c" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[2] = content[2] & 31 | 3 << 5
    file.write_bytes(content)


@attack("read", "the Blosc header", kind="ocdbt-lz4")
def blosc_of_gigabytes_in_a_database(path, outside):
    """A chunk among others in a file, that says that it makes 2 GB."""
    file = data(path) / "0"
    content = bytearray(file.read_bytes())
    start = offset(path, "net.weight")
    content[start + 4 : start + 8] = (2**31 - 17).to_bytes(4, "little")
    file.write_bytes(content)


@attack("read", "the Blosc header", kind="ocdbt-lz4")
def blosc_chunks_of_other_sizes(path, outside):
    """Chunks that end elsewhere than the index says."""

    def alter(v):
        sizes = v["sizes"]
        v["sizes"] = [sizes[0] - 1, sizes[1] + 1, *sizes[2:]]

    forge(path, alter)


@attack("touch", "too large for Blosc", kind="zarr-lz4")
def blosc_chunk_of_a_petabyte(path, outside):
    """A chunk that Blosc cannot hold, of a sparse file."""
    shape = [2**46, 4]
    forge(path, lambda v: template(v, "net.weight", shape=shape, chunk=shape))
    os.truncate(path / "net.weight" / "c" / "0" / "0", 2**42)


@attack("read", "damaged|missing", kind="zarr-lz4")
def blosc_gigabytes_of_a_few_bytes(path, outside):
    """Chunks of 1 GB, of which there is a file of a few bytes."""
    shape = [2**28, 4]
    forge(path, lambda v: template(v, "net.weight", shape=shape, chunk=[2**26, 4]))
