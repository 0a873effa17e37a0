"""`.npy` and `.npz` files, against NumPy."""

import io
import pathlib
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from support.helpers import examples, read_unreadable

import eqx_ckpt as ec


DTYPES = "bool int8 uint8 float16 int32 uint64 float32 float64 complex64".split()


def _bytes_read():
    line = pathlib.Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


def _read(data, **more):
    return {name: x.read() for name, x in ec.open(io.BytesIO(data), **more).items()}


def _file(save, *args, **arrays):
    file = io.BytesIO()
    save(file, *args, **arrays)
    return file.getvalue()


@examples(25)
@given(
    hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, min_side=0)),
    st.booleans(),
    st.data(),
)
def test_any_array(array, is_fortran, data):
    array = np.array(array, order="F" if is_fortran else "C")
    lazy = ec.open(io.BytesIO(_file(np.save, array))).tree
    assert lazy.shape == array.shape and lazy.name == "%root"
    read = np.asarray(lazy.read())
    assert read.dtype == array.dtype and read.tobytes() == array.tobytes()
    picks = data.draw(hnp.basic_indices(array.shape, allow_newaxis=True))
    part = np.asarray(lazy[picks].read())
    assert part.tobytes() == array[picks].tobytes() and part.shape == array[picks].shape
    stored = lazy[picks].store.read().result()
    assert np.asarray(stored).tobytes() == array[picks].tobytes()


def test_arrays_in_the_order_of_fortran_are_read_by_parts(tmp_path):
    array = np.arange(3.0 * 2**20, dtype=np.float32).reshape(1024, 3, 1024)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    lazy = ec.open(tmp_path / "f.npy").tree
    before = _bytes_read()
    assert np.array_equal(lazy.read(), array)
    assert array.nbytes <= _bytes_read() - before < 1.1 * array.nbytes
    assert np.array_equal(lazy[5:900:7, 1, ::-3].read(), array[5:900:7, 1, ::-3])
    ec.convert(tmp_path / "f.npy", tmp_path / "out")
    assert np.array_equal(ec.open(tmp_path / "out").tree.read(), array)
    assert ec.verify(tmp_path / "out") == []
    # What is truncated after it was opened is not read as something else.
    with open(tmp_path / "f.npy", "r+b") as f:
        f.truncate(2**20)
    with pytest.raises(RuntimeError):
        lazy.read()


def test_npz(tmp_path):
    arrays = {
        "layers.0.w": np.ones((2, 3), np.float32),
        "layers.1.w": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "step": np.int64(7),
        "none": np.zeros((0, 2)),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    ckpt = ec.open(tmp_path / "a.npz")
    assert ckpt.layout == "npz" and len(ckpt) == 4
    for name, array in arrays.items():
        assert np.array_equal(ckpt[name].read(), array)
    like = {"layers": [{"w": jnp.zeros((2, 3))}], "step": np.int64(0)}
    loaded = ec.tree_deserialise_leaves(tmp_path / "a.npz", like, unexpected="ignore")
    assert loaded["step"] == 7 and (loaded["layers"][0]["w"] == 1).all()
    ec.convert(tmp_path / "a.npz", tmp_path / "out")
    assert ec.diff(tmp_path / "a.npz", tmp_path / "out").same
    # Nothing of NumPy's is replaced by a save.
    with pytest.raises(FileExistsError):
        ec.tree_serialise_leaves(tmp_path / "a.npz", like)


def test_names_of_paths(tmp_path):
    """As the Vision Transformers of Google have them."""
    np.savez(tmp_path / "a.npz", **{"Transformer/0/kernel": np.ones(2), "b": [1.0]})
    ckpt = ec.open(tmp_path / "a.npz")
    assert set(ckpt.leaves) == {"Transformer.0.kernel", "b"}
    np.savez(tmp_path / "b.npz", **{"a/x": np.ones(2), "b.c": np.zeros(1)})
    assert set(ec.open(tmp_path / "b.npz").leaves) == {"a%2Fx", "b.c"}


@pytest.mark.parametrize(
    "array, match",
    [
        (np.array([{}], object), "of Python's objects"),
        (np.array(["a"]), "of texts"),
        (np.array([b"a"]), "of texts"),
        (np.zeros(1, "M8[s]"), "of dates"),
        (np.ones(2, jnp.bfloat16), "bfloat16"),
        (np.ones(2, ">f4"), "order of other machines"),
        (np.ones(2, np.longdouble), "dtype"),
        (np.zeros(2, [("a", "f4")]), "records with fields"),
    ],
)
def test_what_is_no_array_of_numbers(array, match):
    with pytest.raises(ValueError, match=match):
        ec.open(io.BytesIO(_file(np.save, array)))
    with pytest.raises(ValueError, match=match):
        read_unreadable(io.BytesIO(_file(np.savez, a=np.ones(1), b=array)))


def _header(text):
    head = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head


def _zip(name, data, **more):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, data, **more)
    return file.getvalue()


