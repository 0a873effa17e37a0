"""`view`: a page to look into checkpoints and runs."""

import contextlib
import os
import pathlib
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence

import click

from .._kernel._errors import DamagedError
from .._kernel._format import _text
from .._kernel._load import _checkpoint
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._run import _run_path
from .._kernel._run._steps import Steps
from .._view import _server, _single
from .._view._site import Folder, Site
from . import _paths


def view(
    paths: tuple[str, ...], to: str | None, overwrite: bool, port: int, no_browser: bool
) -> int:
    site = Site(subject_of(paths))
    if to is not None:
        if os.path.lexists(to) and not overwrite:
            raise FileExistsError(f"There is a file at `{to}`. Pass `--overwrite`.")
        text = _single.page(site)
        with open(to, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
        click.echo(f"{to}: {_text.size(os.path.getsize(to))}")
        return 0

    with contextlib.ExitStack() as stack:

        def say(url: str) -> None:
            click.echo(f"Serving {', '.join(paths)} until Ctrl-C at\n{url}")
            if not no_browser:
                webbrowser.open(stack.enter_context(_leading_to(url)))

        _server.serve(site, say, port)
    return 0


@contextlib.contextmanager
def _leading_to(url: str) -> Iterator[str]:
    """The URL of a file that leads to another one, for a block. Each user of a machine
    sees the command lines of all, and may not see the token of the page."""
    with tempfile.NamedTemporaryFile("w", prefix="eqx_ckpt-", suffix=".html") as file:
        file.write(
            '<!DOCTYPE html><meta charset="utf-8"><title>eqx_ckpt</title>'
            f'<meta http-equiv="refresh" content="0; url={url}">'
            f'<a href="{url}">The page</a>'
        )
        file.flush()
        yield pathlib.Path(file.name).as_uri()


def subject_of(
    paths: Sequence[str],
) -> Checkpoint | tuple[Checkpoint, Checkpoint] | Steps | Folder:
    if len(paths) > 1 and all(_run_path.run_at(path) for path in paths):
        return Folder(paths)
    if len(paths) > 2:
        raise click.BadParameter("more than two are only looked at if all are runs.")
    if len(paths) == 2:
        return _checkpoint.open(paths[0]), _checkpoint.open(paths[1])
    try:
        return _paths.open_any(paths[0])
    except DamagedError:
        raise
    except (FileNotFoundError, ValueError):
        folder = Folder(paths)
        with contextlib.suppress(OSError, ValueError):
            if folder.runs():
                return folder
        raise
