import re
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support.helpers import BytesRead, files_of

import eqx_ckpt as ec


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, width, depth=4, *, key):
        *keys, last = jr.split(key, depth + 1)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 1, key=last)


def _error(path, like, **kwargs):
    before = files_of(path)
    with BytesRead() as read:
        with pytest.raises(RuntimeError) as info:
            ec.tree_deserialise_leaves(path, like, **kwargs)
    # Nothing but the index is read, and nothing is written.
    assert read.total == (path / "eqx_ckpt.json").stat().st_size
    assert files_of(path) == before
    with pytest.raises(RuntimeError) as spliced:
        ec.open(path).splice(like, **kwargs)
    assert str(spliced.value) == str(info.value)
    return str(info.value)


def test_a_member_of_an_ensemble(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones((5, 2)), "b": jnp.ones(5)})
    cure = "has a first axis of 5 more, as of an ensemble"
    assert cure in _error(tmp_path / "a", {"w": jnp.ones(2), "b": jnp.ones(())})
    assert cure not in _error(tmp_path / "a", {"w": jnp.ones(2), "b": jnp.ones(4)})


def test_the_bias_of_a_convolution_of_others(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"b": jnp.ones(8), "w": jnp.ones((8, 3))})
    text = _error(tmp_path / "a", {"b": jnp.ones((8, 1, 1)), "w": jnp.ones((3, 8))})
    assert re.findall("(.*)unit_axes", text) == [
        "    b  saved f32[8], `like` has f32[8,1,1]  (`ec.adapters."
    ]


def test_one_report_lists_everything(tmp_path):
    saved = {
        "same": jnp.ones(2),
        "shape": jnp.ones((2, 3)),
        "dtype": jnp.ones(2),
        "kind": jr.key(0),
        "gone": jnp.ones(4),
        "attention": eqx.nn.MultiheadAttention(8, 16, key=jr.key(0)),
    }
    like = {
        "same": jnp.ones(2),
        "shape": jnp.ones((3, 2)),
        "dtype": jnp.ones(2, jnp.int32),
        "kind": jr.PRNGKey(0),
        "new": 1.0,
        "attention": eqx.nn.MultiheadAttention(4, 16, key=jr.key(0)),
    }
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    text = _error(tmp_path / "a", like)
    for line in [
        "does not fit `like` (1 dtype, 1 kind, 1 missing, 1 shape, 1 unexpected, ",
        "    new  float",
        "    gone  f32[4]",
        "    shape  saved f32[2,3], `like` has f32[3,2]",
        "    dtype  saved f32[2], `like` has i32[2]",
        "    kind  saved key<fry>[], `like` has u32[2]",
        "    attention.num_heads  saved 8, `like` has 4",
    ]:
        assert line.replace("<fry>", f"<{jr.key_impl(jr.key(0))}>") in text, text
    assert "same" not in text.replace("same names", "")


