"""Draws the results: one picture for each workload."""

import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


# Bars longer than so many times ours are cut.
_CUT = 6
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
    settings = results["settings"]
    cache = f"page cache {'cold' if settings['cold'] else 'warm'}"
    cache += f", medians of {settings['rounds']}"
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


def _bars(
    axes: Axes, seconds: dict[str, float | None], label: Callable[[float, float], str]
) -> None:
    """A bar for each peer, from the top down, as long as its time is in times of ours;
    there is none where there is no time. `label` is told both."""
    ours = seconds.get("eqx_ckpt") or 1.0
    for at, (peer, time) in enumerate(seconds.items()):
        if time is None:
            continue
        ratio = time / ours
        axes.barh(at, min(ratio, _CUT), color=_colour(peer), height=0.7)
        axes.annotate(
            label(time, ratio),
            (min(ratio, _CUT), at),
            xytext=(2, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
        if ratio > _CUT:
            # A gap in the bar, as it goes on beyond the picture.
            axes.barh(at, 0.06, left=_CUT - 0.3, color="white", height=0.9)
    axes.axvline(1, color=_OURS, linewidth=0.6, zorder=0)
    axes.set_xlim(0, 1.25 * _CUT)
    axes.set_xticks(range(_CUT + 1))
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.set_ylim(len(seconds) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _times(_: float, ratio: float) -> str:
    form = ".0f" if ratio >= 10 else ".1f" if ratio >= 1 else ".2g"
    return f"{ratio:{form}}x"


def _milliseconds(seconds: float, _: float) -> str:
    return f"{seconds * 1000:{'.0f' if seconds >= 0.01 else '.1f'}} ms"


def _whole(name: str, result: dict[str, Any], cache: str) -> Any:
    titles = {
        "save": "save, not synced",
        "durable": "save, durable",
        "load": f"load, {cache}",
    }
    height = 0.19 * len(result["peers"]) + 0.9
    figure, all_axes = plt.subplots(1, 3, figsize=(9, height), sharey=True)
    for axes, (key, title) in zip(all_axes, titles.items()):
        seconds = {
            peer: statistics.median(row[key]) if row[key] else None
            for peer, row in result["peers"].items()
        }
        _bars(axes, seconds, _times)
        for at, row in enumerate(result["peers"].values()):
            if key == "save" and row["durable"] and not row["save"]:
                axes.text(
                    0.1, at, "always synced", va="center", fontsize=7, color="grey"
                )
        axes.set_title(title)
    figure.supxlabel("time, that of eqx_ckpt being 1: less is faster", fontsize=8)
    figure.suptitle(
        f"{name}: {result['leaves']:,} leaves, {result['bytes'] / 2**20:,.0f} MiB"
    )
    return figure


def _parts(results: dict[str, Any], cache: str) -> Any:
    peers = list(next(iter(results.values()))["peers"])
    size = (9, 0.19 * len(peers) + 0.9)
    figure, grid = plt.subplots(
        1, len(results), figsize=size, sharey=True, squeeze=False
    )
    for axes, (name, result) in zip(grid[0], results.items()):
        seconds: dict[str, float | None] = {}
        for peer, row in result["peers"].items():
            both = [a + b for a, b in zip(row["open"], row["first"])]
            seconds[peer] = statistics.median(both) if both else None
        _bars(axes, seconds, _milliseconds)
        axes.set_title(name)
    figure.supxlabel(
        "time to open and make the array, that of eqx_ckpt being 1: less is faster",
        fontsize=8,
    )
    figure.suptitle(f"P: partial reads in a new process, {cache}")
    return figure


def _growth(results: dict[str, Any]) -> Any:
    lines = {"leaves": (1e-6, "µs a leaf"), "bytes": (1e-9, "ns a byte")}
    titles = {"durable": "save, durable", "load": "load"}
    figure, grid = plt.subplots(2, 2, figsize=(7, 4.6), sharex="col")
    for column, (per, (unit, label)) in zip(grid.T, lines.items()):
        sizes = list(results[per].values())
        # The durable save, as all of them have that one.
        for axes, (key, title) in zip(column, titles.items()):
            for peer in sizes[0]["peers"]:
                points = []
                for result in sizes:
                    if times := result["peers"][peer][key]:
                        each = statistics.median(times) / result[per] / unit
                        points.append((result[per], each))
                if points:
                    wide = 2 if peer == "eqx_ckpt" else 1
                    xs, ys = zip(*points)
                    axes.plot(xs, ys, marker="o", markersize=3, label=peer, lw=wide)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(f"{title}, {label}")
        column[1].set_xlabel({"leaves": "leaves of 1 KiB", "bytes": "bytes"}[per])
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure
