"""Near disks: steps of a run on the disks of its nodes, for `CheckpointManager(near=)`.

It adds itself to `_run`, which does not import it. Begin with `_near_steps`.
"""