def test_layers_are_folded_and_neighbours_named(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", Net(8, depth=3, key=jr.key(0)))
    like = eqx.filter_eval_shape(Net, 6, depth=5, key=jr.key(0))
    text = _error(tmp_path / "a", like, static="ignore")
    assert "    layers.{3..4}.weight  f32[6,6]\n" in text
    assert "    layers.{0..2}.weight  saved f32[8,8], `like` has f32[6,6]" in text
    assert "static" not in text
    ec.tree_serialise_leaves(tmp_path / "b", {"weight": jnp.ones(3)})
    text = _error(tmp_path / "b", {"weigth": jnp.ones(3)})
    assert "the nearest name there is `weight`" in text


def test_the_nearest_names_are_of_the_same_layers(tmp_path):
    saved = {"enc": Net(8, depth=3, key=jr.key(0))}, {"count": 1}
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    like = {"encoder": eqx.filter_eval_shape(Net, 8, depth=3, key=jr.key(0))}
    text = _error(tmp_path / "a", like)
    assert (
        "encoder.layers.{0..2}.weight  f32[8,8]  "
        "(the nearest name there is `0.enc.layers.{0..2}.weight`)"
    ) in text
    like = {"encoder": {"layers": [None, None, like["encoder"].layers[2]]}}
    text = _error(tmp_path / "a", like)
    assert "(the nearest name there is `0.enc.layers.2.weight`)" in text


def test_equinox_message_prefixes(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", (jnp.ones(3), {"x": jnp.ones(3)}))
    text = _error(tmp_path / "a", (jnp.ones(3), {"x": jnp.ones(3), "y": 1}))
    assert text.startswith(
        "Error at leaf with path (SequenceKey(idx=1), DictKey(key='y')): `1.y` is not "
    )
    text = _error(tmp_path / "a", (jnp.ones(3), {"x": jnp.ones(4)}))
    assert text.startswith(
        "Deserialised leaf at path (SequenceKey(idx=1), DictKey(key='x')) has changed "
    )


def test_the_prefix_that_fits_is_named(tmp_path):
    model = Net(8, key=jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "a", {"model": model, "step": 1})
    text = _error(tmp_path / "a", model)
    assert 'All of it is stored under `model`: pass `source="model"`.' in text


def test_reordered_fields_keep_their_weights(tmp_path):
    class Before(eqx.Module):
        a: jax.Array
        b: jax.Array

    class After(eqx.Module):
        b: jax.Array
        a: jax.Array

    ec.tree_serialise_leaves(tmp_path / "a", Before(a=jnp.zeros(2), b=jnp.ones(2)))
    like = After(a=jnp.ones(2), b=jnp.zeros(2))
    out = ec.tree_deserialise_leaves(tmp_path / "a", like)
    assert out.a.tolist() == [0, 0] and out.b.tolist() == [1, 1]


def test_a_shorter_like_is_not_a_prefix(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", [jnp.ones(2), jnp.zeros(2)])
    text = _error(tmp_path / "a", [jnp.ones(2)])
    assert "unexpected: in the checkpoint, not in `like`:\n    1  f32[2]" in text
    out = ec.tree_deserialise_leaves(
        tmp_path / "a", [jnp.zeros(2)], unexpected="ignore"
    )
    assert out[0].tolist() == [1, 1]


def test_missing_keep(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"a": jnp.ones(2)})
    like = {"a": jnp.zeros(2), "b": jnp.full(2, 7.0)}
    out = ec.tree_deserialise_leaves(tmp_path / "a", like, missing="keep")
    assert out["a"].tolist() == [1, 1] and out["b"] is like["b"]
    abstract = {"a": jnp.zeros(2), "b": jax.ShapeDtypeStruct((2,), jnp.float32)}
    text = _error(tmp_path / "a", abstract, missing="keep")
    assert "load_or_init" in text and "    b  f32[2]" in text


def test_what_the_filter_leaves_out_is_neither(tmp_path):
    tree = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "n": 3}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    like = {"w": jnp.zeros((2, 2)), "c": jnp.zeros(2), "n": 0}
    matrices = lambda x: eqx.is_array(x) and x.ndim == 2
    out = ec.tree_deserialise_leaves(tmp_path / "a", like, filter_spec=matrices)
    assert out["w"].tolist() == [[1, 1], [1, 1]]
    assert out["c"] is like["c"] and out["n"] == 0
    spec = {"w": True, "b": False, "c": False, "n": True}
    like = {"w": jnp.zeros((2, 2)), "b": None, "c": 1.0, "n": 0}
    spec["b"] = None
    with pytest.raises(RuntimeError, match="unexpected"):
        ec.tree_deserialise_leaves(tmp_path / "a", like, filter_spec=spec)


def test_where_bounds_what_is_checked(tmp_path):
    saved = {"a": {"x": jnp.ones(2), "y": jnp.ones(2)}, "b": jnp.ones(3)}
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    like = {"a": {"x": jnp.zeros(2)}, "b": jnp.zeros(9)}
    out = ec.tree_deserialise_leaves(tmp_path / "a", like, where=lambda t: t["a"]["x"])
    assert out["a"]["x"].tolist() == [1, 1] and out["b"] is like["b"]
    # The node as a whole has a leaf more.
    text = _error(tmp_path / "a", like, where=lambda t: t["a"])
    assert "    a.y  f32[2]" in text and "    b" not in text


def test_static_fields_only_inside_what_is_loaded(tmp_path):
    saved = {"a": eqx.nn.GroupNorm(4, 8), "b": eqx.nn.GroupNorm(4, 8)}
    like = {"a": eqx.nn.GroupNorm(4, 8), "b": eqx.nn.GroupNorm(2, 8)}
    ec.tree_serialise_leaves(tmp_path / "a", saved)
    text = _error(tmp_path / "a", like)
    assert "b.groups  saved 4, `like` has 2" in text
    ec.tree_deserialise_leaves(tmp_path / "a", like, where=lambda t: t["a"])
    ec.tree_deserialise_leaves(tmp_path / "a", like, static="ignore")
    ec.tree_deserialise_leaves(tmp_path / "a", like["a"], source="b")
    with pytest.raises(RuntimeError, match="    b.groups  saved 4, `like` has 2"):
        ec.tree_deserialise_leaves(tmp_path / "a", like["b"], source="b")


@pytest.mark.parametrize("keyword", ["missing", "unexpected", "static"])
def test_unknown_choices(tmp_path, keyword):
    ec.tree_serialise_leaves(tmp_path / "a", jnp.ones(2))
    with pytest.raises(ValueError, match=f"`{keyword}` must be"):
        ec.tree_deserialise_leaves(tmp_path / "a", jnp.ones(2), **{keyword: "no"})


def test_an_empty_selection_is_an_error(tmp_path, getkey):
    model = Net(8, key=getkey())
    ec.tree_serialise_leaves(tmp_path / "a", model)
    skeleton = eqx.filter_eval_shape(Net, 8, key=jr.key(0))
    empty = eqx.filter(skeleton, eqx.is_array)
    with pytest.raises(ValueError, match="selects no leaf of `like`"):
        ec.tree_deserialise_leaves(tmp_path / "a", empty)
    with pytest.raises(ValueError, match="selects no leaf"):
        ec.tree_deserialise_leaves(tmp_path / "a", model, filter_spec=False)
    with pytest.raises(ValueError, match="selects no leaf of the tree"):
        ec.tree_serialise_leaves(tmp_path / "b", model, filter_spec=False)
    assert not (tmp_path / "b").exists()


def test_a_leaf_that_cannot_be_loaded_into(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"f": 1.0})
    with pytest.raises(TypeError, match="Leaf `f`: `like` has a `object` there"):
        ec.tree_deserialise_leaves(tmp_path / "a", {"f": object()}, filter_spec=True)


