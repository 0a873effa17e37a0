"""Bytes at keys: in directories, in memory, and wherever rooms around the kernel add.
Only it and `_stores` import TensorStore, and nobody else asks what kind of store it is.

It imports `_format` and `_runtime`. Begin with `_backend`: what all kinds do; then
`_local` and `_objects`, the two families; then `_root`, which makes one of a path.
"""
