import contextlib
import threading
import urllib.request

import pytest

import eqx_ckpt as ec
from eqx_ckpt._cli._viewing import subject_of
from eqx_ckpt._view._server import Server
from eqx_ckpt._view._site import Site


@pytest.fixture
def serve():
    """Serves the page of some paths: a function that returns the server."""
    with contextlib.ExitStack() as stack:

        def start(*paths):
            server = stack.enter_context(Server(Site(subject_of([*map(str, paths)]))))
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield start


@pytest.fixture
def get():
    """The status, the headers and the body of a page."""

    def call(url, method="GET", **headers):
        request = urllib.request.Request(url, method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=600) as found:
                return found.status, found.headers, found.read()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.headers, e.read()

    return call


@pytest.fixture
def save(tmp_path):
    def call(name, tree, **options):
        path = tmp_path / name
        ec.tree_serialise_leaves(path, tree, **options)
        return path

    return call
