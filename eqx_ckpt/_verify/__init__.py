"""`verify`: every byte of a save, compared with what was saved; and a save, compared
with the base that another one names.

A room around the kernel: a run that asks which of its steps are whole finds it by the
table of additions. It imports `_load` and what is below it. Begin with `_verify`.
"""

from .. import _extensions
from . import _base, _verify


_extensions.add("verify", _verify.verify)
_extensions.add("base_facts", _base.facts)
_extensions.add("check_base", _base.check)
