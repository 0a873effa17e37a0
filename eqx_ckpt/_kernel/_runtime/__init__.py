"""Threads, the processes of a run, clean-ups, the progress bar: what calls run on.

It imports no other room. Begin with `_conversation`.
"""
