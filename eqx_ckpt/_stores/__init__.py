"""Kinds of store that TensorStore has no driver for. Each module here is one kind, and
a line in the kernel's table of them.

Libraries are imported when a URL of their kind is first read or written.
"""

from .._storage import _root
from ._azure import AzureBackend
from ._hub import HubBackend


_root.KINDS.update(az=AzureBackend, abfss=AzureBackend, hf=HubBackend)
