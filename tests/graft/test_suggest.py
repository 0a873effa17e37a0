"""Rename rules that are suggested: for models of other libraries, and random trees."""

import contextlib
import io
import itertools
import json
import re

import equinox as eqx
import hypothesis
import jax.random as jr
import numpy as np
import pytest
from hypothesis import strategies as st
from support import command, inside

import eqx_ckpt as ec


D, F, V, LAYERS = 8, 24, 31, 3


def _layers(form, shapes):
    return {
        form.format(i) + name: shape
        for i in range(LAYERS)
        for name, shape in shapes.items()
    }


def _linear(name, out, size):
    return {f"{name}.weight": (out, size), f"{name}.bias": (out,)}


def _norm(name):
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def _turned(names):
    return {x: s[::-1] if len(s) == 2 and "c_" in x else s for x, s in names.items()}


def _gpt2(is_conv=True):
    """As Hugging Face has it, where weights are the other way round."""
    attention = _linear("attn.c_attn", 3 * D, D) | _linear("attn.c_proj", D, D)
    mlp = _linear("mlp.c_fc", F, D) | _linear("mlp.c_proj", D, F)
    layer = _norm("ln_1") | _norm("ln_2") | attention | mlp
    top = {"wte.weight": (V, D), "wpe.weight": (9, D)} | _norm("ln_f")
    names = top | _layers("h.{}.", layer)
    names = _turned(names) if is_conv else names
    return {f"transformer.{x}": y for x, y in names.items()}


class _Attention(eqx.Module):
    qkv: eqx.nn.Linear
    proj: eqx.nn.Linear


class _MLP(eqx.Module):
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear


class _Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attn: _Attention
    norm2: eqx.nn.LayerNorm
    mlp: _MLP


class _GPT(eqx.Module):
    token_embedding: eqx.nn.Embedding
    position_embedding: eqx.nn.Embedding
    blocks: list[_Block]
    final_norm: eqx.nn.LayerNorm


def _gpt():
    linear = lambda a, b: eqx.nn.Linear(a, b, key=jr.key(0))
    norm = lambda: eqx.nn.LayerNorm(D)
    block = lambda: _Block(
        norm(),
        _Attention(linear(D, 3 * D), linear(D, D)),
        norm(),
        _MLP(linear(D, F), linear(F, D)),
    )
    embedding = lambda n: eqx.nn.Embedding(n, D, key=jr.key(0))
    return _GPT(embedding(V), embedding(9), [block() for _ in range(LAYERS)], norm())


_GPT_NAMES = {
    "transformer.wte": "token_embedding",
    "transformer.wpe": "position_embedding",
    "transformer.ln_f": "final_norm",
    "transformer.h.1.ln_1": "blocks.1.norm1",
    "transformer.h.1.ln_2": "blocks.1.norm2",
    "transformer.h.1.attn.c_attn": "blocks.1.attn.qkv",
    "transformer.h.1.attn.c_proj": "blocks.1.attn.proj",
    "transformer.h.1.mlp.c_fc": "blocks.1.mlp.fc1",
    "transformer.h.1.mlp.c_proj": "blocks.1.mlp.fc2",
}


def _bert():
    linears = [f"attention.self.{x}" for x in ("query", "key", "value")]
    linears.append("attention.output.dense")
    layer = {k: v for x in linears for k, v in _linear(x, D, D).items()}
    layer |= _norm("attention.output.LayerNorm") | _norm("output.LayerNorm")
    layer |= _linear("intermediate.dense", F, D) | _linear("output.dense", D, F)
    embeddings = {"word": V, "position": 9, "token_type": 2}
    top = {f"embeddings.{x}_embeddings.weight": (n, D) for x, n in embeddings.items()}
    top |= _norm("embeddings.LayerNorm") | _linear("pooler.dense", D, D)
    names = top | _layers("encoder.layer.{}.", layer)
    return {f"bert.{x}": y for x, y in names.items()}


_BERT_NAMES = {
    "bert.embeddings.word_embeddings": "embedder_block.token_embedder",
    "bert.embeddings.position_embeddings": "embedder_block.position_embedder",
    "bert.embeddings.token_type_embeddings": "embedder_block.segment_embedder",
    "bert.embeddings.LayerNorm": "embedder_block.layernorm",
    "bert.pooler.dense": "pooler",
} | {
    f"bert.encoder.layer.1.{x}": f"layers.1.{y}"
    for x, y in {
        "attention.self.query": "attention_block.attention.query_proj",
        "attention.self.key": "attention_block.attention.key_proj",
        "attention.self.value": "attention_block.attention.value_proj",
        "attention.output.dense": "attention_block.attention.output_proj",
        "attention.output.LayerNorm": "attention_block.layernorm",
        "intermediate.dense": "ff_block.mlp",
        "output.dense": "ff_block.output",
        "output.LayerNorm": "ff_block.layernorm",
    }.items()
}


