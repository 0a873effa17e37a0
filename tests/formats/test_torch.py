"""PyTorch's files, which PyTorch has written: see `foreign/write_torch.py`."""

import io
import json
import pathlib
import pickle
import re
import shutil
import urllib.parse
import zipfile

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from attacks import pickles
from attacks.pickles import PICKLES
from support import audits, inside, servers
from support.command import main
from support.helpers import run_program

import eqx_ckpt as ec


HERE = pathlib.Path(__file__).parents[1] / "foreign" / "torch"
FILES = "state.pt dtypes.pth views.bin training.pt protocol.pt".split()
OLD = ["old-2.pth", "old-5.pth"]


def _expected(name):
    return dict(np.load(HERE / f"{name}.npz"))


def _same(read, array):
    read = np.asarray(read)
    if read.dtype != array.dtype:
        read = np.ascontiguousarray(read).view(np.uint8)  # NumPy lacks the dtype.
        read = read.reshape(array.shape)
    return read.dtype == array.dtype and np.array_equal(read, array)


@pytest.mark.parametrize("name", FILES + OLD)
def test_every_tensor_is_what_torch_wrote(name):
    ckpt = ec.open(HERE / name)
    arrays = _expected(name)
    assert ckpt.layout == "torch" and arrays
    for key, array in arrays.items():
        assert _same(ckpt[key].read(), array), key


TRAINING = "ema.pt ddp.pt lightning.ckpt accelerate-optimizer.bin".split()
TRAINING.append("accelerate-random_states_0.pkl")


@pytest.mark.parametrize("name", TRAINING)
def test_files_of_training_loops(name):
    """Of averaged weights, of `DistributedDataParallel`, Lightning and Accelerate."""
    ckpt = ec.open(HERE / name)
    arrays, names = _expected(name), {urllib.parse.unquote(x): x for x in ckpt}
    assert arrays
    for key, array in arrays.items():
        assert _same(ckpt[names[key]].read(), array), key
    unreadable = [x for x in ckpt if "(unreadable)" in repr(ckpt[x])]
    of_numpy = ["numpy_random_seed.1"] if "random" in name else []
    assert unreadable == (["args", "best"] if name == "ddp.pt" else of_numpy)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_odd_values_refuse_no_file(protocol):
    ckpt = ec.open(HERE / f"odd-{protocol}.pt")
    values, why = {}, {}
    for name, lazy in ckpt.items():
        try:
            values[urllib.parse.unquote(name)] = np.asarray(lazy.read()).tolist()
        except ValueError as e:
            why[name] = str(e)
    w = np.arange(3.0)
    sums = {"w": 0, "keys.0": 0, "keys.'0'": 1, "keys.(1, 2)": 2, "keys.0.5": 3}
    sums |= {"keys.None": 4, "clash.a.b": 0, "clash.a/b": 1}
    tensors = {name: (w + x).tolist() for name, x in sums.items()}
    assert ckpt.tree["clash"]["a.b"].read().tolist() == tensors.pop("clash.a/b")
    values["clash.a.b"] = ckpt.tree["clash"]["a"]["b"].read().tolist()
    plain = {"set.0": 1, "set.1": 2, "frozen.0": 3, "buffer": b"x", "big": 2**300}
    assert values == tensors | plain
    cures = {
        "recursive.0.0": "in itself",
        "args": "argparse.Namespace",
        "best": r"x.item\(\)",
        "array": r"torch.from_numpy\(x\)",
        "date": "datetime.datetime",
        "repeated": r"x.clone\(\)",
    }
    assert why.keys() == cures.keys()
    assert all(re.search(cures[name], text) for name, text in why.items())


def test_a_tensor_of_many_processes():
    ckpt = ec.open(HERE / "dtensor.pt")
    assert ckpt["step"].read() == 3
    with pytest.raises(ValueError, match=r"DTensor.*`x.full_tensor\(\)`"):
        ckpt["w"].read()


@pytest.mark.parametrize("name", OLD)
def test_files_of_before_version_1_6(name, tmp_path):
    """Pickles with the storages after them: whole, lazily, and as one of several."""
    ckpt = ec.open(HERE / name)
    assert ckpt["step"].read() == 3 and ckpt["half"].dtype.name == "bfloat16"
    with pytest.raises(ValueError, match=r"`torch.nn.modules.linear.Linear`"):
        ckpt["net"].read()
    x = _expected(name)["x"]
    assert np.array_equal(ckpt["x"][1:, ::2].T.read(), x[1:, ::2].T)
    index = {"weight_map": {key: name for key in ckpt.tree.keys()}}
    shutil.copy(HERE / name, tmp_path / name)
    (tmp_path / "a.bin.index.json").write_text(json.dumps(index))
    assert set(ec.open(tmp_path / "a.bin.index.json")) == set(ckpt)
    ec.convert(HERE / name, tmp_path / "all", skip=["net"])
    assert ec.verify(tmp_path / "all") == []
    assert np.array_equal(ec.open(tmp_path / "all")["windows"], ckpt["windows"])


def test_old_files_that_are_not_whole(tmp_path):
    """Each is refused when it is opened, wherever it was cut, and whatever is more."""
    data = (HERE / OLD[0]).read_bytes()
    for made in [*(data[:n] for n in range(30, len(data), 97)), data + b"x"]:
        (tmp_path / "a.pth").write_bytes(made)
        with pytest.raises(ValueError, match="is missing|in the middle|by what its"):
            ec.open(tmp_path / "a.pth")
    for old, new, match in [
        (b"M\xe9\x03", b"M\xea\x03", "protocol is not 1001"),
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "other machines"),
    ]:
        assert old in data
        (tmp_path / "a.pth").write_bytes(data.replace(old, new, 1))
        with pytest.raises(ValueError, match=match):
            ec.open(tmp_path / "a.pth")


def test_an_old_file_whose_protocol_is_a_bomb(tmp_path):
    """Of lists in each other, which would be shown forever."""
    parts = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickles.bomb(60)
    (tmp_path / "a.pth").write_bytes(b"".join(parts) + pickle.dumps({}, 2))
    with pytest.raises(ValueError, match="protocol is not 1001"):
        ec.open(tmp_path / "a.pth")


def test_an_old_file_with_many_tensors(tmp_path):
    """Whose pickles are longer than what is read of a file at first."""
    (tmp_path / "a.pth").write_bytes(pickles.old(4000))
    ckpt = ec.open(tmp_path / "a.pth")
    assert len(ckpt) == 4000 and ckpt["3999"].read().tolist() == [3999.0] * 4


def test_a_base_of_a_tensor_that_repeats_elements(tmp_path):
    """At the end of its file, with fewer bytes there than it has."""
    path = tmp_path / "a.pth"
    path.write_bytes(pickles.old(2, (1000,), (0,)))
    assert ec.open(path)["1"].read().tolist() == [1.0] * 1000
    ec.tree_serialise_leaves(tmp_path / "c", {"w": 1.0}, base=path)
    ec.open(tmp_path / "c").check_base(path)


def test_dtypes():
    for name, leaf in ec.open(HERE / "dtypes.pth").leaves.items():
        assert leaf.dtype.name == name


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_elements_that_lie_apart_are_of_any_dtype(tmp_path, dtype):
    """NumPy has no name for some of these."""
    dtype = jnp.dtype(dtype)
    stored = np.arange(16).astype(dtype)
    of = pickles.storage(count=stored.nbytes, kind="UntypedStorage")
    items = [of, pickles.integer(1), *map(pickles.integers, ((2, 3), (1, 4)))]
    items += [b"\x89", pickles.name("collections", "OrderedDict") + b")R"]
    items += [pickles.name("torch", dtype.name)]
    entry = pickles.name("torch._utils", "_rebuild_tensor_v3")
    state = pickles.state(w=entry + b"(" + b"".join(items) + b"tR")
    pickles.write(tmp_path / "a.pt", state, {"0": stored.tobytes()})
    lazy, x = ec.open(tmp_path / "a.pt")["w"], stored[1:13].reshape(3, 4)[:, :2].T
    assert _same(lazy.read(), x) and _same(lazy[::-1, 1:].read(), x[::-1, 1:])


def test_views_are_read_lazily_and_sliced():
    ckpt = ec.open(HERE / "views.bin")
    arrays = _expected("views.bin")
    for name, array in arrays.items():
        lazy = ckpt[name]
        part = (slice(1, None), ...) if array.ndim else ()
        assert np.array_equal(lazy[part].read(), array[part])
        if array.ndim:
            assert np.array_equal(lazy.T[::-1].read(), array.T[::-1])
        assert np.array_equal(lazy.store.read().result(), array), name
    again = pickle.loads(pickle.dumps(ckpt["step"]))
    assert np.array_equal(again.read(), arrays["step"])


def test_a_tensor_that_is_in_two_places_is_an_alias():
    index = ec.open(HERE / "views.bin")._source.index
    assert {index.leaves.names[i] for i in index.leaves.aliases} == {"again"}


