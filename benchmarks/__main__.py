"""`python benchmarks`: ours and the peers on the same bytes. See `--help`."""

import argparse
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import limits
import measure
import pages
from measure import Settings
from peers import PEERS
from workloads import sizes


_HERE = pathlib.Path(__file__).parent
_ALL = "TLMSPCEFW"
# Programs of their own, each with a file of results.
_OTHERS = {
    "T": "models",
    "C": "compressed",
    "E": "editing",
    "F": "functions",
    "W": "felt",
}
_HELP = """
workloads:
  T  Modules in training, with optimiser states
  L  16 x 64 MiB float32          P  parts, in new processes: a leaf of S, a leaf of L,
  M  GPT-2-small with Adam           256 rows of an embedding
  S  10,000 x 256 float32         C  compression
  F  stored functions             E  edits and merges of 512 MiB
  W  what loops and notebooks wait for
Everything together takes about half an hour on 2 cores that do nothing else. It writes
results/, and the tables of README.md and docs/benchmarks.md. Linux only.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks",
        description="Measures eqx_ckpt and its peers on the same bytes, in turns.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("workloads", nargs="*")
    add("--short", action="store_true", help="small sizes; fails beyond limits.py")
    add("--rounds", type=int, help="of L, M, S, P: 5, and 1 with --short")
    add("--only", nargs="+", default=[""], help="names of peers, or parts of them")
    add("--scratch", type=pathlib.Path, help="where to save; on a disk")
    add("--out", type=pathlib.Path, help="by default results/ of everything, or none")
    add("--pages", action="store_true", help="only the tables of results/")
    add("--claims", action="store_true", help='only README\'s "Beside others"')
    given = parser.parse_args()
    if given.claims:
        # It has devices of its own.
        sys.exit(subprocess.run([sys.executable, str(_HERE / "claims.py")]).returncode)
    if given.pages:
        pages.write()
        return
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    is_whole = not (given.short or given.workloads) and given.only == [""]
    out = given.out or (pages.RESULTS if is_whole else None)
    rounds = given.rounds or (1 if given.short else 5)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="eqx_ckpt-", dir=given.scratch))
    settings = Settings(scratch / "w", rounds)
    results: dict[str, Any] = {"machine": _machine(), "rounds": rounds}
    results |= {"whole": {}, "parts": {}}
    failed: list[str] = []
    try:
        for name in given.workloads or _ALL:
            failed += _run(name, given, settings, results, out)
            if out:
                out.mkdir(parents=True, exist_ok=True)
                (out / "results.json").write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)
    if out == pages.RESULTS:
        pages.write()
    failed += limits.check(results) if given.short else []
    print("\n".join(failed) or "All limits are kept.")
    sys.exit(bool(failed))


def _run(
    name: str,
    given: argparse.Namespace,
    settings: Settings,
    results: dict[str, Any],
    out: pathlib.Path | None,
) -> list[str]:
    """Measures one workload, into the results, and prints its table. Returns failures,
    each a sentence."""
    trees = sizes(given.short)

    def chosen(peers: list[Any]) -> list[Any]:
        return [p for p in peers if any(words in p.name for words in given.only)]

    if name in trees.whole:
        got = measure.whole(trees.whole[name], chosen(PEERS), settings)
        results["whole"][name] = got
        print(pages.whole(name, got), end="\n\n", flush=True)
    elif name == "P":
        # New processes take their time: in short, only those that have limits.
        peers = [p for p in chosen(PEERS) if not given.short or p.name in limits.PEERS]
        for title, make, leaf, rows in (
            ("one leaf of S", trees.whole["S"], "w77", None),
            ("1/16 of L", trees.whole["L"], "w7", None),
            ("256 rows of an embedding", trees.embedding, "wte", (9_000, 9_256)),
        ):
            got = measure.part(make, leaf, rows, peers, settings)
            results["parts"][title] = got
        print(pages.parts({"results": results}), end="\n\n", flush=True)
    elif name in _OTHERS:
        program = _HERE / f"{_OTHERS[name]}.py"
        options = ["--short"] if given.short else []
        options += ["--scratch", str(settings.scratch.parent)]
        options += ["--out", str(out)] if out else []
        if subprocess.run([sys.executable, str(program), *options]).returncode:
            return [f"{program.name} has failed."]
    else:
        sys.exit(f"There is no workload {name!r}. See `python benchmarks --help`.")
    return []


def _machine() -> dict[str, Any]:
    cpus = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in cpus if line.startswith("model name")]
    packages = "jax equinox tensorstore numpy safetensors flax orbax-checkpoint"
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {x: importlib.metadata.version(x) for x in packages.split()},
    }


if __name__ == "__main__":
    main()