def _llama():
    """As Hugging Face has it."""
    sizes = {"q": D, "k": 4, "v": 4, "o": D}
    layer = {f"self_attn.{x}_proj.weight": (n, D) for x, n in sizes.items()}
    layer |= {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D)}
    layer |= {"mlp.down_proj.weight": (D, F), "input_layernorm.weight": (D,)}
    layer |= {"post_attention_layernorm.weight": (D,)}
    top = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    return top | {"lm_head.weight": (V, D)} | _layers("model.layers.{}.", layer)


_LLAMA_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers.1.self_attn.q_proj": "layers.1.attention.wq",
    "model.layers.1.self_attn.k_proj": "layers.1.attention.wk",
    "model.layers.1.self_attn.v_proj": "layers.1.attention.wv",
    "model.layers.1.self_attn.o_proj": "layers.1.attention.wo",
    "model.layers.1.mlp.down_proj": "layers.1.feed_forward.w2",
}
# Names do not tell these, and the norm after attention is that before the MLP.
_LLAMA_UNCLEAR = {
    "lm_head": "output",
    "model.layers.1.mlp.gate_proj": "layers.1.feed_forward.w1",
    "model.layers.1.mlp.up_proj": "layers.1.feed_forward.w3",
    "model.layers.1.input_layernorm": "layers.1.attention_norm",
    "model.layers.1.post_attention_layernorm": "layers.1.ffn_norm",
}


def _moved(shapes, nodes):
    """The leaves under other names, and these by the old ones."""
    new = {}
    for name in shapes:
        parts = name.split(".")
        layer = next((x for x in parts if x.isdigit()), "1")
        one = [("1" if x == layer else x) for x in parts]
        node = next(n for n in range(len(one)) if ".".join(one[: n + 1]) in nodes)
        to = nodes[".".join(one[: node + 1])].replace(".1.", f".{layer}.")
        new[name] = ".".join([to, *parts[node + 1 :]])
    return {new[x]: shape for x, shape in shapes.items()}, new


def _floats(shapes):
    return {x: ("float32", shape) for x, shape in shapes.items()}


