"""What the processes of `test_faults.py` do. No test is here.

`python -m support.faulty WHAT ARGUMENTS...` calls the function WHAT.
"""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np

import eqx_ckpt as ec
from support.helpers import files_of


LAYOUTS = ("ocdbt", "zarr")


def tree(value):
    both = np.full(40, value)
    return {"x": np.full(5000, value), "v": [both, both], "value": value}


def value_at(path, verify=True):
    """The value of the one tree that is at a path."""
    ckpt = ec.open(path)
    loaded = ec.tree_deserialise_leaves(ckpt, tree(0), verify=verify)
    value = loaded["value"]
    assert (loaded["x"] == value).all(), value
    assert all((v == value).all() for v in loaded["v"]), value
    return value


_same = [(layout, layout) for layout in LAYOUTS]
_every = list(itertools.product((None, *LAYOUTS), LAYOUTS))


class _Attempts:
    """Saves 2 over 1, again and again. What fails must leave all as it was."""

    def __init__(self, directory):
        self.path = pathlib.Path(directory) / "7"
        self.count = collections.Counter()

    def over(self, cases):
        """Each case is the layout of what is there (None: nothing), and of the save."""
        for self.old, self.layout in cases:
            self._reset()
            yield

    def _reset(self):
        shutil.rmtree(self.path, ignore_errors=True)
        if self.old is not None:
            ec.tree_serialise_leaves(self.path, tree(1), layout=self.old)
        self.before = files_of(self.path.parent)

    def attempt(self, fault, clean=True):
        error = None
        try:
            with fault:
                ec.tree_serialise_leaves(self.path, tree(2), layout=self.layout)
        except (OSError, ValueError) as e:
            error = e
        committed = error is None or any("is saved" in n for n in _notes(error))
        if committed or self.old is not None:
            assert value_at(self.path) == (2 if committed else 1), error
        if not committed and clean:
            assert files_of(self.path.parent) == self.before, error
            assert self.path.exists() == (self.old is not None), error
        self.count[f"{self.layout} {type(error).__name__}"] += 1
        if not clean:
            # The next save has to.
            ec.tree_serialise_leaves(self.path, tree(3), layout=self.layout)
            assert value_at(self.path) == 3
            assert os.listdir(self.path.parent) == ["7"], error
            assert len(list(self.path.glob("d/*"))) <= 1, error
        if committed or not clean:
            self._reset()


def _notes(error):
    return getattr(error, "__notes__", [])


def full_disk(directory):
    """A small file system with only so many bytes or inodes free."""
    options = ["-t", "tmpfs", "-o", "size=800k,nr_inodes=150"]
    subprocess.run(["mount", *options, "tmpfs", directory], check=True)
    attempts = _Attempts(f"{directory}/steps")
    filler = pathlib.Path(directory) / "filler"
    for _ in attempts.over(_same):
        for kibibytes in (0, 4, 8, 20, 40, 48, 56, 64, 72, 80, 100, 200):
            attempts.attempt(_filled(filler, kibibytes))
        for inodes in (0, 1, 2, 3, 5, 7, 9, 11, 15, 20, 40):
            attempts.attempt(_crowded(filler, inodes))
    return attempts.count


@contextlib.contextmanager
def _filled(filler, kibibytes):
    stat = os.statvfs(filler.parent)
    filler.write_bytes(bytes(stat.f_bavail * stat.f_frsize - kibibytes * 1024))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def _crowded(filler, inodes):
    free = os.statvfs(filler.parent).f_favail
    crowd = [filler.with_name(f"{i}") for i in range(free - inodes)]
    for path in crowd:
        path.touch()
    try:
        yield
    finally:
        for path in crowd:
            path.unlink()


def file_size(directory):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    attempts = _Attempts(directory)
    for _ in attempts.over(_every):
        for size in (0, 500, 3000, 50_000):
            attempts.attempt(_limit(resource.RLIMIT_FSIZE, size))
    return attempts.count


def descriptors(directory):
    """All descriptors but a few are taken."""
    attempts = _Attempts(directory)
    for _ in attempts.over(_same):
        # How many a save takes at once is up to its threads. The last two are enough.
        for more in (*range(9), 32, 64):
            # With too few of them, what was written cannot be listed and deleted.
            attempts.attempt(_taken(more), clean=False)
    return attempts.count


@contextlib.contextmanager
def _taken(more):
    taken = []
    with _limit(resource.RLIMIT_NOFILE, 256):
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(more):
            os.close(taken.pop())
        try:
            yield
        finally:
            for fd in taken:
                os.close(fd)


@contextlib.contextmanager
def _limit(which, soft):
    old, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (old, hard))


def read_only(directory):
    """Paths that may be read and not written."""
    count = collections.Counter()
    for layout in LAYOUTS:
        path = pathlib.Path(directory) / "steps" / layout
        ec.tree_serialise_leaves(path, tree(1), layout=layout)
    before = files_of(directory)
    for place, folders, _ in os.walk(directory):
        os.chmod(place, 0o555)
    if os.getuid() == 0:
        # Rights do not bind root.
        os.setgid(65534)
        os.setuid(65534)
    for layout in LAYOUTS:
        for name in (*LAYOUTS, "new"):
            path = pathlib.Path(directory) / "steps" / name
            try:
                ec.tree_serialise_leaves(path, tree(2), layout=layout)
            except PermissionError:
                count[layout] += 1
            assert name == "new" or value_at(path) == 1
    assert files_of(directory) == before
    assert ec.clean(pathlib.Path(directory) / "steps") == []
    return count


def write_often(path, layouts, first):
    """Saves one value after the other until its input ends, and one has been saved, and
    says which of them were."""
    saved, errors = [], collections.Counter()
    print("ready", flush=True)
    sys.stdin.readline()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    value = int(first)
    while not (over.is_set() and saved):
        layout = layouts.split(",")[value % len(layouts.split(","))]
        try:
            ec.tree_serialise_leaves(path, tree(value), layout=layout, durable=False)
            saved.append(value)
        except (RuntimeError, FileExistsError) as e:
            errors[str(e).replace(path, "PATH")] += 1
        value += 1
    return {"saved": saved, "errors": errors}


def main():
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))


if __name__ == "__main__":
    main()
