"""`view`: a page to look into checkpoints and runs."""

import os
import webbrowser
from collections.abc import Sequence

import click

from .._format import _text
from .._load._checkpoint import Checkpoint
from .._run._steps import Steps
from .._view import _server, _single
from .._view._site import Pair, Site
from . import _paths
from ._paths import PATH


@click.command()
@click.argument("paths", metavar="PATH [PATH]", nargs=-1, type=PATH, required=True)
@click.option("--to", metavar="FILE", type=PATH, help="Write one file of HTML instead.")
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0: a free one.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open nothing.")
def view(
    paths: tuple[str, ...],
    to: str | None,
    overwrite: bool,
    port: int,
    no_browser: bool,
) -> int:
    """Look into a checkpoint, two or a run, in a browser.

    Of a leaf that is chosen it shows the range, a histogram, a slice as a picture and
    singular values; of two checkpoints the differences; of a run the metrics and norms.
    No array is read before it is chosen. Only this machine is served. Ctrl-C ends it.
    With --to all leaves are read, and the page is a file that can be sent.
    """
    site = Site(subject_of(paths))
    if to is not None:
        if os.path.lexists(to) and not overwrite:
            raise FileExistsError(f"There is a file at `{to}`. Pass `--overwrite`.")
        text = _single.page(site)
        with open(to, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
        click.echo(f"{to}: {_text.size(os.path.getsize(to))}")
        return 0

    def say(url: str) -> None:
        click.echo(f"Serving {', '.join(paths)} until Ctrl-C at\n{url}")
        if not no_browser:
            webbrowser.open(url)

    _server.serve(site, say, port)
    return 0


def subject_of(paths: Sequence[str]) -> Checkpoint | Pair | Steps:
    if len(paths) > 2:
        raise click.BadParameter("at most two are looked at together.")
    if len(paths) == 2:
        return _paths.open_one(paths[0]), _paths.open_one(paths[1])
    return _paths.open_any(paths[0])


COMMANDS = (view,)
