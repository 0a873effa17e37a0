"""`info`, `ls`, `cat`, `stats`, `diff` and `suggest`."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt as ec


def test_info(ckpt, run, asked):
    code, out, err = run("info", ckpt)
    assert (code, err) == (0, "")
    opened = ec.open(ckpt)
    for text in (str(ckpt), opened.save_id, "layout ocdbt", "width: 64", '{"a": 1}'):
        assert text in out
    data = asked("info", ckpt)
    files = [file for file in ckpt.rglob("*") if file.is_file()]
    assert data["files"]["count"] == len(files)
    assert data["files"]["nbytes"] == sum(file.stat().st_size for file in files)
    assert data["nbytes"] == opened.nbytes and data["leaves"] == len(opened)
    assert data["metadata"] == opened.metadata and data["writer"] == opened.writer
    assert data["numbers"] == {"float32": sum(x.size for x in _arrays(opened))}
    assert data["tops"]["key"] == {"leaves": 1, "nbytes": 8}


def _arrays(ckpt):
    return [np.asarray(ckpt[name]) for name in ckpt if name.startswith("model")]


def test_info_of_one_file_and_of_other_formats(tmp_path, run, asked):
    tree = {"a": jnp.ones(3), "b": jnp.zeros((2, 2))}
    ec.tree_serialise_leaves(tmp_path / "a.zip", tree)
    ec.export_safetensors(tmp_path / "a.safetensors", tree)
    for name, format in (("a.zip", "eqx_ckpt"), ("a.safetensors", "safetensors")):
        data = asked("info", tmp_path / name)
        assert data["format"] == format and data["numbers"] == {"float32": 7}
        size = (tmp_path / name).stat().st_size
        assert data["files"] == {"count": 1, "nbytes": size, "own": size}
    ec.tree_serialise_leaves("memory://info", tree)
    data = asked("info", "memory://info")
    assert data["files"] is None and data["leaves"] == 2
    assert "on disk" not in run("info", "memory://info")[1]


def test_ls(ckpt, run, asked):
    out = run("ls", ckpt)[1]
    assert out.splitlines()[0] == f"{ckpt}  11 leaves, 33.8 KiB"
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "{1..2}" in lines and "weight f32[64,64] 16.0 KiB" in lines
    assert "in_features = 64, out_features = 64, use_bias = True" in lines
    assert "use_bias" not in run("ls", ckpt, "--no-static")[1]
    names = [x["name"] for x in asked("ls", ckpt)["leaves"]]
    assert names == list(ec.open(ckpt))
    (leaf,) = asked("ls", ckpt, "model.layers.1.weight")["leaves"]
    assert leaf == {
        "name": "model.layers.1.weight",
        "kind": "jax",
        "dtype": "float32",
        "shape": [64, 64],
        "nbytes": 16384,
    }


def test_ls_selects_and_adds_up(ckpt, run, asked):
    below = asked("ls", ckpt, "model", "--filter", "*.bias")["leaves"]
    assert [x["name"] for x in below] == [f"model.layers.{i}.bias" for i in range(4)]
    assert len(asked("ls", ckpt, "--filter", "model.layers.1")["leaves"]) == 2
    sizes = [x["nbytes"] for x in asked("ls", ckpt, "--sort", "size")["leaves"]]
    assert sizes == sorted(sizes, reverse=True)
    lines = run("ls", ckpt, "--depth", 1, "--no-static")[1].splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["key", "lr", "model", "step"]
    assert lines[3].split()[1:] == ["8", "leaves", "33.8", "KiB"]
    code, _, err = run("ls", ckpt, "modle")
    assert code == 2 and "`model`" in err


def test_shared_arrays_count_once(tmp_path, run):
    x = jnp.ones(256)
    tree = {"a": {"x": x, "y": x}, "b": {"z": x, "w": jnp.ones(3)}}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    head, a, b = run("ls", tmp_path / "a", "--depth", 1)[1].splitlines()
    assert head.endswith("4 leaves, 1.0 KiB")
    assert a.split() == ["a", "2", "leaves", "1.0", "KiB"]
    assert b.split() == ["b", "2", "leaves", "12", "B"]
    assert run("ls", tmp_path / "a", "b")[1].splitlines()[0].endswith("1.0 KiB")
    assert "2 jax.Array, and 2 more names of these" in run("info", tmp_path / "a")[1]


def test_cat(ckpt, run, asked):
    weight = np.asarray(ec.open(ckpt)["model.layers.0.weight"])
    assert asked("cat", ckpt, "model.layers.0.weight") == weight.tolist()
    assert asked("cat", ckpt, "model.layers.0.weight[:2, 1]") == weight[:2, 1].tolist()
    assert asked("cat", ckpt, "model.layers.0.weight[-1]") == weight[-1].tolist()
    assert asked("cat", ckpt, "model.layers.0.weight[::32]") == weight[::32].tolist()
    assert asked("cat", ckpt, "step") == 3 and asked("cat", ckpt, "lr") == 0.5
    assert asked("cat", ckpt, "key") == [0, 1]
    assert asked("cat", ckpt, "model.layers.0.use_bias") is True
    assert "..." in run("cat", ckpt, "model.layers.1.weight")[1]
    assert "..." not in run("cat", ckpt, "model.layers.1.weight", "--all")[1]
    code, _, err = run("cat", ckpt, "model.layers.1.wieght")
    assert code == 2 and "`model.layers.1.weight`" in err
    code, _, err = run("cat", ckpt, "model.layers.1.weight[x]")
    assert code == 2 and "is no index" in err
    code, _, err = run("cat", ckpt, "model.layers.0.use_bias[0]")
    assert code == 2 and "is a static field: print it without an index" in err
    assert run("cat", ckpt, "model.layers.1.weight[64]")[0] == 2


def test_cat_of_texts_and_odd_numbers(tmp_path, asked):
    tree = {"text": "a\x1b[31mb", "bytes": b"\x00\xff", "x": jnp.array([jnp.nan, 1])}
    tree |= {"c": np.array([1 + 2j]), "b": jnp.ones(2, jnp.bfloat16)}
    every = lambda x: True
    ec.tree_serialise_leaves(tmp_path / "a", tree, filter_spec=every)
    assert asked("cat", tmp_path / "a", "text") == tree["text"]
    assert asked("cat", tmp_path / "a", "bytes") == "00ff"
    assert asked("cat", tmp_path / "a", "x") == ["nan", 1]
    assert asked("cat", tmp_path / "a", "c") == [[1, 2]]
    assert asked("cat", tmp_path / "a", "b") == [1, 1]


def test_stats(tmp_path, run, asked):
    tree = {"a": {"w": jnp.array([1, jnp.nan, 3])}, "b": jnp.zeros(2)}
    ec.tree_serialise_leaves(tmp_path / "a", tree)
    data = asked("stats", tmp_path / "a")["leaves"]
    assert data["a.w"]["nan"] == 1 and data["a.w"]["max"] == 3
    assert data["b"]["zero"] == 2
    assert list(asked("stats", tmp_path / "a", "a")["leaves"]) == ["w"]
    assert list(asked("stats", tmp_path / "a", "b")["leaves"]) == ["b"]
    head, *rows = run("stats", tmp_path / "a")[1].splitlines()
    assert head.split()[-2:] == ["nan", "zero"] and len(rows) == 2


def test_diff(ckpt, tmp_path, run, asked):
    assert run("diff", ckpt, ckpt)[0] == 0
    other = ec.open(ckpt)
    tree = ec.materialise(other.tree)
    tree["lr"], tree["new"] = 0.25, jnp.ones(3)
    ec.tree_serialise_leaves(tmp_path / "b", tree, metadata={"width": 32})
    code, out, err = run("diff", ckpt, tmp_path / "b", "--values")
    assert (code, err) == (1, "")
    assert "~ lr  float: value  (largest 0.25, relative 0.5)" in out
    assert "+ new  f32[3]" in out and "~ width  64 -> 32" in out
    data = asked("diff", ckpt, tmp_path / "b", "--values", status=1)
    assert data["changed"]["lr"]["largest"] == 0.25
    assert data["added"] == {"new": "f32[3]"}


def test_diff_of_a_node(ckpt, tmp_path, run, asked):
    tree = ec.materialise(ec.open(ckpt).tree)
    tree["lr"] = 0.25
    ec.tree_serialise_leaves(tmp_path / "b", tree, metadata={"width": 32})
    assert run("diff", ckpt, tmp_path / "b")[0] == 1
    code, out, err = run("diff", ckpt, tmp_path / "b", "--node", "model")
    assert (code, err) == (0, "") and f"`model` of {tmp_path / 'b'}" in out
    data = asked("diff", ckpt, tmp_path / "b", "--node", "lr", status=1)
    assert list(data["changed"]) == ["lr"] and not data["metadata"]
    code, _, err = run("diff", ckpt, tmp_path / "b", "--node", "modle")
    assert code == 2 and "no node or leaf `modle`" in err and "`model`" in err


def test_suggest(ckpt, tmp_path, run, asked):
    """The rules, as text and as data; 1 if something is left."""
    b = tmp_path / "b"
    assert run("suggest", ckpt, ckpt) == (0, f"# 11 of 11 leaves of {ckpt}\n", "")
    assert run("edit", ckpt, b, "--drop", "lr", "--rename", "^model[.]=net.")[0] == 0
    code, out, err = run("suggest", ckpt, b)
    assert (code, err) == (1, "")
    assert out == (
        'ec.rename([\n    (r"^model\\.", "net."),\n])\n'
        f"# 10 of 10 leaves of {b}\n"
        f"#   of {ckpt}, and like none of {b}:\n#     lr  float\n"
    )
    data = asked("suggest", b, ckpt, status=1)
    assert data["rules"] == [["^net\\.", "model."]] and data["missing"] == ["lr"]
    assert data["names"]["net.layers.0.bias"] == "model.layers.0.bias"
    assert (data["left"], data["unclear"]) == ([], [])
    assert (data["adapters"], data["squares"]) == ({}, [])


def test_the_step_of_a_run(steps, run, asked):
    assert asked("ls", steps)["path"] == str(steps / "40" / "default")
    assert asked("ls", steps / "20")["path"] == str(steps / "20" / "default")
    assert asked("cat", steps / "20", "w[-1]") == 19
    assert run("diff", steps / "20", steps)[0] == 1
    (steps / "50" / "default").mkdir(parents=True)
    assert asked("ls", steps)["path"] == str(steps / "40" / "default")


def test_what_cannot_be_opened(tmp_path, run):
    for command in ("info", "ls", "stats", "verify", "steps"):
        code, out, err = run(command, tmp_path / "none")
        assert (code, out) == (2, "") and "There is no checkpoint at" in err
    ec.tree_serialise_leaves(tmp_path / "a", {"w": jnp.ones(3)})
    (tmp_path / "a" / "eqx_ckpt.json").write_bytes(b"{}")
    for command in ("info", "ls"):
        code, out, err = run(command, tmp_path / "a")
        assert (code, out) == (2, "") and "cannot be read" in err
    (tmp_path / "m.eqx").write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}")
    code, out, err = run("ls", tmp_path / "m.eqx")
    assert code == 2 and "Python reads it" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("evil", ["\x1b[2J", "a\nb", "\u202eb", "[red]x[/red]"])
def test_nothing_acts_on_the_terminal(tmp_path, run, evil, monkeypatch):
    tree = {evil: jnp.ones(2), "x": {evil: "text"}}
    path = tmp_path / "run" / "3" / "default"
    metadata = {evil: evil, "metrics": {evil: 1.5, "loss": evil}}
    ec.tree_serialise_leaves(path, tree, metadata=metadata, filter_spec=lambda x: True)
    other = {evil + "b": jnp.ones(2)}
    ec.tree_serialise_leaves(tmp_path / "b", other, metadata={evil: 2})
    name = next(iter(ec.open(path)))
    calls = [("info", path), ("ls", path), ("ls", path, "--sort", "size")]
    calls += [
        ("ls", path, "--depth", 1),
        ("stats", path),
        ("diff", path, tmp_path / "b"),
    ]
    calls += [("cat", path, name), ("info", tmp_path / "run"), ("cat", path, evil)]
    calls += [("steps", tmp_path / "run", "--best", evil), ("ls", path, evil)]
    calls += [("verify", tmp_path / "run")]
    for call in calls:
        for more in ((), ("--json",)):
            _, out, err = run(*call, *more)
            assert all(x.isprintable() for x in (out + err).replace("\n", "")), call
            assert evil == "[red]x[/red]" or evil not in out + err
    monkeypatch.setenv("FORCE_COLOR", "1")
    for call in calls:
        _, out, err = run(*call)
        assert evil == "[red]x[/red]" or evil not in out + err
    assert run("info", path)[1].startswith("\x1b[1m")
