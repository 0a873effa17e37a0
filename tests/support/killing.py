"""Kills a process at a chosen file-system call, by tracing it. No test is here.

`Server` is a process that has imported everything and forks a child for each save, as
importing takes a second. It traces the child with ptrace, which stops every thread of
it at every system call, so calls that TensorStore makes count too. The n-th stop that
is at the beginning or the end of a call that changes a file system is where SIGKILL
hits, before the call or after it. Linux only.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from support import scripts


# The calls that change a file system, or keep what was changed.
_x86_64 = {
    1: "write",
    18: "pwrite64",
    20: "writev",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    77: "ftruncate",
    82: "rename",
    83: "mkdir",
    84: "rmdir",
    86: "link",
    87: "unlink",
    257: "openat",
    258: "mkdirat",
    263: "unlinkat",
    264: "renameat",
    265: "linkat",
    296: "pwritev",
    306: "syncfs",
    316: "renameat2",
}
_aarch64 = {
    32: "flock",
    34: "mkdirat",
    35: "unlinkat",
    37: "linkat",
    38: "renameat",
    46: "ftruncate",
    56: "openat",
    64: "write",
    66: "writev",
    68: "pwrite64",
    70: "pwritev",
    82: "fsync",
    83: "fdatasync",
    267: "syncfs",
    276: "renameat2",
}
_calls = {"x86_64": _x86_64, "aarch64": _aarch64}.get(platform.machine(), {})
CAN_TRACE = sys.platform == "linux" and bool(_calls)

_TRACEME, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 24, 0x4200, 0x420E
# TRACESYSGOOD, TRACECLONE, EXITKILL.
_OPTIONS = 0x1 | 0x8 | 0x100000
_WALL = 0x40000000
_ENTRY, _EXIT = 1, 2


class _Info(ctypes.Structure):
    # The beginning of `struct ptrace_syscall_info`.
    _fields_ = [
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]


def _ptrace(request: int, pid: int, address: int, data: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 2 + [ctypes.c_void_p] * 2
    libc.ptrace.restype = ctypes.c_long
    out = libc.ptrace(request, pid, address, data)
    if out < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return out


def run_traced(job: Callable[[], Any], at: int | None) -> list[str]:
    """Runs a job in a child and kills it at a stop (None: lets it end).

    Returns the stops that it came to, in words.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _ptrace(_TRACEME, 0, 0, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            job()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.waitpid(pid, _WALL)
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)
    _ptrace(_SYSCALL, pid, 0, None)
    stops: list[str] = []
    inside: dict[int, str | None] = {}
    info = _Info()
    while True:
        tid, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if tid == pid:
                if at is None and status != 0:
                    raise RuntimeError(f"the job ended with status {status}")
                return stops
            continue
        number, deliver = os.WSTOPSIG(status), None
        if number == signal.SIGTRAP | 0x80:
            try:
                _ptrace(_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.byref(info))
            except ProcessLookupError:
                continue  # It has been killed with another thread that had stopped.
            name = None
            when = "before" if info.op == _ENTRY else "after"
            if info.op == _ENTRY:
                name = _calls.get(info.nr)
                if name == "openat" and not info.args[2] & os.O_CREAT:
                    name = None
                inside[tid] = name
            elif info.op == _EXIT:
                name = inside.pop(tid, None)
            if name is not None:
                stops.append(f"{when} {name}")
                if len(stops) == at:
                    os.kill(pid, signal.SIGKILL)
                    continue
        elif number not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = number
        try:
            _ptrace(_SYSCALL, tid, 0, deliver)
        except ProcessLookupError:
            pass  # It has been killed.


