"""Names of leaves as they are given."""

import fnmatch
import re

from .._kernel._format import _names


def is_match(name: str, pattern: str) -> bool:
    """Whether a leaf is meant by a pattern, in which `*` stands for any text: by its
    name, or that of a node above it."""
    if not re.search(r"[*?\[]", pattern):
        return _names.is_under(name, pattern)
    return fnmatch.fnmatchcase(name, pattern)
