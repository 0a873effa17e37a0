"""The command line: one function a command. It imports every room. Begin with
`_commands`, which says what the shell sees of each, without JAX.

A command looks, and returns a `CommandResult`: data for `--json`, and lines for people.
Only `_output` prints, and escapes all that it prints.
"""