def run(
    job: Callable[[], Any], seconds: float | None, pid_file: str | None
) -> list[str]:
    """Runs a job in a child and kills it after a time (None: lets it end).

    With a `pid_file` it is somebody else who kills it, who finds its number there.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if pid_file is not None:
                pathlib.Path(pid_file).write_text(str(os.getpid()))
            job()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    is_killed = pid_file is not None and status == signal.SIGKILL
    if seconds is None and status != 0 and not is_killed:
        raise RuntimeError(f"the job ended with status {status}")
    return []


class Server:
    """A process that saves `trees(number)` in children, and kills them."""

    def __enter__(self):
        self._process = scripts.server("support.killing", JAX_PLATFORMS="cpu")
        return self

    def __exit__(self, *_):
        with self._process:
            self._process.communicate()

    def save(
        self,
        path: str | os.PathLike[str],
        tree: str,
        layout: str,
        at: int | None = None,
        seconds: float | None = None,
        trace: bool = True,
        rename: bool = True,
        pid_file: str | None = None,
        functions: str | os.PathLike[str] | None = None,
    ) -> list[str]:
        """Does what `save` does, with the functions of a checkpoint if that is given,
        and kills it at a stop or after a time.

        Without both it is traced to its end, or only waited for. Returns its stops.
        """
        job = [os.fspath(path), tree, layout, rename, functions and str(functions)]
        request = [job, at, seconds, trace, pid_file]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def make(tree: str) -> dict[str, Any]:
    """The trees that are saved: `a`, `b` like `a`, and `c` unlike both. What is in
    capitals has an array that a function is of."""
    import numpy as np

    value = ord(tree)
    if tree.isupper():
        import jax

        w = jax.device_put(np.full(2, value, np.float32))
        return {**make(tree.lower()), "step": value, "w": w}
    if tree == "c":
        names = {"bias": np.full((3, 5), value, np.int8), "step": value}
        return {"other": names, "x": np.arange(4000.0) + value}
    both = np.full(3000, value, np.float32)
    return {
        "x": np.arange(value, value + 9000),
        "layers": [{"w": np.full((40, 3), value / 2), "b": both} for _ in range(2)],
        "step": value,
    }


def save(
    path: str,
    trees: str,
    layout: str,
    rename: bool = True,
    functions: str | None = None,
) -> None:
    """Saves `make` of each letter of `trees`, one after the other; a `+` adds the files
    for Orbax to what is there."""
    import eqx_ckpt as ec

    stored = {**ec.open(functions).functions} if functions else None
    chunks = lambda name, shape, dtype: (4096,) if name == "x" else None
    with contextlib.nullcontext() if rename else without_rename():
        for tree in trees:
            if tree == "+":
                ec.write_orbax(path)
                continue
            ec.tree_serialise_leaves(
                path, make(tree), layout=layout, chunks=chunks, functions=stored
            )


# What is at the path before, and what is saved there.
CASES = {"first": (None, "a"), "overwrite": ("a", "b"), "other": ("a", "c")}


def what_is_at(path: Any) -> str | None:
    """Which of the trees is at a path: all of it, bit for bit, and its functions are of
    it. None: no checkpoint."""
    import eqx_ckpt as ec
    from support.helpers import assert_alike

    try:
        ckpt = ec.open(path)
    except FileNotFoundError:
        return None
    tree = ec.materialise(ckpt.tree)
    name = chr(tree["step"] if "step" in tree else tree["other"]["step"])
    assert_alike(tree, make(name))
    assert ckpt.functions.keys() == ({"f"} if name.isupper() else set())
    for function in ckpt.functions.values():
        assert function(tree["w"]).tolist() == [ord(name) ** 2] * 2
    return name


@contextlib.contextmanager
def without_rename() -> Iterator[None]:
    """Paths are directories as if they were in an object store: all is written by
    TensorStore, which knows no renames of what was written."""
    from eqx_ckpt._kernel._storage import _root
    from eqx_ckpt._stores._buckets import BucketBackend

    resolve = _root.resolve
    plain = lambda path: os.fspath(path).removeprefix("file://")
    _root.resolve = lambda path, *_: BucketBackend(f"file://{plain(path)}")
    try:
        yield
    finally:
        _root.resolve = resolve


def main() -> None:
    import functools as ft

    import jax
    import numpy  # noqa: F401

    from support import whole  # noqa: F401

    assert not jax._src.xla_bridge.backends_are_initialized()
    for line in sys.stdin:
        given, at, seconds, trace, pid_file = json.loads(line)
        job = ft.partial(save, *given)
        traced = trace and seconds is None
        stops = run_traced(job, at) if traced else run(job, seconds, pid_file)
        print(json.dumps(stops), flush=True)


if __name__ == "__main__":
    main()
