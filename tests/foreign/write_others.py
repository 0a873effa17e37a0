"""Writes the files in `others/`, which are not read here, and does to each what the
error about it says, into `others/cured/`: `python write_others.py NAME...`, in a Python
with the libraries of these names, and with `eqx_ckpt`'s own.

What goes in is in `others/arrays.npz`, but for what a library makes up itself.
"""

import pathlib
import shutil
import sys

import numpy as np


here = pathlib.Path(__file__).parent / "others"
cured = here / "cured"
ARRAYS = {
    "net/kernel": np.arange(12.0, dtype="float32").reshape(3, 4),
    "net/bias": np.ones(4, "float32"),
}


def put(name, arrays):
    """The arrays of a file, as the library that reads it has given them."""
    np.savez(cured / f"{name}.npz", **{x: np.asarray(y) for x, y in arrays.items()})


def h5py():
    import h5py

    with h5py.File(here / "a.h5", "w") as file:
        for name, x in ARRAYS.items():
            file[name] = x
    with h5py.File(here / "a.h5") as file:
        put("a.h5", {name: file[name][()] for name in ARRAYS})


def onnx():
    import onnx
    from onnx import helper, numpy_helper

    tensors = [numpy_helper.from_array(x, name) for name, x in ARRAYS.items()]
    graph = helper.make_graph([], "net", [], [], tensors)
    onnx.save(helper.make_model(graph, producer_name="pytorch"), here / "a.onnx")
    graph = onnx.load(here / "a.onnx").graph
    put("a.onnx", {t.name: numpy_helper.to_array(t) for t in graph.initializer})


def gguf():
    import gguf

    writer = gguf.GGUFWriter(here / "a.gguf", "llama")
    for name, x in ARRAYS.items():
        writer.add_tensor(name.replace("/", "."), x)
    wide = np.linspace(-1, 1, 64, dtype="float32").reshape(2, 32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("small.weight", gguf.quantize(wide, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = gguf.GGUFReader(here / "a.gguf").tensors
    put("a.gguf", {t.name: gguf.dequantize(t.data, t.tensor_type) for t in tensors})


def zstandard():
    import zstandard

    data = (here / "a.safetensors").read_bytes()
    (here / "a.zst").write_bytes(zstandard.compress(data))
    (cured / "a.zst").write_bytes(zstandard.decompress((here / "a.zst").read_bytes()))


def py7zr():
    import py7zr

    with py7zr.SevenZipFile(here / "a.7z", "w") as archive:
        archive.write(here / "a.safetensors", "a.safetensors")
    with py7zr.SevenZipFile(here / "a.7z") as archive:
        archive.extract(cured, ["a.safetensors"])
    (cured / "a.safetensors").rename(cured / "a.7z")


def torch():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.net(x)

    torch.manual_seed(0)
    program = torch.export.export(Net(), (torch.ones(1, 3),))
    torch.export.save(program, here / "a.pt2")
    path = here / "a.pt2"
    torch.save(torch.export.load(path).state_dict, cured / "a.pt2")


def tensorflow():
    import tensorflow as tf

    net = tf.Module()
    net.kernel, net.bias = (tf.Variable(x) for x in ARRAYS.values())
    path = here / "tf"
    shutil.rmtree(path, ignore_errors=True)
    tf.train.Checkpoint(net=net).write(str(path / "ckpt"))
    reader = tf.train.load_checkpoint(str(path / "ckpt"))
    shapes = reader.get_variable_to_shape_map()
    names = [x for x in shapes if x.endswith("VARIABLE_VALUE")]
    put("tf", {x: reader.get_tensor(x) for x in names})
    shutil.rmtree(here / "saved_model", ignore_errors=True)
    net.call = tf.function(
        lambda x: x @ net.kernel + net.bias, [tf.TensorSpec([1, 3], tf.float32)]
    )
    tf.saved_model.save(net, str(here / "saved_model"))
    reader = tf.train.load_checkpoint(str(here / "saved_model/variables/variables"))
    shapes = reader.get_variable_to_shape_map()
    names = [x for x in shapes if x.endswith("VARIABLE_VALUE")]
    put("saved_model", {x: reader.get_tensor(x) for x in names})
    model = tf.lite.TFLiteConverter.from_saved_model(
        str(here / "saved_model")
    ).convert()
    (here / "a.tflite").write_bytes(model)
    shutil.rmtree(here / "saved_model" / "assets", ignore_errors=True)


def main():
    import safetensors.numpy

    cured.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(ARRAYS, here / "a.safetensors")
    for name in sys.argv[1:]:
        globals()[name]()


if __name__ == "__main__":
    main()
