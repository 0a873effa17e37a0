"""Files of other libraries, behind `open`. Each module here reads one format, and makes
an index of what its files say, which is checked as strictly as ours: see SECURITY.md.

The modules are imported when a path is no checkpoint of ours.
"""

from .._kernel import _rooms


# What tells a format in an object store. There a list would be of all below a path, and
# not all servers give one.
_TELLING = (
    "model.safetensors model.safetensors.index.json _METADATA checkpoint "
    "_CHECKPOINT_METADATA manifest.ocdbt _strings.json array_metadatas/process_0 "
    "orbax.checkpoint default/_METADATA state/_METADATA pytree/_METADATA metadata.json "
    "tensorstore_index.json pytorch_model.bin pytorch_model.bin.index.json".split()
)


@_rooms.read_format.provide
def _():
    from ._readers import open_foreign

    return open_foreign


@_rooms.keys_of_formats.provide
def _():
    return lambda: _TELLING
