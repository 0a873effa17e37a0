"""`register_leaf`: values of types of one's own."""

import asyncio
import pickle
import threading
from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import inside
from support.helpers import run_program

import eqx_ckpt as ec


class Quantised:
    """A leaf to JAX: integers and what they are multiplied by."""

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __eq__(self, other):
        same = np.array_equal(self.numbers, other.numbers)
        return same and self.scale == other.scale


def quantised_to_leaf(x):
    return np.concatenate([np.asarray(x.numbers, np.int32), [x.scale]]).astype("i4")


def quantised_from_leaf(x):
    return Quantised(x[:-1], int(x[-1]))


@pytest.fixture
def quantised():
    with ec.register_leaf(Quantised, quantised_to_leaf, quantised_from_leaf):
        yield Quantised([1, 2, 3], 4)


class Net(eqx.Module):
    weight: jax.Array
    table: Quantised
    act: object


def test_there_and_back(tmp_path, quantised):
    net = Net(jnp.ones(3), quantised, jax.nn.relu)
    ec.tree_serialise_leaves(tmp_path / "c", net)
    like = lambda: Net(jnp.ones(3), Quantised([0] * 3, 0), jax.nn.relu)
    out = ec.tree_deserialise_leaves(tmp_path / "c", eqx.filter_eval_shape(like))
    assert out.table == quantised and out.act is jax.nn.relu
    assert jnp.array_equal(out.weight, net.weight)
    # Anywhere else it is what was stored.
    assert ec.open(tmp_path / "c")["table"].read().tolist() == [1, 2, 3, 4]
    assert ec.is_storable(quantised)


def test_lazily(tmp_path, quantised):
    ec.tree_serialise_leaves(tmp_path / "c", {"a": quantised})
    lazy = ec.open(tmp_path / "c").splice({"a": quantised})["a"]
    assert lazy.read() == quantised
    assert ec.materialise({"a": lazy}) == {"a": quantised}
    assert np.asarray(lazy).tolist() == [1, 2, 3, 4]
    assert lazy[1:3].read().tolist() == [2, 3]
    assert lazy.astype("int64").read().tolist() == [1, 2, 3, 4]
    assert pickle.loads(pickle.dumps(lazy)).read() == quantised


def test_async_manager_and_many(tmp_path, quantised):
    tree = {"step": Fraction(1, 3), "tables": [quantised] * 2000}
    with ec.register_leaf(Fraction, str, Fraction):
        ec.async_tree_serialise_leaves(tmp_path / "c", tree).result()
        assert ec.tree_deserialise_leaves(tmp_path / "c", tree) == tree
        with ec.CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, tree)
            manager.wait()
            assert manager.restore(tree) == (tree, 1)


def test_one_value_at_two_places_is_stored_twice(tmp_path, quantised):
    ec.tree_serialise_leaves(tmp_path / "c", {"a": quantised, "b": quantised})
    out = ec.tree_deserialise_leaves(tmp_path / "c", {"a": quantised, "b": quantised})
    assert out["a"] == out["b"] == quantised and out["a"] is not out["b"]


def test_many_values_are_never_taken_for_each_other(tmp_path):
    # What `to_leaf` makes is of no tree, and its id may come again.
    with ec.register_leaf(Fraction, lambda x: np.array([x.numerator]), lambda x: x):
        tree = [Fraction(i) for i in range(3000)]
        ec.tree_serialise_leaves(tmp_path / "c", tree)
    values = ec.materialise(ec.open(tmp_path / "c").tree)
    assert [int(x[0]) for x in values] == list(range(3000))


def test_what_does_not_fit(tmp_path, quantised):
    ec.tree_serialise_leaves(tmp_path / "c", {"a": quantised})
    with pytest.raises(RuntimeError, match=r"a  saved i32\[4\]\(numpy\), `like` has"):
        ec.tree_deserialise_leaves(tmp_path / "c", {"a": Quantised([1, 2], 3)})
    with pytest.raises(RuntimeError, match=r"missing.*\n +b "):
        ec.tree_deserialise_leaves(tmp_path / "c", {"a": quantised, "b": quantised})
    with pytest.raises(RuntimeError, match="unexpected"):
        ec.tree_deserialise_leaves(tmp_path / "c", {"a": quantised}, source="")
        ec.tree_deserialise_leaves(tmp_path / "c", {"b": quantised}, missing="keep")