def test_messages_escape_control_characters(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"x": jnp.ones(2)})
    text = _error(tmp_path / "a", {"x\x1b[31m": jnp.ones(2)})
    assert "\x1b" not in text


def test_damage_is_found_and_named(tmp_path):
    tree = {"small": jnp.ones(3), "large": np.arange(3_000_000, dtype=np.float32)}
    for layout, file in (("ocdbt", "0"), ("zarr", "large/c/0")):
        path = tmp_path / layout
        ec.tree_serialise_leaves(path, tree, layout=layout)
        (data,) = path.rglob(file)
        raw = bytearray(data.read_bytes())
        raw[5_000_000] ^= 1
        data.write_bytes(raw)
        ckpt = ec.open(path)
        with pytest.raises(RuntimeError, match="large: its bytes are not those that"):
            ec.tree_deserialise_leaves(path, tree)
        with pytest.raises(RuntimeError, match="large: its bytes are not those that"):
            ckpt["large"][1_200_000:1_300_000].read()
        assert ckpt["small"].read().tolist() == [1, 1, 1]
        loaded = ec.tree_deserialise_leaves(path, tree, verify=False)
        assert not np.array_equal(loaded["large"], tree["large"])
        data.write_bytes(raw[:4_000_000])
        with pytest.raises(RuntimeError, match="large: "):
            ckpt["large"].read()
        data.unlink()
        for verify in (True, False):
            with pytest.raises(RuntimeError, match="large: a chunk of it is missing"):
                ckpt["large"].read(verify=verify)
            with pytest.raises(RuntimeError, match="large: a chunk of it is missing"):
                ckpt["large"][:5].read(verify=verify)


