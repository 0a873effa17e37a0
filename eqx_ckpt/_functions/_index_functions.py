"""Functions in an index: what it says of those that are stored beside the leaves.

The arguments and the result of a function are nests: dicts with string keys, lists and
tuples of arrays. A nest is in an index as JSON: None is null, an array is its dtype and
its shape, `["float32", ["b", 384]]`, with the expressions of symbolic dimensions as
text; and a container is an object with one entry, `{"dict": {...}}`, `{"list": [...]}`
or `{"tuple": [...]}`.
"""

import re
from collections.abc import Iterator
from typing import Any

from .._kernel._format import _template
from .._kernel._format._index import StoredFunction
from .._kernel._format._schema import DIGEST, fields, fits
from .._kernel._runtime import _arguments


# Of the bytes of a function, which is more than `jax.export` can write.
MAX_BYTES = 2**31
# Of the text of a dimension, of a name, and of nests in each other.
MAX_DIMENSION, MAX_NAME, MAX_DEPTH = 256, 256, 64
MAX_ARRAYS = 2**16
# JAX multiplies powers out: only one of one or two plain digits passes.
_large_power = re.compile(r"\^(?! ?[0-9]{1,2}(?![0-9_]))")
_KINDS = {"dict": dict, "list": list, "tuple": list}


def check_name(name: object) -> None:
    """**Raises:** `ValueError` or `TypeError` for what is no name of a function."""
    if not isinstance(name, str):
        raise TypeError(
            f"The name of a function must be a string, not {_arguments.shown(name)}."
        )
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(
            f"The name of a function must have 1 to {MAX_NAME} printable characters, "
            f"not {name[:60]!r}."
        )


_NUMBER = range(MAX_BYTES)
# The kind of each field, but that of "leaves", which depends on how many there are.
_FIELDS = {"file": _NUMBER, "digest": DIGEST, "nbytes": _NUMBER, "names": [str]}
_FIELDS |= {"args": dict, "result": Any, "platforms": [str], "order": _NUMBER}
_FIELDS |= {"baked": {...: str}, "versions": {...: str}}


def parse(rows: dict[str, dict], count: int) -> dict[str, StoredFunction]:
    """Parses the functions of an index that has so many leaves.

    **Raises:** `ValueError` for JSON that is never written.
    """
    out: dict[str, StoredFunction] = {}
    for name, row in rows.items():
        check_name(name)
        out[name] = _parsed(row, count)
    if len({f.file for f in out.values()}) < len(out):
        raise ValueError("the index has two functions in one file")
    return out


def _parsed(row: dict[str, Any], count: int) -> StoredFunction:
    kinds = _FIELDS | {"leaves": [range(count)]}
    got = dict(zip(kinds, fields(row, kinds, "function")))
    leaves, names = got["leaves"], got["names"]
    if len({*leaves}) < len(leaves):
        raise ValueError("the index has a function that takes one leaf twice")
    if len({*names}) != len(leaves) or len(names) != len(leaves):
        raise ValueError("the index has a function that lacks names of its leaves")
    if got["args"].keys() != {"tuple"}:
        raise ValueError("the index has a function without arguments")
    check_nest(got["args"])
    check_nest(got["result"])
    return StoredFunction(**got)


def check_nest(nest: object) -> None:
    """**Raises:** `ValueError` for what is no nest, or is larger than is read."""
    for number, array in enumerate(_arrays(nest, 0)):
        if number >= MAX_ARRAYS:
            raise ValueError(f"a nest of a function has more than {MAX_ARRAYS} arrays")
        _check_array(array)


def _arrays(nest: object, depth: int) -> Iterator[list[Any]]:
    if nest is None:
        return
    if depth > MAX_DEPTH:
        raise ValueError(f"a nest of a function is more than {MAX_DEPTH} deep")
    if type(nest) is list:
        yield nest
        return
    kind, inner = "", None
    if type(nest) is dict and len(nest) == 1:
        kind, inner = next(iter(nest.items()))
    if inner is None or type(inner) is not _KINDS.get(kind):
        raise ValueError("the index has a malformed nest of a function")
    for child in inner.values() if isinstance(inner, dict) else inner:
        yield from _arrays(child, depth + 1)


def _check_array(array: list[Any]) -> None:
    if not fits(array, (str, [Any])) or len(array[1]) > _template.MAX_RANK:
        raise ValueError("the index has a malformed array of a function")
    for n in array[1]:
        if type(n) is int:
            is_good = 0 <= n < _template.MAX_BYTES
        else:
            is_good = type(n) is str and 0 < len(n) <= MAX_DIMENSION
            is_good = is_good and not _large_power.search(str(n))
        if not is_good:
            raise ValueError("the index has a function of an array of no such shape")