def _suggested(saved, wanted):
    """The names that the command finds, whose rules were tried; and what it says."""
    for name, kinds in (("a", saved), ("b", wanted)):
        tree = ec.nest({x: np.zeros(s, dtype) for x, (dtype, s) in kinds.items()})
        ec.tree_serialise_leaves(f"memory://suggest/{name}", tree, overwrite=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        paths = [f"memory://suggest/{x}" for x in "ab"]
        status = command.main(["suggest", *paths, "--json"])
    data = json.loads(out.getvalue())
    names = data["names"]
    rules = ec.rename([*map(tuple, data["rules"])]).all_rules
    applied = {x: x for x in saved}
    for x in applied:
        for pattern, replacement, _ in rules:
            applied[x] = pattern.sub(replacement, applied[x])
    assert len({*applied.values()}) == len(applied)
    assert {x: applied[x] for x in names} == names
    for x, y in names.items():
        (_, a), (_, b) = saved[x], wanted[y]
        assert (y in data["adapters"]) == (a != b or "kernel" in x and len(a) > 1)
        assert _adapted(a, data["adapters"].get(y), b) == b
        assert saved[x][0] == wanted[y][0]
    for x, y in applied.items():
        assert x in names or x == y or y not in wanted
    for side, there, done in (("a", saved, names), ("b", wanted, names.values())):
        unclear = {x for some in data["unclear"] for x in some[side]}
        left = {*data["left" if side == "a" else "missing"]}
        assert unclear | left == there.keys() - {*done} and not unclear & left
    is_whole = len(names) == len(saved) == len(wanted)
    assert status == (not is_whole or bool(data["squares"]))
    return names, data


def _adapted(shape, how, wanted):
    """The shape that an adapter makes of one."""
    if how is None:
        return shape
    path = "memory://suggest/leaf"
    ec.tree_serialise_leaves(path, np.zeros(shape), overwrite=True)
    pair = (lambda m: m, lambda c: c, eval(f"ec.adapters.{how}", {"ec": ec}))
    return ec.graft(np.zeros(wanted), path, [pair])[0].shape


@pytest.mark.parametrize(
    "shapes, nodes", [(_gpt2(False), _GPT_NAMES), (_bert(), _BERT_NAMES)]
)
def test_other_libraries_both_ways(shapes, nodes):
    new, names = _moved(shapes, nodes)
    found, data = _suggested(_floats(shapes), _floats(new))
    assert found == names and len(data["rules"]) == len(nodes)
    found, data = _suggested(_floats(new), _floats(shapes))
    assert found == {y: x for x, y in names.items()} and len(data["rules"]) == len(
        nodes
    )


def test_what_names_do_not_tell_is_not_guessed():
    new, names = _moved(_llama(), _LLAMA_NAMES | _LLAMA_UNCLEAR)
    found, data = _suggested(_floats(_llama()), _floats(new))
    layer = lambda x: re.sub(r"\d", "1", x).removesuffix(".weight")
    unclear = {x for x in names if layer(x) in _LLAMA_UNCLEAR}
    assert found == {x: y for x, y in names.items() if x not in unclear}
    assert {x for some in data["unclear"] for x in some["a"]} == unclear
    assert len(data["rules"]) == len(_LLAMA_NAMES)


def test_a_model_of_equinox_takes_gpt2(tmp_path, capsys):
    """What the command prints is pasted into a graft."""
    rng = np.random.default_rng(0)
    theirs = {x: rng.normal(size=s).astype("float32") for x, s in _gpt2().items()}
    theirs["transformer.h.0.attn.bias"] = np.ones((1, 1, 9, 9), "float32")
    ec.tree_serialise_leaves(tmp_path / "theirs", ec.nest(theirs))
    ec.tree_serialise_leaves(tmp_path / "ours", _gpt())
    status = command.main(["suggest", f"{tmp_path}/theirs", f"{tmp_path}/ours"])
    out = capsys.readouterr().out
    rename = eval(out, {"ec": ec})
    assert status == 1
    code, _, comments = out.partition("\n#")
    assert len(code.splitlines()) == 2 + 9 + 3
    assert "transformer.h.0.attn.bias  f32[1,1,9,9]" in comments
    # The square ones are the other way round too, which no shape says.
    assert "#     blocks.{0..2}.attn.proj.weight\n" in comments
    with pytest.warns(UserWarning, match=r"attn.proj.weight .* beside it were turned"):
        ours, report = ec.graft(
            _gpt(),
            tmp_path / "theirs",
            [(lambda m: m, lambda c: c, rename)],
            drop="transformer.h.0.attn.bias",
        )
    assert len(report.names("adapted")) == 3 * LAYERS
    _, names = _moved(_gpt2(), _GPT_NAMES)
    leaves = {y.name: y.sources for y in report.rows if y.status != "dropped"}
    assert leaves == {y: (x,) for x, y in names.items()}
    fc1 = ours.blocks[2].mlp.fc1.weight
    assert np.array_equal(fc1, theirs["transformer.h.2.mlp.c_fc.weight"].T)


def test_an_adapter_is_for_the_layers_that_need_it(tmp_path, capsys):
    shapes = {"0.kernel": (3, 5), "1.kernel": (5, 7), "2.weight": (9, 7)}
    turned = {"0.weight": (5, 3), "1.weight": (7, 5), "2.weight": (9, 7)}
    for name, leaves in (("theirs", shapes), ("ours", turned)):
        tree = {x: np.ones(s, "float32") for x, s in leaves.items()}
        ec.tree_serialise_leaves(tmp_path / name, ec.nest(tree))
    command.main(["suggest", f"{tmp_path}/theirs", f"{tmp_path}/ours"])
    rename = eval(capsys.readouterr().out, {"ec": ec})
    ours = ec.nest({x: np.zeros(s, "float32") for x, s in turned.items()})
    pair = (lambda m: m, lambda c: c, rename)
    _, report = ec.graft(ours, tmp_path / "theirs", [pair])
    assert report.names("adapted") == ["0.weight", "1.weight"]


def test_a_model_in_a_tuple_with_its_state():
    """Whose place in the tuple counts no layers."""
    blocks = {
        f"blocks.{i}.norm.{x}": (8,) for i in range(12) for x in ("scale", "bias")
    }
    saved = blocks | {"bn.scale": (8,), "bn.bias": (8,), "bn.mean": (8,)}
    saved |= {"head.kernel": (8, 5), "head.bias": (5,)}
    turned = {"head.kernel": ("head.weight", (5, 8))}
    new = {
        x: turned.get(x, (x.replace("scale", "weight"), s)) for x, s in saved.items()
    }
    wanted = {f"0.{y}": s for x, (y, s) in new.items() if x != "bn.mean"}
    names, data = _suggested(_floats(saved), _floats(wanted | {"1.0": (), "1.1": (8,)}))
    assert names == {x: f"0.{y}" for x, (y, _) in new.items() if x != "bn.mean"}
    assert len(data["rules"]) < 9


@pytest.mark.parametrize("box", ["", ".value"])
def test_kernels_of_flax_in_variables_and_not(box):
    """Also square ones. What is beside others is called so, and is no variable."""
    saved = {f"blocks.{i}.up.kernel{box}": (8, 8) for i in range(3)}
    saved |= {f"head.kernel{box}": (8, 5), f"head.bias{box}": (5,)}
    saved |= {"attn.query": (3, 8), "attn.value": (3, 8)}
    wanted = {f"blocks.{i}.up.weight": (8, 8) for i in range(3)}
    wanted |= {"head.weight": (5, 8), "head.bias": (5,)}
    wanted |= {"attn.q": (3, 8), "attn.v": (3, 8)}
    names, data = _suggested(_floats(saved), _floats(wanted))
    assert len(names) == 7 and names["attn.value"] == "attn.v"
    kernels = [f"blocks.{i}.up.weight" for i in range(3)] + ["head.weight"]
    assert data["adapters"] == dict.fromkeys(kernels, "transpose()")
    paths = [f"memory://suggest/{x}" for x in "ab"]
    model = ec.materialise(ec.open(paths[1]).tree)
    model["new"] = np.zeros(2)
    pair = (lambda m: m["new"], lambda c: c.head)
    with pytest.raises(RuntimeError) as caught:
        ec.graft(model, paths[0], [pair])
    assert r'(r"^blocks\.(\d+)\.up\.weight$", ec.adapters.transpose())' in str(
        caught.value
    )


def test_a_graft_says_one_pair_with_a_rename(tmp_path):
    """Where it would be many pairs. It is code to paste."""
    theirs = {x: np.ones(s, "float32") for x, s in _gpt2().items()}
    theirs |= {"step": np.zeros((), int), "head.weight": np.ones((77, D), "float32")}
    ec.tree_serialise_leaves(tmp_path / "theirs", ec.nest(theirs))
    model = {"net": _gpt(), "new": np.zeros(5)}
    wrong = (lambda m: m["new"], lambda c: c.head)
    with pytest.raises(RuntimeError) as caught:
        ec.graft(model, tmp_path / "theirs", [wrong])
    _, _, text = str(caught.value).partition("  Perhaps, to paste into `pairs`:\n")
    pairs, _, rest = text.partition("  And after them:\n")
    rest, _, squares = rest.partition("  Squares in these pairs, ")
    assert squares.endswith("    net.blocks.{0..2}.attn.proj.weight")
    assert pairs.startswith(
        "    (lambda m: m['net'], lambda c: c.transformer, ec.rename(["
    )
    assert len(pairs.splitlines()) == 2 + 9 + 3
    call = f"ec.graft(model, path, [{pairs}], {rest})"
    scope = {"ec": ec, "model": model, "path": tmp_path / "theirs"}
    with pytest.warns(UserWarning, match=r"attn.proj.weight .* beside it were turned"):
        _, report = eval(call.replace("\n", ""), scope)
    _, names = _moved(_gpt2(), _GPT_NAMES)
    found = {x.name: x.sources for x in report.rows if x.sources}
    assert found == {f"net.{y}": (x,) for x, y in names.items()}
    assert report.names("fresh") == ["new"]
    assert report.names("dropped") == ["head.weight", "step"]


def _kinds(**shapes):
    return {x.replace("__", "."): ("float32", y) for x, y in shapes.items()}


@pytest.mark.parametrize(
    "order", [(1, 2, 0), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0)]
)
def test_permuted_layers(order):
    """By way of a third name, if they are exchanged; and biases go with weights."""
    shapes = {"w": [(4, 8), (8, 8), (8, 2)], "b": [(8,), (8,), (2,)]}
    layer = lambda i, x: f"layers.{i}.{x}"
    names = {layer(i, x): layer(order[i], x) for i in range(3) for x in "wb"}
    saved = {layer(i, x): ("float32", shapes[x][i]) for i in range(3) for x in "wb"}
    wanted = {names[x]: kind for x, kind in saved.items()}
    assert _suggested(saved, wanted)[0] == names


