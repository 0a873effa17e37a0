"""The index: an inverse, and a judge of what a file says."""

import dataclasses
import io
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st
from support import inside
from support.helpers import examples, files_of

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import (
    _files,
    _grid,
    _index,
    _json,
    _names,
    _placement,
    _record_json,
    _schema,
    _template,
)
from eqx_ckpt._kernel._format._index import BaseFacts, Index, SaveFacts
from eqx_ckpt._kernel._format._leaves import Leaves
from eqx_ckpt._kernel._format._placement import Placement
from eqx_ckpt._kernel._format._template import Template
from eqx_ckpt._kernel._limits import limits
from eqx_ckpt._kernel._save import _plan
from eqx_ckpt._kernel._save._options import SaveOptions
from eqx_ckpt._kernel._storage import _root
from eqx_ckpt._kernel._storage._local import LocalDirectory


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    ),
    lambda x: st.one_of(
        st.lists(x, max_size=3),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), x),
    ),
    max_leaves=8,
)


@st.composite
def templates(draw):
    kind = draw(st.sampled_from(_template.KINDS))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = stored = draw(st.sampled_from(sorted(_template.STORED)))
    impl = None
    if kind in _template.SCALAR_KINDS:
        shape, dtype = (), _template.SCALAR_KINDS[kind]
        stored = dtype
        if kind == "int" and draw(st.booleans()):
            shape, dtype, stored = (9,), "int", "uint8"
    elif kind == "generic":
        shape = ()
    elif kind == "key":
        shape, dtype, stored = (*shape, 2), "key", "uint32"
        impl = draw(st.sampled_from(["fry", "rbg", "threefry2x32"]))
    elif kind in ("str", "bytes"):
        shape, dtype, stored = shape[:1] or (3,), kind, "uint8"
    elif draw(st.integers(0, 5)) == 0:
        dtype, stored = draw(
            st.sampled_from(
                [("float0", "bool"), ("uint4", "uint8"), ("float8_e4m3", "uint8")]
            )
        )
    chunk = tuple(draw(st.integers(1, max(1, n))) for n in shape)
    weak = kind == "jax" and draw(st.booleans())
    keys = draw(st.text("aki", max_size=3))
    codec = draw(st.sampled_from([None, "blosc-lz4", "blosc-zstd"]))
    return keys, kind, dtype, shape, stored, chunk, weak, impl, codec


@st.composite
def columns(draw):
    """What an index is made of: the tests make it, as checking its types draws lots."""
    table = draw(st.lists(templates(), min_size=1, max_size=4, unique=True))
    count = draw(st.integers(0, 6))
    number = draw(
        st.lists(st.integers(0, len(table) - 1), min_size=count, max_size=count)
    )
    names = []
    for i, n in enumerate(number):
        parts = [str(i)] * len(table[n][0])
        names.append(".".join(parts) or (_names.ROOT + str(i) * (i > 0)))
    files = [str(i) for i in range(draw(st.integers(1, 3)))]
    aliases = {}
    for i in range(1, count):
        twins = [j for j in range(i) if number[j] == number[i] and j not in aliases]
        if twins and draw(st.booleans()):
            aliases[i] = twins[0]
    layout = draw(st.sampled_from(["ocdbt", "zarr"]))
    own = [Template(*table[n]) for i, n in enumerate(number) if i not in aliases]
    sizes = [t.full for t in own if t.codec for _ in range(t.chunk_count)]
    offset = 64 * draw(st.integers(0, 2**40))
    places = {"patterns": [], "pattern": [], "begins": [], "sizes": []}
    if layout == "ocdbt" and count:
        begins = [(7, 0, 0, 0, offset)]
        places |= {"patterns": [(0, 7)], "begins": begins, "sizes": sizes}
    values = draw(st.lists(json_values, max_size=2))
    kinds = [["leaf"], ["module", "m", "M", count, [f"f{i}" for i in range(2)]]]
    row = [1, *[len(values) - 1] * 2, *_record_json.packed([0] * count)]
    tree = {"kinds": kinds, "values": values, "rows": [[0], row]}
    return dict(
        save=f"{draw(st.integers(0, 2**64 - 1)):016x}",
        layout=layout,
        metadata=draw(json_values),
        names=names,
        templates=table,
        template_of=number,
        files=files,
        **places,
        aliases=aliases,
        recorded=draw(st.sampled_from([None, tree])) if values else None,
        digests="0" * 32 * (len(files) if layout == "ocdbt" else 1),
        others={"_METADATA": "1" * 32},
        writer={"eqx_ckpt": "0.1.0", "jax": "0.0"},
        saved=draw(st.sampled_from([None, (0, 1, {}), (2**36, 512, {"P('x')": 3})])),
        base=draw(st.sampled_from([None, ("s3://b/é", "0" * 16, "1" * 32)])),
    )


