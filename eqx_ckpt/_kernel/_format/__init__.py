"""The format on disk as pure functions: names, templates, chunk grids, the index, the
nodes of an OCDBT database, digests. No I/O and no devices.

It imports no other room. Begin with `_index`: the index is the checkpoint.
"""
