"""Draws the results: one picture for each workload."""

import pathlib
import statistics
from typing import Any

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


_OURS, _RAW, _PEER = "#0072b2", "#bbbbbb", "#e69f00"
_STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
}


def draw(results: dict[str, Any], directory: pathlib.Path) -> list[pathlib.Path]:
    """Draws all that is there into PNGs in a directory."""
    cache = f"page cache {'cold' if results['settings']['cold'] else 'warm'}"
    drawn: list[pathlib.Path] = []
    with plt.rc_context(_STYLE):
        for name, result in results["whole"].items():
            figure = _whole(name, result, cache)
            drawn.append(_save(figure, directory / f"{name}.png"))
        if results["parts"]:
            figure = _parts(results["parts"], cache)
            drawn.append(_save(figure, directory / "P.png"))
        if results["growth"]:
            figure = _growth(results["growth"])
            drawn.append(_save(figure, directory / "G.png"))
    return drawn


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def _colour(peer: str) -> str:
    if peer.startswith("eqx_ckpt"):
        return _OURS
    return _RAW if peer.startswith("raw") else _PEER


def _bars(axes: Axes, peers: list[str], values: list[float | None], form: str) -> None:
    """A bar for each peer, from the top down; there is none where there is no value."""
    for at, (peer, value) in enumerate(zip(peers, values)):
        if value is not None:
            axes.barh(at, value, color=_colour(peer), height=0.7)
            axes.annotate(
                form.format(value),
                (value, at),
                xytext=(2, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(len(peers)), peers)
    axes.set_ylim(len(peers) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _whole(name: str, result: dict[str, Any], cache: str) -> Any:
    rows = {peer: row for peer, row in result["peers"].items() if "error" not in row}
    titles = {
        "save": "save, not synced",
        "durable": "save, durable",
        "load": f"load, {cache}",
    }
    figure, all_axes = plt.subplots(
        1, 3, figsize=(9, 0.19 * len(rows) + 0.9), sharey=True, sharex=True
    )
    for axes, (key, title) in zip(all_axes, titles.items()):
        ours = rows.get("eqx_ckpt", {}).get(key)
        base = statistics.median(ours) if ours else 1.0
        values = [
            statistics.median(row[key]) / base if row[key] else None
            for row in rows.values()
        ]
        # Each bar begins at the left edge, and ends at a ratio on a scale of ratios.
        axes.set_xscale("log")
        _bars(axes, list(rows), values, "{:.2g}x")
        axes.axvline(1, color="black", linewidth=0.6)
        axes.set_title(f"{title} ({base:.2g} s = 1)")
        axes.margins(x=0.2)
    all_axes[1].set_xlabel("time relative to eqx_ckpt, on a log scale: less is faster")
    figure.suptitle(
        f"{name}: {result['leaves']:,} leaves, {result['bytes'] / 2**20:,.0f} MiB"
    )
    return figure


def _parts(results: dict[str, Any], cache: str) -> Any:
    peers = list(next(iter(results.values()))["peers"])
    figure, all_axes = plt.subplots(
        1,
        len(results),
        figsize=(9, 0.25 * len(peers) + 0.9),
        sharey=True,
        squeeze=False,
    )
    for axes, (name, result) in zip(all_axes[0], results.items()):
        values: list[float | None] = []
        for peer in peers:
            row = result["peers"][peer]
            if row.get("first"):
                both = zip(row["open"], row["first"])
                values.append(1000 * statistics.median(a + b for a, b in both))
            else:
                values.append(None)
        axes.set_xscale("log")
        _bars(axes, peers, values, "{:.3g}")
        axes.set_title(name)
        axes.margins(x=0.2)
    middle = all_axes[0][len(results) // 2]
    middle.set_xlabel(f"ms to open and make the array, in a new process, {cache}")
    return figure


def _growth(results: dict[str, Any]) -> Any:
    lines = {"leaves": (1e-6, "µs a leaf"), "bytes": (1e-9, "ns a byte")}
    figure, grid = plt.subplots(2, 2, figsize=(7, 4.6), sharex="col")
    for column, (per, (unit, label)) in zip(grid.T, lines.items()):
        sizes = list(results[per].values())
        for axes, key in zip(column, ("save", "load")):
            for peer in sizes[0]["peers"]:
                points = []
                for result in sizes:
                    row = result["peers"][peer]
                    # Orbax has no other save.
                    times = row[key] or (row["durable"] if key == "save" else [])
                    if times:
                        each = statistics.median(times) / result[per] / unit
                        points.append((result[per], each))
                if points:
                    wide = 2 if peer == "eqx_ckpt" else 1
                    xs, ys = zip(*points)
                    axes.plot(xs, ys, marker="o", markersize=3, label=peer, lw=wide)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(f"{key}, {label}")
        column[1].set_xlabel({"leaves": "leaves of 1 KiB", "bytes": "bytes"}[per])
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure
