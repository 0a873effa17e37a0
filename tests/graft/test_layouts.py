"""Adapters for what libraries store in other orders: the layers of Equinox compute what
those of flax and PyTorch do."""

import pathlib
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_ckpt as ec


adapt = ec.adapters
FILE = pathlib.Path(__file__).parents[1] / "foreign" / "layers" / "torch.npz"
THEIRS = np.load(FILE)


def _close(a, b):
    return np.allclose(a, b, rtol=2e-4, atol=2e-5)


def _graft(layer, tmp_path, saved, *pairs, **kwargs):
    ec.tree_serialise_leaves(tmp_path / "x", saved)
    return ec.graft(layer, tmp_path / "x", list(pairs), **kwargs)[0]


def _pair(name, *how, there=None):
    get = lambda tree: getattr(tree, name)
    return get, lambda c: c[there or name], *how


# ---- flax.


def _flax(layer, shape):
    """Its parameters, an input, and what it makes of that."""
    x = jr.normal(jr.key(1), shape)
    params = layer.init(jr.key(0), x)["params"]
    params = jax.tree.map(lambda p: jr.normal(jr.key(2), p.shape), params)
    return params, x, layer.apply({"params": params}, x)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_of_flax(tmp_path, rank):
    size = (5, 6, 7)[:rank]
    params, x, y = _flax(nn.Conv(8, (3, 2, 3)[:rank], padding="VALID"), (1, *size, 4))
    ours = eqx.nn.Conv(rank, 4, 8, (3, 2, 3)[:rank], key=jr.key(3))
    ours = _graft(
        ours,
        tmp_path,
        params,
        _pair("weight", adapt.channels_first(), there="kernel"),
        _pair("bias", adapt.unit_axes()),
    )
    assert _close(ours(jnp.moveaxis(x[0], -1, 0)), jnp.moveaxis(y[0], -1, 0))


def test_a_dense_layer_of_flax(tmp_path):
    params, x, y = _flax(nn.Dense(3), (1, 3))
    ours = eqx.nn.Linear(3, 3, key=jr.key(3))
    how = adapt.channels_first()
    ours = _graft(
        ours, tmp_path, params, _pair("weight", how, there="kernel"), _pair("bias", how)
    )
    assert _close(ours(x[0]), y[0])


@pytest.mark.parametrize("turned", [False, True])
def test_transposed_convolutions_of_flax(tmp_path, turned):
    """As it is by default; and with `transpose_kernel`, as PyTorch has it."""
    layer = nn.ConvTranspose(4, (3, 3), (2, 2), "VALID", transpose_kernel=turned)
    params, x, y = _flax(layer, (1, 5, 5, 4))
    how = [adapt.channels_first(), *[adapt.conv_transpose()] * turned]
    ours = eqx.nn.ConvTranspose2d(4, 4, 3, 2, key=jr.key(3))
    pairs = _pair("weight", how, there="kernel"), _pair("bias", adapt.unit_axes())
    ours = _graft(ours, tmp_path, params, *pairs)
    assert _close(ours(jnp.moveaxis(x[0], -1, 0)), jnp.moveaxis(y[0], -1, 0))


def test_a_cell_of_flax(tmp_path):
    """Of separate kernels, in the order of the gates here."""
    cell = nn.OptimizedLSTMCell(3)
    x, state = jr.normal(jr.key(1), (2,)), (jnp.ones(3), -jnp.ones(3))
    params = cell.init(jr.key(0), state, x)["params"]
    params = jax.tree.map(lambda p: jr.normal(jr.key(2), p.shape), params)
    _, y = cell.apply({"params": params}, state, x)
    kernels = lambda c, of: [c[of + gate].kernel for gate in "ifgo"]
    joined = [adapt.transpose(), adapt.concatenate()]
    ours = _graft(
        eqx.nn.LSTMCell(2, 3, key=jr.key(3)),
        tmp_path,
        params,
        (lambda m: m.weight_ih, lambda c: kernels(c, "i"), joined),
        (lambda m: m.weight_hh, lambda c: kernels(c, "h"), joined),
        (
            lambda m: m.bias,
            lambda c: [c["h" + x].bias for x in "ifgo"],
            adapt.concatenate(),
        ),
    )
    assert _close(ours(x, state[::-1])[0], y)


# ---- PyTorch.


