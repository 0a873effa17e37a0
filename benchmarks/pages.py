"""Tables in Markdown of what is in results/, and their places in the pages.

A table stands below a line `<!-- table: NAME -->`, and ends with its last row.
"""

import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any


Results = dict[str, Any]
RESULTS = pathlib.Path(__file__).parent / "results"
_ROOT = pathlib.Path(__file__).parents[1]
PAGES = [_ROOT / "README.md", _ROOT / "docs/benchmarks.md"]
_MODEL_KINDS = ("save", "load", "first save", "first load")
_WHOLE = {"save": "save", "durable": "durable save", "load": "load"}
_FLAT = {
    "L": "16 x 64 MiB",
    "M": "GPT-2-small with Adam, 445 leaves",
    "S": "10,000 x 1 KiB",
}


def results(directory: pathlib.Path = RESULTS) -> Results:
    """What each file of results holds, by the name of the file."""
    files = directory.glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def write() -> None:
    """Writes all tables into the pages."""
    found = results()
    for page in PAGES:
        page.write_text(written(page.read_text(), found))


def written(text: str, found: Results) -> str:
    """A page with the tables of these results."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]](found)}\n"

    return re.sub(r"(<!-- table: (\S+) -->\n)\n(?:\|.*\n)*", fill, text)


def count(samples: Iterable[list[Any]]) -> str:
    """How many were measured: of each the same, or from the fewest to the most."""
    counts = sorted({len(sample) for sample in samples} - {0})
    return " to ".join(str(x) for x in dict.fromkeys(counts[:1] + counts[-1:]))


# ---- The tables.


def modules(found: Results) -> str:
    """Models of models.json: milliseconds of CPU and by the clock, of each peer."""
    models = found["models"]
    head = ["", "ms of CPU (by the clock)"]
    for kind in _MODEL_KINDS:
        rows = [row for model in models.values() for row in model["peers"].values()]
        sampled = count(row[kind] for row in rows if kind in row)
        head.append(f"{kind}, {sampled} times" if sampled else kind)
    lines = []
    for name, model in models.items():
        size = f"{model['leaves']:,} leaves, {model['bytes'] / 2**20:.1f} MiB"
        for peer, row in model["peers"].items():
            first = f"{name}, {size}" if peer == next(iter(model["peers"])) else ""
            cells = [first, peer]
            for kind in _MODEL_KINDS:
                medians = [statistics.median(x) for x in zip(*row.get(kind, []))]
                cells.append("{:.1f} ({:.1f})".format(*medians) if medians else "")
            lines.append(cells)
    return table(head, lines, 2)


def flat(found: Results) -> str:
    """Flat trees of results.json: seconds of each peer."""
    whole = found["results"]["whole"]
    head = [f"seconds, medians of {_flat_count(found)} rounds"]
    head += [f"{name}: {kind}" for name in _FLAT for kind in _WHOLE.values()]
    lines = []
    for peer in whole["L"]["peers"]:
        rows = [whole[name]["peers"][peer] for name in _FLAT]
        lines.append([peer, *(_seconds(row[kind]) for row in rows for kind in _WHOLE)])
    return table(head, lines, 1)


def whole(name: str, result: Results) -> str:
    """One flat tree: seconds, files, bytes and memory of each peer."""
    head = [f"{name}: {result['leaves']:,} leaves, {_nbytes(result['bytes'])}"]
    head += [f"{kind}, s" for kind in _WHOLE.values()]
    head += ["files", "on disk", "read", "save: memory above tree", "load"]
    lines = []
    for peer, row in result["peers"].items():
        if "error" in row:
            lines.append([peer, row["error"], *[""] * 7])
            continue
        read = "mapped" if row["read"] is None else _nbytes(row["read"])
        sizes = [_nbytes(row[key]) for key in ("save_peak", "load_peak")]
        cells = [f"{row['files']:,}", _nbytes(row["disk"]), read, *sizes]
        lines.append([peer, *(_seconds(row[kind]) for kind in _WHOLE), *cells])
    return table(head, lines, 1)


def parts(found: Results) -> str:
    """Parts of results.json: milliseconds to open and to make an array, and bytes."""
    measured = found["results"]["parts"]
    sampled = count(x["first"] for r in measured.values() for x in r["peers"].values())
    head = [f"medians of {sampled} new processes"]
    head += [f"{title}: {kind}" for title in measured for kind in ("ms", "read")]
    lines = []
    for peer in next(iter(measured.values()))["peers"]:
        cells = [peer]
        for row in (result["peers"][peer] for result in measured.values()):
            if "error" in row:
                cells += [row["error"], ""]
                continue
            both = [1e3 * (a + b) for a, b in zip(row["open"], row["first"])]
            read = "mapped" if row["read"] is None else _nbytes(row["read"])
            cells += [f"{statistics.median(both):.1f}", read]
        lines.append(cells)
    return table(head, lines, 1)


def summary(found: Results) -> str:
    """The table of README.md: Modules, then flat trees."""
    models, whole = found["models"], found["results"]["whole"]
    peers = ["eqx_ckpt", "Equinox", "safetensors.flax", "Orbax v0", "Orbax v1"]
    firsts = count(
        row["first load"]
        for model in models.values()
        for row in model["peers"].values()
        if "first load" in row
    )
    later = count(r["load"] for m in models.values() for r in m["peers"].values())
    head = [
        f"medians of {later} calls, {firsts} first loads, {_flat_count(found)} of flat "
        "trees",
        *peers,
    ]
    lines = []
    for narrow, model in models.items():
        wide = next((x for x in models if x.startswith(f"{narrow}, ")), None)
        if wide is None:
            continue
        title = narrow.replace(" with ", " Module with ", 1)
        size = f"{models[wide]['bytes'] / 2**20:.0f} MiB"
        cells = [f"{title}, {model['leaves']:,} leaves, {size}"]
        for peer in peers:
            name = next((x for x in (peer, f"{peer}, flat") if x in model["peers"]), "")
            if not name or peer.startswith("Orbax"):
                cells.append("")
                continue
            later_row, first_row = models[wide]["peers"][name], model["peers"][name]
            kinds = [later_row["save"], later_row["load"], first_row["first load"]]
            times = [statistics.median(cpu for cpu, _ in some) for some in kinds]
            cells.append(", ".join(f"{x:.0f}" for x in times) + " ms")
        lines.append(cells)
    for name, title in _FLAT.items():
        rows = [whole[name]["peers"][peer] for peer in peers]
        both = [f"{_seconds(x['durable'])}, {_seconds(x['load'])} s" for x in rows]
        lines.append([title, *both])
    return table(head, lines, 1)


def compressed(found: Results) -> str:
    """Codecs of compressed.json."""
    done = found["compressed"]
    head = [f"medians of {done['rounds']} rounds", "", "size", "durable save", "load"]
    head += ["cold load"]
    lines = []
    for row in done["rows"]:
        way = f"`{row['compression']}`" if row["compression"] else "none"
        speeds = [
            f"{row[name]:.2f} ({row[f'{name}_cpu']:.2f})"
            for name in ("save", "load", "cold")
        ]
        lines.append([row["dtype"], way, f"{row['size']:.3f}", *speeds])
    return table(head, lines, 2)


def edits(found: Results) -> str:
    """Cases of editing.json."""
    done = found["editing"]
    head = [f"{done['size'] / 2**20:,.0f} MiB, one run each", "", "seconds", "cpu"]
    lines = []
    for case, ways in done["cases"].items():
        for way, row in ways.items():
            times = [f"{row[key]:.2f}" for key in ("seconds", "cpu", "cp")]
            sizes = [_nbytes(row[key]) for key in ("read", "written", "peak")]
            lines.append([case, way, *times, *sizes])
    return table([*head, "`cp`", "read", "written", "peak"], lines, 2)


def functions(found: Results) -> str:
    """Models of functions.json: their sizes, and seconds."""
    keys = ("save", "export", "save again", "first", "model")
    lines = []
    for row in found["functions"]["rows"]:
        order = f", `vjp_order={row['order']}`" if row["order"] else ""
        cells = [f"{row['name']}, {row['MB']:.0f} MB{order}", f"{row['leaves']}"]
        cells.append(f"{row['function kB']:.0f} kB")
        lines.append([*cells, *(f"{row[key]:.2f}" for key in keys)])
    head = ["seconds, one run each", "leaves", "function", *keys]
    return table(head, lines, 1)


def felt(found: Results) -> str:
    """Calls of felt.json: milliseconds of CPU, and of what is beside each."""
    head = ["ms of CPU", "call", "beside it", "times", "limit"]
    lines = [
        [name, f"{own:.2f}", f"{other:.2f}", f"{own / other:.1f}", f"{limit:g}"]
        for name, (own, other, limit) in found["felt"]["rows"].items()
    ]
    return table(head, lines, 1)


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "modules": modules,
    "flat": flat,
    "parts": parts,
    "compressed": compressed,
    "edits": edits,
    "functions": functions,
    "felt": felt,
}


# ---- Cells.


def table(head: list[str], lines: list[list[str]], words: int) -> str:
    """A table whose columns are numbers but for the first ones."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *lines])


def _flat_count(found: Results) -> str:
    whole = found["results"]["whole"].values()
    return count(row["load"] for w in whole for row in w["peers"].values())


def _seconds(times: list[float]) -> str:
    if not times:
        return ""
    median = statistics.median(times)
    return f"{median:.0f}" if median >= 10 else f"{median:#.2g}".rstrip(".")


def _nbytes(nbytes: float) -> str:
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:,.0f} MiB"
    return f"{nbytes / 1e3:,.0f} kB"
