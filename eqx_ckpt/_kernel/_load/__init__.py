"""From a path to a `Checkpoint` to arrays.

It imports `_storage`, `_tree` and what is below them. Begin with `_deserialise`. A load
walks through `_open`, `_match`, `_read_leaves` and `_read_arrays`, in this order. It
reads by these calls: `read_in_step`, `ReadPlan.run`, `read_leaves`, `read_arrays`,
`_read_once`, and from there `read_small` and `_read_large`.

Other rooms ask a `Source` about an open checkpoint (`_checkpoint.source_of`), and a
`LeafBody` about a lazy array (`_lazy.body_of`).
"""
