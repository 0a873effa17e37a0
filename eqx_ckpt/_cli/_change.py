"""`edit`, `average`, `merge`, `convert` and `export`: checkpoints from checkpoints."""

import functools as ft
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import jax.random as jr

from .. import merging
from .._edit import _edited, _merge
from .._formats import _foreign_index
from .._interop import _convert, _export
from .._kernel._format import _layouts, _names, _text
from .._kernel._format._index import BaseFacts
from .._kernel._load import _checkpoint, _extra_files
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._run._steps import Steps
from .._kernel._save import _serialise
from .._kernel._save._options import SaveOptions
from .._kernel._storage import _root
from .._kernel._tree import _compare
from .._orbax import _write
from .._rename import _rename
from .._rename._rename import Rename
from .._show import _facts
from .._stores._hub import HubBackend
from ..merging import Method
from . import _paths
from ._commands import METHODS
from ._output import CommandResult, Span


def _written(path: str) -> CommandResult:
    """Report on the checkpoint that a command has written."""
    ckpt = _checkpoint.open(path)
    data = {"path": ckpt.path, "leaves": len(ckpt), "nbytes": ckpt.nbytes}
    count = _facts.leaf_count(len(ckpt))
    text = Span(f"  written: {count}, {_text.size(ckpt.nbytes)}")
    return CommandResult(data, [[Span(ckpt.path, "title"), text]])


def _with(old: object, changes: list[tuple[str, str]]) -> Any:
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


def edit(
    source: str,
    target: str,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    rename: list[tuple[str, str]],
    cast: str | None,
    metadata: list[tuple[str, str]],
    overwrite: bool,
    **options: Any,
) -> CommandResult:
    ckpt = _checkpoint.open(source)
    is_same = source == target or _root.place(target) == ckpt.path
    target = ckpt.path if is_same else target
    names = _chosen(list(ckpt), keep, drop)
    how = _rules(names, rename)
    layout: Any = ckpt.layout if ckpt.layout in _layouts.LAYOUTS else "ocdbt"
    source_of_leaves = _checkpoint.source_of(ckpt)
    is_ours = source_of_leaves.is_ours and layout in _layouts.PACKED
    given = SaveOptions(
        filter_spec=True,
        dtype=cast,
        metadata=_with(ckpt.metadata, metadata),
        base=ckpt.base,
        own=_extra_files.own_states(source_of_leaves),
        layout=layout,
        overwrite=overwrite or is_same,
        reuse=ckpt.path if is_ours else None,
        **options,
    )
    _serialise.save(target, _edited.edited(ckpt, names, how), given)
    return _written(target)


def _chosen(names: list[str], keep: Sequence[str], drop: Sequence[str]) -> list[str]:
    for option, patterns in (("--keep", keep), ("--drop", drop)):
        for pattern in patterns:
            if not any(_compare.selects(pattern, name) for name in names):
                raise ValueError(f"`{option} {pattern}` is that of no leaf.")
    has = lambda name, patterns: any(_compare.selects(x, name) for x in patterns)
    kept = [x for x in names if (not keep or has(x, keep)) and not has(x, drop)]
    if not kept:
        raise ValueError("No leaf is left: nothing was written.")
    return kept


def _rules(names: list[str], rules: list[tuple[str, str]]) -> Rename:
    how = _rename.rename(rules)
    used: set[int] = set()
    for name in names:
        _rename.apply(how, name, used, "--rename")
    for number, (pattern, new) in enumerate(rules):
        if number not in used:
            raise ValueError(f"`--rename {pattern}={new}` changes no name.")
    return how


# ---- Several.


# What is given for arguments of a method that have no default in Python.
_DEFAULTS = {"t": 0.5, "decay": 0.9, "density": 0.2, "epsilon": 0.1}
_DEFAULTS |= {"weights": 1.0, "seed": 0}
# Arguments of methods that options have another name for.
_OPTIONS = {"key": "seed", "lambda_": "lambda"}


def average(
    sources: tuple[str, ...],
    last: int | None,
    weights: float | list[float] | None,
    **rest: Any,
) -> CommandResult:
    if last is not None:
        sources = _newest(sources, last)
    numbers = [weights] if isinstance(weights, int | float) else weights
    return _write_merged(sources, None, merging.average(numbers), **rest)


def _newest(sources: tuple[str, ...], count: int) -> tuple[str, ...]:
    found = _paths.open_any(sources[0]) if len(sources) == 1 else None
    if not isinstance(found, Steps):
        raise ValueError("`--last` takes one SOURCE, the directory of a run.")
    left = found.left_steps()
    steps = [step for step in found.complete() if step not in left][-count:]
    if len(steps) < count:
        raise ValueError(f"The run has only {len(steps)} complete steps.")
    return tuple(str(found.path(step)) for step in steps)


def merge(
    sources: tuple[str, ...], method: str, base: str | None, **rest: Any
) -> CommandResult:
    names = ("weights", "t", "decay", "density", "gamma", "epsilon", "normalize")
    given = {name: rest.pop(name) for name in (*names, "rescale", "seed", "lambda")}
    return _write_merged(sources, base, _method(method, given), **rest)