@pytest.mark.parametrize(
    "name, rank, size, groups, padding",
    [("convt1", 2, 4, 1, 1), ("convt2", 2, 4, 2, 1), ("convt1d", 1, 6, 2, 0)],
)
def test_transposed_convolutions_of_pytorch(
    tmp_path, name, rank, size, groups, padding
):
    layer = eqx.nn.ConvTranspose(
        rank, 4, size, 3, 2, padding, padding, groups=groups, key=jr.key(0)
    )
    saved = {x: THEIRS[f"{name}.{x}"] for x in ("weight", "bias")}
    how = adapt.conv_transpose(groups)
    pairs = _pair("weight", how), _pair("bias", adapt.unit_axes())
    ours = _graft(layer, tmp_path, saved, *pairs)
    assert _close(ours(THEIRS[f"{name}.x0"]), THEIRS[f"{name}.y"])


def _sum(saved, like):
    return ec.lazy(jnp.add)(*saved)


@pytest.mark.parametrize("order", ["ifgo", "igfo", "iofg"])
def test_a_cell_of_pytorch(order, tmp_path):
    """Whose gates are in the order that they have here; and stored in others."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cut = {x: np.split(THEIRS[f"lstm.{x}"], 4) for x in names}
    at = ["ifgo".index(x) for x in order]
    saved = {x: np.concatenate([parts[i] for i in at]) for x, parts in cut.items()}
    how = adapt.gates(order)
    ours = _graft(
        eqx.nn.LSTMCell(3, 2, key=jr.key(0)),
        tmp_path,
        saved,
        _pair("weight_ih", how),
        _pair("weight_hh", how),
        # Equinox has one bias.
        (lambda m: m.bias, lambda c: [c.bias_ih, c.bias_hh], [_sum, how]),
    )
    x, h, c = (THEIRS[f"lstm.x{i}"] for i in range(3))
    assert _close(ours(x, (h, c))[0], THEIRS["lstm.y"][0])


def _heads(x, weight, bias=0):
    return (x @ weight.T + bias).reshape(len(x), 2, -1)


def _attend(q, k, v, size):
    """With rotary positions of halves, of the first numbers of each head."""
    rope = eqx.nn.RotaryPositionalEmbedding(size)
    turned = jax.vmap(rope, 1, 1)
    q, k = (jnp.concatenate([turned(x[..., :size]), x[..., size:]], -1) for x in (q, k))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    return jnp.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def test_a_fused_projection_by_head(tmp_path):
    """That of GPT-NeoX, as PyTorch computes with it."""
    fused = {x: THEIRS[f"neox.query_key_value.{x}"] for x in ("weight", "bias")}
    like = {x: {y: np.zeros_like(z[:8]) for y, z in fused.items()} for x in "qkv"}
    how = [adapt.qkv_blocks(2), adapt.split()]
    pair = (lambda m: [m["q"], m["k"], m["v"]], lambda c: c, how)
    made = _graft(like, tmp_path, fused, pair)
    x = THEIRS["neox.x0"]
    q, k, v = (_heads(x, made[y]["weight"], made[y]["bias"]) for y in "qkv")
    y = _attend(q, k, v, 2) @ THEIRS["neox.dense.weight"].T + THEIRS["neox.dense.bias"]
    assert _close(y, THEIRS["neox.y"])


def test_rotary_positions_of_pairs(tmp_path):
    """Those of GPT-J, in a model that turns halves."""
    saved = {x: THEIRS[f"gptj.{x}_proj.weight"] for x in "qkv"}
    how = adapt.rotary_halves(2, size=4)
    pairs = [(lambda m, x=x: m[x], x, how) for x in "qk"]
    made = _graft(saved, tmp_path, saved, *pairs, (lambda m: m["v"], "v"))
    x = THEIRS["gptj.x0"]
    y = _attend(*(_heads(x, made[y]) for y in "qkv"), 4)
    assert _close(y @ THEIRS["gptj.out_proj.weight"].T, THEIRS["gptj.y"])


# ---- There and back, and what they are by NumPy.


def _blocks(x, kv, queries):
    """Query heads of each group, then its key and its value."""
    parts = x.reshape(kv, queries + 2, -1, *x.shape[1:])
    cut = np.split(parts, [queries, queries + 1], 1)
    return np.concatenate([y.reshape(-1, *x.shape[1:]) for y in cut])


@pytest.mark.parametrize(
    "adapter, shape, expected",
    [
        (adapt.channels_first(), (3, 2, 4, 5), lambda x: x.transpose(3, 2, 0, 1)),
        (adapt.channels_first(), (2, 5), lambda x: x.T),
        (adapt.channels_first(), (5,), lambda x: x),
        (adapt.channels_last(), (5, 4, 3, 2), lambda x: x.transpose(2, 3, 1, 0)),
        (adapt.unit_axes(), (5,), lambda x: x[:, None, None]),
        (adapt.unit_axes(), (1, 5, 1, 3), lambda x: x[0, :, 0]),
        (adapt.conv_transpose(), (4, 5, 3), lambda x: x.swapaxes(0, 1)[..., ::-1]),
        (adapt.conv_transpose(), (5,), lambda x: x),
        (adapt.qkv_blocks(3), (18, 2), lambda x: _blocks(x, 3, 1)),
        (adapt.qkv_blocks(6, kv_heads=2), (20, 2), lambda x: _blocks(x, 2, 3)),
        (adapt.qkv_blocks(3, axis=1), (2, 18), lambda x: _blocks(x.T, 3, 1).T),
        (adapt.rotary_halves(2), (8, 3), lambda x: x[[0, 2, 1, 3, 4, 6, 5, 7]]),
        (adapt.rotary_halves(1, 4), (6,), lambda x: x[[0, 2, 1, 3, 4, 5]]),
        (adapt.gates("zrn", "rzn"), (6,), lambda x: x[[2, 3, 0, 1, 4, 5]]),
        (adapt.gates("igfo", axis=1), (2, 4), lambda x: x[:, [0, 2, 1, 3]]),
    ],
)
def test_there_and_back(tmp_path, adapter, shape, expected):
    saved = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    wanted = expected(saved)
    whole = lambda m: m
    made = _graft(np.zeros_like(wanted), tmp_path, saved, (whole, whole, adapter))
    assert np.array_equal(made, wanted)
    back = (whole, whole, ec.inverse(adapter))
    assert np.array_equal(_graft(np.zeros_like(saved), tmp_path, made, back), saved)


@pytest.mark.parametrize(
    "adapter, shape, match",
    [
        (adapt.unit_axes(), (5, 2), "do not differ in axes of one element alone"),
        (adapt.conv_transpose(3), (4, 5, 3), "4 channels are not of 3 groups"),
        (adapt.qkv_blocks(3), (16, 2), "16 along axis 0 are not of 9 heads"),
        (adapt.rotary_halves(3), (9,), "3 of the 3 numbers of a head are no pairs"),
        (adapt.gates("igfo"), (6,), "6 along axis 0 are not of 4 gates"),
    ],
)
def test_what_they_refuse(tmp_path, adapter, shape, match):
    pair = (lambda m: m, lambda c: c, adapter)
    with pytest.raises(RuntimeError, match=match):
        _graft(np.zeros(7), tmp_path, np.zeros(shape, "float32"), pair)


def test_arguments_that_they_refuse():
    for call, match in [
        (lambda: adapt.gates("iifo"), "`saved` must be the letters of gates"),
        (lambda: adapt.gates("ifg"), "name other gates: ifg, ifgo"),
        (lambda: adapt.qkv_blocks(4, kv_heads=3), "no multiple of `kv_heads=3`"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


# ---- Shapes that fit either way.


class _Net(eqx.Module):
    up: eqx.nn.ConvTranspose2d
    dense: eqx.nn.Linear
    conv: eqx.nn.Conv1d

    def __init__(self, size):
        self.up = eqx.nn.ConvTranspose2d(4, size, 3, key=jr.key(0))
        self.dense = eqx.nn.Linear(4, size, key=jr.key(0))
        self.conv = eqx.nn.Conv1d(4, 4, 4, key=jr.key(0))


def _nested(net):
    """As another library has it: no Modules."""
    new = {"dense.weight": "dense.kernel", "conv.weight": "conv.kernel"}
    arrays = jtu.tree_leaves_with_path(eqx.filter(net, eqx.is_array))
    named = {jtu.keystr(path, simple=True, separator="."): x for path, x in arrays}
    return ec.nest({new.get(x, x): leaf for x, leaf in named.items()})


def _warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(x.message) for x in caught)


RENAME = ec.rename([(r"kernel$", "weight")])


def test_a_warning_where_two_layouts_fit(tmp_path):
    net = _Net(4)
    pair = (lambda m: m, lambda c: c, RENAME)
    with pytest.warns(UserWarning, match="do not say how they are stored") as caught:
        _graft(net, tmp_path, _nested(net), pair)
    (warning,) = caught
    assert pathlib.Path(warning.filename) == pathlib.Path(__file__)
    assert str(warning.message).splitlines()[1:4] == [
        "  up.weight  of `up.weight`: PyTorch's need `ec.adapters.conv_transpose()`",
        "  dense.weight  of `dense.kernel`: kernels of flax, Keras and Haiku "
        "need `ec.adapters.channels_first()`",
        "  conv.weight  of `conv.kernel`: kernels of flax, Keras and Haiku "
        "need `ec.adapters.channels_first()`",
    ]


def test_a_warning_counts_what_it_does_not_list(tmp_path):
    linear = eqx.nn.Linear(4, 4, use_bias=False, key=jr.key(0))
    saved = [{"kernel": linear.weight}] * 11
    pair = (lambda m: m, lambda c: c, RENAME)
    text = _warnings_of(lambda: _graft([linear] * 11, tmp_path, saved, pair))
    assert text.count("of `") == 8 and "\n  ... and 3 more\n" in text


def test_a_warning_of_a_square_beside_others_that_are_turned(tmp_path):
    """As `c_proj` of GPT-2 is beside `c_attn`."""
    make = lambda n: eqx.nn.Linear(4, n, use_bias=False, key=jr.key(0))
    net = {"h": [{"attn": make(12), "proj": make(4)} for _ in range(2)]}
    saved = jax.tree.map(lambda x: x.T, ec.to_state_dict(net))
    wide = (r"attn[.]weight$", adapt.transpose())
    pair = lambda *rules: (lambda m: m, lambda c: c, ec.rename([*rules]))
    with pytest.warns(UserWarning, match="do not say how they are stored") as caught:
        _graft(net, tmp_path, saved, pair(wide))
    (warning,) = caught
    row = "h.0.proj.weight"
    assert f"  {row}  of `{row}`: others beside it were turned" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _graft(net, tmp_path, saved, pair((r"weight$", adapt.transpose())))
        as_it_is = (r"proj[.]weight$", lambda saved, like: saved)
        _graft(net, tmp_path, saved, pair(wide, as_it_is))


def test_no_warning_where_one_fits_or_is_said(tmp_path):
    wide, net = _Net(5), _Net(4)
    as_it_is = ("weight$", lambda saved, like: saved)
    said = ec.rename([("kernel$", "weight"), as_it_is])
    names = ec.rename([("kernel$", "weight"), ("^conv.weight$", as_it_is[1])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _graft(net, tmp_path, _nested(net), (lambda m: m, lambda c: c, said))
        _graft(wide, tmp_path, _nested(wide), (lambda m: m, lambda c: c, names))
        # Modules of Equinox were saved as such.
        _graft(net, tmp_path, net, (lambda m: m, lambda c: c))


@pytest.mark.parametrize("box", ["value", "raw_value"])
def test_a_warning_of_a_kernel_in_a_variable(tmp_path, box):
    """As NNX has it, whose names end with the variable's value."""
    linear = eqx.nn.Linear(4, 4, key=jr.key(0))
    saved = {"kernel": {box: linear.weight.T}, "bias": {box: linear.bias}}
    names = ec.rename([(rf"[.]{box}$", ""), ("kernel$", "weight")])
    pair = (lambda m: m, lambda c: c, names)
    text = _warnings_of(lambda: _graft(linear, tmp_path, saved, pair))
    assert f"of `kernel.{box}`: kernels of flax" in text
    how = names, ec.adapters.channels_first()
    pair = (lambda m: m, lambda c: c, *how)
    assert eqx.tree_equal(_graft(linear, tmp_path, saved, pair), linear)


