"""Key paths to dotted names and back: pure, injective, and never trusted as a path."""

import collections
import functools as ft
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._errors import DamagedError
from . import _files


ROOT = "%root"

# Names in bytes: a node of the database holds 2048 of them.
MAX_NAME = 1 << 15
# Trees are walked by functions that call themselves, in Python and in JAX.
MAX_DEPTH = 256
# JAX holds the index of a sequence's key path in 32 bits, with a sign.
_INDICES = 2**31

_plain = re.compile(r"[A-Za-z0-9_-]+")
_special = re.compile(rb"[^A-Za-z0-9_-]")
_number = re.compile(r"0|-?[1-9][0-9]*")
_component = re.compile(r"%|(%=)?([A-Za-z0-9_-]|%[0-9A-F]{2})*")
# The numbers in a name. More digits are a text: no index has as many, and Python makes
# no number of thousands.
NUMBERS = re.compile("(?<![0-9])([0-9]{1,18})(?![0-9])")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _is_identifier(text: str) -> bool:
    return text.isascii() and text.isidentifier()


@ft.lru_cache(maxsize=4096)
def quote(text: str) -> str:
    """Percent-encodes every byte of `text` outside `[A-Za-z0-9_-]`; `""` is `%`."""
    if _is_identifier(text) or _plain.fullmatch(text):
        return text
    if text == "":
        return "%"
    data = text.encode("utf-8", "surrogatepass")
    return _special.sub(lambda match: b"%%%02X" % ord(match[0]), data).decode()


def unquote(component: str) -> str:
    """The inverse of `quote`, and of the escape of a reserved first component."""
    if "%" not in component:
        return component
    if component == "%":
        return ""
    data = re.sub(
        rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), component.encode()
    )
    return data.decode("utf-8", "surrogatepass")


class Component(NamedTuple):
    """One entry of a key path, as a name has it: the kind of the key, and its text.

    The kinds are `a`: attribute, `s`: index in a sequence, `f`: index in a node
    without keys, `k`: str key, `i`: int key, `o`: any other hashable.
    """

    kind: str
    text: str


class NodeKey(NamedTuple):
    """The key of a child of a node, and its kind: what a `Component` was made of."""

    kind: str
    key: str | int


class LeafName(NamedTuple):
    """The dotted name of a leaf, and the kinds of the keys that lead to it."""

    name: str
    kinds: str


def component(key: Any) -> Component:
    """The component of a name that stands for an entry of a key path."""
    cls, jtu = type(key), _jtu()
    if cls is jtu.GetAttrKey:
        return Component("a", quote(key.name))
    if cls is jtu.SequenceKey:
        return Component("s", str(key.idx))
    if cls is jtu.FlattenedIndexKey and type(key.key) is int:
        return Component("f", str(key.key))
    if cls is jtu.DictKey or cls is jtu.FlattenedIndexKey:
        return key_component(key.key)
    return _odd_component(key)


def key_component(key: object) -> Component:
    """The component that stands for a key of a dictionary."""
    if type(key) is str:
        return Component("k", quote(key))
    if type(key) is int:
        try:
            return Component("i", str(key))
        except ValueError:
            raise ValueError(
                "A key of a dictionary is an integer of thousands of digits, which "
                "Python neither writes nor reads. Use a string as the key."
            ) from None
    return _odd_component(key)


def _odd_component(key: object) -> Component:
    text = repr(key)
    if ADDRESS.search(text):
        raise ValueError(
            f"The key `{text}` has no name that outlives this process, as its `repr` "
            "is an address. Use a string or an integer as the key, or give its type a "
            "`__repr__`."
        )
    return Component("o", "%=" + ("" if text == "" else quote(text)))


def is_component(text: str) -> bool:
    """Whether a text can be a component of a name."""
    return text != "" and _component.fullmatch(text) is not None


def number_of(component: str) -> int | None:
    """The number that a component of a name is, with zeros before it or without."""
    return int(component) if NUMBERS.fullmatch(component) else None


def is_plain(name: str, depth: int) -> bool:
    """Whether the name of a leaf or a node below the top can be stored, and has nothing
    in it that is encoded."""
    good = len(name) <= MAX_NAME and depth <= MAX_DEPTH
    return good and re.fullmatch(r"[A-Za-z0-9_.-]+", name) is not None


def child(name: str, part: str) -> str:
    """The dotted name of the child `part` of the node called `name` ("": the top)."""
    if name:
        return f"{name}.{part}"
    return f"%{ord(part[0]):02X}{part[1:]}" if part in _files.RESERVED else part


def name_of_texts(path: Iterable[str]) -> str:
    """The dotted name of the leaf at a path of keys that are texts."""
    first, *rest = [*map(quote, path)] or [ROOT]
    return ".".join([child("", first), *rest])


def name_of(path: tuple, above: str = "") -> LeafName:
    """The name of the leaf at a key path below the node `above` ("": the top)."""
    name, kinds = above, ""
    for key in path:
        kind, text = component(key)
        name, kinds = child(name, text), kinds + kind
    name = name or ROOT
    check_size(name, len(kinds))
    return LeafName(name, kinds)


def check_size(name: str, depth: int) -> None:
    """**Raises:** `ValueError` for a name that is too long, or of what lies too
    deep, to be stored."""
    if len(name) > MAX_NAME:
        raise ValueError(
            f"The name `{name[:60]}...` has {len(name)} bytes, and at most {MAX_NAME} "
            "can be stored. Use shorter keys."
        )
    if depth > MAX_DEPTH:
        raise ValueError(
            f"The leaf `{name[:60]}...` is {depth} nodes deep in the tree, and at "
            f"most {MAX_DEPTH} can be stored."
        )


