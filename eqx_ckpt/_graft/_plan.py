"""What a graft will do, checked to the last leaf before anything is read."""

import collections
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._format import _names, _text
from .._format._template import Template
from .._load import _match
from .._load._deferred import Later
from .._load._lazy import LazyArray
from .._tree import _flatten, _leaf, _register, _restore, _show, _static
from .._tree._restore import Target
from .._tree._static import Static
from ..adapters import Adapter
from . import _pairs, _suggest
from ._pairs import Group, Model, Pair, Saved, Stored


class Job(NamedTuple):
    """Leaves of the model, those of the checkpoint that they are made of, and how."""

    label: str
    numbers: list[int]
    saved: list[Saved]
    adapter: Adapter | None

    @property
    def own(self) -> bool:
        """Whether a function of the user's takes part, which may read."""
        adapters = [a for saved in self.saved for a in saved.adapters]
        return any(a.own for a in [*adapters, self.adapter] if a is not None)


class Placed(NamedTuple):
    """What a leaf of the model becomes: a lazy leaf, a `Later`, or an array."""

    number: int
    made: Any
    target: Target
    saved: tuple[str, ...]
    status: str  # "loaded", "cast" or "adapted".
    how: str
    adapters: tuple[Adapter | None, ...]


class Scalar(NamedTuple):
    """A Python scalar of the model inside of a pair, and the saved one."""

    number: int
    lazy: LazyArray


class Plan(NamedTuple):
    placed: list[Placed]
    # Leaves that are one object in the model are made once.
    again: dict[int, int]
    # By number and by place, with the name of the node that was said to be so.
    fresh: dict[int, str]
    dropped: dict[int, str]
    # (name, in the checkpoint, in the model), of what differs and need not be the same.
    differences: list[tuple[str, str, str]]

    @property
    def made(self) -> list[Placed]:
        """Those that are placed, one for each object of the model."""
        return [x for x in self.placed if x.number not in self.again]


