"""Parts of checkpoints into another model, or into one that is initialised.

It imports `adapters`, `_load` and what is below them. Begin with `_graft`.
"""
