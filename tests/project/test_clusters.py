"""The example of many hosts starts by the variables that clusters set. The check
`hosts` of `.ci/run` runs this."""

import contextlib
import os
import pathlib
import random
import re
import socket
import subprocess
import sys

import pytest
import yaml
from support.processes import free_port


pytestmark = pytest.mark.long
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "multihost"


def slurm(rank, port):
    # JAX takes the port from the number of the job.
    job = port - (65535 - 2**12 + 1)
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def kubernetes(rank, port):
    _, job = yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text())
    spec = job["spec"]
    container = spec["template"]["spec"]["containers"][0]
    given = {x["name"]: x["value"] for x in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert int(given["PROCESSES"]) == spec["completions"] == spec["parallelism"]
    # Here the pods are two, and on one machine.
    given |= {"PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}
    return given | {"JOB_COMPLETION_INDEX": str(rank)}


@pytest.mark.parametrize("variables", [slurm, kubernetes])
def test_the_example_starts(tmp_path, variables):
    # One of those that JAX may choose on SLURM, and that is free.
    port = 0
    while not port:
        port = random.randrange(65535 - 2**12 + 1, 65535)
        with socket.socket() as s:
            port = 0 if s.connect_ex(("localhost", port)) == 0 else port
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = []
    for rank in range(2):
        places = ["--root", tmp_path / "run", "--near", tmp_path / f"disk{rank}"]
        processes.append(
            subprocess.Popen(
                [sys.executable, EXAMPLE / "train.py", *places, "--steps", "6"],
                env=environment | variables(rank, port),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for process in processes:
            out, err = process.communicate(timeout=900)
            assert process.returncode == 0, err[-3000:]
            assert "begins after step 0" in out and "ends after step 6" in out
    finally:
        for process in processes:
            process.kill()


def test_the_program_of_the_page(tmp_path):
    """It goes on with two processes where four have ended."""
    page = (EXAMPLE.parents[1] / "docs" / "processes.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "",
    }
    for count, steps, begin in [(4, 12, 0), (2, 15, 12)]:
        with contextlib.ExitStack() as stack:
            address = f"localhost:{stack.enter_context(free_port())}"
            processes = [
                subprocess.Popen(
                    [sys.executable, "-c", code, address]
                    + list(map(str, (count, rank, steps))),
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(count)
            ]
            for process in processes:
                stack.callback(process.kill)
            for process in processes:
                out, err = process.communicate(timeout=900)
                assert process.returncode == 0, err
                assert f"begins at {begin}\n" in out and f"\n{steps} " in out
