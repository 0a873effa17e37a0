"""Patterns that select leaves by name on the command line."""

import fnmatch
import re

from .._kernel._format import _names


def is_match(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a leaf, or of a node above it. In a
    pattern, `*` stands for any text."""
    if not re.search(r"[*?\[]", pattern):
        return _names.is_under(name, pattern)
    return fnmatch.fnmatchcase(name, pattern)