def _method(name: str, options: dict[str, Any]) -> Method:
    """The method of a name, with the options that were given.

    **Raises:** `ValueError` for an option that it does not have.
    """
    make = _named(name)
    parameters = {} if isinstance(make, Method) else inspect.signature(make).parameters
    given = {key: value for key, value in options.items() if value is not None}
    arguments: dict[str, Any] = {}
    for argument, parameter in parameters.items():
        option = _OPTIONS.get(argument, argument)
        is_needed = parameter.default is parameter.empty and option in _DEFAULTS
        if option in given or is_needed:
            arguments[argument] = given.pop(option, _DEFAULTS.get(option))
    for option in given:
        raise ValueError(f"`--{option}` is no option of the method `{name}`.")
    if "key" in arguments:
        arguments["key"] = jr.key(arguments["key"])
    if arguments.get("normalize") == "none":
        arguments["normalize"] = None
    found = make if isinstance(make, Method) else make(**arguments)
    if not isinstance(found, Method):
        raise ValueError(
            f"`--method {name}` is no `ec.merging.Method`, and gives none when it is "
            "called."
        )
    return found


def _named(name: str) -> Any:
    """The object of a name in `merging`, or at `module:name`."""
    if name in METHODS:
        return getattr(merging, name)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(
            f"`--method {name}` is none of {', '.join(METHODS)}, and no `module:name`."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # As `python -m` does.
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"`--method {name}`: {e}.") from e


def _write_merged(
    sources: tuple[str, ...],
    base: str | None,
    method: Method,
    *,
    target: str,
    node: str,
    static: tuple[str, ...],
    metadata: list[tuple[str, str]],
    **options: Any,
) -> CommandResult:
    every = [_checkpoint.open(path) for path in sources]
    merged = _merge.merge(
        [_tree(ckpt, node) for ckpt in every],
        method,
        base=None if base is None else _base(_checkpoint.open(base), node),
        static=list(static) if static else "error",
    )
    common = _common([ckpt.metadata for ckpt in every])
    _serialise.tree_serialise_leaves(
        target,
        merged,
        filter_spec=True,
        metadata=_with(common, metadata),
        base=_common_base(every),
        **options,
    )
    return _written(target)


def _common(every: list[Any]) -> Any:
    """Entries on which all metadata agree: hyperparameters, and not the metrics of a
    step."""
    first, *others = every
    text = ft.partial(json.dumps, sort_keys=True)  # To `==` 1 and True are one.
    if all(isinstance(one, dict) for one in every):
        return {
            key: value
            for key, value in first.items()
            if all(key in x and text(x[key]) == text(value) for x in others)
        }
    return first if all(text(other) == text(first) for other in others) else None


def _common_base(every: list[Checkpoint]) -> BaseFacts | None:
    """The base of adapters that have one, wherever it was when each was saved."""
    saves = {ckpt.base and ckpt.base[1:] for ckpt in every}
    return every[0].base if len(saves) == 1 else None


def _base(ckpt: Checkpoint, node: str) -> Any:
    """The node of a base, or the whole of one that is only what the node is."""
    has_it = any(_names.is_under(name, node) for name in ckpt)
    return _tree(ckpt, node if has_it else "")


def _tree(ckpt: Checkpoint, node: str) -> Any:
    return _paths.node(ckpt, node) if node else ckpt.tree


# ---- Other formats.


def convert(source: str, target: str | None, **rest: Any) -> CommandResult:
    options = {name: x for name, x in rest.items() if x is not None}
    if target is None:
        if [name for name, x in options.items() if x] != ["orbax"]:
            raise click.UsageError("Give a TARGET, or --orbax and nothing else.")
        _write.write_orbax(source)
        return _written(source)
    _convert.convert(_checkpoint.open(source), target, **options)
    return _written(target)


def push(source: str, target: str, **rest: Any) -> CommandResult:
    if not isinstance(_root.resolve(target), HubBackend):
        raise click.BadParameter(f"`{target}` does not begin with `hf://`.")
    return convert(source, target, **rest)


def export(
    source: str,
    target: str,
    node: str,
    rename: list[tuple[str, str]],
    metadata: list[tuple[str, str]],
    **options: Any,
) -> CommandResult:
    ckpt = _checkpoint.open(source)
    own = None if node else ckpt.metadata
    is_held = _foreign_index.is_texts(own)
    texts = {**(own if is_held else {}), **dict(metadata)}
    _export.export_safetensors(
        target,
        _tree(ckpt, node),
        rename=rename or None,
        metadata=texts or None,
        **options,
    )
    done = _written(target)
    if own is None or is_held:
        return done
    lost = "without the metadata of the source, which are not a dict of strings"
    data = {**done.data, "lost": ["metadata"]}
    return CommandResult(data, [*done.lines, [Span(f"  {lost}", "odd")]])
