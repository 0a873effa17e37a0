"""Pairs the leaves of `like` with stored ones, and reports all that does not fit."""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._format import _names, _text
from .._format._leaves import LeafRecord, Leaves, Unreadable
from .._format._record import TreeRecord
from .._tree import (
    _compare,
    _filters,
    _flatten,
    _folding,
    _leaf,
    _leaked_tracers,
    _nearest,
    _orders,
    _pairing,
    _register,
    _select,
    _states,
    _target,
)
from .._tree._compare import Comparison
from .._tree._flatten import Flat
from .._tree._folding import Problems
from .._tree._target import Misfit, Target
from . import _partial, _wording
from ._load_options import LoadOptions
from ._reads import LeafRead


class Match(NamedTuple):
    """The leaves of `like` that are loaded, by number: what is read for each.
    `aliases`: those that are one object with an earlier one, and are stored as one
    array, with the number of that."""

    flat: Flat
    reads: dict[int, LeafRead]
    aliases: dict[int, int]

    def tree(self, values: Iterable[Any]) -> PyTree:
        """`like` with a value for each read, in their order."""
        leaves = list(self.flat.leaves)
        for number, value in zip(self.reads, values):
            leaves[number] = value
        for number, origin in self.aliases.items():
            leaves[number] = leaves[origin]
        return jtu.tree_unflatten(self.flat.structure, leaves)