def _stacked(*layers):
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


LAYERS = [eqx.nn.Linear(4, 4, use_bias=False, key=jr.key(i)) for i in range(4)]
KERNELS = {"layers": {"kernel": _stacked(*LAYERS).weight.swapaxes(1, 2)}}
CONV = _stacked(
    *(eqx.nn.Conv1d(4, 4, 4, use_bias=False, key=k) for k in jr.split(jr.key(0)))
)
FIRST, TURNED = adapt.channels_first(), adapt.transpose(0, 2, 1)


@pytest.mark.parametrize(
    "model, saved, how, needed, said",
    [
        (_stacked(*LAYERS), KERNELS, [], "transpose(0, 2, 1)`", [TURNED]),
        # Of as many layers as the width, this moves the layers.
        (_stacked(*LAYERS), KERNELS, [FIRST], "transpose(0, 2, 1)`", [TURNED]),
        (
            LAYERS,
            KERNELS,
            [adapt.unstack()],
            "channels_first()` after `unstack()`",
            [adapt.unstack(), FIRST],
        ),
        (
            LAYERS,
            KERNELS,
            [FIRST, adapt.unstack()],
            "channels_first()` after `unstack()`",
            [TURNED, adapt.unstack()],
        ),
        (
            _stacked(*LAYERS),
            {"layers": [{"kernel": x.weight.T} for x in LAYERS]},
            [adapt.stack()],
            "transpose(0, 2, 1)` after `stack()`",
            [adapt.stack(), TURNED],
        ),
        (
            CONV,
            {"layers": {"kernel": CONV.weight.transpose(0, 3, 2, 1)}},
            [],
            "transpose(0, 3, 2, 1)`",
            [adapt.transpose(0, 3, 2, 1)],
        ),
    ],
)
def test_stacked_kernels(tmp_path, model, saved, how, needed, said):
    pair = (lambda m: m, lambda c: c.layers, RENAME)
    text = _warnings_of(lambda: _graft(model, tmp_path, saved, (*pair, *how)))
    assert f"need `ec.adapters.{needed}" in text
    assert eqx.tree_equal(_graft(model, tmp_path, saved, (*pair, *said)), model)


