"""The pages of a checkpoint, of two or of a run, and the answers to their requests.

A page is a dict of JSON that is made of an index alone: `kind`, `title`, `facts`
(titles and texts), `rows`: for each leaf its name, what it is, and its bytes, and the
`tree` that they make. Rows have numbers, by which the page then asks for the rest: see
`Site.answer`.
"""

import collections
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._edit import _diff, _elements, _sample
from .._edit._difference import Change
from .._edit._sample import Sample
from .._kernel._format import _text
from .._kernel._load import _checkpoint, _lazy
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._lazy import LazyArray
from .._kernel._run import _records
from .._kernel._run._records import Step
from .._kernel._run._steps import Steps
from .._kernel._runtime import _threads
from .._show import _branches, _curves as _curves_of, _facts, _summary, _tables
from .._show._branches import Branch
from . import _charts


class Folder:
    """The runs in a directory, or several runs, to look at together."""

    def __init__(self, paths: Sequence[str]):
        self.title = " ".join(paths)
        self._paths = paths
        self._runs: dict[str, Steps] = {}

    def runs(self) -> dict[str, Steps]:
        """The runs that there are now, by their names: paths below the directory."""
        found: dict[str, Steps] = {}
        for path in self._paths:
            for run in _records.runs_below(path):
                name = str(run.location)
                if len(self._paths) == 1:
                    top = str(Steps(path).location)
                    name = name.removeprefix(top).strip("/") or name
                found[name] = self._runs.get(name, run)
        self._runs = found
        return found


# Errors of reads, which the page shows in the place of an answer.
ERRORS = (OSError, ValueError, TypeError, RuntimeError, LookupError, MemoryError)
# Samples of so many leaves are kept, for later requests.
_MAX_SAMPLES = 4
# Steps of a run at which the norm of a leaf is drawn.
_NORM_STEPS = 60
# The most curves of a page, and points of all of them; the fewest and the most points
# of one line.
_MAX_CURVES, _MAX_POINTS, _MIN_LINE_POINTS, _MAX_LINE_POINTS = 40, 40_000, 50, 500
# Steps of a run in its table.
_MAX_TABLE_STEPS = 1000


class SitePage(NamedTuple):
    """A page, and a function from the number of a leaf to its arrays: one, or those of
    two checkpoints."""

    page: dict[str, Any]
    leaves: Callable[[int], Sequence[LazyArray | None]]


class _SampleOnce:
    """A sample of a leaf, which is read when it is first asked for, and kept. If two
    checkpoints are compared, it is read where the leaf of the `first` one is."""

    def __init__(self) -> None:
        self._lock = _threads.Lock()
        self._sample: Sample | None = None

    def sample(self, lazy: LazyArray, first: LazyArray | None) -> Sample:
        return self._lock.run(lambda: self._sample or self._read_sample(lazy, first))

    def _read_sample(self, lazy: LazyArray, first: LazyArray | None) -> Sample:
        self._sample = _sample.read_sample(lazy, first)
        return self._sample