@dataclasses.dataclass(eq=False)
class Matcher:
    """Pairs the selected leaves of `like` with stored ones, by name.

    `above` is the name of the node that `like` stands for ("": the top). Errors call
    what the stored leaves are in a `thing`, such as "checkpoint", and say at which
    `path` it is, if it has one.

    `names`, `stored_names` and `chosen` have an entry for each leaf of `like`.
    """

    saved: Leaves
    like: PyTree
    options: LoadOptions
    above: str = ""
    thing: str = "checkpoint"
    path: str = ""

    def __post_init__(self) -> None:
        self.what = f"{self.thing} at `{self.path}`" if self.path else self.thing
        spec, is_leaf = self.options.filter_spec, self.options.is_leaf
        self.flat = _flatten.flatten(self.like, is_leaf)
        # Whether `filter_spec` selects each.
        self.chosen = _filters.selected(spec, self.like, self.flat.leaves, is_leaf)
        self.problems = Problems()
        # A sentence on the first of them; and the stored names of leaves in them.
        self.first = ""
        self.origins: dict[str, str] = {}
        # The first axes that what was saved has beside the shapes in `like`.
        self.axes: set[tuple[int, ...]] = set()

    def match(self) -> Match:
        """**Raises:** one `RuntimeError` that lists all that does not fit; `ValueError`
        if no leaf is selected, or two of them have one name."""
        options, flat, above = self.options, self.flat, self.above
        _leaked_tracers.check_no_tracers(flat, self._tree_record)
        sides = lambda: [(self.saved.tree, ""), (self._tree_record, above)]
        passes = _compare.passing(options.static, sides, self.what)
        where, is_leaf = options.where, options.is_leaf
        picked = _select.select(where, flat, self.chosen, is_leaf)
        if not any(self.chosen):
            raise self._nothing_error()
        reads = self._pair_up(picked.leaves)
        nodes = [_flatten.node_name(path, above) for path in picked.whole_paths]
        if options.unexpected == "error" and len(reads) < len(self.saved.names):
            self._find_unexpected(nodes)
        if options.static != "ignore" and not self._is_same_tree:
            self._find_static(nodes, passes)
        if self.problems.rows:
            is_apart = self.problems.rows.keys() == {"part"}
            raise (_partial.Apart if is_apart else RuntimeError)(self._message())
        if not reads:
            numbers = range(len(self.names)) if picked.leaves is None else picked.leaves
            some = [self.names[i] for i in sorted(numbers) if self.chosen[i]]
            hint = self._source_hint(some)
            raise RuntimeError(
                f"None of the leaves of `like` that are selected is in the {self.what},"
                f" such as `{some[0]}`. {hint or 'Names begin with those of `source`.'}"
            )
        if self.saved.origin is not None:
            self._warn_of_kernels(reads)
        matched = Match(flat, reads, {})
        return _without_aliases(self.saved, matched) if self.saved.aliases else matched

    def _nothing_error(self) -> ValueError:
        if callable(self.like) and self.flat.leaves == [self.like]:
            return ValueError(
                "Nothing to load: `like` is a function or a class. Pass a tree that it "
                "makes, or a skeleton: `eqx.filter_eval_shape(make, ...)`."
            )
        return ValueError(
            "Nothing to load: `filter_spec` selects no leaf of `like`. A skeleton made "
            "with `eqx.filter(..., eqx.is_array)` has none: pass the whole skeleton."
        )

    @ft.cached_property
    def _tree_record(self) -> TreeRecord:
        """The record of `like`."""
        return self.flat.record(self.chosen)

    @ft.cached_property
    def _is_same_tree(self) -> bool:
        """Whether all but the leaves is as it was saved: nothing has to be compared."""
        is_whole = not self.above and sum(self.chosen) == len(self.saved.names)
        return is_whole and self.saved.is_recorded_as(self._tree_record)

    @ft.cached_property
    def names(self) -> list[str]:
        """The name of each leaf in the checkpoint, if it has not moved."""
        return self.flat.names(self.above)

    @ft.cached_property
    def entries(self) -> dict[int, _states.Entry]:
        """The entry of a State that a leaf belongs to, by the number of the leaf."""
        return _states.state_entries(self.flat, self.above)

    @ft.cached_property
    def stored_names(self) -> list[str | None]:
        """The name that each leaf is stored under. It is another one for entries of a
        State, and below nodes whose children have no keys and are matched by the
        attribute that each is (`Kind.attributes`). None if what was saved has no such
        entry or child."""
        entries, out = self.entries, list[str | None](self.names)
        if self._is_same_tree and all(x.label.names for x in entries.values()):
            return out
        moved = _pairing.moved_names(self.names, self._moved_nodes)
        if entries:
            same_state = lambda state: state  # A load renames none.
            moved |= _states.stored_names(self.saved, entries, self.names, same_state)
        for number, name in moved.items():
            out[number] = name
        return out

    @ft.cached_property
    def _moved_nodes(self) -> list[_pairing.MovedNode]:
        """Nodes of `like` whose children go by the attributes that they are."""
        saved, above = self.saved, self.above
        tree, nodes = saved.labelled, saved.stored_nodes
        if tree is None:
            return []
        record = self._tree_record
        return [*_pairing.moved_nodes(tree, record, above, above, above, nodes)]

    # ---- Leaves.

    def _pair_up(self, picked: set[int] | None) -> dict[int, LeafRead]:
        """Pairs the leaves of the numbers that `where` has picked (None: all chosen
        ones)."""
        saved, options = self.saved, self.options
        # Most leaves are alike: their templates are one object, and so are the targets.
        misfits: dict[Any, tuple[Target, Misfit | None]] = {}
        taken: dict[int, int] = {}
        reads: dict[int, LeafRead] = {}
        leaves, names, stored_names = self.flat.leaves, self.names, self.stored_names
        selected = it.compress(range(len(leaves)), self.chosen)
        if picked is not None:
            selected = filter(picked.__contains__, selected)
        for number in selected:
            target = target_of(names[number], leaves[number])
            if options.cast:
                target = target._replace(cast=True)
            stored = stored_names[number]
            leaf_index = None if stored is None else saved.leaf_indices.get(stored)
            if leaf_index is None:
                self._add_missing(number, target)
                continue
            first = taken.setdefault(leaf_index, number)
            if first != number:
                paths = self.flat.paths
                raise _names.twins_error(names[number], paths[first], paths[number])
            record = saved.record(leaf_index, is_name_checked=True)
            key = id(record.template), id(record.part), id(target)
            found = misfits.get(key)
            if found is None:
                misfit = _target.misfit(record.whole, target)
                found = misfits[key] = target, misfit  # It keeps the `id`.
            misfit = found[1]
            if record.part is not None and _lacks_part(record, target, misfit):
                kind = "unreadable" if isinstance(record.part, Unreadable) else "part"
                text, first = _wording.show(record), str(_wording.error(record))
                self._add(kind, names[number], text, record.name, first)
            elif misfit is None:
                reads[number] = LeafRead(record, None, target)
            else:
                self._add_misfit(number, record, target, misfit)
        return reads

    def _add_misfit(
        self, number: int, record: LeafRecord, target: Target, misfit: Misfit
    ) -> None:
        name, (what, hint) = self.names[number], misfit
        was, here = _folding.show(record.whole), _target.show_target(target)
        text = f"saved {was}, `like` has {here}"
        if hint:
            text += f"  ({hint})"
        first = (
            f"Deserialised leaf at path {self.flat.paths[number]} has changed {what}: "
            f"`{name}` is {was} in the {self.thing} and {here} in `like`"
        )
        # Both may be of 64 bits, which JAX would narrow.
        first += f", and {hint}" if hint and was.startswith(here) else "."
        if what == "shape":
            saved_shape = record.whole.logical_shape
            is_below = saved_shape[1:] == target.shape
            self.axes.add(saved_shape[:1] if is_below else ())
            adapter = _orders.adapter_between(saved_shape, target.shape)
            text += _ADAPTER.format(adapter) if adapter else ""
        self._add(what, name, text, record.name, first)

    def _add(
        self, kind: str, name: str, text: str, stored: str = "", first: str = ""
    ) -> None:
        self.problems.add(kind, name, text)
        self.first = self.first or first
        if stored and stored != name:
            self.origins[name] = stored

    def _add_missing(self, number: int, target: Target) -> None:
        missing, leaf = self.options.missing, self.flat.leaves[number]
        is_abstract = isinstance(_register.to_leaf(leaf), jax.ShapeDtypeStruct)
        if missing == "init" or missing == "keep" and not is_abstract:
            return
        name, text = self.names[number], _target.show_target(target)
        if self.stored_names[number] is None:
            if number in self.entries:
                label = _states.show_label(self.entries[number].label)
                text += f"  (no entry of the saved State is that of `{label}`)"
            else:
                text += "  (no saved child of the node is that attribute)"
        first = (
            f"Error at leaf with path {self.flat.paths[number]}: `{name}` is not in "
            f"the {self.thing}."
        )
        self._add(
            "missing" if missing == "error" else "abstract", name, text, "", first
        )

    def _find_unexpected(self, nodes: list[str]) -> None:
        saved, filter_spec = self.saved, self.options.filter_spec
        like = list(zip(self.stored_names, self.flat.leaves, self.chosen))
        # The stored names of leaves of `like` that are loaded, or would be if they were
        # chosen.
        known = {name for name, x, good in like if good or _filters.by_default(x)}
        there = map(self._stored_node, nodes)
        picked_above = _names.within([node for node in there if node is not None])
        extra = [
            name
            for name in saved.names
            if name not in known and picked_above(name) is not None
        ]
        if not extra:
            return
        others = {name: leaf for name, leaf, _ in like}
        # The parts of `filter_spec`, by the names of the nodes that they are for.
        parts, _ = jtu.tree_flatten_with_path(filter_spec)
        name_of = ft.partial(_flatten.node_name, above=self.above)
        specs: dict[Any, Any] = {name_of(path): spec for path, spec in parts}
        nearest = _names.within(specs)
        chosen = [specs.get(nearest(name), True) for name in extra]
        records = [saved.record(saved.leaf_indices[name]) for name in extra]
        leaves = [
            _leaf.stand_in(r.template.kind, _leaf.abstract(r.template)) for r in records
        ]
        goods = _filters.evaluate(chosen, leaves)
        for name, record, good in zip(extra, records, goods):
            text = _wording.show(record)
            if name in others:
                leaf = others[name]
                text += f"  (`like` has a `{type(leaf).__name__}` there"
                # A str that `filter_spec` leaves out may have been made of what this
                # is.
                is_text = isinstance(leaf, (str, bytes)) or callable(leaf)
                if not is_text:
                    good = good or filter_spec is _leaf.is_storable
                    text += ": is its type to be registered?"
                text += ")"
            if good:
                self._add("unexpected", name, text, record.name)

    def _stored_node(self, node: str) -> str | None:
        """The stored name of a node of `like`, as `stored_names` has that of a leaf."""
        for number in self._moved_below.get(node, ()):
            stored = self.stored_names[number]
            below = _names.below(self.names[number], node)
            end = "." + below if below else ""
            if stored is not None and stored.endswith(end):
                return stored.removesuffix(end)
            entry = self.entries.get(number)
            # It is an entry, or in one: it is below the State.
            if stored is None and entry is not None and len(node) > len(entry.state):
                return None
        return node

    @ft.cached_property
    def _moved_below(self) -> dict[str, list[int]]:
        """The leaves with other stored names below each node, by their numbers."""
        pairs = zip(self.names, self.stored_names)
        moved = [number for number, (name, there) in enumerate(pairs) if name != there]
        found = _names.by_prefix([self.names[number] for number in moved])
        return {node: [moved[i] for i in some] for node, some in found.items()}

    def _find_static(self, nodes: list[str], passes: Callable[[str], bool]) -> None:
        saved = self.saved
        if saved.tree is None:
            return
        both = Comparison(saved.tree, self._tree_record, self.above)
        if saved.origin is None:
            names = list(dict.fromkeys(nodes))
            found = both.differences(self._stored_pairs(names), passes)
        else:
            picked_above = _names.within(nodes)
            # A leaf that is picked alone is compared without its neighbours.
            near = {name.rpartition(".")[0] for name in nodes}
            own = self._tree_record.node_names(self.above)
            found = (
                x
                for there, name in self._stored_pairs(own)
                if name in near or picked_above(name) is not None
                for stored in saved.stored_nodes(there)
                for x in both.of_nodes(stored, name, passes)
                if picked_above(x.name) is not None
            )
        for x in found:
            if not x.may_differ:
                node = x.name.rpartition(".")[0]
                text = f"saved {x.saved}, `like` has {x.here}"
                first = (
                    f"Deserialised leaf at path {node or 'the root'} has changed a "
                    f"static field: `{x.name}` was {x.saved} when it was saved, and"
                    f" is {x.here} in `like`."
                )
                self._add("static", x.name, text, x.stored, first)

    def _stored_pairs(self, names: list[str]) -> Iterator[tuple[str, str]]:
        """The names of nodes in the checkpoint and in `like`, of those that the
        checkpoint has."""
        moved = _pairing.moved_names(names, self._moved_nodes)
        for number, name in enumerate(names):
            there = moved.get(number, name)
            if there is not None:
                yield there, name

    def _warn_of_kernels(self, reads: dict[int, LeafRead]) -> None:
        """Warns of weights that a rename has made of kernels, and that fit in two
        orders: a load takes them as they are."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for number, read in reads.items():
            if not _orders.is_kernel(read.record.name):
                continue
            layer = _orders.layer_of(self.like, self.flat.paths[number])
            turn = _orders.adapter_if_square(layer, read.record.whole.logical_shape)
            if turn is not None:
                row = self.names[number], f"of `{read.record.name}`"
                rows.setdefault(_orders.kernel_advice(turn), []).append(row)
        _orders.warn_of_unknown_orders(rows, _KERNELS)

    # ---- The report.

    def _message(self) -> str:
        saved, problems = self.saved, self.problems
        below = f" under `{self.above}`" if self.above else ""
        lines = [self.first] if self.first else []
        lines.append(
            f"The {self.what}{below} does not fit `like` ({problems.count()} of "
            f"{len(saved.names)} leaves saved); nothing was loaded."
        )
        static = _compare.how_to_pass(problems.names("static"))
        titles = {
            kind: title.replace("{}", self.thing).replace("{static}", static)
            for kind, title in _titles.items()
        }
        lines += _folding.sections(problems.rows, titles, self._hint)
        elsewhere = self._source_hint(problems.names("missing"))
        if not elsewhere and problems.names("unexpected"):
            elsewhere = _UNEXPECTED
        if not elsewhere and len(self.axes) == 1 and any(self.axes):
            ((count,),) = self.axes
            elsewhere = _STACKED.format(count)
        return _text.message([*lines, elsewhere] if elsewhere else lines)

    def _hint(self, kind: str, name: str, text: str) -> str:
        """The text that goes beside that of a problem."""
        if kind == "missing":
            return self._hint_of_missing(name)
        some = it.islice(_folding.unfold(name), len(self.origins))
        origins = [self.origins[x] for x in some if x in self.origins]
        names = ", ".join(f"`{x}`" for x in _folding.fold(origins))
        return f"  (stored as {names})" if names else ""

    def _hint_of_missing(self, name: str) -> str:
        if (name, None) in zip(
            self.names, self.stored_names
        ):  # A State lacks its entry.
            return ""
        names = [*_folding.unfold(name)]
        there = self._names_there
        near = dict.fromkeys(x for n in names for x in there.nearest(n, 1, 0.6))
        if len(near) < len(names):  # Such as of layers of which there are fewer.
            return ""
        found = _folding.fold(near)
        text = f"the nearest name there is {_folding.some(found)}"
        leaf_index = self.saved.leaf_indices.get(found[0])
        if leaf_index is not None:
            stored = self.saved.record(leaf_index).name
            text += f", stored as `{stored}`" if stored != found[0] else ""
        return f"  ({text})"

    @ft.cached_property
    def _names_there(self) -> _nearest.NameIndex:
        return _nearest.NameIndex(self.saved.names)

    def _source_hint(self, missing: list[str]) -> str:
        """Advice to give the prefix under which all that is missing is stored."""
        if self.above or not missing:
            return ""
        end, known = "." + missing[0], self.saved.leaf_indices
        for node in (x.removesuffix(end) for x in known if x.endswith(end)):
            if all(f"{node}.{other}" in known for other in missing):
                return f'All of it is stored under `{node}`: pass `source="{node}"`.'
        return ""


_UNEXPECTED = (
    '`unexpected="ignore"` leaves out what `like` does not have. If it is there under '
    "other names, or stacked where a list was saved, `ec.graft(like, path, [(lambda m: "
    "m, lambda c: c)])` says which pairs and rules fit."
)

_KERNELS = (
    "A load takes them as they are. `ec.graft` takes this rename in a pair, where a "
    'rule may have the adapter: `("weight$", ec.adapters.channels_first())`.'
)

_ADAPTER = "  (`ec.adapters.{}` in a pair of `ec.graft` loads it)"

_STACKED = (
    "What was saved has a first axis of {} more, as of an ensemble or of stacked "
    "layers: `ec.adapters.take(i)` in a pair of `ec.graft` loads one of them."
)

_titles = {
    "missing": 'missing: in `like`, not in the {} (`missing="keep"` takes those of '
    "`like`, and `where` leaves leaves out)",
    "abstract": 'missing and abstract: `missing="keep"` would keep a leaf that has no '
    "value. Initialise it (`load_or_init`), or pass a `like` with values",
    "unexpected": "unexpected: in the {}, not in `like`",
    "kind": "of another kind",
    "shape": "of another shape (make `like` with the sizes of the save, or leave these "
    "out with `where`)",
    "dtype": "of another dtype",
    "part": "saved in part, by one process alone",
    "unreadable": "that cannot be read from a file of this format",
    "static": "static fields that have changed ({static})",
}


def _lacks_part(record: LeafRecord, target: Target, misfit: Misfit | None) -> bool:
    """Whether what is wanted of a leaf that is not all there cannot be read."""
    is_unreadable = isinstance(record.part, Unreadable)
    return is_unreadable or misfit is None and _partial.lacks(record, target)


def _without_aliases(saved: Leaves, match: Match) -> Match:
    """The match with a single read for leaves of `like` that are one object, if they
    are one stored array too."""
    reads, aliases = {}, {}
    first: dict[Any, int] = {}
    for number, read in match.reads.items():
        leaf, leaf_index = match.flat.leaves[number], read.record.leaf_index
        if _leaf.is_shared(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            key = id(leaf), saved.aliases.get(leaf_index, leaf_index)
            if first.setdefault(key, number) != number:
                aliases[number] = first[key]
                continue
        reads[number] = read
    return Match(match.flat, reads, aliases)


# ---- For all that pairs leaves by name.


def target_of(name: str, leaf: object) -> Target:
    try:
        return _target.target_of(leaf)
    except (TypeError, ValueError) as e:
        raise type(e)(f"Leaf `{name}`: {e}") from e.__cause__
