"""Pytrees: leaves, names, selectors, static fields, shardings. No I/O.

It imports `_format` and `_runtime`. Begin with `_flatten`.
"""
