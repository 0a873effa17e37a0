"""What the library says to those who take it for another one, or guess."""

import inspect
import operator
import re
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from project import stubs
from support import command, inside

import eqx_ckpt as ec


MODULE, CLASSES = "eqx_ckpt", ("CheckpointManager", "Checkpoint", "LazyArray")
CALLS = [x for name in dir(ec) if inspect.isfunction(x := getattr(ec, name))]
CALLS += [ec.CheckpointManager, ec.CheckpointManager.save, ec.CheckpointManager.restore]


@pytest.fixture
def objects(tmp_path):
    """An object of each class whose names have hints."""
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    ckpt = ec.open(tmp_path / "x")
    with ec.CheckpointManager(tmp_path / "run") as manager:
        yield {MODULE: ec, **dict(zip(CLASSES, (manager, ckpt, ckpt["a"])))}


@pytest.mark.parametrize(
    ("owner", "name", "here"),
    [
        (MODULE, "save", "`tree_serialise_leaves`"),
        (MODULE, "load", "`tree_deserialise_leaves`"),
        (MODULE, "restore", "`CheckpointManager`"),
        (MODULE, "tree_serialize_leaves", "`tree_serialise_leaves`"),
        (MODULE, "safe_open", "`open`"),
        (MODULE, "AsyncCheckpointer", "`async_tree_serialise_leaves`"),
        ("CheckpointManager", "all_steps", "`steps()`"),
        ("Checkpoint", "get_tensor", "`ckpt[name].read()`"),
        ("LazyArray", "numpy", "`.read()`"),
    ],
)
def test_names_of_other_libraries(objects, owner, name, here):
    with pytest.raises(AttributeError, match=re.escape(f"here it is {here}")) as caught:
        getattr(objects[owner], name)
    # Python adds a hint of its own, of what is in `dir`.
    assert "_save" not in dir(ec) and {"open", "adapters", "Store"} <= {*dir(ec)}
    text = "".join(traceback.format_exception(caught.value))
    assert "Did you mean: '_" not in text
    assert not hasattr(objects[owner], "nothing_like_it_at_all")


@pytest.mark.parametrize("name", ["checkpoint", "contents", "exportt"])
def test_names_that_are_near(name):
    with pytest.raises(AttributeError, match=r"\. Is it `\w+`\?$") as caught:
        getattr(ec, name)
    text = "".join(traceback.format_exception(caught.value))
    assert "here it is" not in text and "Did you mean" not in text


LOAD, SAVE = ec.tree_deserialise_leaves, ec.tree_serialise_leaves


@pytest.mark.parametrize(
    ("call", "name", "here"),
    [
        (LOAD, "strict", '`unexpected="ignore"`'),
        (LOAD, "partial", '`unexpected="ignore"`'),
        (LOAD, "sharding", "that of each leaf of `like`, as `ec.skeleton("),
        (LOAD, "map_location", "the device of each leaf of `like`"),
        (LOAD, "dtype", "the dtype of each leaf of `like`, with `cast=True`"),
        (LOAD, "target", "`like`"),
        (ec.graft, "strict", "`fresh` for what the checkpoint lacks"),
        (ec.graft, "sharding", "that of each leaf of `model`"),
        (SAVE, "force", "`overwrite`"),
        (SAVE, "custom_metadata", "`metadata`"),
        (SAVE, "blocking", "another call, `ec.async_tree_serialise_leaves`"),
        (ec.export_safetensors, "max_shard_size", "`shard_bytes`"),
        (ec.CheckpointManager, "max_to_keep", "`keep`"),
        (ec.CheckpointManager, "overwrite", "`save(..., force=True)`"),
        (ec.CheckpointManager, "force", "`save(..., force=True)`"),
        (ec.CheckpointManager.save, "overwrite", "`force`"),
        (ec.CheckpointManager.restore, "items", "`like`"),
    ],
)
def test_arguments_of_other_libraries(call, name, here):
    with pytest.raises(TypeError, match=re.escape(f"`{name}`: here it is {here}")):
        call(**{name: True})


@pytest.mark.parametrize("owner", [MODULE, *CLASSES])
def test_hints_for_names_lead_to_what_there_is(objects, owner):
    holders = {"ec": ec, "ckpt": objects["Checkpoint"]}
    for here, theirs in inside.hints_for_names(owner).items():
        code = re.match(r"`\.?(\w+)\.?(\w*)", here)  # Or it is told in words.
        if code is not None and code[1] not in holders:
            assert hasattr(objects[owner], code[1]), here
        elif code is not None and code[2]:
            assert hasattr(holders[code[1]], code[2]), here
        for name in theirs.split():
            with pytest.raises(AttributeError, match="here it is"):
                getattr(objects[owner], name)


@pytest.mark.parametrize("row", inside.hints_for_arguments(), ids=lambda row: row[0])
def test_hints_for_arguments_are_given_by_some_call(row):
    here, theirs = row
    for name in theirs.split():
        calls = [x for x in CALLS if name not in inspect.signature(x).parameters]
        assert any(f": here it is {here}." in _refusal(x, name) for x in calls), name


def _refusal(call, name):
    try:
        call(**{name: True})
    except TypeError as e:
        return str(e)
    return ""


def test_strict_loads(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    like = {"a": jnp.ones(2), "b": jnp.ones(3)}
    with pytest.raises(TypeError, match='`unexpected="ignore"`, with `missing="keep"`'):
        theirs: dict[str, Any] = {"strict": False}
        ec.tree_deserialise_leaves(tmp_path / "x", like, **theirs)
    with pytest.raises(RuntimeError, match='missing: .*`missing="keep"` takes those'):
        ec.tree_deserialise_leaves(tmp_path / "x", like)
    found = ec.tree_deserialise_leaves(tmp_path / "x", like, missing="keep")
    assert found["b"].shape == (3,)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: np.ones(2) * x,
        lambda x: jnp.ones(2) @ x,
        lambda x: x**2,
        lambda x: -x,
        lambda x: abs(x),
        lambda x: x < 3,
        lambda x: x & 1,
        float,
    ],
)
def test_arithmetic_with_what_is_not_read(tmp_path, compute):
    ec.tree_serialise_leaves(tmp_path / "x", {"a": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"`a` has not been read.*\.read\(\).*ec\.lazy"):
        compute(ec.open(tmp_path / "x")["a"])


def test_advice_is_not_what_was_given(tmp_path):
    layers = [{"p": 0.1 * i, "w": jnp.ones(2)} for i in range(3)]
    ec.tree_serialise_leaves(tmp_path / "x", {"b": layers})
    stacked = {"b": {"p": 0.0, "w": jnp.zeros((3, 2))}}
    pair = (lambda m: m["b"], lambda c: c.b, ec.adapters.stack())
    with pytest.raises(RuntimeError, match="several that differ") as caught:
        ec.graft(stacked, tmp_path / "x", [pair], scalars="load")
    assert 'scalars="load"' not in str(caught.value)
    found, _ = ec.graft(stacked, tmp_path / "x", [pair], scalars="keep")
    assert found["b"]["w"].shape == (3, 2)


def test_entries_of_a_state_are_told_by_name(tmp_path, capsys):
    model, state = eqx.nn.make_with_state(
        lambda key: {"norm": eqx.nn.BatchNorm(3, "b", mode="ema", dtype=jnp.float32)}
    )(jr.key(0))
    ec.tree_serialise_leaves(tmp_path / "x", {"model": model, "state": state})
    assert command.main(["ls", tmp_path / "x"]) == 0
    shown = [capsys.readouterr().out, repr(ec.open(tmp_path / "x").tree)]
    for text in shown:
        assert "of model.norm." in text, text


def _completed(code, **names):
    """What IPython and Jupyter offer."""
    jedi = pytest.importorskip("jedi")
    return {x.name for x in jedi.Interpreter(code, [names]).complete()}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_completion_of_arguments(call, objects):
    owner, _, name = call.__qualname__.rpartition(".")
    holder = objects[owner or MODULE]
    found = _completed(f"holder.{name}(", holder=holder)
    parameters = inspect.signature(getattr(holder, name)).parameters.values()
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert {f"{x.name}=" for x in parameters if x.kind not in packed} <= found
    # None is hidden, but where a call hands on what it is given.
    hidden = [x.name for x in parameters if x.kind is inspect.Parameter.VAR_KEYWORD]
    assert not hidden or name in ("skeleton",)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_no_call_hands_its_options_to_itself(call):
    """Jedi, in an editor, follows `**options` to where they go, and would not end."""
    source = inspect.getsource(inspect.unwrap(call))
    assert not re.search(rf"(?<!def )\b{call.__name__}\([^()]*\*\*options", source)


def test_completion_of_a_tree(tmp_path):
    tree = {"model": {"layers": [{"weight": jnp.ones(2)}]}, "step": 1}
    ec.tree_serialise_leaves(tmp_path / "x", tree)
    ckpt = ec.open(tmp_path / "x")
    assert _completed("ckpt.tree.", ckpt=ckpt) >= {"model", "step"}
    assert "layers" in _completed("ckpt.tree.model.", ckpt=ckpt)
    assert "weight" in _completed("node.", node=ckpt.tree.model.layers[0])
    assert {"read", "shape"} <= _completed("leaf.", leaf=ckpt["step"])


def _edited(code):
    """A file in an editor, which runs nothing of it."""
    return pytest.importorskip("jedi").Script(f"import eqx_ckpt as ec\n{code}")


@pytest.mark.parametrize("module", ["adapters", "merging"])
def test_an_editor_shows_what_is_for_users(module):
    found = {x.name for x in _edited(f"ec.{module}.").complete() if x.name[0] != "_"}
    assert found == {*dir(getattr(ec, module))} == {*getattr(ec, module).__all__}


@pytest.mark.parametrize(
    "call", ["tree_serialise_leaves", "graft", "CheckpointManager", "merging.ties"]
)
def test_an_editor_shows_each_argument(call):
    (shown,) = _edited(f"ec.{call}(").get_signatures()
    parameters = inspect.signature(operator.attrgetter(call)(ec)).parameters
    assert [x.name for x in shown.params] == [*parameters]
    assert shown.docstring(raw=True)


def test_the_stub_is_that_of_the_code():
    assert stubs.STUB.read_text() == stubs.made(), "python tests/project/stubs.py"


def test_completion_shows_what_is_for_users():
    assert {"stack", "take"} <= {*dir(ec.adapters)}
    assert {"average", "Method"} <= {*dir(ec.merging)}
    for module in (ec.adapters, ec.merging):
        assert not {"jax", "np", "Any", "math"} & {*dir(module)}
        found = {x for x in _completed("module.", module=module) if x[0] != "_"}
        assert found == {*dir(module)}
        for name in dir(module):
            assert getattr(module, name).__doc__, name


def test_training_and_inference(tmp_path):
    """`inference` is a leaf, and loaded as all are: the mode is set afterwards."""
    model = eqx.nn.Dropout(0.5)
    ec.tree_serialise_leaves(tmp_path / "x", model)
    like = eqx.nn.inference_mode(model)
    assert not ec.tree_deserialise_leaves(tmp_path / "x", like).inference
    loaded = eqx.nn.inference_mode(ec.tree_deserialise_leaves(tmp_path / "x", model))
    assert loaded.inference and jax.tree.structure(loaded) == jax.tree.structure(model)


def test_counting_counts_files_only():
    ec.tree_serialise_leaves("memory://counting", {"a": jnp.ones(1000)})
    with ec.counting() as count:
        ec.open("memory://counting")["a"].read()
    assert count() == 0 and "memory://" in (ec.counting.__doc__ or "")
