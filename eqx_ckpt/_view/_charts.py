"""The numbers of one leaf as data to draw: figures, a histogram, a picture, a spectrum.

All of it is JSON: numbers, texts, lists and dicts. A page and a report draw the same.
"""

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._edit import _stats
from .._edit._sample import floats, Sample, WHOLE
from .._edit._stats import LeafStats
from .._kernel._format import _text


_BINS = 64
# Elements within so many deviations of the mean are drawn; the others are counted.
_DEVIATIONS = 5
# The side of a picture; the points of a curve; the work for which a spectrum is cheap.
_SIDE, _POINTS, _CHEAP = 256, 256, 2**34


# ---- Figures and histograms.


class _Measured(NamedTuple):
    """Statistics of a leaf as it was read, and how many times as large it is."""

    row: LeafStats
    times: float

    @property
    def norm(self) -> float | None:
        return None if self.row.norm is None else self.row.norm * math.sqrt(self.times)


def _measured(sample: Sample) -> _Measured | None:
    if floats(sample.value) is None:
        return None
    row = _stats.stats({"x": sample.value})["x"]
    is_part = bool(sample.said and row.size)
    return _Measured(row, sample.size / row.size if is_part else 1.0)


def figures(sample: Sample) -> dict[str, str]:
    """Titles and texts: the range, the mean, what is zero, NaN or infinite."""
    found = _measured(sample)
    if found is None:
        return {}
    row, times = found
    about = "about " if times != 1 else ""
    names = ("min", "max", "mean", "std")
    out = {name: _stats.short(getattr(row, name)) for name in names if row.size}
    if found.norm is not None:
        out["norm"] = about + _stats.short(found.norm)
    for name, title in (("zero", "zeros"), ("nan", "NaN"), ("inf", "infinite")):
        count = getattr(row, name)
        if count is not None:
            share = f" ({count / row.size:.2%})" if count and row.size else ""
            some = about if count else ""
            out[title] = f"{some}{round(count * times):,}{share}"
    return {name: text for name, text in out.items() if text}


def norm(sample: Sample) -> float | None:
    """The norm of the finite elements; of a sample about that of the whole."""
    found = _measured(sample)
    return None if found is None else found.norm


