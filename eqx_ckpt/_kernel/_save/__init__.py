"""A save: which bytes go where, writing them, and the commit that makes them the
checkpoint at a path.

It imports `_load` and what is below it. Begin with `_serialise`.
"""
