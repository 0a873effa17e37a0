"""Lines as a tree, by the parts of their names."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._kernel._tree import _folding
from . import _facts
from ._lines import TreeLine


class Branch(NamedTuple):
    """A node or a leaf, and what is below it. It stands for `times` siblings, which are
    numbered and alike: `nbytes` and `leaves` are those of all of them together. `leaf`:
    of a leaf the number of its line, which keeps it from being joined with another;
    None if `branches` folds."""

    part: str
    text: str
    nbytes: int | None
    leaves: int
    below: tuple["Branch", ...] = ()
    leaf: int | None = None
    times: int = 1

    @property
    def title(self) -> str:
        if self.times == 1:
            return self.part
        return f"{{{self.part}..{int(self.part) + self.times - 1}}}"

    @property
    def what(self) -> str:
        """The kind of a leaf, or the number of leaves of a node."""
        text = self.text
        if self.below:
            text = _facts.leaf_count(self.leaves // self.times)
        return text if self.times == 1 else f"{self.times:,} x {text}"


def branches(lines: Iterable[TreeLine], folds: bool = True) -> tuple[Branch, ...]:
    """The top of the tree that lines make by the parts of their names. If it `folds`,
    siblings that are alike become one; if not, each leaf has the number of its line."""
    top: dict[str, Any] = {}
    for number, line in enumerate(lines):
        node = top
        *parents, last = line.name.split(".")
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):  # A leaf and a node of one name.
                child = node.setdefault(part + ".", {})
            node = child
        leaves = int(line.nbytes is not None)  # A static field is no leaf.
        leaf = Branch(
            last, line.text, line.nbytes, leaves, (), None if folds else number
        )
        node[last if last not in node else last + "."] = leaf
    return _folded(top)


def _folded(node: dict[str, Any]) -> tuple[Branch, ...]:
    out: list[Branch] = []
    for part, child in node.items():
        branch = child
        if isinstance(child, dict):
            below = _folded(child)
            leaves = sum(x.leaves for x in below)
            branch = Branch(part.removesuffix("."), "", total(below), leaves, below)
        if out and _continues(out[-1], branch):
            out[-1] = out[-1]._replace(times=out[-1].times + 1)
        else:
            out.append(branch)
    return tuple(map(_multiplied, out))


def total(some: Sequence[Branch]) -> int | None:
    """The bytes of some branches together; None if there are no leaves in them."""
    sizes = [x.nbytes for x in some if x.nbytes is not None]
    return sum(sizes) if sizes else None


def _continues(last: Branch, branch: Branch) -> bool:
    """Whether a branch is the next of some that are numbered and alike."""
    if not (_folding.is_number(last.part) and _folding.is_number(branch.part)):
        return False
    if int(branch.part) != int(last.part) + last.times:
        return False
    return last._replace(part=branch.part, times=branch.times) == branch


def _multiplied(branch: Branch) -> Branch:
    nbytes = None if branch.nbytes is None else branch.nbytes * branch.times
    return branch._replace(nbytes=nbytes, leaves=branch.leaves * branch.times)


def rows(some: Iterable[Branch], indent: str = "") -> Iterator[TreeLine]:
    """The lines of a tree: names are indented, and nodes have no text and no bytes."""
    for x in some:
        is_node = bool(x.below)
        nbytes = None if is_node or x.nbytes is None else x.nbytes // x.times
        yield TreeLine(indent + x.title, x.text, nbytes)
        yield from rows(x.below, indent + "  ")
