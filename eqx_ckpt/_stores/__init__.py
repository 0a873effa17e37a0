"""Kinds of store on servers: buckets, the web, Azure and the Hub. Each is a class that
says how a request is made, and a line in the kernel's table of them.

Libraries are imported when a URL of their kind is first read or written.
"""

import functools as ft

from .. import _extensions
from .._storage import _context, _root
from . import _remote
from ._azure import AzureBackend
from ._buckets import BucketBackend
from ._http import HttpBackend
from ._hub import HubBackend


_KINDS = {
    "az": AzureBackend,
    "abfss": AzureBackend,
    "gs": BucketBackend,
    "hf": HubBackend,
    "http": HttpBackend,
    "https": HttpBackend,
    "s3": BucketBackend,
    # TensorStore says what it takes.
    "*": BucketBackend,
}
for _scheme, _kind in _KINDS.items():
    _root.KINDS[_scheme] = ft.partial(_remote.resolve, _kind)
_context.SPEC.update(_remote.CONTEXT)
_extensions.add("store_of", _remote.store_of)
