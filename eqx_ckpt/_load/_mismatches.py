"""The one error of a load that does not fit: what is wrong, and with which leaves."""

import itertools as it
from collections.abc import Sequence

from .._format import _text
from .._format._leaves import Leaves
from .._tree import _nearest, _show, _static


class Mismatches(_show.Problems):
    """The problems of a load from a `thing`, and a sentence on the first of them.

    `origins`: of what was renamed, the name that is stored.
    """

    def __init__(self, thing: str) -> None:
        super().__init__()
        self.thing = thing
        self.first = ""
        self.no_entries: set[str] = set()
        self.origins: dict[str, str] = {}

    def add(self, kind: str, name: str, text: str = "", stored: str = "") -> None:
        super().add(kind, name, text)
        if stored and stored != name:
            self.origins[name] = stored

    def explain(self, first: str) -> None:
        self.first = self.first or first


_titles = {
    "missing": "missing: in `like`, not in the {}",
    "abstract": 'missing and abstract: `missing="keep"` would keep a leaf that has no '
    "value. Initialise it (`load_or_init`), or pass a `like` with values",
    "unexpected": "unexpected: in the {}, not in `like`",
    "kind": "of another kind",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "part": "saved in part, by one process alone",
    "unreadable": "that cannot be read from a file of this format",
    "static": "static fields that have changed ({static})",
}


def message(what: str, saved: Leaves, source: str, report: Mismatches) -> str:
    """The text of the error."""
    below = f" under `{source}`" if source else ""
    lines = [report.first] if report.first else []
    lines.append(
        f"The {what}{below} does not fit `like` ({report.count()} of "
        f"{len(saved.names)} leaves saved); nothing was loaded."
    )
    missing = report.names("missing")
    there = _nearest.Names(saved.names if missing else ())

    def hint(kind: str, name: str, text: str) -> str:
        if kind != "missing":
            origins = report.origins
            some = it.islice(_show.unfold(name), len(origins))
            names = _show.fold(origins[x] for x in some if x in origins)
            return f"  (stored as {_listed(names)})" if names else ""
        if "{" in name or name in report.no_entries:
            return ""
        near = there.nearest(name, 1, 0.6)
        if not near:
            return ""
        stored = saved.record(saved.places[near[0]]).name
        beside = f", stored as `{stored}`" if stored != near[0] else ""
        return f"  (the nearest name there is `{near[0]}`{beside})"

    static = _static.how_to_pass(report.names("static"))
    titles = {
        kind: title.replace("{}", report.thing).replace("{static}", static)
        for kind, title in _titles.items()
    }
    lines += _show.sections(report.rows, titles, hint)
    elsewhere = source_hint(saved, missing, source)
    if elsewhere:
        lines.append(elsewhere)
    return "\n".join(map(_text.bounded, lines))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def source_hint(saved: Leaves, missing: list[str], source: str) -> str:
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
