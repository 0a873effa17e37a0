"""Every read of every call that reads fails, with every errno, once and for ever.

What the system refuses is raised as what it is: it is no damage, it changes nothing,
and the next call is right. See `support.refusing` for how, `support.reading`
for what is called.
"""

import itertools
import json

import numpy as np
import pytest
from support import refusing, scripts
from support.stores import StoredFiles

import eqx_ckpt as ec


_layouts = pytest.mark.parametrize("layout", ["ocdbt", "zarr", "zip"])


def _sweep(directory, layout, *arguments):
    if not refusing.is_possible():
        pytest.skip("the kernel cannot be asked to refuse reads here")
    errors = ",".join(map(str, refusing.ERRORS))
    done = scripts.run_module("support.reading", directory, layout, errors, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    return found["count"]


@pytest.mark.parametrize(
    "layout", ["ocdbt", pytest.param("zip", marks=pytest.mark.long)]
)
def test_a_read_that_fails(tmp_path, layout):
    assert _sweep(tmp_path, layout) > 20


@pytest.mark.long
@_layouts
def test_a_read_that_fails_in_every_way(tmp_path, layout):
    print(layout, _sweep(tmp_path, layout, "long"), "refused reads")


# ---- Stores.


def _tree(value):
    return {"x": np.full((3, 1000), value, "float32"), "v": value}


def _calls(root):
    """What reads: of a manager, or of its newest step."""
    path = root / "30/default"
    like = _tree(0)
    load = lambda m: ec.tree_deserialise_leaves(path, like)["v"]
    return {
        "open": lambda m: len(ec.open(path)),
        "load": load,
        "verify": lambda m: ec.verify(path),
        "exists": lambda m: ec.exists(path),
        "restore": lambda m: m.restore(like)[1],
        "best": lambda m: m.best(),
        "latest": lambda m: m.latest(),
        "steps": lambda m: m.steps(),
    }


class _Fault:
    """Spoils the answer to the n-th request that reads, or to each from there on."""

    def __init__(self, number, what, forever):
        self.left, self.what, self.forever = number, what, forever
        self.hit = ""

    def __call__(self, method, path):
        if method not in ("GET", "HEAD"):
            return None
        self.left -= 1
        if self.left == 0 or (self.forever and self.left < 0):
            self.hit = f"{method} {path}"
            return self.what
        return None


def test_a_store_that_fails(s3):
    assert _sweep_store(s3, "ocdbt") > 10


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
def test_a_store_that_fails_in_every_way(s3, layout):
    print(layout, _sweep_store(s3, layout, is_long=True), "spoilt requests")


def _sweep_store(s3, layout, is_long=False):
    retries = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    url = f"s3://bucket/reading/{layout}{is_long}"
    root = ec.Store(url, s3_request_retries=retries)
    with ec.CheckpointManager(root, layout=layout) as manager:
        for step in (10, 20, 30):
            manager.save(step, _tree(step), {"loss": abs(step - 20)})
    ways = list(itertools.product((500, 503, 403, "drop"), (False, True)))
    turns = itertools.count(step=5)
    count = 0
    for name, call in _calls(root).items():
        right = call(ec.CheckpointManager(root, best=("loss", "min")))
        for number in itertools.count(1, 1 if is_long else 2):
            hits = []
            for what, forever in ways if is_long else [ways[next(turns) % len(ways)]]:
                manager = ec.CheckpointManager(root, best=("loss", "min"))
                case = name, number, what, forever
                with s3.used():
                    s3.fault = fault = _Fault(number, what, forever)
                    try:
                        assert call(manager) == right, (case, fault.hit)
                    except OSError:
                        assert fault.hit
                    except (ValueError, RuntimeError) as e:
                        raise AssertionError(case, fault.hit) from e
                if not fault.hit:
                    break
                hits.append(fault.hit)
                count += 1
                assert call(manager) == right, case
                with pytest.raises(FileExistsError):
                    manager.save(30, _tree(99))
            if not hits:
                break
    return count


@pytest.mark.parametrize("is_store", [False, True])
def test_an_index_that_was_cut_since_it_was_opened(tmp_path, is_store):
    path = "memory://cut-index" if is_store else str(tmp_path / "a")
    ec.tree_serialise_leaves(path, _tree(1), layout="zarr")
    ckpt = ec.open(path)
    StoredFiles(path)["eqx_ckpt.json"] = b"{"
    for verify in (True, False):
        with pytest.raises(ec.ReplacedError, match=f"at `{path}` cannot be read"):
            ckpt["x"].read(verify=verify)
