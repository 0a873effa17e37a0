"""The Hugging Face Hub, by a server of `support.hub`."""

import errno
import os
import re
import time
import traceback
import types

import jax.numpy as jnp
import numpy as np
import pytest
from support import hub as hubs
from support.command import main

import eqx_ckpt as ec


huggingface_hub = pytest.importorskip("huggingface_hub")
# What it does itself, with some versions of what it stands on.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def _tree(value=1.0):
    w = np.arange(2.0**16, dtype=np.float32).reshape(256, 256) + value
    return {"layers": [{"w": w}, {"w": w * 2}], "b": np.full(3, value, np.float32)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub, to which `hf://` leads, with a cache and a token of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", hubs.TOKEN)
    with hubs.serve() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def _files(path):
    return {
        str(x.relative_to(path)): x.read_bytes() for x in path.rglob("*") if x.is_file()
    }


@pytest.fixture
def published(hub, tmp_path):
    """The Hub with a model of each form, and what is in them."""
    tree = _tree()
    ec.tree_serialise_leaves(tmp_path / "ours", tree)
    ec.export_safetensors(tmp_path / "foreign" / "model.safetensors", tree)
    ec.tree_serialise_leaves(tmp_path / "zips" / "m.zip", tree)
    for name in ("ours", "foreign", "zips"):
        hub.commit(f"org/{name}", _files(tmp_path / name))
    hub.asked.clear()
    return hub, tree


@pytest.mark.parametrize(
    "url, most", [("ours", 12), ("foreign", 12), ("zips/m.zip", 18)]
)
def test_parts_are_ranges(published, url, most):
    hub, tree = published
    ckpt = ec.open(f"hf://org/{url}")
    part = ckpt["layers.1.w"][7].read(verify=False)
    assert np.array_equal(part, tree["layers"][1]["w"][7])
    large = [one for one in hub.asked if one.got > 1000 and "eqx_ckpt" not in one.path]
    assert sum(one.got for one in large) < 70_000 < sum(x.nbytes for x in _leaves(tree))
    assert len(hub.asked) <= most, [one.path for one in hub.asked]
    # Only the Hub itself sees the token, and each signature is used once.
    other = [one for one in hub.asked if hub.other.endswith(f":{one.port}")]
    assert {one.token for one in other} <= {None}
    assert {one.token for one in hub.asked if one not in other} == {hubs.TOKEN}
    ranges = [one.path for one in other if one.method == "GET"]
    assert ranges and len(ranges) == len(set(ranges))
    loaded = ec.tree_deserialise_leaves(ckpt, tree)
    assert np.array_equal(loaded["layers"][0]["w"], tree["layers"][0]["w"])


def _leaves(tree):
    return [tree["b"], *(layer["w"] for layer in tree["layers"])]


def test_a_revision_is_pinned(published):
    hub, tree = published
    old = next(iter(hub.repos["org/foreign"]))
    ckpt = ec.open("hf://org/foreign")
    files = dict(hub.files("org/foreign"))
    files["model.safetensors"] = b"not one"
    hub.commit("org/foreign", files)
    assert np.array_equal(ckpt["b"].read(), tree["b"])
    again = ec.open(f"hf://org/foreign@{old}")
    assert np.array_equal(again["b"].read(), tree["b"])
    with pytest.raises((ValueError, FileNotFoundError)):
        ec.open("hf://org/foreign")
    with pytest.raises(FileNotFoundError, match="no revision `none`.*branch"):
        ec.open("hf://org/foreign@none")


def test_what_is_in_the_cache_is_not_asked_for(published):
    hub, tree = published
    huggingface_hub.hf_hub_download(
        "org/foreign", "model.safetensors", endpoint=hub.url
    )
    ckpt = ec.open("hf://org/foreign")
    hub.asked.clear()
    loaded = ec.tree_deserialise_leaves(ckpt, tree)
    assert np.array_equal(loaded["b"], tree["b"]) and hub.asked == []


def test_commands_and_grafts(published, capsys):
    hub, tree = published
    assert main(["ls", "hf://org/foreign"]) == main(["info", "hf://org/ours"]) == 0
    shown = capsys.readouterr().out
    assert "f32[256,256]" in shown and "3 leaves" in shown
    assert not ec.diff("hf://org/ours", "hf://org/zips/m.zip")
    model = {"head": jnp.zeros(3), "rest": jnp.ones(2)}
    grafted, _ = ec.graft(
        model,
        "hf://org/foreign",
        [(lambda m: m["head"], lambda c: c["b"])],
        fresh=lambda m: m["rest"],
        drop=lambda c: c.layers,
    )
    assert np.array_equal(grafted["head"], tree["b"])


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository(published, status):
    hub, _ = published
    hub.refused["org/ours"] = status
    with pytest.raises(PermissionError, match="gated.*HF_TOKEN.*org/ours") as caught:
        ec.open("hf://org/ours")
    assert hubs.TOKEN not in "".join(traceback.format_exception(caught.value))


def test_nothing_there(published):
    with pytest.raises(FileNotFoundError, match="no repository.*Correct"):
        ec.open("hf://org/none")
    with pytest.raises(FileNotFoundError, match="no checkpoint at `hf://org/ours/x`"):
        ec.open("hf://org/ours/x")
    for url in ("hf://org", "hf://org/a@/d"):
        with pytest.raises(ValueError, match="is not a URL of"):
            ec.open(url)
    with pytest.raises(ValueError, match="can only be read.*`ec.convert"):
        ec.tree_serialise_leaves("hf://org/ours", _tree())
    with pytest.raises(ValueError, match="can only be read"):
        ec.delete("hf://org/ours")


@pytest.mark.parametrize("inside", ["", "/sub", "/model.safetensors", "/m.zip"])
def test_a_push_is_one_commit(hub, tmp_path, inside):
    url = f"hf://org/new{inside}"
    for value in (1.0, 2.0):
        ec.tree_serialise_leaves(tmp_path / "a", _tree(value))
        ec.convert(tmp_path / "a", url)
        # The Hub makes a first one with a repository.
        assert len(hub.repos["org/new"]) == 1 + value
        assert np.array_equal(ec.open(url)["b"].read(), _tree(value)["b"])
    files = hub.files("org/new")
    card = files["README.md"].decode()
    assert re.search("^library_name: eqx_ckpt$", card, re.M) and url in card
    # What was there before is deleted by the same commit.
    assert len({key.split("/d/")[-1] for key in files if "d/" in key}) <= 4
    if inside in ("", "/sub"):
        assert ec.verify(url) == []
    with pytest.raises(FileExistsError, match="overwrite=False"):
        ec.convert(tmp_path / "a", url, overwrite=False)


def test_a_push_with_a_base(hub, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", _tree())
    ec.convert(tmp_path / "a", "hf://org/new", base=tmp_path / "a")
    base = ec.open("hf://org/new").base
    assert base is not None and base.path == str(tmp_path / "a")


def test_a_card_is_left_as_it_is(hub, tmp_path, capsys):
    hub.commit("org/new", {"README.md": b"# Mine"})
    ec.tree_serialise_leaves(tmp_path / "a", _tree())
    assert main(["push", tmp_path / "a", "hf://org/new@main"]) == 0
    assert "written" in capsys.readouterr().out
    assert hub.files("org/new")["README.md"] == b"# Mine"


def test_an_upload_that_breaks_off_publishes_nothing(hub, tmp_path, monkeypatch):
    ec.tree_serialise_leaves(tmp_path / "a", _tree())
    ec.convert(tmp_path / "a", "hf://org/new")
    before = dict(hub.repos["org/new"])
    dropped = []
    hub.drop = lambda path: not dropped.append(path)
    # The library tries again, and waits between.
    waits = types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    monkeypatch.setattr("huggingface_hub.utils._http.time", waits)
    ec.tree_serialise_leaves(tmp_path / "a", _tree(2.0))
    with pytest.raises(OSError, match="`hf://org/new`"):
        ec.convert(tmp_path / "a", "hf://org/new")
    assert dropped and hub.repos["org/new"] == before
    assert ec.open("hf://org/new")["b"].read()[0] == 1


def test_a_directory_that_cannot_be_listed_is_not_left_out(hub, tmp_path, monkeypatch):
    ec.tree_serialise_leaves(tmp_path / "a", _tree())
    listed = os.scandir

    def refuse(path="."):
        if "/checkpoint/d/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="/checkpoint/d/"):
        ec.convert(tmp_path / "a", "hf://org/new")
    assert not hub.repos.get("org/new")


def test_another_commit_in_between_is_an_error(hub, tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", _tree())
    ec.convert(tmp_path / "a", "hf://org/new")

    def drop(path):
        hub.commit("org/new", {"theirs": b"1"})
        hub.drop = lambda path: False
        return False

    hub.drop = drop
    ec.tree_serialise_leaves(tmp_path / "a", _tree(2.0))
    with pytest.raises(OSError, match="412"):
        ec.convert(tmp_path / "a", "hf://org/new")
    assert hub.files("org/new") == {"theirs": b"1"}


def test_without_a_token_that_may_write(hub, tmp_path, monkeypatch):
    ec.tree_serialise_leaves(tmp_path / "a", _tree())
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(PermissionError, match="token is not valid") as caught:
        ec.convert(tmp_path / "a", "hf://org/new")
    assert "hf_of_another" not in str(caught.value)
    assert hub.repos == {}
