"""The names of insides that tests change or watch, in one place.

Each is looked up when it is used, so one that has moved fails in the tests that use it.
`patch` is a `pytest.MonkeyPatch`.
"""

import contextlib
import functools
import importlib
import os
import pathlib
import pkgutil
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from eqx_ckpt._kernel._limits import limits


# Constants that are no limits, or from which rooms derive others as they are imported.
CONSTANTS = {
    "codecs_of_tensorstore": "_kernel._format._template._ZARR_CODECS",
    "index_bytes": "_kernel._format._json.MAX_INDEX",
    "arrays_made_one_by_one": "_kernel._tree._host_copy._MANY",
    "prng_kinds_of_orbax": "_orbax._metadata._key_impls",
    "small_bytes_saved": "_kernel._save._payload._SMALL",
    "piece_bytes": "_kernel._save._payload._PIECE",
    "small_bytes_of_lazies": "_kernel._save._lazies._SMALL",
    "bytes_ahead_of_lazies": "_kernel._save._lazies._AHEAD",
    "batch_bytes_of_streams": "_kernel._save._streams._BATCH_BYTES",
    "min_compressed_bytes": "_kernel._save._chunking._MAX_UNCOMPRESSED",
    "min_share_reused": "_kernel._save._reuse._MIN_SHARE",
    "max_linked_files": "_kernel._save._reuse._MAX_LINKED_FILES",
    "small_bytes_loaded": "_kernel._load._small_leaves._JOINT_BYTES",
    "gap_bytes": "_kernel._load._small_leaves._GAP_BYTES",
    "local_runs": "_kernel._load._small_leaves._LOCAL_RUNS",
    "leaves_per_run": "_kernel._load._small_leaves._LEAVES_PER_RUN",
    "much_bytes_of_rows": "_kernel._load._row_leaf._MUCH",
    "mapped_bytes": "_kernel._load._row_leaf._MAPPED",
    "rows_looked_at": "_kernel._load._row_leaf._LOOK",
    "rows_numbered": "_kernel._load._row_leaf._NUMBERED",
    "small_bytes_made": "_kernel._tree._from_host.SMALL_BYTES",
    "kept_bytes": "_kernel._load._kept._BYTES",
    "pauses_of_http": "_stores._http._PAUSES",
    "trials_of_rules": "_graft._find_rules._MAX_CHECK_TRIALS",
}

# Values of limits and constants that choose how a small tree is saved and loaded.
THRESHOLDS: dict[str, tuple[int, ...]] = {
    "max_files": (1, 2, 5, 32, 1000),
    "min_file_bytes": (64, 1024, 4096, 2**26),
    "node_entries": (3, 2048),
    "singly_synced_files": (0, 256),
    "joint_digest_bytes": (64, 2**20),
    "queued_copy_bytes": (1024, 2**31),
    "small_bytes_saved": (64, 1024, 2**16),
    "piece_bytes": (256, 4096, 2**18),
    "small_bytes_of_lazies": (64, 2**16),
    "bytes_ahead_of_lazies": (1024, 2**24),
    "batch_bytes_of_streams": (256, 2**18),
    "min_compressed_bytes": (64, 2**16),
    "min_share_reused": (1, 64, 10**6),
    "max_linked_files": (1, 128),
    "small_bytes_loaded": (64, 2**16),
    "gap_bytes": (0, 64, 4096),
    "local_runs": (1, 128),
    "leaves_per_run": (1, 8),
    "much_bytes_of_rows": (1024, 2**26),
    "mapped_bytes": (64, 2**20),
    "rows_looked_at": (4, 2**14),
    "rows_numbered": (16, 2**20),
    "small_bytes_made": (64, 2**16),
    "kept_bytes": (256, 2**26),
}

