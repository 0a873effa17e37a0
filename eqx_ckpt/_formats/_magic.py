"""Files of other libraries that are not read: what each is, and what to do instead."""

import re
from collections.abc import Iterable

from .._zips._probe import Probe
from . import _safetensors


_TORCH = (
    "a directory with files of PyTorch, and none that says which of them is a model, "
    "such as `pytorch_model.bin.index.json`: give the path of one of them"
)
_NPZ = (
    "a zip with arrays of NumPy and other files: unpack it, and save `ec.nest` of a "
    "dict of the arrays with `ec.tree_serialise_leaves`"
)
_NEST = (
    '`ec.nest(arrays, "/")` of a dict of its arrays with `ec.tree_serialise_leaves`, '
    "and give that to `ec.graft`"
)
_HDF5 = f"a file of HDF5, as Keras and h5py write it: read it with `h5py`, save {_NEST}"
_UNPACK = "unpack it, and open what was in it"
_TENSORFLOW = (
    "of TensorFlow: read it there, with `reader = tf.train.load_checkpoint(path)` and "
    f"`reader.get_tensor(name)`, save {_NEST}"
)

# The first bytes of a file, and what it is.
_MAGIC: list[tuple[bytes, str]] = [
    (rb"\x89HDF\r\n\x1a\n", _HDF5),
    (
        rb"GGUF",
        "a file of GGUF, as llama.cpp reads it: open the `.safetensors` that it was "
        "made of; or read it with the package `gguf`, `gguf.dequantize(t.data, "
        "t.tensor_type)` of each of `gguf.GGUFReader(path).tensors`, save "
        "`ec.nest(arrays)` of a dict of these with `ec.tree_serialise_leaves`, and "
        "give that to `ec.graft`",
    ),
    (
        rb"\x80[\x02-\x05]([(}\]c]|\x95(?!(?s:.{8})\x8a\nl\xfc))",
        "a pickle, which may run code as it is read: if you trust it, load it with the "
        "library that wrote it (`torch.load`, `joblib.load`, `pickle.load`), and save "
        "its arrays with `ec.tree_serialise_leaves`",
    ),
    (rb"\x1f\x8b", f"compressed with gzip: {_UNPACK}"),
    (rb"\x28\xb5\x2f\xfd", f"compressed with zstd: {_UNPACK}"),
    (rb"\xfd7zXZ\0", f"compressed with xz: {_UNPACK}"),
    (rb"BZh[1-9]", f"compressed with bzip2: {_UNPACK}"),
    (rb"7z\xbc\xaf\x27\x1c", f"an archive of 7-Zip: {_UNPACK}"),
    (rb"(?s:.{257})ustar", f"an archive of tar: {_UNPACK}"),
    (
        rb"(?s:.{4})TFL3",
        "a model of TensorFlow Lite, which is a program: open the checkpoint that it "
        "was made of",
    ),
    (
        rb"\x08[\x01-\x20][\x12\x3a]",
        "a model of ONNX, which is a program: read it with the package `onnx`, "
        "`onnx.numpy_helper.to_array(t)` of each of `onnx.load(path)."
        f"graph.initializer`, save {_NEST}",
    ),
    (rb"PAR1|ARROW1", "a table of Arrow or Parquet, and no checkpoint"),
    (
        rb"version https://git-lfs",
        "a pointer of Git LFS to a file that is not here: `git lfs pull` fetches it",
    ),
    (
        rb"(?i:\s*<(!doctype )?html)",
        "a page of HTML: what was downloaded is an answer of the server, such as an "
        "error, and not the file",
    ),
]
_patterns = [(re.compile(magic), text) for magic, text in _MAGIC]

# Names in a directory, or in a zip, and what it is.
_NAMES = [
    (r"saved_model\.pb", f"a SavedModel {_TENSORFLOW}"),
    (r".*\.data-\d{5}-of-\d{5}", f"a checkpoint {_TENSORFLOW}"),
    (
        r"model_index\.json",
        "a pipeline of diffusers: its models are in directories of it, which "
        "`model_index.json` names. Open one of them",
    ),
    (r".*\.bin(\.index\.json)?|.*\.(pt|pth|ckpt)", _TORCH),
    (r".*\.msgpack", "a directory with files of flax: give the path of one of them"),
    (
        r".*\.distcp",
        "a checkpoint of `torch.distributed`: make one file of it, `python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch PATH one.pt`, and open "
        "that",
    ),
    (r"tf_model\.h5|.*\.weights\.h5", f"a directory with {_HDF5}"),
]
_MEMBERS = [
    (r"[^/]*\.weights\.h5", f"a zip of Keras, with {_HDF5}"),
    (
        r"(.*/)?archive_format",
        "a program of `torch.export` (`.pt2`): save its tensors alone in PyTorch, "
        "`torch.save(torch.export.load(path).state_dict, path)`",
    ),
    (r".*\.npy", _NPZ),
]


def unread_format(probe: Probe) -> str | None:
    """A known format that is not read, if that is at a path: what it is, and what to do
    with it, as the rest of a sentence."""
    if probe.key is None:
        return _find(_NAMES, probe.names)
    if not probe.head:
        return "empty: what wrote or copied it may not have come to its end"
    if _safetensors.is_safetensors(probe):
        return None  # It begins with a length, which may be any bytes.
    for pattern, text in _patterns:
        if pattern.match(probe.head):
            return text
    return None


def unread_zip(members: Iterable[str]) -> str | None:
    """The text of `unread_format` for a zip of these files."""
    return _find(_MEMBERS, members)


def _find(table: list[tuple[str, str]], names: Iterable[str]) -> str | None:
    """The text of the first pattern that any of these names matches."""
    names = sorted(names)
    for pattern, text in table:
        if any(re.fullmatch(pattern, name) for name in names):
            return text
    return None
