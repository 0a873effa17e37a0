"""The command line: one function a command. It imports every room. Begin with `_main`.

A command looks, and returns a `Said`: data for `--json`, and lines for people. Only
`_output` prints, and escapes all that it prints.
"""