CALLS = {
    "find the latest step": "_kernel._run._steps.Steps.latest",
    "write a save": "_kernel._save._serialise.write",
    "publish": "_kernel._save._publish.publish",
    "find where others write": "_kernel._save._publish.await_location",
    "tell what was written": "_kernel._save._notes.leave_note",
    "plan the functions of a save": "_kernel._rooms.plan_functions",
    "delete files at the root of another save": "_kernel._save._inplace._delete_side",
    "delete what is left": "_kernel._save._leftovers.delete_abandoned",
    "delete files of a store": "_kernel._storage._objects.ObjectStore.delete_files",
    "keep files of the last save": "_kernel._save._reuse.link_unchanged",
    "name a directory beside": "_kernel._save._leftovers.directory_of",
    "is a zip": "_kernel._rooms.is_archive",
    "files of Orbax": "_orbax._write._files_of",
    "add to the history": "_kernel._run._history.History.append",
    "mark a step": "_kernel._run._marks.write_mark",
    "start in the background": "_kernel._save._background.start",
    "start a thread": "_kernel._runtime._threads.Worker.start",
    "run in the background": "_kernel._save._background._work_on",
    "stage": "_kernel._tree._host_copy.stage",
    "largest chunk": "_kernel._storage._arrays.largest_chunk",
    "stage a part": "_kernel._tree._host_copy._stage_part",
    "send small leaves": "_kernel._tree._host_copy.send_together",
    "send to the host": "_kernel._tree._host_copy._send",
    "is on the CPU": "_kernel._tree._host_copy._on_cpu",
    "bytes of an array": "_kernel._tree._host_copy.to_host",
    "bytes of regions": "_kernel._tree._host_copy.to_host_by_regions",
    "read from a file": "_kernel._storage._local.LocalDirectory.read_into",
    "read parts of a file": "_kernel._storage._local.LocalDirectory.read_parts",
    "read as another format": "_formats._readers.open_foreign",
    "make a record": "_kernel._format._leaves.Leaves.record",
    "make arrays together": "_kernel._tree._from_host.PlainLeaves.make",
    "put arrays as JAX does": "_kernel._tree._from_host._put",
    "read digests": "_kernel._load._source.Source.read_beside",
    "open a path": "_kernel._load._open.open_path",
    "read leaves": "_kernel._load._read_leaves.read_leaves",
    "make a lazy leaf": "_kernel._load._lazy.lazy_of",
    "read the head of an index": "_kernel._format._index_summary.summarise",
    "stamp of a file": "_kernel._storage._local.LocalDirectory.stamp",
    "look what is there": "_kernel._storage._local.LocalDirectory.entry",
    "names in a step": "_kernel._run._step_state.names_in",
    "make a directory": "_kernel._storage._local.LocalDirectory._make_directory",
    "exchange": "_kernel._storage._local_files.exchange",
    "lock": "_kernel._storage._directory_lock.DirectoryLock",
    "sync a directory": "_kernel._storage._local_files.sync_directory",
    "sync a file system": "_kernel._storage._local_files.syncfs",
    "sync together": "_kernel._storage._local.LocalDirectory.synced_together",
    "syncs report errors": "_kernel._storage._local_files._reports_all",
    "type of a file system": "_kernel._storage._local_files._type_of",
    "names are folded": "_kernel._storage._local_files.folds_case",
    "where a server is": "_stores._requests._server",
    "keys of a store in memory": "_kernel._storage._objects.ObjectStore.kv",
    "URL of a place": "_kernel._storage._root.place",
    "account of a save": "_kernel._save._agree._account",
    "end of a reshard": "_reshard._loads._arrived",
    "program of a reshard": "_reshard._moves.compiled",
    "read a leaf to draw": "_edit._sample.read_sample",
}


def _found(name: str) -> Any:
    return pkgutil.resolve_name(f"eqx_ckpt.{name}")


def lost() -> list[str]:
    """The names in this module that are not there any more."""
    text, out = pathlib.Path(__file__).read_text(), []
    for name in sorted({*re.findall(r'"(_[a-z_]+(?:\.\w+)+)"', text)}):
        try:
            _found(name)
        except (ImportError, AttributeError):
            out.append(name)
    return out


def limit(patch: pytest.MonkeyPatch, **values: Any) -> None:
    """Changes limits, so that a little is much."""
    for name, value in values.items():
        if name in CONSTANTS:
            patch.setattr(f"eqx_ckpt.{CONSTANTS[name]}", value)
        else:
            patch.setattr(limits, name, value)


def wrap(patch: pytest.MonkeyPatch, call: str, make: Callable[[Any], Any]) -> None:
    """Puts what `make` makes of one of `CALLS` in its place."""
    patch.setattr(f"eqx_ckpt.{CALLS[call]}", make(_found(CALLS[call])))


def replace(patch: pytest.MonkeyPatch, call: str, new: Any) -> None:
    wrap(patch, call, lambda old: new)


