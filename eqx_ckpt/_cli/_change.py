"""`edit`, `average`, `merge`, `convert` and `export`: checkpoints from checkpoints."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import click
import jax.random as jr

from .. import merging
from .._edit import _edited, _merge
from .._edit._methods import Method
from .._format import _text
from .._interop import _convert, _export
from .._load import _rename
from .._load._checkpoint import Checkpoint
from .._run._steps import Steps
from .._save import _serialise
from .._storage import _root
from . import _output, _paths
from ._output import CommandResult, Span
from ._paths import PATH


def _written(path: str) -> CommandResult:
    """Report on the checkpoint that a command has written."""
    ckpt = _paths.open_one(path)
    data = {"path": ckpt.path, "leaves": len(ckpt), "nbytes": ckpt.nbytes}
    count = f"{len(ckpt):,} {'leaf' if len(ckpt) == 1 else 'leaves'}"
    text = Span(f"  written: {count}, {_text.size(ckpt.nbytes)}")
    return CommandResult(data, [[Span(ckpt.path, "title"), text]])


def _pair(context: Any, option: Any, given: tuple[str, ...]) -> list[tuple[str, str]]:
    """Splits an option that is given as LEFT=RIGHT."""
    for text in given:
        if "=" not in text:
            raise click.BadParameter(f"`{text}` has no `=` in it.")
    return [(left, right) for left, _, right in (x.partition("=") for x in given)]


def _numbers(context: Any, option: Any, given: str | None) -> list[float] | None:
    try:
        return None if given is None else [float(x) for x in given.split(",")]
    except ValueError:
        raise click.BadParameter(f"`{given}` are no numbers with commas.") from None


def _several(
    what: str, metavar: str, text: str, **more: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that may be given several times."""
    return click.option(what, multiple=True, metavar=metavar, help=text, **more)


_overwrite = click.option(
    "--overwrite", is_flag=True, help="Replace the checkpoint that is at the target."
)
_progress = click.option(
    "--progress", is_flag=True, help="Show a progress bar (needs tqdm)."
)
_metadata = _several(
    "--metadata", "KEY=VALUE", "Set a key of the metadata.", callback=_pair
)


_drop_functions = click.option(
    "--drop-functions", is_flag=True, help="Leave stored functions out."
)


def _functions(drop: bool) -> str | None:
    return "drop" if drop else None


def _with(old: Any, changes: list[tuple[str, str]]) -> Any:
    """The metadata with some keys set. What is no JSON is a string."""
    if not changes:
        return old
    if old is not None and not isinstance(old, dict):
        raise ValueError("The metadata is not a dict: no key of it can be set.")
    new = dict(old or {})
    for key, text in changes:
        try:
            new[key] = json.loads(text)
        except ValueError:
            new[key] = text
    return new


# ---- One.


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@_several("--keep", "PATTERN", "Keep only such leaves.")
@_several("--drop", "PATTERN", "Leave such leaves out.")
@_several("--rename", "REGEX=NEW", "Change names, as re.sub does.", callback=_pair)
@click.option("--cast", metavar="DTYPE", help="Cast floating arrays, as to bfloat16.")
@_metadata
@_drop_functions
@_overwrite
@_progress
@_output.command
def edit(
    source: str,
    target: str,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    rename: list[tuple[str, str]],
    cast: str | None,
    metadata: list[tuple[str, str]],
    drop_functions: bool,
    overwrite: bool,
    progress: bool,
) -> CommandResult:
    """Write a checkpoint with other leaves, names, dtypes, metadata.

    TARGET may be SOURCE: then it is edited in place, and where only names, metadata or
    some leaves change, no array is written again. A PATTERN is a name of a leaf or a
    node, in which * is any text. The options may be given several times.
    """
    ckpt = _paths.open_one(source)
    is_same = source == target or _root.place(target) == ckpt.path
    target = ckpt.path if is_same else target
    names = _chosen(list(ckpt), keep, drop)
    new = _renamed(names, rename)
    is_ours = ckpt._source.foreign is None and ckpt.layout == "ocdbt"
    _serialise.tree_serialise_leaves(
        target,
        _edited.edited(ckpt, dict(zip(names, new))),
        filter_spec=True,
        dtype=cast,
        metadata=_with(ckpt.metadata, metadata),
        layout=ckpt.layout if ckpt.layout in _root.LAYOUTS else "ocdbt",
        overwrite=overwrite or is_same,
        progress=progress,
        reuse=ckpt.path if is_ours else None,
        functions=_functions(drop_functions),
    )
    return _written(target)


