"""The kernel: names, leaves, stores, loads, saves and runs.

It imports none of the rooms around it. They provide its hooks (`_rooms.py`).
"""
