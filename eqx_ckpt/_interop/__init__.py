"""Checkpoints in the shapes of other libraries: safetensors, state dicts, bytes.

It imports `_save`, `_load` and what is below them. Begin with `_convert`.
"""