def test_values_of_a_training_run():
    tree = ec.materialise(ec.open(HERE / "training.pt").tree)
    assert (tree["epoch"], tree["best"], tree["name"]) == (3, 0.125, "é")
    assert tree["large"] == 2**63 + 1 and tree["negative"] == -5
    assert tree["bytes"] == b"\0\xff" and tree["flag"] is True
    assert tree["complex"] == 1 - 2j and tree["size"] == [1, 2] and tree["set"] == [3]
    assert tree["defaults"]["losses"] == [0.5, 0.25]
    assert (tree["dtype"], tree["device"]) == ("torch.bfloat16", "cpu")
    assert "nothing" not in tree
    group = tree["optimiser"]["param_groups"][0]
    assert group["lr"] == 1e-3 and group["betas"] == [0.9, 0.999]
    assert group["params"] == list(range(8))
    assert tree["pair"][1][1]["deep"].tolist() == [0]


def test_loads_grafts_converts_and_lists(tmp_path, capsys):
    path = HERE / "training.pt"
    arrays = _expected("training.pt")
    like = eqx.nn.Linear(4, 8, key=jnp.zeros(2, jnp.uint32))
    out = ec.tree_deserialise_leaves(path, like, source="model.0")
    assert np.array_equal(out.weight, arrays["model.0.weight"])
    for name in FILES:
        ec.convert(HERE / name, tmp_path / name)
        assert ec.verify(tmp_path / name) == []
        assert ec.diff(HERE / name, tmp_path / name).same
    assert not main(["ls", str(path)])
    assert "exp_avg_sq" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no digests"):
        ec.verify(path)
    shutil.copy(path, tmp_path / "copy.pt")
    with pytest.raises(FileExistsError):
        ec.tree_serialise_leaves(tmp_path / "copy.pt", {"a": 1})


def test_one_tensor():
    assert ec.open(HERE / "tensor.pt").tree.read().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_several_files_with_an_index(tmp_path):
    expected = _expected("state.pt")
    index = "pytorch_model.bin.index.json"
    for path in (HERE / "sharded", HERE / "sharded" / index):
        ckpt = ec.open(path)
        assert set(ckpt.leaves) == set(expected)
        assert all(_same(ckpt[name].read(), x) for name, x in expected.items())
    (tmp_path / "model").mkdir()
    shutil.copy(HERE / "state.pt", tmp_path / "model" / "pytorch_model.bin")
    assert set(ec.open(tmp_path / "model").leaves) == set(expected)
    for alter, match in [
        (lambda of: of.pop("0.bias"), "do not agree"),
        (lambda of: of.update(more=next(iter(of.values()))), "do not agree"),
        (lambda of: of.update({"0.bias": "../state.pt"}), "no file beside it"),
        (lambda of: of.update({"0.bias": "gone.bin"}), "is missing"),
        (lambda of: of.update({"0.bias": index}), "no file of PyTorch"),
        (lambda of: of.update({"0.bias": 1}), "no `weight_map`"),
    ]:
        copy = tmp_path / "copy"
        shutil.copytree(HERE / "sharded", copy)
        value = json.loads((copy / index).read_text())
        alter(value["weight_map"])
        (copy / index).write_text(json.dumps(value))
        with pytest.raises(ValueError, match=match):
            ec.open(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    "name, match",
    [
        ("module.pt", "Sequential`, which is no tensor"),
        ("conjugated.pt", "resolve_conj"),
        ("sparse.pt", "sparse.*to_dense"),
        ("expanded.pt", "clone"),
        ("script.pt", "TorchScript.*state_dict"),
    ],
)
def test_what_is_not_read(name, match):
    with pytest.raises(ValueError, match=match) as info:
        ec.open(HERE / name)
    assert "\n" not in str(info.value)


@pytest.fixture
def calls():
    """What the interpreter's process imports and runs meanwhile."""
    seen = []

    def hook(event, args):
        if event in (
            "import",
            "exec",
            "os.system",
            "subprocess.Popen",
            "marshal.loads",
        ):
            seen.append((event, args))

    with audits.heard(hook):
        yield seen


