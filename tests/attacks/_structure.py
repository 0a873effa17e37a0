"""The record of the tree in the index, of which `rebuild` makes the tree."""

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
    forge(path, lambda value: alter(value["tree"]))


def module(made):
    """The kind of the Module, and its row."""
    number = next(n for n, kind in enumerate(made["kinds"]) if kind[0] == "module")
    return made["kinds"][number], next(x for x in made["rows"] if x[0] == number)


def static(path, new):
    """Another value for the static field of the Module."""

    def alter(made):
        module(made)[1][1] = len(made["values"])
        made["values"].append(new)

    structure(path, alter)


def kind(path, at, new):
    """Another entry of the kind of the Module."""
    structure(path, lambda made: module(made)[0].__setitem__(at, new))


def row(path, change):
    """Another row of the tree itself."""
    structure(path, lambda made: change(made["rows"][-1]))


def add(made, *rows, values=()):
    """Rows before that of the tree, each of a kind, of values and of children. They
    are in the place of the `text`, which is a leaf."""
    top = made["rows"].pop()
    for kind, *row in rows:
        made["rows"].append([len(made["kinds"]), *row])
        made["kinds"].append(kind)
    made["values"] += values
    top[-1] = len(made["rows"]) - 1
    made["rows"].append(top)


def adding(refused, match, name, what, *rows, values=()):
    """Registers an attack that adds rows."""

    def make(path, outside):
        structure(path, lambda made: add(made, *rows, values=values))

    make.__doc__, make.__name__ = what, name
    attack(refused, match)(make)


# ---- What is named.


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


# ---- Kinds.


@attack("rebuild", "no class of that kind")
def function_as_type(path, outside):
    """A known function in the place of the class of a node."""
    kind(path, 2, "seal")


@attack("rebuild", "no class of that kind")
def class_of_another_kind(path, outside):
    """A known class that is no Module."""
    kind(path, 2, "Attack")


@attack("rebuild", "it has weight, bias, width")
def other_fields(path, outside):
    """Fields that the class does not have, as `__class__`."""
    kind(path, 4, ["__class__"])


@attack("rebuild", r"weight, bias, \\x1b\[2J; it has")
def field_with_escapes(path, outside):
    """A field whose name clears a terminal."""
    kind(path, 4, ["%1B%5B2J"])


@attack("rebuild", "`known` lacks")
def name_with_escapes(path, outside):
    """The name of a class, in characters that clear a terminal."""
    kind(path, 2, "\x1b[2J" * 10_000)


for _name, _what, _at, _new in (
    ("one_field_twice", "Two values of one field.", 3, ["bias", "bias"]),
    ("one_static_twice", "Two static fields of one name.", 4, ["width", "width"]),
    ("one_name_of_both", "A child and a static field of one name.", 4, ["bias"]),
    ("fields_of_no_name", "A kind whose fields are numbers.", 3, [1, 2]),
    ("fields_of_two_names", "A field that is a path.", 3, ["a.b", "../c"]),
    ("fields_unquoted", "A field whose name is not quoted.", 3, ["wei ght", "bias"]),
    ("a_true_number", "True, which Python takes for 1.", 3, True),
    ("fewer_than_none", "Fewer children than none.", 3, -2),
    ("a_billion_parts", "A number of children for a list of as many names.", 3, 10**9),
    ("class_of_no_name", "A class that is a list.", 2, ["Net"]),
    ("kind_of_no_kind", "A kind that is a method of the reader.", 0, "make"),
    ("kind_of_a_list", "A kind that cannot be a key.", 0, ["leaf"]),
):

    def _make(path, outside, at=_at, new=_new):
        kind(path, at, new)

    _make.__doc__, _make.__name__ = _what, _name
    attack("tree", "tree that is never saved")(_make)


adding(
    *("tree", "other static values than its own", "value_of_a_leaf"),
    "A leaf that is stored, and has a static value.",
    (["leaf", "", "", 0, ["x"]], 0),
)
adding(
    *("tree", "other static values than its own", "value_of_a_list"),
    "A list with a static value.",
    (["list", "", "", 1, ["x"]], 0, 0),
)
adding(
    *("tree", "keys that are not those of its children", "fewer_keys_than_children"),
    "A dict with fewer keys than children.",
    (["dict", "", "", 1, [], [], []], 0),
)


@attack("tree", "a dict with keys that nothing tells")
def hidden_values(path, outside):
    """Static values in a dict without keys, where nothing compares them."""

    def alter(made):
        made["kinds"][made["rows"][-1][0]][3] = len(made["rows"][-1]) - 1

    structure(path, alter)


# ---- Rows.


@attack("rebuild", "other names")
def leaves_of_another_node(path, outside):
    """The leaves of the Module in another order than they are named in."""
    kind(path, 3, ["bias", "weight"])


for _name, _what, _change in (
    ("node_in_itself", "A child that is the node itself.", lambda x: x.append(4)),
    ("node_before", "A child that comes later.", lambda x: x.__setitem__(1, 99)),
    (
        "no_child_before",
        "More of a child that there is not.",
        lambda x: x.insert(1, -1),
    ),
    ("row_of_no_kind", "A kind that there is not.", lambda x: x.__setitem__(0, 99)),
    ("kind_from_the_end", "A kind from the end.", lambda x: x.__setitem__(0, -1)),
    ("true_as_a_child", "A child whose number is true.", lambda x: x.append(True)),
    ("empty_row", "A row of nothing.", lambda x: x.clear()),
    (
        "many_children",
        "A billion children in a few bytes.",
        lambda x: x.append(-(10**9)),
    ),
    ("fewer_leaves", "A tree without some of its leaves.", lambda x: x.pop()),
    ("other_leaves", "One with more of them.", lambda x: x.__setitem__(2, 3)),
):

    def _make(path, outside, change=_change):
        row(path, change)

    _make.__doc__, _make.__name__ = _what, _name
    attack("tree", "tree that is never saved")(_make)


