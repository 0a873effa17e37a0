"""The search of the site finds pages by the words of users: asked in a browser. The
check `site` of `.ci/run` builds the site, and runs this."""

import functools
import http.server
import os
import threading
import urllib.parse

import pytest


FOUND = {
    "freeze": "freezing",
    "frozen": "freezing",
    "optimizer": "freezing",
    "optimiser": "freezing",
    "serialize": "saving",
    "serialise": "saving",
    "async": "saving",
    "deserialize": "parts",
    "partial load": "parts",
    "wandb": "with/wandb",
    "tensorboard": "with/tensorboard",
    "lightning": "with/lightning",
    "grain": "with/grain",
    "hydra": "with/hydra",
    "slurm": "with/slurm",
    "resume": "resuming",
    "preemption": "resuming",
    "best checkpoint": "resuming",
    "learning rate": "changing",
    "unfreeze": "changing",
    "lora": "finetuning",
    "fine-tune": "finetuning",
    "rename": "finetuning",
    "out of memory": "troubleshooting",
    "corrupted": "troubleshooting",
    "shape mismatch": "troubleshooting",
    "s3": "stores",
    "azure": "stores",
    "huggingface": "huggingface",
    "pytorch": "coming/safetensors",
    "orbax": "coming/orbax",
    "sharding": "devices",
    "multi-host": "processes",
    "distributed": "processes",
    "ema": "editing",
    "merge": "editing",
    "export": "portable",
    "visualize": "view",
    "sweep": "sweeps",
    "evaluator": "sweeps",
    "nnx": "coming/flax",
    "linen": "coming/flax",
    "hwio": "layouts",
    "convtranspose": "layouts",
    "tied": "layouts",
    "running_mean": "batchnorm",
    "batchnorm": "batchnorm",
    "quantize": "quantised",
    "int8": "quantised",
}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    """The address of the site that `mkdocs build` has made in the directory `SITE`."""
    path = os.environ.get("SITE")
    if path is None:
        pytest.skip("`SITE` names no site: `bash .ci/run site` builds and asks one.")
    handler = functools.partial(_Quiet, directory=path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


_FIRST = """
const found = document.querySelector('.md-search-result__link');
return found && new URL(found.href).pathname"""


@pytest.mark.long
def test_words_of_users_find_their_page(site, chromium):
    wrong = {}
    for words, page in FOUND.items():
        # A new page each time: nothing is left of the words before.
        chromium.open(f"{site}?q={urllib.parse.quote(words)}")
        path = chromium.until(_FIRST)
        if path != f"/{page}/":
            wrong[words] = path
    assert not wrong
