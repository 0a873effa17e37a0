"""An interpreter of the pickles that PyTorch writes. It builds plain values, containers
and what a table of a few names makes of them, and has no way to do anything else.

https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._kernel._format._leaves import Unreadable


_MAX_INT = 255  # Bytes.
_MAX_NAME = 2**10
# Keys of dicts that are tuples of at most so many plain values are shown as they are.
_MAX_TUPLE, _MAX_SHOWN = 8, 200


class Key(NamedTuple):
    """A key of a dict that is neither a text nor an integer: how it is shown, and its
    place in that dict, as several keys may be shown alike."""

    text: str
    place: int


class Global(NamedTuple):
    """The meaning of a name in a pickle: a class, of storages or tensors, or a dtype
    (`kind`); or a function, which is called with the tuple of its arguments: these are
    anything that a pickle builds."""

    kind: str
    name: str | None
    call: Callable[[tuple], Any] | None = None


class Ended(ValueError):
    """The bytes end before their pickle does."""


def load(
    data: bytes,
    names: Mapping[str, Any],
    unknown: Callable[[str], Unreadable],
    persistent: Callable[[Any], Any],
    at: int = 0,
) -> tuple[Any, int]:
    """The value of a pickle that begins at a place of some bytes, and where it ends.
    Sets come as lists, and keys of dicts that are neither texts nor integers as `Key`.

    `names` has what `module name` of an object stands for; one of another name is what
    `unknown` says, which is never built: what would be put into it is dropped.
    `persistent` makes an object of the id of one that lies outside of the
    pickle.

    **Raises:** `Ended`; `ValueError` for a pickle that is malformed, or does anything
    else.
    """
    reader = _Stack(data, names, unknown, persistent, at)
    while True:
        code = reader.take(1)
        if code == b".":
            break
        do = _INSTRUCTIONS.get(code)
        if do is None:
            raise ValueError(
                f"its pickle has the instruction {code!r}, which builds no tensor, "
                "container or plain value"
            )
        do(reader)
    value = reader.pop()
    if reader.stack or reader.marks:
        raise ValueError("its pickle does not end where it says")
    return value, reader.at


class _Stack:
    """A pickle, how far it has been read, and what has been built: the items since the
    last mark, and before each mark."""

    def __init__(
        self,
        data: bytes,
        names: Mapping[str, Any],
        unknown: Callable[[str], Unreadable],
        persistent: Callable[[Any], Any],
        at: int,
    ):
        self.names, self.unknown, self.persistent = names, unknown, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._data, self.at = data, at

    def take(self, count: int) -> bytes:
        stop = self.at + count
        if stop > len(self._data):
            raise Ended("its pickle ends in the middle of something")
        out = self._data[self.at : stop]
        self.at = stop
        return out

    def number(self, format: str) -> Any:
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def line(self) -> str:
        stop = self._data.find(b"\n", self.at, self.at + _MAX_NAME)
        if stop < 0 and self.at + _MAX_NAME > len(self._data):
            raise Ended("its pickle ends in the middle of a name")
        if stop < 0:
            raise ValueError("its pickle has a name that is too long")
        return _text(self.take(stop + 1 - self.at)[:-1])

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


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeError:
        raise ValueError("its pickle has a text that is not UTF-8") from None


def _old_text(data: bytes) -> str | bytes:
    """A text of Python 2, which may be any bytes."""
    try:
        return data.decode()
    except UnicodeError:
        return data


def _push(make: Callable[[_Stack], Any]) -> Callable[[_Stack], None]:
    def push(reader: _Stack) -> None:
        value = make(reader)
        reader.stack.append(value)

    return push


def _integer(data: bytes) -> int | Unreadable:
    if len(data) > _MAX_INT:
        why = f"it is an integer of {len(data)} bytes, and at most {_MAX_INT} are read"
        return Unreadable("int", why)
    return int.from_bytes(data, "little", signed=True)


def _sized(format: str, of: Callable[[bytes], Any]) -> Callable[[_Stack], None]:
    return _push(lambda reader: of(reader.take(reader.number(format))))


def _mark(reader: _Stack) -> None:
    reader.marks.append(reader.stack)
    reader.stack = []


def _remember(number: Callable[[_Stack], int]) -> Callable[[_Stack], None]:
    def remember(reader: _Stack) -> Any:
        reader.memo[number(reader)] = value = reader.pop()
        return value

    return _push(remember)


def _recall(format: str) -> Callable[[_Stack], None]:
    def get(reader: _Stack) -> Any:
        number = reader.number(format)
        if number not in reader.memo:
            raise ValueError("its pickle recalls what it has not built")
        return reader.memo[number]

    return _push(get)


def _extend(reader: _Stack, items: list[Any]) -> None:
    target = reader.top(list, Unreadable)
    if type(target) is list:
        target.extend(items)


def _set(reader: _Stack, items: list[Any]) -> None:
    target = reader.top(dict, OrderedDict, Unreadable)
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


def _named(reader: _Stack, module: object, name: object) -> Any:
    if type(module) is not str or type(name) is not str:
        raise ValueError("its pickle has a name that is no text")
    text = f"{module} {name}"
    if text not in reader.names:
        return reader.unknown(f"{module}.{name}"[:100])
    return reader.names[text]


def _reduce(reader: _Stack) -> Any:
    function, args = reader.last(2)
    if type(function) is Unreadable:
        return function
    call = function.call if type(function) is Global else None
    if call is None or type(args) is not tuple:
        raise ValueError("its pickle calls something that is no function")
    return call(args)


def _new(count: int) -> Callable[[_Stack], None]:
    """A new object of a class, of so many arguments."""

    def last_class(reader: _Stack) -> Unreadable:
        cls = reader.last(1 + count)[0]
        if type(cls) is not Unreadable:
            raise ValueError("its pickle makes an object of something that is no class")
        return cls

    return _push(last_class)


def _build(reader: _Stack) -> None:
    state = reader.pop()
    made = reader.top(OrderedDict, Unreadable)
    # Attributes of an `OrderedDict` are dropped.
    if type(made) is OrderedDict and type(state) is not dict:
        raise ValueError("its pickle sets attributes that are no dict")


def _protocol(reader: _Stack) -> None:
    if reader.number("<B") > 5:
        raise ValueError("its pickle is of a newer protocol")


_INSTRUCTIONS: dict[bytes, Callable[[_Stack], Any]] = {
    b"\x80": _protocol,
    b"\x95": lambda reader: reader.number("<Q"),  # A frame is nothing by itself.
    b"(": _mark,
    b"N": _push(lambda _: None),
    b"\x88": _push(lambda _: True),
    b"\x89": _push(lambda _: False),
    b"K": _push(lambda reader: reader.number("<B")),
    b"M": _push(lambda reader: reader.number("<H")),
    b"J": _push(lambda reader: reader.number("<i")),
    b"\x8a": _sized("<B", _integer),
    b"\x8b": _sized("<I", _integer),
    b"G": _push(lambda reader: reader.number(">d")),
    b"X": _sized("<I", _text),
    b"\x8c": _sized("<B", _text),
    b"\x8d": _sized("<Q", _text),
    b"U": _sized("<B", _old_text),
    b"T": _sized("<I", _old_text),
    b"B": _sized("<I", bytes),
    b"C": _sized("<B", bytes),
    b"\x8e": _sized("<Q", bytes),
    b"\x96": _sized("<Q", bytes),
    b"}": _push(lambda _: {}),
    b"]": _push(lambda _: []),
    b"\x8f": _push(lambda _: []),
    b"\x91": _push(lambda reader: reader.since_mark()),
    b")": _push(lambda _: ()),
    b"\x85": _push(lambda reader: tuple(reader.last(1))),
    b"\x86": _push(lambda reader: tuple(reader.last(2))),
    b"\x87": _push(lambda reader: tuple(reader.last(3))),
    b"t": _push(lambda reader: tuple(reader.since_mark())),
    b"a": lambda reader: _extend(reader, reader.last(1)),
    b"e": lambda reader: _extend(reader, reader.since_mark()),
    b"\x90": lambda reader: _extend(reader, reader.since_mark()),
    b"s": lambda reader: _set(reader, reader.last(2)),
    b"u": lambda reader: _set(reader, reader.since_mark()),
    b"q": _remember(lambda reader: reader.number("<B")),
    b"r": _remember(lambda reader: reader.number("<I")),
    b"\x94": _remember(lambda reader: len(reader.memo)),
    b"h": _recall("<B"),
    b"j": _recall("<I"),
    b"0": lambda reader: reader.pop() if reader.stack else reader.since_mark(),
    b"1": lambda reader: reader.since_mark(),
    b"c": _push(lambda reader: _named(reader, reader.line(), reader.line())),
    b"\x93": _push(lambda reader: _named(reader, *reader.last(2))),
    b"R": _push(_reduce),
    b"\x81": _new(1),
    b"\x92": _new(2),
    b"b": _build,
    b"Q": _push(lambda reader: reader.persistent(reader.pop())),
}
