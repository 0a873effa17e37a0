"""Processes load a tree of any kinds of leaves."""

from support.leaves_of_all import check_a_load
from support.member import path


check_a_load(path / "c")