class Problems:
    """All that is wrong with a graft, by its kind."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, name: str, text: str = "") -> None:
        self.rows.setdefault(kind, []).append((name or ".", text))


_titles = {
    "nothing": "pairs that match nothing",
    "rule": "rules of a rename that find nothing",
    "overlap": "in more than one pair: leave each leaf to one of them",
    "incomplete": "not in all of the nodes that the pair puts together",
    "kind": "of another kind",
    "shape": "of another shape: an adapter may make it fit; a new head is `fresh`, and "
    "the old one goes into `drop`",
    "dtype": "of another dtype",
    "adapter": "what an adapter cannot do",
    "scalar": "Python scalars that were saved with another value",
    "tied": "one array in the model, and would be two (`eqx.nn.Shared` ties for good)",
    "static": "static fields that have changed ({static}; a pair of the arrays "
    "themselves, `lambda m: m.linear.weight`, lets all pass)",
    "abstract": "`fresh`, and without a value: make them with `init=` or "
    "`load_or_init`, or graft into a model that has values",
    "model": "in the model, in no pair and not in `fresh`",
    "checkpoint": "in the checkpoint, in no pair and not in `drop`",
}


def plan(
    model: Model,
    stored: Stored,
    pairs: Sequence[Any],
    fresh: Any,
    drop: Any,
    *,
    cast: bool,
    static: Static,
    scalars: str,
    read_scalars: Callable[[Sequence[LazyArray]], list[Any]],
    can_init: bool,
) -> Plan:
    """**Raises:** one `RuntimeError` that lists all that is wrong, `ValueError` or
    `TypeError` for a pair, a `fresh` or a `drop` that picks no nodes."""
    if scalars not in ("error", "load", "keep"):
        raise ValueError(
            f'`scalars` must be "error", "load" or "keep", not {scalars!r}.'
        )
    parsed = [
        _pairs.parse(given, f"pairs[{i}]", model, stored)
        for i, given in enumerate(pairs)
    ]
    new = [] if fresh is None else model.nodes(fresh, "fresh")
    out = [] if drop is None else stored.nodes(drop, "drop")
    matching = _Matching(model, stored, parsed)
    matching.fresh = {n: a.name for a in new for n in a.leaves.values()}
    matching.dropped = {x.place: b.name for b in out for x in b.leaves.values()}
    problems = matching.problems
    jobs, inside = matching.jobs()
    placed = [
        x for job in jobs if not job.own for x in _place(job, model, cast, problems)
    ]
    differences = matching.static_fields(jobs, static)
    if scalars == "load":
        placed += _load_scalars(inside, model, problems)
    if not can_init:
        for number in sorted(matching.fresh):
            leaf = model.flat.leaves[number]
            if type(leaf) is not LazyArray and isinstance(leaf, jax.ShapeDtypeStruct):
                text = _restore.show_target(_restore.target_of(leaf))
                problems.add("abstract", model.names[number], text)
    undeclared = matching.undeclared()
    if problems.rows:
        raise RuntimeError(_message(problems, model, stored, undeclared))
    if inside:
        differences += _compare_scalars(inside, scalars, read_scalars, model, problems)
        if problems.rows:
            raise RuntimeError(_message(problems, model, stored, ([], [])))
    # Functions of the user's come last, when all that is known without them is right:
    # they may read.
    for job in jobs:
        if job.own:
            placed += _place(job, model, cast, problems)
    again = _tied(model, stored, placed, problems)
    if problems.rows:
        raise RuntimeError(_message(problems, model, stored, ([], [])))
    return Plan(
        placed,
        again,
        {n: x for n, x in matching.fresh.items() if model.is_array(n)},
        matching.dropped,
        differences,
    )


class _Matching:
    """Which leaf of the model each pair gives which of the checkpoint, by name."""

    def __init__(self, model: Model, stored: Stored, pairs: list[Pair]):
        self.model = model
        self.stored = stored
        self.pairs = pairs
        self.problems = Problems()
        self.fresh: dict[int, str] = {}
        self.dropped: dict[int, str] = {}
        self.covered: dict[int, str] = {}
        self.used: dict[int, str] = {}
        self.state_entries = _flatten.state_entries(model.tree, model.flat.paths, "")
        self.index_names = (
            _flatten.index_names(model.tree) if self.state_entries else {}
        )

    def jobs(self) -> tuple[list[Job], list[Scalar]]:
        jobs: list[Job] = []
        scalars: list[Scalar] = []
        for pair in self.pairs:
            matched = False
            for group in pair.groups:
                moves = self._entries(group)
                left = [
                    {
                        moves.get(n, name): n
                        for name, n in node.leaves.items()
                        if n not in self.fresh
                    }
                    for node in group.left
                ]
                right = [
                    {
                        k: x
                        for k, x in node.leaves.items()
                        if x.place not in self.dropped
                    }
                    for node in group.right
                ]
                for name in dict.fromkeys(k for leaves in left for k in leaves):
                    numbers = [leaves.get(name) for leaves in left]
                    saved = [leaves.get(name) for leaves in right]
                    if any(x is not None for x in saved):
                        matched = True
                        self._pair_up(pair, group, name, numbers, saved, jobs, scalars)
            if not matched:
                self._nothing(pair)
            for name, text in pair.problems:
                self.problems.add("rule", name, text)
        return jobs, scalars

    def _pair_up(
        self,
        pair: Pair,
        group: Group,
        name: str,
        numbers: list[int | None],
        saved: list[Saved | None],
        jobs: list[Job],
        scalars: list[Scalar],
    ) -> None:
        model, problems = self.model, self.problems
        whole_numbers = [n for n in numbers if n is not None]
        whole_saved = [x for x in saved if x is not None]
        for x in whole_saved:
            self.used.setdefault(x.place, pair.label)
        overlaps = [n for n in whole_numbers if n in self.covered]
        for n in overlaps:
            text = f"in {self.covered[n]} and in {pair.label}"
            problems.add("overlap", model.names[n], text)
        if overlaps:
            return
        self.covered.update(dict.fromkeys(whole_numbers, pair.label))
        if None in numbers or None in saved:
            for side, leaves in ((group.left, numbers), (group.right, saved)):
                for node, leaf in zip(side, leaves):
                    if leaf is None:
                        where = "model" if side is group.left else "checkpoint"
                        full = ".".join(x for x in (node.name, name) if x)
                        problems.add("incomplete", full, f"not in the {where}")
            return
        # A scalar that is picked by itself is meant to be loaded.
        scalar = not any(model.is_array(n) for n in whole_numbers)
        if scalar and any(node.leaves.keys() != {""} for node in group.left):
            for n in whole_numbers:
                scalars += [Scalar(n, x.lazy) for x in whole_saved]
            return
        jobs.append(Job(pair.label, whole_numbers, whole_saved, pair.adapter))

    def _entries(self, group: Group) -> dict[int, str]:
        """The names, below the node, of leaves of an eqx.nn.State: they have those of
        positions, and stand for those of the same StateIndex."""
        root, source = group.left[0].name, group.right[0].name
        states: dict[str, dict[int, str | None]] = {}
        for n in group.left[0].leaves.values():
            entry = self.state_entries.get(n)
            if entry is not None and _names.is_under(entry.state, root):
                label = self._label_there(entry.label)
                states.setdefault(entry.state, {})[entry.position] = label
        out: dict[int, str] = {}
        index = self.stored.index
        for state, labels in states.items():
            below = _names.below(state, root) if state else ""
            there = ".".join(x for x in (source, below) if x)
            places = self.stored.below.get(there, [])
            saved = _flatten.stored_entries(index.leaves, there, places)
            moves = _flatten.match_entries(there, labels, saved)
            for n in group.left[0].leaves.values():
                entry = self.state_entries.get(n)
                if entry is None or entry.state != state:
                    continue
                rest = _names.below(self.model.names[n], state).partition(".")[2]
                to = moves[entry.position]
                parts = (below, "(no such entry)" if to is None else str(to), rest)
                out[n] = ".".join(x for x in parts if x)
        return out

    def _label_there(self, label: str | None) -> str | None:
        """The label of an entry with the names that its StateIndex has there: where
        the leaves beside it come from. None if that is several places."""
        names = []
        for name in self.index_names.get(str(label), []):
            module, _, field = name.rpartition(".")
            there = self._modules_there.get(module)
            if there is not None:
                if len(there) != 1:
                    return None
                names.append(".".join(x for x in (*there, field) if x))
                continue
            for group in (group for pair in self.pairs for group in pair.groups):
                for left, right in zip(group.left, group.right):
                    if _names.is_under(name, left.name):
                        parts = (right.name, _names.below(name, left.name))
                        names.append(".".join(x for x in parts if x))
        return "@" + ",".join(sorted(names)) if names else label

    @ft.cached_property
    def _modules_there(self) -> dict[str, set[str]]:
        """The names in the checkpoint of the nodes whose leaves those below a node of
        the model come from. None of them where the names of the leaves differ too."""
        out: dict[str, set[str]] = collections.defaultdict(set)
        groups = [group for pair in self.pairs for group in pair.groups]
        for left, right in (x for g in groups for x in zip(g.left, g.right)):
            for name in left.leaves.keys() & right.leaves.keys():
                if left.leaves[name] in self.state_entries:
                    continue
                here = ".".join(x for x in (left.name, name) if x).split(".")
                there = right.leaves[name].lazy.name.split(".")
                out[".".join(here[:-1])] |= set()
                for cut in range(1, min(len(here), len(there)) + 1):
                    if here[-cut] != there[-cut]:
                        break
                    out[".".join(here[:-cut])].add(".".join(there[:-cut]))
        return dict(out)

    def _nothing(self, pair: Pair) -> None:
        def some(nodes: list[_pairs.Node]) -> str:
            names = [name or "itself" for node in nodes for name in node.leaves]
            shown = ", ".join(_show.fold(list(dict.fromkeys(names)))[:4])
            return f"{_pairs.some(nodes)} has {shown or 'no leaves'}"

        left = [node for group in pair.groups for node in group.left]
        right = [node for group in pair.groups for node in group.right]
        text = f"in the model {some(left)}; in the checkpoint {some(right)}"
        if all(n in self.fresh for node in left for n in node.leaves.values()):
            text += ". All of it is in `fresh` as well"
        elif all(x.place in self.dropped for x in _saved_of(right)):
            text += ". All of it is in `drop` as well"
        elif {x.place for x in _saved_of(right)} <= set(self.used):
            text += ". Another pair has it"
        self.problems.add("nothing", pair.label, text)

    def undeclared(self) -> tuple[list[int], list[int]]:
        """The leaves of both sides that nobody has said anything of."""
        model, index = self.model, self.stored.index
        numbers = [
            n
            for n in range(len(model.names))
            if model.is_array(n) and n not in self.covered and n not in self.fresh
        ]
        for n in numbers:
            target = _target_of(model, n)
            self.problems.add("model", model.names[n], _restore.show_target(target))
        places = [
            place
            for place in range(len(index.leaves.names))
            if place not in self.used and place not in self.dropped
        ]
        new = {
            saved.place
            for pair in self.pairs
            for group in pair.groups
            for a, b in zip(group.left, group.right)
            for name, saved in b.leaves.items()
            if a.leaves.get(name) in self.fresh
        }
        for place in places:
            text = _leaf.show(index.leaves.record(place).template)
            if place in new:
                text += "  (what it stands for is in `fresh`)"
            same = index.leaves.aliases.get(place)
            if same is not None and same in self.used:
                name = index.leaves.names[same]
                text += f"  (the same array as `{name}`, which is loaded)"
            self.problems.add("checkpoint", index.leaves.names[place], text)
        return numbers, places

    def static_fields(
        self, jobs: list[Job], static: Static
    ) -> list[tuple[str, str, str]]:
        """Those that differ between Modules that stand for each other, and need not be
        the same: the others are problems."""
        statics = self.stored.index.leaves.statics
        modules = {
            _flatten.module_name(path, ""): module
            for path, module in _flatten.modules(self.model.tree, None)
        }
        model = self.model
        own = _static.record(model.tree, None, model.flat.structure)
        what = f"checkpoint at `{self.stored.ckpt.path}`"
        passes = _static.passing(static, statics, what, _static.all_names(own))
        out = []
        for name, source in dict.fromkeys(self._modules(modules, jobs)):
            if source not in statics.of:
                continue
            # Of a part that is new, not all that holds it is the same.
            new = any(n in self.fresh for n in self.model.below.get(name, []))
            new |= any(p in self.dropped for p in self.stored.below.get(source, []))
            for x in _static.changes(statics, modules[name], source, passes, name):
                if new or x.may_differ:
                    out.append((x.name, x.saved, x.here))
                else:
                    text = f"saved {x.saved}, the model has {x.here}"
                    self.problems.add("static", x.name, text)
        return out

    def _modules(
        self, modules: dict[str, Any], jobs: list[Job]
    ) -> Iterator[tuple[str, str]]:
        """Names of Modules that stand for each other, in the model and as saved."""
        below = _pairs.by_prefix(list(modules))
        names = list(modules)
        for pair in self.pairs:
            if pair.renamed:
                continue
            for left, right in (
                (a, b) for g in pair.groups for a in g.left for b in g.right
            ):
                for number in below.get(left.name, []):
                    name = names[number]
                    rest = _names.below(name, left.name) if name else ""
                    yield name, ".".join(x for x in (right.name, rest) if x)
        roots = {
            pair.label: _names.within(a.name for g in pair.groups for a in g.left)
            for pair in self.pairs
            if pair.renamed
        }
        for job in jobs:
            if job.label not in roots:
                continue
            root = roots[job.label]
            for number in job.numbers:
                for saved in job.saved:
                    # Up from two leaves, as long as the names agree.
                    a = self.model.names[number].split(".")
                    b = saved.lazy.name.split(".")
                    while a and b and a[-1] == b[-1]:
                        a, b = a[:-1], b[:-1]
                        name = ".".join(a)
                        if root(name) is None:
                            break
                        if name in modules:
                            yield name, ".".join(b)


# ---- Python scalars inside of pairs.


def _load_scalars(
    scalars: Sequence[Scalar], model: Model, problems: Problems
) -> list[Placed]:
    out = {}
    for number, lazy in scalars:
        target, template = _target_of(model, number), lazy._record.template
        misfit = _restore.misfit(template, target)
        if misfit is not None:
            wanted = _restore.show_target(target)
            text = f"saved {_leaf.show(template)}, the model has {wanted}"
            problems.add(misfit.what, model.names[number], text)
        out[number] = Placed(number, lazy, target, (lazy.name,), "loaded", "", ())
    return list(out.values())


def _compare_scalars(
    scalars: Sequence[Scalar],
    what: str,
    read: Callable[[Sequence[LazyArray]], list[Any]],
    model: Model,
    problems: Problems,
) -> list[tuple[str, str, str]]:
    """`(name, as saved, in the model)` of those that the model keeps. Others that
    differ are problems: of one that is loaded, several that were saved."""
    if what == "load":  # One that is made of several, as by `stack`.
        counts = collections.Counter(x.number for x in scalars)
        scalars = [x for x in scalars if counts[x.number] > 1]
    # An array is another value without being read.
    few = [x for x in scalars if _is_one_number(x.lazy._record.template)]
    values = dict(zip(few, read([x.lazy for x in few])))
    first: dict[int, Any] = {}
    out = []
    for x in scalars:
        kept = _register.to_leaf(model.flat.leaves[x.number])
        value = values.get(x, x.lazy)
        if what == "load":
            kept = first.setdefault(x.number, value)
        if x in values and _is_same_number(value, kept):
            continue
        name = model.names[x.number]
        shown = repr(value) if x in values else _leaf.show(x.lazy._record.template)
        if what == "keep":
            out.append((name, shown, repr(kept)))
        elif what == "load":
            problems.add("scalar", name, f"saved {kept!r} and {shown}")
        else:
            problems.add("scalar", name, f"saved {shown}, the model has {kept!r}")
    return out


def _is_one_number(template: Template) -> bool:
    return template.kind != "key" and template.logical_shape == ()


def _is_same_number(saved: Any, kept: Any) -> bool:
    saved, kept = (
        x.item() if isinstance(x, (np.ndarray, jax.Array, np.generic)) else x
        for x in (saved, kept)
    )
    both_bools = isinstance(saved, bool) == isinstance(kept, bool)
    return both_bools and bool(saved == kept or (saved != saved and kept != kept))


def _saved_of(nodes: list[_pairs.Node]) -> list[Saved]:
    return [x for node in nodes for x in node.leaves.values()]


def _target_of(model: Model, number: int) -> Target:
    return _match.target_of(model.names[number], model.flat.leaves[number])


# ---- One leaf, or those that an adapter makes together.


def _place(job: Job, model: Model, cast: bool, problems: Problems) -> list[Placed]:
    likes = [model.flat.leaves[n] for n in job.numbers]
    targets = [_target_of(model, n)._replace(cast=cast) for n in job.numbers]
    names = [model.names[n] for n in job.numbers]
    adapters = [a for x in job.saved for a in x.adapters]
    adapters += [] if job.adapter is None else [job.adapter]
    how = ", ".join(dict.fromkeys(map(repr, adapters)))
    try:
        if adapters:
            for x in job.saved:
                _check_array(x.lazy)
        results = _adapted(job, likes)
    except RuntimeError:
        raise  # Of a read: damage is damage.
    except Exception as e:
        said = f"{e}" if isinstance(e, (ValueError, TypeError)) else f"{e!r}"
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        text = f"{job.label}, `{how}`: {said}; saved {_all(job.saved)}"
        problems.add("adapter", shown, text)
        return []
    placed = [
        _fit(number, made, target, job, how, name, problems)
        for number, made, target, name in zip(job.numbers, results, targets, names)
    ]
    return [x for x in placed if x is not None]


def _adapted(job: Job, likes: list[Any]) -> Sequence[Any]:
    """What the adapters make, for each of the model's leaves."""
    given: list[Any] = []
    for x in job.saved:
        made: Any = x.lazy
        for adapter in x.adapters:
            made = adapter(made, likes[0])
        given.append(made)
    adapter = job.adapter
    if adapter is None:
        return given
    saved = given if adapter.many == "saved" or len(given) > 1 else given[0]
    if adapter.many != "like" and len(likes) == 1:
        return [adapter(saved, likes[0])]
    out = adapter(saved, likes)
    if not isinstance(out, (list, tuple)) or len(out) != len(likes):
        raise ValueError(f"it must give a list of {len(likes)} arrays")
    return out


