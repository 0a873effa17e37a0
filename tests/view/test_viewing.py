"""`eqx-ckpt view`: how the browser gets the address of the page."""

import os
import pathlib
import re
import stat
import urllib.parse
import webbrowser

import jax.numpy as jnp
from support import command

import eqx_ckpt as ec


def test_no_command_line_has_the_token(tmp_path, monkeypatch):
    """Each user of a machine sees the command lines of all."""
    ec.tree_serialise_leaves(tmp_path / "c", {"w": jnp.ones(2)})
    seen = []

    def open_page(url):
        file = pathlib.Path(urllib.parse.urlsplit(url).path)
        there = file.stat()
        assert stat.S_IMODE(there.st_mode) == 0o600 and there.st_uid == os.getuid()
        seen.append((url, file, file.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", open_page)
    try:
        command.main(["view", str(tmp_path / "c")])
    except KeyboardInterrupt:
        pass
    ((url, file, text),) = seen
    address = re.search(r'url=(http://127[^"]+)"', text)
    assert url.startswith("file:///") and address is not None
    assert urllib.parse.urlsplit(address[1]).path.strip("/") not in url
    assert not file.exists()
