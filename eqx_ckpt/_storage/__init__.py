"""Bytes at keys: in directories, object stores, a zip or memory. Only this room
imports TensorStore, and nobody else asks what kind of store it is.

It imports `_format` and `_runtime`. Begin with `_backend`: what all kinds do, and what
some can; then `_root`, which makes a backend of a path.
"""
