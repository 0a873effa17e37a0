"""Where an index says that chunks lie, and the pages of its digests."""

from . import attack, data, forge


@attack("open", "digests of pages")
def pages_too_few(path, outside):
    """The digest of a page is left out, and so is the check of the page."""
    forge(path, lambda v: v.update(digests=v["digests"][32:]))


@attack("open", "no 'begins' of the right type")
def begin_in_no_file(path, outside):
    """A lane lies in a file that is not named."""
    forge(path, lambda v: v["begins"][0].__setitem__(3, 99))


@attack("open", "no 'begins' of the right type")
def begin_below_zero(path, outside):
    """A lane that lies before its file."""
    forge(path, lambda v: v["begins"][0].__setitem__(4, -64))


@attack("open", "no 'begins' of the right type")
def begin_beyond_64_bits(path, outside):
    """An offset that no C integer holds."""
    forge(path, lambda v: v["begins"][0].__setitem__(4, 2**63))


@attack("open", "malformed row")
def begin_that_is_not_aligned(path, outside):
    """A lane from an offset on at which nothing begins."""
    forge(path, lambda v: v["begins"][0].__setitem__(4, 8))


@attack("open", "no 'patterns' of the right type")
def lane_beyond_32_bits(path, outside):
    """A lane of a number that a table of 32 bits would cut off."""
    forge(path, lambda v: v["patterns"][0].__setitem__(1, 2**32))


@attack("touch", "two leaves of one name")
def twin_names(path, outside):
    """Two leaves have one name, so that readers differ in which they take."""
    forge(path, lambda v: v["names"].__setitem__(v["names"].index("list.1"), "list.0"))


@attack("read", "malformed pattern")
def pattern_without_end(path, outside):
    """The last pattern goes on behind the end of the column."""
    forge(path, lambda v: v.update(patterns=[[1, 0]]))


@attack("read", "malformed pattern")
def pattern_beyond(path, outside):
    """A pattern that there is not."""
    forge(path, lambda v: v.update(pattern=[7] * len(v["template"])))


@attack("read", "more than 8388608 runs")
def runs_very_many(path, outside):
    """One pattern of very many runs, which very many leaves have."""

    def alter(v):
        v["patterns"] = [[1, 0]] * 2**14 + [[0, 0]]
        v["names"] += [f"more{i}" for i in range(600)]
        v["template"] += [0] * 600
        del v["tree"]

    forge(path, alter)


@attack("read", "malformed pattern")
def runs_many(path, outside):
    """Over a million runs, of leaves that have a few chunks."""
    forge(path, lambda v: v.update(patterns=[[1, 0]] * (2**17 - 1) + [[0, 0]]))


@attack("read", "without a place")
def lane_without_begin(path, outside):
    """A lane that lies nowhere."""
    forge(path, lambda v: v.update(begins=[]))


@attack("read", "malformed row")
def begin_of_another_lane(path, outside):
    """A row for a run that another lane has."""
    forge(path, lambda v: v["begins"][0].__setitem__(0, 2**30))


@attack("read", "at one place")
def leaves_at_one_place(path, outside):
    """A lane goes on where another leaf lies: little data, and many arrays."""
    forge(path, lambda v: v["begins"].append([0, 3, 0, 0, 0]))


@attack("read", "missing")
def begin_far_beyond(path, outside):
    """All lies far behind the end of its file."""
    forge(path, lambda v: v["begins"][0].__setitem__(4, 2**50))


@attack("read", "file of digests is damaged")
def pages_that_are_swapped(path, outside):
    """The digests of two chunks change places, so that these might do so too."""
    file = data(path) / "digests"
    rows = file.read_bytes()
    file.write_bytes(rows[16:32] + rows[:16] + rows[32:])