_FIELDS = "'descr': '<f8', 'fortran_order':"
GOOD = _file(np.save, np.arange(6.0))
BAD = {
    "short": GOOD[:-1],
    "long": GOOD + b"\0",
    "no header": GOOD[:60],
    "huge": _header(f"{{{_FIELDS} False, 'shape': ({2**58},), }}"),
    "huge in Fortran's order": _header(f"{{{_FIELDS} True, 'shape': ({2**50}, 2), }}"),
    "code": _header("{'descr': __import__('os').abort(), 'shape': (), }"),
    "many digits": _header(f"{{{_FIELDS} False, 'shape': ({'1' * 50}x), }}"),
    "no commas": _header(f"{{{_FIELDS} False, 'shape': (1 6), }}"),
    "ranks": _header(f"{{{_FIELDS} False, 'shape': ({'1,' * 33}), }}"),
    "size in a zip": _zip("a.npy", GOOD + bytes(8)),
    "none in a zip": _zip("a.npy", b""),
    "compressed": _zip("a.npy", GOOD, compress_type=zipfile.ZIP_DEFLATED),
    "bomb": _zip("a.npy", bytes(2**20), compress_type=zipfile.ZIP_DEFLATED),
    "other": _zip("a.txt", GOOD),
    "short zip": _zip("a.npy", GOOD)[:-1],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(tmp_path, name):
    suffix = "npz" if BAD[name][:2] == b"PK" else "npy"
    (tmp_path / f"a.{suffix}").write_bytes(BAD[name])
    with pytest.raises(ValueError, match="cannot be read"):
        ec.open(tmp_path / f"a.{suffix}")


def test_several_arrays_in_one_file_are_told():
    file = io.BytesIO()
    np.save(file, np.ones(2))
    np.save(file, np.ones(2))
    with pytest.raises(ValueError, match="more bytes than its array"):
        ec.open(io.BytesIO(file.getvalue()))


def test_versions_of_the_header():
    for version in ((1, 0), (2, 0), (3, 0)):
        file = io.BytesIO()
        np.lib.format.write_array(file, np.arange(3), version=version)
        (read,) = _read(file.getvalue()).values()
        assert read.tolist() == [0, 1, 2]


@pytest.mark.parametrize("order", ["", "=", "|"])
def test_a_header_without_an_order_of_bytes(order):
    """NumPy does not write it, and reads it."""
    fields = f"'descr': '{order}f8', 'fortran_order': False, 'shape': (6,)"
    data = _header(f"{{{fields}, }}") + np.arange(6.0).tobytes()
    assert np.array_equal(np.load(io.BytesIO(data)), np.arange(6.0))
    (read,) = _read(data).values()
    assert np.array_equal(read, np.arange(6.0))


def test_an_archive_of_nothing(tmp_path):
    np.savez(tmp_path / "a.npz")
    ckpt = ec.open(tmp_path / "a.npz")
    assert ckpt.layout == "npz" and not list(ckpt) and "0 leaves" in str(ckpt)
