"""A zoo of files as other libraries really write them, and what becomes of each here.

A program that is run by hand. `make DIR` writes what the libraries of that Python can;
run it in one that has PyTorch and in one that has Orbax. `read DIR` opens all of them
with `eqx_ckpt`, compares each value with what went in, and prints a table. A file that
is refused here is wrong if PyTorch loads it with `weights_only=True`.
"""

import collections
import datetime
import enum
import functools as ft
import importlib.util
import json
import pathlib
import pickle
import random
import sys

import numpy as np


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


def _told(array):
    """Shape and bytes of an array, as JSON."""
    array = np.asarray(array)
    return [list(array.shape), array.tobytes().hex()]


def _loads(torch, file):
    """Whether PyTorch itself loads a file without running it."""
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _random(r, depth=0):
    """A value of some nested containers, of all that a state may have."""
    plain = [
        *(None, True, r.getrandbits(r.choice((3, 40, 900))), -r.getrandbits(70)),
        *(r.random(), "a.b", "0", "\ud800", b"x", bytearray(b"y"), 1j, 2**2100),
    ]
    odd = [np.float32(1), np.arange(2), datetime.date(2026, 1, 1), Colour.RED, len]
    if depth > 3 or r.random() < 0.4:
        return r.choice(odd) if r.random() < 0.1 else r.choice(plain)
    items = [_random(r, depth + 1) for _ in range(r.randrange(4))]
    keys = ["a", "a.b", "b", "0", 0, 1.5, (1, "a"), True, b"k", ""]
    pairs = list(zip(r.sample(keys, len(items)), items))
    made = r.choice(
        [
            *(items, tuple(items), dict(pairs), collections.OrderedDict(pairs)),
            *({1, "a"}, frozenset([2]), collections.Counter("aab")),
            collections.defaultdict(list, pairs),
        ]
    )
    if type(made) is list and r.random() < 0.2:
        made.append((made,))
    return made


