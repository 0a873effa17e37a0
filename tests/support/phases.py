"""A program that sends itself a signal at a phase of its own."""

import builtins
import os
import sys

import eqx_ckpt as ec


def begin(phase: str, at: str, number: int) -> None:
    """From here on: at the import of a module, at a printed step, as it restores, at
    the nth file that a save makes, or as it waits for the last save."""
    made = 0

    def now(name, where):
        if (name, str(where)) == (phase, at):
            os.kill(os.getpid(), number)

    def hook(event, args):
        nonlocal made
        if event == "import":
            now("import", args[0])
        # A file of a save, in a directory that is open.
        if event == "open" and args[2] & os.O_CREAT and "/" not in str(args[0]):
            made += 1
            now("save", made)

    def print_and_end(*args, **how):
        show(*args, **how)
        now("step", args[0])

    def before(method, name):
        def call(self, *args, **how):
            now(name, "")
            return method(self, *args, **how)

        return call

    sys.addaudithook(hook)
    show, builtins.print = print, print_and_end
    manager = ec.CheckpointManager
    manager.restore = before(manager.restore, "restore")
    manager.__exit__ = before(manager.__exit__, "exit")
