"""The pairs of a graft: which node of the model takes which node of the checkpoint."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .._load import _rename
from .._load._rename import Rename
from ..adapters import Adapter
from ._sides import Model, Node, said, Saved, Stored


class Group(NamedTuple):
    """Nodes whose leaves stand for each other, name by name. Only an adapter takes
    several nodes on one side."""

    left: list[Node]
    right: list[Node]


class Pair(NamedTuple):
    label: str
    groups: list[Group]
    adapter: Adapter | None
    problems: list[tuple[str, str]]
    renamed: bool


# ---- Renames.


def _renamed(
    how: Rename, right: list[Node], label: str
) -> tuple[list[Node], list[tuple[str, str]]]:
    """The nodes with their leaves renamed; and the rules that found nothing."""
    used: set[int] = set()
    adapters = [rule.adapter and _adapter(rule.adapter) for rule in how.all_rules]
    out = []
    for node in right:
        leaves: dict[str, Saved] = {}
        for old, saved in node.leaves.items():
            new, numbers = _rename.apply(how, old, used, label)
            if new in leaves:
                raise ValueError(
                    f"The rename of `{label}` gives the name `{new}` to both "
                    f"`{leaves[new].lazy.name}` and `{saved.lazy.name}`."
                )
            some = (adapters[number] for number in numbers)
            leaves[new] = saved._replace(adapters=tuple(x for x in some if x))
        out.append(Node(node.name, leaves))
    unused = [
        (f"{label}: {rule.pattern.pattern!r}", "")
        for number, rule in enumerate(how.all_rules)
        if number not in used
    ]
    return out, unused


# ---- Pairs.


def _adapter(how: Callable[..., Any]) -> Adapter:
    if isinstance(how, Adapter):
        return how
    name = getattr(how, "__name__", type(how).__name__)
    return Adapter(name, how, own=True)


def parse(given: Any, label: str, model: Model, stored: Stored) -> Pair:
    """One pair as the user wrote it. **Raises:** naming it by `label`."""
    if not isinstance(given, (tuple, list)) or not 2 <= len(given) <= 4:
        raise TypeError(
            f"`{label}` must be `(where in the model, where in the checkpoint)`, and "
            f"then a rename or an adapter or both; not {_shown(given)}."
        )
    where, source, *rest = given
    how: dict[str, Any] = {}
    for x in rest:
        kind = "rename" if isinstance(x, Rename) else "adapter"
        if kind in how or not (isinstance(x, Rename) or callable(x)):
            raise TypeError(
                f"`{label}` has {_shown(x)} after its two sides, where a pair takes "
                "one `ec.rename(...)` and one adapter, `(saved, like) -> array`."
            )
        how[kind] = x
    adapter = _adapter(how["adapter"]) if "adapter" in how else None
    try:
        left = model.nodes(where, f"{label}[0]")
        right = stored.nodes(source, f"{label}[1]")
    except Exception as e:
        if _fits_swapped(where, source, model, stored):
            raise ValueError(
                f"{said(e).rstrip('.')}. The sides of `{label}` look swapped: the "
                "model's is the first, and the checkpoint's the second."
            ) from e
        raise
    groups = _groups(label, left, right, adapter)
    problems = []
    if "rename" in how:
        flat = [node for group in groups for node in group.right]
        flat, problems = _renamed(how["rename"], flat, label)
        rest = iter(flat)
        groups = [Group(g.left, [next(rest) for _ in g.right]) for g in groups]
    return Pair(label, groups, adapter, problems, "rename" in how)


def _fits_swapped(where: Any, source: Any, model: Model, stored: Stored) -> bool:
    try:
        model.nodes(source, "")
        stored.nodes(where, "")
    except Exception:
        return False
    return True


def _groups(
    label: str, left: list[Node], right: list[Node], adapter: Adapter | None
) -> list[Group]:
    many = None if adapter is None else adapter.many
    if many is not None:
        one, several = (left, right) if many == "saved" else (right, left)
        sides = ("model", "checkpoint")
        side, other = sides if many == "saved" else sides[::-1]
        if len(one) == 1:
            several = _spread(several) or several
            nodes = (one, several) if many == "saved" else (several, one)
            return [Group(*nodes)]
        raise ValueError(
            f"`{label}`: `{adapter}` takes one node of the {side}, and several of the "
            f"{other}; its side gives {len(one)}."
        )
    if len(left) != len(right):
        # A list on one side, and some of a list on the other, as a slice gives them.
        a, b = _spread(left) or left, _spread(right) or right
        if len(a) == len(b):
            left, right = a, b
    if len(left) == len(right):
        return [Group([a], [b]) for a, b in zip(left, right)]
    if adapter is not None and 1 in (len(left), len(right)):
        return [Group(left, right)]
    raise ValueError(
        f"`{label}` pairs {_count(left)} of the model ({some(left)}) with "
        f"{_count(right)} of the checkpoint ({some(right)}). Give as many on both "
        "sides, or an adapter that makes the one of the other, as "
        "`ec.adapters.stack()` does."
    )


def _count(nodes: list[Node]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"


def some(nodes: list[Node]) -> str:
    shown = ", ".join(f"`{node.name or '.'}`" for node in nodes[:3])
    return shown + (", ..." if len(nodes) > 3 else "")


def _spread(nodes: list[Node]) -> list[Node] | None:
    """The elements of the one node, if it is a sequence."""
    if len(nodes) != 1:
        return None
    name, leaves = nodes[0]
    out: dict[str, Node] = {}
    for below, leaf in leaves.items():
        first, _, rest = below.partition(".")
        if not first.isdecimal():
            return None
        full = f"{name}.{first}" if name else first
        out.setdefault(first, Node(full, {})).leaves[rest] = leaf
    return [out[key] for key in sorted(out, key=int)]


def _shown(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 60 else f"a `{type(x).__name__}`"