@pytest.mark.parametrize("name", PICKLES)
def test_attacks_are_refused(tmp_path, name, calls):
    pickles.write(tmp_path / "a.pt", PICKLES[name])
    with pytest.raises(ValueError) as info:
        ec.open(tmp_path / "a.pt")
    assert len(str(info.value)) < 1000 and "\n" not in str(info.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
    assert not calls


def test_the_attacks_are_made_of_good_parts(tmp_path):
    """Only what each attack changes is wrong with it."""
    pickle = pickles.state(w=pickles.tensor((2, 3), (1, 2), 4), n=pickles.integer(5))
    pickles.write(tmp_path / "a.pt", pickle)
    tree = ec.materialise(ec.open(tmp_path / "a.pt").tree)
    assert tree["w"].shape == (2, 3) and tree["n"] == 5


def test_a_layout_is_a_text(tmp_path):
    """As a dtype is: it says nothing of a tensor."""
    call = pickles.name("torch.serialization", "_get_layout")
    layout = call + b"(" + pickles.text("torch.strided") + b"tR"
    pickles.write(tmp_path / "a.pt", pickles.state(w=pickles.tensor(), layout=layout))
    assert ec.open(tmp_path / "a.pt")["layout"].read() == "torch.strided"


@pytest.mark.parametrize("name", ["Größe", "a\\x41", "\\"])
def test_an_unknown_class_may_have_any_letters(tmp_path, name):
    odd = pickles.name("modül", name)
    pickles.write(tmp_path / "a.pt", pickles.state(w=pickles.tensor(), odd=odd))
    ckpt = ec.open(tmp_path / "a.pt")
    assert ckpt["w"].read().shape == (4,)
    with pytest.raises(ValueError, match="is an object of `mod.l[.]"):
        ckpt["odd"].read()


def test_nothing_that_a_pickle_can_name_is_code_of_others():
    """All that is called is in the module that makes tensors."""
    module, calls = inside.called_by_pickles()
    assert len(calls) > 20
    assert all(call is None or call.__module__ == module for call in calls)
    files = inside.files_that_unpickle()
    source = "".join(pathlib.Path(file).read_text() for file in files)
    words = "import pickle\n", "eval(", "exec(", "getattr(", "__import__", "importlib"
    assert not [word for word in words if word in source]


def test_files_of_torch_over_http():
    """The places of storages follow from the list of files: no header is read."""
    arrays = _expected("state.pt")
    with servers.static(HERE) as port, servers.Proxy(port) as proxy:
        ckpt = ec.open(f"{proxy.url}/state.pt")
        assert len(proxy.requests) <= 14
        for name, array in arrays.items():
            assert _same(ckpt[name].read(), array)
        sharded = ec.open(f"{proxy.url}/sharded/pytorch_model.bin.index.json")
        assert all(_same(sharded[name].read(), x) for name, x in arrays.items())


def _zip(members, **more):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            archive.writestr(name, data, **more)
    return file.getvalue()


GOOD = pickles.state(w=pickles.tensor((16,)))
ZIPS = {
    "compressed": (
        _zip([("a/data.pkl", GOOD), ("a/data/0", bytes(64))], compress_type=8),
        "compressed or encrypted",
    ),
    "big-endian": (
        _zip([("a/data.pkl", GOOD), ("a/data/0", bytes(64)), ("a/byteorder", b"big")]),
        "in the order",
    ),
    "two pickles": (_zip([("a/data.pkl", GOOD), ("b/data.pkl", GOOD)]), "with no"),
    "no storage": (_zip([("a/data.pkl", GOOD)]), "is missing in it"),
    "huge pickle": (
        _zip([("a/data.pkl", bytes(33 * 2**20)), ("a/data/0", bytes(64))]),
        "has 34603008 bytes",
    ),
}


@pytest.mark.parametrize("name", ZIPS)
def test_zips_that_are_refused(tmp_path, name):
    data, match = ZIPS[name]
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        ec.open(tmp_path / "a.pt")


def test_storages_that_overlap_are_refused(tmp_path):
    """Of two names, the place of one is set to that of the other."""
    pickle = pickles.state(
        a=pickles.tensor(), b=pickles.tensor(of=pickles.storage("1"))
    )
    data = bytearray(pickles.archive(pickle, {"0": bytes(64), "1": bytes(64)}))
    rows = [i for i in range(len(data)) if data[i : i + 4] == b"PK\1\2"]
    data[rows[2] + 42 : rows[2] + 46] = data[rows[1] + 42 : rows[1] + 46]
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(ValueError, match="lie at one place"):
        ec.open(tmp_path / "a.pt")


def test_every_truncation_and_many_changed_bytes(tmp_path):
    """One error, or what is there: nothing else is raised, and nothing is called."""
    data = (HERE / "views.bin").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "a.pt"
    cases = [data[:size] for size in range(0, len(data), len(data) // 20)]
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            changed[rng.integers(len(data))] = rng.integers(256)
        cases.append(bytes(changed))
    for case in cases:
        path.write_bytes(case)
        try:
            for leaf in ec.open(path).leaves.values():
                leaf.read()
        except (ValueError, RuntimeError):
            pass


def test_torch_is_not_imported(tmp_path):
    run_program("read_torch_without_torch", HERE / "training.pt")