def _chosen(names: list[str], keep: Sequence[str], drop: Sequence[str]) -> list[str]:
    for option, patterns in (("--keep", keep), ("--drop", drop)):
        for pattern in patterns:
            if not any(_paths.is_match(name, pattern) for name in names):
                raise ValueError(f"`{option} {pattern}` is that of no leaf.")
    has = lambda name, patterns: any(_paths.is_match(name, x) for x in patterns)
    kept = [name for name in names if not keep or has(name, keep)]
    kept = [name for name in kept if not has(name, drop)]
    if not kept:
        raise ValueError("No leaf is left: nothing was written.")
    return kept


def _renamed(names: list[str], rules: list[tuple[str, str]]) -> list[str]:
    for rule in rules:
        new = _rename.renamed_names(_rename.rename([rule]), names)
        if new == names:
            raise ValueError(f"`--rename {rule[0]}={rule[1]}` changes no name.")
        names = new
    return names


# ---- Several.


_METHODS = ("average", "ema", "slerp", "task_arithmetic", "ties", "dare")
_sources = click.argument("sources", type=PATH, nargs=-1, required=True)
_to = click.option("--to", "target", required=True, type=PATH, help="Where to write.")
_node = click.option("--node", default="", metavar="NAME", help="Only this node.")
_last = click.option(
    "--last", type=click.IntRange(1), help="The newest steps of one run: so many."
)
_weights = click.option(
    "--weights", callback=_numbers, metavar="W,W,...", help="One for each source."
)
_static = _several("--static", "PATTERN", "Static fields that may differ.")


@click.command()
@_sources
@_to
@_last
@_node
@_weights
@_static
@_metadata
@_drop_functions
@_overwrite
@_progress
@_output.command
def average(
    sources: tuple[str, ...], last: int | None, weights: list[float] | None, **rest: Any
) -> CommandResult:
    """Write the average of checkpoints, or of steps of a run.

    Floating arrays are averaged. All else has to be equal: --node model takes only
    that node, without the step and the optimiser. Of the metadata that is kept on which
    all agree.
    """
    if last is not None:
        sources = _newest(sources, last)
    return _write_merged(sources, None, merging.average(weights), **rest)


def _newest(sources: tuple[str, ...], count: int) -> tuple[str, ...]:
    found = _paths.open_any(sources[0]) if len(sources) == 1 else None
    if not isinstance(found, Steps):
        raise ValueError("`--last` takes one SOURCE, the directory of a run.")
    steps = found.complete()[-count:]
    if len(steps) < count:
        raise ValueError(f"The run has only {len(steps)} complete steps.")
    return tuple(f"{found.root.url}/{step}/default" for step in steps)


