"""Entries of an eqx.nn.State in suggestions. Their names are positions, which say
nothing: each goes where the module that has its StateIndex goes."""

from collections.abc import Collection, Iterable, Mapping

from .._kernel._format._state_labels import Label
from ._matching import Matching


class StateEntries:
    """The leaves of entries that are in no pair, if both sides have Modules with such.

    - `numbers`, `leaf_indices`: those of the model, and the saved ones.
    - `states`: the names of States of the model that are in no pair, and of the saved
        State that stands for each.
    """

    def __init__(
        self, matching: Matching, numbers: Iterable[int], leaf_indices: Iterable[int]
    ):
        self._matching = matching
        model, stored = matching.model, matching.stored
        self.numbers: set[int] = set()
        self.leaf_indices: set[int] = set()
        self.states: dict[str, str] = {}
        tree, labels = stored.saved.tree, stored.saved.labels
        if not model.entries or not labels or tree is None:
            return
        self.numbers = {n for n in numbers if n in model.entries}
        self.leaf_indices = {i for i in leaf_indices if i in labels}
        paired = {n for x in matching.pairs for a in x.lefts for n in a.leaves.values()}
        ours = {model.entries[n].state for n in self.numbers - paired}
        ours -= {model.entries[n].state for n in paired & model.entries.keys()}
        theirs = {*tree.states()}
        self.states = {x: x for x in ours & theirs}
        if len(ours) == len(theirs) == 1:
            self.states = dict(zip(ours, theirs))

    def fresh(self, new: Collection[int]) -> set[int]:
        """The entries of modules whose arrays are all fresh, or among the `new`."""
        model = self._matching.model
        labels = {n: model.entries[n].label for n in self.numbers}
        below = {
            node: [n for n in some if model.is_array(n) and n not in model.entries]
            for node, some in model.below.items()
        }
        return _of_modules(labels, below, {*new, *self._matching.fresh})

    def dropped(self, old: Collection[int]) -> set[int]:
        """The saved entries of modules whose leaves are all dropped, or among the
        `old`."""
        stored = self._matching.stored
        labels = {i: stored.saved.labels[i] for i in self.leaf_indices}
        return _of_modules(labels, stored.below, {*old, *self._matching.dropped})


def _of_modules(
    labels: Mapping[int, Label],
    below: Mapping[str, Collection[int]],
    chosen: Collection[int],
) -> set[int]:
    """The leaves of entries that are only of modules with chosen leaves alone."""
    out = set()
    for leaf, label in labels.items():
        modules = [below.get(x.rpartition(".")[0], ()) for x in label.names]
        if modules and all(x and all(y in chosen for y in x) for x in modules):
            out.add(leaf)
    return out
