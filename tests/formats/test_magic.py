"""Files that are not read: each says what it is, and what to do."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile

import numpy as np
import pytest

import eqx_ckpt as ec


def npz(save):
    file = io.BytesIO()
    save(file, a=np.ones(3))
    return file.getvalue()


def zipped(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return file.getvalue()


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("a")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    return file.getvalue()


OLD_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)

FILES = {
    "b.npz": (npz(np.savez_compressed), "is compressed.*ec.nest"),
    "c.npz": (zipped("a.npy", "b.txt"), "a zip with arrays of NumPy"),
    "a.pt": (zipped("archive/data.pkl", "archive/data/0"), "its pickle has"),
    "pytorch_model.bin": (zipped("model/data.pkl"), "its pickle has"),
    "old.pt": (OLD_TORCH, "in the middle of something"),
    "a.pkl": (pickle.dumps({"w": np.ones(3)}), "a pickle"),
    "b.pkl": (pickle.dumps([1, 2], protocol=2), "a pickle"),
    "c.pkl": (pickle.dumps({}, protocol=3), "a pickle"),
    "a.h5": (b"\x89HDF\r\n\x1a\n" + bytes(500), "HDF5"),
    "a.keras": (zipped("config.json", "model.weights.h5"), "Keras"),
    "a.gguf": (b"GGUF\x03\0\0\0" + bytes(500), "GGUF"),
    "a.onnx": (b"\x08\x0a\x12\x07pytorch" + bytes(500), "ONNX"),
    "a.tflite": (b"\x1c\0\0\0TFL3" + bytes(500), "TensorFlow Lite"),
    "a.gz": (gzip.compress(b"a" * 99), "compressed with gzip"),
    "a.bz2": (bz2.compress(b"a" * 99), "compressed with bzip2"),
    "a.xz": (lzma.compress(b"a" * 99), "compressed with xz"),
    "a.zst": (b"\x28\xb5\x2f\xfd" + bytes(99), "compressed with zstd"),
    "a.tar": (tarred(), "an archive of tar"),
    "a.parquet": (b"PAR1" + bytes(99), "Parquet"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "a.pt2": (zipped("archive_format", "models/model.json"), "torch.export"),
    "html": (b"<!DOCTYPE html><html></html>", "HTML"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("file", FILES)
def test_one_sentence_for_each(tmp_path, file):
    data, message = FILES[file]
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ValueError, match=message) as info:
        ec.open(tmp_path / file)
    assert str(tmp_path / file) in str(info.value)
    assert "\n" not in str(info.value)
    with pytest.raises(ValueError):
        ec.tree_deserialise_leaves(tmp_path / file, {"w": 1.0})
    # And what is there is not taken for a checkpoint, to be replaced.
    with pytest.raises((ValueError, FileExistsError)):
        ec.tree_serialise_leaves(tmp_path / file, {"w": 1.0})
    assert (tmp_path / file).read_bytes() == data
    if data:
        with pytest.raises(ValueError, match=message):
            ec.from_bytes(data, {"w": 1.0})


@pytest.mark.parametrize(
    "names, message",
    [
        (["saved_model.pb", "variables"], "a SavedModel of TensorFlow"),
        (["checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"], "TensorFlow"),
        (["config.json", "pytorch_model.bin"], "is no file of PyTorch"),
        (["pytorch_model-00001-of-00002.bin", "a"], "the path of one of them"),
        (["consolidated.00.pth", "params.json"], "the path of one of them"),
        ([".metadata", "__0_0.distcp"], "torch.distributed"),
        (["tf_model.h5", "config.json"], "HDF5"),
    ],
)
def test_directories(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=message):
        ec.open(tmp_path)


@pytest.mark.parametrize("size", [0x0480, 0x0280, 0x088B1F])
def test_the_length_of_a_header_is_no_magic_number(tmp_path, size):
    head = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    data = size.to_bytes(8, "little") + head.encode().ljust(size) + b"\7"
    (tmp_path / "a.safetensors").write_bytes(data)
    assert ec.open(tmp_path / "a.safetensors")["a"].read().tolist() == [7]
