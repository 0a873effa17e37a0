"""The names of the files of a checkpoint."""

import re

import xxhash


INDEX = "eqx_ckpt.json"
# Says that a save is being written where it cannot be put in place atomically.
CLAIM = "eqx_ckpt.saving"
# The digests of a checkpoint with `layout="zarr"`.
DIGESTS = "eqx_ckpt.digests"
# The files for other readers at the root of a checkpoint.
OTHERS: frozenset[str] = frozenset(
    "_METADATA _sharding _strings.json array_metadatas/process_0 manifest.ocdbt "
    "zarr.json".split()
)
# The first parts of names of files, which no leaf's name begins with: see FORMAT.md,
# "Names". These four are of our own index, of Orbax, and of what may come.
RESERVED = frozenset(key.partition(".")[0].partition("/")[0] for key in OTHERS) | {
    "eqx_ckpt",
    "ocdbt",
    "descriptor",
    "_CHECKPOINT_METADATA",
}
# The files of a save, in `d/<save id>`.
DATA = re.compile(
    r"[0-9]+|(part|function|own)-[0-9]+|tree|manifest\.ocdbt|digests|.+\.new", re.DOTALL
)
# What is at the root of a checkpoint besides `d/`, the index and leaves.
SIDE = frozenset(key.partition("/")[0] for key in OTHERS) | {CLAIM, DIGESTS}
# A signature of the files of the checkpoint, by OpenSSF's model signing.
SIGNATURE = "model.sig"
# Whether a directory is called as one that is to be swapped in.
is_beside = re.compile(r"(.+)\.eqx_ckpt-[0-9a-f]{16}", re.DOTALL).fullmatch
# Whether a file is one that the system, a network's file system or an editor puts where
# it likes: it is nobody's. No leaf's name begins with a dot.
is_of_system = re.compile(
    r"\.DS_Store|\._.*|\.nfs.*|\.ipynb_checkpoints", re.DOTALL
).fullmatch
# Where the check of a file system puts what it finds: only root may look into it.
LOST = "lost+found"
# Of the directory of a leaf.
_MAX_NAME = 200


def directory(name: str) -> str:
    """The directory of a leaf: its name, the end of a long one replaced by a digest."""
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:160]}%~{xxhash.xxh3_128_hexdigest(name.encode())}"


def function(number: int) -> str:
    """The name of the file of a function, in `d/<save id>`."""
    return f"function-{number}"


def own(process: int) -> str:
    """The name of the file of the own state of a process, in `d/<save id>`."""
    return f"own-{process}"


def staged(own: str, key: str) -> str:
    """Where a file for the root lies in the directory of its save, until the commit.
    (A tree is staged once it is copied to the host: `stage_save` in `_save/_async.py`.)
    """
    return f"{own}/{key.replace('/', '%')}{_STAGED}"


def is_staged(name: str) -> bool:
    """Whether a file in the directory of a save is one that is `staged`."""
    return name.endswith(_STAGED)


_STAGED = ".new"
