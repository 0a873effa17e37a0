"""Checkpoints and runs behind URLs, in a real browser: what is asked for, and when."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from support import servers
from test_page import DRAWN, READY

import eqx_ckpt as ec


LARGE = 2**20


@pytest.fixture
def place(request, tmp_path):
    """Where a kind of store has a name, as it is written and as it is read; and what
    counts the bytes that it gives."""
    with contextlib.ExitStack() as stack:
        if request.param == "s3":
            proxy = request.getfixturevalue("s3")
            stack.enter_context(proxy.used())
            yield lambda name: (f"s3://bucket/view/{name}",) * 2, proxy
        else:
            port = stack.enter_context(servers.static(tmp_path))
            proxy = stack.enter_context(servers.Proxy(port))
            yield lambda name: (tmp_path / name, f"{proxy.url}/{name}"), proxy


def _got(proxy):
    return sum(request.got for request in proxy.requests)


@pytest.mark.parametrize("place", ["http", "s3"], indirect=True)
def test_a_checkpoint_by_its_url(serve, browser, place):
    where, proxy = place
    written, url = where("ckpt")
    rng = np.random.default_rng(0)
    large = rng.normal(size=(512, 512)).astype(np.float32)
    ec.tree_serialise_leaves(written, {"large": large, "small": jnp.ones((2, 2))})
    proxy.requests.clear()
    browser.open(serve(url).url)
    browser.until(READY)
    assert url in browser.text() and _got(proxy) < LARGE / 8
    browser.run("location.hash = 'n=1'")
    browser.until(f"{DRAWN} >= 2")
    assert _got(proxy) < LARGE / 8
    browser.run("location.hash = 'n=0'")
    browser.until(f"{DRAWN} >= 3")
    assert LARGE * 0.8 < _got(proxy) < LARGE * 1.2
    assert "not read" not in browser.text()


@pytest.mark.parametrize("place", ["http"], indirect=True)
def test_what_a_server_does_not_give_is_said(serve, browser, place):
    where, proxy = place
    written, url = where("ckpt")
    ec.tree_serialise_leaves(written, {"w": np.arange(4000.0), "x": jnp.ones(2)})
    browser.open(serve(url).url)
    browser.until(READY)
    proxy.fault = lambda method, path: 403
    browser.run("location.hash = 'n=0'")
    said = browser.until("return document.querySelector('p.bad')?.innerText")
    assert "refuses access" in said and url in said
    proxy.fault = lambda *_: None
    browser.run("location.hash = 'n=1'")
    browser.until(f"{DRAWN} >= 1")


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_run_in_a_store(serve, browser, place):
    (written, url), _ = place[0]("run"), place[1]
    with ec.CheckpointManager(written) as manager:
        for step in (1, 2):
            manager.save(step, {"w": jnp.full(4, float(step))}, {"loss": 1 / step})
    browser.open(serve(url).url)
    browser.until("return document.querySelectorAll('tbody tr').length === 2")
    browser.run("location.hash = 'n=0'")
    browser.until("return document.body.innerText.includes('2 of 2 steps')")
