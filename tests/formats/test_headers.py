"""Headers of safetensors that nobody writes: read or refused as the library does."""

import io
import json

import safetensors
from hypothesis import given, strategies as st
from support.helpers import examples

import eqx_ckpt as ec


# As JSON has them, in quotes.
_texts = st.sampled_from(
    ["a", "b", "a.b", "", "\\ud800", "\\udc00x", "\\ud83d\\ude00", "é", "shape", "\\n"]
)
_values = st.sampled_from(
    ["1", "null", '"x"', "[1,[]]", '{"k":{}}', '"\\ud800"', "NaN", "1e999", "-1", "1.5"]
)


@st.composite
def headers(draw):
    """A header in JSON, and how many bytes of tensors come after it."""
    rows, end = [], 0
    for name in draw(st.lists(_texts, max_size=3, unique=True)):
        count = draw(st.integers(0, 3))
        fields = {
            "dtype": draw(st.sampled_from(['"U8"', '"I8"', '"BOOL"', '"U7"'])),
            "shape": f"[{count}]",
            "data_offsets": f"[{end},{end + count}]",
        }
        end += count
        if draw(st.booleans()):
            fields[draw(_texts)] = draw(_values)
        if draw(st.integers(0, 5)) == 0:
            fields.pop(draw(st.sampled_from(list(fields))))
        body = ",".join(f'"{key}":{value}' for key, value in fields.items())
        rows.append(f'"{name}":{{{body}}}')
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(_texts, _texts | _values), max_size=3))
        body = ",".join(
            f'"{key}":' + (value if value[:1] in tuple('1nN[{"-') else f'"{value}"')
            for key, value in pairs
        )
        rows.append(f'"__metadata__":{{{body}}}')
    return "{" + ",".join(draw(st.permutations(rows))) + "}", end


def _library(data):
    try:
        return {name: bytes(x["data"]) for name, x in safetensors.deserialize(data)}
    except safetensors.SafetensorError:
        return None


def _ours(data):
    try:
        ckpt = ec.open(io.BytesIO(data))
        return {name: lazy.read().tobytes() for name, lazy in ckpt.leaves.items()}
    except ValueError:
        return None


@examples(150)
@given(headers())
def test_generated_headers(made):
    header, count = made
    text = header.encode()
    data = len(text).to_bytes(8, "little") + text + bytes([1, 0, 1] * 3)[:count]
    theirs, ours = _library(data), _ours(data)
    assert (ours is None) == (theirs is None), header
    if theirs is not None and ours is not None:
        assert sorted(ours.values()) == sorted(theirs.values()), header
        given = json.loads(header).get("__metadata__")
        assert ec.open(io.BytesIO(data)).metadata == given, header
