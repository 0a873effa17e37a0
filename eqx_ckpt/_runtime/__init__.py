"""What a call runs on: threads, the processes of a run, clean-ups, the progress bar.

It imports no other room. Begin with `_processes`.
"""
