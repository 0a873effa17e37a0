"""Writes the files in `torch/`: `python write_torch.py`, where PyTorch is installed.

Beside each stands a `.npz` of its tensors by their dotted names. Those of dtypes that
NumPy lacks are bytes there.
"""

import argparse
import collections
import json
import pathlib

import numpy as np
import torch
from torch import nn


here = pathlib.Path(__file__).parent / "torch"

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def _flat(prefix, value, out):
    if isinstance(value, dict):
        for key, item in value.items():
            _flat([*prefix, str(key)], item, out)
    elif isinstance(value, (list, tuple)) and not isinstance(value, str):
        for number, item in enumerate(value):
            _flat([*prefix, str(number)], item, out)
    elif isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype in (*_FLOAT8, torch.bfloat16):
            value = value.contiguous().view(torch.uint8)
        out[".".join(prefix)] = value.numpy()


def save(name, value, **more):
    torch.save(value, here / name, **more)
    out = {}
    _flat([], value, out)
    np.savez(here / f"{name}.npz", **out)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LSTM(8, 3))


def dtypes():
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
    names += " complex64 complex128 uint16 uint32 uint64"
    few = torch.tensor([[0, 1, 1], [1, 0, 1]])
    out = {name: few.to(getattr(torch, name)) for name in names.split()}
    for dtype in _FLOAT8:
        out[str(dtype)[6:]] = few.float().to(dtype)
    return out


def views():
    x = torch.arange(24.0).reshape(2, 3, 4)
    flat = torch.arange(100)
    return {
        "x": x,
        "again": x,
        "part": x[1],
        "transposed": x.permute(2, 0, 1),
        "step": x[:, ::2, 1::2],
        "column": x[:, 1, 2],
        "diagonal": x[0].diagonal(),
        "repeated": torch.tensor([7, 8]).expand(3, 2),
        "windows": flat.unfold(0, 4, 3),
        "offset": flat[90:],
        "scalar": flat[42],
        "one": flat[3:4].reshape(1, 1).t(),
        "empty": flat[:0],
        "none": torch.zeros(0, 3),
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


def training():
    model = network()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out = model[2](torch.relu(model[1](model[0](torch.ones(5, 4)))))[0]
    out.sum().backward()
    optimiser.step()
    defaults = collections.defaultdict(list)
    defaults["losses"] += [0.5, 0.25]
    return {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "rng": torch.get_rng_state()[:16].clone(),
        "epoch": 3,
        "best": 0.125,
        "large": 2**63 + 1,
        "negative": -5,
        "name": "é",
        "bytes": b"\x00\xff",
        "flag": True,
        "complex": 1 - 2j,
        "nothing": None,
        "size": torch.Size([1, 2]),
        "pair": (1, [torch.ones(2), {"deep": torch.zeros(1)}]),
        "set": {3},
        "defaults": defaults,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "parameter": nn.Parameter(torch.ones(2)),
        "buffer": nn.Buffer(torch.ones(2)),
    }


def main():
    here.mkdir(exist_ok=True)
    save("state.pt", network().state_dict())
    save("dtypes.pth", dtypes())
    save("views.bin", views())
    save("training.pt", training())
    save("protocol.pt", network().state_dict(), pickle_protocol=5)
    save("tensor.pt", torch.arange(6.0).reshape(2, 3))
    model = here / "sharded"
    model.mkdir(exist_ok=True)
    state, of = network().state_dict(), {}
    for number in range(2):
        file = f"pytorch_model-0000{number + 1}-of-00002.bin"
        some = dict(list(state.items())[number::2])
        torch.save(some, model / file)
        of |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 0}, "weight_map": of}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    # What is refused.
    torch.save({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, here / "args.pt")
    torch.save(torch.ones(2, dtype=torch.complex64).conj(), here / "conjugated.pt")
    torch.save(torch.ones(3, 3).to_sparse(), here / "sparse.pt")
    torch.save(network(), here / "module.pt")
    legacy = here / "legacy.pt"
    torch.save({"w": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    torch.jit.script(nn.Linear(2, 2)).save(here / "script.pt")
    torch.save({"w": torch.ones(1).expand(2**26)}, here / "expanded.pt")


if __name__ == "__main__":
    main()
