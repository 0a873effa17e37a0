"""Summaries of the indices of one run, most of which are alike; and the journal of the
run, which has these summaries in one file.

The journal is a cache, which anyone may lose, damage or write. A row in it counts only
if the index of its step still has the stamp that it had when it was read.
"""

from typing import Any, NamedTuple

from . import _index, _json
from ._rows import RowFormat
from ._schema import COUNT, ID, optional


KEY = "eqx_ckpt.journal"
# At most this many data files: a look at a step looks at each of them.
_MOST_FILES = 10**6


class StepRow(NamedTuple):
    """Facts in the index of a step. `stamp` is that of the file of the index, and
    `time` says when it was written, if that is known. `files`: see `IndexSummary`."""

    step: int
    stamp: str
    save: str
    leaves: int
    nbytes: int
    files: int | None
    time: float | None
    metrics: dict[str, Any]


_FACTS = COUNT, str, ID, COUNT, COUNT
_KINDS = *_FACTS, optional(range(_MOST_FILES)), optional(float), dict
FORMAT = RowFormat("journal", StepRow, _KINDS)


class IndexSummary(NamedTuple):
    """Facts of an index. `files` counts its data files: None where each leaf has its
    own."""

    save: str
    metadata: Any
    leaves: int
    nbytes: int
    files: int | None


def summarise(data: bytes, known: dict[tuple[str, str], IndexSummary]) -> IndexSummary:
    """The summary of an index. In a run, most have the same columns as an index that is
    `known`: then nothing but the metadata is parsed.

    **Raises:** as `_index.decode`.
    """
    head = _index.match_head(data)
    if head is None or not (head[1] and head[4]):
        return _summary_of(_index.decode(data))
    _index.check_digest(data)
    _json.check_cost(data)
    text = data.decode("ascii", "replace")
    try:
        metadata, end = _json.parse_at(text, head.end())
        _json.check_json(metadata)
        # Names are strings, in which quotes are escaped, and between the two are only
        # numbers: the first is the key.
        middle = text.index('"files":', end)
        first = text.index('"aliases":', middle)
        key = text[end:middle], text[first : text.index('"', first + len('"aliases"'))]
    except ValueError:
        return _summary_of(_index.decode(data))
    if key not in known:
        known[key] = _summary_of(_index.decode(data))
    files = text.count('"', middle + len('"files":'), text.index("]", middle)) // 2
    return known[key]._replace(save=head[1].decode(), metadata=metadata, files=files)


def _summary_of(index: _index.Index) -> IndexSummary:
    leaves, files = index.leaves, len(index.files) or None
    return IndexSummary(
        index.save, index.metadata, len(leaves.names), leaves.nbytes, files
    )