def watch(patch: pytest.MonkeyPatch, call: str, see: Callable[..., Any]) -> None:
    """Lets `see` have the arguments of each call before it is made."""

    def make(old: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            see(*args, **kwargs)
            return old(*args, **kwargs)

        return watched

    wrap(patch, call, make)


def close_layout_to_others(patch: pytest.MonkeyPatch, layout: str) -> None:
    """As if only we read a layout."""
    layouts = _found("_kernel._format._layouts.LAYOUTS")
    patch.setitem(layouts, layout, layouts[layout]._replace(is_zarr=False))


def sync_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    """As on a file system that is synced as a whole, and says what it has lost."""
    replace(patch, "syncs report errors", True)
    replace(patch, "type of a file system", lambda directory: "ext4")


def hints_for_names(owner: str) -> dict[str, str]:
    """What stands here for the names of other libraries, of a class or the module."""
    return _found("_kernel._runtime._elsewhere._ATTRIBUTES")[owner]


def hints_for_arguments() -> list[tuple[str, str]]:
    """The same of arguments: rows of ours and theirs."""
    tables = _found("_kernel._runtime._elsewhere._ARGUMENTS").values()
    return [row for table in tables for row in table.items()]


# ---- Stores.


def code_around(call: Callable[..., Any]) -> types.CodeType:
    """The code of what lets handlers' errors pass through a call."""
    return _found("_kernel._runtime._handlers.pass_through")(call).__code__


def _root(path: Any) -> Any:
    return _found("_kernel._storage._root.resolve")(path)


def root(path: Any) -> Any:
    """The directory of a store that a path means."""
    return _root(path)


Change = Callable[[str, str], Any]


def watch_store(
    patch: pytest.MonkeyPatch,
    path: Any,
    before: Change = lambda change, key: None,
    after: Change = lambda change, key: None,
) -> None:
    """Calls `before` and `after` with each change that is made to a store of the kind
    of `path`, and the key of the file: "write" makes it, "commit" puts an index in the
    place of the one that was found, and "swap" puts any other file in its place.
    """
    kind = type(_root(path))
    is_local = hasattr(kind, "rename_over")
    write = "start_write" if hasattr(kind, "start_write") else "write"
    for change, name, place in (
        ("write", write, 0),
        ("commit", "replace", 0),
        ("swap", *(("rename_over", 1) if is_local else ("write", 0))),
    ):
        patch.setattr(
            kind, name, _between(getattr(kind, name), change, place, before, after)
        )


def _between(call: Any, change: str, place: int, before: Change, after: Change) -> Any:
    def made(root: Any, *args: Any) -> Any:
        if call.__name__ == "start_write" and (args[1] is None or len(args) > 2):
            return call(root, *args)  # A deletion, or a file that is put in place.
        before(change, args[place])
        out = call(root, *args)
        after(change, args[place])
        return out

    return made


def runs_of(path: Any, name: str) -> list[tuple[int, int, int, int]]:
    """The runs of chunks of a leaf: from and to which chunk, the number of their file,
    and where they begin in it."""
    index = _found("_kernel._load._open.open_source")(_root(path)).index
    return index.extents.segments(index.leaves.record(index.leaves.leaf_indices[name]))


def leftover(path: Any, save: str) -> str:
    """The directory in which the save of this id writes what it then moves."""
    return _found("_kernel._save._leftovers.directory_of")(_root(path), save).path


def _context(root: Any) -> Any:
    return _found("_kernel._storage._arrays.context")(root)


def is_mapped(path: Any) -> bool:
    """Whether arrays there are read from memory maps."""
    return _context(_root(path)) is _context(_root("/"))


def is_mapped_through_links(path: Any) -> bool:
    root = _found("_kernel._storage._root.resolve")(path, True)
    assert root.follow
    return _context(root) is _context(_root("/"))


def is_on_this_machine(path: Any) -> bool:
    return _found("_kernel._storage._local_files.is_on_this_machine")(os.fspath(path))


def share_of_machine(root: pathlib.Path) -> tuple[int, int]:
    """The memory and the cores that a process may have, by the control groups in the
    files below a directory."""
    of = "_kernel._runtime._machine"
    return _found(f"{of}.memory")(root), _found(f"{of}.cores")(root)


def parts_of_a_copy(fd: int) -> Iterator[bytes]:
    """The bytes of an open file, as they are copied."""
    return _found("_kernel._storage._local_files.parts")(fd)


def can_report_syncs() -> bool:
    return _found("_kernel._storage._local_files._can_report")()


def sync_file_system(fd: int) -> None:
    _found(CALLS["sync a file system"])(fd)


def exchange(a: Any, b: Any) -> None:
    """Lets two files or directories change places, atomically."""
    _found(CALLS["exchange"])(os.fspath(a), os.fspath(b))


def labels_of(path: Any) -> dict[str, str | None]:
    """The labels of the leaves of a checkpoint that are in entries of States."""
    leaves, text_of = _opened(path), _found("_kernel._format._state_labels.label_text")
    texts = {i: text_of(label) for i, label in leaves.labels.items()}
    return {leaves.names[place]: text for place, text in texts.items()}


def fields_of(path: Any) -> dict[str, str]:
    """The static values of the nodes of a checkpoint, as texts."""
    leaves = _opened(path)
    return {name: leaves.fields_text(name) for name in leaves.node_names}


def parts_of(path: Any) -> dict[str, Any]:
    """The parts of leaves that a process has saved alone, by their names."""
    leaves = _opened(path)
    return {leaves.names[place]: part for place, part in leaves.parts.items()}


def _opened(path: Any) -> Any:
    return _found("_kernel._load._checkpoint.open")(path)._source.index.leaves


def server_of(url: str) -> tuple[bool, str, int] | None:
    """The server that is asked about a URL: whether by TLS, its name, its port."""
    return _found("_stores._requests._server")(url, {})


# ---- What is kept from call to call.


def _walks() -> Any:
    return importlib.import_module("eqx_ckpt._kernel._tree._walk")


def forget() -> None:
    """As in a new process."""
    _walks()._last = []
    _found("_kernel._format._index._checked").cache_clear()


def is_remembered(tree, other=None) -> bool:
    """Whether what follows from the structure of a tree is made once, also for another
    tree like it."""
    other = tree if other is None else other
    return _walks().find_walk(tree)[0] is _walks().find_walk(other)[0]


def made() -> dict[str, int]:
    """How often parts of saves were made, and not taken from the saves before."""
    names = {
        "deal_by_spec": "deal",
        "files": "files for Orbax",
        "_place_by_spec": "database",
    }
    out = dict.fromkeys(names.values(), 0)
    for walk in _walks()._last:
        for key, (_, kept) in walk._made.items():
            if key[0] == "described":
                for function, _ in kept[0].results:
                    if function.__name__ in names:
                        out[names[function.__name__]] += 1
    return out


@contextlib.contextmanager
def registered_types_forgotten() -> Iterator[None]:
    """Types that are registered meanwhile are not, afterwards."""
    module = importlib.import_module("eqx_ckpt._kernel._tree._register")
    before = set(module._registered)
    try:
        yield
    finally:
        for block in set(module._registered) - before:
            module._take_back(block)


# ---- Single steps of a call.


def start_in_background(
    url: str,
    stage: Any,
    write: Any,
    give_up: Callable[[Any], Any] = lambda handle: None,
) -> Any:
    """Begins a save of two functions: the handle. `give_up` is called with it if it is
    interrupted before it begins."""
    handle = _found("_kernel._save._background.SaveHandle")(_root(url))
    start = _found(CALLS["start in the background"])
    return start(handle, stage, write, lambda error: give_up(handle))


def is_waited_for(handle: Any) -> bool:
    """Whether a thread is in `result` of the handle of a save."""
    return handle in _found("_kernel._save._background._asked").copy().values()


def read_told(path: Any, data: bytes) -> Any:
    """What process 0 tells the others of a save."""
    alone = _found("_kernel._runtime._processes.Processes")()
    return _found("_kernel._save._publish.await_location")(_root(path), data, alone)


def replaced_error() -> type[Exception]:
    """The error of what has been replaced since it was opened."""
    return _found("_kernel._errors.ReplacedError")


def begin_anew(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A load that begins again if what it reads is replaced."""
    return _found("_kernel._load._open.retried_if_replaced")(0, "path")(load)


def directory(path: Any) -> Any:
    """A directory that is open."""
    module = _found("_kernel._storage._descriptor")
    return module.Descriptor(path, module.DIRECTORY)


def pinned(manager: Any) -> set[int]:
    return _found("_kernel._run._pins.pinned")(manager._steps)


def write_journal(root: Any, step: int) -> None:
    """As a manager does when it has saved a step."""
    _found("_kernel._run._steps.Steps")(root).journal.note_saved(step)


def pass_time_as(patch: pytest.MonkeyPatch, clock: Any) -> None:
    """Lets the time that processes wait for each other be that of a clock."""
    for module in ("_messages", "_conversation"):
        patch.setattr(f"eqx_ckpt._kernel._runtime.{module}.time", clock)


def say_stragglers(call: str) -> Callable[[list[int]], None]:
    """What warns of processes that a call waits for."""
    return _found("_kernel._runtime._messages.warner")(call)


def merging(
    method: Any, name: str, arrays: list[np.ndarray], shapes: Any = None
) -> Any:
    """A leaf that is merged, of which blocks are asked for. `shapes` are those of all
    leaves."""
    shapes, count = shapes or {name: arrays[0].shape}, len(arrays) - method.base
    leaf = method.leaves(shapes, count)[name]
    given = method, leaf, arrays[0].dtype
    calls = {
        name: functools.partial(_found(f"merging._methods.{name}"), *given)
        for name in ("look", "combine")
    }
    return types.SimpleNamespace(**calls)


def merged(
    method: Any, name: str, arrays: list[np.ndarray], shapes: Any = None
) -> np.ndarray:
    """Whole arrays in memory, merged in one step."""
    leaf = merging(method, name, arrays, shapes)
    state = leaf.look([arrays]) if method.look else None
    return leaf.combine(arrays, state, (0,) * arrays[0].ndim)


def check_blosc_header(data: bytes, codec: str, nbytes: int, itemsize: int) -> None:
    """Refuses the header of a chunk that is not of so many bytes."""
    _found("_kernel._format._blosc.check_header")(data, codec, nbytes, itemsize)


def selected(spec: Any, tree: Any, leaves: list[Any], is_leaf: Any) -> list[bool]:
    """Whether a filter selects each leaf."""
    return _found("_kernel._tree._filters.selected")(spec, tree, leaves, is_leaf)


def jsonable(data: Any) -> Any:
    """What a command prints with `--json`."""
    return _found("_cli._output.jsonable")(data)


def table(columns: list[tuple[str, bool]], rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table of titles, some of which are to the right."""
    tables = importlib.import_module("eqx_ckpt._show._tables")
    made = tables.table([tables.Column(*column) for column in columns], rows)
    drawn = _found("_cli._output.drawn")
    return [drawn(line, False) for line in _found("_show._terminal.table")(made)]


def called_by_pickles() -> tuple[str, list[Any]]:
    """The module that makes tensors, and all that it calls for a pickle."""
    module = importlib.import_module("eqx_ckpt._formats._torch_globals")
    return module.__name__, [getattr(x, "call", None) for x in module.NAMES.values()]


def files_that_unpickle() -> list[str]:
    names = ("_formats._pickle", "_formats._torch_globals")
    return [importlib.import_module(f"eqx_ckpt.{name}").__file__ for name in names]


def alike(saved: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """What stands for what of two sides, which are kinds of leaves by name."""
    kind = _found("_graft._leaf_kinds.LeafKind")
    sides = [{name: kind(*x) for name, x in side.items()} for side in (saved, wanted)]
    return _found("_graft._alike.pair_leaves")(*sides)


def matched(
    model: Any, ckpt: Any, pairs: list[Any], fresh: Any, drop: Any
) -> tuple[dict[str, str], set[str], set[str]]:
    """Of a graft that may lack something: the leaves of the model, each with that which
    it is made of, those that are fresh, and those that are dropped."""
    sides = importlib.import_module("eqx_ckpt._graft._sides")
    ours, stored = sides.Model(model), sides.StoredSide(ckpt)
    match = _found("_graft._graft_plan._match")
    matching = match(ours, stored, pairs, fresh, drop)
    made = {
        ours.names[number]: source
        for job in matching.jobs
        for number, source in zip(job.all_numbers, job.sources, strict=True)
    }
    dropped = {stored.saved.names[x] for x in matching.dropped}
    return made, {ours.names[x] for x in matching.fresh}, dropped