def test_what_fails_in_the_functions(tmp_path):
    def fail(x):
        raise KeyError("who")

    with ec.register_leaf(Fraction, fail, Fraction):
        with pytest.raises(
            ValueError, match="leaf `r` .*`to_leaf` of `Fraction` .*who"
        ):
            ec.tree_serialise_leaves(tmp_path / "c", {"r": Fraction(1, 2)})
        assert not (tmp_path / "c").exists()
    with ec.register_leaf(Fraction, lambda x: [x], Fraction):
        with pytest.raises(ValueError, match="`r` .*of `Fraction` gave a `list`, and"):
            ec.tree_serialise_leaves(tmp_path / "c", {"r": Fraction(1, 2)})
    with ec.register_leaf(Fraction, str, fail):
        ec.tree_serialise_leaves(tmp_path / "c", {"r": Fraction(1, 2)})
        with pytest.raises(RuntimeError, match="r: `from_leaf` of `Fraction` .*who"):
            ec.tree_deserialise_leaves(tmp_path / "c", {"r": Fraction(0)})
    with ec.register_leaf(Fraction, fail, fail):
        with pytest.raises(ValueError, match="Leaf `r`: `to_leaf` of `Fraction`"):
            ec.tree_deserialise_leaves(tmp_path / "c", {"r": Fraction(0)})


def test_for_a_block_and_for_the_process(tmp_path):
    assert not ec.is_storable(Fraction(1))
    with inside.registered_types_forgotten():
        ec.register_leaf(Fraction, str, Fraction)
        assert ec.is_storable(Fraction(1))
        with ec.register_leaf(Fraction, float, Fraction):
            ec.tree_serialise_leaves(tmp_path / "c", Fraction(1, 2))
        assert ec.open(tmp_path / "c").tree.read() == 0.5
        ec.tree_serialise_leaves(tmp_path / "c", Fraction(1, 2))
        assert ec.open(tmp_path / "c").tree.read() == "1/2"
        with ec.register_leaf(Fraction, str, Fraction):
            pass
    with pytest.raises(ValueError, match="selects no leaf"):
        ec.tree_serialise_leaves(tmp_path / "c", Fraction(1, 2))
    with pytest.raises(TypeError, match="`Fraction` cannot be stored.*`register_leaf`"):
        ec.tree_serialise_leaves(tmp_path / "c", Fraction(1, 2), True)


def test_blocks_of_tasks_and_threads_that_overlap(tmp_path):
    """Each task saves by its own registration, and none takes away that of another."""

    async def save(number, hold):
        with ec.register_leaf(Fraction, lambda x: x.numerator * number, Fraction):
            await asyncio.sleep(hold)
            tree = {"a": np.ones(3), "ratio": Fraction(5)}
            ec.tree_serialise_leaves(tmp_path / str(number), tree)
            if number == 2:
                thread = threading.Thread(target=save_in_thread)
                thread.start()
                thread.join()

    def save_in_thread():
        # It has no registration of its own.
        ec.tree_serialise_leaves(tmp_path / "thread", {"ratio": Fraction(7)})

    async def both():
        await asyncio.gather(save(1, 0.02), save(2, 0.05))

    asyncio.run(both())
    assert ec.open(tmp_path / "1")["ratio"].read() == 5
    assert ec.open(tmp_path / "2")["ratio"].read() == 10
    assert ec.open(tmp_path / "thread")["ratio"].read() == 14
    assert not ec.is_storable(Fraction(1))


def test_subclasses_and_nodes(tmp_path):
    class Half(Fraction):
        pass

    with ec.register_leaf(Fraction, str, Fraction):
        ec.tree_serialise_leaves(tmp_path / "c", {"a": Half(1, 2)})
        like = {"a": Fraction(0)}
        assert ec.tree_deserialise_leaves(tmp_path / "c", like) == {"a": Fraction(1, 2)}
        # What was saved of a subclass does not come back as something else in silence.
        with pytest.raises(RuntimeError, match="`like` has a `Half` there: register"):
            ec.tree_deserialise_leaves(tmp_path / "c", {"a": Half(0)})
        with ec.register_leaf(Half, str, Half):
            out = ec.tree_deserialise_leaves(tmp_path / "c", {"a": Half(0)})
            assert type(out["a"]) is Half
    # A node of JAX is a leaf where `is_leaf` says so.
    is_leaf = lambda x: isinstance(x, eqx.nn.Linear)
    linear = eqx.nn.Linear(2, 3, use_bias=False, key=jr.key(0))
    like = eqx.filter_eval_shape(lambda: linear)
    back = lambda w: eqx.tree_at(lambda m: m.weight, like, w)
    with ec.register_leaf(eqx.nn.Linear, lambda m: m.weight, back):
        ec.tree_serialise_leaves(tmp_path / "d", [linear], is_leaf=is_leaf)
        assert list(ec.open(tmp_path / "d").leaves) == ["0"]
        out = ec.tree_deserialise_leaves(tmp_path / "d", [like], is_leaf=is_leaf)
        assert eqx.tree_equal(out, [linear])


