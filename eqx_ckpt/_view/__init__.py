"""A page to look into checkpoints and runs, in a browser or as one file.

Begin with `_site`.
"""
