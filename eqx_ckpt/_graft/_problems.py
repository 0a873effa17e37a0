"""All that is wrong with a graft, as one error."""

from .._format import _text
from .._tree import _show, _static
from .._tree._show import Problems
from . import _suggest
from ._sides import Model, Stored


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


def check(
    problems: Problems,
    model: Model,
    stored: Stored,
    undeclared: tuple[list[int], list[int]] = ([], []),
) -> None:
    """**Raises:** one `RuntimeError` that lists the problems, if there are any, with
    code to paste for leaves that are in no pair."""
    if problems.rows:
        raise RuntimeError(_message(problems, model, stored, undeclared))


def _message(
    problems: Problems,
    model: Model,
    stored: Stored,
    undeclared: tuple[list[int], list[int]],
) -> str:
    lines = [
        f"The graft of `{stored.ckpt.path}` does not fit the model "
        f"({problems.count()}); nothing was loaded."
    ]
    static = _static.how_to_pass(problems.names("static"))
    titles = {kind: x.replace("{static}", static) for kind, x in _titles.items()}
    lines += _show.sections(problems.rows, titles)
    dotted = [stored.saved.names[p] for p in undeclared[1]]
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