def histogram(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Counts of one array, or of two in the same bins: `lo` and `hi` of the bins, rows
    of `counts`, and how many lie outside of them."""
    arrays = [x for x in (floats(sample.value) for sample in samples) if x is not None]
    if not arrays or sum(x.size for x in arrays) < 2:
        return None
    is_whole = all(np.asarray(s.value).dtype.kind in "iub" for s in samples)
    finite = [x[np.isfinite(x)] for x in map(np.ravel, arrays)]
    ends = [end for x in finite if x.size for end in _ends(x)]
    if not ends:
        return None
    lo, hi, bins = _bins(min(ends), max(ends), is_whole)
    if not math.isfinite(hi - lo):
        return None
    counts = [_counted(x, lo, hi, bins) for x in finite]
    outside = [x.size - sum(row) for x, row in zip(finite, counts)]
    return {"lo": short(lo), "hi": short(hi), "counts": counts, "outside": outside}


def _bins(least: float, most: float, is_whole: bool) -> tuple[float, float, int]:
    """Where the bins of some numbers begin and end, and how many they are. Few whole
    numbers have a bin each."""
    # Floats of 2**52 and more have no halves.
    if is_whole and most - least < _BINS and max(-least, most) < 2**52:
        lo, hi = math.floor(least) - 0.5, math.ceil(most) + 0.5
        return lo, hi, min(round(hi - lo), _BINS)
    if most > least:
        return least, most, _BINS
    half = abs(least) / 2 or 0.5
    return least - half, most + half, _BINS


def _counted(x: np.ndarray, lo: float, hi: float, bins: int) -> list[int]:
    """Counts like `np.histogram`, which takes longer."""
    counts = np.zeros(bins, np.int64)
    for start in range(0, x.size, 2**17):
        part = x[start : start + 2**17]
        part = part[(part >= lo) & (part <= hi)].astype(np.float64)
        places = ((part - lo) / (hi - lo) * bins).astype(np.intp)
        counts += np.bincount(np.minimum(places, bins - 1), minlength=bins)
    return counts.tolist()


def _ends(x: np.ndarray) -> tuple[float, float]:
    least, most = float(x.min()), float(x.max())
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(x.mean(dtype=np.float64)), float(x.std())
    if not math.isfinite(deviation):
        return least, most
    reach = _DEVIATIONS * deviation
    return max(least, mean - reach), min(most, mean + reach)


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[list[int | float]]:
    """The finite points of a line, each `[x, y]`. If there are more than `most`, each
    run of equally many is one row: the last x, and the mean, the least and the greatest
    y."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) <= most:
        return [[x, short(y)] for x, y in finite]
    xs, ys = np.array([x for x, _ in finite]), np.array([y for _, y in finite])
    starts = np.arange(0, len(ys), math.ceil(len(ys) / most))
    counts = np.diff(starts, append=len(ys))
    columns = [xs[starts + counts - 1].tolist()]
    columns += [
        [short(y) for y in found.tolist()]
        for found in (
            np.add.reduceat(ys / np.repeat(counts, counts), starts),
            np.minimum.reduceat(ys, starts),
            np.maximum.reduceat(ys, starts),
        )
    ]
    return [list(row) for row in zip(*columns)]


def short(x: float) -> float:
    """A number in few digits."""
    return float(f"{x:.5g}")


# ---- Pictures.


def default_index(shape: Sequence[int], nbytes: int = 0) -> str:
    """The slice that is drawn at first, in NumPy's notation: the last two axes, and of
    a large leaf a corner of them."""
    axes = ["0:512" if nbytes > WHOLE else ":"] * min(2, len(shape))
    return ", ".join(["0"] * (len(shape) - 2) + axes)


def picture(
    arrays: Sequence[np.ndarray], side: int = _SIDE, points: int = _POINTS
) -> dict[str, Any] | None:
    """A slice of an array to look at, or what the second one has more than the first:
    of two axes a `grid` of bytes, of one a `curve`. None where there are no numbers."""
    found = [x for x in map(floats, arrays) if x is not None]
    if len(found) < len(arrays) or found[0].ndim not in (1, 2) or not found[0].size:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        x = found[1] - found[0] if len(found) == 2 else found[0]
    return _grid_of(x, side) if x.ndim == 2 else _curve(x, points)


def _grid_of(x: np.ndarray, side: int) -> dict[str, Any]:
    """Each dot is the element of the largest magnitude of a block. The byte 255 is
    what is not finite; 0 to 254 lie between `lo` and `hi`."""
    rows, columns = x.shape
    steps = [math.ceil(n / side) for n in x.shape]
    x = _extremes(_extremes(x, steps[0], 0), steps[1], 1)
    good = np.isfinite(x)
    values = x[good]
    lo, hi = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if lo < 0 < hi:
        # White is zero. A few outliers do not take the colours of all others.
        reach = float(np.quantile(np.abs(values[values != 0]), 0.999))
        lo, hi = -reach, reach
    # Of halves, in double precision: the whole width may be more than a float can be.
    width = hi / 2 - lo / 2 or 1.0
    halves = np.where(good, x, lo).astype(np.float64) / 2
    levels = np.clip((halves - lo / 2) / width, 0, 1) * 254
    levels = np.where(good, np.round(levels), 255).astype(np.uint8)
    return {
        "shape": [rows, columns],
        "steps": steps,
        "lo": short(lo),
        "hi": short(hi),
        "is_signed": lo < 0 < hi,
        "size": [*levels.shape],
        "grid": base64.b64encode(levels.tobytes()).decode(),
    }


def _extremes(x: np.ndarray, step: int, axis: int) -> np.ndarray:
    if step == 1:
        return x
    starts = np.arange(0, x.shape[axis], step)
    most = np.maximum.reduceat(x, starts, axis)
    least = np.minimum.reduceat(x, starts, axis)
    return np.where(np.abs(least) > np.abs(most), least, most)


def _curve(x: np.ndarray, points: int) -> dict[str, Any]:
    """The least and the greatest of runs of elements, where those that are not finite
    count as 0."""
    step = math.ceil(x.size / points)
    x = np.where(np.isfinite(x), x, 0.0)
    starts = np.arange(0, x.size, step)
    least, most = np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)
    rows = [[short(float(value)) for value in row] for row in (least, most)]
    return {"shape": [x.size], "step": step, "curve": rows[:1] if step == 1 else rows}


def spectrum(sample: Sample, points: int = _POINTS) -> dict[str, Any] | None:
    """The singular values of a matrix, where they are cheap."""
    x = floats(sample.value)
    if x is None or sample.said or x.ndim != 2 or min(x.shape) < 2:
        return None
    few, many = sorted(x.shape)
    if few * few * (many + 8 * few) > _CHEAP or not np.isfinite(x).all():
        return None
    wide = (x if x.shape[0] == few else x.T).astype(np.float64)
    squares = np.linalg.eigvalsh(wide @ wide.T)[::-1]
    values = np.sqrt(np.maximum(squares, 0.0))
    chosen = np.unique(np.linspace(0, few - 1, min(points, few)).astype(int))
    total = float(np.sum(values**2))
    rank = float(np.sum(values)) ** 2 / total if total else 0.0
    return {
        "count": few,
        "values": [float(f"{values[i]:.3g}") for i in chosen],
        "at": chosen.tolist(),
        "largest": short(float(values[0])),
        # So many equal ones would have the same sum, and the same sum of squares.
        "effective": short(rank),
    }


def words(value: object) -> str:
    """A value that is no array of many elements, as text."""
    if isinstance(value, np.ndarray):
        return words(value.tolist()) if value.size <= 64 else ""
    if isinstance(value, str):
        return _text.cut(value, 4000)
    return _text.bounded(repr(value), 4000)
