"""Encoded values from anyone: whatever JSON they are, they are compared and shown, and
what is made of them is what can be, or nothing."""

import json

import pytest
from hypothesis import given, strategies as st
from support.helpers import examples

from eqx_ckpt._format import _record, _values
from eqx_ckpt._rebuild import _decode


KINDS = (*_values._FORMS, "no kind")
TEXTS = ["", "nan", "-inf", "ff", "zz", "0x1p0", "float32", "int4", "object", "float0"]
TEXTS += ["datetime64", "V4", "dtype", "bool", "len", "a.b", "\x1b[2J", "\ud800", "=1"]
plain = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2**63, 10**400, 0.0, -0.0, 1e308]),
    st.sampled_from(TEXTS),
)
names = st.tuples(st.sampled_from(TEXTS), st.sampled_from(TEXTS)).map(list)


def _wider(x):
    pairs = st.lists(st.lists(x, min_size=2, max_size=2), max_size=3)
    # What contents of some kinds are made of, so that they get past the first look.
    content = st.one_of(
        st.lists(x, max_size=5),
        st.tuples(names, x).map(lambda own: [*own[0], own[1]]),
        st.tuples(names, pairs).map(lambda own: [*own[0], own[1]]),
        st.tuples(x, st.lists(x, max_size=2), pairs).map(list),
        pairs,
        x,
    )
    kinds = st.sampled_from(KINDS)
    return st.one_of(
        content,
        st.builds(lambda kind, own: {kind: own}, kinds, content),
        st.dictionaries(st.sampled_from([*KINDS, *TEXTS]), x, max_size=2),
    )


values = st.recursive(plain | names, _wider, max_leaves=12)


class _Nothing:
    """A resolver that has nothing, and notes that it was asked."""

    def find(self, name):
        assert name.module and name.qualified

    def unknown(self, text):
        assert type(text) is str

    def default(self, parameter):
        assert type(parameter) is str


@examples(1500)
@given(values, values)
def test_any_json_is_compared_shown_and_decoded(a, b):
    forms = one, two = _values.compared(a), _values.compared(b)
    for form in forms:
        assert _values.is_alike(form, form)
        assert json.loads(json.dumps(form)) == form
        assert len(_values.show(form)) <= 203
        _values.parts(form)
    is_same = _values.is_alike(one, two)
    assert is_same == _values.is_alike(two, one)
    changes = _values.changes(one, two)
    assert changes and (is_same or changes != [])
    for _, x, y in changes:
        _values.show(x), _values.show(y)
    if _values.is_plain(a):
        json.dumps(_values.plain(a))
    try:
        _decode.decode(a, _Nothing())
    except _decode.Malformed:
        pass


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
        form = _values.compared(deep)
        assert len(_values.show(form)) <= 203
        if depth < 200:
            assert _values.is_alike(form, form) and _values.changes(form, 1)
        try:
            _decode.decode(deep, _Nothing())
        except _decode.Malformed:
            pass


def test_long_names_of_parts_are_said_once():
    """A part with a long name has no parts whose names begin with it."""

    def nested(number):
        items = [[f"k{i}", number] for i in range(1000)]
        return {"dict": [["a" * 2000, {"dict": items}]]}

    changes = _values.changes(*(_values.compared(nested(i)) for i in (0, 1)))
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
        record = _record.parse(made, 1)
    except ValueError:
        return
    list(record.nodes([True] * len(record.rows)))
    list(record.nodes_with_fields()), list(record.field_names()), record.states()
    again = _record.parse(json.loads(json.dumps(_record.encode(record))), 1)
    assert (again.kinds, again.rows) == (record.kinds, record.rows)
