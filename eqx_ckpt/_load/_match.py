"""Which stored leaf stands for which of `like`; and one report if any does not."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._format import _names
from .._format._leaves import Leaves, Record, Statics, Unreadable
from .._tree import (
    _filters,
    _flatten,
    _leaf,
    _register,
    _select,
    _static,
    _target,
)
from .._tree._flatten import Flat, StateEntries
from .._tree._target import Target
from . import _mismatches, _partial
from ._mismatches import Mismatches
from ._options import LoadOptions


class Pair(NamedTuple):
    """A stored leaf and the number of the leaf of `like` that it stands for."""

    number: int
    record: Record
    target: Target


class Match(NamedTuple):
    """The leaves that are loaded. `again`: those of `like` that are one object with an
    earlier one, and are stored as one array, with the number of that."""

    flat: Flat
    pairs: list[Pair]
    again: list[tuple[int, int]]

    def tree(self, values: Iterable[Any]) -> PyTree:
        """`like` with a value for each pair, in their order."""
        leaves = list(self.flat.leaves)
        for pair, value in zip(self.pairs, values):
            leaves[pair.number] = value
        for number, origin in self.again:
            leaves[number] = leaves[origin]
        return jtu.tree_unflatten(self.flat.structure, leaves)


class NoEntry(NamedTuple):
    """In the place of a name: that of an entry that the saved State does not have."""

    label: str


class _Asked(NamedTuple):
    """The leaves that are asked for. Of each of `like`: its name in the checkpoint, the
    name that it is stored under, and whether `filter_spec` chooses it. `wholes` are the
    names of the nodes of which all is loaded, `places` those of leaves (None: all)."""

    options: LoadOptions
    source: str
    like: PyTree
    flat: Flat
    names: list[str]
    stored: Sequence[str | NoEntry]
    chosen: list[bool]
    places: set[int] | None
    wholes: list[str]


def match(
    saved: Leaves,
    like: PyTree,
    options: LoadOptions,
    source: str = "",
    thing: str = "checkpoint",
    path: str = "",
) -> Match:
    """Pairs the selected leaves of `like` with stored ones, by name.

    `source` is the name of the node that `like` stands for ("": the top). Errors call
    what these are in a `thing`, and say at which `path`, if it has one.

    **Raises:** one `RuntimeError` that lists all that does not fit; `ValueError` if two
    of the leaves have one name.
    """
    what = f"{thing} at `{path}`" if path else thing
    flat = _flatten.flatten(like, options.is_leaf)
    chosen = _filters.selected(options.filter_spec, like, flat.leaves, options.is_leaf)
    statics = _statics(saved, like, flat, chosen, options, source)
    passes = _passing(saved, statics, options, what)
    places, wholes = _select.select(options.where, flat, chosen, options.is_leaf)
    if not any(chosen):
        raise ValueError(
            "Nothing to load: `filter_spec` selects no leaf of `like`. A skeleton made "
            "with `eqx.filter(..., eqx.is_array)` has none: pass the whole skeleton."
        )
    names = _names.names_of(flat.paths, source)
    stored = stored_names(saved, like, flat, names, source)
    nodes = [_flatten.module_name(path, source) for path in wholes]
    wanted = _Asked(options, source, like, flat, names, stored, chosen, places, nodes)
    report = Mismatches(thing)
    pairs = list(_pair_up(saved, wanted, report))
    if options.unexpected == "error":
        _find_unexpected(saved, wanted, report)
    _find_static(saved, wanted, statics, passes, report)
    if report.rows:
        error = _partial.Apart if report.rows.keys() == {"part"} else RuntimeError
        raise error(_mismatches.message(what, saved, source, report))
    if not pairs:
        some = [name for name, good in zip(names, chosen) if good]
        hint = _mismatches.source_hint(saved, some, source)
        raise RuntimeError(
            f"None of the leaves of `like` that are selected is in the {what}, such as "
            f"`{some[0]}`. {hint or 'Names begin with those of `source`.'}"
        )
    return _once(saved, Match(flat, pairs, []))


def _statics(
    saved: Leaves,
    like: PyTree,
    flat: Flat,
    chosen: list[bool],
    options: LoadOptions,
    source: str,
) -> Statics:
    """The static values of `like`, if they are compared."""
    is_listed = not isinstance(options.static, str)
    if is_listed or (saved.statics.of and options.static != "ignore"):
        return _static.record(like, options.is_leaf, flat, chosen, source)
    return Statics([], {})


def _passing(
    saved: Leaves, here: Statics, options: LoadOptions, what: str
) -> Callable[[str], bool]:
    # Also of a field that is new an error says the name.
    own = _static.all_names(here)
    return _static.passing(options.static, saved.statics, what, own)


def _once(saved: Leaves, match: Match) -> Match:
    """The match without pairs for what is `again` one of them."""
    if not saved.aliases:
        return match
    pairs, again = [], []
    first: dict[Any, int] = {}
    for pair in match.pairs:
        leaf, place = match.flat.leaves[pair.number], pair.record.place
        if _leaf.is_shared(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            key = id(leaf), saved.aliases.get(place, place)
            if first.setdefault(key, pair.number) != pair.number:
                again.append((pair.number, first[key]))
                continue
        pairs.append(pair)
    return Match(match.flat, pairs, again)


def _pair_up(saved: Leaves, wanted: _Asked, report: Mismatches) -> Iterator[Pair]:
    options, places = wanted.options, wanted.places
    fits: dict[Any, tuple[Target, _target.Misfit | None]] = {}
    taken: dict[int, int] = {}
    for number, good in enumerate(wanted.chosen):
        if not good or (places is not None and number not in places):
            continue
        name, leaf = wanted.names[number], wanted.flat.leaves[number]
        target = target_of(name, leaf)
        if options.cast:
            target = target._replace(cast=True)
        stored = wanted.stored[number]
        place = saved.places.get(stored) if isinstance(stored, str) else None
        if place is None:
            is_kept = options.missing == "keep" and not _is_abstract(leaf)
            if not (is_kept or options.missing == "init"):
                _missing(wanted, number, target, report)
            continue
        first = taken.setdefault(place, number)
        if first != number:
            paths = wanted.flat.paths
            raise _names.twins(name, paths[first], paths[number])
        record = saved.record(place, known=True)
        # Most targets are one object, as many leaves are alike.
        key = saved.template[place], record.part, id(target)
        if key not in fits:
            fits[key] = target, _target.misfit(record.whole, target)
        _, problem = fits[key]
        is_unread = isinstance(record.part, Unreadable)
        if is_unread or problem is None and _partial.lacks(record, target):
            kind = "unreadable" if is_unread else "part"
            report.add(kind, name, _partial.show(record), record.name)
            report.explain(str(_partial.error(record)))
            continue
        if problem is None:
            yield Pair(number, record, target)
            continue
        was, here = _leaf.show(record.whole), _target.show_target(target)
        text = f"saved {was}, `like` has {here}"
        if problem.hint:
            text += f"  ({problem.hint})"
        report.add(problem.what, name, text, record.name)
        report.explain(
            f"Deserialised leaf at path {wanted.flat.paths[number]} has changed "
            f"{problem.what}: `{name}` is {was} in the {report.thing} and {here} in "
            "`like`."
        )


def _missing(wanted: _Asked, number: int, target: Target, report: Mismatches) -> None:
    name, stored = wanted.names[number], wanted.stored[number]
    text = _target.show_target(target)
    if isinstance(stored, NoEntry):
        text += f"  (no entry of the saved State is that of `{stored.label}`)"
        report.no_entries.add(name)
    kind = "missing" if wanted.options.missing == "error" else "abstract"
    report.add(kind, name, text)
    report.explain(
        f"Error at leaf with path {wanted.flat.paths[number]}: `{name}` is not in the "
        f"{report.thing}."
    )


def target_of(name: str, leaf: Any) -> Target:
    try:
        return _target.target_of(leaf)
    except (TypeError, ValueError) as e:
        raise type(e)(f"Leaf `{name}`: {e}") from e.__cause__


def _is_abstract(leaf: Any) -> bool:
    return isinstance(_register.to_leaf(leaf), jax.ShapeDtypeStruct)


def stored_names(
    saved: Leaves, like: PyTree, flat: Flat, names: list[str], source: str
) -> Sequence[str | NoEntry]:
    """The name under which each leaf of `like` is stored.

    It is its own name but for the entries of a State. Those are named by position, and
    are matched by the StateIndex that they belong to.
    """
    entries = _flatten.state_entries(like, flat.paths, source)
    if not entries:
        return names
    out: list[str | NoEntry] = list(names)
    by_state: dict[str, dict[int, str | None]] = {}
    for entry in entries.values():
        by_state.setdefault(entry.state, {})[entry.position] = entry.label
    moves = {}
    for state, labels in by_state.items():
        below = state + "." if state else ""
        places = (p for name, p in saved.places.items() if name.startswith(below))
        there = _flatten.stored_entries(saved, state, places)
        if saved.origin is not None:
            labels = _whole_labels(labels, there, like, source)
        moves[state] = _flatten.match_entries(state, labels, there)
    for number, entry in entries.items():
        below = entry.state + "." if entry.state else ""
        rest = names[number][len(below) :].partition(".")[2]
        to = moves[entry.state][entry.position]
        if to is None:
            out[number] = NoEntry((entry.label or "")[1:])
        else:
            out[number] = below + str(to) + ("." + rest if rest else "")
    return out


def _whole_labels(
    labels: dict[int, str | None], there: StateEntries, like: PyTree, source: str
) -> dict[int, str | None]:
    """The labels with whole names for the paths in them, if those of a renamed State
    have such names: from another path the same end may have been renamed."""
    if not any(label and label[0] == "@" for label in there.labels.values()):
        return labels
    names = _flatten.index_names(like, source)
    out: dict[int, str | None] = {}
    for position, label in labels.items():
        whole = names.get(str(label), [])
        out[position] = "@" + ",".join(sorted(whole)) if whole else label
    return out


def _find_unexpected(saved: Leaves, wanted: _Asked, report: Mismatches) -> None:
    filter_spec = wanted.options.filter_spec
    like = list(zip(wanted.stored, wanted.flat.leaves, wanted.chosen))
    # What a leaf of `like` stands for that is loaded, or would be if it was chosen.
    known = {name for name, x, good in like if good or _filters.by_default(x)}
    whole = _names.within(wanted.wholes)
    extra = [n for n in saved.names if n not in known and whole(n) is not None]
    if not extra:
        return
    others = {name: leaf for name, leaf, _ in like}
    specs: dict[Any, Any] = dict(_filters.prefixes(filter_spec, wanted.source))
    nearest = _names.within(specs)
    chosen = [specs.get(nearest(name), True) for name in extra]
    records = [saved.record(saved.places[name]) for name in extra]
    leaves = [
        _leaf.stand_in(r.template.kind, _leaf.abstract(r.template)) for r in records
    ]
    for name, record, good in zip(extra, records, _filters.evaluate(chosen, leaves)):
        text = _partial.show(record)
        if name in others:
            leaf = others[name]
            text += f"  (`like` has a `{type(leaf).__name__}` there"
            # A str that `filter_spec` leaves out may have been made of what this is.
            is_text = isinstance(leaf, (str, bytes)) or callable(leaf)
            if not is_text:
                good = good or filter_spec is _leaf.is_storable
                text += ": is its type to be registered?"
            text += ")"
        if good:
            report.add("unexpected", name, text, record.name)


def _find_static(
    saved: Leaves,
    wanted: _Asked,
    here: Statics,
    passes: Callable[[str], bool],
    report: Mismatches,
) -> None:
    whole = _names.within(wanted.wholes)
    # A leaf that is picked alone is compared without its neighbours.
    near = {name.rpartition(".")[0] for name in wanted.wholes}
    for name in here.of:
        is_near = name in near or whole(name) is not None
        for origin in saved.modules(name) if is_near else []:
            for x in _static.changes(saved.statics, origin, here, name, passes):
                if x.may_differ or whole(x.name) is None:
                    continue
                field = _names.below(x.name, name)
                text = f"saved {x.saved}, `like` has {x.here}"
                report.add("static", x.name, text, f"{origin}.{field}".lstrip("."))
                report.explain(
                    f"Deserialised leaf at path {name or 'the root'} has changed a "
                    f"static field: `{x.name}` was {x.saved} when it was saved, and is "
                    f"{x.here} in `like`."
                )
