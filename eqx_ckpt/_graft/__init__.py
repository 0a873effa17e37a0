"""Parts of checkpoints into another model.

It imports `adapters`, `_load` and what is below them. Begin with `_graft`.
"""