def make(columns):
    columns = dict(columns)
    columns["templates"] = [Template(*row) for row in columns["templates"]]
    columns["saved"] = columns["saved"] and SaveFacts(*columns["saved"])
    columns["base"] = columns["base"] and BaseFacts(*columns["base"])
    places = {name: columns.pop(name) for name in Placement._fields}
    names = [field.name for field in dataclasses.fields(Leaves)]
    leaves = Leaves(**{name: columns.pop(name) for name in names if name in columns})
    placement = _placement.parse(json.loads(json.dumps(places)), len(columns["files"]))
    return Index(leaves=leaves, placement=placement, **columns)


def fields(index):
    placement = _placement.encode(index.placement)
    return {**dataclasses.asdict(index), "placement": placement}


@given(columns())
def test_decode_is_the_inverse_of_encode(columns):
    index = make(columns)
    data = _index.encode(index)
    seal = _index.digest(data.rpartition(b',"others":')[0])
    assert fields(_index.decode(data)) == {**fields(index), "seal": seal}
    assert _index.encode(_index.decode(data)) == data


def test_a_false_value_that_is_not_the_default_is_written(saved, monkeypatch):
    index = _index.decode(saved)
    assert index.own == [] and b'"own"' not in _index.encode(index)
    monkeypatch.setitem(_index._DEFAULTS, "own", None)
    assert b'"own":[]' in _index.encode(index)


@given(columns())
def test_the_places_of_digests(columns):
    index = make(columns)
    first, first_of = 0, {}
    for place, number in enumerate(index.leaves.template_of):
        template = index.leaves.templates[number]
        if place in index.leaves.aliases:
            origin = index.leaves.aliases[place]
            assert index.extents.first_digests([place, origin])[0] == first_of[origin]
            continue
        assert index.extents.first_digests([place]) == [first]
        first_of[place] = first
        first += _grid.block_counts(template.shape, template.chunk, template.itemsize)
    assert {*index.extents.pages} == {0, first}


# ---- Bytes that are not what was written.


