"""docs/finetuning.md is one program, and does what it says."""

import pathlib
import re

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec


page = (pathlib.Path(__file__).parents[2] / "docs" / "finetuning.md").read_text()
fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the page's code leaves behind."""
    names = {"__name__": "finetuning"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finetuning"))
        for language, text in fenced:
            if language == "python":
                exec(compile(text, "finetuning.md", "exec"), names)
        yield names


def test_the_encoder_under_a_new_head(names):
    out = names["classifier"]
    assert eqx.tree_equal(out.backbone, names["language"].encoder)
    fresh = names["Classifier"](key=names["jr"].key(1)).classify
    assert eqx.tree_equal(out.classify, fresh)
    # The one that was made without initialising what is loaded is the same.
    assert eqx.tree_equal(names["same"], out)
    assert eqx.tree_equal(names["model"].encoder, names["language"].encoder)
    assert not eqx.tree_equal(names["model"].head, names["language"].head)


def test_what_it_says_to_paste(names):
    (expected,) = (text for _, text in fenced if "Perhaps, to paste" in text)
    model = names["Classifier"](key=names["jr"].key(1))
    # Nothing has been said but something that is wrong.
    pair = (lambda m: m.classify, lambda c: c.model.encoder.dropout)
    with pytest.raises(RuntimeError) as caught:
        ec.graft(model, "base", [pair])
    assert str(caught.value).endswith("\n" + expected.rstrip("\n"))


def test_the_class_that_has_changed(names):
    newer, old = names["newer"], names["language"]
    assert eqx.tree_equal(newer.encoder, old.encoder)
    assert eqx.tree_equal(newer.output, old.head)
    assert newer.temperature == 1


def test_names_of_other_libraries(names):
    assert eqx.tree_equal(names["encoder"], names["language"].encoder)


def test_other_shapes(names):
    scanned, encoder = names["scanned"], names["language"].encoder
    assert np.array_equal(scanned.words[:100], encoder.embed.weight)
    assert not scanned.words[100:].any()
    stacked = jnp.stack([layer.weight for layer in encoder.layers[:2]])
    assert np.array_equal(scanned.layers.weight, stacked)


def test_every_adapter_is_in_the_table():
    table = page.split("| adapter |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)\(", table))
    assert named == {name for name in dir(ec.adapters) if name.islower()}


def test_lora(names):
    tuned, encoder = names["tuned"], names["language"].encoder
    for layer, old in zip(tuned.layers, encoder.layers):
        assert eqx.tree_equal(layer.base, old)
    assert set(ec.open("lora").leaves) == {
        f"layers.{i}.{x}" for i in range(3) for x in "ab"
    }
    assert eqx.tree_equal(ec.materialise(ec.open("merged").splice(encoder)), encoder)


def test_a_frozen_base(names):
    state, head = names["state"], ec.open("head")
    assert state["step"] == 2
    assert eqx.tree_equal(state["model"], names["classifier"])
    assert head.nbytes < 500 < ec.open("base").nbytes / 20
    assert not any("backbone" in name for name in head.leaves)
