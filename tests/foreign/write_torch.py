"""Writes the files in `torch/`: `python write_torch.py`, where PyTorch is installed,
and Lightning and Accelerate.

Beside each stands a `.npz` of its tensors by their dotted names. Those of dtypes that
NumPy lacks are bytes there.
"""

import argparse
import collections
import datetime
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import accelerate
import lightning
import numpy as np
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import swa_utils


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


def odd():
    w = torch.arange(3.0)
    recursive = ([],)
    recursive[0].append(recursive)
    return {
        "w": w,
        "set": {1, 2},
        "frozen": frozenset([3]),
        "buffer": bytearray(b"x"),
        "big": 2**300,
        "keys": {0: w, "0": w + 1, (1, 2): w + 2, 0.5: w + 3, None: w + 4},
        "clash": {"a": {"b": w}, "a.b": w + 1},
        "recursive": recursive,
        "args": argparse.Namespace(lr=1),
        "best": np.float64(0.5),
        "array": np.arange(2),
        "date": datetime.datetime(2026, 1, 1),
        "repeated": torch.ones(1).expand(2**26),
    }


class Module(lightning.LightningModule):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, 1)

    def training_step(self, batch, _):
        return self.net(batch).sum()

    def configure_optimizers(self):
        optimiser = torch.optim.Adam(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1)
        return [optimiser], [schedule]


def write_lightning():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as above:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=False,
            default_root_dir=above,
            enable_progress_bar=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2)))
        trainer.save_checkpoint(here / "lightning.ckpt")
    value = torch.load(here / "lightning.ckpt", weights_only=False)
    save("lightning.ckpt", value)


def write_accelerate():
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimiser = torch.optim.AdamW(model.parameters())
    model, optimiser = accelerator.prepare(model, optimiser)
    accelerator.backward(model(torch.ones(3, 2)).sum())
    optimiser.step()
    accelerator.save_state(here / "accelerate")
    for name in ("optimizer.bin", "random_states_0.pkl"):
        shutil.move(here / "accelerate" / name, here / f"accelerate-{name}")
        value = torch.load(here / f"accelerate-{name}", weights_only=False)
        save(f"accelerate-{name}", value)
    shutil.rmtree(here / "accelerate")


def write_distributed():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as above:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{above}/store", rank=0, world_size=1
        )
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(3, 2)).sum().backward()
        optimiser.step()
        value = {
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "args": argparse.Namespace(lr=0.1),
            "epoch": 3,
            "best": np.float64(0.5),
            "rng": [torch.get_rng_state()[:8].clone(), np.random.PCG64(0).state],
        }
        save("ddp.pt", value)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        torch.save({"w": tensor, "step": 3}, here / "dtensor.pt")
        save("cured/dtensor.pt", {"w": tensor.full_tensor(), "step": 3})
        torch.distributed.destroy_process_group()


def write_average():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    average.update_parameters(model)
    save("ema.pt", {"model": model.state_dict(), "ema": average.state_dict()})


def write_old():
    """In the format of before version 1.6."""
    torch.manual_seed(0)
    value = {**views(), "model": nn.Linear(2, 3).state_dict(), "step": 3}
    value |= {"half": torch.ones(3, dtype=torch.bfloat16), "net": nn.Linear(2, 2)}
    for protocol in (2, 5):
        more = dict(pickle_protocol=protocol, _use_new_zipfile_serialization=False)
        save(f"old-{protocol}.pth", value, **more)


def write_cured():
    """Does to each file what the error about it says."""
    load = lambda name, **more: torch.load(here / name, **more)
    save("cured/module.pt", load("module.pt", weights_only=False).state_dict())
    conjugated = load("conjugated.pt")
    save("cured/conjugated.pt", conjugated.resolve_conj().resolve_neg())
    save("cured/sparse.pt", load("sparse.pt").to_dense())
    x = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    torch.save(x, here / "quantised.pt")
    save("cured/quantised.pt", load("quantised.pt").dequantize())
    save("cured/expanded.pt", {"w": load("expanded.pt")["w"][:4].clone()})
    save("cured/script.pt", torch.jit.load(here / "script.pt").state_dict())
    odd = load("odd-2.pt", weights_only=False)
    array, best = torch.from_numpy(odd["array"]), odd["best"].item()
    save("cured/odd-2.pt", {"array": array, "best": best})
    shutil.rmtree(here / "distcp", ignore_errors=True)
    checkpoint.save({"w": torch.ones(2)}, checkpoint_id=here / "distcp", no_dist=True)
    path = here / "cured" / "distcp.pt"
    program = "-m torch.distributed.checkpoint.format_utils dcp_to_torch".split()
    subprocess.run([sys.executable, *program, here / "distcp", path], check=True)
    save("cured/distcp.pt", torch.load(path))


def main():
    here.mkdir(exist_ok=True)
    (here / "cured").mkdir(exist_ok=True)
    for protocol in (2, 3, 4, 5):
        torch.save(odd(), here / f"odd-{protocol}.pt", pickle_protocol=protocol)
    write_average()
    write_distributed()
    write_lightning()
    write_accelerate()
    save("state.pt", network().state_dict())
    save("dtypes.pth", dtypes())
    save("views.bin", views())
    save("training.pt", training())
    save("protocol.pt", network().state_dict(), pickle_protocol=5)
    save("tensor.pt", torch.arange(6.0).reshape(2, 3))
    write_old()
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
    torch.jit.script(nn.Linear(2, 2)).save(here / "script.pt")
    torch.save({"w": torch.ones(1).expand(2**26)}, here / "expanded.pt")
    write_cured()


if __name__ == "__main__":
    main()