@ft.cache
def _jtu() -> Any:
    # Names that are read of an index need no JAX, which takes a second to import.
    import jax.tree_util as jtu

    return jtu


def twins_error(name: str, path: tuple, other: tuple) -> ValueError:
    """The error of two leaves that have one name."""
    return ValueError(
        f"Two leaves have the name `{name}`: those with the key paths {path} and "
        f"{other}. Rename one of the keys, or leave one of the leaves out with `where` "
        "or `filter_spec`."
    )


# Of the keys of a dict or the members of a set.
_MOST_ALIKE = 64


def check_hashes(keys: Sequence[Any]) -> None:
    """**Raises:** `DamagedError` for so many keys of one hash that a dict of them would
    take long: 0 and 2^61 - 1 have one. `TypeError` for what has none."""
    if len(keys) > _MOST_ALIKE:
        counts = collections.Counter(map(hash, keys))
        if max(counts.values()) > _MOST_ALIKE:
            raise DamagedError("the checkpoint has keys that are made to collide")


def shorten(text: str) -> str:
    """The `repr` of a text that may be of any length."""
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."


def keys_of(name: str, kinds: str) -> list[NodeKey]:
    """The inverse of `name_of`: a key for each entry of the key path.

    **Raises:** `ValueError` when `name` is not what `name_of` writes for such a path.
    """
    if name == ROOT and kinds == "":
        return []
    if len(name) > MAX_NAME:
        raise ValueError(f"the name {shorten(name)} has {len(name)} bytes")
    components = name.split(".", MAX_DEPTH)
    if len(components) != len(kinds):
        raise ValueError(f"the name does not have {len(kinds)} components")
    places = enumerate(zip(kinds, components))
    return [
        NodeKey(kind, key_of(kind, text, place == 0)) for place, (kind, text) in places
    ]


def key_of(kind: str, text: str, first: bool) -> str | int:
    """The key of one component of a name, which may be the first one.

    **Raises:** `ValueError` when it is not what `component` writes for such a key.
    """
    # Most keys need no more than a look.
    if (kind == "a" or kind == "k") and not first and _is_identifier(text):
        return text
    if kind and kind in "sfi":
        if not _number.fullmatch(text) or (kind != "i" and text[0] == "-"):
            raise ValueError(f"{shorten(text)} is not an index")
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{shorten(text)} has thousands of digits") from None
        if kind != "i" and number >= _INDICES:
            raise ValueError(f"{shorten(text)} is beyond the largest index")
        return number
    if kind not in tuple("ako") or not is_component(text):
        raise ValueError(f"{shorten(text)} is not a component of a name")
    try:
        key = unquote(text.removeprefix("%=")) if kind == "o" else unquote(text)
    except UnicodeError as e:
        raise ValueError(f"{shorten(text)} is not UTF-8") from e
    if kind == "o":
        canonical, key = "%=" + (quote(key) if key else ""), text
    else:
        canonical = child("", quote(key)) if first else quote(key)
    if canonical != text:
        raise ValueError(f"{shorten(text)} is not the name of a key")
    return key


def below(name: str, prefix: str) -> str:
    """The components of a name below a node ("" for the node), the same wherever the
    node is: without the escape that only the first component of a name has."""
    if prefix:
        return name[len(prefix) + 1 :]
    first, dot, rest = name.partition(".")
    if "%" in first and unquote(first) in _files.RESERVED:
        first = unquote(first)
    return "" if name == ROOT else first + dot + rest


def joined(*names: str) -> str:
    """Dotted names one below the other; any may be ""."""
    return ".".join(filter(None, names))


def parts(name: str) -> list[str]:
    """The components of a name."""
    return [] if name in ("", ROOT) else name.split(".")


def common_node(names: Iterable[str]) -> str:
    """The lowest node that all leaves of these names are in."""
    return ".".join(os.path.commonprefix([parts(name)[:-1] for name in names]))


def node_pairs(name: str, other: str) -> Iterator[tuple[str, str]]:
    """The nodes that two leaves are in, from below, as long as the names agree that
    they have there."""
    while name and other:
        above, above_other = (x.rpartition(".")[0] for x in (name, other))
        component = below(name, above)
        if not component or component != below(other, above_other):
            return
        name, other = above, above_other
        yield name, other


def within(nodes: Iterable[str]) -> Callable[[str], str | None]:
    """A function that finds which of many nodes a name is, or is below most closely."""
    nodes = frozenset(nodes)
    if nodes == {""}:
        return lambda name: ""

    def nearest(name: str) -> str | None:
        while name not in nodes:
            if name == "":
                return None
            name = name.rpartition(".")[0]
        return name

    return nearest


def is_under(name: str, prefix: str) -> bool:
    """Whether the leaf or node `name` is `prefix` or lies below it ("": the top)."""
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


def by_prefix(names: Sequence[str]) -> dict[str, list[int]]:
    """The leaves at or below each node, by its dotted name."""
    out: dict[str, list[int]] = {"": list(range(len(names)))}
    for number, name in enumerate(names):
        if name == ROOT:
            continue
        at = name.find(".")
        while at != -1:
            out.setdefault(name[:at], []).append(number)
            at = name.find(".", at + 1)
        out.setdefault(name, []).append(number)
    return out
