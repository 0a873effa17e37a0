"""Compressed chunks, encoded and decoded one by one, by TensorStore in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts

from .._format import _blosc
from .._format._template import dtype_of, Template
from . import _arrays, _context


_memory = {"driver": "memory"}


def encoder(template: Template) -> Callable[[np.ndarray], bytes]:
    """A function that encodes the bytes of one whole chunk with the codecs of Zarr v3.

    TensorStore's own driver does it: what it wrote, every reader of Zarr reads.
    """
    one = template._replace(shape=template.chunk)
    spec = _arrays.zarr_spec(one, _memory) | {"store_data_equal_to_fill_value": True}
    store = _open(spec, ts.Context())
    values = store.kvstore
    assert values is not None
    key = "/".join(["c", *["0"] * len(template.chunk)])
    dtype = dtype_of(template.stored)

    def encode(data: np.ndarray) -> bytes:
        chunk = data.view(dtype).reshape(template.chunk)
        # When this returns it has been encoded, so that it need not be copied before.
        writing = store.write(chunk, can_reference_source_data_indefinitely=True)
        _context.result(writing)
        encoded = _context.result(values.read(key)).value
        _context.result(values.write(key, None))  # It would stay there.
        return encoded

    return encode


def decoder(template: Template) -> Callable[[Any, np.ndarray], None]:
    """A function that puts a chunk, decoded, into an array: of the shape of a chunk, or
    of its part that is no padding. One thread calls it at a time.

    It raises `ValueError` for what is no such chunk, and allocates nothing for it.
    """
    dtype, full = dtype_of(template.stored), template.full
    unpack = None if template.codec is None else _blosc_unpacker(template)

    def decode(data: Any, into: np.ndarray) -> None:
        if unpack is None:
            whole = np.frombuffer(data, np.uint8)
        elif into.nbytes == full and into.flags.c_contiguous:
            unpack(data, into.reshape(-1).view(np.uint8))
            return
        else:
            whole = np.empty(full, np.uint8)
            unpack(data, whole)
        chunk = whole.view(dtype).reshape(template.chunk)
        into[...] = chunk[tuple(map(slice, into.shape))]

    return decode


def _blosc_unpacker(template: Template) -> Callable[[Any, np.ndarray], None]:
    codec, itemsize = template.codec, template.itemsize
    assert codec is not None
    context = ts.Context()
    # The driver for Zarr v2 copies what Blosc has made once, that for v3 twice.
    store = _open(_bytes(template.full, {"id": "blosc"}), context)

    def unpack(data: Any, into: np.ndarray) -> None:
        _blosc.check_header(data, codec, into.nbytes, itemsize)
        # An array is put there without a copy, in one piece. What is written as a value
        # comes in many, which are joined before they are decoded.
        packed = _open(_bytes(len(data), None), context)
        encoded = np.frombuffer(data, np.uint8)
        writing = packed.write(encoded, can_reference_source_data_indefinitely=True)
        _context.result(writing)
        _context.result(ts.array(into).write(store))

    return unpack


def _bytes(size: int, compressor: dict[str, Any] | None) -> dict[str, Any]:
    """The spec of an array of bytes, in one chunk, which is the same for all sizes."""
    return {
        "driver": "zarr",
        "kvstore": _memory,
        "metadata": {
            "zarr_format": 2,
            "shape": [size],
            "chunks": [size],
            "dtype": "|u1",
            "order": "C",
            "filters": None,
            "fill_value": None,
            "compressor": compressor,
        },
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _open(spec: dict[str, Any], context: ts.Context) -> ts.TensorStore:
    opening = ts.open(
        spec, open=True, create=True, assume_metadata=True, context=context
    )
    return _context.result(opening)
