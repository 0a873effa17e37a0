"""Errors that callers tell apart by their type."""


class DamagedError(RuntimeError):
    """What was saved is there in part only, or its bytes are not what was written.

    Nothing else is damage: a file that may not be read, a disk that fails or a server
    that does not answer raise what they are, such as `PermissionError` or `OSError`.
    """


class ReplacedError(RuntimeError):
    """What was opened has been replaced or deleted since, or while it was read."""
