"""Kinds of store on servers: buckets, the web, Azure and the Hub. Each is a class that
says how a request is made, and a line in the kernel's table of them.

Modules, and libraries, are imported when a URL of their kind is first read or written.
"""

import functools as ft
import importlib
from typing import Any

from .._kernel import _rooms


# By the schemes of URLs, the module and the class.
_KINDS = {
    "az": ("_azure", "AzureBackend"),
    "abfss": ("_azure", "AzureBackend"),
    "gs": ("_buckets", "BucketBackend"),
    "hf": ("_hub", "HubBackend"),
    "http": ("_http", "HttpBackend"),
    "https": ("_http", "HttpBackend"),
    "s3": ("_buckets", "BucketBackend"),
    # TensorStore says what it takes.
    "*": ("_buckets", "BucketBackend"),
}


def _resolve(module: str, name: str, path: object) -> Any:
    from . import _remote

    kind = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return _remote.resolve(kind, path)


_MAKERS = {scheme: ft.partial(_resolve, *kind) for scheme, kind in _KINDS.items()}


@_rooms.kinds_of_stores.provide
def _():
    return lambda: _MAKERS


@_rooms.context_of_stores.provide
def _():
    from ._remote import CONTEXT

    return lambda: CONTEXT


@_rooms.store_of.provide
def _():
    from ._remote import store_of

    return store_of
