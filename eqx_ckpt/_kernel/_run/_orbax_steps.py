"""Steps of Orbax in the directory of a run. They may have other names than their number
alone, and other trees than `default`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._format import _files, _json, _text
from .._load import _published
from .._storage._backend import Backend
from . import _numbered
from ._listing import ITEM, names_in


# What Orbax has in each of its trees.
METADATA = "_METADATA"
_MAX_METRICS = 2**20
# So many are named in an error.
_SHOWN = 20


class OrbaxTree(NamedTuple):
    """A tree that Orbax has finished: its key at the root of the run, and its stamp."""

    key: str
    stamp: str


class OrbaxSteps:
    """The steps of Orbax at the root of a run. Where they are is known by the last
    list, which is noted here."""

    def __init__(self, root: Backend):
        self._root = root
        # The names that are not the number alone, by the last list of a disk.
        self._names: dict[int, str] | None = None
        # The names of all trees, by the last list of an object store.
        self._trees: dict[int, list[str]] = {}

    def note_trees(self, trees: dict[int, list[str]]) -> None:
        """Is told of each list of an object store."""
        self._trees = trees

    def note_names(self, names: Mapping[str, bool]) -> list[int]:
        """Is told of each list of a disk: the names at the root, and whether each is of
        a directory. Returns the steps that have other names than their number."""
        others = {_numbered.number_of(name): name for name in names if names[name]}
        self._names = {
            step: name
            for step, name in others.items()
            if step is not None and str(step) not in names and self._is_orbax(name)
        }
        return [*self._names]

    def name_of(self, step: int) -> str:
        if self._names is None and not self._root.is_remote:
            if not self._root.is_directory(str(step)):
                self.note_names(self._root.list_top() or {})
        return (self._names or {}).get(step, str(step))

    def _is_orbax(self, name: str) -> bool:
        keys = f"{name}/{_published.TOP}", f"{name}/{ITEM}/{METADATA}"
        return any(map(self._root.stamp, keys))

    def items(self, step: int) -> list[str]:
        """The trees in a step, but `default`; in an object store, as they were
        listed."""
        name = self.name_of(step)
        if self._root.is_remote or not self._root.stamp(f"{name}/{_published.TOP}"):
            return self._trees.get(step, [])
        tops = names_in(self._root.below(name))
        inside = sorted(item for item in tops if tops[item] and item != ITEM)
        return [
            item for item in inside if self._root.stamp(f"{name}/{item}/{METADATA}")
        ]

    def tree_of(self, step: int) -> OrbaxTree | None:
        """The one tree of a step that Orbax has finished; None for any other step."""
        root, name = self._root, self.name_of(step)
        key = f"{name}/{ITEM}"
        stamp = root.stamp(f"{key}/{METADATA}")
        # A step may have one tree, that is called otherwise.
        if not stamp and len(items := self.items(step)) == 1:
            key = f"{name}/{items[0]}"
            stamp = root.stamp(f"{key}/{METADATA}")
        if not stamp or self._has_lost_index(step):
            return None
        if root.is_remote and not root.stamp(f"{name}/{_published.DONE}"):
            return None
        if not _published.is_finished(root.below(name)):
            return None
        return OrbaxTree(key, stamp)

    def _has_lost_index(self, step: int) -> bool:
        """Whether a step without our index was once complete, and ours."""
        root = self._root.below(f"{step}/{ITEM}")
        return bool(_published.saves(root)) or _files.DIGESTS in names_in(root)

    def metrics(self, step: int) -> dict[str, Any]:
        key = f"{self.name_of(step)}/metrics/metrics"
        value = self._root.read(key, limit=_MAX_METRICS)
        found = _json.parse(value.data, f"`{key}`") if value else None
        return found if isinstance(found, dict) else {}

    def check_readable(self) -> None:
        """For a run without a complete step. **Raises:** `ValueError` if Orbax has
        saved steps there that are not read: they are not nothing."""
        tops = names_in(self._root)
        there = [name for name in sorted(tops) if tops[name] and self._is_other(name)]
        if there:
            shown = ", ".join(f"`{_text.escape(name)}`" for name in there[-_SHOWN:])
            raise ValueError(
                f"`{self._root}` has steps of Orbax that a manager does not read: "
                f"{shown}. Open one by its path, and choose another directory for this "
                "run."
            )

    def _is_other(self, name: str) -> bool:
        """Whether a name is that of a step that Orbax has finished."""
        if _numbered.number_of(name) is None or not self._is_orbax(name):
            return False
        if _numbered.is_step(name) and self._has_lost_index(int(name)):
            return False
        return _published.is_finished(self._root.below(name))
