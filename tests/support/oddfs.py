"""A file system that can do less than others, by FUSE. No test is here.

Each read gives a few bytes only, files have one name and one mode, two directories
cannot change places, directories cannot be synced, and names that differ by case are
one. It is of a kind that may be a network's.

`python -m support.oddfs BACKING MOUNT` serves it.
"""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest


# The most that a read gives.
SHORT = 4000


@contextlib.contextmanager
def mounted(backing: pathlib.Path, mount: pathlib.Path) -> Iterator[pathlib.Path]:
    """Mounts it; skips the test where there is no FUSE."""
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("there is no /dev/fuse that may be used")
    backing.mkdir()
    mount.mkdir()
    command = [sys.executable, "-m", "support.oddfs", backing, mount]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes) as server:
        try:
            while not os.path.ismount(mount):
                if server.poll() is not None:
                    pytest.skip(f"FUSE cannot be had: {server.stdout.read()[-300:]}")
                time.sleep(0.02)
            yield mount
        finally:
            for call in (["umount", "-l"], ["fusermount", "-uz"]):
                with contextlib.suppress(OSError):
                    subprocess.run([*call, mount], capture_output=True)
            server.terminate()


def _main(backing: str, mount: str) -> None:
    import mfusepy

    class Odd(mfusepy.Operations):
        use_ns = True

        def _at(self, path):
            place = backing
            for part in filter(None, path.split("/")):
                if not os.path.lexists(f"{place}/{part}"):
                    for name in os.listdir(place):
                        if name.casefold() == part.casefold():
                            part = name
                place = f"{place}/{part}"
            return place

        def getattr(self, path, fh=None):
            found = os.lstat(self._at(path))
            out = {key: getattr(found, key) for key in dir(found) if "st_" in key}
            times = ("atime", "mtime", "ctime")
            return out | {f"st_{key}": out[f"st_{key}_ns"] for key in times}

        def readdir(self, path, fh):
            return [".", "..", *os.listdir(self._at(path))]

        def open(self, path, flags):
            return os.open(self._at(path), flags & ~os.O_NOFOLLOW)

        def create(self, path, mode, fi=None):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            return os.open(self._at(path), flags, mode)

        def read(self, path, size, offset, fh):
            return os.pread(fh, min(size, SHORT), offset)

        def write(self, path, data, offset, fh):
            return os.pwrite(fh, data, offset)

        def truncate(self, path, length, fh=None):
            os.truncate(self._at(path), length)
            return 0

        def release(self, path, fh):
            os.close(fh)
            return 0

        def mkdir(self, path, mode):
            os.mkdir(self._at(path), mode)
            return 0

        def rmdir(self, path):
            os.rmdir(self._at(path))
            return 0

        def unlink(self, path):
            os.unlink(self._at(path))
            return 0

        def rename(self, old, new):
            os.rename(self._at(old), self._at(new))
            return 0

        def chmod(self, path, mode):
            raise OSError(errno.EPERM, "")

        def link(self, target, source):
            raise OSError(errno.EMLINK, "")

        def fsync(self, path, datasync, fh):
            os.fsync(fh)
            return 0

        def fsyncdir(self, path, datasync, fh):
            raise OSError(errno.EINVAL, "")

    class Mount(mfusepy.FUSE):
        def rename_fuse_3(self, old, new, flags):  # The flags would be dropped.
            return -errno.EINVAL if flags else super().rename_fuse_3(old, new, flags)

    how = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    Mount(Odd(), mount, foreground=True, nothreads=True, direct_io=True, **how)


if __name__ == "__main__":
    _main(*sys.argv[1:])
