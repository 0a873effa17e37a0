"""The heads of many indices of one run, which mostly are alike."""

from typing import Any, NamedTuple

from . import _index, _json


class IndexSummary(NamedTuple):
    """Summary of one index. `files`: how many data files its layout has, or None
    where each leaf has its own."""

    save: str
    metadata: Any
    leaves: int
    nbytes: int
    files: int | None


def read(data: bytes, known: dict[tuple[str, str], IndexSummary]) -> IndexSummary:
    """The summary of an index. One whose columns are those of an index that is `known`,
    as most in a run are, is not parsed, but for its metadata.

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
        key = text[end:middle], text[first : text.index('"markers":', first)]
    except ValueError:
        return _summary_of(_index.decode(data))
    if key not in known:
        known[key] = _summary_of(_index.decode(data))
    files = text.count('"', middle + len('"files":'), text.index("]", middle)) // 2
    return known[key]._replace(save=head[1].decode(), metadata=metadata, files=files)


def _summary_of(index: _index.Index) -> IndexSummary:
    files = len(index.files) if index.layout == "ocdbt" else None
    leaves = index.leaves
    return IndexSummary(
        index.save, index.metadata, len(leaves.names), leaves.nbytes, files
    )
