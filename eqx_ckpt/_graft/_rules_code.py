"""Rules of a rename as Python, to paste."""

from collections.abc import Iterable, Mapping

from . import _name_rule
from ._name_rule import NameRule


def code_lines(
    rules: Iterable[NameRule], adapters: Mapping[str, str], names: Iterable[str]
) -> list[str]:
    """The call of `ec.rename` with these rules, and with rules that apply adapters:
    `adapters` has the code of each, by the new name of its leaf, which is one of these
    `names`."""
    rows = [f"    ({_raw(old)}, {_raw(new)})," for old, new in rules]
    # Leaves whose names differ only in numbers have one row, if they have one adapter.
    alike: dict[str, list[str]] = {}
    for name in names:
        pattern = _name_rule.make_rule(name, name, is_general=True).pattern
        alike.setdefault(pattern, []).append(name)
    for pattern, some in alike.items():
        codes = [adapters.get(name) for name in some]
        single = [_name_rule.make_rule(name, name).pattern for name in some]
        patterns = single if len({*codes}) > 1 else [pattern] * len(some)
        pairs = dict.fromkeys(zip(patterns, codes))
        rows += [f"    ({_raw(x)}, ec.adapters.{y})," for x, y in pairs if y]
    return ["ec.rename([", *rows, "])"] if rows else []


def _raw(text: str) -> str:
    """A text as Python, raw if that is shorter to read."""
    is_plain = text.isprintable() and '"' not in text and text[-1:] != "\\"
    if not is_plain:
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'
