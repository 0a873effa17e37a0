"""Checkpoints and trees compared, measured and merged, without loading them.

It imports `_load` and what is below it. Begin with `_diff`.
"""
