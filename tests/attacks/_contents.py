"""The bytes of leaves and their digests."""

import os

import xxhash

from . import attack, data, forge, index_of, place, redigest, template


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
    value = index_of(path)
    start = value["offset"][place(value, "net.weight")]
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
    value = index_of(path)
    content[value["offset"][place(value, "net.bias")]] ^= 1
    file.write_bytes(content)


def _digested(path, name, new):
    """Gives a small leaf other bytes, with a digest to match."""
    value = index_of(path)
    file = data(path) / "0"
    content = bytearray(file.read_bytes())
    start = value["offset"][place(value, name)]
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


def frame(size):
    """A zstd frame of zeros: blocks of 128 KiB that are four bytes each."""
    count = -(-size // 2**17)
    block = (1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"\0"
    last = (1 | 1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\0\x38" + block * (count - 1) + last


@attack("read", "it cannot be read", kind="zarr-zstd")
def compressed_bomb(path, outside):
    """A compressed chunk of 128 KB that expands to 4 GB."""
    (path / "net.weight" / "c" / "0" / "0").write_bytes(frame(2**32))


@attack("read", "it cannot be read", kind="zarr-zstd")
def compressed_garbage(path, outside):
    """A compressed chunk that is none."""
    (path / "net.weight" / "c" / "0" / "0").write_bytes(b"\x28\xb5\x2f\xfd" * 20)


@attack("read", "is not a chunk", kind="zarr-zstd")
def compressed_file_too_long(path, outside):
    """The file of a compressed chunk is a terabyte long, and sparse."""
    os.truncate(path / "net.weight" / "c" / "0" / "0", 2**40)


@attack("open", "impossible sizes", kind="ocdbt-zstd")
def compressed_terabyte(path, outside):
    """A terabyte in compressed chunks of a few bytes, which no codec makes of it."""

    def alter(v):
        template(v, "net.weight", keys="ka", shape=[2**38], chunk=[2**34])
        v["sizes"] = [[place(v, "net.weight"), [64] * 16]]

    forge(path, alter)


@attack("open", "lacks the sizes", kind="ocdbt-zstd")
def compressed_without_sizes(path, outside):
    """Compressed chunks of no length."""
    forge(path, lambda v: v.update(sizes=[]))
