"""What an error about a file of another library says to do, done to that file."""

import bz2
import functools as ft
import gzip
import io
import json
import lzma
import pathlib
import pickle
import re
import tarfile

import equinox as eqx
import jax.random as jr
import numpy as np
import pytest
import safetensors.numpy

import eqx_ckpt as ec


HERE = pathlib.Path(__file__).parents[1] / "foreign"

# What PyTorch has to do: `foreign/write_torch.py` did it, in `cured/`.
IN_TORCH = {
    "module.pt": "`torch.save(model.state_dict(), path)`",
    "conjugated.pt": "`x.resolve_conj().resolve_neg()`",
    "sparse.pt": "`x.to_dense()`",
    "quantised.pt": "`x.dequantize()`",
    "expanded.pt": "`x.clone()`",
    "script.pt": "`torch.save(torch.jit.load(path).state_dict(), path)`",
    "dtensor.pt": "`x.full_tensor()`",
    "odd-2.pt": "`torch.from_numpy(x)` for an array of NumPy, and `x.item()`",
    "distcp": "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch PATH",
}


@pytest.mark.parametrize("name", IN_TORCH)
def test_what_is_done_in_torch(name):
    path = HERE / "torch" / name
    why = ""
    try:
        for lazy in ec.open(path).values():
            try:
                lazy.read()
            except ValueError as e:
                why += str(e)
    except ValueError as e:
        why = str(e)
    assert IN_TORCH[name] in why
    cured = HERE / "torch" / "cured" / f"{path.stem}.pt"
    tree = ec.materialise(ec.open(cured).tree)
    arrays = dict(np.load(f"{cured}.npz"))
    assert arrays
    for key, array in arrays.items():
        got = tree if key == "" else ec.open(cured)[key].read()
        assert np.array_equal(got, array)


