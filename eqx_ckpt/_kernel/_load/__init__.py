"""From a path to a `Checkpoint` to arrays.

It imports `_storage`, `_tree` and what is below them. Begin with `_open`, then
`_match`, then `_read_leaves`, then `_read_arrays`: a load walks through them in this
order.

Other rooms ask a `Source` about an open checkpoint (`_checkpoint.source_of`), and a
`LeafBody` about a lazy array (`_lazy.body_of`).
"""
