"""`python benchmarks`: ours and the peers on the same bytes. See `--help`."""

import argparse
import json
import logging
import os
import pathlib
import platform
import sys
import tempfile
import warnings


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from measure import measure, table
from peers import PEERS
from workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description="Benchmarks against the peers."
    )
    parser.add_argument("workloads", nargs="*", default=["L", "M", "S"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=40, help="seconds a peer")
    parser.add_argument("--only", nargs="*", help="names of peers, or parts of them")
    parser.add_argument("--scratch", type=pathlib.Path, help="where to write")
    parser.add_argument("--json", type=pathlib.Path, help="where results go")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    peers = PEERS
    if given.only:
        peers = [p for p in PEERS if any(x in p.name for x in given.only)]
    scratch = given.scratch or pathlib.Path(tempfile.mkdtemp(prefix="eqx_ckpt-bench-"))
    results = {"machine": _machine()}
    for name in given.workloads:
        tree = WORKLOADS[name]()
        results[name] = measure(tree, peers, scratch / "w", given.rounds, given.budget)
        print(table(name, tree, results[name]), flush=True)
        print()
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))


def _machine() -> dict[str, object]:
    import eqx_ckpt._index

    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **eqx_ckpt._index.versions(),
    }


if __name__ == "__main__":
    main()
