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
import tempfile
import textwrap
import threading
from concurrent import futures
from typing import NamedTuple


# In a fork the loop ends, and the script is run where a script is. No collection of
# garbage in it looks at what was imported: a fork would copy the memory of all that.
_ORIGIN = """
import gc, json, os, select, signal, socket, sys
import equinox, jax.numpy, support.whole
gc.collect()
gc.freeze()
_listening, _owner = (socket.socket(fileno=int(x)) for x in sys.argv[1:])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if _owner in select.select([_listening, _owner], [], [])[0]:
        os._exit(0)
    _asked, _ = _listening.accept()
    _text, _files, _, _ = socket.recv_fds(_asked, 2**20, 4)
    while _more := _asked.recv(2**20):
        _text += _more
    _asked.close()
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
_listening.close()
_owner.close()
for _number in range(3):
    os.dup2(_files[1 + _number], _number)
for _file in _files:
    os.close(_file)
sys.stdin = open(0, closefd=False)
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
        self,
        code: str,
        arguments: tuple[object, ...],
        environment: dict[str, str],
        is_heard: bool = True,
    ):
        mine, theirs = zip(os.pipe(), os.pipe()[::-1], os.pipe(), os.pipe())
        if not is_heard:
            os.dup2(2, theirs[3])  # Its errors are among those of this process.
        asked = {
            "code": textwrap.dedent(code),
            "arguments": list(map(str, arguments)),
            "environment": {**os.environ, **environment},
            "directory": os.getcwd(),
        }
        with socket.socket(socket.AF_UNIX) as origin:
            origin.connect(_origin(_early(environment)))
            text = json.dumps(asked).encode()
            # The files come with the first byte.
            socket.send_fds(origin, [text[:1]], theirs)
            origin.sendall(text[1:])
        for fd in theirs:
            os.close(fd)
        self._state = os.fdopen(mine[0], "rb", 0)
        self.stdin = os.fdopen(mine[1], "w")
        self.stdout, self.stderr = map(os.fdopen, mine[2:])
        self.pid = int(self._state.readline())
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(int(self._state.readline()))
        return self.returncode

    def communicate(self, timeout: float = threading.TIMEOUT_MAX) -> Done:
        """Waits for its end, and kills it if that does not come. It reads no more."""
        self.stdin.close()
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with futures.ThreadPoolExecutor(1) as pool:
            err = pool.submit(self.stderr.read)
            out = self.stdout.read()
        timer.cancel()
        return Done(self.wait(), out, err.result())

    def is_running(self) -> bool:
        is_over = select.select([self._state], [], [], 0)[0]
        return self.returncode is None and not is_over

    def send_signal(self, number: int) -> None:
        if self.is_running():
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
        for file in (self._state, self.stdin, self.stdout, self.stderr):
            file.close()


def _early(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    """What of an environment differs here, and is looked at as an interpreter starts,
    or as the package is imported. XLA reads its flags when it begins to compute."""
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name != "XLA_FLAGS" and os.environ.get(name) != value
    )


@ft.cache
def _origin(environment: frozenset[tuple[str, str]]) -> str:
    """The address of the process that is forked, which ends with this one."""
    if not environment and _shared:
        return _shared[0]
    directory = tempfile.TemporaryDirectory()
    address = os.path.join(directory.name, "origin")
    mine, theirs = socket.socketpair()
    with theirs, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        files = [listening.fileno(), theirs.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-c", _ORIGIN, *map(str, files)],
            pass_fds=files,
            env={**os.environ, **dict(environment)},
        )

    def end() -> None:
        mine.close()
        process.wait()
        directory.cleanup()

    atexit.register(end)
    return address


# The address of the process that others have started, if they have.
_shared: list[str] = []


def share() -> str:
    """Starts the process that is forked, for several that `use` it."""
    return _origin(frozenset())


def use(address: str) -> None:
    """Has scripts be forks of a process that another one `share`s."""
    _shared[:] = [address]


def start(code: str, *arguments: object, **environment: str) -> Script:
    """Starts a script with what is added to the environment."""
    return Script(code, arguments, environment)


_MODULE = "import runpy; runpy.run_module({!r}, None, '__main__', True)"


def server(module: str, *arguments: object, **environment: str) -> Script:
    """Starts a module as `python -m` does, which lines on its `stdin` tell what to do.
    Its errors are written where those of this process are."""
    return Script(_MODULE.format(module), arguments, environment, is_heard=False)


def run(code: str, *arguments: object, **environment: str) -> Done:
    with start(code, *arguments, **environment) as script:
        return script.communicate()


def run_module(module: str, *arguments: object, **environment: str) -> Done:
    """Runs a module as `python -m` does."""
    return run(_MODULE.format(module), *arguments, **environment)
