"""What is suggested is right, or it is said to be unclear: for models that people have,
whose leaves have other names, numbers and wrappers on the other side."""

import re

import numpy as np
import pytest
from support import architectures, inside

import eqx_ckpt as ec


def _check(seeds):
    """How many models are found whole."""
    whole = 0
    for seed in seeds:
        label, saved, wanted, truth = architectures.case(seed)
        found = inside.alike(saved, wanted)
        wrong = {x: y for x, y in found.names.items() if truth.get(x) != y}
        assert not wrong, f"{label}: {wrong}"
        listed = [{x for both in found.unclear for x in both[i]} for i in range(2)]
        assert not listed[0] & found.names.keys()
        assert not listed[1] & {*found.names.values()}
        whole += found.names == truth
    return whole


def test_no_pair_is_wrong():
    # And some in which a leaf that lacks its own is beside another of its shape.
    assert _check([*range(200), 777285, 1002024, 2000320]) >= 80


@pytest.mark.long
def test_no_pair_is_wrong_of_many():
    assert _check(range(10_000)) >= 4_000


@pytest.mark.parametrize("seed", range(12))
def test_what_a_graft_says_to_paste(seed, tmp_path):
    """Pairs are right, and nothing that could be in one is in `fresh` or `drop`."""
    _, saved, wanted, truth = architectures.case(seed)
    zeros = lambda kinds: {x: np.zeros(s, "float32") for x, (_, s) in kinds.items()}
    ec.tree_serialise_leaves(
        tmp_path / "x", ec.nest({**zeros(saved), "z": np.ones(77)})
    )
    model = {"ours": ec.nest(zeros(wanted)), "new": np.zeros(77)}
    with pytest.raises(RuntimeError) as caught:
        ec.graft(model, tmp_path / "x", [(lambda m: m["new"], lambda c: c.z[:5])])
    text = str(caught.value)
    rest = {x: None for x in ("fresh", "drop")}
    keyword = r"^    (fresh|drop)=(.*),(?:  # .*)?$"
    for x, code in re.findall(keyword, text, re.MULTILINE):
        rest[x] = eval(code)
    _, _, code = text.partition("  Perhaps, to paste into `pairs`:\n")
    pairs = eval(f"[{re.split('^  [^ ]', code, flags=re.MULTILINE)[0]}\n]", {"ec": ec})
    ckpt = ec.open(tmp_path / "x")
    made, fresh, dropped = inside.matched(model, ckpt, pairs, **rest)
    assert made.items() <= {f"ours.{y}": x for x, y in truth.items()}.items()
    assert not fresh & {f"ours.{x}" for x in truth.values()}
    assert not dropped & truth.keys()