def test_damaged_digests_are_found(tmp_path):
    for layout, file in (("ocdbt", "digests"), ("zarr", "eqx_ckpt.digests")):
        path = tmp_path / layout
        ec.tree_serialise_leaves(path, {"x": jnp.ones(3)}, layout=layout)
        (data,) = path.rglob(file)
        data.write_bytes(bytes(len(data.read_bytes())))
        with pytest.raises(RuntimeError, match="its file of digests is damaged"):
            ec.open(path)["x"].read()
        data.unlink()
        with pytest.raises(RuntimeError, match="its file of digests is missing"):
            ec.open(path)["x"].read()
        assert ec.open(path)["x"].read(verify=False).tolist() == [1, 1, 1]


@pytest.mark.parametrize("other", ["auto", jnp.tanh])
def test_what_is_no_array_in_like_is_not_kept_in_silence(tmp_path, other):
    """Where an array was saved."""
    saved = {"w": jnp.ones(2), "scale": jnp.full(2, 3.0)}
    like = {"w": jnp.zeros(2), "scale": other}
    ec.tree_serialise_leaves(tmp_path / "c", saved)
    name = type(other).__name__
    with pytest.raises(
        RuntimeError, match=rf"scale +f32\[2\]  \(`like` has a `{name}`"
    ):
        ec.tree_deserialise_leaves(tmp_path / "c", like)
    with pytest.raises(RuntimeError, match="unexpected"):
        ec.open(tmp_path / "c").splice(like)
    out = ec.tree_deserialise_leaves(tmp_path / "c", like, unexpected="ignore")
    assert out["scale"] is other and out["w"].sum() == 2
    spec = {"w": True, "scale": False}
    assert ec.tree_deserialise_leaves(tmp_path / "c", like, spec)["scale"] is other
    # What was not stored, and what was stored as text and is no data, is as ever.
    ec.tree_serialise_leaves(tmp_path / "c", like, where=lambda t: t["w"])
    assert ec.tree_deserialise_leaves(tmp_path / "c", like)["scale"] is other


def test_a_type_that_was_registered_when_it_was_saved(tmp_path):
    for to_leaf, kind in ((str, "str"), (float, "float")):
        with ec.register_leaf(Fraction, to_leaf, Fraction):
            ec.tree_serialise_leaves(tmp_path / "c", {"q": Fraction(1, 2), "w": 1})
        with pytest.raises(RuntimeError, match=f"q +{kind} .*`Fraction`.*registered"):
            ec.tree_deserialise_leaves(tmp_path / "c", {"q": Fraction(0), "w": 0})


def test_to_keep_everything_is_an_error(tmp_path):
    """It means that names begin elsewhere."""
    tree = {"w": jnp.ones(2), "b": jnp.ones(2)}
    ec.tree_serialise_leaves(tmp_path / "c", {"model": tree})
    for options in (
        {"where": lambda t: t["w"], "missing": "keep"},
        {"missing": "keep", "unexpected": "ignore"},
    ):
        with pytest.raises(RuntimeError, match='None of .* pass `source="model"`'):
            ec.tree_deserialise_leaves(tmp_path / "c", tree, **options)
    with pytest.raises(RuntimeError, match='None of .*`source="model"`'):
        ec.load_or_init(
            lambda: tree, tmp_path / "c", missing="init", where=lambda t: t["w"]
        )
