"""The shell's side of each command: its arguments, options and help. Nothing here
imports JAX, so that `--help` and completion are quick: a command's module is imported
when it runs.
"""

import functools as ft
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import click

from ._complete import LEAF, NODE, PATH, STEP


# All commands, in the order of the help.
COMMANDS: list[click.Command] = []


_flag = ft.partial(click.option, is_flag=True)
_json = _flag("--json", "as_json", help="Print JSON, for programs.")


def _command(
    module: str, prints: bool = False, is_light: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """Declares a command: the function of its name in a module, which returns a
    `CommandResult`, or `prints` what there is to say. If it `is_light`, its module
    needs no JAX."""
    find = _function if is_light else with_jax

    def decorate(declared: Callable[..., None]) -> click.Command:
        @ft.wraps(declared)
        def run(as_json: bool = False, **given: Any) -> Any:
            result = find(module, declared.__name__)(**given)
            if prints:
                return result
            return ft.partial(_function("_output", "say"), result, as_json)

        COMMANDS.append(click.command(run if prints else _json(run)))
        return COMMANDS[-1]

    return decorate


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f".{module}", __package__), name)


def with_jax(module: str, name: str) -> Any:
    """A function of the command line that needs JAX."""
    if "JAX_PLATFORMS" not in os.environ:
        # Accelerators are left to who trains on them.
        importlib.import_module("jax").config.update("jax_platforms", "cpu")
    return _function(module, name)


