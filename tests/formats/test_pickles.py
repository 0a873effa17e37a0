"""Values of all kinds in files of PyTorch, beside a tensor: no value refuses a file."""

import collections
import datetime
import decimal
import enum
import pathlib
import pickle
import tempfile
from typing import Any

import numpy as np
import pytest
from attacks import pickles
from hypothesis import given, strategies as st
from support.clock import timed
from support.helpers import examples

import eqx_ckpt as ec


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Dict(dict):
    pass


Point = collections.namedtuple("Point", "x y")

_texts = st.text(st.sampled_from("ab.0'%/ é\ud800"), max_size=4)
_integers = st.integers() | st.integers(-(2**2038), 2**2038)
_floats = st.floats(allow_nan=False)
_numbers = _integers | st.booleans() | _floats | st.complex_numbers(allow_nan=False)
_plain = _numbers | _texts | st.binary(max_size=3)
_keys = st.recursive(
    _texts | st.integers(-1, 3) | _plain | st.none() | st.sampled_from(Colour),
    lambda x: st.tuples(x, x),
    max_leaves=4,
)
# What is never built, each a leaf that says so.
_odd = st.sampled_from(
    [
        *(len, Dict, Colour.RED, Dict(a=1), Point(1, 2), 2**2100, range(3)),
        *(np.arange(3), np.float32(1), np.random.default_rng(0), decimal.Decimal(1)),
        *(datetime.date(2026, 1, 1), pathlib.PurePosixPath("a")),
    ]
)


def _in_itself(items):
    made = list(items)
    made.append({"again": (made,)})
    return made


def _counter(keys):
    return collections.Counter({key: i for i, key in enumerate(keys)})


def _default(items):
    return collections.defaultdict(list, items)


def _containers(inner):
    items = st.lists(st.tuples(_keys, inner), max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=5).map(tuple),
        *(items.map(make) for make in (dict, collections.OrderedDict, _default)),
        st.lists(_keys, max_size=3).map(_counter),
        st.sets(_plain, max_size=3),
        st.frozensets(_plain, max_size=3),
        st.lists(inner, max_size=2).map(_in_itself),
        inner.map(lambda x: [x, x, {"a": {"b": x}, "a.b": x}]),
    )


_values = st.recursive(
    _plain | st.binary(max_size=3).map(bytearray) | st.none() | _odd,
    _containers,
    max_leaves=12,
)


def _ends(value, above=()):
    """What should become of each value: its `repr`, or "unreadable"."""
    if any(value is x for x in above):
        return ["unreadable"]
    if type(value) in (list, tuple, set, frozenset):
        items = list(value)
    elif type(value) in (dict, *(type(f([])) for f in (_counter, _default))):
        items = list(value.values())
    elif type(value) is collections.OrderedDict:
        items = list(value.values())
    elif value is None:
        return []
    elif type(value) is bytearray:
        return [repr(bytes(value))]
    elif type(value) in (int, float, bool, complex, str, bytes) and value != 2**2100:
        return [repr(value)]
    else:
        return ["unreadable"]
    return [end for item in items for end in _ends(item, (*above, value))]


def _read(lazy):
    try:
        value = lazy.read()
    except ValueError as e:
        assert "cannot be read: " in str(e)
        return "unreadable"
    return repr(value.item() if isinstance(value, np.generic) else value)


@examples(300)
@given(_values, st.integers(2, 5))
def test_no_value_refuses_a_file(value, protocol):
    made = pickle.dumps(value, protocol)[2:-1]
    with tempfile.TemporaryDirectory() as above:
        path = pathlib.Path(above) / "a.pt"
        pickles.write(path, pickles.state(w=pickles.tensor(), v=made, z=b"K\7"))
        ckpt = ec.open(path)
        tensor = ckpt["w"].read()
        assert tensor.tolist() == [0] * 4 and ckpt["z"].read() == 7
        rest = [lazy for name, lazy in ckpt.items() if name not in ("w", "z")]
        assert sorted(map(_read, rest)) == sorted(_ends(value))


@pytest.mark.parametrize(
    "value, names",
    [
        ({(1, "a"): 1, 0.5: 2, None: 3}, ["(1, 'a')", "0.5", "None"]),
        ({0: 1, "0": 2, "'0'": 3}, ["0", "'0''", "'0'"]),
        ({"a.b": 1, "a": {"b": 2}}, ["a.b", "a/b"]),
        ({"a.b": 1, "a": {"b": 2, "c": 3}, "c.d": 4}, ["a.b", "a/b", "a/c", "c/d"]),
        ({"x.y": 1, "x": {"y": {"z.z": 2}, "y.z.z": 3}}, None),
        ({Colour.RED: 1, Colour.BLUE: 2}, [f"{__name__}.Colour {i}" for i in (0, 1)]),
        (
            {"k" * 2000: 1, "k" * 2001: 2},
            ["k" * 60 + f"… {i}" for i in (0, 1)],
        ),
        ({"." * 300: 1}, ["." * 300]),
    ],
)
def test_names_of_keys(tmp_path, value, names):
    """`a/b` stands for two keys here."""
    made = pickle.dumps(value, 2)[2:-1]
    pickles.write(tmp_path / "a.pt", pickles.state(v=made))
    ckpt = ec.open(tmp_path / "a.pt")
    reads = [ckpt[name].read() for name in ckpt]
    count = 3 if names is None else len(names)
    assert sorted(reads) == list(range(1, count + 1))
    for number, name in enumerate(names or (), 1):
        node: Any = ckpt.tree["v"]
        for key in name.split("/"):
            node = node[int(key) if key.isdigit() and isinstance(node, list) else key]
        assert node.read() == number


@pytest.mark.parametrize(
    "keys",
    [
        [(i % 3, float(i)) for i in range(10**4)],
        ["k" * 1100 + str(i) for i in range(10**4)],
        [*range(10**4), *map(str, range(10**4))],
        [0, *("'" * i + "0" + "'" * i for i in range(600))],
    ],
)
def test_many_keys_that_are_shown_alike_take_no_time(tmp_path, keys):
    made = pickle.dumps(dict.fromkeys(keys, 1), 2)[2:-1]
    pickles.write(tmp_path / "a.pt", pickles.state(v=made))
    ckpt, seconds = timed(5, lambda: ec.open(tmp_path / "a.pt"))
    assert len(ckpt) == len(keys) and seconds < 5
