"""Files of other libraries, behind `open`. Each module here reads one format, and makes
an index of what its files say, which is checked as strictly as ours: see SECURITY.md.

The modules are imported when a path is no checkpoint of ours.
"""

from typing import Any

from .. import _extensions
from .._load._source import Source
from .._zips._probe import Probe


def _read(probe: Probe, like: Any) -> Source | None:
    """The source of what a probe has found."""
    from . import _readers

    return _readers.read(probe, like)


# What tells a format in an object store. There a list would be of all below a path, and
# not all servers give one.
_TELLING = (
    "model.safetensors model.safetensors.index.json _METADATA checkpoint "
    "_CHECKPOINT_METADATA manifest.ocdbt _strings.json array_metadatas/process_0 "
    "orbax.checkpoint default/_METADATA state/_METADATA pytree/_METADATA metadata.json "
    "tensorstore_index.json pytorch_model.bin pytorch_model.bin.index.json".split()
)
_extensions.add("read_format", _read)
_extensions.add("names_of_formats", _TELLING)
