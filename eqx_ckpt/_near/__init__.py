"""Near disks: steps of a run on the disks of its nodes, for `CheckpointManager(near=)`.

It adds itself to `_run`, which does not import it. Begin with `_near_steps`.
"""

from .. import _extensions


_extensions.add("near_steps", _extensions.later(__name__, "_near_steps", "near_steps"))
_extensions.add("superseded", _extensions.later(__name__, "_superseded", "paths"))
