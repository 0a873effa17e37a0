"""Shapes and sizes that a reader would allocate, or count, before it looks."""

import os

from . import attack, data, forge, place, template


def _template(name, refused, what, match="", **changes):
    def make(path, outside):
        forge(path, lambda v: template(v, "net.bias", **changes))

    make.__name__, make.__doc__ = name, what
    attack(refused, match)(make)


_template(
    "product_overflows",
    "touch",
    "A shape whose size is zero in 64 bits.",
    "impossible",
    shape=[2**32, 2**32],
    chunk=[1, 1],
)
_template("negative_length", "touch", "A negative length.", "impossible", shape=[-1])
_template("chunk_of_none", "touch", "Chunks of length 0.", "impossible", chunk=[0])
_template(
    "rank_33",
    "touch",
    "More axes than TensorStore and NumPy have.",
    "impossible rank",
    shape=[1] * 33,
    chunk=[1] * 33,
)
_template(
    "billions_of_chunks",
    "touch",
    "A billion chunks of one element: each would get a key.",
    "more than",
    shape=[2**30],
    chunk=[1],
)
_template(
    "chunk_larger_than_all",
    "touch",
    "One chunk of an exabyte for an array of three.",
    "impossible size",
    chunk=[2**59],
)
_template(
    "chunk_larger_than_the_array",
    "touch",
    "Chunks that the codec is to make of nothing.",
    "chunks .4096. of an array .3.",
    chunk=[4096],
)
_template(
    "unknown_kind", "touch", "A kind of leaf that is code.", "kind", kind="pickle"
)
_template(
    "unknown_dtype", "touch", "A dtype of Python objects.", dtype="object", stored="O"
)
_template(
    "dtype_by_attribute",
    "touch",
    "A dtype whose name is an attribute of a module.",
    dtype="__builtins__",
    stored="uint8",
)


@attack("open", "no 'templates' of the right type")
def codec(path, outside):
    """A codec that this release does not know, as a field more of a template."""
    forge(path, lambda v: v["templates"][0].append("zstd"))


@attack("read", "damaged|missing")
def terabyte(path, outside):
    """A leaf of a terabyte in a file of a few kilobytes."""

    def alter(v):
        template(v, "net.weight", keys="ka", shape=[2**38], chunk=[2**24])

    forge(path, alter)


@attack("read", "damaged|missing")
def terabyte_of_one_chunk(path, outside):
    """A leaf of a terabyte that is one chunk."""

    def alter(v):
        template(v, "net.weight", keys="ka", shape=[2**38], chunk=[2**38])

    forge(path, alter)


@attack("read", "damaged|missing")
def small_leaves_that_are_not_there(path, outside):
    """Small leaves that are not there, which are read many at a time."""

    def alter(v):
        old = v["template"][place(v, "net.bias")]
        template(v, "net.bias", keys="ks", shape=[2**14], chunk=[2**14])
        number = len(v["templates"]) - 1
        v["template"][place(v, "net.bias")] = old
        del v["tree"]
        v["begins"].append([0, len(v["names"]), 0, 0, 2**30])
        v["names"] += [f"more.{i}" for i in range(1000)]
        v["template"] += [number] * 1000

    forge(path, alter)


@attack("read", "damaged|missing", kind="zarr")
def terabyte_in_directories(path, outside):
    """A leaf of a terabyte whose chunks have files of their own."""
    forge(path, lambda v: template(v, "net.weight", shape=[2**38], chunk=[2**26]))


@attack("read", "is not a chunk", kind="zarr")
def chunk_file_too_long(path, outside):
    """The file of a chunk is a terabyte long, and sparse."""
    os.truncate(path / "net.weight" / "c" / "0" / "0", 2**40)


@attack("read", "missing", kind="zarr")
def chunk_file_too_short(path, outside):
    """The file of a chunk is shorter than its chunk."""
    os.truncate(path / "net.weight" / "c" / "0" / "0", 100)


@attack("read", "missing")
def data_file_too_short(path, outside):
    """A data file ends before the last leaf in it: a memory map would fault there."""
    os.truncate(data(path) / "0", 4096)


@attack("read", "digests is damaged")
def digests_too_long(path, outside):
    """A file of digests of a terabyte, and it is sparse."""
    os.truncate(data(path) / "digests", 2**40)


@attack("read", "too many sizes", kind="zarr")
def many_chunk_sizes(path, outside):
    """Chunks of thousands of sizes: counting their digests takes exponential time."""
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23]
    shape = [p + 1 for p in primes]
    forge(path, lambda v: template(v, "net.bias", shape=shape, chunk=primes))