def test_chains_are_in_order():
    saved = _kinds(mix__w=(2,), mix_in__w=(3,))
    found, data = _suggested(saved, _kinds(mix_in__w=(2,), mix_in_last__w=(3,)))
    assert found == {"mix.w": "mix_in.w", "mix_in.w": "mix_in_last.w"}
    assert data["rules"] == [[r"^mix_in\.", "mix_in_last."], [r"^mix\.", "mix_in."]]
    # What is in the way makes way.
    _, data = _suggested(saved, _kinds(mix_in__w=(2,)))
    assert data["rules"] == [[r"^mix_in\.", "old.mix_in."], [r"^mix\.", "mix_in."]]


def test_a_name_makes_way_to_one_that_nobody_wants():
    saved = _kinds(mix__w=(2,), mix_in__w=(3,))
    wanted = _kinds(mix_in__w=(2,), old__mix_in__w=(3, 5))
    names, data = _suggested(saved, wanted)
    assert names == {"mix.w": "mix_in.w"}
    assert data["rules"] == [[r"^mix_in\.", "old1.mix_in."], [r"^mix\.", "mix_in."]]


def test_leaves_that_need_too_many_rules_are_alike(monkeypatch, capsys):
    saved, wanted = _kinds(mix__w=(2,), c__v=(4,)), _kinds(mix_in__w=(2,), d__u=(3,))
    assert _suggested(saved, wanted)[0] == {"mix.w": "mix_in.w"}
    inside.limit(monkeypatch, trials_of_rules=0)
    assert _suggested(saved, wanted)[0] == {}
    command.main(["suggest", "memory://suggest/a", "memory://suggest/b"])
    out = capsys.readouterr().out
    assert "#   1 leaf alike, but for too many rules: write a function\n" in out
    assert "d.u" in out and "c.v" in out and "mix" not in out


