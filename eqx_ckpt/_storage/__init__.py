"""Bytes at keys: in directories, object stores, a zip or memory. Only this room
imports TensorStore.

It imports `_format` and `_runtime`. Begin with `_root`.
"""
