"""Deletion, which follows no link: neither one that is there, nor one that comes to the
place of a directory while that is being deleted.
"""

import contextlib
import os

import pytest
from support import audits, inside
from support.helpers import files_of


_CALLS = {"open", "os.listdir", "os.scandir", "os.remove", "os.rmdir", "os.rename"}


def make(path, inner="1"):
    for number in range(3):
        (path / inner / "deep").mkdir(parents=True, exist_ok=True)
        (path / inner / str(number)).write_text("x")
        (path / inner / "deep" / str(number)).write_text("x")


def race(tmp_path, number):
    """Deletes a directory in which another changes places with a link, right before one
    of the calls to the system. Returns how many calls there were."""
    directory, victim = tmp_path / f"d{number}", tmp_path / "victim"
    make(directory)
    os.symlink(victim / "1", tmp_path / f"link{number}")
    count = 0

    def hear(event, _):
        nonlocal count
        count += event in _CALLS
        if event in _CALLS and count == number + 1:
            inside.exchange(directory / "1", tmp_path / f"link{number}")

    # An error: there is something else than there was.
    with audits.heard(hear), contextlib.suppress(OSError):
        inside.root(tmp_path).delete(f"d{number}")
    return count


def test_a_link_that_comes_meanwhile_is_not_followed(tmp_path):
    make(tmp_path / "victim")
    before = files_of(tmp_path / "victim")
    number = 0
    while race(tmp_path, number) > number:
        assert files_of(tmp_path / "victim") == before, number
        number += 1
    assert number > 10


def test_links_are_deleted_and_not_followed(tmp_path):
    make(tmp_path / "victim")
    make(tmp_path / "run")
    before = files_of(tmp_path / "victim")
    os.symlink(tmp_path / "victim", tmp_path / "run/1/deep/link")
    os.symlink(tmp_path / "run", tmp_path / "alias")
    root = inside.root(tmp_path / "alias")
    root.delete("1/deep")
    root.delete("1/deep")
    assert sorted(os.listdir(tmp_path / "run/1")) == ["0", "1", "2"]
    os.symlink(tmp_path / "victim", tmp_path / "run/link")
    for key in ("link/1", "link/1/0"):
        with pytest.raises(NotADirectoryError, match="or a symbolic link"):
            root.delete(key)
    for call in (
        lambda: root.below("link").list_top(),
        lambda: root.below("link").below("1").delete("0"),
        lambda: root.below("link/1").write("new", [b"x"]),
        lambda: root.make_directories(["link/new"]),
        lambda: root.below("link/1/new").make_directories([""]),
    ):
        with pytest.raises(NotADirectoryError, match="or a symbolic link"):
            call()
    root.delete("link")
    assert files_of(tmp_path / "victim") == before
    # What was named is deleted itself, be it a link.
    root.delete("")
    assert os.listdir(tmp_path / "run") and not (tmp_path / "alias").is_symlink()


def test_directories_of_any_depth(tmp_path):
    directory, depth = tmp_path / "d", 400
    directory.mkdir()
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("inner", dir_fd=here)
        os.close(os.open("file", os.O_CREAT, dir_fd=here))
        below = os.open("inner", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    inside.root(tmp_path).delete("d")
    assert os.listdir(tmp_path) == []
