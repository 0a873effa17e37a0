"""Reads that fail: the kernel refuses the n-th read below a directory, with any errno.

`Refusing` runs a function in a child of the process, and answers each of the child's
system calls that reads (seccomp's user notifications): so TensorStore's own reads fail
as Python's do, and as those of a bad disk would. Linux on x86-64 only. No test is here.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import select
import socket
import struct
import sys
import traceback


_OPENAT, _FSTATAT, _STATX, _MMAP = 257, 262, 332, 9
_PREAD, _PREADV, _GETDENTS = 17, 295, 217
_BY_PATH = {_OPENAT: 2, _FSTATAT: None, _STATX: None}
_BY_FILE = {_PREAD: 0, _PREADV: 0, _GETDENTS: 0, _MMAP: 4}
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

ERRORS = (
    errno.EIO,
    errno.EACCES,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
)


def is_possible():
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _filter():
    """Lets the kernel ask about these calls, and returns where it asks."""
    load, equal, answer = 0x20, 0x15, 0x06
    calls = [*_BY_PATH, *_BY_FILE]
    rows = [(load, 0, 0, 0)]
    for left, number in zip(range(len(calls), 0, -1), calls):
        rows.append((equal, left, 0, number))
    rows += [(answer, 0, 0, _ALLOW), (answer, 0, 0, _NOTIFY)]
    program = b"".join(struct.pack("HBBI", *row) for row in rows)
    libc = ctypes.CDLL(None, use_errno=True)
    rows_at = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(rows_at))
    libc.prctl(38, 1, 0, 0, 0)  # No new privileges.
    listener = libc.syscall(317, 1, 8, ctypes.create_string_buffer(head))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "there are no user notifications here")
    return listener


class Refusing:
    """What the child holds: says which read is to fail."""

    def __init__(self, asking):
        self._asking = asking

    def _ask(self, **what):
        self._asking.sendall(json.dumps(what).encode() + b"\n")
        return json.loads(self._asking.recv(4096))

    @contextlib.contextmanager
    def at(self, number, error, forever):
        """The `number`-th read from here on fails, and with `forever` each after it.
        What it gives has afterwards in `hit` which call it was."""
        fault = Fault()
        self._ask(number=number, error=error, forever=forever)
        try:
            yield fault
        finally:
            fault.hit = self._ask(number=0)


class Fault:
    hit = None


def run(directory, work):
    """Calls `work(refusing)` in a child of this process, whose reads below `directory`
    may be refused, and exits as it does. To be called before anything has threads."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            here.close()
            work(lambda: _begin(there))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    there.close()
    with contextlib.suppress(ConnectionError, EOFError):
        _, (listener,), _, _ = socket.recv_fds(here, 1, 1)
        here.sendall(b"1")
        _answer(here, listener, child, os.fspath(directory).encode())
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def _begin(asking):
    listener = _filter()
    socket.send_fds(asking, [b"1"], [listener])
    os.close(listener)
    asking.recv(1)
    return Refusing(asking)


def _answer(asking, listener, child, directory):
    memory = os.open(f"/proc/{child}/mem", os.O_RDONLY)
    left, error, forever, hit = 0, 0, False, None
    poll = select.poll()
    poll.register(asking, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if asking.fileno() in ready:
            line = asking.recv(4096)
            if not line:
                return
            wanted = json.loads(line)
            asking.sendall(json.dumps(hit).encode())
            left, hit = wanted["number"], None
            error, forever = wanted.get("error"), wanted.get("forever")
        if not ready.get(listener, 0) & select.POLLIN:
            continue
        notice = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError:
            continue
        number, _, _, call, _, _, *arguments = struct.unpack("<QIIiIQ6Q", notice)
        refused = False
        if left:
            path = _path(child, memory, call, arguments)
            if path.startswith(directory):
                left -= 1
                refused = left == 0
                if refused:
                    hit = hit or [call, path.decode(errors="replace")]
                    left = int(bool(forever))
        answer = struct.pack("<QqiI", number, 0, -error if refused else 0, not refused)
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _ANSWER, bytearray(answer))


def _path(child, memory, call, arguments):
    """What a call reads; nothing for one that writes."""
    file = _BY_FILE.get(call)
    if file is None:
        flags = _BY_PATH[call]
        if flags is not None and arguments[flags] & _WRITES:
            return b""
        path, _, _ = os.pread(memory, 4096, arguments[1]).partition(b"\0")
        if path:
            return path
        file = 0
    try:
        return os.readlink(f"/proc/{child}/fd/{arguments[file]}".encode())
    except OSError:
        return b""
