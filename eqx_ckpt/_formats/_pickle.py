"""An interpreter of the pickles that PyTorch writes. It builds plain values, containers
and what a table of a few names makes of them, and has no way to do anything else.

`pickletools` of Python says which instructions there are, and runs none of them.
"""

import io
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .._kernel._format._leaves import Unreadable


_MAX_INT = 255  # Bytes.
# Keys of dicts that are tuples of at most so many plain values are shown as they are.
_MAX_TUPLE, _MAX_SHOWN = 8, 200


class Key(NamedTuple):
    """A key of a dict that is neither a text nor an integer: how it is shown, and its
    place in that dict, as several keys may be shown alike."""

    text: str
    place: int


class Global(NamedTuple):
    """The meaning of a known name in a pickle. `kind`: "tensor", "storage" or
    "quantised" (of a class), "dtype" or "function". `call` is the function: it is
    called with the tuple of its arguments, which are anything that a pickle builds."""

    kind: str
    name: str | None
    call: Callable[[tuple], Any] | None = None


class Ended(ValueError):
    """The bytes end before their pickle does."""


def load(
    data: bytes,
    find: Callable[[str, str], Any],
    persistent: Callable[[Any], Any],
    at: int = 0,
) -> tuple[Any, int]:
    """The value of a pickle that begins at a place of some bytes, and where it ends.
    Sets come as lists, and keys of dicts that are neither texts nor integers as `Key`.

    `find` gives what an object of a module and a name stands for. One that is
    `Unreadable` is never built: what would be put into it is dropped. `persistent`
    makes an object of the id of one that lies outside of the pickle.

    **Raises:** `Ended`; `ValueError` for a pickle that is malformed, or does anything
    else.
    """
    file = _Bytes(data)
    file.seek(at)
    built = _Built(find, persistent)
    for name, argument in _instructions(file):
        do = _DEEDS.get(name)
        if do is None:
            raise ValueError(
                f"its pickle has the instruction {name}, which builds no tensor, "
                "container or plain value"
            )
        do(built, argument)
    value = built.pop()
    if built.stack or built.marks:
        raise ValueError("its pickle does not end where it says")
    return value, file.tell()


class _Bytes(io.BytesIO):
    """The bytes of a pickle, for `pickletools`, which gives all errors one type."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if len(data) < (size or 0):
            raise Ended("its pickle ends in the middle of something")
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n"):
            raise Ended("its pickle ends in the middle of a name")
        # `pickletools` reads ASCII here, and decodes escapes. Known names have neither
        # other letters nor backslashes: a "?" for these makes no name a known one.
        ascii = line.decode("utf-8", "surrogatepass").encode("ascii", "replace")
        return ascii.replace(b"\\", b"?")


def _instructions(file: _Bytes) -> Iterator[tuple[str, Any]]:
    """The name of each instruction of a pickle, and its argument."""
    try:
        for instruction, argument, _ in pickletools.genops(file):
            yield instruction.name, argument
    except Ended:
        raise
    except ValueError as e:
        raise ValueError(f"its pickle has a part without a meaning: {e!s:.200}") from e


class _Built:
    """Objects that a pickle has built so far: the items since the last mark, and those
    before each mark."""

    def __init__(
        self, find: Callable[[str, str], Any], persistent: Callable[[Any], Any]
    ):
        self.find, self.persistent = find, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        if not self.stack:
            raise ValueError("its pickle takes what it has not built")
        return self.stack.pop()

    def last(self, count: int) -> list[Any]:
        """So many values that were built last, in their order."""
        return [self.pop() for _ in range(count)][::-1]

    def top(self, *kinds: type) -> Any:
        """The value that was built last, which has to be of one of some types."""
        if not self.stack or type(self.stack[-1]) not in kinds:
            raise ValueError("its pickle changes what cannot be changed")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("its pickle has a mark less than it uses")
        items, self.stack = self.stack, self.marks.pop()
        return items


def _old_text(text: str) -> str | bytes:
    """A text of Python 2, which may be any bytes: each is a letter of Latin-1 here."""
    data = text.encode("latin-1")
    try:
        return data.decode()
    except UnicodeError:
        return data


def _push(make: Callable[[_Built, Any], Any]) -> Callable[[_Built, Any], None]:
    def push(built: _Built, argument: object) -> None:
        value = make(built, argument)  # This may begin another stack.
        built.stack.append(value)

    return push


def _integer(value: int) -> int | Unreadable:
    nbytes = value.bit_length() // 8 + 1
    if nbytes > _MAX_INT:
        why = f"it is an integer of {nbytes} bytes, and at most {_MAX_INT} are read"
        return Unreadable("int", why)
    return value


def _mark(built: _Built, _: None) -> None:
    built.marks.append(built.stack)
    built.stack = []


def _remember(built: _Built, number: int | None) -> None:
    """Gives what was built last a number: the next one, or that of the instruction."""
    if not built.stack:
        raise ValueError("its pickle takes what it has not built")
    built.memo[len(built.memo) if number is None else number] = built.stack[-1]


def _recall(built: _Built, number: int) -> Any:
    if number not in built.memo:
        raise ValueError("its pickle recalls what it has not built")
    return built.memo[number]


def _extend(built: _Built, items: list[Any]) -> None:
    target = built.top(list, Unreadable)
    if type(target) is list:
        target.extend(items)


def _set(built: _Built, items: list[Any]) -> None:
    target = built.top(dict, OrderedDict, Unreadable)
    if len(items) % 2:
        raise ValueError("its pickle has a key without a value")
    if type(target) is Unreadable:
        return
    put(target, items[::2], items[1::2])


def put(target: dict, keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Sets items of a dict."""
    if set(map(type, keys)) <= {str, int}:
        target.update(zip(keys, values))
        return
    for key, value in zip(keys, values):
        # The hash of a tuple of tuples may take forever.
        is_plain = type(key) in (str, int)
        target[key if is_plain else Key(_shown(key), len(target))] = value


