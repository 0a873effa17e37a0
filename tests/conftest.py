import gc
import os
import pathlib
import re
import subprocess
import sys
import tempfile


# Processes that tests start import the package, and the helpers in `support`.
_tests = pathlib.Path(__file__).parent
_paths = [str(_tests.parent), str(_tests), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Some images forbid it, and then each of the processes compiles the whole package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Arrays are small, too: threads would but wait for work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Each program is small, and is run a few times: to compile it takes the longest.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    # XLA's older emitters compile a small program in two thirds of the time. Not every
    # version has them, and each ends at a flag that it does not know.
    _older = f"{os.environ['XLA_FLAGS']} --xla_cpu_use_fusion_emitters=false"
    _ask = "from jaxlib import xla_client; xla_client.CompileOptions()"
    if not subprocess.run(
        [sys.executable, "-c", _ask],
        env={**os.environ, "XLA_FLAGS": _older},
        capture_output=True,
    ).returncode:
        os.environ["XLA_FLAGS"] = _older

import hypothesis
import jax
import jax.random as jr
import pytest
from hypothesis import strategies as st
from support import browsers, scripts, servers


# Thousands of tests are collected, and stay: no collection of garbage looks at them.
gc.disable()

# For this run alone. What one worker has compiled, another need not.
_compiled = tempfile.TemporaryDirectory()

# Machines that run the tests are shared: how long an example takes says nothing. The
# quick form has the same examples each time, and fails for whoever breaks it. The long
# form has others each time, unless it is given a `--hypothesis-seed`.
_untimed = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
    "quick", max_examples=16, derandomize=True, **_untimed
)
hypothesis.settings.register_profile("long", max_examples=100, **_untimed)


def pytest_configure(config):
    is_long = config.option.markexpr == "long"
    hypothesis.settings.load_profile("long" if is_long else "quick")
    # Tests compile the same small programs again and again, of new functions.
    given = getattr(config, "workerinput", {})
    compiled = given.get("compiled", _compiled.name)
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if given:
        scripts.use(given["scripts"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Scripts of all workers are forks of one process, and they compile together."""
    node.workerinput["scripts"] = scripts.share()
    node.workerinput["compiled"] = _compiled.name


# The files that take longest are the first ones, so that no worker ends long after the
# others.
_FIRST = [
    *("test_lazy_routes", "test_processes", "test_async", "test_foreign_stores"),
    *("test_sidecars", "test_stores", "test_growth", "test_interrupts", "test_attacks"),
    *("test_trees", "test_resuming", "test_reading", "test_leaf", "test_store_kill"),
    *("test_faults", "test_structures", "test_unreachable", "test_benchmarks"),
]
_ranks = {f"{name}.py": rank for rank, name in enumerate(_FIRST)}
# Each leaves a process that is slower: see `support/audits.py`.
for _name in ("test_modes", "test_removal", "test_torch"):
    _ranks[f"{_name}.py"] = len(_FIRST) + 1

# Where each server, and Chromium, is started once: these files go to one worker.
_SERVED = re.compile(
    r"/(stores|view)/|test_(backends|foreign_stores|functions_kept|html|manager_stores"
    r"|reading|store_kill)\.py$"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "served" if _SERVED.search(file) else file

    if config.getoption("dist") == "loadfile":
        return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """With `-m long`, tests of properties are run as well, with more examples."""
    items.sort(key=lambda item: _ranks.get(item.path.name, len(_FIRST)))
    if config.option.markexpr == "long":
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("long")


def pytest_collection_finish(session):
    # Hypothesis makes its random numbers now. On Python 3.14 it warns of them if the
    # garbage collector no longer looks at what holds them.
    hypothesis.find(st.none(), lambda _: True)
    gc.collect()
    gc.freeze()
    # Nor are all objects looked at often that tests and JAX's caches then hold.
    gc.set_threshold(700, 10, 50)
    gc.enable()


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at each call, the same ones every run."""
    keys = iter(jr.split(jr.key(0), 1000))
    return lambda: next(keys)


# These are for all of the session: TensorStore looks only once where Google's store is.
@pytest.fixture(scope="session")
def s3():
    """A proxy before a server of S3, to which `s3://bucket` then leads."""
    with servers.s3() as port, servers.Proxy(port) as proxy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
                patch.delenv(name, raising=False)
            yield proxy


@pytest.fixture(scope="session")
def gs():
    """A proxy before an emulator of Google's store, to which `gs://bucket` leads."""
    with servers.gcs() as port, servers.Proxy(port) as proxy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.url)
            yield proxy


@pytest.fixture(scope="session")
def az():
    """A proxy before Azurite, to whose container `servers.BUCKETS["az"]` leads."""
    import eqx_ckpt._stores  # noqa: F401  The room around the kernel.

    pytest.importorskip("obstore")
    with servers.az() as port, servers.Proxy(port) as proxy:
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ:
                if name.startswith("AZURE_"):
                    patch.delenv(name)
            for name, value in servers.azure_settings(proxy.url).items():
                patch.setenv(name, value)
            yield proxy


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    with browsers.started(tmp_path_factory) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """Chromium, which has nothing to complain of when the test is over."""
    chromium.expected = None
    yield chromium
    problems = chromium.problems()
    assert not problems, problems