def _torch(save, opens):
    import torch
    from torch import nn, optim

    torch.manual_seed(0)

    def raw(tensor):
        t = tensor.detach().resolve_conj().resolve_neg().contiguous()
        shape = list(t.shape)
        t = t.reshape(-1)
        return [shape, bytes(t.view(torch.uint8).numpy()).hex() if t.numel() else ""]

    def put(name, value, suffix="pt", some=None, **more):
        want, seen = {}, lambda key: key.replace(".", "%2E") if "/" in key else key

        def walk(node, path):
            if isinstance(node, torch.Tensor) and node.layout == torch.strided:
                if not node.is_quantized:
                    want[".".join(map(str, path))] = raw(node)
            elif isinstance(node, dict):
                for key, child in node.items():
                    walk(child, [*path, *str(seen(str(key))).split(".")])
            elif isinstance(node, list | tuple):
                for i, child in enumerate(node):
                    walk(child, [*path, i])

        walk(value if some is None else some, [])

        def write(file):
            torch.save(value, file, **more)
            is_old = more.get("_use_new_zipfile_serialization") is False
            if not is_old and _loads(torch, file):
                opens.add(pathlib.Path(file).name)

        save(f"torch-{name}.{suffix}", write, want)

    ints = torch.arange(12).reshape(3, 4)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32"),
        *("int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64"),
        *("complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    ):
        put(f"dtype-{name}", {"w": ints.float().to(getattr(torch, name))})
    x = torch.arange(24.0).reshape(2, 3, 4)
    views = {
        "transposed": x.permute(2, 0, 1),
        "slice": x[:, 1:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "parameter": nn.Parameter(x),
        "channels-last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.ones(3, dtype=torch.complex64).conj(),
        "requires-grad": torch.ones(3, requires_grad=True),
    }
    for name, value in views.items():
        put(f"view-{name}", {"w": value, "step": 1})
    put("view-shared", {"a": x, "b": x[0], "c": x})
    modules = {
        "linear": nn.Linear(3, 4),
        "conv": nn.Conv2d(3, 4, 3),
        "lstm": nn.LSTM(3, 4, 2),
        "batchnorm": nn.BatchNorm1d(4),
        "embedding": nn.Embedding(5, 3),
        "transformer": nn.TransformerEncoderLayer(4, 2, 8),
        "mlp": nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
    }
    for name, module in modules.items():
        put(f"module-{name}", module.state_dict())
    put("module-whole", {"net": nn.Linear(2, 2), "w": x})
    put("module-legacy", {"w": x}, _use_new_zipfile_serialization=False)
    for name, make in {
        "sgd": ft.partial(optim.SGD, lr=0.1, momentum=0.9),
        "adam": optim.Adam,
        "adamw": ft.partial(optim.AdamW, amsgrad=True),
        "rmsprop": optim.RMSprop,
        "adagrad": optim.Adagrad,
        "lbfgs": optim.LBFGS,
    }.items():
        net = nn.Linear(2, 2)
        state = make(net.parameters())
        loss = lambda: net(torch.ones(1, 2)).sum()
        for _ in range(2):
            state.zero_grad()
            loss().backward()
            state.step(loss) if name == "lbfgs" else state.step()
        put(f"optim-{name}", {"opt": state.state_dict(), "net": net.state_dict()})
    sched = optim.lr_scheduler
    for name, make in {
        "step": ft.partial(sched.StepLR, step_size=2),
        "multistep": ft.partial(sched.MultiStepLR, milestones=[2, 5]),
        "cosine": ft.partial(sched.CosineAnnealingLR, T_max=9),
        "onecycle": ft.partial(sched.OneCycleLR, max_lr=1, total_steps=9),
        "exponential": ft.partial(sched.ExponentialLR, gamma=0.9),
    }.items():
        opt = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        put(f"sched-{name}", {"sched": make(opt).state_dict(), "w": x})
    values = {
        "counter": collections.Counter({2: 1, 5: 2}),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, a=[1]),
        "big-int": 2**127 - 1,
        "negative-big": -(2**80),
        "bytearray": bytearray(b"abc"),
        "bytes": b"abc",
        "text": "größe",
        "none": None,
        "set": {1, 2},
        "tuple": (1, 2.0),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "layout": torch.strided,
        "memory-format": torch.channels_last,
        "rng": torch.get_rng_state(),
        "generator": torch.Generator(),
        "numpy-array": np.arange(3),
        "numpy-scalar": np.float64(1.5),
        "numpy-rng": np.random.default_rng(0).bit_generator.state,
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "date": datetime.datetime(2026, 1, 1),
        "enum": Colour.RED,
        "namedtuple": Point(1, 2),
        "path": pathlib.PurePosixPath("a/b"),
        "range": range(3),
        "slice": slice(3),
        "complex": 1 + 2j,
        "function": len,
        "storage": x.untyped_storage(),
    }
    for name, value in values.items():
        put(f"value-{name}", {"epoch": 3, "w": x, "v": value})
    for number in range(400):
        r = random.Random(number)
        value = {"w": x, "v": [_random(r) for _ in range(3)]}
        protocol = 2 + number % 4
        put(f"random-{number}", value, some={"w": x}, pickle_protocol=protocol)
    if importlib.util.find_spec("safetensors"):
        import safetensors.torch as st

        tensors = {
            "a.w": x.contiguous(),
            "f8": torch.ones(3).to(torch.float8_e4m3fn),
            "e8": torch.ones(2).to(torch.float8_e8m0fnu),
            "bf": torch.ones(2, dtype=torch.bfloat16),
            "c": torch.ones(2, dtype=torch.complex64),
        }
        for name, value in tensors.items():
            one = {name: value}
            put_st = ft.partial(st.save_file, one)
            want = {name: raw(value)}
            save(f"safetensors-{name}.safetensors", put_st, want)
        four = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
        four = four.view(torch.float4_e2m1fn_x2)
        put_four = ft.partial(st.save_file, {"w": four})
        save("safetensors-f4.safetensors", put_four, None)
        net = nn.Linear(3, 3)
        save(
            "safetensors-model.safetensors",
            lambda file: st.save_model(net, file),
            {k: raw(v) for k, v in net.state_dict().items()},
        )


def _numpy(save, opens):
    for dtype in ("f2", "f4", "f8", "i1", "i4", "i8", "u2", "u8", "?", "c8", "c16"):
        x = np.arange(6).reshape(2, 3).astype(dtype)
        save(f"numpy-{x.dtype}.npz", ft.partial(_savez, a=x, b=x[0]), _all(a=x, b=x[0]))
    x = np.arange(6.0).reshape(2, 3)
    save(
        "numpy-fortran.npy",
        lambda f: np.save(f, np.asfortranarray(x)),
        _all(**{"%root": x}),
    )
    save("numpy-compressed.npz", lambda f: np.savez_compressed(f, a=x), None)
    odd = {
        "texts": np.array(["a", "b"]),
        "bytes": np.array([b"a"]),
        "objects": np.array([1, None], object),
        "dates": np.array(["2026-01-01"], "M8[D]"),
        "records": np.zeros(2, "i4,f4"),
        "big-endian": x.astype(">f8"),
        "longdouble": x.astype("g"),
    }
    for name, value in odd.items():
        save(f"numpy-{name}.npz", ft.partial(_savez, a=x, v=value), _all(a=x))


def _savez(file, **arrays):
    with open(file, "wb") as opened:
        np.savez(opened, **arrays)


def _all(**arrays):
    return {name: _told(x) for name, x in arrays.items()}


def _orbax(save, opens):
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    trees = {
        "arrays": {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": np.arange(3)},
        "dtypes": {
            "h": jnp.ones(3, jnp.bfloat16),
            "f8": jnp.ones(3, jnp.float8_e4m3fn),
        },
        "scalars": {"step": 3, "lr": 0.5, "w": jnp.ones(2)},
        "lists": {"layers": [jnp.ones(2), jnp.zeros(3)]},
        "texts": {"name": "abc", "w": jnp.ones(2)},
        "empty": {"w": jnp.ones(2), "nothing": {}},
    }
    for name, tree in trees.items():
        want = {
            ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): _told(
                x
            )
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
            if isinstance(x, np.ndarray | jax.Array)
        }

        def put(path, tree=tree):
            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(pathlib.Path(path).absolute(), tree)

        save(f"orbax-{name}", put, want)


def make(directory):
    expected = directory / "expected.json"
    given = json.loads(expected.read_text()) if expected.exists() else [{}, []]
    known, opens = given[0], set(given[1])

    def save(name, write, want):
        if name not in known:
            try:
                write(str(directory / name))
            except (TypeError, AttributeError, RuntimeError) as e:
                print(f"{name} is not written by its own library: {e}"[:200])
                (directory / name).unlink(missing_ok=True)
            else:
                known[name] = want

    for module, some in {"torch": _torch, "orbax": _orbax, "numpy": _numpy}.items():
        if importlib.util.find_spec(module):
            some(save, opens)
    expected.write_text(json.dumps([known, sorted(opens)]))
    print(f"{len(known)} files in {directory}")


def _look(path, want):
    """How a file fares; whether its values are right; and a word."""
    import eqx_ckpt as ec

    try:
        ckpt = ec.open(path)
    except ValueError as e:
        return "refused", True, str(e).split("cannot be read: ")[-1]
    bad, right, why = [], True, ""
    for name, lazy in ckpt.items():
        try:
            value = np.asarray(lazy.read())
        except ValueError as e:
            bad.append(name)
            why = str(e)
            continue
        if name in (want or {}) and _told(value) != want[name]:
            right, why = False, f"`{name}` has other values"
    lacks = [name for name in want or {} if name not in ckpt]
    if lacks:
        right, why = False, f"it lacks {lacks[:3]}"
    known = [name for name in want or {} if name not in bad]
    count = f"{len(ckpt) - len(bad)} of {len(ckpt)} leaves, {len(known)} compared"
    ec.convert(path, path.parent / "out") if not bad else None
    return ("some" if bad else "all"), right, f"{count}. {why}"


def read(directory):
    known, opens = json.loads((directory / "expected.json").read_text())
    counts = collections.Counter()
    for name, want in sorted(known.items()):
        how, right, word = _look(directory / name, want)
        right = right and (how != "refused" or name not in opens)
        counts[how if right else "WRONG"] += 1
        print(f"{name:40} {how if right else 'WRONG':8} {word[:150]}")
    print(f"{len(known)} files:", dict(counts))
    return counts["WRONG"]


if __name__ == "__main__":
    command, path = sys.argv[1:]
    directory = pathlib.Path(path)
    directory.mkdir(exist_ok=True)
    sys.exit({"make": make, "read": read}[command](directory))
