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
import tables
from measure import Settings
from part import PARTS
from peers import PEERS
from workloads import sizes


_HERE = pathlib.Path(__file__).parent
# Programs of their own.
_OTHERS = {
    "T": "models",
    "C": "compressed",
    "E": "editing",
    "F": "functions",
    "D": "stores",
}
# What the lines of growth are drawn of.
_GROWING = ("eqx_ckpt", "raw, one thread", "Equinox", "safetensors.flax", "Orbax v1")
_HELP = """
workloads:
  L  16 x 64 MiB float32          P  parts, in new processes: a leaf of S, a leaf of L,
  M  GPT-2-small with Adam           256 rows of an embedding
  S  10,000 x 256 float32         G  growth: 10 to 10,000 leaves, 1 to 256 MiB
  C  compression                  E  edits of 2 GiB that is not loaded
  D  object stores with a delay   F  stored functions
  I  imports                      T  Modules in training, with optimiser states
Linux only.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks",
        description="Measures eqx_ckpt and its peers on the same bytes, in turns.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("workloads", nargs="*", help="all of them; with --short, all but G and I")
    add("--short", action="store_true", help="small sizes; fails beyond limits.py")
    add("--big", action="store_true", help="growth to 30,000 leaves and to 4 GiB")
    add("--cold", action="store_true", help="evict files from the page cache first")
    add("--rounds", type=int, help="by default 7, and 1 with --short")
    add("--budget", type=float, default=40, help="seconds a peer and workload")
    add("--only", nargs="+", default=[""], help="names of peers, or parts of them")
    add("--scratch", type=pathlib.Path, help="where to save; on a disk")
    add("--out", type=pathlib.Path, help="by default results/, none with --short")
    add("--plot", type=pathlib.Path, help="only draw a results.json, beside it")
    given = parser.parse_args()
    if given.plot:
        _plot(json.loads(given.plot.read_text()), given.plot.parent)
        return
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    out = given.out or (None if given.short else _HERE / "results")
    rounds = given.rounds or (1 if given.short else 7)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="eqx_ckpt-", dir=given.scratch))
    settings = Settings(scratch / "w", rounds, given.budget, given.cold)
    results: dict[str, Any] = {
        "machine": _machine(scratch),
        "settings": settings._asdict() | {"scratch": str(scratch)},
        "how": {"whole": {p.name: p.how for p in PEERS}}
        | {"parts": {p.name: p.how for p in PARTS}},
        "whole": {},
        "parts": {},
        "growth": {},
        "imports": {},
    }
    try:
        default = "TLMSPCEFD" if given.short else "TLMSPGCEFDI"
        for name in given.workloads or default:
            _run(name, given, settings, results, out)
            if out:
                out.mkdir(parents=True, exist_ok=True)
                (out / "results.json").write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)
    for kind, how in {} if given.short else results["how"].items():
        print(f"How {kind} trees are run:" if kind == "whole" else "How parts are:")
        for name, sentence in how.items():
            print(f"  {name}: {sentence}")
    if out:
        _plot(results, out)
    if given.short:
        problems = limits.check(results)
        print("\n".join(problems) or "All limits are kept.")
        sys.exit(bool(problems))


def _run(
    name: str,
    given: argparse.Namespace,
    settings: Settings,
    results: dict[str, Any],
    out: pathlib.Path | None,
) -> None:
    """Measures one workload, into the results, and prints its table."""
    of = sizes(given.short, given.big)

    def chosen(peers: list[Any]) -> list[Any]:
        return [p for p in peers if any(words in p.name for words in given.only)]

    if name in of.whole:
        got = measure.whole(of.whole[name], chosen(PEERS), settings)
        results["whole"][name] = got
        _say(tables.whole(name, got, settings.cold))
    elif name == "P":
        # New processes take their time: in short, only those that have limits.
        parts = [p for p in chosen(PARTS) if not given.short or p.name in limits.PEERS]
        for title, make, leaf, rows in (
            ("one leaf of S", of.whole["S"], "w77", None),
            ("1/16 of L", of.whole["L"], "w7", None),
            ("256 rows of an embedding", of.embedding, "wte", (9_000, 9_256)),
        ):
            got = measure.part(make, leaf, rows, parts, PEERS, settings)
            results["parts"][title] = got
            _say(tables.part(title, got, settings.cold))
    elif name == "G":
        peers = [peer for peer in chosen(PEERS) if peer.name in _GROWING]
        for per, unit, title, trees in (
            ("leaves", 1e-6, "Growth, µs a leaf, by leaves of 1 KiB", of.leaves),
            ("bytes", 1e-9, "Growth, ns a byte, by bytes", of.bytes),
        ):
            got = {size: measure.whole(t, peers, settings) for size, t in trees.items()}
            results["growth"][per] = got
            _say(tables.growth(title, unit, got, per))
    elif name in _OTHERS:
        program = _HERE / f"{_OTHERS[name]}.py"
        options = ["--short"] if given.short else []
        if name != "D":  # It saves to a server.
            options += ["--scratch", str(settings.scratch.parent)]
        if name == "T" and out:
            out.mkdir(parents=True, exist_ok=True)
            options += ["--out", str(out)]
        print(f"{program.name}:", flush=True)
        if subprocess.run([sys.executable, str(program), *options]).returncode:
            sys.exit(f"{program.name} has failed.")
        print(flush=True)
    elif name == "I":
        results["imports"] = measure.imports(settings)
        _say(tables.imports(results["imports"]))
    else:
        sys.exit(f"There is no workload {name!r}. See `python benchmarks --help`.")


def _say(text: str) -> None:
    print(text, end="\n\n", flush=True)


def _plot(results: dict[str, Any], directory: pathlib.Path) -> None:
    import plots

    for path in plots.draw(results, directory):
        print(f"Drew {path}.")


def _machine(scratch: pathlib.Path) -> dict[str, Any]:
    packages = (
        "jax equinox tensorstore numpy safetensors flax orbax-checkpoint eqx_ckpt"
    )
    versions = {}
    for package in packages.split():
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    cpus = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in cpus if line.startswith("model name")]
    file_system = subprocess.run(
        ["stat", "-f", "-c", "%T", str(scratch)], capture_output=True, text=True
    )
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": file_system.stdout.strip(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
    }


if __name__ == "__main__":
    main()
