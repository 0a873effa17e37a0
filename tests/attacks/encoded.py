"""Encoded values that mean harm, and the functions that they are given to."""

from hypothesis import strategies as st

from eqx_ckpt._kernel._format import _record_json, _values
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


class Nothing:
    """A resolver that has nothing, and notes that it was asked."""

    def find_object(self, name):
        assert name.module and name.qualified

    def unknown(self, text):
        assert type(text) is str

    def default(self, parameter):
        assert type(parameter) is str


compared, show, parts = _values.compared, _values.show, _values.parts
is_alike, changes = _values.is_alike, _values.changes
is_plain, plain_of = _values.is_plain, _values.plain
parse, encode, check = _record_json.parse, _record_json.encode, _record_json.check


def decode(value):
    """Makes a value, or finds that it is never saved."""
    try:
        _decode.decode(value, Nothing())
    except _decode.Malformed:
        pass