def test_squares_that_are_put_together_or_picked(tmp_path):
    """As queries, keys and values are, and one of kernels that are stacked."""
    fused = eqx.nn.Linear(4, 12, use_bias=False, key=jr.key(0))
    parts = {x: {"kernel": y.T} for x, y in zip("qkv", jnp.split(fused.weight, 3))}
    get = lambda c: [c.q.kernel, c.k.kernel, c.v.kernel]
    of = lambda *how: (lambda m: m.weight, get, *how)
    joined = adapt.concatenate()
    text = _warnings_of(lambda: _graft(fused, tmp_path, parts, of(joined)))
    assert "need `ec.adapters.channels_first()` before `concatenate()`" in text
    assert eqx.tree_equal(_graft(fused, tmp_path, parts, of(FIRST, joined)), fused)
    one = eqx.nn.Linear(4, 4, use_bias=False, key=jr.key(0))
    as_it_is = (lambda m: m.weight, lambda c: c.layers.kernel[1])
    saved = {"layers": {"kernel": KERNELS["layers"]["kernel"]}}
    text = _warnings_of(lambda: _graft(one, tmp_path, saved, as_it_is))
    assert "need `ec.adapters.channels_first()`" in text
    turned = (lambda m: m.weight, lambda c: c.layers.kernel[1].T)
    made = _graft(one, tmp_path, saved, turned)
    assert (made.weight == LAYERS[1].weight).all()


