"""Texts that are safe to print: escaped, bounded; sizes for people."""

from collections.abc import Iterable, Sequence


def escape(text: str) -> str:
    """`text` with control characters and what terminals act on spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bounded(line: str, most: int = 1000) -> str:
    """A line of a message, escaped, without the middle of one that is too long: names
    of leaves may be of any length."""
    line = escape(line)
    if len(line) <= most:
        return line
    return f"{line[: most // 2]} ... {line[-(most // 2) :]}"


def cut(text: str, most: int) -> str:
    """A text of at most so many letters, and dots if there are more."""
    return text if len(text) <= most else text[:most] + "..."


def some(lines: Iterable[str], most: int = 2**14) -> list[str]:
    """The first lines of a message, each `bounded`, of about so many letters in all,
    and how many there are more."""
    out: list[str] = []
    count = 0
    for count, line in enumerate(lines, 1):
        if most > 0:
            out.append(bounded(line))
            most -= len(out[-1])
    return [*out, f"    ... and {count - len(out)} more"] if count > len(out) else out


def first(lines: Sequence[str], most: int, indent: str = "  ") -> list[str]:
    """The first lines, so many at most, and how many there are more."""
    more = len(lines) - most
    return [*lines[:most], *[f"{indent}... and {more} more"] * (more > 0)]


def message(lines: Iterable[str]) -> str:
    """The text of an error or a report: at most some 16,000 letters, however long the
    names in it are."""
    return "\n".join(some(lines))


def rate(nbytes: int, seconds: float) -> str:
    """Amount and time of some work: `1.2 GiB in 0.97 s, 1.2 GiB/s`."""
    took = f"{size(nbytes)} in {seconds:.3g} s"
    return f"{took}, {size(int(nbytes / seconds))}/s" if seconds > 0 else took


def size(nbytes: int) -> str:
    """A number of bytes for people: `1.2 MiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    number = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        number /= 1024
        if round(number, 1) < 1024 or unit == "PiB":
            break
    return f"{number:.1f} {unit}"
