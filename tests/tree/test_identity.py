"""Two values are the same if their types and bits are, and nothing else."""

import array
import dataclasses
import functools as ft
import struct
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ckpt._kernel._tree import _identity


def _nan(bits):
    return struct.unpack("d", struct.pack("Q", bits))[0]


@dataclasses.dataclass
class Config:
    width: Any


class Plain:
    def __init__(self, x):
        self.x = x

    def method(self):
        return self.x


class Module(eqx.Module):
    w: jax.Array
    x: Any = eqx.field(static=True)


def _closure(x):
    return lambda: x


ATOMS = [
    *(1, 1.0, True, 1 + 0j, np.float32(1), np.float64(1), np.int64(1), np.True_),
    *(0.0, -0.0, 0, False, None, "1", b"1", complex(0.0, -0.0), complex(0.0, 0.0)),
    *(_nan(0x7FF8000000000000), _nan(0x7FF8000000000001), float("inf"), 2**70, ...),
    *(np.ones(1), np.ones(1, np.float32), np.ones((1, 1)), jnp.ones(1)),
    *(int, float, np.dtype("f4"), jnp.float32, range(1), slice(0, 1, None)),
]
AROUND = {
    "itself": lambda x: x,
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "dict": lambda x: {"a": x},
    "partial": lambda x: ft.partial(max, x),
    "dataclass": Config,
    "object": Plain,
    "module": lambda x: jax.tree.structure([Module(jnp.ones(1), x)]),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("name", AROUND)
def test_only_what_is_the_same(name):
    around = AROUND[name]
    keys = [_identity.key(around(x)) for x in ATOMS]
    again = [_identity.key(around(x)) for x in ATOMS]
    assert [hash(k) for k in keys] == [hash(k) for k in again]
    for i, a in enumerate(keys):
        assert [a == b for b in again] == [i == j for j in range(len(ATOMS))]
    assert len({_identity.key(f(1)) for f in AROUND.values()}) == len(AROUND)


def test_what_is_changed_in_place():
    values = [[1], {"a": 1}, {1}, np.ones(2), Config(1), Plain(1), bytearray(b"a")]
    values += [ft.partial(max, [1]), ({"a": [1]},), _closure([1]), Plain([1])]
    for x in values:
        before = _identity.key(x)
        assert _identity.key(x) == before
        inner = x
        while not isinstance(inner, (list, dict, set, np.ndarray, bytearray)):
            if isinstance(inner, ft.partial):
                inner = inner.args[0]
            elif isinstance(inner, tuple):
                inner = inner[0]["a"]
            elif callable(inner):
                inner = inner.__closure__[0].cell_contents
            else:
                key = next(iter(vars(inner)))
                if not isinstance(vars(inner)[key], list):
                    setattr(inner, key, 2)
                    break
                inner = vars(inner)[key]
        if isinstance(inner, (list, bytearray)):
            inner.append(2)
        elif isinstance(inner, dict):
            inner["b"] = 2
        elif isinstance(inner, set):
            inner.add(2)
        elif isinstance(inner, np.ndarray):
            inner[0] = 7
        assert _identity.key(x) != before


class Rows(list):
    pass


class Names(dict):
    pass


class Numbers(np.ndarray):
    pass


@pytest.mark.parametrize("value", [Rows([1]), Names(a=1), np.ones(2).view(Numbers)])
def test_attributes_of_containers_and_of_arrays(value):
    value.scale = 1
    before = _identity.key(value)
    value.scale = 1.0
    assert _identity.key(value) != before
    value.scale = 1
    assert _identity.key(value) == before


def test_content_that_is_seen_through_another_object():
    content = {"a": 1}
    numbers, objects = array.array("i", [1, 2]), np.asarray([1, None], object)
    values = [types.MappingProxyType(content), numbers, memoryview(numbers), objects]
    before = list(map(_identity.key, values))
    assert list(map(_identity.key, values)) == before
    assert _identity.key(array.array("I", [1, 2])) != before[1]
    content["a"] = numbers[0] = 2
    objects[0] = True
    after = map(_identity.key, values)
    assert not any(a == b for a, b in zip(before, after))


def test_a_method_is_that_of_an_object():
    """Whatever that counts: a loop that stores a method of its own exports once."""
    x = Plain(1)
    before = _identity.key(x.method)
    x.x = 2
    assert _identity.key(x.method) == before != _identity.key(Plain(1).method)


def test_what_leads_to_itself_and_what_is_too_large():
    a, b = [1], [1]
    a.append(a), b.append(b)
    assert _identity.key(a) == _identity.key(b)
    with pytest.raises(RecursionError):
        _identity.key(list(range(10**5)))
    assert _identity.is_same(list(range(10**5)), list(range(10**5)))
    deep = []
    for _ in range(10**4):
        deep = [deep]
    assert not _identity.is_same(deep, deep)