# ---- Haiku, Keras and ONNX, as each of them computes.


PEERS = np.load(FILE.parent / "peers.npz")


def _peer(name):
    """The weights of a layer, its inputs, and what it makes of them."""
    start = f"{name}."
    own = {x.removeprefix(start): y for x, y in PEERS.items() if x.startswith(start)}
    given = [own.pop(f"x{i}")[0] for i in range(3) if f"x{i}" in own]
    return own, [x[0] if x.shape[:1] == (1,) else x for x in given], own.pop("y")[0]


@pytest.mark.parametrize(
    "name, weight", [("haiku.linear", "w"), ("keras.dense", "kernel")]
)
def test_dense_layers_of_peers(tmp_path, name, weight):
    saved, (x,), y = _peer(name)
    ours = eqx.nn.Linear(3, 3, key=jr.key(0))
    bias = "b" if weight == "w" else "bias"
    how = adapt.channels_first()
    pairs = _pair("weight", how, there=weight), _pair("bias", there=bias)
    assert _close(_graft(ours, tmp_path, saved, *pairs)(x), y)


@pytest.mark.parametrize(
    "name, weight, how",
    [
        ("haiku.conv", "w", adapt.channels_first()),
        ("keras.conv", "kernel", adapt.channels_first()),
        ("haiku.convt", "w", adapt.transpose(2, 3, 0, 1)),
        ("keras.convt", "kernel", [adapt.channels_first(), adapt.conv_transpose()]),
        ("onnx.convt", "W", adapt.conv_transpose()),
    ],
)
def test_convolutions_of_peers(tmp_path, name, weight, how):
    saved, (x,), y = _peer(name)
    if name.endswith("convt"):
        ours = eqx.nn.ConvTranspose2d(4, 4, 3, 2, key=jr.key(0))
    else:
        ours = eqx.nn.Conv2d(4, 6, (3, 2), key=jr.key(0))
    bias = {"w": "b", "kernel": "bias", "W": "B"}[weight]
    one = _pair("bias", adapt.unit_axes(), there=bias)
    ours = _graft(ours, tmp_path, saved, _pair("weight", how, there=weight), one)
    if weight == "W":
        assert _close(ours(x), y)
    else:
        assert _close(ours(jnp.moveaxis(x, -1, 0)), jnp.moveaxis(y, -1, 0))


