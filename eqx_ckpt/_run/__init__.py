"""The directory of a training run: which steps are saved, restored and kept.

It imports `_save`, `_load` and what is below them. Begin with `_manager`.
"""

from .. import _extensions
from . import _run_path


_extensions.add("stands_for", _run_path.stands_for)
