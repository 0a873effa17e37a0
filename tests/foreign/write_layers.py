"""Writes `layers/torch.npz`: `python write_layers.py`, where PyTorch and transformers
are installed.

Layers with what they make of an input, as PyTorch computes it.
"""

import pathlib

import numpy as np
import torch
from torch import nn
from transformers import GPTJConfig, GPTJModel, GPTNeoXConfig, GPTNeoXModel


HEADS, SIZE, LENGTH = 2, 8, 5


def _convolutions():
    for name, groups in (("convt1", 1), ("convt2", 2)):
        layer = nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1, groups=groups)
        yield name, layer, (torch.randn(1, 4, 3, 3),)
    yield "convt1d", nn.ConvTranspose1d(4, 6, 3, 2, groups=2), (torch.randn(1, 4, 5),)


def _cells():
    x, h, c = torch.randn(1, 3), torch.randn(1, 2), torch.randn(1, 2)
    yield "lstm", nn.LSTMCell(3, 2), (x, (h, c))
    yield "gru", nn.GRUCell(3, 2), (x, h)


def _attentions():
    """Of GPT-NeoX the projection is fused, head by head; of GPT-J the positions turn
    pairs of neighbours."""
    common = dict(attn_implementation="eager")
    neox = GPTNeoXConfig(
        vocab_size=7, hidden_size=SIZE, num_hidden_layers=1, num_attention_heads=HEADS,
        intermediate_size=8, rotary_pct=0.5, **common,
    )  # fmt: skip
    gptj = GPTJConfig(
        vocab_size=7, n_embd=SIZE, n_layer=1, n_head=HEADS, rotary_dim=4, **common
    )
    for name, model in (("neox", GPTNeoXModel(neox)), ("gptj", GPTJModel(gptj))):
        layer = (model.layers if name == "neox" else model.h)[0]
        attention = layer.attention if name == "neox" else layer.attn
        kept = {}

        def keep(module, args, kwargs, out, kept=kept):
            kept["x"] = args[0] if args else kwargs["hidden_states"]
            kept["y"] = out[0]

        attention.register_forward_hook(keep, with_kwargs=True)
        for weight in attention.parameters():
            nn.init.normal_(weight, std=0.5)
        model.eval()(torch.arange(LENGTH)[None])
        yield name, attention, kept


def main():
    torch.manual_seed(0)
    out = {}
    for name, layer, args in (*_convolutions(), *_cells()):
        made = layer(*args)
        out[f"{name}.y"] = made[0]
        inputs = [x for arg in args for x in ([arg] if torch.is_tensor(arg) else arg)]
        out |= {f"{name}.x{i}": x[0] for i, x in enumerate(inputs)}
        out |= {f"{name}.{k}": v for k, v in layer.state_dict().items()}
    for name, layer, kept in _attentions():
        out |= {f"{name}.x0": kept["x"][0], f"{name}.y": kept["y"][0]}
        some = layer.state_dict().items()
        out |= {f"{name}.{k}": v for k, v in some if v.dtype == torch.float32}
    norm, x = nn.BatchNorm1d(3), torch.randn(2, 3)
    for weight in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(weight, 0.5, 2)
    out |= {"norm.x0": x, "norm.y": norm.eval()(x)}
    out |= {f"norm.{k}": v for k, v in norm.state_dict().items()}
    arrays = {x: y.detach().numpy().astype("float32") for x, y in out.items()}
    np.savez(pathlib.Path(__file__).parent / "layers" / "torch.npz", **arrays)


if __name__ == "__main__":
    main()