def test_an_abstract_value_is_never_kept(tmp_path):
    is_leaf = lambda x: isinstance(x, eqx.nn.Linear)
    ec.tree_serialise_leaves(tmp_path / "c", {"a": 1})
    like = {"a": 1, "b": eqx.filter_eval_shape(eqx.nn.Linear, 2, 3, key=jr.key(0))}
    with ec.register_leaf(eqx.nn.Linear, lambda m: m.weight, lambda w: w):
        with pytest.raises(RuntimeError, match="missing and abstract"):
            ec.tree_deserialise_leaves(
                tmp_path / "c", like, is_leaf=is_leaf, missing="keep"
            )
    like["b"] = eqx.nn.Linear(2, 3, key=jr.key(0))
    with ec.register_leaf(eqx.nn.Linear, lambda m: m.weight, lambda w: w):
        out = ec.tree_deserialise_leaves(
            tmp_path / "c", like, is_leaf=is_leaf, missing="keep"
        )
    assert out["b"] is like["b"]


def test_what_cannot_be_registered():
    for cls in (float, np.ndarray, jax.Array, object):
        with pytest.raises(TypeError, match="cannot be registered"):
            ec.register_leaf(cls, str, str)


def test_arguments_of_wrong_types():
    """In a process that does not check types first."""
    lines = run_program("wrong_arguments").splitlines()
    assert lines == [
        "TypeError Fraction(1, 1) is not a type. Pass the type, and not a value of it.",
        "TypeError `to_leaf` is not a function, but None.",
        "TypeError A state dict is nested dicts, and not a `list`.",
        'TypeError `best` must be None or `(metric, "min")` or `(metric, "max")`, not '
        "'loss'.",
        'TypeError `best` must be None or `(metric, "min")` or `(metric, "max")`, not '
        "('loss',).",
        "TypeError `keep` must be None or an integer >= 1, not 2.5.",
        "TypeError `metadata` must be a dict, not [1].",
        "TypeError A step must be an integer, not 1.0.",
    ]


def test_graft(tmp_path, quantised):
    ec.tree_serialise_leaves(tmp_path / "c", {"a": jnp.ones(2), "q": quantised})
    model = {"b": {"a": jnp.zeros(2), "q": Quantised([0, 0, 0], 0)}}
    pair = (lambda m: m["b"], lambda c: c)
    # It is taken for what a Python scalar inside of a pair is: that of one of the two.
    with pytest.raises(RuntimeError, match="(?s) b.q .*scalars="):
        ec.graft(model, tmp_path / "c", [pair])
    out, _ = ec.graft(model, tmp_path / "c", [pair], scalars="load")
    assert out["b"]["q"] == quantised and out["b"]["a"].sum() == 2
    out, report = ec.graft(model, tmp_path / "c", [pair], scalars="keep")
    assert out["b"]["q"] == Quantised([0, 0, 0], 0) and out["b"]["a"].sum() == 2
    assert [x.name for x in report.differences] == ["b.q"]
    own = (lambda m: m["b"]["q"], lambda c: c.q)
    out, report = ec.graft(model, tmp_path / "c", [own, (lambda m: m["b"]["a"], "a")])
    assert out["b"]["q"] == quantised


def test_equinox_files_do_not_have_them(tmp_path, quantised):
    eqx.tree_serialise_leaves(tmp_path / "m.eqx", [jnp.ones(2), 3])
    out = ec.tree_deserialise_leaves(
        tmp_path / "m.eqx", [jnp.zeros(2), quantised, 0], lambda x: x is not quantised
    )
    assert out[0].sum() == 2 and out[1] is quantised and out[2] == 3