@click.command()
@_sources
@_to
@click.option("--method", type=click.Choice(_METHODS), required=True)
@click.option("--base", type=PATH, help="What the sources were trained from.")
@_node
@_weights
@click.option("--t", type=float, default=0.5, help="slerp: the part of the way.")
@click.option("--decay", type=float, default=0.9, help="ema: of what came before.")
@click.option("--density", type=float, default=0.2, help="ties, dare: what is kept.")
@click.option("--seed", type=int, default=0, help="dare: of what is dropped.")
@_static
@_metadata
@_drop_functions
@_overwrite
@_progress
@_output.command
def merge(
    sources: tuple[str, ...],
    method: str,
    base: str | None,
    weights: list[float] | None,
    t: float,
    decay: float,
    density: float,
    seed: int,
    **rest: Any,
) -> CommandResult:
    """Write a merge of checkpoints: slerp, TIES, DARE and others.

    See `ec.merging`. task_arithmetic, ties and dare need a --base. Floating arrays are
    merged. All else has to be equal.
    """
    by_task = 1.0 if weights is None else weights[0] if len(weights) == 1 else weights
    methods: dict[str, Callable[[], Method]] = {
        "average": lambda: merging.average(weights),
        "ema": lambda: merging.ema(decay),
        "slerp": lambda: merging.slerp(t),
        "task_arithmetic": lambda: merging.task_arithmetic(by_task),
        "ties": lambda: merging.ties(by_task, density),
        "dare": lambda: merging.dare(by_task, density, jr.key(seed)),
    }
    return _write_merged(sources, base, methods[method](), **rest)


def _write_merged(
    sources: tuple[str, ...],
    base: str | None,
    method: Method,
    *,
    target: str,
    node: str,
    static: tuple[str, ...],
    metadata: list[tuple[str, str]],
    drop_functions: bool,
    **options: Any,
) -> CommandResult:
    every = [_paths.open_one(path) for path in sources]
    merged = _merge.merge(
        [_tree(ckpt, node) for ckpt in every],
        method,
        base=None if base is None else _tree(_paths.open_one(base), node),
        static=list(static) if static else "error",
    )
    common = _common([ckpt.metadata for ckpt in every])
    _serialise.tree_serialise_leaves(
        target,
        merged,
        filter_spec=True,
        metadata=_with(common, metadata),
        functions=_functions(drop_functions),
        **options,
    )
    return _written(target)


def _common(every: list[Any]) -> Any:
    """Entries on which all metadata agree: hyperparameters, and not the metrics of a
    step."""
    first, *others = every
    if isinstance(first, dict) and all(isinstance(other, dict) for other in others):
        is_same = lambda key: all(other.get(key) == first[key] for other in others)
        return {key: first[key] for key in first if is_same(key)}
    return first if all(other == first for other in others) else None


def _tree(ckpt: Checkpoint, node: str) -> Any:
    return _paths.node(ckpt, node) if node else ckpt.tree


# ---- Other formats.


_skip = _several("--skip", "PATTERN", "Leaves that .safetensors cannot hold.")


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option("--layout", type=click.Choice(_root.LAYOUTS), default="ocdbt")
@click.option(
    "--compression", type=click.Choice(["lz4", "zstd"]), help="Of large leaves."
)
@click.option("--chunks", type=int, metavar="BYTES", help="The size of chunks.")
@_skip
@_drop_functions
@_overwrite
@_progress
@_output.command
def convert(
    source: str, target: str, skip: tuple[str, ...], drop_functions: bool, **rest: Any
) -> CommandResult:
    """Write a checkpoint of any format as another one.

    TARGET is a file if it ends in .zip or .safetensors, else a directory or a URL.
    """
    functions = _functions(drop_functions)
    ckpt = _paths.open_one(source)
    _convert.convert(ckpt, target, skip=skip, functions=functions, **rest)
    return _written(target)


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@_node
@_skip
@_several("--rename", "REGEX=NEW", "Change names, as re.sub does.", callback=_pair)
@_metadata
@_overwrite
@_progress
@_output.command
def export(
    source: str,
    target: str,
    node: str,
    skip: tuple[str, ...],
    rename: list[tuple[str, str]],
    metadata: list[tuple[str, str]],
    overwrite: bool,
    progress: bool,
) -> CommandResult:
    """Write the arrays of a checkpoint to a .safetensors file.

    Libraries for PyTorch want --metadata format=pt. What the file cannot hold is an
    error, which says what to --skip.
    """
    _export.export_safetensors(
        target,
        _tree(_paths.open_one(source), node),
        skip=skip,
        rename=rename or None,
        metadata=dict(metadata) or None,
        overwrite=overwrite,
        progress=progress,
    )
    return _written(target)


COMMANDS = (edit, average, merge, convert, export)
