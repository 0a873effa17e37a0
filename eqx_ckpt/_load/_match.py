"""Which stored leaf stands for which of `like`; and one report if any does not."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._format import _names, _text
from .._format._leaves import Leaves, Record
from .._tree import (
    _filters,
    _flatten,
    _leaf,
    _nearest,
    _register,
    _restore,
    _select,
    _show,
    _static,
)
from .._tree._filters import FilterSpec, IsLeaf
from .._tree._restore import Target
from .._tree._static import Static


class Pair(NamedTuple):
    """A stored leaf and the number of the leaf of `like` that it stands for."""

    number: int
    record: Record
    target: Target


class Match(NamedTuple):
    flat: _flatten.Flat
    pairs: list[Pair]


_choices = {
    "missing": ("error", "keep"),
    "unexpected": ("error", "ignore"),
}


def _check_choices(**given: str) -> None:
    for name, value in given.items():
        if value not in _choices[name]:
            allowed = " or ".join(f'"{x}"' for x in _choices[name])
            raise ValueError(f"`{name}` must be {allowed}, not {value!r}.")


class _Report:
    """The problems of a load, by their kind."""

    def __init__(self) -> None:
        self.first = ""
        self.rows: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, name: str, text: str = "", first: str = "") -> None:
        self.rows.setdefault(kind, []).append((name, text))
        self.first = self.first or first


def match(
    what: str,
    saved: Leaves,
    like: PyTree,
    filter_spec: FilterSpec = _leaf.is_storable,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    source: str = "",
    missing: str = "error",
    unexpected: str = "error",
    static: Static = "error",
    cast: bool = False,
) -> Match:
    """Pairs the selected leaves of `like` with stored ones, by name. Errors say `what`
    these are in.

    **Raises:** one `RuntimeError` that lists all that does not fit.
    """
    _check_choices(missing=missing, unexpected=unexpected)
    flat = _flatten.flatten(like, is_leaf)
    # Also of a field that is new an error says the name.
    own: Iterable[str] = ()
    if not isinstance(static, str):
        own = _static.all_names(_static.record(like, is_leaf, flat.structure), source)
    passes = _static.passing(static, saved.statics, what, own)
    chosen = _filters.selected(filter_spec, like, flat.leaves, is_leaf)
    selection = _select.select(
        where, flat.paths, flat.leaves, flat.structure, chosen, is_leaf
    )
    names = [_names.name_of(path, source)[0] for path in flat.paths]
    stored = stored_names(saved, like, flat, names, source)
    report = _Report()
    thing = what.partition(" at ")[0]
    pairs = []
    any_selected = False
    fits: dict[Any, _restore.Misfit | None] = {}
    for number, good in enumerate(chosen):
        if not good or (
            selection.places is not None and number not in selection.places
        ):
            continue
        any_selected = True
        path, leaf, name = flat.paths[number], flat.leaves[number], names[number]
        target = target_of(name, leaf)
        if cast:
            target = target._replace(cast=True)
        place = saved.places.get(stored[number])
        if place is None:
            if missing == "keep" and not _is_abstract(leaf):
                continue
            first = f"Error at leaf with path {path}: `{name}` is not in the {thing}."
            kind = "missing" if missing == "error" else "abstract"
            text = _restore.show_target(target)
            if stored[number].startswith(_no_entry):
                text += f"  ({stored[number]})"
            report.add(kind, name, text, first)
            continue
        record = saved.record(place, known=True)
        key = (saved.template[place], target)
        if key not in fits:
            fits[key] = _restore.misfit(record.template, target)
        problem = fits[key]
        if problem is not None:
            was, wanted = _leaf.show(record.template), _restore.show_target(target)
            text = f"saved {was}, `like` has {wanted}"
            if problem.hint:
                text += f"  ({problem.hint})"
            first = (
                f"Deserialised leaf at path {path} has changed {problem.what}: "
                f"`{name}` is {was} in the {thing} and {wanted} in `like`."
            )
            report.add(problem.what, name, text, first)
            continue
        pairs.append(Pair(number, record, target))
    if not any_selected and not any(chosen):
        raise ValueError(
            "Nothing to load: `filter_spec` selects no leaf of `like`. A skeleton made "
            "with `eqx.filter(..., eqx.is_array)` has none: pass the whole skeleton."
        )
    wholes = [_flatten.module_name(path, source) for path in selection.wholes]
    if unexpected == "error":
        leaves = list(zip(stored, flat.leaves, chosen))
        _find_unexpected(saved, leaves, wholes, filter_spec, source, report)
    if static != "ignore":
        _find_static(saved, like, is_leaf, wholes, source, passes, report)
    if report.rows:
        raise RuntimeError(_message(what, saved, source, report))
    if not pairs:
        some = [name for name, good in zip(names, chosen) if good]
        hint = _source_hint(saved, some, source)
        raise RuntimeError(
            f"None of the leaves of `like` that are selected is in the {what}, such as "
            f"`{some[0]}`. {hint or 'Names begin with those of `source`.'}"
        )
    return Match(flat, pairs)


def target_of(name: str, leaf: Any) -> Target:
    try:
        return _restore.target_of(leaf)
    except (TypeError, ValueError) as e:
        raise type(e)(f"Leaf `{name}`: {e}") from e.__cause__


def _is_abstract(leaf: Any) -> bool:
    return isinstance(_register.to_leaf(leaf), _leaf.jax.ShapeDtypeStruct)


# What no leaf is stored under: an entry of a State that the checkpoint does not have.
_no_entry = "no entry of the saved State is that of `"


def stored_names(
    saved: Leaves, like: PyTree, flat: _flatten.Flat, names: list[str], source: str
) -> list[str]:
    """The name under which each leaf of `like` is stored.

    It is its own name but for the entries of a State. Those are named by position, and
    are matched by the StateIndex that they belong to.
    """
    entries = _flatten.state_entries(like, flat.paths, source)
    if not entries:
        return names
    out = list(names)
    by_state: dict[str, dict[int, str | None]] = {}
    for entry in entries.values():
        by_state.setdefault(entry.state, {})[entry.position] = entry.label
    moves = {}
    for state, labels in by_state.items():
        below = state + "." if state else ""
        places = (p for name, p in saved.places.items() if name.startswith(below))
        there = _flatten.stored_entries(saved, state, places)
        moves[state] = _flatten.match_entries(state, labels, there)
    for number, entry in entries.items():
        below = entry.state + "." if entry.state else ""
        rest = names[number][len(below) :].partition(".")[2]
        to = moves[entry.state][entry.position]
        if to is None:
            out[number] = f"{_no_entry}{(entry.label or '')[1:]}`"
        else:
            out[number] = below + str(to) + ("." + rest if rest else "")
    return out


def _find_unexpected(
    saved: Leaves,
    like: list[tuple[str, Any, bool]],
    wholes: list[str],
    filter_spec: FilterSpec,
    source: str,
    report: _Report,
) -> None:
    """`like`: the name a leaf is stored under, the leaf, and whether it is chosen."""
    # What a leaf of `like` stands for that is loaded, or would be if it was chosen.
    known = {name for name, x, good in like if good or _filters.by_default(x)}
    whole = _names.within(wholes)
    extra = [n for n in saved.names if n not in known and whole(n) is not None]
    if not extra:
        return
    others = {name: leaf for name, leaf, _ in like}
    specs: dict[Any, Any] = dict(_filters.prefixes(filter_spec, source))
    nearest = _names.within(specs)
    chosen = [specs.get(nearest(name), True) for name in extra]
    records = [saved.record(saved.places[name]) for name in extra]
    leaves = [
        _leaf.stand_in(r.template.kind, _leaf.abstract(r.template)) for r in records
    ]
    for record, good in zip(records, _filters.evaluate(chosen, leaves)):
        text = _leaf.show(record.template)
        if record.name in others:
            leaf = others[record.name]
            text += f"  (`like` has a `{type(leaf).__name__}` there"
            # A str that `filter_spec` leaves out may have been made of what this is.
            is_text = isinstance(leaf, (str, bytes)) or callable(leaf)
            if not is_text:
                good = good or filter_spec is _leaf.is_storable
                text += ": is its type to be registered?"
            text += ")"
        if good:
            report.add("unexpected", record.name, text)


def _find_static(
    saved: Leaves,
    like: PyTree,
    is_leaf: IsLeaf,
    wholes: list[str],
    source: str,
    passes: Callable[[str], bool],
    report: _Report,
) -> None:
    if not saved.statics.of:
        return
    whole = _names.within(wholes)
    for path, module in _flatten.modules(like, is_leaf):
        name = _flatten.module_name(path, source)
        if name not in saved.statics.of or whole(name) is None:
            continue
        for x in _static.changes(saved.statics, module, name, passes):
            if x.may_differ:
                continue
            text = f"saved {x.saved}, `like` has {x.here}"
            first = (
                f"Deserialised leaf at path {path} has changed a static field: "
                f"`{x.name}` was {x.saved} when it was saved, and is {x.here} in "
                "`like`."
            )
            report.add("static", x.name, text, first)


_titles = {
    "missing": "missing: in `like`, not in the {}",
    "abstract": 'missing and abstract: `missing="keep"` would keep a leaf that has no '
    "value. Initialise it (`load_or_init`), or pass a `like` with values",
    "unexpected": "unexpected: in the {}, not in `like`",
    "kind": "of another kind",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "static": "static fields that have changed ({static})",
}


def _message(what: str, saved: Leaves, source: str, report: _Report) -> str:
    below = f" under `{source}`" if source else ""
    lines = [report.first] if report.first else []
    count = ", ".join(
        f"{len(rows)} {kind}" for kind, rows in report.rows.items() if rows
    )
    lines.append(
        f"The {what}{below} does not fit `like` ({count} of "
        f"{len(saved.names)} leaves saved); nothing was loaded."
    )

    there = _nearest.Names(saved.names if "missing" in report.rows else ())

    def nearest(kind: str, name: str, text: str) -> str:
        if kind != "missing" or "{" in name or _no_entry in text:
            return ""
        near = there.nearest(name, 1, 0.6)
        return f"  (the nearest name there is `{near[0]}`)" if near else ""

    thing = what.partition(" at ")[0]
    static = _static.how_to_pass([name for name, _ in report.rows.get("static", [])])
    titles = {
        kind: title.replace("{}", thing).replace("{static}", static)
        for kind, title in _titles.items()
    }
    lines += _show.sections(report.rows, titles, nearest)
    missing = [name for name, _ in report.rows.get("missing", [])]
    hint = _source_hint(saved, missing, source)
    if hint:
        lines.append(hint)
    return "\n".join(map(_text.bounded, lines))


def _source_hint(saved: Leaves, missing: list[str], source: str) -> str:
    """The prefix under which all that is missing is stored, if there is one."""
    if source or not missing:
        return ""
    some = missing[0]
    for name in saved.names:
        if name.endswith("." + some):
            prefix = name[: -len(some) - 1]
            if all(f"{prefix}.{other}" in saved.places for other in missing):
                return (
                    f'All of it is stored under `{prefix}`: pass `source="{prefix}"`.'
                )
    return ""
