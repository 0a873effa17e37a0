"""Routes of arrays over devices: from processes that each read an even share of the
chunks, to the sharding that is asked for. Pure arithmetic on a mesh without devices.

A mesh is seen as *digits*, the prime factors of its axes: by each of them either
processes differ, or the devices of one process. A *layout* says which digits cut which
dimension of an array, the major one first.
"""

import collections
import functools as ft
import itertools as it
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


# Where processes would read more than this many times the array, it may be padded.
_MORE = 1.1

Layout = tuple[tuple[int, ...], ...]


class Digits(NamedTuple):
    """The digits of a mesh, major first: their sizes, whether processes differ by each,
    and which of them every axis of the mesh has."""

    sizes: tuple[int, ...]
    apart: tuple[bool, ...]
    axes: tuple[tuple[int, ...], ...]

    def count(self, axes: tuple[int, ...]) -> int:
        """Into how many parts these digits cut."""
        return math.prod(self.sizes[digit] for digit in axes)


@ft.lru_cache(maxsize=256)
def digits(axes: tuple[int, ...], processes: tuple[int, ...]) -> Digits | None:
    """The digits of a mesh with axes of these sizes, and the process of each device in
    row-major order. None where processes do not lie regularly in it."""
    groups = _groups(processes)
    if groups is None:
        return None
    bounds = {size: False for size in it.accumulate(reversed(axes), int.__mul__)}
    kinds, size = [], 1
    for length, is_apart in groups:
        kinds.append((size, size * length, is_apart))
        size *= length
    bounds |= dict.fromkeys((stop for _, stop, _ in kinds), False)
    ends = sorted({1, *bounds})
    found: list[tuple[int, bool, int]] = []
    for low, high in it.pairwise(ends):
        if high % low:
            return None
        is_apart = next(apart for a, b, apart in kinds if a <= low < b)
        found += [(prime, is_apart, low) for prime in _primes(high // low)]
    found.reverse()
    own, stop = [], math.prod(axes)
    for length in axes:
        start = stop // length
        own.append(tuple(i for i, (_, _, at) in enumerate(found) if start <= at < stop))
        stop = start
    sizes, apart, _ = zip(*found) if found else ((), (), ())
    return Digits(tuple(sizes), tuple(apart), tuple(own))


def _groups(processes: Sequence[int]) -> list[tuple[int, bool]] | None:
    """The processes of devices in order as nested groups, the innermost first: of how
    many, and whether they are other processes or the same."""
    row: list = list(processes)
    out = []
    while len(row) > 1:
        is_apart = row[0] != row[1]
        ends = (i for i, x in enumerate(row) if i and (x == row[0]) == is_apart)
        size = next(ends, len(row))
        groups = [tuple(row[i : i + size]) for i in range(0, len(row), size)]
        kinds = size if is_apart else 1
        if any(len(g) != size or len(set(g)) != kinds for g in groups):
            return None
        out.append((size, is_apart))
        row = groups
    count = math.prod(size for size, is_apart in out if is_apart)
    return out if count == len(set(processes)) else None


def _primes(number: int) -> list[int]:
    out, prime = [], 2
    while number > 1:
        while number % prime == 0:
            out.append(prime)
            number //= prime
        prime += 1
    return out


class Exchange(NamedTuple):
    """The minor digits of one dimension become those of another."""

    digits: tuple[int, ...]
    from_dim: int
    to_dim: int


class Gather(NamedTuple):
    """The minor digits of a dimension no longer cut it."""

    digits: tuple[int, ...]
    dim: int


class Route(NamedTuple):
    """The way of an array from reading it to where it is asked for.

    Processes read it with layout `first`. Devices then hand their parts on, so that it
    has layout `second`; make the exchanges, and the gathers. On its way it is `padded`
    along axes that the target does not cut, so that parts end where chunks do. `read`
    and `wanted` count the elements of chunks that all processes together read: this
    way, and if each reads what it has to have.
    """

    digits: Digits
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    first: Layout
    second: Layout
    exchanges: tuple[Exchange, ...]
    gathers: tuple[Gather, ...]
    target: Layout
    read: int
    wanted: int

    @property
    def processes(self) -> int:
        """The count of processes that have a part of it each."""
        sizes, apart = self.digits.sizes, self.digits.apart
        return math.prod(size for size, is_apart in zip(sizes, apart) if is_apart)

    @property
    def is_short(self) -> bool:
        """Whether nothing moves."""
        is_moved = self.first != self.second
        return not (is_moved or self.exchanges or self.gathers)


@ft.lru_cache(maxsize=4096)
def plan(
    digits: Digits, shape: tuple[int, ...], chunk: tuple[int, ...], target: Layout
) -> Route | None:
    """The route by which the processes read as little as can be. None where every cut
    of the array leaves some processes with the same part."""
    array = CutArray(digits, shape, shape, chunk)
    best = _plan(array, target)
    if best is not None and best.read <= _MORE * math.prod(shape):
        return best
    for padded in _paddings(array, target):
        found = _plan(array._replace(padded=padded), target)
        if found is not None and (best is None or found.read < best.read):
            best = found
    return best


class CutArray(NamedTuple):
    """An array of such chunks, which is padded, and cut by the digits of a mesh."""

    digits: Digits
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    chunk: tuple[int, ...]

    def touched(self, layout: Layout) -> int:
        """The elements of the chunks that the processes read, all of them together."""
        sizes, apart = self.digits.sizes, self.digits.apart
        used = set().union(*layout)
        count = math.prod(
            size
            for digit, size in enumerate(sizes)
            if apart[digit] and digit not in used
        )
        for n, full, c, axes in zip(self.shape, self.padded, self.chunk, layout):
            own = tuple((sizes[digit], apart[digit]) for digit in axes)
            count *= _touched(n, full, c, own)
        return count


def _paddings(array: CutArray, target: Layout) -> list[tuple[int, ...]]:
    """Shapes with an axis that can be cut where chunks end, the smallest first. None
    has more than twice the elements."""
    digits, shape, _, chunk = array
    outer = [n for n, is_apart in zip(digits.sizes, digits.apart) if is_apart]
    counts = {1}
    for size in outer:
        counts |= {size * count for count in counts}
    found = set()
    for dim, (n, c) in enumerate(zip(shape, chunk)):
        for count in () if target[dim] else counts:
            length = -(-n // (c * count)) * c * count
            if n < length <= 2 * n:
                found.add((*shape[:dim], length, *shape[dim + 1 :]))
    return sorted(found, key=math.prod)


def _plan(array: CutArray, target: Layout) -> Route | None:
    """The best route of an array that is padded so."""
    digits, shape, padded, chunk = array
    last = _without_replicas(digits, padded, target)
    used = sorted(digit for axes in last for digit in axes)
    if any(digits.apart[i] for i in range(len(digits.sizes)) if i not in used):
        return None
    gathers = tuple(
        Gather(axes[len(own) :], dim)
        for dim, (axes, own) in enumerate(zip(last, target))
        if len(axes) > len(own)
    )
    wanted, read = array.touched(target), array.touched(last)
    best = Route(digits, shape, padded, last, last, (), gathers, target, read, wanted)
    outer = [digits.sizes[i] for i in used if digits.apart[i]]
    cuts = []
    for cut in _splits(outer, len(padded)):
        if not any(n % parts for n, parts in zip(padded, cut)):
            along = (
                _touched(n, full, c, ((parts, True),))
                for n, full, c, parts in zip(shape, padded, chunk, cut)
            )
            cuts.append((math.prod(along), cut))
    cuts.sort(key=lambda found: found[0])
    for size, same in it.groupby(cuts, key=lambda found: found[0]):
        if size >= read:
            break
        found = [
            route for _, cut in same for route in _by_way_of(best, array, cut, size)
        ]
        if found:
            return min(found, key=_steps)
    return best


def _steps(route: Route) -> int:
    return len(route.exchanges) + (route.first != route.second)


def _without_replicas(digits: Digits, shape: tuple[int, ...], target: Layout) -> Layout:
    """The layout in which digits that cut nothing cut what they can, first of all those
    by which processes differ."""
    out = list(target)
    spare = set(range(len(digits.sizes))).difference(*target)
    for digit in sorted(spare, key=lambda digit: (not digits.apart[digit], digit)):
        for dim, length in enumerate(shape):
            axes = (*out[dim], digit)
            if length and length % digits.count(axes) == 0:
                out[dim] = axes
                break
    return tuple(out)


@ft.lru_cache(maxsize=4096)
def _touched(
    length: int, padded: int, chunk: int, axes: tuple[tuple[int, bool], ...]
) -> int:
    """`CutArray.touched` along one dimension, which is cut by digits of these sizes."""
    part = padded // math.prod(size for size, _ in axes)
    ends: dict[tuple[int, ...], int] = {}
    count = 0
    for number, at in enumerate(it.product(*(range(size) for size, _ in axes))):
        process = tuple(i for i, (_, is_apart) in zip(at, axes) if is_apart)
        start, stop = number * part, (number + 1) * part
        start = max(start - start % chunk, ends.get(process, 0))
        stop = min(length, -(-stop // chunk) * chunk)
        count += max(0, stop - start)
        ends[process] = stop
    return count


def _splits(sizes: Sequence[int], dims: int) -> Iterator[tuple[int, ...]]:
    """The ways to deal digits of these sizes out to dimensions: into how many parts
    each is cut. The first dimension has the most of them first."""
    counts = collections.Counter(sizes)
    ways = [it.combinations_with_replacement(range(dims), n) for n in counts.values()]
    for chosen in it.product(*ways):
        yield tuple(
            math.prod(prime ** some.count(dim) for prime, some in zip(counts, chosen))
            for dim in range(dims)
        )


def _by_way_of(
    best: Route, array: CutArray, cut: tuple[int, ...], size: int
) -> Iterator[Route]:
    """The routes on which processes read what cutting into these parts gives them."""
    digits, padded = array.digits, array.padded
    used = [digit for axes in best.second for digit in axes]
    inner = [digits.sizes[i] for i in used if not digits.apart[i]]
    for more in _splits(inner, len(padded)):
        counts = [a * b for a, b in zip(cut, more)]
        if any(n % count for n, count in zip(padded, counts)):
            continue
        found = _exchanged(digits, best.second, counts)
        if found is None:
            continue
        second, exchanges = found
        first = second
        if array.touched(second) > size:
            first = _in_order(digits, used, cut, more)
        yield best._replace(
            first=first, second=second, exchanges=tuple(exchanges), read=size
        )


def _exchanged(
    digits: Digits, layout: Layout, counts: list[int]
) -> tuple[Layout, list[Exchange]] | None:
    """A layout with so many parts along each dimension, and the exchanges that lead
    from it to the one given."""
    now = list(layout)
    exchanges: list[Exchange] = []
    while True:
        has = [digits.count(axes) for axes in now]
        if has == counts:
            return tuple(now), exchanges[::-1]
        for fro, to in it.permutations(range(len(now)), 2):
            size = 0
            while size < len(now[fro]):
                axes = now[fro][len(now[fro]) - size - 1 :]
                count = digits.count(axes)
                gives = math.gcd(has[fro], counts[fro]) * count
                takes = math.gcd(has[to], counts[to]) * count
                if has[fro] % gives or counts[to] % takes:
                    break
                size += 1
            if size:
                axes = now[fro][len(now[fro]) - size :]
                now[fro] = now[fro][: len(now[fro]) - size]
                now[to] = (*now[to], *axes)
                exchanges.append(Exchange(axes, to, fro))
                break
        else:
            return None


def _in_order(
    digits: Digits, used: list[int], cut: tuple[int, ...], more: tuple[int, ...]
) -> Layout:
    """The layout with so many parts for processes, and in each so many for devices."""
    left = sorted(used)
    out = []
    for counts in zip(cut, more):
        axes = []
        for count, is_apart in zip(counts, (True, False)):
            for prime in _primes(count):
                digit = next(
                    i
                    for i in left
                    if digits.sizes[i] == prime and digits.apart[i] == is_apart
                )
                left.remove(digit)
                axes.append(digit)
        out.append(tuple(axes))
    return tuple(out)


def handed_on(route: Route) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Pairs of devices. One sends its part to the other, so that `first` becomes
    `second`. Devices are counted by the digits that cut anything."""
    used = tuple(sorted(digit for axes in route.first for digit in axes))
    every = [
        dict(zip(used, at))
        for at in it.product(*(range(route.digits.sizes[digit]) for digit in used))
    ]

    def parts(at: dict[int, int], layout: Layout) -> tuple[int, ...]:
        return tuple(_number(route.digits, axes, at) for axes in layout)

    to = {parts(at, route.second): i for i, at in enumerate(every)}
    return used, [(i, to[parts(at, route.first)]) for i, at in enumerate(every)]


def _number(digits: Digits, axes: tuple[int, ...], at: dict[int, int]) -> int:
    number = 0
    for digit in axes:
        number = number * digits.sizes[digit] + at[digit]
    return number
