"""`rebuild`: a tree of its own classes, without a `like`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jaxtyping import PyTree

from .._kernel._errors import DamagedError
from .._kernel._format import _names, _text
from .._kernel._load import _checkpoint, _deserialise, _load_options, _open
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._load_options import LoadOptions, TogetherKeywords
from .._kernel._runtime import _arguments, _gc
from .._kernel._storage._open_files import Readable
from .._kernel._tree import _folding, _nearest
from . import _allowlist
from ._builder import Builder, Sharding
from ._decode import Malformed


@_arguments.checked(_load_options.DEFAULTS)
@_open.retried_if_replaced(0, "path")
@_gc.paused()
def rebuild(
    path: str | os.PathLike[str] | Readable | Checkpoint,
    known: Sequence[Any],
    source: str | Callable[[Any], Any] | None = None,
    replace: Mapping[str, Any] = {},
    *,
    sharding: Sharding | None = None,
    **options: Unpack[TogetherKeywords],
) -> PyTree:
    """Loads a tree without a `like`: each node is made again, of the class that it had.

    A checkpoint records the type of every node, static fields, and the names of
    functions. So you need the code of the classes, but not the hyperparameters. You get
    what a load into the tree that was saved would give, but arrays of NumPy in the byte
    order of this machine. No `__init__` is called.

    **Arguments:**

    - `path`: as in [`open`][], or an open [`Checkpoint`][].
    - `known`: the classes and functions that names in the checkpoint may stand for, and
        modules, as in `[MyNet, eqx.nn, jax.nn, optax]`. A module stands for the classes
        and functions of its package that are in it, or in those of its submodules that
        have been imported. Nothing else is found, and no name causes an import.
        Arrays, numbers, containers of Python, `eqx.nn.State` and
        `jax.tree_util.Partial` are always known.
    - `source`: the node to make: a dotted name, or a function of the checkpoint's own
        tree. By default, the whole tree. Make a model and its `eqx.nn.State` in one
        call, so that they belong together.
    - `replace`: a dict from dotted names to values: for functions without a name, such
        as lambdas, and for what was not saved. An error lists the names. For a node,
        give a `like` of it, into which its leaves are loaded.
    - `sharding`: for JAX arrays and typed keys: a `jax.sharding.Sharding`, or a
        function of the name and the abstract leaf, as [`partition_rules`][] makes.
    - `options`: as in [`materialise`][].

    **Returns:** the tree, with its leaves read.

    **Raises:** one `RuntimeError` that lists all that `known` lacks and `replace` has
    to give; `ValueError` for a key of `replace` that names nothing; [`DamagedError`][];
    otherwise as `tree_deserialise_leaves`.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.random as jr, eqx_ckpt as ec
        >>> model = eqx.nn.MLP(2, 2, 8, 1, activation=jax.nn.gelu, key=jr.key(0))
        >>> ec.tree_serialise_leaves("memory://rebuild", {"model": model, "step": 3})
        >>> again = ec.rebuild("memory://rebuild", [eqx.nn, jax.nn], source="model")
        >>> bool(eqx.tree_equal(again, model))
        True

        ```
    """
    _load_options.check(LoadOptions(**options))
    allowed = _allowlist.finder(known)
    ckpt = _checkpoint.open(path)
    pinned = _checkpoint.source_of(ckpt)
    leaves = pinned.index.leaves
    if leaves.tree is None:
        raise RuntimeError(
            f"The checkpoint at `{ckpt.path}` does not say what its nodes were: it is "
            "of another format. Load it into a `like`, by `tree_deserialise_leaves`."
        )
    below = _checkpoint.resolve_source(ckpt, source, leaves, lambda name: [name])
    try:
        builder = Builder(ckpt, allowed, replace, sharding)
        tree = builder.build(below)
    except Malformed as e:
        raise DamagedError(
            f"The structure in the index of the checkpoint at `{ckpt.path}` is never "
            f"saved: {_text.escape(str(e))}. Nothing was loaded."
        ) from e
    except RecursionError as e:
        raise RuntimeError(
            f"The checkpoint at `{ckpt.path}` has nodes that are nested too deep to be "
            "made again; nothing was loaded. Load it into a `like`, by "
            "`tree_deserialise_leaves`, or a part of it with `source`."
        ) from e
    if builder.problems.rows:
        raise RuntimeError(
            f"The checkpoint at `{ckpt.path}` cannot be rebuilt of what is given; "
            "nothing was loaded.\n" + "\n".join(_lines(builder.problems.rows))
        )
    _check_used(replace, builder)
    return _deserialise.materialise(tree, **options)


def _check_used(replace: Mapping[str, Any], builder: Builder) -> None:
    unused = [key for key in replace if key not in builder.used]
    if unused:
        near = _nearest.NameIndex(builder.could).nearest(str(unused[0]), 3)
        hint = f" The nearest there are {_folding.some(near)}." if near else ""
        raise ValueError(
            f"`replace` has {unused[0]!r}, which names no value or node that is made: "
            f"leaves that are stored are loaded.{hint}"
        )


_WITHOUT = (
    "  If you do not have their code, write classes of the same names and fields, or "
    "load without any: `ec.materialise(ec.open(path).tree)`."
)


def _at(name: str) -> str:
    return f"`{name}`" if name not in ("", _names.ROOT) else "the whole tree"


def _lines(rows: Mapping[str, list[tuple[str, str]]]) -> list[str]:
    lines = []
    lacks: dict[str, list[str]] = {}
    for name, field in rows.get("lacks", []):
        lacks.setdefault(name, []).append(field)
    if lacks:
        lines.append(
            "  `known` lacks these. Add them, or modules of their package that have "
            "them:"
        )
        rest = {name: len(fields) - 1 for name, fields in lacks.items()}
        more = {name: f" and {n} more" if n else "" for name, n in rest.items()}
        lines += _text.some(
            f"    {name}  (at {_at(fields[0])}{more[name]})"
            for name, fields in lacks.items()
        )
        lines.append(_WITHOUT)
    if rows.get("several"):
        lines.append("  `known` has several of these names. Give the one itself:")
        several = dict(rows["several"]).items()
        lines += _text.some(f"    {name}  ({text})" for name, text in several)
    wanted = [*rows.get("value", []), *rows.get("node", [])]
    if wanted:
        lines.append("  Values that are not in the checkpoint. Give them by `replace`:")
        lines += _text.some(f"    {name!r}: {text}" for name, text in wanted)
        some = ", ".join(f"{name!r}: ..." for name, _ in wanted[:3])
        more = ", ..." if len(wanted) > 3 else ""
        lines.append(_text.bounded(f"Pass `replace={{{some}{more}}}`."))
    if rows.get("node"):
        lines.append("What is given for a node is a `like`, which its leaves go into.")
    return lines
