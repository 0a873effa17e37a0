"""Trees made of a checkpoint alone, of the classes that a caller allows.

A room around the kernel, which reads the record of a tree that each save makes. It
imports `_load` and what is below it. Begin with `_rebuild`.
"""
