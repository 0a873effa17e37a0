"""Scripts in processes of their own, as `python -c` runs them.

They are forks of a process that has imported what most of them need: that takes longer
than most of what they do. Nothing in it has begun to compute, and its forks end as any
interpreter does.
"""

import atexit
import contextlib
import functools as ft
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent import futures
from typing import NamedTuple


# In a fork the loop ends, and the script is run where a script is.
_ORIGIN = """
import json, os, signal, socket, sys
import equinox, jax.numpy, support.whole
_asked = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    _text, _files, _, _ = socket.recv_fds(_asked, 2**20, 3)
    if not _text:
        os._exit(0)
    _pid = os.fork()
    if _pid == 0:
        # It waits for the fork that runs the script, and says how that has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _pid = os.fork()
        if _pid == 0:
            break
        os.write(_files[0], b"%d\\n" % _pid)
        os.closerange(0, 3)
        for _file in _files[1:]:
            os.close(_file)
        os.write(_files[0], b"%d\\n" % os.waitpid(_pid, 0)[1])
        os._exit(0)
    for _file in _files:
        os.close(_file)
_asked.close()
os.dup2(_files[1], 1)
os.dup2(_files[2], 2)
for _file in _files:
    os.close(_file)
sys.stdout = open(1, "w", closefd=False)
sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)
_script = json.loads(_text)
os.environ.clear()
os.environ.update(_script["environment"])
os.chdir(_script["directory"])
sys.argv = ["-c", *_script["arguments"]]
exec(compile(_script["code"], "<string>", "exec"))
"""


PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"


def program(name: str) -> str:
    """The code of a program of tests/programs."""
    return (PROGRAMS / f"{name}.py").read_text()


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Script:
    """A running script, with some of the methods of a `subprocess.Popen`."""

    def __init__(
        self, code: str, arguments: tuple[object, ...], environment: dict[str, str]
    ):
        mine, theirs = zip(os.pipe(), os.pipe(), os.pipe())
        asked = {
            "code": textwrap.dedent(code),
            "arguments": list(map(str, arguments)),
            "environment": {**os.environ, **environment},
            "directory": os.getcwd(),
        }
        origin = _origin(frozenset(environment.items()))
        socket.send_fds(origin, [json.dumps(asked).encode()], theirs)
        for fd in theirs:
            os.close(fd)
        self._state = os.fdopen(mine[0], "rb", 0)
        self.stdout, self.stderr = map(os.fdopen, mine[1:])
        self.pid = int(self._state.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self._state.readline()))
        return self.returncode

    def communicate(self, timeout: float = threading.TIMEOUT_MAX) -> Done:
        """Waits for its end, and kills it if that does not come."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with futures.ThreadPoolExecutor(1) as pool:
            err = pool.submit(self.stderr.read)
            out = self.stdout.read()
        timer.cancel()
        return Done(self.wait(), out, err.result())

    def send_signal(self, number: int) -> None:
        is_over = select.select([self._state], [], [], 0)[0]
        if self.returncode is None and not is_over:
            # It may be over, and that not be told yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.wait()
        for file in (self._state, self.stdout, self.stderr):
            file.close()


@ft.cache
def _origin(environment: frozenset[tuple[str, str]]) -> socket.socket:
    """A socket to the process that is forked, which ends with this one. What is
    imported may have looked at the environment."""
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-c", _ORIGIN, str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env={**os.environ, **dict(environment)}
    )
    theirs.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def start(code: str, *arguments: object, **environment: str) -> Script:
    """Starts a script with what is added to the environment."""
    return Script(code, arguments, environment)


def run(code: str, *arguments: object, **environment: str) -> Done:
    with start(code, *arguments, **environment) as script:
        return script.communicate()
