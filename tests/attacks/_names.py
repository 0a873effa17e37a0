"""The names of leaves: they become paths, keys of trees, and text on a terminal."""

from . import attack, forge, place, template
from ._structure import static


def rename(path, new, old="net.bias"):
    forge(path, lambda v: v["names"].__setitem__(place(v, old), new))


def _names():
    bad = {
        "up": ("../../outside/canary", "Leads out of the checkpoint by `..`."),
        "absolute": ("/etc/passwd", "Is an absolute path."),
        "backslash": ("net.bi\\as", "Has a backslash, a separator to some."),
        "slash": ("net.bi/as", "Has a separator that makes a directory of it."),
        "nul": ("net.bi\0as", "Has a NUL, at which C ends a path."),
        "empty": ("", "Is empty: the directory itself."),
        "empty_part": ("net..bias", "Has an empty component."),
        "dots": ("..", "Is the directory above."),
        "newline": ("net.bias\n", "Ends in a newline, which `$` of a pattern lets by."),
        "long": ("net." + "b" * 40_000, "Is longer than any file name."),
        "reserved": ("manifest.bias", "Is the name of one of our own files."),
        "encoded": ("net.%62ias", "Encodes what needs no encoding: a second spelling."),
        "lower": ("net.%c3%a9", "Encodes in small letters: a second spelling."),
        "raw": ("net.bi\u00e4s", "Is not encoded, composed as by NFC."),
        "raw_nfd": ("net.bia\u0308s", "Is not encoded, decomposed as by NFD."),
        "fullwidth": ("net\uff0ebias", "Has a character that normalises to a dot."),
        "not_utf_8": ("net.%FF%FE", "Encodes bytes that are not UTF-8."),
        "escapes": ("net.\x1b[2J\x1b]0;owned\x07", "Acts on a terminal."),
        "bidi": ("net.\u202esaib", "Is shown backwards."),
        "root": ("%root.bias", "Is the whole tree, and a part of it."),
        "deep": (".".join("a" * 10_000), "Is ten thousand nodes deep."),
    }
    for key, (name, what) in bad.items():

        def make(path, outside, name=name):
            rename(path, name)
            if name.count(".") > 1:
                kinds = "k" * (name.count(".") + 1)
                forge(path, lambda v: template(v, name, keys=kinds))

        make.__name__, make.__doc__ = f"name_{key}", what
        attack("touch")(make)


_names()


@attack("touch", "two leaves of one name|a leaf and a node")
def two_of_one_name(path, outside):
    """Two leaves of one name: which one is loaded?"""
    rename(path, "text", "key")


@attack("tree", "a leaf and a node")
def leaf_and_node(path, outside):
    """A leaf that is also a node: `net` and `net.weight`."""
    rename(path, "net", "key")


@attack("tree", "keys of two kinds at 'net'")
def keys_of_two_kinds(path, outside):
    """A child of the root that is an attribute and the entry of a dict."""
    rename(path, "net.text", "text")
    forge(path, lambda v: template(v, "net.text", keys="aa"))


@attack("touch", "largest index")
def index_beyond_all(path, outside):
    """An item of a list so far back that the list does not fit into memory."""
    rename(path, "list." + "9" * 12, "list.6")


@attack("tree", "mostly gaps")
def gaps(path, outside):
    """The hundred-millionth item of a list that has no others."""
    rename(path, "list.99999999", "list.6")


@attack("touch", "not an index")
def index_in_other_digits(path, outside):
    """Digits that Python's `int` takes, and that are not ASCII."""
    rename(path, "list.\u0666", "list.6")


@attack("read", "missing", kind="zarr")
def case_fold(path, outside):
    """A leaf `KEY` beside `key`: where case is folded, the directory of the other."""
    rename(path, "KEY", "text")


@attack("touch", "malformed template")
def escapes_in_the_implementation(path, outside):
    """A PRNG implementation whose name acts on a terminal when the tree is shown."""
    forge(path, lambda v: template(v, "key", impl="\x1b[31mfry"))


@attack("touch", "does not know the PRNG")
def unknown_implementation(path, outside):
    """A PRNG implementation that JAX does not have."""
    forge(path, lambda v: template(v, "key", impl="os.system"))


@attack(None)
def escapes_in_the_metadata(path, outside):
    """Metadata and versions that act on a terminal."""

    def alter(v):
        v["metadata"] = {"\x1b[2J": "\x1b]0;owned\x07\u202e"}
        v["writer"]["jax"] = "\x1b[31m"

    forge(path, alter)


@attack("load", "static")
def escapes_in_a_static_field(path, outside):
    """A static field that differs, and whose value acts on a terminal in the error."""
    static(path, "\x1b[2J\u202e" * 10**3)
