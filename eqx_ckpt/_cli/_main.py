"""The command `eqx-ckpt`, or `python -m eqx_ckpt`: its errors, its exit status.

0: done. 1: what was asked about is so, as damage or a difference. 2: it could not be
done.
"""

import difflib
import io
import os
import sys
from typing import Any

import click

from .._kernel._format import _text
from .._version import __version__
from . import _wording
from ._commands import COMMANDS


class _Commands(click.Group):
    """Lists the commands by what they are for, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name in self.commands or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, self.commands, 3, 0.5)
        hint = f" Is it {' or '.join(f'`{x}`' for x in near)}?" if near else ""
        raise click.UsageError(f"There is no command `{name}`.{hint}", ctx)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def commands(context: click.Context) -> None:
    """Look at checkpoints, compare, change, convert and check them.

    A PATH is a directory, a file or a URL, of any format that `ec.open` reads. Where it
    is that of a run, its newest step is meant.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        context.exit(2)


for _command in COMMANDS:
    commands.add_command(_command)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command, and returns the exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # As it is closed.
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else arguments
    command = commands.commands.get(arguments[0]) if arguments else None
    try:
        say = commands.main(arguments, prog_name=_name(), standalone_mode=False)
        status = say() if callable(say) else say
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would say so once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.UsageError as e:
        usage = [] if e.ctx is None else [e.ctx.get_usage()]
        return _fail("\n".join([*usage, e.format_message()]))
    except click.ClickException as e:
        return _fail(e.format_message())
    except click.Abort as e:
        if isinstance(e.__cause__, KeyboardInterrupt):  # And not the answer "no".
            return _fail("It was interrupted. What it had done by then stays.")
        return _fail("Nothing was done.")
    except KeyError as e:
        return _fail(_wording.worded(str(e.args[0]), command))
    except _ERRORS as e:
        return _fail(_wording.worded(str(e), command))


# What calls raise. All else is a mistake in this package, and keeps its traceback.
_ERRORS = (OSError, ValueError, TypeError, RuntimeError, ImportError, LookupError)


def _name() -> str:
    is_module = os.path.basename(sys.argv[0]) == "__main__.py"
    return "python -m eqx_ckpt" if is_module else "eqx-ckpt"


def _fail(text: str) -> int:
    lines = map(_text.escape, text.split("\n"))
    print("eqx-ckpt:", "\n".join(lines), file=sys.stderr)
    return 2


def script() -> None:
    """The console script."""
    sys.exit(main())
