"""Tensors of PyTorch as arrays of NumPy. PyTorch is not imported: who has a tensor has
imported it."""

import sys
from typing import Any

import numpy as np

from .._kernel._format import _template


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(tensor: Any) -> np.ndarray:
    """The elements of a tensor, which NumPy shares where it can.

    **Raises:** `TypeError` for one that has none here, or that is of no plain array.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    what = type(tensor).__name__
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"it is a `{what}`, whose parts are in several processes: give "
            "`x.full_tensor()`, which all of them call."
        )
    if tensor.is_quantized or str(tensor.layout) != "torch.strided":
        how = "x.dequantize()" if tensor.is_quantized else "x.to_dense()"
        raise TypeError(f"it is a tensor of another layout: give `{how}`.")
    if tensor.device.type == "meta":
        raise TypeError("it is a tensor on the device `meta`, which has no elements.")
    try:
        dtype = _template.dtype_of(name)
    except (ValueError, TypeError) as e:
        raise TypeError(
            f"it has the dtype `{tensor.dtype}`, which is not read: give `x.float()`."
        ) from e
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    torch = sys.modules["torch"]
    shape = tuple(plain.shape)
    if not plain.numel():
        return np.empty(shape, dtype)
    # NumPy lacks some of the dtypes, and all of it are bytes. A view of one element may
    # have any stride, which PyTorch takes for contiguous, but views as no bytes.
    row = plain.as_strided((plain.numel(),), (1,))
    data = row.view(torch.uint8).numpy()
    return data.view(dtype).reshape(shape)