@attack("tree", "a value that there is not|malformed row")
def value_that_is_not(path, outside):
    """A value by a number that counts from the end."""
    structure(path, lambda made: module(made)[1].__setitem__(1, -1))


adding(
    *("tree", "more nodes and static values than are read", "billions_of_nodes"),
    "Nodes of two alike each, forty in each other.",
    (["none"],),
    *((["tuple", "", "", 2], n, -1) for n in range(4, 44)),
)
adding(
    *("tree", "more nodes and static values than are read", "millions_of_nodes"),
    "A child that is there four million times, in a few bytes.",
    (["none"],),
    (["tuple", "", "", 2**22 - 100], 4, 1 - 2**22 + 100),
)
adding(
    *("tree", "as many leaves as there are", "billions_of_leaves"),
    "Leaves of two alike each, forty in each other.",
    (["tuple", "", "", 2], 0, -1),
    *((["tuple", "", "", 2], n, -1) for n in range(4, 44)),
)
adding(
    *("tree", "more nodes and static values than are read", "long_names_again"),
    "A long name above many nodes, in the names of all of them.",
    (["none"],),
    (["tuple", "", "", 2**16], 4, 1 - 2**16),
    (["dict", "", "", ["a" * 20_000]], 5),
)
adding(
    *("tree", "deep|never saved", "deep_tree"),
    "Ten thousand nodes in each other.",
    (["none"],),
    *((["tuple", "", "", 1], n) for n in range(4, 10_004)),
)


@attack("tree", "tree that is never saved")
def unhashable_key(path, outside):
    """A dict whose keys are lists, and as many as it has children, or not."""
    keys = [[1], [2], [3], [4]]
    alter = lambda made: made["kinds"][made["rows"][-1][0]].extend([[], [], keys])
    structure(path, alter)


@attack("rebuild", "a list is a key")
def unhashable_keys(path, outside):
    """A dict whose keys are lists."""
    keys = [[1], [2], [3], [4], [5]]
    alter = lambda made: made["kinds"][made["rows"][-1][0]].extend([[], [], keys])
    structure(path, alter)


# ---- Values.


adding(
    *("tree", "State without its markers", "state_of_no_markers"),
    "A State whose markers are a number.",
    (["state", "", "", 1], 1, 0),
    values=[{"markers": 7}],
)
adding(
    *("tree", "State without its markers", "state_of_fewer_markers"),
    "A State with a marker for none of its entries.",
    (["state", "", "", 1], 1, 0),
    values=[{"markers": []}],
)
adding(
    *("tree", "malformed marker", "marker_of_no_kind"),
    "A marker that is a dict.",
    (["state", "", "", 1], 1, 0),
    values=[{"markers": [{}]}],
)


def valued(match, name, what, value):
    """Registers an attack by the value of a static field."""

    def make(path, outside):
        static(path, value)

    make.__doc__, make.__name__ = what, name
    attack("rebuild", match)(make)


def _deep(count):
    deep: Any = 1
    for _ in range(count):
        deep = [deep]
    return deep


_NEVER = "is never saved"
_TWO = {"tuple": [], "list": []}
valued(_NEVER, "value_of_no_kind", "A value of two kinds.", _TWO)
valued(
    _NEVER, "value_of_no_dtype", "Bytes as an address.", {"scalar": ["object", "41"]}
)
valued(_NEVER, "deep_value", "Lists in each other, until no stack is left.", _deep(200))
valued(_NEVER, "huge_dtype", "A very long number.", {"dtype": "float" + "9" * 1000})
valued(_NEVER, "kind_of_no_value", "A kind that there is not.", {"eval": "1"})
valued(_NEVER, "empty_default", "The default of no parameter.", {"default": []})
valued(_NEVER, "empty_object", "An object of no class.", {"object": []})
valued(
    "Give them by `replace`",
    "text_with_escapes",
    "What was not saved, told in characters that clear a terminal.",
    {"unknown": ["", "\x1b[2J" + "a" * 10_000]},
)


@attack("tree", "nested more than 250 deep")
def deeper_value(path, outside):
    """Lists in each other, until a walk that calls itself overflows."""
    static(path, _deep(900))


@attack("tree", "a static value that is too long")
def long_value(path, outside):
    """A text that is longer than any that is saved."""
    static(path, "a" * 10**5)


@attack("tree", "malformed tree")
def tree_that_is_none(path, outside):
    """A number in the place of the tree."""
    forge(path, lambda value: value.update(tree=7))


for _field in ("kinds", "values", "rows"):

    def _make(path, outside, field=_field):
        structure(path, lambda made: made.pop(field))

    _make.__doc__, _make.__name__ = f"No {_field}.", f"tree_without_{_field}"
    attack("tree", "tree that is never saved")(_make)


@attack("tree", "has no rows")
def tree_of_no_rows(path, outside):
    """A tree of nothing."""
    structure(path, lambda made: made["rows"].clear())
