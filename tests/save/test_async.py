import contextlib
import fcntl
import functools as ft
import gc
import os
import re
import signal
import sys
import threading
import time
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import inside, scripts
from support.helpers import assert_alike, files_of, long, until

import eqx_ckpt as ec


save = ec.async_tree_serialise_leaves


@pytest.fixture(params=["ocdbt", "zarr"])
def layout(request):
    return request.param


def _value(path):
    return ec.open(path)["x"].read()[0]


def _tree(value):
    return {"x": jnp.full(10, value)}


def test_an_error_is_told_to_who_waits_for_it(tmp_path, monkeypatch):
    """And not to another thread, which saves before that one is awake."""
    waits, over = threading.Event(), threading.Event()
    came = []

    def fail(place, *_):
        if place.root.name == "bad":
            assert waits.wait(60)
            until(lambda: inside.is_waited_for(handle))
            raise OSError("No.")

    inside.watch(monkeypatch, "publish", fail)
    handle = save(tmp_path / "bad", _tree(1))

    def meanwhile(_):
        try:
            came.append(ec.tree_serialise_leaves(tmp_path / "good", _tree(2)))
        finally:
            over.set()

    handle.add_done_callback(meanwhile)
    with pytest.raises(OSError, match="No"):
        waits.set()
        handle.result()
    assert over.wait(60) and came == [None] and _value(tmp_path / "good") == 2