def _lstm_of_haiku():
    """One weight for the input and the state. It adds 1 to the forget gate."""
    how = [adapt.transpose(), adapt.gates("igfo"), adapt.split(1)]
    more = lambda saved, like: ec.lazy(lambda b: b.at[2:4].add(1))(saved)
    return [
        (lambda m: [m.weight_ih, m.weight_hh], "w", how),
        _pair("bias", adapt.gates("igfo"), more, there="b"),
    ]


def _lstm_of_keras():
    return [
        _pair("weight_ih", adapt.transpose(), there="kernel"),
        _pair("weight_hh", adapt.transpose(), there="recurrent_kernel"),
        _pair("bias"),
    ]


def _lstm_of_onnx():
    how = adapt.take(0), adapt.gates("iofg")
    both = lambda saved, like: ec.lazy(lambda b: b[:8] + b[8:])(saved)
    return [
        _pair("weight_ih", *how, there="W"),
        _pair("weight_hh", *how, there="R"),
        _pair("bias", how[0], both, how[1], there="B"),
    ]


def _biases(saved, like):
    """Of `[bias of the input, bias of the state]`: those of two gates are added."""
    join = lambda b: jnp.concatenate([b[0, :4] + b[1, :4], b[0, 4:]])
    return ec.lazy(join)(saved)


def _gru_of_keras():
    order = "zrn", "rzn"
    how = adapt.transpose(), adapt.gates(*order)
    reorder = adapt.gates(*order, axis=1)
    return [
        _pair("weight_ih", *how, there="kernel"),
        _pair("weight_hh", *how, there="recurrent_kernel"),
        _pair("bias", reorder, _biases),
        _pair("bias_n", adapt.take(1), adapt.take(slice(4, 6)), there="bias"),
    ]


def _gru_of_onnx():
    how = adapt.take(0), adapt.gates("zrn", "rzn")
    two = lambda saved, like: ec.lazy(lambda b: b.reshape(2, 6))(saved)
    reorder = adapt.gates("zrn", "rzn", axis=1)
    return [
        _pair("weight_ih", *how, there="W"),
        _pair("weight_hh", *how, there="R"),
        _pair("bias", two, reorder, _biases, there="B"),
        _pair("bias_n", adapt.take(0), adapt.take(slice(10, 12)), there="B"),
    ]


@pytest.mark.parametrize(
    "name, pairs",
    [
        ("haiku.lstm", _lstm_of_haiku()),
        ("keras.lstm", _lstm_of_keras()),
        ("onnx.lstm", _lstm_of_onnx()),
        ("keras.gru", _gru_of_keras()),
        ("onnx.gru", _gru_of_onnx()),
    ],
)
def test_cells_of_peers(tmp_path, name, pairs):
    saved, given, y = _peer(name)
    is_lstm = name.endswith("lstm")
    make = eqx.nn.LSTMCell if is_lstm else eqx.nn.GRUCell
    # Keras and ONNX run over one step.
    x, *states = (z.reshape(-1) for z in given)
    ours = _graft(make(3, 2, key=jr.key(0)), tmp_path, saved, *pairs)
    out = ours(x, tuple(states))[0] if is_lstm else ours(x, states[0])
    assert _close(out, y.reshape(-1))


