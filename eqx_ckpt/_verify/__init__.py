"""`verify`: every byte of a save, compared with what was saved.

A room around the kernel: a run that asks which of its steps are whole finds it by the
table of additions. It imports `_load` and what is below it. Begin with `_verify`.
"""

from .. import _extensions
from . import _verify


_extensions.add("verify", _verify.verify)