def _pair(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Splits an option that is given as LEFT=RIGHT."""
    for text in given:
        if "=" not in text:
            raise click.BadParameter(f"`{text}` has no `=` in it.")
    return [(left, right) for left, _, right in (x.partition("=") for x in given)]


def _numbers(context: click.Context, option: click.Parameter, given: str | None) -> Any:
    """A number, or several with commas; or in JSON what has one for each leaf."""
    if given is None:
        return None
    try:
        if given.lstrip()[:1] in ("[", "{"):
            return json.loads(given)
        parts = [float(x) for x in given.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"`{given}` are no numbers with commas, and no JSON."
        ) from None
    return parts[0] if len(parts) == 1 else parts


def _several(
    what: str, metavar: str, text: str, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that may be given several times."""
    return click.option(what, multiple=True, metavar=metavar, help=text, **more)


_overwrite = _flag("--overwrite", help="Replace the checkpoint that is at the target.")
_progress = _flag("--progress", help="Show a progress bar (needs tqdm).")
_metadata = _several(
    "--metadata", "KEY=VALUE", "Set a key of the metadata.", callback=_pair
)
_rename = _several(
    "--rename", "REGEX=NEW", "Change names, as re.sub does.", callback=_pair
)

_drop_functions = click.option(
    "--drop-functions",
    "functions",
    flag_value="drop",
    help="Leave stored functions out.",
)


METHODS = (
    *("average", "ema", "slerp", "model_stock", "task_arithmetic", "ties"),
    *("breadcrumbs", "dare", "dare_ties", "della"),
)
_sources = click.argument("sources", nargs=-1, required=True, **PATH)
_to = click.option("--to", "target", required=True, help="Where to write.", **PATH)
_node = click.option(
    "--node", default="", metavar="NAME", help="Only this node.", **NODE
)
_weights = click.option(
    "--weights",
    callback=_numbers,
    metavar="W,W,...",
    help="One for each source; by default all are 1.",
)
_static = _several("--static", "PATTERN", "Static fields that may differ.")


def _writes(declared: Callable[..., None]) -> Callable[..., None]:
    """The options of commands that write a checkpoint."""
    return _overwrite(_progress(declared))


def _merges(declared: Callable[..., None]) -> Callable[..., None]:
    """The options of commands that write one of several."""
    return _static(_metadata(_drop_functions(_writes(declared))))


def _number(what: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(what, callback=_numbers, metavar="NUMBER", help=text)


_skip = _several("--skip", "PATTERN", "Leaves to leave out: the error says.", **NODE)


@_command("_contents", is_light=True)
@click.argument("path", **PATH)
def info() -> None:
    """Say what a checkpoint or a run is.

    Of a checkpoint: its format, sizes, parameters, versions and metadata. Of a run: its
    steps, as `steps` prints them. No array is read.
    """


@_command("_contents", is_light=True)
@click.argument("path", **PATH)
@click.argument("name", default="", **NODE)
@click.option(
    "--depth", type=click.IntRange(1), help="Add up what is deeper than this."
)
@click.option(
    "--filter",
    "pattern",
    metavar="PATTERN",
    **NODE,
    help="Only leaves of this name, or below the node of this name; * is any text.",
)
@click.option(
    "--sort",
    type=click.Choice(["tree", "size"]),
    default="tree",
    help='"size": a flat list, the largest first.',
)
@click.option("--static/--no-static", default=True, help="Print static fields, or not.")
def ls() -> None:
    """Print the tree of a checkpoint.

    With a NAME that of the node, such as model.layers. Layers that are alike are one
    row, as {0..31}. No array is read.
    """


@_command("_inspect")
@click.argument("path", **PATH)
@click.argument("name", **LEAF)
@_flag("--all", "whole", help="Print all elements of large arrays.")
def cat() -> None:
    """Print a leaf, or a slice of it.

    Only the chunks that the slice touches are read. NAME is a dotted name, such as
    model.layers.0.weight, and may end in a slice, such as 'w[:8, 0]'; or that of a
    static field. JSON has all elements.
    """


@_command("_inspect")
@click.argument("path", **PATH)
@click.argument("name", default="", **NODE)
@_progress
def stats() -> None:
    """Print ranges, means, norms and NaNs of each leaf.

    They are read and verified. With a NAME those of the node or leaf.
    """


@_command("_inspect")
@click.argument("a", **PATH)
@click.argument("b", **PATH)
@_node
@_flag("--values", help="Find how large the differences are.")
@_progress
def diff() -> None:
    """Say in what two checkpoints differ.

    The exit status is 1 if they do. Digests are compared: arrays are only read where
    those cannot tell, or for --values. Those are the largest difference of two
    elements, and the norm of all relative to the norm in A: of a row of several leaves
    the greatest.
    """


@_command("_inspect")
@click.argument("a", **PATH)
@click.argument("b", **PATH)
def suggest() -> None:
    """Print rules that give the leaves of A the names of B.

    They are Python, for `rename=` or a pair of a graft, and were tried on all names.
    What is like nothing, or like several, is a comment, and the exit status is then 1.
    No array is read.
    """


@_command("_viewing", prints=True)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, **PATH)
@click.option("--to", metavar="FILE", help="Write one file of HTML instead.", **PATH)
@_flag("--overwrite", help="Replace FILE.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0: a free one.")
@_flag("--no-browser", help="Print the address, and open nothing.")
def view() -> None:
    """Look into a checkpoint, two, a run, or many runs, in a browser.

    Of a leaf that is chosen it shows the range, a histogram, a slice as a picture and
    singular values; of two checkpoints the differences; of a run the metrics and norms;
    of several runs, or a directory of runs, a table and the metrics in one chart. No
    array is read before it is chosen. Only this machine is served. Ctrl-C ends it.
    With --to all leaves are read, and the page is a file that can be sent.
    """


@_command("_change")
@click.argument("source", **PATH)
@click.argument("target", **PATH)
@_several("--keep", "PATTERN", "Keep only such leaves.", **NODE)
@_several("--drop", "PATTERN", "Leave such leaves out.", **NODE)
@_rename
@click.option("--cast", metavar="DTYPE", help="Cast floating arrays, as to bfloat16.")
@_metadata
@_drop_functions
@_writes
def edit() -> None:
    """Write a checkpoint with other leaves, names, dtypes, metadata.

    TARGET may be SOURCE: then it is edited in place, and where only names, metadata or
    some leaves change, no array is written again. A PATTERN is a name of a leaf or a
    node, in which * is any text. The options may be given several times.
    """


@_command("_change")
@_sources
@_to
@click.option(
    "--last", type=click.IntRange(1), help="The newest steps of one run: so many."
)
@_node
@_weights
@_merges
def average() -> None:
    """Write the average of checkpoints, or of steps of a run.

    Floating arrays are averaged. All else has to be equal: --node model takes only
    that node, without the step and the optimiser. Of the metadata that is kept on which
    all agree.
    """


@_command("_change")
@_sources
@_to
@click.option(
    "--method",
    required=True,
    metavar="METHOD",
    help=f"{', '.join(METHODS)}; or module:name, your own.",
)
@click.option("--base", help="What the sources were trained from.", **PATH)
@_node
@_weights
@_number("--t", "slerp: the part of the way; 0.5.")
@_number("--decay", "ema: of what came before; 0.9.")
@_number("--density", "ties, breadcrumbs, dare, della: what is kept; 0.2.")
@_number("--gamma", "breadcrumbs: the largest, which go; 0.01.")
@_number("--epsilon", "della: the chances from least to greatest; 0.1.")
@_number("--lambda", "The sum of task vectors times this; 1.")
@click.option(
    "--normalize",
    type=click.Choice(["count", "weights", "none"]),
    help="What the sum of task vectors is divided by.",
)
@click.option(
    "--rescale/--no-rescale", default=None, help="dare, della: what is kept; yes."
)
@click.option(
    "--seed",
    # Of larger ones JAX takes 32 bits.
    type=click.IntRange(0, 2**32 - 1),
    help="dare, della: of what is dropped; 0.",
)
@_merges
def merge() -> None:
    """Write a merge of checkpoints: slerp, TIES, DARE and others.

    See `ec.merging`. Those that add task vectors, and model_stock, need a --base.
    Floating arrays are merged. All else has to be equal. Numbers may be JSON: a list
    that is spread over the layers, or patterns and numbers, as {"*.attn.*": 1, "*": 0}.
    """


@_command("_change")
@click.argument("source", **PATH)
@click.argument("target", required=False, **PATH)
@click.option(
    "--layout", type=click.Choice(["ocdbt", "zarr"]), help="ocdbt by default."
)
@click.option(
    "--compression", type=click.Choice(["lz4", "zstd"]), help="Of large leaves."
)
@click.option(
    "--chunks", type=click.IntRange(1), metavar="BYTES", help="The size of chunks."
)
@_flag("--orbax", default=None, help="With the files that Orbax reads.")
@_skip
@_drop_functions
@_writes
def convert() -> None:
    """Write a checkpoint of any format as another one.

    TARGET is a file if it ends in .zip or .safetensors, else a directory or a URL.
    Without a TARGET, --orbax adds the files that Orbax reads to SOURCE, where it is.
    """


@_command("_change")
@click.argument("source", **PATH)
@click.argument("target", metavar="hf://ORG/NAME[@BRANCH][/PATH]")
@_skip
@_drop_functions
@_writes
def push() -> None:
    """Upload a checkpoint of any format to the Hugging Face Hub.

    It is one commit, with a model card where there is none. If the target ends in
    .safetensors or .zip, it is such a file, else a directory of this library.
    """


@_command("_change")
@click.argument("source", **PATH)
@click.argument("target", **PATH)
@_node
@_skip
@_rename
@_metadata
@_drop_functions
@_writes
def export() -> None:
    """Write the arrays of a checkpoint to a .safetensors file.

    Libraries for PyTorch want --metadata format=pt. What the file cannot hold is an
    error, which says what to --skip.
    """


@_command("_runs")
@click.argument("path", **PATH)
@click.option("--best", metavar="METRIC", help="Mark the step with the least METRIC.")
@_flag("--max", "is_max", help="With --best: the greatest.")
@click.option("--pin", multiple=True, metavar="STEP", help="Keep a step.", **STEP)
@click.option("--unpin", multiple=True, metavar="STEP", help="Undo --pin.", **STEP)
@click.option("--delete", multiple=True, metavar="STEP", help="Delete a step.", **STEP)
@_flag("--yes", help="Do not ask.")
def steps() -> None:
    """Print the steps of a run; pin or delete some.

    "own" is what a step has in data files and shares with no other. --pin, --unpin and
    --delete may be given several times, and ask first. --max --best METRIC is for what
    should be large.
    """


@_command("_runs")
@click.argument("directory", **PATH)
@click.option("--sort", metavar="METRIC", help="The run with the least METRIC first.")
@_flag("--max", "is_max", help="With --sort: the greatest first.")
def runs() -> None:
    """Print the runs in a directory, and in those below it.

    Of each it prints the newest step, the best one if you --sort, their metrics, and
    the size of all of its steps.
    """


@_command("_runs")
@click.argument("path", **PATH)
@_flag("--yes", help="Do not ask.")
def delete() -> None:
    """Delete a checkpoint or a run, damaged or not.

    If anything there is not part of it, nothing is deleted.
    """


@_command("_runs")
@click.argument("path", **PATH)
@_progress
def verify() -> None:
    """Check every byte of a checkpoint or a run.

    It needs no model. The exit status is 1 if there is a problem.
    """


@_command("_runs")
@click.argument("path", **PATH)
@_flag("--list", "lists", help="Only list it.")
@_flag("--idle", help="Nothing is being saved there (for a URL, and near steps).")
def clean() -> None:
    """Delete what killed saves have left in a directory."""


@_command("_demo", prints=True)
@click.argument("directory", required=False, **PATH)
def demo() -> None:
    """Train a small model, save it, and load parts of it."""