def test_an_error_has_no_code_that_is_cut(tmp_path):
    """Where each leaf needs a rule of its own, there are pairs."""
    words = ["".join(x) for x in itertools.product("abcdefgh", repeat=3)][:400]
    saved = {f"{x}.weight": np.ones((i + 2, 1)) for i, x in enumerate(words)}
    wanted = {f"{x}_l.weight": y for x, y in zip(words, saved.values())}
    ec.tree_serialise_leaves(tmp_path / "theirs", ec.nest(saved))
    first = (lambda m: m["aaa_l"], lambda c: c.aaa)
    with pytest.raises(RuntimeError) as caught:
        ec.graft(ec.nest(wanted), tmp_path / "theirs", [first])
    text = str(caught.value)
    _, _, pairs = text.partition("  Perhaps, to paste into `pairs`:\n")
    assert pairs.endswith("\n    # ... and more pairs") and "ec.rename(" not in pairs
    assert len(eval(f"[{pairs}\n]", {"ec": ec})) == 8


def test_leaves_of_one_shape():
    saved = _kinds(l__q=(1,), l__k=(1,), l__v=(1,))
    names, data = _suggested(saved, _kinds(x__one=(1,), x__two=(1,), x__three=(1,)))
    assert not names and len(data["unclear"]) == 1
    # What is left is not the same for being left.
    wanted = _kinds(x__query=(1,), x__gate=(1,), x__value=(1,))
    names, data = _suggested(saved, wanted)
    assert names == {"l.q": "x.query", "l.v": "x.value"}
    assert data["unclear"] == [{"a": ["l.k"], "b": ["x.gate"]}]


def test_a_name_that_is_unclear_on_one_side_alone():
    saved = {"alpha.weight": ("float32", (4,))}
    wanted = {"alpha.weight": ("float32", (3,)), "alpha.bravo.bias": ("float32", (4,))}
    _, data = _suggested(saved, wanted)
    assert data["unclear"] == [{"a": ["alpha.weight"], "b": ["alpha.bravo.bias"]}]
    assert data["missing"] == ["alpha.weight"]