def save(path, tree=None, **kwargs):
    """A small checkpoint, and the bytes of its index."""
    if tree is None:
        x = jnp.arange(4.0)
        tree = {"w": x, "again": x, "b": np.ones(3), "s": 1, "big": 2**70}
    ec.tree_serialise_leaves(path, tree, durable=False, **kwargs)
    return (path / "eqx_ckpt.json").read_bytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of the index of a small checkpoint."""
    return save(tmp_path_factory.mktemp("index") / "a")


def forge(data, alter):
    """The bytes of an index that says something else, with the digest to match."""
    value = json.loads(data)
    del value["digest"]
    alter(value)
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    digest = xxhash.xxh3_128_hexdigest(body)
    return body + f',"digest":"{digest}"}}'.encode()


def test_a_forged_index_that_says_the_same_is_read(saved):
    assert forge(saved, lambda value: None) == saved


def test_every_damaged_byte_is_noticed(saved):
    for at in range(len(saved)):
        for flip in (0x01, 0x20, 0xFF):
            bad = bytearray(saved)
            bad[at] ^= flip
            with pytest.raises(ValueError):
                _index.decode(bytes(bad))


def test_every_truncation_is_noticed(saved):
    for length in range(len(saved)):
        with pytest.raises(ValueError):
            _index.decode(saved[:length])
    for more in (saved + b" ", saved + b"\0", b" " + saved, saved * 2):
        with pytest.raises(ValueError):
            _index.decode(more)


@examples(300)
@given(st.binary(max_size=100) | json_values.map(lambda x: json.dumps(x).encode()))
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError):
        _index.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format":"eqx_ckpt","version":' + b"9" * 5000 + b"}",
        b'{"format":"eqx_ckpt","version":NaN}',
        '{"format":"eqx_ckpt","version":0}'.encode("utf-16"),
        b"\xff\xfe\x00",
    ],
)
def test_json_that_breaks_parsers_is_refused(data):
    with pytest.raises(ValueError):
        _index.decode(data)


def test_open_says_what_is_wrong(tmp_path):
    data = save(tmp_path / "a")
    (tmp_path / "a" / "eqx_ckpt.json").write_bytes(data.replace(b'"s"', b'"t"'))
    with pytest.raises(ValueError, match=r"a` cannot be read: .*damaged: its digest"):
        ec.open(tmp_path / "a")
    (tmp_path / "a" / "eqx_ckpt.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match="is not one of eqx_ckpt"):
        ec.open(tmp_path / "a")


def test_there_is_no_version_before_the_first(tmp_path):
    data = save(tmp_path / "a")
    forged = forge(data, lambda value: value.update(version=0))
    with pytest.raises(ValueError, match="no format version"):
        _index.decode(forged)


def test_a_newer_format_says_what_to_install(tmp_path):
    data = save(tmp_path / "a")

    def newer(reader):
        def alter(value):
            value.update(version=max(_index.READERS) + 1, reader=reader, names="other")

        return forge(data, alter)

    (tmp_path / "a" / "eqx_ckpt.json").write_bytes(newer("0.7.0"))
    with pytest.raises(ValueError, match=r"pip install 'eqx_ckpt>=0.7.0'") as e:
        ec.open(tmp_path / "a")
    assert f"this release, {ec.__version__}, reads formats up to" in str(e.value)
    # Its digest may be of another kind, so it is not looked at.
    with pytest.raises(ValueError, match=r"eqx_ckpt>=0.7.0"):
        _index.decode(newer("0.7.0").replace(b"other", b"OTHER"))
    for reader in ("1'; rm -rf /", "1\x1b[31m", None, 7, "", "1" * 100, "1\n"):
        with pytest.raises(ValueError, match=r"pip install 'eqx_ckpt>=\?'"):
            _index.decode(newer(reader))
    for version in (-1, "0", None, 0.0, True, [0]):
        bad = forge(data, lambda value: value.update(version=version))
        with pytest.raises(ValueError, match="no format version"):
            _index.decode(bad)


def put(*path_and_value):
    """A function that puts a value at a path of the JSON."""
    *path, last, new = path_and_value

    def alter(value):
        for key in path:
            value = value[key]
        value[last] = new

    return alter


_fields = "names templates template files patterns pattern begins sizes aliases".split()


@pytest.mark.parametrize(
    "alter",
    [
        *(put(name, bad) for name in _fields for bad in (None, "", {}, 0, [None])),
        *(put(name, [[]]) for name in _fields),
        *(put(name, 7) for name in ("save", "layout", "digests", "writer")),
        put("writer", {"jax": 1}),
        *(put("saved", bad) for bad in (7, None, [], {}, {"time": 0, "processes": 1})),
        *(put("saved", "time", bad) for bad in (-1, 2**37, 0.5, True, "0")),
        *(put("saved", "processes", bad) for bad in (-1, 2**64, None)),
        *(put("saved", "shardings", bad) for bad in ([], {"x": "y"}, {"x": True})),
        *(put("base", bad) for bad in (7, None, ["p", "0" * 16], ["p", "x", "1" * 32])),
        # Lanes: (lane, leaf, chunk, file, offset).
        put("begins", [[0, 0, 0, 0]]),
        put("begins", [[0, 0, 0, 0, 0, 0]]),
        put("begins", [[0, 0, 0, 0, 0.5]]),
        put("begins", [[0, -1, 0, 0, 0]]),
        put("begins", [[0, 0, -1, 0, 0]]),
        put("begins", [[0, 0, 0, 9, 0]]),
        put("begins", [[0, 0, 0, -1, 0]]),
        put("begins", [[0, 0, 0, 0, -64]]),
        put("begins", [[0, 0, 0, 0, 0], [0, 1, 0, 0, 8]]),
        put("begins", [[0, 0, 0, 0, 2**63]]),
        put("begins", [[0, 0, 0, 0, 0], [0, 0]]),
        put("patterns", [[0, 2**31]]),
        put("patterns", [[-1, 0]]),
        put("patterns", [[0, True]]),
        put("patterns", [[0, 0], 0]),
        put("pattern", [0, 0, 0, 0, -1]),
        put("sizes", [[0, [1]]]),
        put("sizes", [-1]),
        put("sizes", [2**31]),
        put("layout", "other"),
        put("save", ""),
        put("save", "../0123456789abcd"),
        put("save", "0123456789ABCDEF"),
        put("save", "0123456789abcdef\n"),
        # The columns differ in length.
        lambda v: v["names"].append("x"),
        lambda v: v["template"].append(0),
        put("template", 0, 99),
        put("template", 0, -1),
        put("template", 0, True),
        put("template", 0, 0.0),
        put("names", 0, 1),
        # Files are where this format has them.
        put("files", ["../../../etc/passwd"]),
        put("files", ["/etc/passwd"]),
        put("files", ["1"]),
        put("files", ["0", "0"]),
        # Templates of another length, or of other types.
        lambda v: v["templates"][0].pop(),
        lambda v: v["templates"][0].append(None),
        put("templates", 0, 3, "44"),
        put("templates", 0, 5, {"4": 4}),
        # Aliases: of themselves, of later ones, of each other, of another shape.
        put("aliases", [[4, 4]]),
        put("aliases", [[0, 4]]),
        put("aliases", [[4, 0], [4, 0]]),
        put("aliases", [[1, 0]]),
        put("aliases", [[4, -1]]),
        put("aliases", [[99, 0]]),
        put("aliases", [[4]]),
        put("aliases", [["4", 0]]),
        put("aliases", [[4, 0.0]]),
    ],
)
def test_malformed_columns_are_refused(saved, alter):
    assert json.loads(saved)["names"] == ["again", "b", "big", "s", "w"]
    assert json.loads(saved)["aliases"] == [[4, 0]]
    with pytest.raises(ValueError):
        _index.decode(forge(saved, alter))


def test_an_alias_of_an_alias_is_refused(tmp_path):
    x = jnp.ones(3)
    data = save(tmp_path / "a", {"a": x, "b": x, "c": x})
    assert json.loads(data)["aliases"] == [[1, 0], [2, 0]]
    with pytest.raises(ValueError, match="alias"):
        _index.decode(forge(data, put("aliases", [[1, 0], [2, 1]])))


@pytest.mark.parametrize("name", ["format", "save", "version", *_fields, "layout"])
def test_a_column_that_is_not_there_is_noticed(saved, name):
    with pytest.raises(ValueError):
        _index.decode(forge(saved, lambda value: value.pop(name)))


good = {
    "keys": "k",
    "kind": "jax",
    "dtype": "float32",
    "shape": [4],
    "stored": "float32",
    "chunk": [4],
    "weak": False,
    "impl": None,
    "codec": None,
}


IMPOSSIBLE = [
    {"kind": "module"},
    {"kind": None},
    {"kind": ["jax"]},
    {"keys": 1},
    {"keys": ["k"]},
    {"weak": 1},
    {"weak": None},
    {"impl": "fry"},
    {"codec": "gzip"},
    {"codec": "zstd"},
    {"codec": ["blosc-lz4"]},
    {"impl": 1},
    {"dtype": "float16"},
    {"dtype": "int"},
    {"dtype": "float"},
    {"dtype": "object"},
    {"dtype": "O"},
    {"dtype": "V4"},
    {"dtype": "datetime64"},
    {"dtype": "finfo"},
    {"dtype": "__doc__"},
    {"dtype": ["float32"]},
    {"dtype": "float0"},
    {"dtype": "key"},
    {"stored": "float16"},
    {"stored": "uint8"},
    {"stored": "object"},
    {"stored": ["float32"]},
    {"stored": None},
    {"dtype": "float128", "stored": "float128"},
    # Bytes of a type that is stored as itself.
    {"dtype": "bool", "stored": "uint8"},
    {"dtype": "int8", "stored": "uint8"},
    # Scalars have one dtype and no shape.
    {"kind": "float"},
    {"kind": "float", "dtype": "float64", "stored": "float64"},
    {"kind": "float", "shape": [], "chunk": []},
    {"kind": "bool", "dtype": "int64", "stored": "int64", "shape": [], "chunk": []},
    {"kind": "generic"},
    {"kind": "int", "dtype": "int", "stored": "uint8", "shape": [], "chunk": []},
    {"kind": "jax", "dtype": "int", "stored": "uint8"},
    {"kind": "str", "dtype": "str", "stored": "uint8", "shape": [1, 1]},
    {"kind": "str", "dtype": "bytes", "stored": "uint8"},
    {"kind": "key", "dtype": "key", "stored": "uint32"},
    {"kind": "key", "dtype": "key", "stored": "float32", "impl": "fry"},
    {
        "kind": "key",
        "dtype": "key",
        "stored": "uint32",
        "impl": "fry",
        "shape": [],
        "chunk": [],
    },
    # Shapes that nothing has.
    {"shape": [-1]},
    {"shape": [4.0]},
    {"shape": [True]},
    {"shape": ["4"]},
    {"shape": [None]},
    {"shape": [2**59]},
    {"shape": [2**60]},
    {"shape": [2**200]},
    {"shape": [2**30, 2**30], "chunk": [1, 1]},
    {"shape": [1] * 33, "chunk": [1] * 33},
    {"shape": [4, 4]},
    {"chunk": [0]},
    {"chunk": [-1]},
    {"chunk": [2**59]},
    {"chunk": []},
    {"chunk": [4, 1]},
    {"chunk": [2.0]},
]


def _forged(path, changes):
    data = save(path, {"w": jnp.arange(4.0)})
    assert json.loads(data)["templates"] == [list(good.values())]
    row = list({**good, **changes}.values())
    (path / "eqx_ckpt.json").write_bytes(forge(data, put("templates", [row])))
    return ec.open(path)


@pytest.mark.parametrize("changes", IMPOSSIBLE)
def test_impossible_templates_are_refused_when_a_leaf_is_touched(tmp_path, changes):
    path = tmp_path / "a"
    ckpt = _forged(path, changes)
    for touch in (
        lambda: ckpt["w"],
        lambda: jax.tree.leaves(ckpt.tree),
        lambda: ckpt.nbytes,
        lambda: ec.tree_deserialise_leaves(path, {"w": jnp.zeros(4)}),
    ):
        with pytest.raises(ValueError):
            touch()


def test_impossible_templates_are_refused_when_a_checkpoint_is_printed(tmp_path):
    for number, changes in enumerate(IMPOSSIBLE):
        ckpt = _forged(tmp_path / str(number), changes)
        with pytest.raises(ValueError):
            repr(ckpt)


def test_leaves_beside_one_that_cannot_be(tmp_path):
    """Where they lie is known only if all sizes are."""
    path = tmp_path / "a"
    data = save(path, {"w": jnp.arange(4.0), "x": 1.0})
    (path / "eqx_ckpt.json").write_bytes(forge(data, put("templates", 1, 3, [-1])))
    assert ec.open(path)["w"].shape == (4,)
    with pytest.raises(ec.DamagedError, match="impossible shape"):
        ec.open(path)["w"].read()
    with pytest.raises(ValueError, match="impossible shape"):
        ec.open(path)["x"]


@pytest.mark.parametrize("keys", ["", "kk", "s", "x"])
def test_keys_that_a_name_does_not_have_are_refused(tmp_path, keys):
    path = tmp_path / "a"
    data = save(path, {"w": jnp.arange(4.0)})
    (path / "eqx_ckpt.json").write_bytes(forge(data, put("templates", 0, 0, keys)))
    for touch in (lambda ckpt: ckpt["w"], lambda ckpt: ckpt.tree.w, repr):
        with pytest.raises(ValueError):
            touch(ec.open(path))


@pytest.mark.parametrize(
    "name",
    ["../w", "w/x", "", ".", "a.b", "%root", "manifest", "%77", "w\n", "9" * 40000],
)
def test_names_that_are_never_written_are_refused(tmp_path, name):
    path = tmp_path / "a"
    data = save(path, {"w": jnp.arange(4.0)})
    (path / "eqx_ckpt.json").write_bytes(forge(data, put("names", [name])))
    with pytest.raises(ValueError):
        ec.open(path)[name]
    with pytest.raises(ValueError):
        jax.tree.leaves(ec.open(path).tree)


@pytest.mark.parametrize(
    "alter, what",
    [
        (put("begins", []), "without a place"),
        (put("begins", 0, 1, 1), "without a place"),
        (put("begins", 0, 0, 1), "malformed row"),
        (put("begins", 0, 2, 1), "malformed row"),
        (put("begins", 0, 1, 99), "malformed row"),
        (put("patterns", [[1, 0]]), "malformed pattern"),
        (put("patterns", [[1, 0], [0, 0]]), "malformed pattern"),
        (put("pattern", [0]), "malformed pattern"),
        (put("pattern", [0, 0, 0, 0, 1]), "malformed pattern"),
        (put("sizes", [1]), "lacks the sizes"),
    ],
)
def test_places_that_cannot_be_are_refused_when_a_leaf_is_read(tmp_path, alter, what):
    path = tmp_path / "a"
    data = save(path)
    assert json.loads(data)["begins"] == [[0, 0, 0, 0, 0]]
    (path / "eqx_ckpt.json").write_bytes(forge(data, alter))
    with pytest.raises(ec.DamagedError, match=what):
        ec.open(path)["b"].read()
    assert what.split()[-1] in str(ec.verify(path)[0])


def test_two_leaves_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a"
    data = save(path, {"v": 1.0, "w": 2.0})
    (path / "eqx_ckpt.json").write_bytes(forge(data, put("names", ["w", "w"])))
    for touch in (lambda ckpt: ckpt["w"], lambda ckpt: ckpt.tree.w):
        with pytest.raises(ValueError):
            touch(ec.open(path))


# ---- Metadata and static fields.


def test_metadata_comes_back_through_a_checkpoint(tmp_path):
    metadata = {"a": [1, -0.0, 1e-320, 2**500, None, True, "é\u2028\0"], "": {"x": []}}
    save(tmp_path / "a", metadata=metadata)
    assert repr(ec.open(tmp_path / "a").metadata) == repr(metadata)


def nested(depth):
    out = []
    for _ in range(depth):
        out = [out]
    return out


circular = {}
circular["a"] = [circular]


@pytest.mark.parametrize(
    "metadata, message",
    [
        ((1, 2), "`metadata` is of type `tuple`.*Use a list"),
        ({"a": [0, (1,)]}, r"`metadata\['a'\]\[1\]` is of type `tuple`"),
        ({1: 2}, "has the key 1, of type `int`.*Use strings as keys"),
        ({None: 2}, "has the key None"),
        ({"a": {True: 2}}, r"`metadata\['a'\]` has the key True"),
        (float("nan"), "is nan, which JSON has no number for"),
        ([math.inf], r"`metadata\[0\]` is inf"),
        (np.float64(1), "of type `float64`"),
        (np.ones(2), "of type `ndarray`.*Store arrays in the tree"),
        ({1, 2}, "of type `set`.*Use None, bool, int"),
        (b"x", "of type `bytes`"),
        ("\ud800", "is not Unicode text"),
        ({"\ud800": 1}, "is not Unicode text"),
        (object(), "of type `object`"),
        (2**2048, "an integer of more than 2048 bits"),
        (-(10**5000), "an integer of more than 2048 bits"),
        (nested(101), "nested more than 100 deep"),
        (nested(100_000), "nested more than 100 deep"),
        (circular, "or contains itself"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else type(x).__name__,
)
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=message):
        ec.tree_serialise_leaves(tmp_path / "a", {"w": 1.0}, metadata=metadata)
    assert not (tmp_path / "a").exists()


def test_metadata_as_deep_and_as_long_as_it_may_be(tmp_path):
    metadata = [nested(99), 2**2047, -(2**2047)]
    save(tmp_path / "a", metadata=metadata)
    assert ec.open(tmp_path / "a").metadata == metadata


def test_the_tree_of_an_index(tmp_path):
    class Net(eqx.Module):
        w: float
        name: str = eqx.field(static=True)
        other: object = eqx.field(static=True)

    nets = [Net(1.0, "a", (1, print, object()))] * 2
    tree = json.loads(save(tmp_path / "a", {"nets": nets, "none": None}))["tree"]
    assert tree["kinds"] == [
        ["leaf"],
        ["module", *_class(Net), ["w"], ["name", "other"]],
        ["list", "", "", 2],
        ["none"],
        ["dict", "", "", ["nets", "none"]],
    ]
    print_, unknown = {"name": ["builtins", "print"]}, ["builtins", "object"]
    assert tree["values"] == ["a", {"tuple": [1, print_, {"unknown": unknown}]}]
    assert tree["rows"] == [[0], [1, 0, 1, 0], [2, 1, -1], [3], [4, 2, 3]]


def _class(cls):
    return cls.__module__, cls.__qualname__


# ---- What would be too long.


_long = pytest.mark.long
_too_long = {
    "names": ({f"{i}" + "x" * 1700: np.zeros(3) for i in range(350)}, {}),
    "metadata": ({"w": 1}, {"metadata": "x" * 2**19}),
    "values": ({"w": 1}, {"metadata": [[]] * 20_000}),
    "chunks": (
        {"v": np.zeros(60_000), "w": np.zeros(60_000)},
        {"chunks": 8, "compression": "zstd"},
    ),
}


def _refused(directory, tree, options, monkeypatch):
    ec.tree_serialise_leaves(directory / "old", {"w": 1})
    before = files_of(directory)
    writes = []
    monkeypatch.setattr(LocalDirectory, "write", lambda *_: writes.append(1))
    for target in ("new", "old", "new.zip"):
        for save in (ec.tree_serialise_leaves, ec.async_tree_serialise_leaves):
            with pytest.raises(ValueError, match="^Nothing was saved: the index"):
                save(directory / target, tree, **options)
    file = io.BytesIO()
    with pytest.raises(ValueError, match="several checkpoints with `where`"):
        ec.tree_serialise_leaves(file, tree, **options)
    assert not writes and not file.getvalue() and files_of(directory) == before


@pytest.mark.parametrize("what", _too_long)
def test_an_index_that_would_be_too_long_is_refused_first(tmp_path, what, monkeypatch):
    monkeypatch.setattr(_json, "MAX_INDEX", 2**19)
    monkeypatch.setattr(_json, "_MAX_PARSED", 2**21 if what == "values" else 2**30)
    _refused(tmp_path, *_too_long[what], monkeypatch)


def test_ties_that_would_be_too_long_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(_json, "_MAX_PARSED", 2**21)
    with pytest.raises(
        ValueError, match=r"40000 leaves \(39999 tied to another\), 1 ch"
    ):
        ec.tree_serialise_leaves(tmp_path / "a", [np.zeros(3)] * 40_000)


@_long
def test_many_long_names(tmp_path, monkeypatch):
    names = {f"{i:06}" + "x" * 180: np.zeros(400) for i in range(190_000)}
    _refused(tmp_path, names, {}, monkeypatch)


def test_how_long_an_index_can_be(tmp_path, monkeypatch):
    """What is planned is never shorter than what is written, and hardly longer."""
    x = jnp.ones((64, 64))
    trees = {
        "small": {f"a{i}": np.full(3, i) for i in range(300)},
        "chunks": {"w": np.arange(8_000.0), "v": np.arange(300.0), "e": np.ones(0)},
        "shared": {"a": x, "b": x, "c": [x, 3, jnp.ones(5)]},
    }
    monkeypatch.setattr(limits, "min_file_bytes", 9_000)
    for layout in ("ocdbt", "zarr"):
        for compression in (None, "zstd"):
            for tree in trees.values():
                inside.forget()
                options = SaveOptions(
                    metadata={"a": [1]},
                    layout=layout,
                    chunks=4096,
                    compression=compression,
                )
                plan = _plan.plan(_root.resolve(tmp_path), tree, options)
                side = dict.fromkeys(_files.OTHERS, b"")
                planned = []
                for is_linked in (False, True):
                    most = _plan.WRITERS[layout].upper_bound(
                        plan.leaves, plan.spec, 1, is_linked
                    )
                    index = _plan.index_of(plan, "0" * 16, most, side)
                    planned.append(len(_index.encode(index)))
                ec.tree_serialise_leaves(
                    tmp_path / layout,
                    tree,
                    metadata={"a": [1]},
                    layout=layout,
                    chunks=4096,
                    compression=compression,
                    durable=False,
                )
                real = (tmp_path / layout / "eqx_ckpt.json").read_bytes()
                alone, linked = planned
                assert len(real) <= alone <= 1.3 * len(real) + 2_000
                assert alone <= linked <= 1.3 * len(real) + 20_000


def test_records_are_checked_by_their_kind():
    kind = _schema.COUNT, [_schema.ID]
    assert _schema.read(b'[7, ["0123456789abcdef"]]', "it", kind) == [
        7,
        ["0123456789abcdef"],
    ]
    bad = [b"[7]", b"[true, []]", b"[7.0, []]", b"[-1, []]", b"[7, [1]]", b'{"a": 7}']
    bad += [b"[" * 10**5, b"[1" + b"0" * 5000 + b", []]", b"[7, [NaN]]", b"\xff", b""]
    for data in bad:
        with pytest.raises(ec.DamagedError, match="^it is not") as e:
            _schema.read(data, "it", kind)
        assert len(str(e.value)) < 2000
