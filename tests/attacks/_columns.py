"""The columns of an index of many leaves, and the pages of its digests."""

import base64
import functools as ft
from collections.abc import Callable
from typing import Any

import numpy as np

from . import attack, data, forge


KIND = "ocdbt-columns"

_attack = ft.partial(attack, kind=KIND)


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4").copy()


def text(values: Any) -> str:
    return base64.b64encode(np.asarray(values, "<u4").tobytes()).decode()


def alter(path: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the columns."""
    forge(path, lambda v: change(v["columns"]))


@_attack("open", "malformed column")
def order_beyond(path, outside):
    """Names are found at places that there are not."""
    alter(path, lambda c: c.update(order=text(numbers(c["order"]) + 99)))


@_attack("open", "malformed column")
def column_of_no_numbers(path, outside):
    """A column that is not base64."""
    alter(path, lambda c: c.update(template="\u00e9" + c["template"][1:]))


@_attack("open", "malformed column")
def names_that_are_not_ascii(path, outside):
    """A character that takes four bytes for each of the others."""
    alter(path, lambda c: c.update(names=c["names"] + "\U0001f600"))


@_attack("open", "differ in length")
def names_too_many(path, outside):
    """More names than templates."""
    alter(path, lambda c: c.update(names=c["names"] + " zz"))


@_attack("open", "template that it does not have")
def template_beyond(path, outside):
    """A template that is not in the table."""
    alter(path, lambda c: c.update(template=text(numbers(c["template"]) + 99)))


@_attack("open", "digests of pages")
def pages_too_few(path, outside):
    """The digest of a page is left out, and so is the check of the page."""
    forge(path, lambda v: v.update(digests=v["digests"][32:]))


@_attack("open", "no 'begins' of the right type")
def begin_in_no_file(path, outside):
    """A lane lies in a file that is not named."""
    alter(path, lambda c: c["begins"][0].__setitem__(3, 99))


@_attack("touch", "two leaves of one name")
def twin_names(path, outside):
    """Two leaves have one name, so that readers differ in which they take."""

    def change(c):
        names = c["names"].split(" ")
        names[names.index("list.1")] = "list.0"
        order = sorted(range(len(names)), key=names.__getitem__)
        c.update(names=" ".join(names), order=text(order))

    alter(path, change)


@_attack("read", "malformed pattern")
def pattern_without_end(path, outside):
    """The last pattern goes on behind the end of the column."""
    alter(path, lambda c: c.update(patterns=text([1, 0])))


@_attack("read", "malformed pattern")
def pattern_beyond(path, outside):
    """A pattern that there is not."""
    count = lambda c: len(numbers(c["template"]))
    alter(path, lambda c: c.update(pattern=text([7] * count(c))))


@_attack("read", "more than 8388608 runs")
def runs_very_many(path, outside):
    """One pattern of a million runs, which all leaves have."""
    rows = np.tile(np.asarray([1, 0]), 2**20 - 1).tolist()
    alter(path, lambda c: c.update(patterns=text([*rows, 0, 0])))


@_attack("read", "malformed pattern")
def runs_many(path, outside):
    """Eight million runs, of leaves that have a few chunks."""
    rows = np.tile(np.asarray([1, 0]), 2**18 - 1).tolist()
    alter(path, lambda c: c.update(patterns=text([*rows, 0, 0])))


@_attack("read", "without a place")
def lane_without_begin(path, outside):
    """A lane that lies nowhere."""
    alter(path, lambda c: c.update(begins=[]))


@_attack("read", "malformed row")
def begin_of_another_lane(path, outside):
    """A row for a run that another lane has."""
    alter(path, lambda c: c["begins"][0].__setitem__(0, 2**31))


@_attack("read", "at one place")
def leaves_at_one_place(path, outside):
    """A lane goes on where another leaf lies: little data, and many arrays."""
    alter(path, lambda c: c["begins"].append([0, 3, 0, 0, 0]))


@_attack("read", "missing")
def begin_far_beyond(path, outside):
    """All lies far behind the end of its file."""
    alter(path, lambda c: c["begins"][0].__setitem__(4, 2**50))


@_attack("read", "file of digests is damaged")
def pages_that_are_swapped(path, outside):
    """The digests of two chunks change places, so that these might do so too."""
    file = data(path) / "digests"
    rows = file.read_bytes()
    file.write_bytes(rows[16:32] + rows[:16] + rows[32:])
