"""Results as text. Times are medians, and minima in brackets; ratios are of medians,
that of `eqx_ckpt` in the same column being 1."""

import statistics
from typing import Any

import pages


_MIB = 2**20
_MISSING = "-"


def whole(name: str, result: dict[str, Any], cold: bool) -> str:
    rows = result["peers"]
    lines = [
        f"{name}: {result['leaves']} leaves, {result['bytes'] / _MIB:.0f} MiB; "
        f"page cache {'cold' if cold else 'warm'}; {_rounds(rows, 'load')}",
        f"{'':24}{'save, not synced s':>22}{'save, durable s':>22}{'load s':>22}"
        f"{'files':>7}{'on disk':>9}{'read':>9}{'peak RSS above tree':>21}",
        f"{'':97}{'MiB':>9}{'MiB':>9}{'save':>14}{'load':>7}",
    ]
    for peer, row in rows.items():
        if "error" in row:
            lines.append(f"{peer:24}  {row['error']}")
            continue
        cells = [
            _time(row[key], rows.get("eqx_ckpt", {}).get(key))
            for key in ("save", "durable", "load")
        ]
        if not row["save"]:
            cells[0] = f"{'always synced':>22}"
        lines.append(
            f"{peer:24}{''.join(cells)}{row['files']:7d}{row['disk'] / _MIB:9.1f}"
            f"{_read(row, cold):>9}"
            f"{row['save_peak'] / _MIB:14.0f}{row['load_peak'] / _MIB:7.0f}"
        )
    return "\n".join(lines)


def part(name: str, result: dict[str, Any], cold: bool) -> str:
    rows = result["peers"]
    lines = [
        f"{name}: {result['bytes'] / _MIB:.3f} MiB, in a new process; "
        f"page cache {'cold' if cold else 'warm'}; {_rounds(rows, 'first')}",
        f"{'':24}{'imports s':>12}{'open ms':>22}{'first array ms':>22}"
        f"{'read MiB':>10}",
    ]
    for peer, row in rows.items():
        if "error" in row:
            lines.append(f"{peer:24}  {row['error']}")
            continue
        cells = [
            _time(row[key], rows.get("eqx_ckpt", {}).get(key), 1000)
            for key in ("open", "first")
        ]
        lines.append(
            f"{peer:24}{statistics.median(row['imports']):12.2f}{''.join(cells)}"
            f"{_read(row, cold):>10}"
        )
    return "\n".join(lines)


def growth(title: str, unit: float, results: dict[str, Any], per: str) -> str:
    """A line of sizes: for each peer, the time per leaf or byte at each of them."""
    sizes = list(results.values())
    rows = {(n, peer): x for n, r in results.items() for peer, x in r["peers"].items()}
    lines = [f"{title}; {_rounds(rows, 'load')}"]
    for key in ("save", "durable", "load"):
        head = "".join(f"{_size(result[per], per):>12}" for result in sizes)
        lines.append(f"{'  ' + key:24}{head}")
        for peer in sizes[0]["peers"]:
            cells = []
            for result in sizes:
                times = result["peers"][peer][key]
                each = statistics.median(times) / result[per] if times else None
                cells.append(_MISSING if each is None else f"{each / unit:.3f}")
            if set(cells) != {_MISSING}:
                lines.append(f"{'  ' + peer:24}{''.join(f'{c:>12}' for c in cells)}")
    return "\n".join(lines)


def imports(times: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    over = medians["eqx_ckpt"] - medians["equinox"]
    return (
        f"import equinox {medians['equinox']:.3f} s, "
        f"import eqx_ckpt {medians['eqx_ckpt']:.3f} s: {over * 1000:.0f} ms more"
    )


def _rounds(rows: dict[Any, dict[str, Any]], key: str) -> str:
    return f"{pages.count(row[key] for row in rows.values())} rounds"


def _size(value: int, per: str) -> str:
    return f"{value:,}" if per == "leaves" else f"{value / _MIB:,.0f} MiB"


def _time(times: list[float], ours: list[float] | None, scale: float = 1) -> str:
    if not times:
        return f"{_MISSING:>22}"
    median = statistics.median(times)
    ratio = f"{median / statistics.median(ours):.2f}x" if ours else ""
    return f"{median * scale:8.3f} ({min(times) * scale:.3f}){ratio:>8}".rjust(22)


def _read(row: dict[str, Any], cold: bool) -> str:
    # From the disk, with what the kernel reads ahead; or else as it was asked for.
    read = row["disk_read"] if cold else row["read"]
    return "mapped" if read is None else f"{read / _MIB:.2f}"
