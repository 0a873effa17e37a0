"""Bytes at keys: in directories, in memory, and wherever rooms around the kernel add.
Only it, `_stores` and `_formats/_foreign_source` import TensorStore.

It imports `_format` and `_runtime`. Begin with `_backend`: what all kinds do; then
`_local` and `_objects`, the two families; then `_root`, which makes one of a path.
"""