# What another library has to do: `foreign/write_others.py` did it, in `cured/`.
READ_ELSEWHERE = {
    "a.h5": "h5py",
    "a.onnx": "`onnx.numpy_helper.to_array(t)` of each of `onnx.load(path).",
    "a.gguf": "`gguf.dequantize(t.data, t.tensor_type)`",
    "tf": "`reader.get_tensor(name)`",
    "saved_model": "`reader.get_tensor(name)`",
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_arrays_that_are_read_elsewhere(name, tmp_path, monkeypatch):
    """`arrays` is a dict of what that library reads: it is saved, and grafted."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(READ_ELSEWHERE[name])) as info:
        ec.open(HERE / "others" / name)
    (nest,) = _found(r"save `(ec.nest\(.*?\))`.*`ec.tree_serialise_leaves`", info)
    assert "give that to `ec.graft`" in str(info.value)
    arrays = dict(np.load(HERE / "others" / "cured" / f"{name}.npz"))
    ec.tree_serialise_leaves("saved", eval(nest, {"ec": ec, "arrays": arrays}))
    rules = [("^(net[.])?kernel.*", "weight"), ("^(net[.])?bias.*", "bias")]
    rules.append(("^weight$", ec.adapters.transpose()))
    drop = (lambda c: c.small) if name == "a.gguf" else None
    pair = (lambda m: m, lambda c: c, ec.rename(rules))
    like = eqx.nn.Linear(3, 4, key=jr.key(0))
    got, _ = ec.graft(like, "saved", [pair], drop=drop)
    assert np.array_equal(got.weight, np.arange(12.0).reshape(3, 4).T)
    assert np.array_equal(got.bias, np.ones(4))


@pytest.mark.parametrize(
    "name, word",
    [
        ("a.zst", "with zstd: unpack it"),
        ("a.7z", "of 7-Zip: unpack it"),
        ("a.pt2", "`torch.save(torch.export.load(path).state_dict, path)`"),
    ],
)
def test_files_that_another_program_unpacks(name, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        ec.open(HERE / "others" / name)
    ckpt = ec.open(HERE / "others" / "cured" / name)
    assert sorted(map(sorted, (x.shape for x in ckpt.values()))) == [[3, 4], [4]]


def test_a_program_that_was_made_of_a_checkpoint():
    """Which is the one to open: here, that of `saved_model`."""
    with pytest.raises(ValueError, match="open the checkpoint that it was made of"):
        ec.open(HERE / "others" / "a.tflite")


def _found(pattern, error):
    found = re.search(pattern, str(error.value))
    assert found is not None, str(error.value)
    return found.groups()


def _tar(data):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("a.safetensors")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _untar(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        file = archive.extractfile("a.safetensors")
        assert file is not None
        return file.read()


@pytest.mark.parametrize(
    "pack, unpack",
    [
        (gzip.compress, gzip.decompress),
        (bz2.compress, bz2.decompress),
        (lzma.compress, lzma.decompress),
        (_tar, _untar),
    ],
)
def test_what_is_packed(tmp_path, pack, unpack):
    path = tmp_path / "a"
    path.write_bytes(pack(safetensors.numpy.save({"w": np.ones(3)})))
    with pytest.raises(ValueError, match="unpack it, and open what was in it"):
        ec.open(path)
    path.write_bytes(unpack(path.read_bytes()))
    assert ec.open(path)["w"].read().tolist() == [1, 1, 1]


def test_what_numpy_and_pickle_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"np": np, "ec": ec}
    np.savez_compressed("a.npz", w=np.ones(3))
    with pytest.raises(ValueError, match="Write it with `np.savez`, or") as info:
        ec.open("a.npz")
    np.savez("b.npz", **np.load("a.npz"))
    assert ec.open("b.npz")["w"].read().tolist() == [1, 1, 1]
    (call,) = re.findall(r"save `(ec.nest\(.*\))`", str(info.value))
    ec.tree_serialise_leaves("saved", eval(call, {**known, "path": "a.npz"}))
    assert ec.open("saved")["w"].read().tolist() == [1, 1, 1]
    np.save("big.npy", np.ones(3, ">f8"))
    with pytest.raises(ValueError, match="with NumPy") as info:
        ec.open("big.npy")
    (call,) = re.findall(r"Save `(x.astype\(.*?\))`", str(info.value))
    np.save("little.npy", eval(call, {"x": np.load("big.npy")}))
    assert ec.open("little.npy").tree.read().tolist() == [1, 1, 1]
    pathlib.Path("a.pkl").write_bytes(pickle.dumps({"w": np.ones(3)}))
    with pytest.raises(ValueError, match="`pickle.load`.*`ec.tree_serialise_leaves`"):
        ec.open("a.pkl")
    with open("a.pkl", "rb") as file:
        ec.tree_serialise_leaves("saved", pickle.load(file))
    assert ec.open("saved")["w"].read().tolist() == [1, 1, 1]


def _put(path, *names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file({"w": np.full(2, len(name))}, path / name)


def _index(path, stem, *files):
    of = {f"w{i}": file for i, file in enumerate(files)}
    (path / f"{stem}.index.json").write_text(json.dumps({"weight_map": of}))
    for name, file in of.items():
        safetensors.numpy.save_file({name: np.ones(2)}, path / file)


def _old_and_new(path):
    _put(path, "model.safetensors")
    _index(path, "model.safetensors", "model-00001-of-00001.safetensors")


def _stale(path):
    """Its shards are gone."""
    _old_and_new(path)
    (path / "model-00001-of-00001.safetensors").unlink()


def _copied(name, to, path):
    (path / to).write_bytes((HERE / "torch" / name).read_bytes())


def _in_torch(path):
    _copied("state.pt", "pytorch_model.bin", path)
    _copied("ema.pt", "adapter_model.bin", path)


SEVERAL = {
    "one file and an index": (_old_and_new, "model.safetensors"),
    "one file and an index of files that are gone": (_stale, "model.safetensors"),
    "two files": (lambda p: _put(p, "a.safetensors", "b.safetensors"), "a.safetensors"),
    "one called model": (
        lambda p: _put(p, "model.safetensors", "model_1.safetensors"),
        "model_1.safetensors",
    ),
    "two indices": (
        lambda p: (
            _index(p, "a.safetensors", "x.safetensors"),
            _index(p, "b.safetensors", "y.safetensors"),
        ),
        "b.safetensors.index.json",
    ),
    "of PyTorch": (_in_torch, "adapter_model.bin"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_two_models_in_one_folder_are_named(tmp_path, name):
    make, one = SEVERAL[name]
    make(tmp_path)
    with pytest.raises(ValueError, match="give the path of one of them") as info:
        ec.open(tmp_path)
    named = _found("such as `(.*)` and `(.*)`: give", info)
    assert one in named and all((tmp_path / x).exists() for x in named)
    assert len(ec.open(tmp_path / one)) > 0


def test_shards_of_nobodys_index_are_no_model(tmp_path):
    _index(tmp_path, "model.safetensors", "model-00001-of-00001.safetensors")
    _put(tmp_path, "model-00007-of-00009.safetensors")
    _put(tmp_path, "consolidated.safetensors")
    assert list(ec.open(tmp_path)) == ["w0"]


def _flax(path):
    from flax import serialization

    for step in (3, 12):
        data = serialization.to_bytes({"w": np.full(2, step)})
        (path / f"checkpoint_{step}").write_bytes(data)


OTHERS = {
    "adapter of PEFT": (ft.partial(_copied, "ema.pt", "adapter_model.bin"), None),
    "run of flax": (_flax, "directory of steps: open one, such as `(checkpoint_12)`"),
    "pipeline": (
        lambda p: (_put(p, "unet/a.safetensors"), (p / "model_index.json").touch()),
        "pipeline of diffusers.* Open one",
    ),
    "of Accelerate": (
        ft.partial(_copied, "accelerate-optimizer.bin", "optimizer.bin"),
        "files of PyTorch.*give the path of one of them",
    ),
    "of flax": (
        lambda p: (p / "flax_model.msgpack").write_bytes(b"\x80"),
        "files of flax: give the path of one of them",
    ),
    "nobody's": (lambda p: (p / "notes.txt").touch(), "What is in it is `notes.txt`"),
    "empty": (lambda p: None, "the directory is empty"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nobodys_folder_is_not_called_ours(tmp_path, name):
    make, why = OTHERS[name]
    make(tmp_path)
    if why is None:
        assert len(ec.open(tmp_path)) > 0
        return
    with pytest.raises((ValueError, FileNotFoundError), match=why) as info:
        ec.open(tmp_path)
    assert "interrupted" not in str(info.value)
    if step := re.search("open one, such as `(.*)`", str(info.value)):
        assert len(ec.open(tmp_path / step[1])) > 0


def test_a_save_of_ours_that_was_interrupted(tmp_path):
    for layout in ("ocdbt", "zarr"):
        path = tmp_path / layout
        ec.tree_serialise_leaves(path, {"w": np.ones(3)}, layout=layout)
        (path / "eqx_ckpt.json").unlink()
        with pytest.raises(FileNotFoundError, match="may have been interrupted there"):
            ec.open(path)


def _sharded(path, metadata=({"format": "pt"}, {"format": "pt"}), names=("a", "b")):
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, name, more in zip(files, names, metadata):
        safetensors.numpy.save_file({name: np.ones(2)}, path / file, more)
    of = dict(zip(names, files))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))


def test_shards_whose_metadata_differ(tmp_path):
    """What they agree on is known; and none of it that one contradicts."""
    _sharded(
        tmp_path, ({"format": "pt", "by": "x", "n": "1"}, {"format": "pt", "n": "2"})
    )
    assert ec.open(tmp_path).metadata == {"format": "pt"}
    _sharded(tmp_path, ({"format": "pt"}, None))
    assert ec.open(tmp_path).metadata is None
    assert list(ec.open(tmp_path)) == ["a", "b"]
    _sharded(tmp_path, ({"eqx_ckpt.state": "{}"}, None))
    with pytest.raises(ValueError, match="differ in `eqx_ckpt.state`"):
        ec.open(tmp_path)


def test_a_tensor_that_two_shards_have(tmp_path):
    _sharded(tmp_path, names=("a", "a"))
    first = "model-00001-of-00002.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2), "b": np.ones(2)}, tmp_path / first)
    text = (tmp_path / "model.safetensors.index.json").read_text()
    text = text.replace("}", f', "b": "{first}"}}', 1)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="both have 'a'") as info:
        ec.open(tmp_path)
    assert "`model-00001-of-00002.safetensors` and `model-00002-of" in str(info.value)


def test_shapes_of_python_2(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }"
    header = header.ljust(117) + b"\n"
    data = np.arange(6, dtype="f4").tobytes()
    path = tmp_path / "a.npy"
    path.write_bytes(
        b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + data
    )
    with pytest.warns(UserWarning, match="Python 2"):
        want = np.load(path)
    assert ec.open(path).tree.read().tolist() == want.tolist()
