"""Encoded values from anyone: whatever JSON they are, they are compared and shown, and
what is made of them is what can be, or nothing."""

import json

import pytest
from attacks import encoded
from attacks.encoded import KINDS, values
from hypothesis import given, strategies as st
from support import inside
from support.helpers import examples

import eqx_ckpt as ec


@examples(1500)
@given(values, values)
def test_any_json_is_compared_shown_and_decoded(a, b):
    forms = one, two = encoded.compared(a), encoded.compared(b)
    for form in forms:
        assert encoded.is_alike(form, form)
        assert json.loads(json.dumps(form)) == form
        assert len(encoded.show(form)) <= 203
        encoded.parts(form)
    is_same = encoded.is_alike(one, two)
    assert is_same == encoded.is_alike(two, one)
    changes = encoded.changes(one, two)
    assert changes and (is_same or changes != [])
    for _, x, y in changes:
        encoded.show(x), encoded.show(y)
    if encoded.is_plain(a):
        json.dumps(encoded.plain_of(a))
    encoded.decode(a)


@pytest.mark.parametrize("kind", [*KINDS, ""])
def test_values_that_are_deep(kind):
    """As deep as an index may have them, and deeper."""
    for depth in (50, 120, 5000):
        deep = 1
        for _ in range(depth):
            deep = {kind: [deep]} if kind else [deep]
            if kind in ("object", "fields", "namedtuple"):
                deep[kind] = ["m", "n", [["x", *deep[kind]]]]
            elif kind == "dict":
                deep[kind] = [["x", *deep[kind]]]
        form = encoded.compared(deep)
        assert len(encoded.show(form)) <= 203
        if depth < 200:
            assert encoded.is_alike(form, form) and encoded.changes(form, 1)
        encoded.decode(deep)


def test_long_names_of_parts_are_said_once():
    """A part with a long name has no parts whose names begin with it."""

    def nested(number):
        items = [[f"k{i}", number] for i in range(1000)]
        return {"dict": [["a" * 2000, {"dict": items}]]}

    changes = encoded.changes(*(encoded.compared(nested(i)) for i in (0, 1)))
    assert [name for name, _, _ in changes] == ["a" * 2000]


@examples(300)
@given(values, st.data())
def test_any_json_as_a_tree(value, data):
    """It is refused, or is one that every look at a tree ends with."""
    made = {"kinds": [["leaf"], ["module", "m", "M", ["a"], ["b"]]], "values": [value]}
    made["rows"] = [[0], [1, 0, 0]]
    field = data.draw(st.sampled_from(["values", "kinds", "rows", None]))
    if field == "kinds":
        at = data.draw(st.integers(0, 7))
        kind = [*made["kinds"][1], [], None][: max(at, 1)]
        made["kinds"][1] = [*kind[:at], value, *kind[at + 1 :]]
    elif field == "rows":
        made["rows"][1][data.draw(st.integers(0, 2))] = value
    elif field is None:
        made[data.draw(st.sampled_from(list(made)))] = value
    try:
        record = encoded.parse(made, 1)
    except ValueError:
        return
    list(record.nodes([True] * len(record.rows)))
    list(record.nodes_with_values()), list(record.value_names()), record.states()
    again = encoded.parse(json.loads(json.dumps(encoded.encode(record))), 1)
    assert (again.kinds, again.rows) == (record.kinds, record.rows)


def test_a_save_refuses_the_trees_that_a_load_would(tmp_path, monkeypatch):
    """Both count what it takes to walk a tree, of which names are a part."""
    names = {letter * 200: {"b" * 99: 0, "c": (1.0, "d")} for letter in "xyz"}
    ec.tree_serialise_leaves(tmp_path / "a", [names, names])
    tree = json.loads((tmp_path / "a/eqx_ckpt.json").read_text())["tree"]
    count = len(ec.open(tmp_path / "a"))
    record = encoded.parse(tree, count)

    def least(call) -> int:
        """The least limit at which a call raises nothing."""
        low, high = -(2**24), 2**24
        while low < high:
            inside.limit(monkeypatch, tree_cost=(middle := (low + high) // 2))
            try:
                call()
                high = middle
            except ValueError:
                low = middle + 1
        return low

    found = least(lambda: encoded.check(record))
    assert found == least(lambda: encoded.parse(tree, count)) > -(2**24)