@contextlib.contextmanager
def _held(path):
    """Keeps every save to an existing checkpoint from its commit."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _busy(path):
    """Keeps the saves in it from beginning: each waits for one that is held."""
    save(path, _tree(1)).result()
    with _held(path):
        save(path, _tree(2))
        yield


def _failing(path, **options):
    """A save that fails in the background: something is there when its turn comes."""
    save(path, _tree(1), **options)
    return save(path, _tree(2), overwrite=False, **options)


def _wait_over(handle):
    until(handle._saved.done)


# ---- What is saved.


def _all_kinds():
    big = np.arange(12.0).reshape(3, 4)
    shared = jnp.arange(5)
    return {
        "jax": jnp.linspace(0, 1, 7),
        "large": jnp.arange(3 * 2**20, dtype=jnp.float32).reshape(3, -1),
        "weak": jnp.asarray(1.5),
        "bfloat16": jnp.ones((3, 2), jnp.bfloat16),
        "int4": jnp.arange(-3, 4, dtype=jnp.int4),
        "key": jr.key(3),
        "keys": jr.split(jr.key(4, impl="rbg"), 3),
        "empty": jnp.zeros((0, 3)),
        "sharded": jax.device_put(
            jnp.arange(16.0),
            jax.sharding.NamedSharding(
                jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x")
            ),
        ),
        "numpy": big,
        "rows": big[::2],
        "fortran": np.asfortranarray(big),
        "view": big.T[1:],
        "wide": np.arange(3, dtype=">i8"),
        "0-d": np.array(2.5),
        "generic": np.float16(0.5),
        "python": [True, 3, 2**70, 0.1, 1j],
        "text": ["ü", b"\0\1"],
        "shared": [shared, shared],
        "both": [big, big],
    }


def test_as_a_blocking_save(tmp_path, layout):
    tree = _all_kinds()
    like = jax.tree.map(lambda x: x, tree)
    options = dict(
        filter_spec=lambda x: True, metadata={"a": [1]}, layout=layout, chunks=2**20
    )
    ec.tree_serialise_leaves(tmp_path / "a", tree, **options)
    handle = save(tmp_path / "b", tree, **options)
    assert handle.result() is None and handle.done() is True
    a, b = ec.open(tmp_path / "a"), ec.open(tmp_path / "b")
    assert a.metadata == b.metadata
    assert_alike(ec.materialise(b.splice(like)), ec.materialise(a.splice(like)))
    assert list(a.leaves) == list(b.leaves)
    files = [files_of(p) for p in (tmp_path / "a", tmp_path / "b")]
    for f, p in zip(files, (a, b)):
        # The same but for the save id.
        for name in list(f):
            f[name.replace(p.save_id, "id")] = f.pop(name)
        for name in ("eqx_ckpt.json", "manifest.ocdbt", "d/id/manifest.ocdbt"):
            f.pop(name, None)
    assert files[0] == files[1]


def test_memory():
    handle = save("memory://async/a", _tree(3))
    handle.result()
    assert _value("memory://async/a") == 3 and "saved" in repr(handle)


def test_what_the_caller_may_change(tmp_path):
    """NumPy arrays, views of them, and metadata, as soon as the call returns."""

    class Static(eqx.Module):
        x: jax.Array
        names: list = eqx.field(static=True)

    base = np.arange(10.0)
    tree = {"a": base, "view": base[2:8:2].reshape(3, 1), "m": Static(jnp.ones(1), [1])}
    expected = {"a": base.copy(), "view": base[2:8:2].reshape(3, 1).copy()}
    metadata = {"steps": [1]}
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    with _held(path):
        handle = save(path, tree, metadata=metadata)
        handle.staged()
        base[:] = -1
        tree["m"].names.append(2)
        metadata["steps"].append(2)
        assert not handle.done()
    handle.result()
    ckpt = ec.open(path)
    assert ckpt.metadata == {"steps": [1]}
    for name, array in expected.items():
        assert np.array_equal(ckpt[name].read(), array)
    like = {**expected, "m": Static(jnp.ones(1), [1])}
    assert ec.tree_deserialise_leaves(path, like)["m"].x == 1


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")], indirect=True)
def test_donated_jitted_steps(tmp_path, layout):
    """Every checkpoint is that of its step, while the steps reuse all the memory."""

    def body(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    step = jax.jit(body, donate_argnums=0)
    sizes = [1, 3, 1000, 2**20, 3 * 2**20]
    tree = {f"x{i}": jnp.zeros(n) for i, n in enumerate(sizes)}
    handles = []
    for number in range(12):
        if number % 3 == 0:
            handles.append((number, save(tmp_path / str(number), tree, layout=layout)))
            handles[-1][1].staged()
        for _ in range(3):
            tree = step(tree)
        tree = jax.tree.map(lambda x: x - 2, tree)
    for number, handle in handles:
        handle.result()
        for x in ec.open(tmp_path / str(number)).leaves.values():
            assert (x.read() == number).all()


def test_deleted_arrays(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", _tree(1))
    tree = {"x": jnp.full(2**20, 7.0), "k": jr.key(1)}
    with _held(tmp_path / "a"):
        handle = save(tmp_path / "a", tree)
        jax.tree.map(lambda x: x.delete(), tree)
        del tree
        gc.collect()
        junk = [jnp.full(2**20, 8.0) for _ in range(5)]
    handle.result()
    ckpt = ec.open(tmp_path / "a")
    assert (ckpt["x"].read() == 7).all() and junk[0][0] == 8
    assert ckpt["k"].read() == jr.key(1)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_saved_is_not_kept(tmp_path, fails):
    x = jnp.ones(1000)
    array = weakref.ref(x)
    with _busy(tmp_path / "first"):
        if fails:
            save(tmp_path / "a", {"x": jnp.ones(2)})
        handle = save(tmp_path / "a", {"x": x}, overwrite=not fails)
    _wait_over(handle)
    buffer = weakref.ref(np.asarray(x).base if np.asarray(x).base is not None else x)
    del x
    gc.collect()
    assert array() is None and buffer() is None
    if fails:
        with pytest.raises(FileExistsError):
            handle.result()


# ---- Errors.


def test_errors_of_the_tree_are_raised_at_once(tmp_path, layout):
    for bad, error in [
        ({"x": jax.ShapeDtypeStruct((2,), "f4")}, "The leaf `x` cannot be saved"),
        ({"x": 1j, "y": jnp.zeros((1,) * 33)}, "The leaf `y` cannot .* 33 axes"),
        ({"x": print}, "selects no leaf"),
    ]:
        with pytest.raises(ValueError, match=error):
            save(tmp_path / "a", bad, layout=layout)
    with pytest.raises(ValueError, match="`metadata`"):
        save(tmp_path / "a", _tree(1), metadata=np.ones(1), layout=layout)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        save(tmp_path / "file", _tree(1), layout=layout)
    ec.tree_serialise_leaves(tmp_path / "b", _tree(1))
    with pytest.raises(FileExistsError, match="`overwrite=False`"):
        save(tmp_path / "b", _tree(1), overwrite=False, layout=layout)
    assert not (tmp_path / "a").exists()


def test_the_handle_raises(tmp_path, layout):
    with _busy(tmp_path / "first"):
        handle = _failing(tmp_path / layout, layout=layout)
    for ask in (handle.result, handle.done, handle.staged, handle.result):
        _wait_over(handle)
        with pytest.raises(FileExistsError, match="`overwrite=False`"):
            ask()
    assert "failed" in repr(handle)
    # Who was told is not told again.
    ec.tree_serialise_leaves(tmp_path / "b", _tree(3))
    assert _value(tmp_path / layout) == 1 and _value(tmp_path / "b") == 3


@pytest.mark.parametrize("call", [save, ec.tree_serialise_leaves])
def test_what_nobody_asks_for_is_raised_by_the_next_save(tmp_path, call):
    with _busy(tmp_path / "first"):
        handle = _failing(tmp_path / "a")
    _wait_over(handle)
    with pytest.raises(RuntimeError, match="has not been started") as caught:
        call(tmp_path / "b", _tree(3))
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert str(tmp_path / "a") in str(caught.value)
    assert not (tmp_path / "b").exists()
    call(tmp_path / "b", _tree(3))
    save(tmp_path / "b", _tree(4)).result()
    assert _value(tmp_path / "a") == 1 and _value(tmp_path / "b") == 4


def test_several_errors_are_raised_together(tmp_path):
    with _busy(tmp_path / "first"):
        handles = [_failing(tmp_path / name) for name in "ab"]
    for handle in handles:
        _wait_over(handle)
    with pytest.raises(RuntimeError) as caught:
        save(tmp_path / "c", _tree(1))
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2
    for name in "ab":
        assert f"`{tmp_path / name}`: FileExistsError" in str(caught.value)
    save(tmp_path / "c", _tree(1)).result()


def test_callbacks(tmp_path, caplog):
    calls = []
    good = save(tmp_path / "a", _tree(1))
    good.add_done_callback(calls.append)
    good.result()
    with _busy(tmp_path / "first"):
        bad = _failing(tmp_path / "b")
    told = threading.Event()

    def ask(handle):
        with pytest.raises(FileExistsError):
            handle.result()
        # The save is over: another to its path does not wait for it.
        ec.tree_serialise_leaves(tmp_path / "b", _tree(3))
        told.set()

    _wait_over(bad)
    bad.add_done_callback(ask)
    assert told.wait(60)
    assert _value(tmp_path / "b") == 3
    good.add_done_callback(calls.append)
    assert calls == [good, good]
    good.add_done_callback(lambda _: 1 / 0)
    assert "ZeroDivisionError" in caplog.text


def test_timeout(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    with _held(path):
        handle = save(path, _tree(2))
        for timeout in ("1", True, float("nan")):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                handle.result(timeout)
        with pytest.raises(TimeoutError, match="still going on after -1 seconds"):
            handle.result(-1)
        with pytest.raises(TimeoutError, match="still going on after 0.05 seconds"):
            handle.result(timeout=0.05)
        assert not handle.done() and "being saved" in repr(handle)
        # What is committed is what opens.
        assert _value(path) == 1
    handle.result(60)
    assert _value(path) == 2


# ---- Several saves.


def test_saves_to_one_path_queue_up(tmp_path, layout):
    path = tmp_path / "a"
    handles = [save(path, _tree(v), layout=layout) for v in range(5)]
    ec.tree_serialise_leaves(path, _tree(5), layout=layout)
    assert _value(path) == 5 and all(handle.done() for handle in handles)
    handles = [save(path, _tree(v), layout=layout) for v in range(6, 9)]
    handles[-1].result()
    assert _value(path) == 8 and all(handle.done() for handle in handles)
    assert os.listdir(tmp_path) == ["a"]


def test_a_blocking_save_waits_for_its_path_only(tmp_path):
    path = tmp_path / "a"
    ec.tree_serialise_leaves(path, _tree(1))
    (tmp_path / "link").symlink_to(path)
    with _held(path):
        handle = save(path, _tree(2))
        ec.tree_serialise_leaves(tmp_path / "b", _tree(1))
        blocking = threading.Thread(
            target=ec.tree_serialise_leaves, args=(tmp_path / "link", _tree(3))
        )
        blocking.start()
        blocking.join(0.1)
        assert blocking.is_alive() and not handle.done() and _value(path) == 1
    blocking.join()
    assert handle.done() and _value(path) == 3


def test_a_save_that_fails_does_not_keep_the_next(tmp_path):
    path = tmp_path / "a"
    with _busy(tmp_path / "first"):
        bad = _failing(path)
        good = save(path, _tree(3))
    good.result()
    assert _value(path) == 3
    with pytest.raises(FileExistsError):
        bad.result()


def test_a_thread_that_dies_before_it_begins(tmp_path, monkeypatch):
    """As by a `MemoryError`."""
    with monkeypatch.context() as patch:
        inside.replace(patch, "run in the background", lambda *_: None)
        handles = [save(tmp_path / "a", _tree(n)) for n in range(3)]
    with pytest.raises(RuntimeError, match="The thread of the save has ended"):
        handles[0].result()
    save(tmp_path / "b", _tree(3)).result()
    for call in (handles[1].staged, handles[2].done):
        with pytest.raises(RuntimeError, match="The thread of the save has ended"):
            call()
    ec.tree_serialise_leaves(tmp_path / "a", _tree(4))
    assert _value(tmp_path / "a") == 4


def test_many_threads(tmp_path):
    handles = []

    def work(number):
        for step in range(3):
            handles.append(save(tmp_path / str(number), _tree(step)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.result()
    assert [_value(tmp_path / str(n)) for n in range(4)] == [2] * 4


def test_settings_of_the_process_come_back(tmp_path):
    interval, main = sys.getswitchinterval(), threading.get_native_id()
    priority = os.getpriority(os.PRIO_PROCESS, main)
    thresholds = gc.get_threshold()
    save(tmp_path / "a", _tree(1)).result()
    assert sys.getswitchinterval() == interval
    assert gc.isenabled() and gc.get_threshold() == thresholds
    assert os.getpriority(os.PRIO_PROCESS, main) == priority


# ---- The end of the process, in real ones.


def _process(case, path, *options) -> scripts.Script:
    program = scripts.program("end_with_saves")
    return scripts.start(program, case, path, *options)


def _ends(case, path, *options) -> tuple[int, str, str]:
    with _process(case, path, *options) as process:
        return _end(process)


def _end(process) -> tuple[int, str, str]:
    return process.communicate(timeout=600)


@pytest.mark.parametrize("layout", ["ocdbt", *long("zarr")])
def test_a_script_may_end_right_after(tmp_path, layout):
    status, _, err = _ends("at_once", tmp_path / "a", layout)
    assert (status, err) == (0, "") and _value(tmp_path / "a") == 1
    status, _, err = _ends("after_three_saves", tmp_path / "a", layout)
    assert (status, err) == (3, "") and _value(tmp_path / "a") == 2


def test_an_exception_in_the_main_thread(tmp_path):
    status, _, err = _ends("with_an_exception", tmp_path / "a")
    assert status == 1 and "ZeroDivisionError" in err and "asynchronous" not in err
    assert _value(tmp_path / "a") == 1


@pytest.mark.parametrize(
    "end",
    ["at once", "closed", *long("exit", "exception", "without stderr")],
)
def test_an_error_nobody_asks_for_fails_the_exit(tmp_path, end):
    status, out, err = _ends("with_an_error", tmp_path / "a", end)
    assert status == 120 and out == "bye\n"
    if end not in ("closed", "without stderr"):
        assert f"The asynchronous save to `{tmp_path / 'a'}` has failed" in err
        assert "Traceback" in err and "FileExistsError: There is a checkpoint" in err
        assert "Exception ignored" not in err
    assert _value(tmp_path / "a") == 1


@pytest.mark.parametrize("ask", ["in a callback", "at exit", "at once"])
def test_an_error_asked_for_does_not(tmp_path, ask):
    ended = _ends("with_an_error_asked_for", tmp_path / "a", ask)
    assert ended == (0, "told\n", "")


@pytest.mark.parametrize(
    "call", ["tree_serialise_leaves", "async_tree_serialise_leaves"]
)
def test_saves_at_exit(tmp_path, call):
    """In `atexit` handlers, and in callbacks while the interpreter waits."""
    assert _ends("with_saves_at_exit", tmp_path / "a", call) == (0, "", "")
    assert [_value(tmp_path / name) for name in ("a", "a1", "a2")] == [1, 2, 3]


def test_a_full_disk(tmp_path):
    status, out, err = _ends("with_a_full_disk", tmp_path / "a")
    assert (status, out) == (120, "OSError\n") and "File too large" in err
    assert _value(tmp_path / "a") == 1
    assert len(os.listdir(tmp_path / "a" / "d")) == 1


def _interrupt(case, path, times) -> tuple[int, str]:
    """Sends SIGINT at every line that the process prints."""
    with _process(case, path) as process:
        assert process.stdout is not None
        for _ in range(times):
            assert process.stdout.readline()
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        status, _, err = _end(process)
    return status, err


def test_ctrl_c_in_the_main_thread(tmp_path):
    """The save goes on, and the process ends when it is done."""
    status, err = _interrupt("interrupted", tmp_path / "a", 1)
    assert status == -signal.SIGINT and "KeyboardInterrupt" in err
    assert "asynchronous" not in err and _value(tmp_path / "a") == 1


def test_ctrl_c_while_waiting_for_the_save(tmp_path):
    ended = _interrupt("interrupted_as_it_waits", tmp_path / "a", 1)
    assert ended == (5, "")
    assert _value(tmp_path / "a") == 1


def test_ctrl_c_twice(tmp_path):
    """The second one interrupts the wait at the end: the path holds what it held."""
    status, err = _interrupt("interrupted_twice", tmp_path / "a", 2)
    assert status not in (0, None) and "was interrupted" in err
    assert "NoneType" not in err
    assert _value(tmp_path / "a") == 0
    ec.tree_serialise_leaves(tmp_path / "a", _tree(2))
    assert _value(tmp_path / "a") == 2 and len(os.listdir(tmp_path / "a" / "d")) == 1


@pytest.mark.parametrize("layout", [*long("ocdbt"), "zarr"])
def test_ctrl_c_in_blocking_saves(tmp_path, layout):
    """At any moment: the path holds the save before, or the one that was broken off."""
    case = "interrupted_in_blocking_saves"
    status, out, err = _ends(case, tmp_path / "a", layout)
    assert (status, out) == (0, "True\n")
    # Python drops an interrupt that comes while it forgets a thread that has ended.
    assert not err or re.search("Exception ignored in.*WeakSet", err)
    assert os.listdir(tmp_path) == ["a"]
    if layout == "ocdbt":
        assert len(os.listdir(tmp_path / "a" / "d")) == 1


def test_fork_in_the_middle(tmp_path):
    """The child is refused, and ends well; the save goes on in the parent."""
    status, out, err = _ends("with_a_fork", tmp_path / "a")
    assert out.split() == ["True"] * 6 + ["7", "told"], err
    assert (status, err) == (0, "") and _value(tmp_path / "a") == 3


def test_a_forked_child_does_not_keep_our_lock(tmp_path):
    ended = _ends("with_a_fork_in_a_commit", tmp_path / "a")
    assert ended == (0, "1\n", "")


# ---- Accelerators.


@pytest.mark.gpu
def test_staging_from_an_accelerator(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    tree = {f"{i}": jnp.full(2**22, float(i)) for i in range(8)} | {"key": jr.key(3)}
    assert jax.devices()[0].platform != "cpu"
    handle = save(tmp_path / "a", tree)
    handle.staged()
    assert all(x._npy_value is None for name, x in tree.items() if name != "key")
    tree = {name: step(x) for name, x in tree.items() if name != "key"}
    handle.result()
    ckpt = ec.open(tmp_path / "a")
    for i in range(8):
        assert (ckpt[f"{i}"].read() == i).all()
    assert ckpt["key"].read() == jr.key(3)


def test_what_follows_a_save_that_fails_early_is_not_written_before_others():
    """As one that fails while its arrays come from a device."""
    go, order = threading.Event(), []

    def first():
        go.wait(60)
        order.append("first")

    start = ft.partial(inside.start_in_background, "memory://order")
    handles = [start(None, first)]
    handles.append(start(lambda: 1 / 0, lambda: order.append("second")))
    with pytest.raises(ZeroDivisionError):
        handles[1].result(60)
    handles.append(start(None, lambda: order.append("third")))
    time.sleep(0.2)
    assert order == []
    go.set()
    handles[2].result(60)
    assert order == ["first", "third"]


def test_a_save_that_was_given_up_has_failed(monkeypatch):
    """Also if its thread begins, and ends, before whoever gave it up says so."""
    begun, handles = [], []

    def make(start):
        def interrupted(worker):
            begun.append(lambda: start(worker) and worker.join())
            raise KeyboardInterrupt

        return interrupted

    def give_up(handle):
        handles.append(handle)
        begun[0]()

    inside.wrap(monkeypatch, "start a thread", make)
    with pytest.raises(KeyboardInterrupt):
        inside.start_in_background("memory://given-up", None, lambda: 1 / 0, give_up)
    monkeypatch.undo()
    assert "failed" in repr(handles[0])
    with pytest.raises(RuntimeError, match="interrupted before it began"):
        handles[0].result()
    ec.async_tree_serialise_leaves("memory://given-up", {"x": 1}).result()


def test_saves_that_wait_have_a_bounded_number_of_copies(tmp_path, monkeypatch):
    inside.limit(monkeypatch, queued_copy_bytes=3 * 2**20)
    handles, written = [], []

    def make(write):
        def counted(*args):
            committed = write(*args)
            written.append(args)
            return committed

        return counted

    inside.wrap(monkeypatch, "write a save", make)
    for number in range(16):
        tree = {"x": np.full(2**17, number, np.float64), "number": number}
        handles.append(ec.async_tree_serialise_leaves(tmp_path / str(number), tree))
        assert len(handles) - len(written) <= 3
    # One that is larger than all of the room waits for all others.
    large = {"x": np.zeros(2**20)}
    handles.append(ec.async_tree_serialise_leaves(tmp_path / "large", large))
    assert len(written) >= 16
    for number, handle in enumerate(handles[:-1]):
        handle.result()
        assert ec.open(tmp_path / str(number))["number"].read() == number
    handles[-1].result()
