"""Writes, for rooms that still call functions."""

from collections.abc import Iterable
from typing import Any

from ._backend import Backend, Sink


def write_file(
    root: Sink, key: str, buffers: Iterable[Any], sync: bool = False
) -> None:
    """Writes a new file of `buffers`, which are drawn one by one."""
    root.write(key, buffers, sync)


def link_file(root: Backend, source: str, key: str, sync: bool) -> None:
    root.copy(source, key, sync)


def make_directories(root: Backend, keys: Iterable[str]) -> None:
    root.make_directories(keys)


def sync_directories(root: Backend, keys: Iterable[str]) -> None:
    root.sync_directories(keys)


def delete_tree(root: Backend, key: str) -> None:
    root.delete(key)
