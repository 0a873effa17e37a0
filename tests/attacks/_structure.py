"""The structure in the index, of which `rebuild` makes the tree."""

import os
from typing import Any

from . import attack, forge


PWNED: list[str] = []


class _Magic(type):
    """Classes that have whatever is asked for."""

    def __getattr__(cls, name: str) -> Any:
        PWNED.append(name)
        return os.system


class Magic(metaclass=_Magic):
    @property
    def area(self) -> int:
        PWNED.append("area")
        return 1


system = os.system  # As a module has it that imports it.


def structure(path, alter):
    forge(path, lambda value: alter(value["structure"]))


def static(path, new):
    """Another value for the static field of the Module."""

    def alter(made):
        row = next(row for row in made["nodes"] if row[0] == "module")
        row[3] = [new]

    structure(path, alter)


def add(path, *rows):
    """Rows between the children of the tree and itself, the last of which it gets in
    the place of its last child."""

    def alter(made):
        top = made["nodes"].pop()
        made["nodes"] += rows
        top[1] = [*top[1][:-1], len(made["nodes"]) - 1]
        made["nodes"].append(top)

    structure(path, alter)


@attack("rebuild", "`known` lacks these.*\n.*os[.]system ")
def named_os_system(path, outside):
    """A function of another module, that the known module has imported."""
    static(path, {"name": ["os", "system"]})


@attack("rebuild", "`known` lacks these.*\n.*attacks[.]system ")
def named_as_if_its_own(path, outside):
    """The same, as if it were of the known module."""
    static(path, {"name": ["attacks", "system"]})


@attack("rebuild", "`known` lacks these.*\n.*builtins[.]eval ")
def named_eval(path, outside):
    """A builtin, to which every module leads."""
    static(path, {"partial": [{"name": ["builtins", "eval"]}, ["1"], []]})


@attack("rebuild", "`known` lacks these.*\n.*attacks[.]__builtins__[.]eval ")
def named_by_builtins(path, outside):
    """The same, by the attribute that it has."""
    static(path, {"name": ["attacks", "__builtins__.eval"]})


@attack("rebuild", "`known` lacks these.*\n.*attacks[.]json[.]loads ")
def named_through_a_module(path, outside):
    """A function in a module that the known one has imported."""
    static(path, {"name": ["attacks", "json.loads"]})


@attack("rebuild", "`known` lacks these.*\n.*Magic[.]anything ")
def named_by_a_metaclass(path, outside):
    """An attribute that a class makes up when it is asked."""
    static(path, {"name": ["attacks._structure", "Magic.anything"]})


@attack("rebuild", "`known` lacks these.*\n.*Magic[.]area ")
def named_property(path, outside):
    """A property, which is code that an attribute runs."""
    static(path, {"name": ["attacks._structure", "Magic.area"]})


@attack("rebuild", "`known` lacks these.*\n.*Magic[.]__init__ ")
def named_slot(path, outside):
    """What every class has of `object`."""
    static(path, {"name": ["attacks._structure", "Magic.__init__"]})


@attack("rebuild", "no class of that kind")
def function_as_type(path, outside):
    """A known function in the place of the class of a node."""
    structure(path, lambda v: v["types"][0].__setitem__(1, "seal"))


@attack("rebuild", "no class of that kind")
def class_of_another_kind(path, outside):
    """A known class that is no Module."""
    structure(path, lambda v: v["types"][0].__setitem__(1, "Attack"))


@attack("rebuild", "it has weight, bias, width")
def other_fields(path, outside):
    """Fields that the class does not have, as `__class__`."""
    structure(path, lambda v: v["types"][0].__setitem__(3, ["__class__"]))


@attack("rebuild", "two fields of one name")
def one_field_twice(path, outside):
    """Two values of one field."""
    structure(path, lambda v: v["types"][0].__setitem__(2, ["bias", "bias"]))


@attack("open", "no 'types' of the right type")
def fields_of_no_name(path, outside):
    """A type whose fields are numbers."""
    structure(path, lambda v: v["types"][0].__setitem__(2, [1, 2]))


@attack("rebuild", "other names")
def leaves_of_another_node(path, outside):
    """The leaves of the Module in another order than they are named in."""
    structure(path, lambda v: v["types"][0].__setitem__(2, ["bias", "weight"]))


@attack("rebuild", "malformed node")
def node_in_itself(path, outside):
    """A node that is a child of itself."""
    structure(path, lambda v: v["nodes"][-1].__setitem__(1, [len(v["nodes"]) - 1]))


@attack("rebuild", "no known kind")
def node_of_no_kind(path, outside):
    """A kind that is a method of the reader."""
    add(path, ["make", []])


@attack("rebuild", "malformed node")
def number_as_a_bool(path, outside):
    """A child whose number is true."""
    add(path, ["tuple", [True]])


@attack("rebuild", "more nodes and values than are made")
def billions_of_nodes(path, outside):
    """Nodes of two alike each, forty in each other."""
    start = []

    def alter(made):
        start.append(len(made["nodes"]))
        made["nodes"].insert(-1, ["tuple", []])
        for n in range(40):
            made["nodes"].insert(-1, ["tuple", [start[0] - 1 + n, -1]])

    structure(path, alter)


@attack("rebuild", "more nodes and values than are made")
def many_children(path, outside):
    """A child that is there a billion times, in a few bytes."""

    def alter(made):
        number = len(made["nodes"])
        made["nodes"].insert(-1, ["none", []])
        made["nodes"].insert(-1, ["tuple", [number - 1, -(10**9)]])

    structure(path, alter)


@attack("rebuild", "not as many leaves")
def fewer_leaves(path, outside):
    """A tree without some of the leaves that are stored."""
    structure(path, lambda v: v["nodes"][-1].__setitem__(1, [0, -4]))


@attack("rebuild", "a list is a key|other names|not as many")
def unhashable_key(path, outside):
    """A dict whose keys are lists."""
    keys = [[1], [2], [3], [4], [5]]
    structure(path, lambda v: v["nodes"][-1].__setitem__(2, keys))


@attack("rebuild", "is never saved")
def value_of_no_kind(path, outside):
    """A value of two kinds, which Python would see as one dict."""
    static(path, {"tuple": [], "list": []})


@attack("rebuild", "is never saved")
def value_of_no_dtype(path, outside):
    """A scalar of objects: its bytes would be an address."""
    static(path, {"scalar": ["object", "41" * 8]})


@attack("rebuild", "is never saved")
def deep_value(path, outside):
    """Lists in each other, until Python has no stack left."""
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    static(path, deep)


@attack("rebuild", "is never saved")
def huge_range(path, outside):
    """A tuple of a dtype's name that is very long."""
    static(path, {"dtype": "float" + "9" * 1000})


@attack("rebuild", "Give them by `replace`")
def text_with_escapes(path, outside):
    """What was not saved, told in characters that clear a terminal."""
    static(path, {"unknown": "\x1b[2J" + "a" * 100_000})


@attack("rebuild", "`known` lacks")
def name_with_escapes(path, outside):
    """The same in the name of a class."""
    structure(path, lambda v: v["types"][0].__setitem__(1, "\x1b[2J" * 10_000))


@attack("open", "malformed structure")
def structure_that_is_none(path, outside):
    """A number in the place of the structure."""
    forge(path, lambda value: value.update(structure=7))
