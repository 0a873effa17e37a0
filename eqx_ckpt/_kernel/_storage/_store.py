"""Reads of all kinds of store alike, and the meaning of their answers."""

import contextlib
import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorstore as ts

from .._errors import DamagedError, MissingError
from .._format import _files
from .._runtime import _threads
from .._runtime._threads import Outcome
from . import _local_files
from ._backend import Backend, Value
from ._local import LocalDirectory


T = TypeVar("T")

# Requests to an object store that are under way at a time.
_REQUESTS = 16


def odd(root: object, key: str, said: str) -> OSError:
    """The error of an answer that says nothing about what is stored."""
    what = f"`{root}/{key}`" if key else f"`{root}`"
    return OSError(
        f"The store gives an answer about {what} that makes no sense: {said}. It says "
        "nothing about what is stored. Try again. If this stays, something between "
        "here and the store, such as a proxy or a cache, may change its answers."
    )


def answer(root: Any, key: str, future: Any, soon: bool = False) -> Any:
    """The answer to a request about a file. `soon`: as of `Backend.wait`.

    **Raises:** `OSError` for what nobody has asked for; a `MissingError` for a file
    that ends before what was asked for does.
    """
    try:
        return root.wait(future, soon)
    except OSError as e:
        if key:
            e.add_note(f"It is about `{root}/{key}`.")
        raise
    except DamagedError:
        raise
    except ValueError as e:
        if not root.is_remote:
            raise  # A file here is what it is: a link, or no regular file.
        raise odd(root, key, str(e).splitlines()[0]) from e


def read_answer(root: object, key: str, future: object, soon: bool = False) -> Any:
    """The bytes that were read of a file, as `value`, unless `state` is "missing"."""
    got = answer(root, key, future, soon)
    if got.state == "unspecified":
        raise odd(root, key, "it is unchanged (304 or 412), which was not asked")
    return got


def finish_write(root: Backend, key: str, future: object) -> bytes:
    """Waits until a file is written or deleted, and gives its generation. Each write to
    a store that is on no condition ends here: TensorStore takes a refusal (304 or 412)
    for a success."""
    stamp = answer(root, key, future)
    if not stamp.generation:
        raise odd(root, key, "a write on no condition was refused (304 or 412)")
    return stamp.generation


def look_twice(
    root: Backend, look: Callable[[], T], is_good: Callable[[T], bool] = lambda _: True
) -> T:
    """The result of a look at files. A store may give one wrong answer. So a file there
    counts as damaged or missing only if a second look says so too."""
    if root.is_remote:
        with contextlib.suppress(ValueError, FileNotFoundError):
            found = look()
            if is_good(found):
                return found
    return look()


def gather(root: Backend, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that look at files below a root: in turn, or some at a time
    in an object store, where each is a request."""
    if root.is_remote:
        return _threads.gather_requests(jobs, _REQUESTS)
    return _threads.gather(jobs, 1)


def each(root: Backend, look: Callable[..., T], *items: Iterable[Any]) -> list[T]:
    """`map(look, *items)`, whose calls are made as `gather` does jobs."""
    return gather(root, [ft.partial(look, *row) for row in zip(*items)])


def read_bytes(root: Backend, key: str, start: int, stop: int) -> bytes:
    """A range of the bytes of a file, which are known to be few.

    **Raises:** `MissingError` if the file ends before.
    """
    into = np.empty(stop - start, np.uint8)
    if root.read_into(key, start, into) < into.nbytes:
        raise MissingError(f"the end of `{key}` is missing")
    return into.tobytes()


def ahead(
    root: Backend, jobs: Sequence[Callable[[], Any]]
) -> Sequence[Callable[[], Any]]:
    """Jobs at files below a root, of which not all may be needed. Each is done when it
    is called, and raises then; in a store all are done now, together."""
    if not root.is_remote:
        return jobs
    done = gather(root, [ft.partial(_outcome, job) for job in jobs])
    return [outcome.result for outcome in done]


def ahead_in_directory(
    root: Backend, jobs: Sequence[Callable[[], Any]]
) -> Sequence[Callable[[], Any]]:
    """Starts jobs ahead, unless the root is likely a file: the first job is then
    enough."""
    return jobs if is_likely_file(root) else ahead(root, jobs)


def is_likely_file(root: Backend) -> bool:
    """Whether the name of a root has a suffix."""
    return "." in root.split()[1]


def _outcome(job: Callable[[], Any]) -> Outcome[Any]:
    out: Outcome[Any] = Outcome()
    try:
        out.set_result(job())
    except Exception as e:
        out.set_exception(e)
    return out


def tops_of(keys: Iterable[str]) -> dict[str, bool]:
    """The first parts of keys, and whether each is of a directory."""
    tops: dict[str, bool] = {}
    for key in keys:
        first, slash, _ = key.partition("/")
        if not _files.is_of_system(first):
            tops[first] = bool(slash)
    return tops


def is_still(root: Backend, key: str, found: Value | None) -> bool:
    """Whether a file is what was found, or is still not there."""
    now = root.read(key)
    return (now and now.data) == (found and found.data)


def bytes_read() -> int:
    """The bytes that have been read from files in this process, by `pread` and by
    memory maps of TensorStore."""
    total = sum(_local_files.counts.copy().values())
    # By their names: TensorStore leaks a little of each metric that it is asked for.
    for name in (
        "/tensorstore/kvstore/file/bytes_read",
        "/tensorstore/file/mmap_bytes",
    ):
        for metric in ts.experimental_collect_matching_metrics(name):
            if metric["name"] == name:
                total += sum(value.get("value", 0) for value in metric["values"])
    return total


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Counts the bytes that are read from files in a `with` block.

    It shows what a load costs: arrays, digests and the index together. Reads by this
    library and by TensorStore count, memory-mapped ones too, in all threads of the
    process. Requests to object stores and servers do not count, nor what is in
    `memory://`.

    **Returns:** a context manager. Its value is a function that returns the number of
    bytes so far; after the block it returns the number of the whole block.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> ec.tree_serialise_leaves("two", {"a": jnp.ones(1000), "b": jnp.ones(9000)})
        >>> ckpt = ec.open("two")
        >>> with ec.counting() as bytes_read:
        ...     a = ckpt["a"].read()
        >>> a.nbytes, 4_000 <= bytes_read() < 5_000
        (4000, True)

        ```
    """
    start = bytes_read()
    end: int | None = None
    try:
        yield lambda: (bytes_read() if end is None else end) - start
    finally:
        end = bytes_read()


def is_file(root: Backend) -> bool:
    """Whether there is a file at a place, whatever it takes to know."""
    above, key = root.split()
    return bool(key) and bool(above.stamp(key))


def folds_case(root: Backend) -> bool:
    """Whether names that differ by case only are one."""
    return isinstance(root, LocalDirectory) and _local_files.folds_case(root.path)