def _check_array(lazy: LazyArray) -> None:
    kind = lazy._record.template.kind
    if kind in ("key", "str", "bytes"):
        raise TypeError(f"does not take a {kind}")


def _all(saved: Sequence[Saved]) -> str:
    return ", ".join(dict.fromkeys(_shown(x.lazy) for x in saved))


def _shown(made: Any) -> str:
    if isinstance(made, LazyArray):
        if made._view is None:
            return _leaf.show(made._record.template)
    return _show.short_array(np.dtype(made.dtype).name, made.shape)


def _fit(
    number: int,
    made: Any,
    target: Target,
    job: Job,
    how: str,
    name: str,
    problems: Problems,
) -> Placed | None:
    """What becomes of a leaf, if what is made for it is as the model has it."""
    if isinstance(made, LazyArray) and made._target.cast:
        if made.dtype == target.dtype:
            target = target._replace(cast=True)
        else:  # To another dtype first: its numbers are those of that one.
            made = Later((made,), lambda arrays: arrays[0], made.shape, made.dtype)
    try:
        _check_source(made, job)
        template = _template_of(made)
    except (ValueError, TypeError) as e:
        problems.add(
            "adapter", name, f"{job.label}: `{how}` gave a leaf that is none: {e}"
        )
        return None
    misfit = _restore.misfit(template, target)
    if misfit is not None:
        text, hint = f"saved {_all(job.saved)}", misfit.hint
        if any(made is x.lazy for x in job.saved):
            hint = hint or _hint(template.shape, target.shape, misfit.what)
        else:
            text += f", made {_leaf.show(template)} by {how or 'the view'}"
        text += f", the model has {_restore.show_target(target)}"
        problems.add(misfit.what, name, text + (f"  ({hint})" if hint else ""))
        return None
    status = "adapted"
    if isinstance(made, LazyArray) and made._view is None:
        wanted = target.dtype
        same = wanted is None or template.dtype == wanted.name
        status = "loaded" if same or template.kind == "key" else "cast"
    saved = tuple(x.lazy.name for x in job.saved)
    adapters = (job.adapter, *(a for x in job.saved for a in x.adapters))
    return Placed(number, made, target, saved, status, how or "a view", adapters)


