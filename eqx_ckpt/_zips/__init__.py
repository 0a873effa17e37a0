"""Checkpoints of one file, and zips of other libraries: the list of what is in them.

It imports the kernel, which finds here how one is saved; `_formats` reads them.
"""

from .. import _extensions
from . import _archive, _probe


_extensions.add("find_source", _probe.find)
_extensions.add("is_archive", _probe.is_archive)
_extensions.add("save_file", _archive.save)
_extensions.add("check_file", _archive.check)
