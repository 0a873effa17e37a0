"""Names: injective, readable, decodable, and never trusted as a path."""

import re

import jax
import jax.tree_util as jtu
import pytest
from hypothesis import example, given, strategies as st
from support.helpers import examples

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _files, _names


class Hashed:
    """A key that is none of Python's own, with a `repr` of its choice."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


# Surrogates too: a str of Python may hold any of them.
text = st.one_of(
    st.text(st.characters(), max_size=12),
    st.text("aZ09_-%=./\\ \0\n'{}~", max_size=6),
    st.sampled_from(sorted(_files.RESERVED)),
    st.sampled_from(["", "%", "%root", "%=", "%6Danifest", "..", "c", "zarr.json"]),
)
index = st.integers(0, 2**31 - 1)
other = st.one_of(
    *(
        [st.none()] if jax.__version_info__ >= (0, 7) else []
    ),  # No key of a path before.
    st.booleans(),
    st.floats(),
    st.binary(max_size=5),
    st.tuples(st.integers(), st.text(max_size=3)),
    st.builds(Hashed, text),
)
key = st.one_of(
    st.builds(jtu.GetAttrKey, text),
    st.builds(jtu.SequenceKey, index),
    st.builds(jtu.FlattenedIndexKey, index),
    st.builds(jtu.DictKey, text),
    st.builds(jtu.DictKey, st.integers()),
    st.builds(jtu.DictKey, other),
)
path = st.lists(key, max_size=4).map(tuple)


def meaning(path):
    """What `keys_of` should give for a key path."""
    out = []
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            out.append(("a", key.name))
        elif isinstance(key, jtu.SequenceKey):
            out.append(("s", key.idx))
        elif isinstance(key, jtu.FlattenedIndexKey):
            out.append(("f", key.key))
        elif type(key.key) is str:
            out.append(("k", key.key))
        elif type(key.key) is int:
            out.append(("i", key.key))
        else:
            out.append(("o", repr(key.key)))
    return out


def decoded(name, kinds):
    """`keys_of`, with the `repr` of the other hashables spelt out."""
    return [
        (kind, spelt(key) if kind == "o" else key)
        for kind, key in _names.keys_of(name, kinds)
    ]


def spelt(key):
    return "" if key == "%=" else _names.unquote(key.removeprefix("%="))


@given(path)
@example((jtu.GetAttrKey("manifest"),))
@example((jtu.DictKey("%6Danifest"),))
@example((jtu.DictKey("zarr"), jtu.DictKey("zarr")))
@example((jtu.DictKey(Hashed("")),))
def test_keys_of_is_the_inverse_of_name_of(path):
    name, kinds = _names.name_of(path)
    assert decoded(name, kinds) == meaning(path)


@given(path, path)
def test_two_key_paths_of_one_name_differ_in_their_kinds_alone(a, b):
    if meaning(a) != meaning(b):
        assert _names.name_of(a) != _names.name_of(b)


@given(st.lists(text, min_size=1, max_size=3), st.lists(text, min_size=1, max_size=3))
def test_string_keys_never_share_a_name(a, b):
    names = [_names.name_of(tuple(map(jtu.DictKey, keys))).name for keys in (a, b)]
    assert (names[0] == names[1]) == (a == b)


@given(path)
def test_no_component_is_a_path(path):
    name, kinds = _names.name_of(path)
    components = name.split(".")
    assert len(components) == max(1, len(path))
    for component in components:
        assert re.fullmatch(r"[A-Za-z0-9_%=-]+", component)
        assert component not in ("", ".", "..")
    assert components[0] not in _files.RESERVED
    assert (name == _names.ROOT) == (path == ())


@given(path, path)
def test_a_source_is_a_prefix(source, path):
    if source and path:
        top = _names.name_of(source).name
        name = _names.name_of(source + path).name
        assert _names.name_of(path, top).name == name
        assert _names.is_under(name, top) and _names.is_under(name, "")
        assert not _names.is_under(name + "x", name)


@given(path, st.sampled_from(["", "a", "a.0", "zarr"]))
def test_what_is_below_a_node_is_the_same_below_another(path, prefix):
    name = _names.name_of(path, prefix).name
    assert _names.below(name, prefix) == ".".join(
        _names.component(key)[1] for key in path
    )


def test_ordinary_names_are_as_in_torch_and_orbax():
    tree = {"opt": ({"mu": {"layers": [0, 0, 0, {"weight": 0}]}},)}
    names = ec.leaf_names(tree)
    assert names["opt"][0]["mu"]["layers"][3]["weight"] == "opt.0.mu.layers.3.weight"


def test_names_of_special_keys():
    tree = {"a.b": 0, "a/b": 0, "": 0, "%root": 0, "é": 0, "manifest": 0, "d": 0}
    assert ec.leaf_names(tree) == {
        "a.b": "a%2Eb",
        "a/b": "a%2Fb",
        "": "%",
        "%root": "%25root",
        "é": "%C3%A9",
        "manifest": "%6Danifest",
        "d": "d",
    }
    assert ec.leaf_names({-3: 0, 12: 0}) == {-3: "-3", 12: "12"}
    assert ec.leaf_names({(1, "a"): 0}) == {(1, "a"): "%=%281%2C%20%27a%27%29"}
    assert ec.leaf_names(1.0) == "%root"
    # A reserved name is one only as the first component.
    assert ec.leaf_names({"a": {"manifest": 0}}) == {"a": {"manifest": "a.manifest"}}


def test_every_file_at_the_root_of_a_checkpoint_has_a_reserved_name(tmp_path):
    for layout in ("ocdbt", "zarr"):
        tree = {"w": [1.0, 2.0], "s": "text"}
        path = tmp_path / layout
        ec.tree_serialise_leaves(path, tree, lambda x: True, layout=layout)
        for entry in path.iterdir():
            first = entry.name.partition(".")[0]
            # `d` is a directory that no leaf's directory can collide with: a leaf of
            # that name lies in the database below it.
            assert first in _files.RESERVED or first in ("w", "s", "d")


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_hostile_keys_round_trip(tmp_path, layout):
    keys = [*sorted(_files.RESERVED), "d", "c", "..", "/etc/passwd", "a/../..", "%root"]
    keys += ["zarr.json", "manifest.ocdbt", "eqx_ckpt.json", "\0", "\ud800", "x" * 300]
    tree = {key: float(i) for i, key in enumerate(keys)}
    ec.tree_serialise_leaves(tmp_path / "a" / "ckpt", tree, layout=layout)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["ckpt"]
    like = dict.fromkeys(keys, 0.0)
    assert ec.tree_deserialise_leaves(tmp_path / "a" / "ckpt", like) == tree
    assert ec.materialise(ec.open(tmp_path / "a" / "ckpt").tree) == tree


def test_a_key_whose_repr_is_an_address_is_refused(tmp_path):
    class Key:
        def __lt__(self, other):
            return True

    for key in (Key(), lambda: 0, (1, object())):
        with pytest.raises(ValueError, match="has no name that outlives this process"):
            _names.name_of((jtu.DictKey(key),))
    with pytest.raises(ValueError, match="Use a string or an integer as the key"):
        ec.tree_serialise_leaves(tmp_path / "a", {Key(): 1.0})
    assert not (tmp_path / "a").exists()


def test_an_integer_that_python_does_not_write_is_refused(tmp_path):
    for keys in ((10**5000,), (1, 10**5000)):
        with pytest.raises(ValueError, match="thousands of digits.*Use a string"):
            ec.tree_serialise_leaves(tmp_path / "a", dict.fromkeys(keys, 1.0))
    assert not (tmp_path / "a").exists()


def test_a_name_that_the_database_cannot_hold_is_refused(tmp_path):
    longest = "x" * _names.MAX_NAME
    ec.tree_serialise_leaves(tmp_path / "a", {longest: 1.0})
    ckpt = ec.open(tmp_path / "a")
    assert ckpt[longest].store.read().result() == 1.0
    with pytest.raises(ValueError, match="32769 bytes, and at most 32768"):
        ec.tree_serialise_leaves(tmp_path / "b", {longest + "x": 1.0})
    with pytest.raises(ValueError, match="bytes"):
        _names.keys_of(longest + "x", "k")


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("", ""),
        ("", "k"),
        ("a", ""),
        ("a", "aa"),
        ("a.b", "a"),
        ("a..b", "aaa"),
        (".a", "aa"),
        ("a.", "aa"),
        ("..", "aaa"),
        ("%root", "a"),
        ("%root", "k"),
        ("manifest", "a"),
        ("_METADATA", "k"),
        ("%61", "a"),
        ("a.%6Danifest", "aa"),
        ("%2f", "k"),
        ("%2", "k"),
        ("%G0", "k"),
        ("%FF", "k"),
        ("a/b", "k"),
        ("a\\b", "k"),
        ("a\n", "k"),
        ("a\0", "k"),
        ("é", "k"),
        ("%=a", "k"),
        ("=", "k"),
        ("a", "o"),
        ("%", "o"),
        ("%=%41", "o"),
        ("%=%FF", "o"),
        ("%=%", "o"),
        ("%=a b", "o"),
        ("01", "s"),
        ("-1", "s"),
        ("-0", "i"),
        ("+1", "i"),
        ("1_0", "i"),
        ("٣", "s"),
        ("", "s"),
        ("a", "i"),
        ("9" * 5000, "i"),
        (str(2**31), "s"),
        (str(2**31), "f"),
        ("a", "x"),
        ("a", "A"),
    ],
)
def test_keys_of_refuses_what_name_of_never_writes(name, kinds):
    with pytest.raises(ValueError):
        _names.keys_of(name, kinds)


@examples(300)
@given(
    st.one_of(st.text("a0.%=-_6DmM/F2E", max_size=8), st.text(max_size=8)),
    st.text("asfkiox", max_size=4),
)
def test_what_keys_of_accepts_is_what_name_of_writes(name, kinds):
    try:
        keys = _names.keys_of(name, kinds)
    except ValueError:
        return
    path = []
    for kind, k in keys:
        if kind == "o":
            k = Hashed(spelt(k))
        cls = {
            "a": jtu.GetAttrKey,
            "s": jtu.SequenceKey,
            "f": jtu.FlattenedIndexKey,
        }.get(kind, jtu.DictKey)
        path.append(cls(k))
    try:
        assert _names.name_of(tuple(path)) == (name, kinds)
    except ValueError as e:
        assert "address" in str(e)
