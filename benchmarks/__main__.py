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
import tables
from measure import Settings
from part import PARTS
from peers import PEERS
from workloads import sizes


_HERE = pathlib.Path(__file__).parent
_ALL = "TLMSPGCEFDI"
# Programs of their own, each with a file of results.
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
  C  compression                  E  edits and merges of 512 MiB
  D  object stores with a delay   F  stored functions
  I  imports                      T  Modules in training, with optimiser states
Everything together takes about an hour on 2 cores that do nothing else. It writes
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
    add("workloads", nargs="*", help="all of them; with --short, all but G and I")
    add("--short", action="store_true", help="small sizes; fails beyond limits.py")
    add("--big", action="store_true", help="growth to 30,000 leaves and to 4 GiB")
    add("--cold", action="store_true", help="evict files from the page cache first")
    add("--rounds", type=int, help="of L, M, S, P, G, I: 5, and 1 with --short")
    add("--only", nargs="+", default=[""], help="names of peers, or parts of them")
    add("--scratch", type=pathlib.Path, help="where to save; on a disk")
    add("--out", type=pathlib.Path, help="by default results/ of everything, or none")
    add("--pages", action="store_true", help="only pictures and tables of results/")
    add("--claims", action="store_true", help='only README\'s "Beside others"')
    given = parser.parse_args()
    if given.claims:
        # It has devices of its own.
        sys.exit(subprocess.run([sys.executable, str(_HERE / "claims.py")]).returncode)
    if given.pages:
        _publish()
        return
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    whole = not (given.short or given.big or given.cold or given.workloads)
    whole = whole and given.only == [""]
    out = given.out or (pages.RESULTS if whole else None)
    rounds = given.rounds or (1 if given.short else 5)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="eqx_ckpt-", dir=given.scratch))
    settings = Settings(scratch / "w", rounds, given.cold)
    results: dict[str, Any] = {
        "machine": _machine(scratch),
        "settings": {"rounds": rounds, "cold": given.cold},
        "how": {"whole": {p.name: p.how for p in PEERS}}
        | {"parts": {p.name: p.how for p in PARTS}},
        "whole": {},
        "parts": {},
        "growth": {},
        "imports": {},
    }
    failed: list[str] = []
    try:
        default = [x for x in _ALL if not (given.short and x in "GI")]
        for name in given.workloads or default:
            failed += _run(name, given, settings, results, out)
            if out:
                out.mkdir(parents=True, exist_ok=True)
                (out / "results.json").write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)
    for kind, how in {} if given.short else results["how"].items():
        print(f"How {kind} trees are run:" if kind == "whole" else "How parts are:")
        for name, sentence in how.items():
            print(f"  {name}: {sentence}")
    if out == pages.RESULTS:
        _publish()
    elif out:
        _plot(results, out)
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
    """Measures one workload, into the results, and prints its table. Returns what has
    failed."""
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
        measured = results["whole"].get("S")
        for per, unit, title, trees in (
            ("leaves", 1e-6, "Growth, µs a leaf, by leaves of 1 KiB", of.leaves),
            ("bytes", 1e-9, "Growth, ns a byte, by bytes", of.bytes),
        ):
            got = {}
            for size, make in trees.items():
                is_s = measured and per == "leaves" and size == measured["leaves"]
                got[size] = measured if is_s else measure.whole(make, peers, settings)
            results["growth"][per] = got
            _say(tables.growth(title, unit, got, per))
    elif name in _OTHERS:
        program = _HERE / f"{_OTHERS[name]}.py"
        options = ["--short"] if given.short else []
        if name != "D":  # It saves to a server.
            options += ["--scratch", str(settings.scratch.parent)]
        options += ["--out", str(out)] if out else []
        print(f"{program.name}:", flush=True)
        if subprocess.run([sys.executable, str(program), *options]).returncode:
            return [f"{program.name} has failed."]
        print(flush=True)
    elif name == "I":
        results["imports"] = measure.imports(settings)
        _say(tables.imports(results["imports"]))
    else:
        sys.exit(f"There is no workload {name!r}. See `python benchmarks --help`.")
    return []


def _say(text: str) -> None:
    print(text, end="\n\n", flush=True)


def _publish() -> None:
    """Draws the pictures of results/, and writes the tables of the pages."""
    _plot(json.loads((pages.RESULTS / "results.json").read_text()), pages.RESULTS)
    pages.write()


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
