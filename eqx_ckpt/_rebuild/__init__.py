"""Trees made of a checkpoint alone, of the classes that a caller allows.

It imports `_load` and what is below it. Begin with `_rebuild`.
"""
