"""Summaries of the indices of one run, most of which are alike."""

from typing import Any, NamedTuple

from . import _index, _json
from ._index import Index


class IndexSummary(NamedTuple):
    """Facts of an index. `files` counts its data files: None where each leaf has its
    own."""

    save: str
    metadata: Any
    leaves: int
    nbytes: int
    files: int | None


def summarise(data: bytes, known: dict[tuple[str, str], IndexSummary]) -> IndexSummary:
    """The summary of an index. In a run, most have the same leaves as an index that is
    `known`, told by the text of their templates, names and aliases: then nothing but
    the metadata is parsed.

    **Raises:** as `_index.decode`.
    """
    head = _index.match_head(data)
    if head is None or not (head["save"] and head["packed"]):
        return _summary_of(_index.decode(data))
    _index.check_digest(data)
    _json.check_cost(data)
    text = data.decode("ascii", "replace")
    try:
        metadata, end = _json.parse_at(text, head.end())
        _json.check_json(metadata)
        # Templates and names come before `files`, where names have their quotes
        # escaped; between `files` and `aliases` are only numbers of files and places.
        files_at = text.index('"files":', end)
        aliases_at = text.index('"aliases":', files_at)
        aliases_end = text.index('"', aliases_at + len('"aliases"'))
        key = text[end:files_at], text[aliases_at:aliases_end]
    except ValueError:
        return _summary_of(_index.decode(data))
    if key not in known:
        known[key] = _summary_of(_index.decode(data))
    in_files = files_at + len('"files":'), text.index("]", files_at)
    files = text.count('"', *in_files) // 2
    return known[key]._replace(
        save=head["save"].decode(), metadata=metadata, files=files
    )


def _summary_of(index: Index) -> IndexSummary:
    leaves, files = index.leaves, len(index.files) or None
    return IndexSummary(
        index.save, index.metadata, len(leaves.names), leaves.nbytes, files
    )
