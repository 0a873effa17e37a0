"""Static values of the nodes that stand for each other."""

from collections.abc import Iterator

from .._format import _names
from .._format._leaves import Statics
from .._tree import _static
from .._tree._static import Static
from ._matching import Matching


def compare(matching: Matching, static: Static) -> list[tuple[str, str, str]]:
    """Those that differ between Modules that stand for each other, and need not be
    the same: the others are problems."""
    statics = matching.stored.saved.statics
    model = matching.model
    own = _static.record(model.tree, None, model.flat)
    what = f"checkpoint at `{matching.stored.ckpt.path}`"
    passes = _static.passing(static, statics, what, _static.all_names(own))
    out = []
    for name, source in dict.fromkeys(_nodes(matching, own)):
        # Of a part that is new, not all that holds it is the same.
        new = any(n in matching.fresh for n in matching.model.below.get(name, []))
        new |= any(p in matching.dropped for p in matching.stored.below.get(source, []))
        for x in _static.changes(statics, source, own, name, passes):
            if new or x.may_differ:
                out.append((x.name, x.saved, x.here))
            else:
                text = f"saved {x.saved}, the model has {x.here}"
                matching.problems.add("static", x.name, text)
    return out


def _nodes(matching: Matching, own: Statics) -> Iterator[tuple[str, str]]:
    """Names of nodes that stand for each other, in the model and as saved."""
    names = list(own.of)
    below = _names.by_prefix(names)
    for pair in matching.pairs:
        if pair.renamed:
            continue
        for left, right in (
            (a, b) for g in pair.groups for a in g.lefts for b in g.rights
        ):
            for number in below.get(left.name, []):
                name = names[number]
                if matching.is_elsewhere(name, pair.label):
                    continue
                rest = _names.below(name, left.name) if name else ""
                yield name, ".".join(x for x in (right.name, rest) if x)
    roots = {
        pair.label: _names.within(a.name for g in pair.groups for a in g.lefts)
        for pair in matching.pairs
        if pair.renamed
    }
    for job in matching.jobs:
        if job.label not in roots:
            continue
        root = roots[job.label]
        for number in job.all_numbers:
            for saved in job.all_saved:
                # Up from two leaves, as long as the names agree.
                a = matching.model.names[number].split(".")
                b = saved.lazy.name.split(".")
                while a and b and a[-1] == b[-1]:
                    a, b = a[:-1], b[:-1]
                    name = ".".join(a)
                    if root(name) is None:
                        break
                    if name in own.of:
                        yield name, ".".join(b)