def test_numbers_that_count_otherwise():
    saved = {f"net.{i}.weight": ("float32", (8, 8)) for i in (0, 2, 4)}
    layers = {f"layers.{i}.weight": ("float32", (8, 8)) for i in range(3)}
    assert _suggested(saved, layers)[0] == dict(zip(saved, layers))
    fields = {f"fc{i}.weight": ("float32", (8, 8)) for i in (1, 2, 3)}
    assert _suggested(saved, fields)[0] == {}
    # The first layers of a deeper model.
    deep = {f"h.{i}.w": ("float32", (8, 8)) for i in range(12)}
    few = {f"blocks.{i}.w": ("float32", (8, 8)) for i in range(5)}
    names, data = _suggested(deep, few)
    assert names == dict(zip(deep, few)) and data["rules"] == [[r"^h\.", "blocks."]]


def test_a_model_is_not_taken_from_its_moments():
    layers = {f"layers.{i}.w": (4, 4) for i in range(3)}
    tops = ("opt.0.mu", "model", "opt.0.nu")
    saved = _floats({f"{top}.{x}": s for top in tops for x, s in layers.items()})
    wanted = _floats({f"net.{x}": s for x, s in layers.items()})
    names, data = _suggested(saved, wanted)
    assert names == {f"model.{x}": f"net.{x}" for x in layers}
    assert data["rules"] == [[r"^model\.", "net."]]


_WORDS = "alpha bravo charlie delta foxtrot golf juliett kilo lima november".split()
_leaf = st.sampled_from(["weight", "bias", "table", "index"])
_shape = st.sampled_from([(3,), (4,), (3, 4), (4, 3), (4, 4), ()])


@st.composite
def _trees(draw):
    """Kinds by name: fields of words, and layers."""
    out = {}
    for _ in range(draw(st.integers(1, 6))):
        path = draw(
            st.lists(st.sampled_from(_WORDS), min_size=1, max_size=3, unique=True)
        )
        count = draw(st.sampled_from([0, 0, 1, 2, 3]))
        for name in draw(st.sets(_leaf, min_size=1)):
            kind = draw(st.sampled_from(["float32", "int32"])), draw(_shape)
            where = draw(st.integers(1, len(path)))
            for i in range(count) or [None]:
                parts = path if i is None else [*path[:where], str(i), *path[where:]]
                out[".".join([*parts, name])] = kind
    return out


def _short(word):
    return word[0] + "".join(x for x in word[1:] if x not in "aeiou")


@hypothesis.given(_trees(), st.data())
def test_names_that_tell_are_never_wrong(saved, data):
    """Words are shortened, or get an end, or stay; nodes are wrapped or unwrapped; and
    some leaves are new, and some gone."""
    words = {
        x: data.draw(st.sampled_from([x, _short(x), x + "s", x + "_layer"]), x)
        for x in _WORDS
    }
    top = data.draw(st.sampled_from(["", "wrapped.", "net.0."]))
    names = {
        x: top + ".".join(words.get(part, part) for part in x.split(".")) for x in saved
    }
    most = min(2, len(saved) - 1)
    gone = data.draw(st.sets(st.sampled_from(sorted(saved)), max_size=most))
    wanted = {names[x]: kind for x, kind in saved.items() if x not in gone}
    found, data = _suggested(saved, wanted)
    if not gone:
        assert found.items() <= names.items()
        left = saved.keys() - found.keys()
        assert left <= {x for some in data["unclear"] for x in some["a"]}


@hypothesis.given(_trees(), _trees())
def test_rules_of_any_two_trees_are_right(saved, wanted):
    _suggested(saved, wanted)


def test_numbers_at_the_top_may_be_large(tmp_path):
    """As of a dict of runs, by the times at which they began."""
    tree = {"0": {"w": np.ones((3, 4))}, "20240101000000": {"b": np.ones(7)}}
    ec.tree_serialise_leaves(tmp_path / "a", {**tree, "z": np.ones(5)})
    like = {"x": {"w": np.zeros((3, 4))}, "y": np.zeros(5)}
    with pytest.raises(RuntimeError, match=r"0\.w"):
        ec.graft(like, tmp_path / "a", [(lambda m: m["y"], lambda c: c["z"])])