def _shown(key: object) -> str:
    parts = key if type(key) is tuple and len(key) <= _MAX_TUPLE else (key,)
    plain = (str, int, float, complex, bool, bytes, type(None))
    if all(type(x) in plain for x in parts):
        return repr(key)[:_MAX_SHOWN]
    if type(key) is Unreadable:
        return key.what
    return f"torch.{key.name}" if type(key) is Global else type(key).__name__


def _named(built: _Built, module: object, name: object) -> Any:
    if type(module) is not str or type(name) is not str:
        raise ValueError("its pickle has a name that is no text")
    return built.find(module, name)


def _reduce(built: _Built, _: None) -> Any:
    function, args = built.last(2)
    if type(function) is Unreadable:
        return function
    call = function.call if type(function) is Global else None
    if call is None or type(args) is not tuple:
        raise ValueError("its pickle calls something that is no function")
    return call(args)


def _new(count: int) -> Callable[[_Built, Any], None]:
    """An instruction that makes an object of a class, of so many operands. Each class
    that gets here is an `Unreadable`, which stands for its own objects."""

    def last_class(built: _Built, _: None) -> Unreadable:
        cls = built.last(1 + count)[0]
        if type(cls) is not Unreadable:
            raise ValueError("its pickle makes an object of something that is no class")
        return cls

    return _push(last_class)


def _build(built: _Built, _: None) -> None:
    state = built.pop()
    made = built.top(OrderedDict, Unreadable)
    # Attributes of an `OrderedDict` are dropped.
    if type(made) is OrderedDict and type(state) is not dict:
        raise ValueError("its pickle sets attributes that are no dict")


def _protocol(built: _Built, number: int) -> None:
    if number > 5:
        raise ValueError("its pickle is of a newer protocol")


_PLAIN = _push(lambda _, x: x)
_DEEDS: dict[str, Callable[[_Built, Any], Any]] = {
    "PROTO": _protocol,
    "FRAME": lambda built, _: None,  # A frame is nothing by itself.
    "STOP": lambda built, _: None,
    "MARK": _mark,
    "NONE": _PLAIN,
    "NEWTRUE": _push(lambda *_: True),
    "NEWFALSE": _push(lambda *_: False),
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT"), _PLAIN),
    **dict.fromkeys(("LONG1", "LONG4"), _push(lambda _, x: _integer(x))),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _PLAIN),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _PLAIN),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), _push(lambda _, x: _old_text(x))),
    "BYTEARRAY8": _push(lambda _, x: bytes(x)),
    "EMPTY_DICT": _push(lambda *_: {}),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), _push(lambda *_: [])),
    "FROZENSET": _push(lambda built, _: built.since_mark()),
    "EMPTY_TUPLE": _push(lambda *_: ()),
    "TUPLE1": _push(lambda built, _: tuple(built.last(1))),
    "TUPLE2": _push(lambda built, _: tuple(built.last(2))),
    "TUPLE3": _push(lambda built, _: tuple(built.last(3))),
    "TUPLE": _push(lambda built, _: tuple(built.since_mark())),
    "APPEND": lambda built, _: _extend(built, built.last(1)),
    "APPENDS": lambda built, _: _extend(built, built.since_mark()),
    "ADDITEMS": lambda built, _: _extend(built, built.since_mark()),
    "SETITEM": lambda built, _: _set(built, built.last(2)),
    "SETITEMS": lambda built, _: _set(built, built.since_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _push(_recall)),
    "POP": lambda built, _: built.pop() if built.stack else built.since_mark(),
    "POP_MARK": lambda built, _: built.since_mark(),
    "GLOBAL": _push(lambda built, x: _named(built, *x.split(" ", 1))),
    "STACK_GLOBAL": _push(lambda built, _: _named(built, *built.last(2))),
    "REDUCE": _push(_reduce),
    "NEWOBJ": _new(1),
    "NEWOBJ_EX": _new(2),
    "BUILD": _build,
    "BINPERSID": _push(lambda built, _: built.persistent(built.pop())),
}
