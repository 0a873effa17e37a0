"""Writes `layers/peers.npz`: `python write_peers.py`, where Haiku, Keras, ONNX and
onnxruntime are installed.

Layers with what they make of an input, as each of these computes it.
"""

import os
import pathlib


os.environ["KERAS_BACKEND"] = "jax"

import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import onnx
import onnxruntime
from onnx import helper


rng = np.random.default_rng(0)


def _new(*shape):
    return rng.normal(size=shape).astype("float32")


def haiku():
    """Parameters by their names, the inputs, and what comes out."""
    layers = {
        "linear": (lambda: hk.Linear(3), (_new(1, 3),)),
        "conv": (lambda: hk.Conv2D(6, (3, 2), padding="VALID"), (_new(1, 5, 5, 4),)),
        "convt": (
            lambda: hk.Conv2DTranspose(4, 3, 2, padding="VALID"),
            (_new(1, 3, 3, 4),),
        ),
        "lstm": (lambda: hk.LSTM(2), (_new(1, 3), _new(1, 2), _new(1, 2))),
    }
    for name, (make, given) in layers.items():

        def call(*given, make=make):
            layer = make()
            if len(given) == 1:
                return layer(given[0])
            x, h, c = given
            return layer(x, hk.LSTMState(h, c))[0]

        run = hk.without_apply_rng(hk.transform(call))
        params = run.init(jax.random.key(0), *map(jnp.asarray, given))
        params = jax.tree.map(lambda x: _new(*x.shape), params)
        (some,) = params.values()
        yield f"haiku.{name}", some, given, run.apply(params, *map(jnp.asarray, given))


def of_keras():
    layers = {
        "dense": (keras.layers.Dense(3), _new(1, 3)),
        "conv": (keras.layers.Conv2D(6, (3, 2)), _new(1, 5, 5, 4)),
        "convt": (keras.layers.Conv2DTranspose(4, 3, 2), _new(1, 3, 3, 4)),
        "lstm": (keras.layers.LSTM(2), _new(1, 1, 3)),
        "gru": (keras.layers.GRU(2), _new(1, 1, 3)),
        "norm": (keras.layers.BatchNormalization(), _new(2, 3)),
    }
    for name, (layer, x) in layers.items():
        layer.build(x.shape)
        layer.set_weights([abs(_new(*w.shape)) for w in layer.get_weights()])
        states = [_new(1, 2) for _ in range({"lstm": 2, "gru": 1}.get(name, 0))]
        y = layer(x, initial_state=states) if states else layer(x)
        names = [w.path.rpartition("/")[2] for w in layer.weights]
        yield f"keras.{name}", dict(zip(names, layer.get_weights())), (x, *states), y


def of_onnx():
    cells = {"lstm": ("LSTM", 4, {}), "gru": ("GRU", 3, {"linear_before_reset": 1})}
    for name, (op, gates, more) in cells.items():
        weights = {
            "W": _new(1, 2 * gates, 3),
            "R": _new(1, 2 * gates, 2),
            "B": _new(1, 4 * gates),
        }
        x, states = _new(1, 1, 3), [_new(1, 1, 2) for _ in range(gates - 2)]
        if op == "GRU":
            states = states[:1]
        inputs = {"X": x, "h": states[0]} | ({"c": states[1]} if op == "LSTM" else {})
        given = ["X", "W", "R", "B", "", "h", *["c"] * (op == "LSTM")]
        node = helper.make_node(op, given, ["", "y"], hidden_size=2, **more)
        yield f"onnx.{name}", weights, (x, *states), _run(node, weights, inputs)
    weights, x = {"W": _new(4, 4, 3, 3), "B": _new(4)}, _new(1, 4, 3, 3)
    node = helper.make_node("ConvTranspose", ["X", "W", "B"], ["y"], strides=[2, 2])
    yield "onnx.convt", weights, (x,), _run(node, weights, {"X": x})


def _run(node, weights, inputs):
    value = lambda name, shape: helper.make_tensor_value_info(
        name, onnx.TensorProto.FLOAT, shape
    )
    graph = helper.make_graph(
        [node],
        "layer",
        [value(x, y.shape) for x, y in inputs.items()],
        [value("y", None)],
        [onnx.numpy_helper.from_array(y, x) for x, y in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, inputs)[0]


def main():
    out = {}
    for some in (haiku(), of_keras(), of_onnx()):
        for name, weights, given, y in some:
            out |= {f"{name}.{x}": w for x, w in weights.items()}
            out |= {f"{name}.x{i}": x for i, x in enumerate(given)}
            out[f"{name}.y"] = y
    arrays = {x: np.asarray(y, "float32") for x, y in out.items()}
    np.savez(pathlib.Path(__file__).parent / "layers" / "peers.npz", **arrays)


if __name__ == "__main__":
    main()