def test_no_stack_is_suggested_by_its_shape_alone(tmp_path):
    ones = lambda *shape: np.ones(shape, np.float32)
    saved = {
        "norms": [{"weight": ones(3), "scale": True, "count": 1} for _ in range(3)],
        "head": ones(1),
    }
    ec.tree_serialise_leaves(tmp_path / "c", saved)
    # As many norms as they are wide, beside other layers of that width.
    model = {"layers": [{"weight": ones(3, 3)}] * 4, "scale": ones(3), "head": ones(1)}
    pair = (lambda m: m["head"], lambda c: c.head)
    with pytest.raises(RuntimeError) as error:
        ec.graft(model, tmp_path / "c", [pair])
    assert "(lambda m: " not in str(error.value)
    assert "by `stack()`" in str(error.value)  # It says so, and in no code.
    model = {"norms": {"weight": ones(3, 3)}, "head": ones(1)}
    with pytest.raises(RuntimeError) as error:
        ec.graft(model, tmp_path / "c", [pair])
    pair = """(lambda m: m['norms'], lambda c: c.norms, ec.adapters.stack()),"""
    assert pair in str(error.value)


def test_of_lists_in_lists_none_is_said_to_be_stacked(tmp_path):
    """Of stages with as many blocks as there are stages, blocks or stages may be."""
    block = lambda i: {"w": np.full(5, i, np.float32), "b": np.full(4, i, np.float32)}
    stages = [[block(0), block(1)], [block(2), block(3)]]
    each = lambda stage: {x: np.stack([y[x] for y in stage]) for x in "wb"}
    listed = {"stages": stages, "head": np.ones(1, np.float32)}
    stacked = listed | {"stages": list(map(each, stages))}
    for number, (saved, wanted) in enumerate([(listed, stacked), (stacked, listed)]):
        ec.tree_serialise_leaves(tmp_path / str(number), saved)
        pair = (lambda m: m["head"], lambda c: c.head)
        with pytest.raises(RuntimeError, match="stages") as error:
            ec.graft(wanted, tmp_path / str(number), [pair])
        assert "(lambda m: " not in str(error.value)


def test_a_stack_is_none_of_the_lists_that_are_left(tmp_path):
    """Of three lists of two, those in no pair are two of two."""
    block = lambda i: {"w": np.full(5, i, np.float32), "b": np.full(4, i, np.float32)}
    stages = [[block(2 * i), block(2 * i + 1)] for i in range(3)]
    stacked = {x: np.stack([y[x] for y in stages[1]]) for x in "wb"}
    ec.tree_serialise_leaves(tmp_path / "c", {"stages": stages})
    pair = (lambda m: m["stages"][0], lambda c: c.stages[0])
    with pytest.raises(RuntimeError, match="by `stack") as error:
        ec.graft({"stages": [stages[0], stacked]}, tmp_path / "c", [pair])
    assert "(lambda m: " not in str(error.value)


@pytest.mark.parametrize("more", [{}, {"up": [np.ones(4)] * 2}])
def test_no_pair_takes_the_name_of_a_leaf_that_fits(tmp_path, more):
    """Its list has one item more than that of the model."""
    parts = {"head": [np.ones(4)] * 2, "rest": {"shape": np.ones(4), "mlp": np.ones(5)}}
    same = {"v": np.ones(2), "w": np.ones((7, 7))}
    saved = {"net": {"k": parts | more, **same}, "a": np.ones(1)}
    ec.tree_serialise_leaves(tmp_path / "c", saved)
    parts = {"head": [np.ones(4)], "rest": {"mlp": np.ones(5)}}
    model = {"m": {"k": parts, **same}, "a": np.ones(1)}
    with pytest.raises(RuntimeError) as error:
        ec.graft(model, tmp_path / "c", [(lambda m: m["a"], lambda c: c.a)])
    text = str(error.value)
    assert "(lambda m: m['m']['k']['rest'], lambda c: c.net.k.rest)," in text
    assert "net.k.rest.shape)" not in text and "ec.rename" not in text
    assert "drop=" not in text


def test_a_name_that_another_leaf_has_is_unclear():
    shapes = {"k.rest.mlp": (5,), "v": (2,), "k.head.0": (4,)}
    more = {"k.head.1": (4,), "k.rest.shape": (4,)}
    saved = {f"net.{x}": shape for x, shape in (shapes | more).items()}
    wanted = {f"m.{x}": shape for x, shape in shapes.items()}
    names, data = _suggested(_floats(saved), _floats(wanted))
    assert {*names.values()} == {"m.k.rest.mlp", "m.v"}
    assert [x["b"] for x in data["unclear"]] == [["m.k.head.0"]]
