"""Errors of Python's calls in the words of the command line."""

import re
import shlex

import click


# Arguments that options have another name for.
_OPTIONS = {"dtype": "cast"}
# Of texts that speak of Python, those of the command line.
_TEXTS = (
    (re.compile(", and `overwrite=False`"), ". Pass `--overwrite`"),
    (re.compile(r", or say which there are to be, `functions=\{\.\.\.\}`"), ""),
    (re.compile('`functions="drop"`'), "`--drop-functions`"),
    (re.compile("kept, `functions={.*?}`, or `--drop"), "kept, or `--drop"),
    (re.compile(r"Call `(un)?pin\((\d+)\)` before"), r"Pass `--\1pin \2`"),
    (re.compile(r": see `\.tree`"), ": see `ls`"),
    (re.compile(r"`where` leaves them out"), "`--node` takes a node without them"),
    (re.compile(r"`ec.tree_serialise_leaves`, or `ec.convert`"), "`eqx-ckpt convert`"),
    (re.compile('`static="ignore"`'), "`--static '*'`"),
    (re.compile(r"takes a `base`"), "takes a `--base`"),
    (re.compile(r"Pass `like=`, (.*?)\."), r"Python reads it, given \1."),
    (re.compile(r"`jnp\.(\w+)`"), r"`\1`"),
)
_leading_name = re.compile(r"`(\w+)`(?= (?:must|of|is) )")
_given_value = re.compile(r"`(\w+)=([^`]*)`")


def worded(text: str, command: click.Command | None) -> str:
    """The text of an error, with options where Python has arguments."""
    for pattern, new in _TEXTS:
        text = pattern.sub(new, text)
    options = {name for x in command.params for name in x.opts} if command else set()

    def option(name: str) -> str | None:
        spelt = "--" + _OPTIONS.get(name, name).rstrip("_").replace("_", "-")
        return spelt if spelt in options else None

    def first(found: re.Match[str]) -> str:
        return f"`{option(found[1])}`" if option(found[1]) else found[0]

    def given(found: re.Match[str]) -> str:
        spelt, value = option(found[1]), found[2]
        if spelt is None:
            return found[0]
        values = re.findall(r"""['"]([^'"]*)['"]""", value) or [value]
        if values[0] in ("", "True"):
            return f"`{spelt}`"
        return f"`{' '.join(f'{spelt} {shlex.quote(x)}' for x in values)}`"

    return _given_value.sub(given, _leading_name.sub(first, text, count=1))
