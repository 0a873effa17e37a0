"""Ends in the way `CASE` with asynchronous saves to `PATH` under way: `OPTIONS...`."""

import atexit
import fcntl
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings

import jax.numpy as jnp
import numpy as np

import eqx_ckpt as ec


warnings.simplefilter("ignore")
# As in a terminal, also where the tests run in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
case, path, *options = sys.argv[1:]
save = ec.async_tree_serialise_leaves


def tree(value):
    return {"x": jnp.full(3_000_000, value)}


def begin_one_that_fails():
    # The first cannot be committed before the second has been begun.
    os.makedirs(path, exist_ok=True)
    fd = hold()
    save(path, tree(1))
    handle = save(path, tree(2), overwrite=False)
    os.close(fd)
    return handle


def hold():
    """No save to the path is committed until the descriptor is closed."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def say_when_in(name):
    """Prints a line as soon as the main thread is in a function of this name."""
    main = threading.get_ident()

    def is_in():
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame is not None

    def say():
        while not is_in():
            time.sleep(0.01)
        print("now", flush=True)

    threading.Thread(target=say, daemon=True).start()


def wait_to_be_interrupted():
    print("now", flush=True)
    time.sleep(600)


def at_once(layout):
    save(path, tree(1), layout=layout)


def after_three_saves(layout):
    for value in range(3):
        save(path, tree(value), layout=layout)
    sys.exit(3)


def with_an_exception():
    save(path, tree(1))
    raise ZeroDivisionError


def with_an_error(end):
    atexit.register(lambda: print("bye", flush=True))
    begin_one_that_fails()
    if end == "closed":
        sys.stderr.close()
    elif end == "exit":
        sys.exit(3)
    elif end == "exception":
        raise ZeroDivisionError
    elif end == "without stderr":
        sys.stderr = None


def with_an_error_asked_for(ask):
    def attempt(handle):
        try:
            handle.result()
        except FileExistsError:
            print("told")

    handle = begin_one_that_fails()
    if ask == "in a callback":
        handle.add_done_callback(lambda h: h._saved.exception() and attempt(h))
    elif ask == "at exit":
        atexit.register(lambda: attempt(handle))
    else:
        attempt(handle)


def with_saves_at_exit(name):
    call = getattr(ec, name)
    atexit.register(lambda: call(path + "1", tree(2)))
    save(path, tree(1)).add_done_callback(lambda _: call(path + "2", tree(3)))


def with_a_full_disk():
    save(path, tree(1)).result()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    handle = save(path, tree(2))
    try:
        handle.result()
    except OSError as e:
        print(type(e).__name__)
    save(path, tree(3))


def interrupted():
    save(path, tree(0)).result()
    fd = hold()
    save(path, tree(1))
    try:
        wait_to_be_interrupted()
    finally:
        threading.Timer(0.2, os.close, [fd]).start()


def interrupted_as_it_waits():
    save(path, tree(0)).result()
    fd = hold()
    handle = save(path, tree(1))
    say_when_in("result")
    try:
        handle.result()
    except KeyboardInterrupt:
        os.close(fd)
    handle.result()
    sys.exit(5)


def interrupted_twice():
    save(path, tree(0)).result()
    hold()
    save(path, tree(1))
    try:
        wait_to_be_interrupted()
    finally:
        say_when_in("_shutdown")


def interrupted_in_blocking_saves(layout):
    """At any moment: the path holds the save before, or the one broken off."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    rng = random.Random(0)
    interrupts = took = least = held = 0
    for value in range(1, 500):
        if value >= 100 and interrupts > 20:
            break
        before = time.perf_counter()
        try:
            after = rng.uniform(1e-4, 1.2 * took) if value > 3 else 0
            signal.setitimer(signal.ITIMER_REAL, after)
            numbers = {"x": np.full(50_000, value), "z": value}
            ec.tree_serialise_leaves(path, numbers, layout=layout)
            signal.setitimer(signal.ITIMER_REAL, 0)
            least = value
            took = time.perf_counter() - before
        except KeyboardInterrupt:
            interrupts += 1
            least = held
        held = ec.open(path)["z"].read()
        assert held in (least, value) and (ec.open(path)["x"].read() == held).all()
    print(interrupts > 20)
    ec.tree_serialise_leaves(path, {"z": 0}, layout=layout)


def with_a_fork():
    save(path, tree(0)).result()
    fd = hold()
    handle = save(path, tree(1))
    save(path + "b", tree(1))
    failed = save(path + "b", tree(2), overwrite=False)
    two = tree(2)  # In the child JAX has no threads to compute it with.
    child = os.fork()
    if not child:
        for use in (
            handle.result,
            handle.done,
            handle.staged,
            lambda: handle.add_done_callback(print),
            lambda: save(path, two),
            lambda: ec.tree_serialise_leaves(path, two),
        ):
            try:
                use()
            except RuntimeError as e:
                print("spawn" in str(e), flush=True)
        # At a longer end JAX waits for threads that a forked child does not have.
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    fcntl.flock(fd, fcntl.LOCK_UN)
    handle.result()
    try:
        failed.result()
    except FileExistsError:
        print("told")
    save(path, tree(3))


def with_a_fork_in_a_commit():
    """The child does not keep the locks of the save."""
    replace, children = os.replace, []

    def fork(*args, **how):
        if not children:
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            children.append(child)
        replace(*args, **how)

    os.replace = fork
    ec.tree_serialise_leaves(path, tree(1))
    data = os.path.join(path, "d", *os.listdir(os.path.join(path, "d")))
    for directory in (path, data):
        fcntl.flock(os.open(directory, 0), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(len(children))
    os.kill(children[0], 9)


globals()[case](*options)