class Site:
    """Pages of a checkpoint, of two, of a run and its steps, or of several runs, each
    of which has its own site. Threads share it."""

    def __init__(
        self, subject: Checkpoint | tuple[Checkpoint, Checkpoint] | Steps | Folder
    ):
        self._subject = subject
        self._sites: dict[str, Site] = {}
        self._lock = _threads.Lock()
        self._shown: dict[str, SitePage] = {}
        self._opened: dict[str, Checkpoint] = {}
        self._slots: collections.OrderedDict[Any, _SampleOnce] = (
            collections.OrderedDict()
        )

    def answer(self, what: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The answer to a request of a page. In the `query`, `run` is the name of one
        of several runs, and `at` is a step, or two with a comma.

        - `page`: the page itself. That of a run that goes on has a `mark`; if the page
            has not changed since the mark `known`, the answer is empty;
        - `leaf`: figures and a histogram of the leaf `n`; `picture`: a slice of it, at
            `index`; `spectrum`: its singular values;
        - `change`: how far the leaf `n` of one checkpoint is from that of the other;
        - `norm`: that of the leaf called `name` at one step.

        What cannot be read is `{"error": ...}`.

        **Raises:** `KeyError` for what no page asks for.
        """
        if "run" in query:
            rest = {name: x for name, x in query.items() if name != "run"}
            return self._site(query["run"]).answer(what, rest)
        call = {
            "page": self._page,
            "leaf": self._leaf,
            "picture": self._picture,
            "spectrum": self._spectrum,
            "change": self._change,
            "norm": self._norm,
        }[what]
        try:
            return call(query)
        except ERRORS as e:
            text = str(e.args[0]) if isinstance(e, KeyError) else str(e)
            return {"error": _text.message((text or type(e).__name__).split("\n"))}

    def _site(self, name: str) -> "Site":
        """**Raises:** `KeyError` if there is no run of that name."""
        if name not in self._sites and isinstance(self._subject, Folder):
            self._sites.setdefault(name, Site(self._subject.runs()[name]))
        return self._sites[name]

    def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The page as it is now: a run goes on while it is looked at."""
        return self._lock.run(lambda: self._reload(query))

    def _reload(self, query: Mapping[str, str]) -> dict[str, Any]:
        if self._shown and isinstance(self._subject, Checkpoint):
            self._subject = _checkpoint.open(self._subject.path)
        at = query.get("at", "")
        self._opened.clear()
        page, sides = self._make_page(at)
        if isinstance(self._subject, (Steps, Folder)) and not at:
            page["mark"] = hashlib.sha256(json.dumps(page).encode()).hexdigest()
            if page["mark"] == query.get("known"):
                return {}
        self._slots.clear()
        self._shown = {at: SitePage(page, sides)}
        return page

    def _page_at(self, query: Mapping[str, str]) -> SitePage:
        at = query.get("at", "")
        show = lambda: (
            self._shown.get(at) or self._shown.setdefault(at, self._make_page(at))
        )
        return self._lock.run(show)

    def _make_page(self, at: str) -> SitePage:
        subject = self._subject
        if isinstance(subject, Folder):
            return of_runs(subject)
        if isinstance(subject, Steps):
            if not at:
                return of_run(subject)
            found = [self._step(subject, x) for x in at.split(",")]
            return of_pair(found[0], found[1]) if len(found) == 2 else of_one(found[0])
        return of_one(subject) if isinstance(subject, Checkpoint) else of_pair(*subject)

    def _step(self, steps: Steps, number: str) -> Checkpoint:
        if number not in self._opened:
            self._opened[number] = _checkpoint.open(steps.path(int(number)))
        return self._opened[number]

    # ---- Leaves.

    def _lazies(self, query: Mapping[str, str]) -> Sequence[LazyArray | None]:
        _, sides = self._page_at(query)
        return sides(int(query["n"]))

    def _samples(self, query: Mapping[str, str]) -> list[Sample | None]:
        lazies = self._lazies(query)
        return [
            None if x is None else self._read_sample(query, i, lazies)
            for i, x in enumerate(lazies)
        ]

    def _read_sample(
        self, query: Mapping[str, str], side: int, lazies: Sequence[LazyArray | None]
    ) -> Sample:
        key = query.get("at", ""), query["n"], side
        slot = self._lock.run(lambda: self._slot(key))
        lazy, first = lazies[side], lazies[0]
        assert lazy is not None
        is_like = first is not None and first.shape == lazy.shape
        return slot.sample(lazy, first if is_like else None)

    def _slot(self, key: object) -> _SampleOnce:
        slot = self._slots.setdefault(key, _SampleOnce())
        self._slots.move_to_end(key)
        while len(self._slots) > _MAX_SAMPLES:
            self._slots.popitem(last=False)
        return slot

    def _leaf(self, query: Mapping[str, str]) -> dict[str, Any]:
        lazies, samples = self._lazies(query), self._samples(query)
        found = [x for x in samples if x is not None]
        one = next(x for x in lazies if x is not None)
        values = [_charts.words(x.value) for x in found if x.value is not None]
        return {
            "said": next((x.said for x in found if x.said), ""),
            "shape": list(one.shape),
            "figures": [{} if x is None else _charts.figures(x) for x in samples],
            "histogram": _charts.histogram(found),
            "words": [text for text in values if text],
        }

    def _picture(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A slice of a leaf as a picture: its difference, if both checkpoints have
        it."""
        lazies = self._lazies(query)
        here = [i for i, x in enumerate(lazies) if x is not None]
        shapes = {x.shape for x in lazies if x is not None}
        if len(shapes) > 1:
            return {"error": "The two have other shapes."}
        (shape,) = shapes
        nbytes = max(_stored_bytes(x) for x in lazies if x is not None)
        text = query.get("index") or _charts.default_index(shape, nbytes)
        index = _sample.parse_index(text)
        arrays = [self._slice(query, i, lazies, index) for i in here]
        sizes = [int(query.get(name) or 256) for name in ("side", "points")]
        found = _charts.picture(arrays, *sizes)
        if found is None:
            of = "x".join(map(str, arrays[0].shape))
            return {"error": f"There is no picture of `[{text}]`, which is [{of}]."}
        return {**found, "index": text, "is_difference": len(arrays) == 2}

    def _slice(
        self,
        query: Mapping[str, str],
        side: int,
        lazies: Sequence[LazyArray | None],
        index: tuple[int | slice, ...],
    ) -> np.ndarray:
        lazy = lazies[side]
        assert lazy is not None
        if _stored_bytes(lazy) <= _sample.WHOLE:
            value = np.asarray(self._read_sample(query, side, lazies).value)
            return np.asarray(value[index]) if value.shape else value
        part = lazy[index]
        nbytes = math.prod(part.shape) * lazy.dtype.itemsize
        if nbytes > _sample.WHOLE:
            most = _text.size(_sample.WHOLE)
            raise ValueError(f"This is {_text.size(nbytes)}: at most {most} are drawn.")
        return np.asarray(part)

    def _spectrum(self, query: Mapping[str, str]) -> dict[str, Any]:
        points = int(query.get("points") or 256)
        found = [_charts.spectrum(x, points) for x in self._samples(query) if x]
        return {"spectra": [x for x in found if x is not None]}

    def _change(self, query: Mapping[str, str]) -> dict[str, Any]:
        a, b = self._samples(query)
        if a is None or b is None or a.value is None or b.value is None:
            return {}
        found = _diff.diff({"x": a.value}, {"x": b.value}, values=True).changed
        change = found.get("x", Change((), "", "", 0.0, 0.0))
        return {
            "relative": finite(change.relative),
            "largest": finite(change.largest),
            "is_sample": bool(a.said),
        }

    def _norm(self, query: Mapping[str, str]) -> dict[str, Any]:
        assert isinstance(self._subject, Steps)
        ckpt = self._step(self._subject, query["step"])
        if query["name"] not in ckpt:
            return {"norm": None}
        return {"norm": finite(_charts.norm(_sample.read_sample(ckpt[query["name"]])))}


def _stored_bytes(lazy: LazyArray) -> int:
    return _lazy.body_of(lazy).template.nbytes


def finite(x: float | None) -> float | str | None:
    """A number as JSON has it."""
    return x if x is None or math.isfinite(x) else str(x)


# ---- Pages.


def of_one(ckpt: Checkpoint) -> SitePage:
    names = list(ckpt)
    page = {"kind": "checkpoint", "title": ckpt.path, **_contents(ckpt)}
    return SitePage(page, lambda n: [ckpt[names[n]]])


def _contents(ckpt: Checkpoint) -> dict[str, Any]:
    source = _checkpoint.source_of(ckpt)
    lines = list(_facts.leaf_lines(source))
    facts = _facts.facts(source)
    facts.pop("static", None)  # They are all there.
    return {
        "quiet": _facts.headline(source),
        "facts": list(facts.items()),
        "static": _facts.static(source),
        "labels": _facts.labels(source),
        "metadata": _facts.metadata(source),
        "rows": lines,
        "tree": [_node(x) for x in _branches.branches(lines, folds=False)],
    }


def _node(branch: Branch) -> Any:
    """A leaf as its number; a node as its name, text, bytes, and what is below it."""
    if branch.leaf is not None:
        return branch.leaf
    return [branch.part, branch.what, branch.nbytes, [_node(x) for x in branch.below]]


def of_pair(a: Checkpoint, b: Checkpoint) -> SitePage:
    """Rows have a fourth column: `changed`, `same`, `unknown` (it must be read to
    know), or `a` or `b`, the only one that has the leaf."""
    before, after = _diff.paired(_elements.look(a), _elements.look(b))
    rows: list[list[Any]] = []
    sides: list[tuple[LazyArray | None, LazyArray | None]] = []
    for name in dict.fromkeys([*before, *after]):
        x, y = before.get(name), after.get(name)
        shown = [_diff.show(leaf.template) for leaf in (x, y) if leaf is not None]
        leaf = y if x is None else x
        assert leaf is not None
        state = "b" if x is None else "a"
        if x is not None and y is not None:
            same = _diff.is_same(x, y)
            state = {True: "same", False: "changed", None: "unknown"}[same]
        text = " → ".join(dict.fromkeys(shown))
        rows.append([name, text, leaf.template.nbytes, state])
        sides.append((None if x is None else x.value, None if y is None else y.value))
    source, other = _checkpoint.source_of(a), _checkpoint.source_of(b)
    page = {"kind": "pair", "title": a.path, "other": b.path, "rows": rows}
    page |= {
        "quiet": _facts.headline(source),
        "other_quiet": _facts.headline(other),
    }
    page["metadata_differ"] = _facts.metadata(source) != _facts.metadata(other)
    return SitePage(page, sides.__getitem__)


def of_run(steps: Steps) -> SitePage:
    history = _records.steps_of(steps)
    there = [x.number for x in history if x.path is not None]
    # The newest first, and as many as there is a use for.
    found = _summary.summaries(steps, _MAX_TABLE_STEPS)[::-1]
    newest = steps.latest()
    ckpt = None if newest is None else _checkpoint.open(steps.path(newest))
    quiet = _facts.counted(len(there), "step")
    quiet += f" of {len(history):,} that were saved" * (len(there) < len(history))
    contents = {"facts": [], "metadata": "", "rows": [], "tree": []}
    contents |= {"static": [], "labels": {}}
    if ckpt is not None:
        contents = _contents(ckpt)
        quiet = f"{quiet} · the newest: {contents['quiet']}"
    line, *left = _curves_of.lines(history)
    series = {"": line} if not left else {"newest attempt": line}
    series |= {f"left by attempt {x[-1].attempt + 1}": x for x in left}
    page = {
        **contents,
        **_curves(series),
        "kind": "run",
        "title": str(steps.root),
        "quiet": quiet,
        "steps": [[x.step, x.state == "complete"] for x in found],
        "table": _tables.steps(found),
        "newest": newest,
        "norm_steps": spread(sorted({*there}), _NORM_STEPS),
    }
    names = [] if ckpt is None else list(ckpt)
    return SitePage(page, lambda n: [] if ckpt is None else [ckpt[names[n]]])


def of_runs(folder: Folder) -> SitePage:
    """Its `runs` have `values`: of each of `metrics` the last, the least, the
    greatest."""
    histories: dict[str, list[Step]] = {}
    unread = ""
    for name, run in folder.runs().items():
        try:
            histories[name] = _records.steps_of(run)
        except ERRORS:
            unread += f" · not read: {_text.bounded(name, 200)}"
    lines = {name: _curves_of.lines(found)[0] for name, found in histories.items()}
    curves = _curves(lines)
    metrics = [name for name, *_ in curves["curves"]]
    rows = []
    for name, line in lines.items():
        there = [x for x in histories[name] if x.path is not None]
        row = {"name": name, "values": [_curves_of.range_of(line, x) for x in metrics]}
        row |= {"saved": f"{len(there):,}", "nbytes": sum(x.nbytes or 0 for x in there)}
        for last in line[-1:]:
            row |= {"step": f"{last.number}", "time": _facts.moment(last.time)[:19]}
        rows.append(row)
    page = {**curves, "kind": "runs", "title": folder.title, "runs": rows}
    page |= {"metrics": metrics, "quiet": _facts.counted(len(rows), "run") + unread}
    return SitePage({**page, "rows": [], "tree": [], "labels": {}}, lambda n: [])


def _curves(series: dict[str, list[Step]]) -> dict[str, Any]:
    """`curves`: of each metric its name, a note, points by the number of a series."""
    found = _curves_of.curves(series.values())
    some = list(found)[:_MAX_CURVES]
    most = min(
        _MAX_LINE_POINTS,
        max(_MIN_LINE_POINTS, _MAX_POINTS // max(1, len(series) * len(some))),
    )
    curves = []
    for name in some:
        lines = found[name]
        odd = sum(not math.isfinite(y) for line in lines.values() for _, y in line)
        points = [[i, _charts.thinned(line, most)] for i, line in lines.items()]
        last = [f"last {y:.5g}" for _, y in lines.get(0, [])[-1:] if len(series) == 1]
        note = " · ".join([*last, *[f"{odd:,} not finite"] * bool(odd)])
        curves.append([name, note, points])
    return {"series": list(series), "curves": curves}


def spread(steps: list[int], most: int) -> list[int]:
    """So many of some steps at most, with the first and the last one."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]