def test_a_cell_with_gates_of_pytorch_gru(tmp_path):
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    saved = {x: THEIRS[f"gru.{x}"] for x in names}
    both = lambda saved, like: ec.lazy(lambda a, b: _joined(a, b))(*saved)
    ours = _graft(
        eqx.nn.GRUCell(3, 2, key=jr.key(0)),
        tmp_path,
        saved,
        _pair("weight_ih"),
        _pair("weight_hh"),
        (lambda m: m.bias, lambda c: [c.bias_ih, c.bias_hh], both),
        _pair("bias_n", adapt.take(slice(4, 6)), there="bias_hh"),
    )
    x, h = (THEIRS[f"gru.x{i}"] for i in range(2))
    assert _close(ours(x, h), THEIRS["gru.y"])


def _joined(a, b):
    return jnp.concatenate([a[:4] + b[:4], a[4:]])


# ---- BatchNorm, whose statistics are in a State.


def _norm_of_torch():
    own = {x: THEIRS[f"norm.{x}"] for x in ("weight", "bias")}
    own |= {x: THEIRS[f"norm.running_{x}"] for x in ("mean", "var")}
    return own, 1e-5, THEIRS["norm.x0"], THEIRS["norm.y"]


def _norm_of_keras():
    names = dict(gamma="weight", beta="bias", moving_mean="mean", moving_variance="var")
    own = {new: PEERS[f"keras.norm.{x}"] for x, new in names.items()}
    return own, 1e-3, PEERS["keras.norm.x0"], PEERS["keras.norm.y"]


def _norm_of_flax():
    layer = nn.BatchNorm(use_running_average=True)
    x = jr.normal(jr.key(1), (2, 3))
    values = layer.init(jr.key(0), x)
    values = jax.tree.map(lambda p: jr.uniform(jr.key(p.ndim + 2), p.shape), values)
    own = {"weight": values["params"]["scale"], "bias": values["params"]["bias"]}
    return own | values["batch_stats"], 1e-5, x, layer.apply(values, x)


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("peer", [_norm_of_torch, _norm_of_keras, _norm_of_flax])
def test_batch_norms(tmp_path, peer, mode):
    """As docs/batchnorm.md does it; and training goes on from the statistics."""
    saved, eps, x, y = peer()
    ours = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        3, "b", eps, momentum=0.9, mode=mode
    )
    index = "ema_state_index" if mode == "ema" else "batch_state_index"
    flag = "ema_first_time_index" if mode == "ema" else "batch_counter"
    entry = lambda m, name: m[1].get(getattr(m[0], name))
    norm, state = _graft(
        ours,
        tmp_path,
        saved,
        (lambda m: m[0].weight, "weight"),
        (lambda m: m[0].bias, "bias"),
        (lambda m: entry(m, index)[0], "mean"),
        (lambda m: entry(m, index)[1], "var"),
        fresh=lambda m: entry(m, flag),
    )
    value = jnp.array(False) if mode == "ema" else jnp.array(10**6)
    state = state.set(getattr(norm, flag), value)
    run = lambda norm, state: jax.vmap(
        norm, axis_name="b", in_axes=(0, None), out_axes=(0, None)
    )(x, state)
    assert _close(run(eqx.nn.inference_mode(norm), state)[0], y)
    _, state = run(norm, state)
    mean = 0.9 * saved["mean"] + 0.1 * np.mean(x, 0)
    var = 0.9 * saved["var"] + 0.1 * np.var(x, 0)
    after = (x - mean) / np.sqrt(var + eps) * saved["weight"] + saved["bias"]
    assert _close(run(eqx.nn.inference_mode(norm), state)[0], after)


@pytest.mark.parametrize("channels", [(4, 8), (8, 8)])
def test_the_hint_for_a_kernel_of_one_element(tmp_path, channels):
    """The shapes of a square one fit `unit_axes` too, which would swap in and out."""
    ec.tree_serialise_leaves(tmp_path / "a", {"w": np.ones((1, 1, *channels))})
    like = {"w": np.ones((*channels[::-1], 1, 1))}
    with pytest.raises(RuntimeError, match=r"channels_first\(\)"):
        ec.tree_deserialise_leaves(tmp_path / "a", like)