def _check_source(made: Any, job: Job) -> None:
    parts = made.parts if isinstance(made, Later) else [made]
    for part in parts:
        if (
            isinstance(part, LazyArray)
            and part._source is not job.saved[0].lazy._source
        ):
            raise ValueError(
                f"`{part.name}` is of another checkpoint, `{part._source.root}`. Read "
                "it in the function, or graft twice."
            )


def _template_of(made: Any) -> Template:
    """**Raises:** `ValueError` or `TypeError` for what is no leaf."""
    if isinstance(made, Later):
        return _leaf.describe(np.broadcast_to(np.zeros((), made.dtype), made.shape))
    if not isinstance(made, LazyArray):
        return _leaf.describe(made)
    template = made._record.template
    return template if made._view is None else template._replace(shape=made.shape)


def _hint(saved: tuple[int, ...], wanted: tuple[int, ...], what: str) -> str:
    if what != "shape" or len(saved) != len(wanted):
        return ""
    if saved == wanted[::-1]:
        return "`ec.adapters.transpose()` turns it"
    if saved[1:] == wanted[1:]:
        return "`ec.adapters.rows(fill)` takes fewer rows, or more"
    return ""


# ---- Leaves that are one object in the model.


def _tied(
    model: Model,
    stored: Stored,
    placed: list[Placed],
    problems: Problems,
) -> dict[int, int]:
    objects: dict[int, list[int]] = {}
    for number, leaf in enumerate(model.flat.leaves):
        if _leaf.is_shared(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            objects.setdefault(id(leaf), []).append(number)
    by_number = {x.number: x for x in placed}
    again: dict[int, int] = {}
    for numbers in objects.values():
        first = by_number.get(numbers[0])
        if len(numbers) == 1:
            continue
        origins = {_origin(by_number.get(n), stored) for n in numbers}
        if len(origins) == 1:
            if first is not None:
                again.update(dict.fromkeys(numbers[1:], numbers[0]))
            continue
        for n in numbers:
            x = by_number.get(n)
            text = "fresh" if x is None else f"from {', '.join(x.saved)}"
            others = ", ".join(model.names[m] for m in numbers if m != n)
            problems.add("tied", model.names[n], f"{text}; one array with {others}")
    return again


def _origin(placed: Placed | None, stored: Stored) -> Any:
    """The same for two leaves that are made of the same bytes in the same way."""
    if placed is None:
        return None
    made = placed.made
    if not isinstance(made, (LazyArray, Later)):
        return id(made)
    parts = (made,) if isinstance(made, LazyArray) else made.parts
    aliases = stored.index.leaves.aliases
    places = [x._record.place for x in parts]
    views = [(x._view, x.dtype, x._target.kind) for x in parts]
    # Two adapters may be shown alike.
    adapters = tuple(map(id, placed.adapters))
    return adapters, *((aliases.get(p, p), v) for p, v in zip(places, views))


# ---- The report of what is wrong.


def _message(
    problems: Problems,
    model: Model,
    stored: Stored,
    undeclared: tuple[list[int], list[int]],
) -> str:
    count = ", ".join(f"{len(rows)} {kind}" for kind, rows in problems.rows.items())
    lines = [
        f"The graft of `{stored.ckpt.path}` does not fit the model ({count}); nothing "
        "was loaded."
    ]
    static = _static.how_to_pass([name for name, _ in problems.rows.get("static", [])])
    titles = {kind: x.replace("{static}", static) for kind, x in _titles.items()}
    lines += _show.sections(problems.rows, titles)
    dotted = [stored.index.leaves.names[p] for p in undeclared[1]]
    dotted = [name for name in dotted if "%2E" in name]
    if dotted:
        lines.append(
            f"  Keys of the checkpoint have dots in them (`{dotted[0]}`). Save "
            "`ec.nest(...)` of the dict, and they are nodes."
        )
    if "scalar" in problems.rows:
        lines += [
            "  To paste, one of these two (of what is in `fresh` and `drop`, neither):",
            '    scalars="load",  # the saved values',
            '    scalars="keep",  # those of the model',
        ]
    lines += _suggest.lines(model, stored, *undeclared)
    return "\n".join(map(_text.bounded, lines))
